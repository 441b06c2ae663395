"""The one way tests wait: for a condition, never for an amount of time.

A sleep is too long on a quick machine and too short on a slow one. Waiting for what the test is
about ends as soon as it is true, and says what did not happen when the deadline passes.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

DEADLINE_S = 90.0  # far more than it takes, also where others are at work
POLL_S = 0.005
POLL_MAX_S = 0.2


def wait_until(condition: Callable[[], T | None], *, deadline_s: float = DEADLINE_S, what: str) -> T:
    """Return the condition's first true value; fail with `what` if there is none in time.

    The condition is asked at least once more after the deadline, so a machine that stood still
    in between does not fail a test whose wish came true meanwhile. Asking takes at most half of the
    time: who waits leaves the machine to those it waits for.
    """
    __tracebackhide__ = True
    ends = time.monotonic() + deadline_s
    while True:
        asked_at = time.monotonic()
        is_last = asked_at >= ends
        value = condition()
        if value:
            return value
        if is_last:
            raise AssertionError(f"waited {deadline_s:g} s in vain for {what}; last seen: {value!r}")
        took_s = time.monotonic() - asked_at
        time.sleep(
            min(max(POLL_S, took_s), POLL_MAX_S)
        )  # not Event.wait: what a signal raises in that one breaks its lock


async def until(condition: Callable[[], object], what: str, *, deadline_s: float = DEADLINE_S) -> None:
    """The same on an event loop, which goes on meanwhile; the condition is asked on it."""
    ends = time.monotonic() + deadline_s
    while True:
        is_last = time.monotonic() >= ends
        if condition():
            return
        assert not is_last, f"waited {deadline_s:g} s in vain for {what}"
        await asyncio.sleep(POLL_S)
