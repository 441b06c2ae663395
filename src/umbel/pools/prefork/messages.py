"""Messages between the main process, the fork server and the children, and the settings they receive.

There are two kinds of stream. Main process and fork server exchange Fork, Signal; Loaded, Forked, NotForked,
Exited. Main process and child exchange the frames of `wire/frames.py`. A Fork comes with two file
descriptors: the child's end of its socket pair and the read end of its token pipe.
"""

from typing import Literal

import msgspec

from umbel.pools.guard import in_one_line
from umbel.pools.interface import Job, LostJob, Outcome, PoolSettings, UserEvent
from umbel.protocol.pool.events import SlotSettings
from umbel.wire.frames import Armed, Cancel, JobBatch, Outcomes, Problem, Ready, SoftLimit, StopChild

# ---- messages --------------------------------------------------------------------------------------

FDS_PER_FORK = 2


class Setup(msgspec.Struct, frozen=True):
    """The settings of a fork server or a spawned child, on its command line (JSON)."""

    loader: str
    target: str
    search_path: tuple[str, ...]
    node: str
    loglevel: str
    logfile: str | None
    log_json: bool
    child_start: Literal["auto", "fork", "spawn"]
    green: bool = False  # children run greenlets: gevent patches modules before the app is loaded


def setup_of(settings: PoolSettings) -> Setup:
    """Return the fork server's part of the pool's settings."""
    host = settings.host
    return Setup(
        loader=host.loader,
        target=host.target,
        search_path=host.search_path,
        node=settings.node,
        loglevel=settings.loglevel,
        logfile=settings.logfile,
        log_json=settings.log_json,
        child_start=settings.child_start,
        green=settings.green,
    )


class Fork(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Request a child for this slot. `key` identifies this process; keys are never reused."""

    key: int
    child: int


class Signal(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Request a signal to a child; SIGKILL goes to its whole process group.

    The server sends it, because only a parent can be sure that a pid still belongs to the same process.
    """

    key: int
    signum: int


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The app is loaded. `spawn_because` is empty when children are forked."""

    spawn_because: str
    pid: int  # of the fork server; the main process only knows the pid of the guard


class Forked(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """The child with this key is running."""

    key: int
    pid: int


class NotForked(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The child with this key could not be created."""

    key: int
    problem: str


class Exited(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """The child with this key has ended and was reaped."""

    key: int
    status: int  # that of waitpid


class EndJob(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=20):
    """Tells a green child to end this job and to confirm with a Ready."""

    job: int


class NoOutcome(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=21):
    """From a child: why it cannot send the outcome of a job that has ended, now or after a retry."""

    job: int
    problem: str


class Spoiled(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=22):
    """From a child: how the last job damaged the process. The child starts no other job and waits to be
    ended.
    """

    reason: str


ToServer = Fork | Signal
FromServer = Loaded | Problem | Forked | NotForked | Exited
ToChild = JobBatch[Job] | SoftLimit | Cancel | StopChild
AboutChild = Ready | Armed | Problem | Spoiled | UserEvent
FromChild = Outcomes[Outcome] | NoOutcome | AboutChild


def no_outcome(outcome: Outcome, error: Exception) -> NoOutcome:
    """Return what a child sends when this outcome cannot be encoded."""
    problem = f"the task ran, but its outcome could not be sent to the worker: {in_one_line(error)}"
    return NoOutcome(outcome.number, problem)


def lost_outcome(message: NoOutcome) -> LostJob:
    """Return the lost job that the main process reports; it is not retried and counts no failed start."""
    fault = message.problem
    return LostJob(message.job, started=False, reason=fault, ran=True, fault=fault)


# ---- settings --------------------------------------------------------------------------------------


def slot_settings(settings: PoolSettings) -> SlotSettings:
    """Return the slots machine's part of the pool's settings."""
    return SlotSettings(
        children=settings.concurrency,
        batch_max=settings.batch_max,
        batch_target_s=settings.batch_target_s,
        batch_patience_s=settings.batch_patience_s,
        start_timeout_s=settings.start_timeout_s,
        start_attempts=settings.start_attempts,
        stop_grace_s=settings.stop_grace_s,
        jobs_max=settings.max_tasks_per_child,
        memory_max_bytes=settings.max_memory_bytes,
        memory_hard_bytes=settings.max_memory_hard_bytes,
    )
