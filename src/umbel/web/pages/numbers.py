"""Numbers as a URL has them."""

DIGITS_MAX = 15  # as many as every reader of JSON keeps


def number_of(text: str) -> int:
    """0 for what is no number, or one that nothing here can have."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= DIGITS_MAX else 0
