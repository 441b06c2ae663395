"""The states of a task, and when a failed task is retried.

The state names are Celery's, so that Umbel and Celery can read each other's results. A task may set other
names; any name outside `READY_STATES` counts as unfinished.

`RetryPolicy` doubles the delay with each attempt, up to a maximum, and randomizes it. Clients and workers
that lost their broker use the same rule, with at least half of the maximum, so that they do not all reconnect
at once.

Clients, children and workers import this module, so it imports little.
"""

from umbel.protocol.machine import Value

# ---- states ----------------------------------------------------------------------------------------

PENDING = "PENDING"  # nothing is known of the task; never stored
RECEIVED = "RECEIVED"  # used in events only
STARTED = "STARTED"
RETRY = "RETRY"
SUCCESS = "SUCCESS"
FAILURE = "FAILURE"
REVOKED = "REVOKED"

READY_STATES = frozenset({SUCCESS, FAILURE, REVOKED})
"""Final states: callers that wait for the task may stop waiting."""


# ---- retry -----------------------------------------------------------------------------------------
#
# Jitter spreads the delay over the whole range from zero to its maximum ("full jitter"), so that tasks that
# failed together are not retried together. Without a maximum the delay would grow beyond any useful time, and
# without `max_retries` a task that always fails would be retried without end.


class RetryPolicy(Value):
    """How a failed task is retried. If `backoff_s` is None, the delay is always `delay_s`."""

    max_retries: int | None = 3  # None means no limit
    delay_s: float = 180.0
    backoff_s: float | None = None
    backoff_max_s: float = 600.0
    jitter: bool = True

    def exhausted(self, retries: int) -> bool:
        """Return whether a task that was retried `retries` times must not be retried again."""
        return self.max_retries is not None and retries >= self.max_retries

    def wait_s(self, retries: int, chance: float) -> float:
        """Return the delay after attempt `retries`; `chance` in [0, 1) randomizes it."""
        if self.backoff_s is None:
            return self.delay_s
        # The exponent is limited, because 2.0**1024 raises OverflowError before the maximum applies.
        ceiling = min(self.backoff_max_s, self.backoff_s * 2.0 ** min(retries, 64))
        return ceiling * chance if self.jitter else ceiling


def reconnect_wait_s(failures: int, chance: float, *, first_s: float = 0.1, most_s: float = 5.0) -> float:
    """Return the delay before the next call to a broker that failed this many times in a row."""
    ceiling = min(most_s, first_s * 2.0 ** min(failures, 16))
    return ceiling * (0.5 + chance / 2)
