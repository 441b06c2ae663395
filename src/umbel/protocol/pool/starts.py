"""Starts: how long to wait before the next attempt at a child, and when trying on is no use.

Failures are counted in rounds: children that were started together and fail together fail once,
so a large pool is as patient as a small one. While one child works, the pool works, and the rest
is tried for ever; without any, it has failed after so many rounds, or when it has been without a
child for as long as one may take to start. A pool that has never had a child gives up sooner:
somebody is looking at the terminal.
"""

from umbel.protocol.pool.events import SlotSettings

_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.1, 10.0
_FIRST_ROUNDS = 3


class Starts:
    def __init__(self, settings: SlotSettings) -> None:
        self._attempts = settings.start_attempts
        self._patience_s = settings.start_timeout_s
        self._rounds = 0  # of failures, in a row
        self._failed_at = float("-inf")
        self._alive_at: float | None = None  # when there was a child for the last time
        self._said = False

    def seen_alive(self, now: float) -> None:
        """A child is ready, or was until now."""
        self._alive_at = now

    def succeeded(self) -> None:
        """A child got as far as doing something."""
        self._rounds, self._said = 0, False

    def failed(self, *, begun_at: float, now: float) -> float:
        """A start failed; when the next one is."""
        if begun_at > self._failed_at:  # else it belongs to the round that is counted
            self._rounds += 1
            self._failed_at = now
        return now + min(_BACKOFF_FIRST_S * 2.0 ** min(self._rounds - 1, 10), _BACKOFF_MAX_S)

    def given_up(self, now: float) -> str:
        """With no child left: what is said, once, when there have been failures enough."""
        if self._said:
            return ""
        if self._alive_at is None:
            self._said = self._rounds >= min(_FIRST_ROUNDS, self._attempts)
        else:
            without_s = now - self._alive_at
            self._said = self._rounds >= self._attempts or without_s >= self._patience_s
        return f"{self._rounds} attempts failed, the last one because " if self._said else ""
