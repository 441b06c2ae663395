"""Backoff: the growing pauses between the retries of a call to a broker, a store or a process.

Each failure in a row doubles the pause, up to a limit. Jitter spreads the pauses, so that clients and workers
that lost the same server do not all reconnect at the same moment.
"""

from umbel.chance import random
from umbel.protocol.delivery.states import reconnect_wait_s


class Backoff:
    """The retries of one call. `failures`: how many attempts in a row have failed."""

    def __init__(self, *, first_s: float = 0.1, most_s: float = 5.0) -> None:
        self.failures = 0
        self._first_s = first_s
        self._most_s = most_s

    def wait_s(self) -> float:
        """Count a failed attempt, and return how many seconds to wait before the next one."""
        self.failures += 1
        return reconnect_wait_s(self.failures, random(), first_s=self._first_s, most_s=self._most_s)

    async def pause(self) -> None:
        """Count a failed attempt, and wait before the next one."""
        from asyncio import sleep  # blocking clients and child processes do not load asyncio

        await sleep(self.wait_s())

    def reset(self) -> None:
        """Start again with the shortest pause, because an attempt worked."""
        self.failures = 0
