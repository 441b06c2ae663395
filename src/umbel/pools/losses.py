"""Losses: jobs that came back without an outcome of their own, in the words of all pools.

Whether a loss counts against the task is decided here, once: only a job that is known to have brought
its process or runner down, or ran into its limit, counts as a start that failed.
"""

from collections.abc import Callable, Sequence

from umbel.pools.hosting import in_one_line
from umbel.pools.interface import Job, LostJob

_LIMIT_MAX_S = 2.0**53  # every loop can count to it in milliseconds
BY_LIMIT = "the time limit"
BY_REQUEST = "a terminate request"


def apart(
    jobs: Sequence[Job], *, hard_limits: Callable[[Job], str] = lambda _: ""
) -> tuple[Sequence[Job], list[LostJob]]:
    """The jobs that a pool can run within their limits, and the others, which come straight back.

    `hard_limits` says why this job must not have one.
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
    """It cannot be run here, nor anywhere else like here."""
    fault = f"cannot run in this pool: {why}"
    return LostJob(job.number, started=False, reason=fault, fault=fault)


def not_started(job: Job) -> LostJob:
    return LostJob(job.number, started=False, reason="the pool stopped before the task started")


def cut_off(number: int) -> LostJob:
    reason = "its task was still running at the end of the shutdown grace period"
    return LostJob(number, started=False, reason=reason, ran=True)


def ended_by(number: int, by: str) -> LostJob:
    is_late = by == BY_LIMIT
    return LostJob(number, started=is_late, reason=f"stopped by {by}", timed_out=is_late, ran=True)


def broken(job: Job, error: BaseException, interruptions: tuple[type[Exception], ...]) -> LostJob:
    """Its runner did not return."""
    if isinstance(error, interruptions):
        reason = "the task was interrupted while it was finishing"
        return LostJob(job.number, started=False, reason=reason, ran=True)
    return LostJob(
        job.number, started=True, reason=f"the runner of the task failed: {in_one_line(error)}", ran=True
    )
