"""What goes into the slots machine and what comes out; `slots.py` decides.

Jobs and outcomes are the pool's own records: the machine reads a few fields and passes them on.
"""

from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from umbel.protocol.value import Value


class Work(Protocol):
    """What a job must tell."""

    @property
    def number(self) -> int: ...
    @property
    def task(self) -> str: ...
    @property
    def soft_limit_s(self) -> float | None: ...
    @property
    def hard_limit_s(self) -> float | None: ...
    @property
    def alone(self) -> bool: ...
    @property
    def redelivered(self) -> bool: ...


class Ended(Protocol):
    """What an outcome must tell."""

    @property
    def number(self) -> int: ...
    @property
    def runtime_s(self) -> float: ...


WorkT = TypeVar("WorkT", bound=Work)
EndedT = TypeVar("EndedT", bound=Ended)


class SlotSettings(Value):
    children: int
    batch_max: int = 64
    batch_target_s: float = 0.010
    batch_patience_s: float = 0.050
    start_timeout_s: float = 60.0
    start_attempts: int = 10  # failed starts in a row, with no child left, after which Failed is reported
    stop_grace_s: float = 5.0
    jobs_max: int | None = None  # a child that has run so many is replaced (F5)
    memory_max_bytes: int | None = None  # one that holds more is replaced when its job has ended
    memory_hard_bytes: int | None = None  # one that holds more is killed


# ---- events ----------------------------------------------------------------------------------------


class Open(Value):
    """Fill every slot."""


class Submit(Value, Generic[WorkT]):
    jobs: Sequence[WorkT]


class Finished(Value, Generic[EndedT]):
    """A child's outcomes, in the order in which it ran the jobs."""

    child: int
    outcomes: Sequence[EndedT]


class ChildReady(Value):
    child: int


class ChildDied(Value):
    """Everything the child sent has been read before; `tokens` are those left in its pipe."""

    child: int
    tokens: bytes
    reason: str


class NotSent(Value):
    """These jobs of a Send could not be put into a frame: why, by number. The others were sent."""

    child: int
    reasons: Mapping[int, str]


class Recalled(Value):
    """The answer to Recall: the tokens that were still there. Comes even if the child is dead."""

    child: int
    tokens: bytes


class Withdraw(Value):
    """Give back every job that has not started."""


class Interrupt(Value):
    """Raise in every job that runs: the worker stops."""


class Retire(Value):
    """Let the child finish the job it is at and end; another takes its slot."""

    child: int
    reason: str


class Weighed(Value):
    """The answer to Weigh: how much memory the child holds; 0 when nobody can tell."""

    child: int
    size_bytes: int


class Replace(Value):
    """Put another in the place of every child there is now, one after the other, as they are idle."""


class Resize(Value):
    """Have so many children: more are started, or some end as soon as their job has (F4)."""

    children: int


class Close(Value):
    """End all children; what still runs after `grace_s` is lost."""

    grace_s: float


# ---- effects ---------------------------------------------------------------------------------------


class Start(Value):
    child: int


class Send(Value, Generic[WorkT]):
    """First the tokens, `batch` modulo 256 as many times as there are jobs, then the jobs."""

    child: int
    batch: int
    jobs: Sequence[WorkT]


class Recall(Value):
    """Take the tokens out of the child's pipe and answer with Recalled."""

    child: int


class SignalSoftLimit(Value):
    child: int
    job: int
    stopping: bool = False  # not because of its limit, but because the worker stops


class Dismiss(Value):
    """Ask the child to end once it has done what it was sent."""

    child: int
    reason: str


class Weigh(Value):
    """See how much memory the child holds and answer with Weighed."""

    child: int


class Kill(Value):
    """SIGKILL, and in time a ChildDied; also for a child that has not got as far as a process."""

    child: int
    reason: str


class Reported(Value, Generic[EndedT]):
    child: int
    outcomes: Sequence[EndedT]


class Began(Value):
    """This job is known to run now. Not reported for every job."""

    child: int
    job: int


class Loss(Value):
    """A job that ends here without an outcome.

    `charged`: it was running when its child died, and may be the cause. `ran`: it ran or may
    have run, at least in part.
    """

    job: int
    charged: bool
    ran: bool
    reason: str
    timed_out: bool = False
    fault: str = ""  # why it would end like this each time


class Lost(Value):
    losses: Sequence[Loss]


class Withdrawn(Value, Generic[WorkT]):
    jobs: Sequence[WorkT]


class Overweight(Value):
    """It holds more than `memory_max_bytes`, perhaps because of this job; it is replaced after it."""

    child: int
    job: int | None
    size_bytes: int


class Failed(Value):
    """Children die before they can take a job, again and again, and there is no other.

    Slots keeps trying, more and more slowly, but whoever hears this had better end.
    """

    reason: str


class Closed(Value):
    """The last child is gone."""


Event = (
    Open
    | Submit[WorkT]
    | Finished[EndedT]
    | ChildReady
    | ChildDied
    | NotSent
    | Recalled
    | Withdraw
    | Interrupt
    | Retire
    | Weighed
    | Replace
    | Resize
    | Close
)
Effect = (
    Start
    | Send[WorkT]
    | Recall
    | SignalSoftLimit
    | Dismiss
    | Weigh
    | Kill
    | Reported[EndedT]
    | Began
    | Lost
    | Withdrawn[WorkT]
    | Overweight
    | Failed
    | Closed
)
