"""Where results live."""
