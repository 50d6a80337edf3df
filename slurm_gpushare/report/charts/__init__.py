"""Pictures for the report's pages: numbers in, SVG text out."""
