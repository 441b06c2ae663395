"""What goes into the slots machine and what comes out; `slots.py` decides.

Jobs and outcomes are the pool's own records: the machine reads a few fields and passes them on.
"""

from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from umbel.protocol.machine import Value

BATCH_MAX = 64  # jobs that a child gets at once


class Work(Protocol):
    """What the machine reads of a job."""

    @property
    def number(self) -> int:
        """The job's number, unique in this pool."""

    @property
    def task(self) -> str:
        """The name of its task."""

    @property
    def soft_limit_s(self) -> float | None:
        """After how long the task is interrupted; None for never."""

    @property
    def hard_limit_s(self) -> float | None:
        """After how long the child is killed; None for never."""

    @property
    def alone(self) -> bool:
        """Whether no other job may wait behind it in a child."""

    @property
    def redelivered(self) -> bool:
        """Whether a previous run may have been cut off; such a job is sent singly."""


class JobOutcome(Protocol):
    """What the machine reads of an outcome."""

    @property
    def number(self) -> int:
        """The number of the job that ended."""

    @property
    def runtime_s(self) -> float:
        """How long the job ran."""


WorkT = TypeVar("WorkT", bound=Work)
EndedT = TypeVar("EndedT", bound=JobOutcome)


class SlotSettings(Value):
    """The size, the batches and the limits of one pool."""

    children: int
    batch_max: int = BATCH_MAX
    batch_target_s: float = 0.010
    batch_patience_s: float = 0.050
    start_timeout_s: float = 60.0
    start_attempts: int = 10  # failed starts in a row, with no live child, before Failed is reported
    stop_grace_s: float = 5.0
    jobs_max: int | None = None  # a child that has run this many jobs is replaced (F5)
    memory_max_bytes: int | None = None  # a child that uses more is replaced when its job has ended
    memory_hard_bytes: int | None = None  # a child that uses more is killed


# ---- events ----------------------------------------------------------------------------------------


class Open(Value):
    """Fill every slot."""


class Submit(Value, Generic[WorkT]):
    """Queue these jobs."""

    jobs: Sequence[WorkT]


class Unsettled(Value):
    """How many messages of ended jobs are not settled; the machine adds those that end from now on."""

    count: int


class Finished(Value, Generic[EndedT]):
    """A child's outcomes, in the order in which it ran the jobs."""

    child: int
    outcomes: Sequence[EndedT]


class ChildReady(Value):
    """A child has started and can take jobs."""

    child: int


class ChildDied(Value):
    """A child ended; everything it sent has been read. `tokens` are those that remain in its pipe."""

    child: int
    tokens: bytes
    reason: str


class NotSent(Value):
    """These jobs of a Send could not be encoded: the error, by number. The others were sent."""

    child: int
    reasons: Mapping[int, str]


class Recalled(Value):
    """The answer to Recall: the tokens that were still there. Sent even if the child is dead."""

    child: int
    tokens: bytes


class Withdraw(Value):
    """Give back every job that has not started."""


class Interrupt(Value):
    """Interrupt every running job, because the worker stops."""


class Retire(Value):
    """Let the child finish its current job and end; another takes its slot."""

    child: int
    reason: str


class Weighed(Value):
    """The answer to Weigh: how much memory the child uses; 0 when that is unknown."""

    child: int
    size_bytes: int


class Replace(Value):
    """Replace every present child, one after the other, when they are idle."""


class Resize(Value):
    """Have this many children: more are started, or some end as soon as their job has (F4)."""

    children: int


class Close(Value):
    """End all children; jobs that still run after `grace_s` are lost."""

    grace_s: float


# ---- effects ---------------------------------------------------------------------------------------


class Start(Value):
    """Start a child process."""

    child: int


class Send(Value, Generic[WorkT]):
    """Write the tokens, `batch` modulo 256 once for each job, then the jobs."""

    child: int
    batch: int
    jobs: Sequence[WorkT]


class Recall(Value):
    """Take the tokens out of the child's pipe and answer with Recalled."""

    child: int


class SignalSoftLimit(Value):
    """Interrupt the job that the child runs."""

    child: int
    job: int
    stopping: bool = False  # because the worker stops, not because of the limit


class Dismiss(Value):
    """Ask the child to end once it has run what it was sent."""

    child: int
    reason: str


class Weigh(Value):
    """Measure how much memory the child uses and answer with Weighed."""

    child: int


class Kill(Value):
    """Send SIGKILL; ChildDied follows, also for a child whose process did not start yet."""

    child: int
    reason: str


class Reported(Value, Generic[EndedT]):
    """The outcomes of jobs that were sent to this child."""

    child: int
    outcomes: Sequence[EndedT]


class JobBegan(Value):
    """This job is known to run now. Not reported for every job."""

    child: int
    job: int


class JobLoss(Value):
    """A job that ends here without an outcome.

    `charged`: it was running when its child died, and may be the cause. `ran`: it ran or may have run, at
    least in part.
    """

    job: int
    charged: bool
    ran: bool
    reason: str
    timed_out: bool = False
    fault: str = ""  # why every further attempt would fail the same way


class JobsLost(Value):
    """These jobs end here without an outcome."""

    losses: Sequence[JobLoss]


class Withdrawn(Value, Generic[WorkT]):
    """The jobs that had not started, in answer to Withdraw."""

    jobs: Sequence[WorkT]


class Overweight(Value):
    """The child uses more than `memory_max_bytes`, perhaps because of this job; it is replaced after it."""

    child: int
    job: int | None
    size_bytes: int


class PoolFailed(Value):
    """Children die before they can take a job, again and again, and there is no other.

    Slots keeps retrying, more and more slowly, but the worker should stop.
    """

    reason: str


class PoolClosed(Value):
    """The last child has ended."""


Event = (
    Open
    | Submit[WorkT]
    | Unsettled
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
    | JobBegan
    | JobsLost
    | Withdrawn[WorkT]
    | Overweight
    | PoolFailed
    | PoolClosed
)
