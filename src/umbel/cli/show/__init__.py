"""How commands print: data to stdout, all else to stderr."""
