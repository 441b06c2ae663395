"""What the main process, the fork server and the children say to one another.

Two kinds of stream: main process and fork server (Fork, Signal; Loaded, Forked, NotForked,
Exited), main process and child (the frames of `wire/frames.py`). A Fork comes with two file
descriptors: the child's end of its socket pair and the read end of its token pipe.
"""

from typing import Literal

import msgspec

from umbel.pools.interface import Job, Outcome
from umbel.wire.frames import Armed, JobBatch, Outcomes, Problem, Ready, SoftLimit, Stop

FDS_PER_FORK = 2


class Setup(msgspec.Struct, frozen=True):
    """What a fork server, or a child that starts afresh, is told on its command line (JSON)."""

    loader: str
    target: str
    search_path: tuple[str, ...]
    node: str
    loglevel: str
    logfile: str | None
    child_start: Literal["auto", "fork", "spawn"]


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


class Forked(msgspec.Struct, frozen=True, array_like=True, tag=11):
    key: int
    pid: int


class NotForked(msgspec.Struct, frozen=True, array_like=True, tag=12):
    key: int
    problem: str


class Exited(msgspec.Struct, frozen=True, array_like=True, tag=13):
    key: int
    status: int  # as waitpid gave it


ToServer = Fork | Signal
FromServer = Loaded | Problem | Forked | NotForked | Exited
ToChild = JobBatch[Job] | SoftLimit | Stop
FromChild = Outcomes[Outcome] | Ready | Armed | Problem
