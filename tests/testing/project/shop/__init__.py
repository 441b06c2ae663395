"""A shop, as somebody who uses Umbel writes it."""
