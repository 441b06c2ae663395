"""Patience: how long who sends goes on after failures of the broker.

It waits up to `publish_timeout_s`, retries with growing pauses, and then gets an error. An attempt whose
outcome is unknown, because the link broke before the answer, is made again: a message may be there twice,
never not at all.
"""

import logging
from collections.abc import Callable
from time import monotonic, sleep
from typing import TypeVar

from umbel.chance import random
from umbel.errors import AccessRefused, BrokerUnavailable
from umbel.protocol.retry import reconnect_wait_s

T = TypeVar("T")
log = logging.getLogger("umbel.publishing")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0


class Patience:
    """How long to go on after failures of the broker, shared by those who block and those who await.

    The first failure is logged, if `may_tell` does not say that others have told of it just now.
    """

    def __init__(
        self, timeout_s: float, may_tell: Callable[[], bool] = lambda: True, *, began: float | None = None
    ) -> None:
        """`began`: when the first attempt did, on the monotonic clock; without it now."""
        self._ends = (monotonic() if began is None else began) + timeout_s
        self._failures = 0
        self._may_tell = may_tell

    def pause_s(self, error: BrokerUnavailable) -> float:
        """How long to wait before the next attempt; raises the error if there is no use or no time."""
        if isinstance(error, AccessRefused):
            raise error
        self._failures += 1
        pause_s = reconnect_wait_s(self._failures, random(), first_s=FIRST_PAUSE_S, most_s=LONGEST_PAUSE_S)
        left_s = self._ends - monotonic()
        if pause_s >= left_s:
            raise error
        if self._failures == 1 and self._may_tell():
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
    """The same for work that was attempted once, and failed like this."""
    while True:
        sleep(patience.pause_s(failed))
        try:
            return work()
        except BrokerUnavailable as error:
            failed = error
