"""What every pool reports to the worker, in the same words: refused and lost jobs, and notifications.

Whether a lost job counts against its task is decided here: only a job that is known to have crashed its
process or runner, or that exceeded its time limit, counts as a failed start. Notifications reach the worker
one after the other: a listener may submit or withdraw while it is called, and what follows from that waits
until the call has returned. A call that raises is logged and counted, and the next one is made.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from umbel.errors import PoolError
from umbel.pools.guard import Raised, call_guarded, in_one_line
from umbel.pools.interface import Job, LostJob, Outcome, PoolListener, UserEvent

# ---- losses ----------------------------------------------------------------------------------------
#
# Jobs that came back without an outcome, in the words of all pools.
#
# Whether a loss counts against the task is decided here, once: only a job that is known to have brought its
# process or runner down, or ran into its limit, counts as a start that failed.

_LIMIT_MAX_S = 2.0**53  # every event loop can time this in milliseconds
BY_LIMIT = "the time limit"
BY_REQUEST = "a terminate request"


def apart(
    jobs: Sequence[Job], *, hard_limits: Callable[[Job], str] = lambda _: ""
) -> tuple[Sequence[Job], list[LostJob]]:
    """The jobs that a pool can run within their limits, and the others, which come straight back.

    `hard_limits` returns why this job must not have a hard limit; "" if it may.
    """
    unfit: dict[int, LostJob] = {}
    for job in jobs:
        if job.hard_limit_s is None and job.soft_limit_s is None:
            continue
        if not (_is_time(job.hard_limit_s) and _is_time(job.soft_limit_s)):
            limits = f"{job.soft_limit_s} s (soft) and {job.hard_limit_s} s (hard)"
            unfit[job.number] = _refused(job, f"its time limits are invalid: {limits}")
        elif job.hard_limit_s is not None and (why := hard_limits(job)):
            unfit[job.number] = _refused(job, why)
    return [job for job in jobs if job.number not in unfit] if unfit else jobs, [*unfit.values()]


def _is_time(limit_s: float | None) -> bool:
    return limit_s is None or abs(limit_s) < _LIMIT_MAX_S  # which is not true of NaN either


def _refused(job: Job, why: str) -> LostJob:
    """The job cannot be run in this pool, on any worker."""
    fault = f"cannot run in this pool: {why}"
    return LostJob(job.number, started=False, reason=fault, fault=fault)


def not_started(job: Job) -> LostJob:
    """A job that was still queued when the pool stopped; not charged."""
    return LostJob(job.number, started=False, reason="the pool stopped before the task started")


def cut_off(number: int) -> LostJob:
    """A job that still ran at the end of the grace period; not charged."""
    reason = "its task was still running at the end of the shutdown grace period"
    return LostJob(number, started=False, reason=reason, ran=True)


def ended_by(number: int, by: str) -> LostJob:
    """A job that this worker ended, `by` its limit (charged) or a request (not charged)."""
    is_late = by == BY_LIMIT
    return LostJob(number, started=is_late, reason=f"stopped by {by}", timed_out=is_late, ran=True)


def broken(job: Job, error: BaseException, interruptions: tuple[type[Exception], ...]) -> LostJob:
    """A job whose runner raised; charged, unless one of `interruptions` arrived while it was finishing."""
    if isinstance(error, interruptions):
        reason = "the task was interrupted while it was finishing"
        return LostJob(job.number, started=False, reason=reason, ran=True)
    return LostJob(
        job.number, started=True, reason=f"the runner of the task failed: {in_one_line(error)}", ran=True
    )


# ---- guarded listener ------------------------------------------------------------------------------
#
# What a pool tells the worker, one call after the other, whatever becomes of each.
#
# A listener may submit or withdraw while it is called. What there is to tell because of that waits until
# the call has returned, so calls never nest, however many there are. A call that raises is logged and
# counted, and the next one is made.

log = logging.getLogger(__name__)


class GuardedListener:
    """Wraps the worker's listener: queues notifications, and survives those that raise."""

    def __init__(self, listener: PoolListener) -> None:
        self.faults = 0  # calls that raised
        self._listener = listener
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = (
            deque()
        )  # the notifications of one step
        self._held = False
        self._calling = False

    def on_started(self, started: Sequence[tuple[int, float, int]]) -> None:
        """Queue the notification that jobs run."""
        self._tell(self._listener.on_started, started)

    def on_told(self, told: UserEvent) -> None:
        """Queue an event of a running task."""
        self._tell(self._listener.on_told, told)

    def on_outcomes(self, outcomes: Sequence[Outcome], pid: int) -> None:
        """Queue outcomes."""
        self._tell(self._listener.on_outcomes, outcomes, pid)

    def on_lost(self, lost: Sequence[LostJob]) -> None:
        """Queue lost jobs."""
        self._tell(self._listener.on_lost, lost)

    def on_child(self, what: str, fields: dict[str, Any]) -> None:
        """Queue the news of a child process."""
        self._tell(self._listener.on_child, what, fields)

    def hold(self) -> None:
        """Delay notifications until `release`: the pool is in the middle of a step."""
        self._held = True

    def release(self) -> None:
        """Deliver what was delayed, and everything after it at once."""
        self._held = False
        self._call()

    def _tell(self, call: Callable[..., None], *args: Any) -> None:
        self._calls.append((call, args))
        if not self._held:
            self._call()

    def _call(self) -> None:
        if self._calling:
            return
        self._calling = True
        try:
            while self._calls:
                call, args = self._calls.popleft()
                called = call_guarded(call, *args)
                if isinstance(called, Raised):
                    self.faults += 1
                    log.error(
                        "internal error while handling a notification of the pool; it is lost, and its task "
                        "may stay unacknowledged until this worker stops; please report it",
                        extra={"notification": getattr(call, "__name__", "")},
                        exc_info=called.error,
                    )
        finally:
            self._calling = False


# ---- sizes -----------------------------------------------------------------------------------------
#
# What every pool does alike when it is resized and when it stops.


def resized(size: int, by: int) -> int:
    """The new size; PoolError if nothing would remain."""
    if size + by < 1:
        raise PoolError(f"a pool of {size} cannot shrink by {-by}: at least 1 must remain")
    return size + by


async def until_idle(is_busy: Callable[[], object], changed: asyncio.Event) -> None:
    """Wait until `is_busy` is false. `changed` is set whenever that may have become true; the caller sets the
    time limit.
    """
    while is_busy():
        changed.clear()
        await changed.wait()
