"""Unwritten: what was heard and is not on disk yet; the oldest go where it is too much.

That happens when the disk is slow, or full: then what was taken to be written is given back.
"""

from collections import deque
from collections.abc import Sequence
from typing import TypeVar

MESSAGES_MAX = 50_000
BYTES_MAX = 64 * 1024 * 1024
Heard = tuple[float, bytes]
T = TypeVar("T")


class Unwritten:
    def __init__(self) -> None:
        self._heard: deque[Heard] = deque()
        self._size = 0

    def add(self, at: float, body: bytes) -> None:
        self._heard.append((at, body))
        self._size += len(body)
        self._drop()

    def take(self) -> list[Heard]:
        taken, self._heard, self._size = list(self._heard), deque(), 0
        return taken

    def give_back(self, taken: Sequence[Heard]) -> None:
        self._heard.extendleft(reversed(taken))
        self._size += sum(len(body) for _, body in taken)
        self._drop()

    def _drop(self) -> None:
        while len(self._heard) > MESSAGES_MAX or self._size > BYTES_MAX:
            _, body = self._heard.popleft()
            self._size -= len(body)


def give_back(where: deque[T], taken: Sequence[T]) -> None:
    """Before what came since; as many of the newest as there is room for."""
    room = len(taken) if where.maxlen is None else where.maxlen - len(where)
    where.extendleft(reversed(taken[max(0, len(taken) - room) :]))
