"""What the main process, the fork server and the children say to one another.

Two kinds of stream: main process and fork server (Fork, Signal; Loaded, Forked, NotForked,
Exited), main process and child (the frames of `wire/frames.py`). A Fork comes with two file
descriptors: the child's end of its socket pair and the read end of its token pipe.
"""

from typing import Literal

import msgspec

from umbel.pools.hosting import in_one_line
from umbel.pools.interface import Job, LostJob, Outcome, PoolSettings, Told
from umbel.wire.frames import (
    Armed,
    Cancel,
    JobBatch,
    Outcomes,
    Problem,
    Ready,
    SoftLimit,
    Stop,
)

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
    """Make a child for this slot. `key` names this one process; keys are never used again."""

    key: int
    child: int


class Signal(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Signal a child; SIGKILL goes to its whole process group.

    The server does it, because only a parent knows that a pid still means the same process.
    """

    key: int
    signum: int


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The app is there. `spawn_because` is empty when children are forked."""

    spawn_because: str
    pid: int  # of the fork server; the main process knows only its guard's


class Forked(msgspec.Struct, frozen=True, array_like=True, tag=11):
    key: int
    pid: int


class NotForked(msgspec.Struct, frozen=True, array_like=True, tag=12):
    key: int
    problem: str


class Exited(msgspec.Struct, frozen=True, array_like=True, tag=13):
    key: int
    status: int  # as waitpid gave it


class EndJob(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=20):
    """To a green child: end this job, and give a sign (a Ready) that you have heard it."""

    job: int


class NoOutcome(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=21):
    """From a child: why this job has no outcome, though it has ended, nor would have one the next time."""

    job: int
    problem: str


class Spoiled(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=22):
    """From a child: the last job did this to the process. It starts no other, and waits to be ended."""

    reason: str


ToServer = Fork | Signal
FromServer = Loaded | Problem | Forked | NotForked | Exited
ToChild = JobBatch[Job] | SoftLimit | Cancel | Stop
AboutChild = Ready | Armed | Problem | Spoiled | Told
FromChild = Outcomes[Outcome] | NoOutcome | AboutChild


def no_outcome(outcome: Outcome, error: Exception) -> NoOutcome:
    problem = f"the task ran, but its outcome could not be sent to the worker: {in_one_line(error)}"
    return NoOutcome(outcome.number, problem)


def lost_outcome(message: NoOutcome) -> LostJob:
    fault = message.problem
    return LostJob(message.job, started=False, reason=fault, ran=True, fault=fault)
