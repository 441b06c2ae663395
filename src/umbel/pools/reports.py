"""Reports: what threads tell the worker's event loop, gathered so that it wakes once for many."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

ReportT = TypeVar("ReportT")


class Reports(Generic[ReportT]):
    """`add` in any thread; `deliver` is called on the loop with all that came since, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Sequence[ReportT]], None]) -> None:
        self._loop = loop
        self._deliver = deliver
        self._gathered: deque[ReportT] = deque()  # as many as jobs run, and as many that ended
        self._called = False

    def add(self, report: ReportT) -> None:
        self._gathered.append(report)
        if not self._called:
            self._called = True
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody is there to hear it
                self._loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        self._called = False  # first: what is added from here on calls again
        reports = [self._gathered.popleft() for _ in range(len(self._gathered))]
        if reports:
            self._deliver(reports)
