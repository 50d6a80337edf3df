"""A site's set-up: what to write where (configure), and whether it is right (doctor)."""
