"""Owners: the workers that claim messages through this process, and whose turn each queue is.

RabbitMQ and Pub/Sub share it: there the server's lease belongs to the process, and this process ends the
claims of an owner that is silent for too long.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Owner:
    """A worker that claims messages, and when its lease ends."""

    def __init__(self, name: str, ends: float) -> None:
        self.name = name
        self.ends = ends
        self.turn = -1  # the place of the queue that was served last
        self.is_new = True  # its lease is new, which was not reported to the owner yet

    def had_lease(self) -> bool:
        """Whether the lease was in force since the last call: a loss is reported once."""
        had, self.is_new = not self.is_new, False
        return had


class Buffer(Protocol[T_co]):
    """The messages of one queue that wait in this process to be claimed."""

    def take(self, priority: int, limit: int) -> Sequence[T_co]:
        """Take up to `limit` messages of this priority."""


def next_in_turn(owner: Owner, buffers: Sequence[Buffer[T]], priority: int) -> tuple[int, T] | None:
    """Take a message from the first buffer that has one, starting after the one served last.

    Returns the buffer's place too; None if all are empty.
    """
    for turn in range(owner.turn + 1, owner.turn + 1 + len(buffers)):
        place = turn % len(buffers)
        for taken in buffers[place].take(priority, 1):
            owner.turn = place
            return place, taken
    return None
