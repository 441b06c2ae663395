"""Messages between the main process, the fork server and the children, and the settings they are given.

There are two kinds of stream: main process and fork server (Fork, Signal; Loaded, Forked, NotForked, Exited),
main process and child (the frames of `wire/frames.py`). A Fork comes with two file descriptors: the child's
end of its socket pair and the read end of its token pipe.
"""

from typing import Literal

import msgspec

from umbel.pools.guard import in_one_line
from umbel.pools.interface import Job, LostJob, Outcome, PoolSettings, UserEvent
from umbel.protocol.pool.events import SlotSettings
from umbel.wire.frames import Armed, Cancel, JobBatch, Outcomes, Problem, Ready, SoftLimit, StopChild

# ---- messages --------------------------------------------------------------------------------------
#
# What the main process, the fork server and the children say to one another.
#
# Two kinds of stream: main process and fork server (Fork, Signal; Loaded, Forked, NotForked, Exited), main
# process and child (the frames of `wire/frames.py`). A Fork comes with two file descriptors: the child's
# end of its socket pair and the read end of its token pipe.

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
    green: bool = False  # children run greenlets: gevent's patches come before the app


def setup_of(settings: PoolSettings) -> Setup:
    """What a fork server needs of the pool's settings."""
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
    """Make a child for this slot. `key` identifies this one process; keys are never reused."""

    key: int
    child: int


class Signal(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Signal a child; SIGKILL goes to its whole process group.

    The server does it, because only the parent knows that a pid still belongs to the same process.
    """

    key: int
    signum: int


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The app is loaded. `spawn_because` is empty when children are forked."""

    spawn_because: str
    pid: int  # of the fork server; the main process knows only its guard's


class Forked(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """The child with this key is running."""

    key: int
    pid: int


class NotForked(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The child with this key could not be made."""

    key: int
    problem: str


class Exited(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """The child with this key has ended and was reaped."""

    key: int
    status: int  # that of waitpid


class EndJob(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=20):
    """To a green child: end this job, and confirm with a Ready."""

    job: int


class NoOutcome(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=21):
    """From a child: why the outcome of this job, which has ended, cannot be sent, now or after a retry."""

    job: int
    problem: str


class Spoiled(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=22):
    """From a child: what the last job did to the process. The child starts no other job and waits to be
    ended.
    """

    reason: str


ToServer = Fork | Signal
FromServer = Loaded | Problem | Forked | NotForked | Exited
ToChild = JobBatch[Job] | SoftLimit | Cancel | StopChild
AboutChild = Ready | Armed | Problem | Spoiled | UserEvent
FromChild = Outcomes[Outcome] | NoOutcome | AboutChild


def no_outcome(outcome: Outcome, error: Exception) -> NoOutcome:
    """What a child sends when this outcome cannot be encoded."""
    problem = f"the task ran, but its outcome could not be sent to the worker: {in_one_line(error)}"
    return NoOutcome(outcome.number, problem)


def lost_outcome(message: NoOutcome) -> LostJob:
    """The lost job that the main process reports for it; not charged, and not retried."""
    fault = message.problem
    return LostJob(message.job, started=False, reason=fault, ran=True, fault=fault)


# ---- settings --------------------------------------------------------------------------------------
#
# The pool's settings as the slots machine needs them.


def slot_settings(settings: PoolSettings) -> SlotSettings:
    """What the slots machine needs of the pool's settings."""
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
