"""What the scheduler leaves in its leases: the marks of what is settled, and the names that are paused."""

from collections.abc import Mapping
from typing import TypeVar

import msgspec

T = TypeVar("T")


class Marks(msgspec.Struct, frozen=True):
    """By entry: the last slot that is settled, in microseconds since 1970."""

    marks: dict[str, int] = {}


class Pauses(msgspec.Struct, frozen=True):
    paused: list[str] = []


def encode_marks(marks: Mapping[str, int]) -> bytes:
    return msgspec.json.encode(Marks(dict(marks)))


def decode_marks(data: bytes) -> Mapping[str, int]:
    """Unreadable data counts as empty: every entry starts over."""
    return _decoded(data, Marks).marks


def encode_pauses(paused: frozenset[str]) -> bytes:
    return msgspec.json.encode(Pauses(sorted(paused)))


def decode_pauses(data: bytes) -> frozenset[str]:
    return frozenset(_decoded(data, Pauses).paused)


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError:
        return kind()
