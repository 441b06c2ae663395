"""Limits: how much of the world's bytes is read before saying no, and which values it may state.

A message comes from a broker that others write to, so each measure that costs memory, stack or
time grows only up to a figure stated here, and each value of a header or option is one that everything
behind can hold: it fits 64 bits, a frame, a key, a name of AMQP, a date. The sender keeps to the same
figures: a call that every worker would refuse fails where it was made, in front of the one who can
change it. Arguments of tasks are not meant: they may hold whole numbers of any length up to a limit.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from umbel.errors import TooLarge

NAME_MAX_BYTES = 255  # of a queue, an id, the name of a header: AMQP has no room for more
TASK_MAX_CHARS = 1024  # of the name of a task
HEADERS_MAX_BYTES = 100 * 1024  # RabbitMQ holds 128 KiB, with the reason of a dead letter
HEADER_TEXT_MAX_CHARS = 10_000  # of arguments as headers show them
TIME_LIMIT_MAX_S = 10 * 365 * 86_400  # ten years
DELAY_MAX_S = 100 * 365 * 86_400  # a hundred years: with any moment of ours still before the year 9999
COUNT_MAX = 2**31 - 1  # of retries, of places in a group
PRIORITY_MAX = 255  # as AMQP has it; of what is sent here, 9
EXPIRATION_MAX_MS = 2**53  # whole numbers up to here are exact in every language

Count = Annotated[int, Meta(ge=0, le=COUNT_MAX)]
Priority = Annotated[int, Meta(ge=-COUNT_MAX, le=COUNT_MAX)]  # a broker takes the nearest that it has
ExpirationMs = Annotated[int, Meta(ge=0, le=EXPIRATION_MAX_MS)]
TimeLimit = (
    Annotated[int, Meta(ge=0, le=TIME_LIMIT_MAX_S)] | Annotated[float, Meta(ge=0, le=TIME_LIMIT_MAX_S)]
)
Name = Annotated[str, Meta(max_length=NAME_MAX_BYTES)]
Moment = Annotated[str, Meta(max_length=64)]
TaskName = Annotated[str, Meta(max_length=TASK_MAX_CHARS)]


class Limits(msgspec.Struct, frozen=True):
    """`size_max_bytes` counts what is decoded, so after decompression.

    `number_digits_max` is for whole numbers, whose conversion takes time that grows with the
    square of the digits; a minus sign counts as one. It can be lowered, but not raised: 4300 is
    built into Python and msgspec.
    """

    size_max_bytes: int = 64 * 1024 * 1024
    depth_max: int = 64
    number_digits_max: int = 4300


DEFAULT_LIMITS = Limits()
HEADER_LIMITS = Limits(size_max_bytes=HEADERS_MAX_BYTES)


def check_size(what: str, size_bytes: int, limits: Limits) -> None:
    if size_bytes > limits.size_max_bytes:
        raise too_large(what, size_bytes, limits)


def too_large(what: str, size_bytes: int, limits: Limits, remedy: str = "") -> TooLarge:
    return TooLarge(f"{what} has {size_bytes} bytes; the limit is {limits.size_max_bytes}{remedy}")


def too_deep(what: str, limits: Limits) -> TooLarge:
    return TooLarge(f"{what} is nested deeper than the limit of {limits.depth_max} levels")


def too_long_a_number(what: str, digits: int, limits: Limits) -> TooLarge:
    return TooLarge(f"{what} has {digits} digits; the limit is {limits.number_digits_max}; send it as text")


def is_name(text: str, *, max_bytes: int = NAME_MAX_BYTES) -> bool:
    """Whether the text can name a queue or be an id in every broker and store.

    No NUL, at which SQLite ends a text, and nothing that UTF-8 cannot carry.
    """
    if text.isascii():
        return len(text) <= max_bytes and "\0" not in text
    try:
        return len(text.encode()) <= max_bytes and "\0" not in text
    except UnicodeEncodeError:
        return False
