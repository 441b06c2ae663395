"""Pool: the interface that the worker uses to run task code, and the interface that a pool uses to reach the
app.

The worker submits jobs with `submit` and gets the results through its `PoolListener`: each job comes back
exactly once, as an outcome, as lost, or from `withdraw`. A pool never accesses the broker.

The worker assigns job numbers. They identify a job only within this process.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from umbel.pools.abilities import Abilities
from umbel.protocol.pool.events import BATCH_MAX
from umbel.wire.message import Message, Outgoing, StoredResult


class Job(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One message to run. `alone`: no other job may be queued behind it in the same child."""

    number: int
    task: str
    task_id: str
    queue: str
    message: Message
    soft_limit_s: float | None = None
    hard_limit_s: float | None = None
    alone: bool = False
    redelivered: bool = False
    clock_offset_s: float = 0.0  # the worker's correction of the wall clock: see `umbel/clock.py`
    lamport: int = 0  # the node's logical time, for traces
    start_by: float = 0.0  # monotonic clock: if the job starts later, the runner reports "late"; 0: no limit
    # id of the cluster that signed the message; "": it was unsigned; None: there are no keys
    signs_for: str | None = None


LoopChoice = Literal["auto", "asyncio", "uvloop"]

OutcomeKind = Literal["success", "failure", "retry", "ignored", "rejected", "requeued", "cancelled", "late"]


class Outcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How a job ended, as its runner reports it. The texts are for events and logs."""

    number: int
    kind: OutcomeKind
    started_at: float  # Unix time
    runtime_s: float
    results: Sequence[StoredResult] = ()
    follow_ups: Sequence[Outgoing] = ()
    summary: str = ""  # repr of the return value or of the exception
    traceback: str = ""
    not_before: float = 0.0  # for "retry": when the task is due again; for display only
    after: bytes = b""  # for `WorkerSettings.after_settle`, once all this is settled
    expected: bool = False  # for "failure": the error is listed in the task's `throws`


class UserEvent(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=8):
    """An event that a running task reports through its runner. `fields` is JSON."""

    number: int
    event_type: str
    at: float  # Unix time
    fields: bytes
    blind: bool = False  # without a clock value


class LostJob(msgspec.Struct, frozen=True, gc=False):
    """A job that ends without an outcome, because its child died or the pool was stopped.

    `started`: the job was running when its child died, so it counts as a failed start. `ran`: the job ran or
    may have run, at least in part, so the next delivery counts as a redelivery. `ran` is also true for a job
    whose outcome was lost after it ended, and for a job that was interrupted by stopping the pool; neither
    counts as a failed start. `fault`: the job could not be sent to a child, or its outcome could not be sent
    back, and a retry would end the same way.
    """

    number: int
    started: bool
    reason: str  # "process 4711 was killed by SIGSEGV"
    timed_out: bool = False  # ended at its hard limit
    ran: bool = False
    fault: str = ""  # why no retry can succeed; the message becomes a dead letter with this reason


class HostSpec(msgspec.Struct, frozen=True):
    """Where a child finds the app: it calls `loader` ("module:callable") with `target`.

    The loader returns a `Host`. Pools access the app only through it, so they need not import the app.
    """

    loader: str
    target: str
    search_path: tuple[str, ...] = ()


class ChildContext(msgspec.Struct, frozen=True):
    """What a host receives when a child starts, or when tasks run in the main process."""

    node: str  # name@host of the worker
    child: int  # slot number, from 0
    loglevel: str = "WARNING"
    logfile: str | None = None  # may contain placeholders such as %I and %p
    log_json: bool = False
    is_process: bool = False  # tasks run alone in this process
    # may be called in any thread; None if events are not reported
    tell: Callable[[UserEvent], None] | None = None
    on_loop: bool = False  # whether the runner must be an AsyncRunner


# It runs user code through `guard.call_guarded`, the only place where a soft limit may raise.
Runner = Callable[[Job], Outcome]


class AsyncRunner(Protocol):
    """A runner that can also run `async def` tasks on the caller's event loop."""

    def __call__(self, job: Job) -> Outcome: ...
    def is_async(self, task: str) -> bool:
        """Return whether the task is an `async def` function."""

    async def run(self, job: Job) -> Outcome:
        """Run the job on the caller's loop. CancelledError is raised only if the awaiting asyncio task was
        cancelled.
        """
        ...


class Host(Protocol):
    """The interface that a pool uses to reach the app inside a child."""

    def start_child(self, context: ChildContext) -> Runner:
        """Prepare this child: loader, logging, a tracer per task, and the signal `worker_process_init`."""
        ...

    def stop_child(self) -> None:
        """Send `worker_process_shutdown`, because the child is about to end normally."""
        ...


@runtime_checkable
class PreparedHost(Protocol):
    """A host that has work to do before children exist, in the process that loaded it."""

    def before_children(self, node: str, *, forks: bool) -> None:
        """Prepare the process that loaded the app, once, before any task can run.

        `forks`: this is the fork server, whose children are copies of it; otherwise tasks run in this
        process. An error raised here prevents the pool from starting, like an error while loading.
        """
        ...


class PoolSettings(msgspec.Struct, frozen=True):
    """The settings of all pools; each pool reads those that apply to it."""

    host: HostSpec
    node: str
    concurrency: int
    loglevel: str = "WARNING"
    logfile: str | None = None
    log_json: bool = False
    child_start: Literal["auto", "fork", "spawn"] = "auto"
    loop: LoopChoice = "auto"  # the event loop for coroutines
    green: bool = False  # children are patched by gevent
    green_children: int = 1
    start_timeout_s: float = 60.0
    start_attempts: int = 10  # failed starts in a row, after which a pool without children has failed
    max_tasks_per_child: int | None = None
    max_memory_bytes: int | None = None  # a child that uses more is replaced after its task
    max_memory_hard_bytes: int | None = None  # a child that uses more is killed
    batch_max: int = BATCH_MAX
    batch_target_s: float = 0.010  # a child gets a batch that should take about this long
    batch_patience_s: float = 0.050  # after this time, jobs queued behind a slow job are taken back
    stop_grace_s: float = 5.0  # between asking a child to end and SIGKILL


class PoolListener(Protocol):
    """The worker's callbacks, called on its event loop; they must not block."""

    def on_started(self, started: Sequence[tuple[int, float, int]]) -> None:
        """Receive (job number, Unix time, pid) of jobs that are running; not every job is reported."""
        ...

    def on_told(self, told: UserEvent) -> None:
        """Receive an event of a running job; called once per event, before the job's outcome."""
        ...

    def on_outcomes(self, outcomes: Sequence[Outcome], pid: int) -> None:
        """Receive the outcomes of jobs that ended in the process with this pid."""

    def on_lost(self, lost: Sequence[LostJob]) -> None:
        """Receive jobs that have no outcome."""

    def on_child(self, what: str, fields: dict[str, Any]) -> None:
        """Receive a child process event, for logs and counters.

        "started", "ended" (as requested), "died" (`how`: exit, killed, out-of-memory, signal); "heavy" (uses
        more than `max_memory_bytes`, so it is replaced after its job); "server-died" (the fork server and all
        its children); "spawning" (children start as new programs, `because`); "reloaded" and "not-reloaded"
        (the app); "failed" (no child process survived start-up; the pool keeps retrying, at growing
        intervals).
        """
        ...


class Pool(Protocol):
    """Runs jobs. Called on the worker's event loop only; no method blocks, and only `start` and `stop` are
    awaited.
    """

    @property
    def abilities(self) -> Abilities:
        """Return what the pool can do; the worker refuses settings and messages that need more."""
        ...

    @property
    def is_green(self) -> bool:
        """Return whether many jobs share an event loop, where each job must yield voluntarily.

        In the main process such jobs can block the loop, so remote control gets a separate loop, thread and
        connection (rule P6).
        """
        ...

    async def start(self, listener: PoolListener) -> None:
        """Start the children and wait until they can take jobs; raise PoolError if that fails."""
        ...

    def submit(self, jobs: Sequence[Job]) -> None:
        """Run jobs in this order as children become free. Never blocks, and never raises for a job.

        A job that cannot run here is reported as lost, with its `fault`.
        """
        ...

    def note_unsettled(self, count: int) -> None:
        """Receive the number of ended jobs whose messages are not settled yet.

        While there are many, a pool that sends jobs in batches pauses.
        """
        ...

    def room(self) -> int:
        """Return how many more jobs the pool needs now to keep its children busy for a moment."""
        ...

    def free(self) -> int:
        """Return how many more jobs could start at once."""
        ...

    def withdraw(self) -> Sequence[Job]:
        """Take back every job that has not started; these are not reported to the listener."""
        ...

    def cancel_job(self, number: int) -> bool:
        """Raise TaskCancelled inside this job, and in no other; return False if that is not possible.

        The job does not always end: it may catch the exception, or be in code that cannot be interrupted.
        Repeated calls are harmless: the exception is raised once.
        """
        ...

    def terminate_job(self, number: int, signum: int) -> bool:
        """Send a signal to the child that runs this job; return False if the job is not running."""
        ...

    def interrupt(self) -> int:
        """Raise `WorkerStopping` in every running job because the worker stops; return how many jobs can
        receive it.

        Returns 0 if code cannot be interrupted from outside; then the jobs continue until the pool is
        stopped.
        """
        ...

    def resize(self, by: int) -> int:
        """Add children, or remove some (rule F4); return the new number.

        Children that run a job end after it. NotSupported is raised if the size is fixed.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Return the state for `health` and `stats`: implementation, pids, and by task id the process of each
        job.
        """
        ...

    async def stop(self, *, grace_s: float) -> None:
        """End the children; jobs that still run after `grace_s` are reported as lost."""
        ...
