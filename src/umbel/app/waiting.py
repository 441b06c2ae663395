"""Waiting: how long a sender retries while the broker is unavailable, and the warning for blocking code that
waits on an event loop.

A sender retries for `publish_timeout_s`, with growing pauses, and then gets the error. If the connection
broke before the answer, the outcome is unknown, and the attempt is repeated: a message may arrive twice, but
is not lost.
"""

import logging
import sys
import warnings
from collections.abc import Callable
from threading import Lock
from time import monotonic, sleep
from typing import TypeVar

from umbel.chance import random
from umbel.errors import AccessRefused, BrokerUnavailable
from umbel.protocol.delivery.states import reconnect_wait_s

T = TypeVar("T")
log = logging.getLogger("umbel.publishing")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0


class Patience:
    """How long to retry after failures of the broker, for blocking and async senders.

    The first failure is logged, unless `may_log` says that this outage has just been logged.
    """

    def __init__(
        self, timeout_s: float, may_log: Callable[[], bool] = lambda: True, *, began: float | None = None
    ) -> None:
        """`began`: when the first attempt began, on the monotonic clock; None: now."""
        self._ends = (monotonic() if began is None else began) + timeout_s
        self._failures = 0
        self._may_log = may_log

    def pause_s(self, error: BrokerUnavailable) -> float:
        """How long to wait before the next attempt; raises the error if a retry is useless or too late."""
        if isinstance(error, AccessRefused):
            raise error
        self._failures += 1
        pause_s = reconnect_wait_s(self._failures, random(), first_s=FIRST_PAUSE_S, most_s=LONGEST_PAUSE_S)
        left_s = self._ends - monotonic()
        if pause_s >= left_s:
            raise error
        if self._failures == 1 and self._may_log():
            fields = {"up_to_s": round(left_s, 1), "why": str(error)}
            log.warning("broker unavailable; waiting to publish", extra=fields)
        return pause_s


def patiently(work: Callable[[], T], timeout_s: float) -> T:
    """Retry while the broker is unavailable and time is left; an attempt itself may take longer."""
    patience = Patience(timeout_s)
    try:
        return work()
    except BrokerUnavailable as error:
        failed = error
    return retried(work, failed, patience)


def retried(work: Callable[[], T], failed: BrokerUnavailable, patience: Patience) -> T:
    """The same as `patiently` for work that was attempted once, and failed with this error."""
    while True:
        sleep(patience.pause_s(failed))
        try:
            return work()
        except BrokerUnavailable as error:
            failed = error


_warned: set[str] = set()
_changing_warned = Lock()


def warn_on_loop(what: str, remedy: str) -> None:
    """Warn once in a process about each kind of blocking call on an event loop. Without a loop it costs
    little.
    """
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or what in _warned or asyncio._get_running_loop() is None:
        return
    with _changing_warned:
        if what in _warned:
            return
        _warned.add(what)
    warnings.warn(
        f"{what} blocks the event loop that runs in this thread, and all that it serves; use {remedy}",
        RuntimeWarning,
        stacklevel=_users_frame(),
    )


def _users_frame() -> int:
    """How many frames above the caller the code of users is."""
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("umbel."):
        frame, level = frame.f_back, level + 1
    return level
