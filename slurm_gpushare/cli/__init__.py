"""The gpushare command: each subcommand parses, calls the library, prints. Nothing is decided here."""
