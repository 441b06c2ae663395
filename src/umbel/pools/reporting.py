"""Reports from any pool to the worker: refused jobs, lost jobs, and notifications.

This module decides whether a lost job counts as a failed start of its task. It does only if the job is known
to have crashed its process or runner, or if it exceeded its time limit.

The worker gets one notification after the other. A listener may submit or withdraw jobs while it is called;
notifications caused by that are queued until the call has returned, so calls never nest. A call that raises
is logged and counted, and the next one is made.
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

_LIMIT_MAX_S = 2.0**53  # every event loop can represent this in milliseconds
BY_LIMIT = "the time limit"
BY_REQUEST = "a terminate request"


def apart(
    jobs: Sequence[Job], *, hard_limits: Callable[[Job], str] = lambda _: ""
) -> tuple[Sequence[Job], list[LostJob]]:
    """Split jobs into those that the pool can run within their limits, and the others, which are lost at
    once.

    `hard_limits` returns why a job must not have a hard limit; "" if it may.
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
    return limit_s is None or abs(limit_s) < _LIMIT_MAX_S  # False for NaN too


def _refused(job: Job, why: str) -> LostJob:
    """Return a lost job that no worker can run in this kind of pool."""
    fault = f"cannot run in this pool: {why}"
    return LostJob(job.number, started=False, reason=fault, fault=fault)


def not_started(job: Job) -> LostJob:
    """Return a job as lost that was still queued when the pool stopped; it counts no failed start."""
    return LostJob(job.number, started=False, reason="the pool stopped before the task started")


def cut_off(number: int) -> LostJob:
    """Return a job as lost that still ran at the end of the grace period; it counts no failed start."""
    reason = "its task was still running at the end of the shutdown grace period"
    return LostJob(number, started=False, reason=reason, ran=True)


def ended_by(number: int, by: str) -> LostJob:
    """Return a job as lost that this worker ended, `by` its limit (a failed start) or a request (not a failed
    start).
    """
    is_late = by == BY_LIMIT
    return LostJob(number, started=is_late, reason=f"stopped by {by}", timed_out=is_late, ran=True)


def broken(job: Job, error: BaseException, interruptions: tuple[type[Exception], ...]) -> LostJob:
    """Return a job as lost whose runner raised.

    It counts as a failed start, unless one of `interruptions` arrived while the job was finishing.
    """
    if isinstance(error, interruptions):
        reason = "the task was interrupted while it was finishing"
        return LostJob(job.number, started=False, reason=reason, ran=True)
    return LostJob(
        job.number, started=True, reason=f"the runner of the task failed: {in_one_line(error)}", ran=True
    )


# ---- guarded listener ------------------------------------------------------------------------------

log = logging.getLogger(__name__)


class GuardedListener:
    """Wraps the worker's listener: queues notifications, and logs those that raise."""

    def __init__(self, listener: PoolListener) -> None:
        self.faults = 0  # number of calls that raised
        self._listener = listener
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = (
            deque()
        )  # the notifications of one step
        self._held = False
        self._calling = False

    def on_started(self, started: Sequence[tuple[int, float, int]]) -> None:
        """Queue the notification that jobs have started."""
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
        """Queue a child process event."""
        self._tell(self._listener.on_child, what, fields)

    def hold(self) -> None:
        """Delay notifications until `release`, because the pool is in the middle of a step."""
        self._held = True

    def release(self) -> None:
        """Deliver the delayed notifications; later ones are delivered at once."""
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


def resized(size: int, by: int) -> int:
    """Return the new size; raise PoolError if it is below 1."""
    if size + by < 1:
        raise PoolError(f"a pool of {size} cannot shrink by {-by}: at least 1 must remain")
    return size + by


async def until_idle(is_busy: Callable[[], object], changed: asyncio.Event) -> None:
    """Wait until `is_busy` returns false. The caller sets `changed` on each change, and the timeout."""
    while is_busy():
        changed.clear()
        await changed.wait()
