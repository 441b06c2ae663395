"""Turns: many threads use a connection at once, or one has it to itself.

Who wants it alone waits for the others to end and keeps newcomers out meanwhile, so it is not starved.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


class Turns:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._together = self._wanting = 0
        self._is_alone = False
        self._inside = threading.local()

    @property
    def is_inside(self) -> bool:
        """Whether this thread has it already: then a signal's handler asks, and must not wait for itself."""
        return getattr(self._inside, "it", False)

    def __enter__(self) -> None:
        """As one of many."""
        self._inside.it = True
        try:
            self._begin()
        except BaseException:
            self._inside.it = False
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._inside.it = False

    @contextmanager
    def alone(self) -> Iterator[None]:
        self._inside.it = True
        try:
            self._begin_alone()
            try:
                yield
            finally:
                self._end_alone()
        finally:
            self._inside.it = False

    def _begin(self) -> None:
        with self._changed:
            while self._wanting or self._is_alone:
                self._changed.wait()
            self._together += 1

    def _end(self) -> None:
        with self._changed:
            self._together -= 1
            if self._wanting:
                self._changed.notify_all()

    def _begin_alone(self) -> None:
        with self._changed:
            self._wanting += 1
            try:
                while self._together or self._is_alone:
                    self._changed.wait()
            finally:
                self._wanting -= 1
            self._is_alone = True

    def _end_alone(self) -> None:
        with self._changed:
            self._is_alone = False
            self._changed.notify_all()
