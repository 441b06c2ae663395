"""Tags: whose claim, whose dead letter is it? One of the two is marked, and never taken for the other's."""

from collections.abc import Sequence

from umbel.brokers.interface import Tag

_TEXT, _NUMBER = "store:s:", "store:i:"
_LETTER = "message:"


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


def of_messages(letter_id: int | str) -> str:
    """The id of a dead letter in the broker of messages."""
    return f"{_LETTER}{letter_id}"


def whose(letter_ids: Sequence[int | str]) -> tuple[list[int | str], list[int | str]]:
    """Those of the broker of messages, as it knows them, and those of the store."""
    there: list[int | str] = []
    here: list[int | str] = []
    for one in letter_ids:
        if isinstance(one, str) and one.startswith(_LETTER):
            there.append(one.removeprefix(_LETTER))
        else:
            here.append(one)
    return there, here
