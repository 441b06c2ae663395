"""Limits: how much of the world's bytes is read before saying no.

A message comes from a broker that others write to, so each measure that costs memory, stack or
time grows only up to a figure stated here. The sender keeps to the same figures: a call that
every worker would refuse fails where it was made, in front of the one who can change it.
"""

from dataclasses import dataclass

from umbel.errors import TooLarge


@dataclass(frozen=True, slots=True)
class Limits:
    """`size_max_bytes` counts what is decoded, so after decompression.

    `number_digits_max` is for whole numbers, whose conversion takes time that grows with the
    square of the digits; a minus sign counts as one. It can be lowered, but not raised: 4300 is
    built into Python and msgspec.
    """

    size_max_bytes: int = 64 * 1024 * 1024
    depth_max: int = 64
    number_digits_max: int = 4300


DEFAULT_LIMITS = Limits()


def check_size(what: str, size_bytes: int, limits: Limits) -> None:
    if size_bytes > limits.size_max_bytes:
        raise TooLarge(f"{what} has {size_bytes} bytes; the limit is {limits.size_max_bytes}")


def too_deep(what: str, limits: Limits) -> TooLarge:
    return TooLarge(f"{what} is nested deeper than the limit of {limits.depth_max} levels")


def too_long_a_number(what: str, digits: int, limits: Limits) -> TooLarge:
    return TooLarge(f"{what} has {digits} digits; the limit is {limits.number_digits_max}")
