"""Pool: what the worker asks of the place where task code runs, and what a pool asks of the app.

The worker hands jobs in with `submit` and gets everything back through its `PoolListener`: each job comes
back exactly once, as an outcome, as lost, or from `withdraw`. A pool never touches the broker.

Job numbers are assigned by the worker and identify a job only inside this process.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from umbel.pools.abilities import Abilities
from umbel.protocol.pool.events import BATCH_MAX
from umbel.wire.message import Message, Outgoing, StoredResult


class Job(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One message to run. `alone`: nothing may wait behind it in the same child."""

    number: int
    task: str
    task_id: str
    queue: str
    message: Message
    soft_limit_s: float | None = None
    hard_limit_s: float | None = None
    alone: bool = False
    redelivered: bool = False
    clock_offset_s: float = 0.0  # by how much the worker corrects the wall clock: see `umbel/clock.py`
    lamport: int = 0  # the node's logical time, for traces
    start_by: float = 0.0  # monotonic clock: after it the runner answers "late"; 0: no limit
    signs_for: str | None = None  # the cluster; "": its message was unsigned; None: there are no keys


LoopChoice = Literal["auto", "asyncio", "uvloop"]

OutcomeKind = Literal["success", "failure", "retry", "ignored", "rejected", "requeued", "cancelled", "late"]


class Outcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How a job ended, as its runner saw it. The texts are for events and logs."""

    number: int
    kind: OutcomeKind
    started_at: float  # Unix time
    runtime_s: float
    results: Sequence[StoredResult] = ()
    follow_ups: Sequence[Outgoing] = ()
    summary: str = ""  # repr of the return value or of the exception
    traceback: str = ""
    not_before: float = 0.0  # for "retry": when it is due again; for display only
    after: bytes = b""  # for `WorkerSettings.after_settle`, once all this is settled
    expected: bool = False  # for "failure": the error is among the task's `throws`


class UserEvent(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=8):
    """An event that a running task reports through its runner. `fields` is JSON."""

    number: int
    event_type: str
    at: float  # Unix time
    fields: bytes
    blind: bool = False  # without a clock value


class LostJob(msgspec.Struct, frozen=True, gc=False):
    """A job that ends without an outcome, because its child died or the pool was stopped.

    `started`: it was running when its child died, so it is charged. `ran`: it ran or may have run, at least
    in part, so it counts as redelivered when it comes again. `ran` is also true for a job that ended but
    whose outcome was lost, and for one that was cut off by stopping the pool; neither is charged. `fault`: no
    child could be given the job, or its outcome could not be sent back, and the next try would end the same
    way.
    """

    number: int
    started: bool
    reason: str  # "process 4711 was killed by SIGSEGV"
    timed_out: bool = False  # ended by its hard limit
    ran: bool = False
    fault: str = ""  # why no retry can succeed; the message becomes a dead letter with this reason


class HostSpec(msgspec.Struct, frozen=True):
    """Where a child finds the app: `loader` ("module:callable") is called with `target`.

    It returns a `Host`. Pools know the app only through this, so that they need not import it.
    """

    loader: str
    target: str
    search_path: tuple[str, ...] = ()


class ChildContext(msgspec.Struct, frozen=True):
    """What a host is given when a child starts, or when tasks run in the main process."""

    node: str  # name@host of the worker
    child: int  # number of the slot, from 0
    loglevel: str = "WARNING"
    logfile: str | None = None  # may hold %I, %p and the like
    log_json: bool = False
    is_process: bool = False  # tasks have this process to themselves
    tell: Callable[[UserEvent], None] | None = None  # safe in any thread; None where events are not reported
    on_loop: bool = False  # the runner has to be an AsyncRunner


# Runs users' code through `guard.call_guarded`: a soft limit raises there and nowhere else.
Runner = Callable[[Job], Outcome]


class AsyncRunner(Protocol):
    """A runner that can also run `async def` tasks on the caller's event loop."""

    def __call__(self, job: Job) -> Outcome: ...
    def is_async(self, task: str) -> bool:
        """Whether the task is an `async def` function."""

    async def run(self, job: Job) -> Outcome:
        """Run the job on the caller's loop. Raises CancelledError only if the awaiting asyncio task was
        cancelled.
        """
        ...


class Host(Protocol):
    """What a pool asks of the app, inside a child."""

    def start_child(self, context: ChildContext) -> Runner:
        """Prepare this child: loader, logging, a tracer per task, `worker_process_init`."""
        ...

    def stop_child(self) -> None:
        """The child is about to end normally: `worker_process_shutdown`."""
        ...


@runtime_checkable
class PreparedHost(Protocol):
    """A host that has work to do before there are children, in the process that loaded it."""

    def before_children(self, node: str, *, forks: bool) -> None:
        """Called once in each process that loads the app, before a task can run.

        `forks`: in the fork server, whose children are copies of it. Else tasks run in this process. An error
        raised here keeps the pool from starting, as an error while loading does.
        """
        ...


@runtime_checkable
class LimitedHost(Protocol):
    """A host whose tasks expect a soft-limit exception other than `SoftTimeLimitExceeded`."""

    @property
    def soft_limit_error(self) -> type[Exception]:
        """Raised in the task without arguments. Coroutines (pool `asyncio`) get `SoftTimeLimitExceeded` all
        the same.
        """
        ...


class PoolSettings(msgspec.Struct, frozen=True):
    """The settings of any pool; each reads those that concern it."""

    host: HostSpec
    node: str
    concurrency: int
    loglevel: str = "WARNING"
    logfile: str | None = None
    log_json: bool = False
    child_start: Literal["auto", "fork", "spawn"] = "auto"
    loop: LoopChoice = "auto"  # on which coroutines run
    green: bool = False  # children are patched by gevent
    green_children: int = 1
    start_timeout_s: float = 60.0
    start_attempts: int = 10  # failed starts in a row, after which a pool without a child has failed
    max_tasks_per_child: int | None = None
    max_memory_bytes: int | None = None  # a child that holds more is replaced after its task
    max_memory_hard_bytes: int | None = None  # a child that holds more is killed
    batch_max: int = BATCH_MAX
    batch_target_s: float = 0.010  # a child gets a batch that should take about this long
    batch_patience_s: float = 0.050  # after this, jobs that wait behind a slow one are taken back
    stop_grace_s: float = 5.0  # between asking a child to end and SIGKILL


class PoolListener(Protocol):
    """Called on the worker's event loop; must not block."""

    def on_started(self, started: Sequence[tuple[int, float, int]]) -> None:
        """(job number, Unix time, pid) of jobs now known to run; not called for every job."""
        ...

    def on_told(self, told: UserEvent) -> None:
        """A running job reports an event; called before its outcome, and once per event."""
        ...

    def on_outcomes(self, outcomes: Sequence[Outcome], pid: int) -> None:
        """Jobs have ended in the process with this pid."""

    def on_lost(self, lost: Sequence[LostJob]) -> None:
        """Jobs come back without an outcome."""

    def on_child(self, what: str, fields: dict[str, Any]) -> None:
        """A child came or went, for logs and counters.

        "started", "ended" (as it was asked to), "died" (`how`: exit, killed, out-of-memory, signal); "heavy"
        (over `max_memory_bytes`: replaced after its job); "server-died" (the fork server, and all children
        with it), "spawning" (children start as new programs, `because`), "reloaded" and "not-reloaded" (the
        app), "failed" (no child process survived start-up; the pool keeps retrying, at growing intervals).
        """
        ...


@runtime_checkable
class Restartable(Protocol):
    """A pool whose children can be replaced while it works."""

    def restart(self, *, reload: bool = False) -> None:
        """Replace the children one by one, as they become idle; `reload`: load the app again first."""
        ...


class Pool(Protocol):
    """Runs jobs. Called on the worker's event loop only; nothing but `start` and `stop` waits."""

    @property
    def abilities(self) -> Abilities:
        """What it can do; the worker refuses settings and messages that ask for more."""
        ...

    @property
    def is_green(self) -> bool:
        """Whether many jobs share a loop that each must yield voluntarily.

        Such a pool in the main process can block it, so remote control gets a separate loop, thread and
        connection (P6).
        """
        ...

    async def start(self, listener: PoolListener) -> None:
        """Return when the children can take jobs; PoolError when they cannot be made."""
        ...

    def submit(self, jobs: Sequence[Job]) -> None:
        """Run these in this order as children become free. Never blocks, and refuses none: a job that cannot
        be run here comes back as lost, with its `fault`.
        """
        ...

    def note_unsettled(self, count: int) -> None:
        """How many messages of ended jobs are not settled yet. While they are many, a pool that hands over
        jobs in batches pauses.
        """
        ...

    def room(self) -> int:
        """How many more jobs it could use now to keep its children busy for a moment."""
        ...

    def free(self) -> int:
        """How many more jobs it could start at once."""
        ...

    def withdraw(self) -> Sequence[Job]:
        """Take back every job that has not started; those are not reported to the listener."""
        ...

    def cancel_job(self, number: int) -> bool:
        """Raise TaskCancelled inside this job, and in no other; False when it cannot.

        The job need not end by that: it may catch the exception, or be where it cannot be interrupted. Asking
        again is harmless: the exception is raised once.
        """
        ...

    def terminate_job(self, number: int, signum: int) -> bool:
        """Signal the child that runs this job; False when it is not running."""
        ...

    def interrupt(self) -> int:
        """The worker stops: raise `WorkerStopping` in every running job; returns how many jobs can get it.

        0 where code cannot be interrupted from outside: then the jobs run on until the pool is stopped.
        """
        ...

    def resize(self, by: int) -> int:
        """Add children, or remove some (F4); returns how many there will be.

        Children that run a job end after it. NotSupported where the size is fixed.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """For `health` and `stats`: implementation, pids, and by task id the process each job runs in."""
        ...

    async def stop(self, *, grace_s: float) -> None:
        """End the children; jobs that still run after `grace_s` come back as lost."""
        ...
