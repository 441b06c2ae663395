"""Losses: jobs that came back without an outcome of their own, in the words of all pools.

Whether a loss is held against the task is said here, once: only a job that is known to have brought
its process or runner down, or ran into its limit, counts as a start that failed.
"""

from umbel.pools.crew import INTERRUPTIONS
from umbel.pools.hosting import in_one_line
from umbel.pools.interface import Job, LostJob

BY_LIMIT = "its limit"
BY_REQUEST = "a request"


def not_started(job: Job) -> LostJob:
    return LostJob(job.number, started=False, reason="the pool was stopped before it started")


def cut_off(number: int) -> LostJob:
    reason = "its job was still running when the pool had to stop"
    return LostJob(number, started=False, reason=reason, ran=True)


def ended_by(number: int, by: str) -> LostJob:
    is_late = by == BY_LIMIT
    return LostJob(number, started=is_late, reason=f"it was ended by {by}", timed_out=is_late, ran=True)


def broken(job: Job, error: BaseException) -> LostJob:
    """Its runner did not return."""
    if isinstance(error, INTERRUPTIONS):
        reason = "it was interrupted in the moment in which it ended"
        return LostJob(job.number, started=False, reason=reason, ran=True)
    return LostJob(
        job.number, started=True, reason=f"the task ended its runner: {in_one_line(error)}", ran=True
    )
