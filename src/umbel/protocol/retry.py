"""Retry: whether a failed task is tried again, and how long it waits.

The delay doubles with each attempt up to a ceiling; jitter spreads it over the whole range
below, so that tasks that failed together do not come back together ("full jitter").
"""

from umbel.protocol.value import Value


class RetryPolicy(Value):
    """How a task is tried again. `backoff_s` None: always `delay_s`."""

    max_retries: int | None = 3  # None: for ever
    delay_s: float = 180.0
    backoff_s: float | None = None
    backoff_max_s: float = 600.0
    jitter: bool = True

    def exhausted(self, retries: int) -> bool:
        """Whether a task that has been tried again `retries` times may not be tried once more."""
        return self.max_retries is not None and retries >= self.max_retries

    def wait_s(self, retries: int, chance: float) -> float:
        """How long to wait after attempt `retries`; `chance` in [0, 1) draws the jitter."""
        if self.backoff_s is None:
            return self.delay_s
        # The exponent is bounded because 2.0**1024 overflows long before the ceiling matters.
        ceiling = min(self.backoff_max_s, self.backoff_s * 2.0 ** min(retries, 64))
        return ceiling * chance if self.jitter else ceiling


def reconnect_wait_s(failures: int, chance: float, *, first_s: float = 0.1, most_s: float = 5.0) -> float:
    """How long to wait before asking a broker again that has failed this many times in a row."""
    ceiling = min(most_s, first_s * 2.0 ** min(failures, 16))
    return ceiling * (0.5 + chance / 2)
