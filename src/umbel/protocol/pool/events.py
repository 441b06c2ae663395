"""The events and effects of the slots machine (`slots.py`).

Jobs and outcomes are the pool's records: the machine reads a few fields and passes them on.
"""

from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from umbel.protocol.machine import Value

BATCH_MAX = 64  # jobs in one batch to a child


class Work(Protocol):
    """The fields of a job that the machine reads."""

    @property
    def number(self) -> int:
        """Return the job's number, unique in this pool."""

    @property
    def task(self) -> str:
        """Return the name of the job's task."""

    @property
    def soft_limit_s(self) -> float | None:
        """Return the time after which the task is interrupted; None for never."""

    @property
    def hard_limit_s(self) -> float | None:
        """Return the time after which the child is killed; None for never."""

    @property
    def alone(self) -> bool:
        """Return whether no other job may be queued behind this one in a child."""

    @property
    def redelivered(self) -> bool:
        """Return whether a previous run may have been interrupted; such a job is sent singly."""


class JobOutcome(Protocol):
    """The fields of an outcome that the machine reads."""

    @property
    def number(self) -> int:
        """Return the number of the job that ended."""

    @property
    def runtime_s(self) -> float:
        """Return how long the job ran."""


WorkT = TypeVar("WorkT", bound=Work)
EndedT = TypeVar("EndedT", bound=JobOutcome)


class SlotSettings(Value):
    """The size, the batches and the limits of one pool."""

    children: int
    batch_max: int = BATCH_MAX
    batch_target_s: float = 0.010
    batch_patience_s: float = 0.050
    start_timeout_s: float = 60.0
    start_attempts: int = 10  # failed starts in a row, without a live child, before PoolFailed is reported
    stop_grace_s: float = 5.0
    jobs_max: int | None = None  # a child that has run this many jobs is replaced (rule F5)
    memory_max_bytes: int | None = None  # a child that uses more is replaced when its job has ended
    memory_hard_bytes: int | None = None  # a child that uses more is killed


# ---- events ----------------------------------------------------------------------------------------


class Open(Value):
    """Start a child in every slot."""


class Submit(Value, Generic[WorkT]):
    """Queue these jobs."""

    jobs: Sequence[WorkT]


class Unsettled(Value):
    """The number of unsettled messages of ended jobs; the machine adds those that end from now on."""

    count: int


class Finished(Value, Generic[EndedT]):
    """A child's outcomes, in the order in which it ran the jobs."""

    child: int
    outcomes: Sequence[EndedT]


class ChildReady(Value):
    """A child has started and can take jobs."""

    child: int


class ChildDied(Value):
    """A child ended, and everything it sent has been read. `tokens` are those that remain in its pipe."""

    child: int
    tokens: bytes
    reason: str


class NotSent(Value):
    """These jobs of a Send could not be encoded: the error, by job number. The others were sent."""

    child: int
    reasons: Mapping[int, str]


class Recalled(Value):
    """The answer to Recall: the tokens that were still in the pipe. Sent even if the child is dead."""

    child: int
    tokens: bytes


class Withdraw(Value):
    """Return every job that has not started."""


class Interrupt(Value):
    """Interrupt every running job, because the worker stops."""


class Retire(Value):
    """Let the child finish its current job and end; another child takes its slot."""

    child: int
    reason: str


class Weighed(Value):
    """The answer to Weigh: how much memory the child uses; 0 if that is unknown."""

    child: int
    size_bytes: int


class Replace(Value):
    """Replace every current child, one after the other, when it is idle."""


class Resize(Value):
    """Change the number of children: start more, or end some when their jobs have ended (rule F4)."""

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
    """Ask the child to end after the jobs that it was sent."""

    child: int
    reason: str


class Weigh(Value):
    """Measure how much memory the child uses and answer with Weighed."""

    child: int


class Kill(Value):
    """Send SIGKILL; ChildDied follows, even for a child whose process has not started yet."""

    child: int
    reason: str


class Reported(Value, Generic[EndedT]):
    """The outcomes of jobs that were sent to this child."""

    child: int
    outcomes: Sequence[EndedT]


class JobBegan(Value):
    """A job that is known to run now. Not reported for every job."""

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
    fault: str = ""  # why every further attempt would fail in the same way


class JobsLost(Value):
    """These jobs end here without an outcome."""

    losses: Sequence[JobLoss]


class Withdrawn(Value, Generic[WorkT]):
    """The answer to Withdraw: the jobs that had not started."""

    jobs: Sequence[WorkT]


class Overweight(Value):
    """The child uses more than `memory_max_bytes`, perhaps because of this job.

    The child is replaced when the job has ended.
    """

    child: int
    job: int | None
    size_bytes: int


class PoolFailed(Value):
    """Children repeatedly die before they can take a job, and no other child exists.

    Slots keeps retrying, at growing intervals, but the worker should stop.
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
