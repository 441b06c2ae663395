"""Records: what workers store in the broker in addition to messages: revoked tasks and the scheduler's state.

A `Revoke` is one entry of the durable record of tasks that must not start. `Marks` and `Pauses` are stored in
the scheduler's leases: the last slot of each entry that was sent or skipped, and the names of paused entries.
"""

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from umbel.wire.values import UNREADABLE

# ---- revoke ----------------------------------------------------------------------------------------


class Revoke(msgspec.Struct, frozen=True, gc=False):
    """One entry of the durable revoke record: this task, or tasks with this stamped header.

    An entry whose end equals its beginning cancels the earlier entry. It needs no extra space. Readers get it
    until it is swept, so that those that have read the earlier entry can forget it.
    """

    task_id: str
    recorded_at: float
    expires_at: float
    header: str = ""  # "key=value"; if set, task_id is empty

    def is_news(self, now: float) -> bool:
        """Return whether a reader of the record must know of the entry."""
        return self.expires_at > now or self.takes_back

    @property
    def takes_back(self) -> bool:
        """Return whether the entry cancels an earlier one."""
        return self.expires_at <= self.recorded_at


# ---- schedule --------------------------------------------------------------------------------------

T = TypeVar("T")


class Marks(msgspec.Struct, frozen=True):
    """By entry: the last slot that was sent or skipped, in microseconds since 1970."""

    marks: dict[str, int] = {}


class Pauses(msgspec.Struct, frozen=True):
    """The names of the entries that are paused."""

    paused: list[str] = []


def encode_marks(marks: Mapping[str, int]) -> bytes:
    """Encode the marks for the scheduler's lease."""
    return msgspec.json.encode(Marks(dict(marks)))


def decode_marks(data: bytes) -> Mapping[str, int]:
    """Decode the marks; unreadable data counts as empty, so every entry starts over."""
    return _decoded(data, Marks).marks


def encode_pauses(paused: frozenset[str]) -> bytes:
    """Encode the names of paused entries for their lease."""
    return msgspec.json.encode(Pauses(sorted(paused)))


def decode_pauses(data: bytes) -> frozenset[str]:
    """Decode the names of paused entries; unreadable data counts as empty."""
    return frozenset(_decoded(data, Pauses).paused)


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE:
        return kind()
