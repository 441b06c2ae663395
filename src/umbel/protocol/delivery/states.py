"""The states of a task, and when a failed one is retried.

The state names are Celery's, so that each side reads what the other wrote. A task may set other names; any
name outside `READY_STATES` counts as unfinished. `RetryPolicy` doubles the delay with each attempt, up to a
ceiling, and spreads it by jitter. Clients, children and workers import this module, so it imports little.
"""

from umbel.protocol.machine import Value

# ---- states ----------------------------------------------------------------------------------------
#
# The names under which a task's progress is stored and shown.
#
# They are Celery's, so that each side reads what the other wrote. A task may define more; any name that is
# not ready counts as unfinished.

PENDING = "PENDING"  # nothing is known of the task; never written
RECEIVED = "RECEIVED"  # seen in events only
STARTED = "STARTED"
RETRY = "RETRY"
SUCCESS = "SUCCESS"
FAILURE = "FAILURE"
REVOKED = "REVOKED"

READY_STATES = frozenset({SUCCESS, FAILURE, REVOKED})
"""States that a task does not leave: callers that wait for it may stop waiting."""


# ---- retry -----------------------------------------------------------------------------------------
#
# Whether a failed task is retried, and how long it waits.
#
# The delay doubles with each attempt up to a ceiling; jitter spreads it over the whole range below, so that
# tasks that failed together do not come back together ("full jitter").


class RetryPolicy(Value):
    """How a failed task is retried. With `backoff_s` None the delay is always `delay_s`."""

    max_retries: int | None = 3  # None: for ever
    delay_s: float = 180.0
    backoff_s: float | None = None
    backoff_max_s: float = 600.0
    jitter: bool = True

    def exhausted(self, retries: int) -> bool:
        """Whether a task that was retried `retries` times may not be retried once more."""
        return self.max_retries is not None and retries >= self.max_retries

    def wait_s(self, retries: int, chance: float) -> float:
        """The delay after attempt `retries`; `chance` in [0, 1) draws the jitter."""
        if self.backoff_s is None:
            return self.delay_s
        # The exponent is bounded because 2.0**1024 overflows long before the ceiling matters.
        ceiling = min(self.backoff_max_s, self.backoff_s * 2.0 ** min(retries, 64))
        return ceiling * chance if self.jitter else ceiling


def reconnect_wait_s(failures: int, chance: float, *, first_s: float = 0.1, most_s: float = 5.0) -> float:
    """The delay before the next call to a broker that has failed this many times in a row."""
    ceiling = min(most_s, first_s * 2.0 ** min(failures, 16))
    return ceiling * (0.5 + chance / 2)
