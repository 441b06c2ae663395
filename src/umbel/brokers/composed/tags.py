"""Tags: whose claim is it? Those of the store are marked, so that none is taken for the other's."""

from umbel.brokers.interface import Tag

_TEXT, _NUMBER = "store:s:", "store:i:"


def of_store(tag: Tag) -> str:
    return f"{_NUMBER}{tag}" if isinstance(tag, int) else f"{_TEXT}{tag}"


def in_store(tag: Tag) -> Tag | None:
    """As the store knows it; None: it is the other's."""
    if isinstance(tag, str):
        if tag.startswith(_TEXT):
            return tag.removeprefix(_TEXT)
        if tag.startswith(_NUMBER):
            return int(tag.removeprefix(_NUMBER))
    return None
