"""Pool: what the worker asks of the place where task code runs, and what a pool asks of the app.

The worker hands jobs in with `submit` and gets everything back through its `PoolListener`:
each job comes back exactly once, as an outcome, as lost, or from `withdraw`. A pool never
touches the broker.

Job numbers are given by the worker and name a job only inside this process.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from umbel.pools.abilities import Abilities
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
    start_by: float = 0.0  # on the machine's monotonic clock: its runner answers "late" after it; 0: whenever


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
    expected: bool = False  # for "failure": the task said that it raises such errors


class Told(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=8):
    """From a runner, while a job runs: an event of the user's own. `fields` is JSON."""

    number: int
    event_type: str
    at: float  # Unix time
    fields: bytes
    blind: bool = False  # without a clock value


class LostJob(msgspec.Struct, frozen=True, gc=False):
    """A job that ends without an outcome, because its child died or the pool was stopped.

    `started`: it was running when its child died, so it is charged. `ran`: it ran or may have
    run, at least in part, so it counts as redelivered when it comes again; also true for a job
    that ended but whose outcome was lost, and for one that was cut off by stopping the pool,
    neither of which is charged. `fault`: no child could be given the job, or its outcome could not
    be sent back, and the next try would end like this one.
    """

    number: int
    started: bool
    reason: str  # "process 4711 was killed by SIGSEGV"
    timed_out: bool = False  # ended by its hard limit
    ran: bool = False
    fault: str = ""  # why this job can never come back otherwise; its message is buried with this reason


class HostSpec(msgspec.Struct, frozen=True):
    """Where a child finds the app: `loader` ("module:callable") is called with `target`.

    It returns a `Host`. Pools know the app only through this, so that they need not import it.
    """

    loader: str
    target: str
    search_path: tuple[str, ...] = ()


class ChildContext(msgspec.Struct, frozen=True):
    node: str  # name@host of the worker
    child: int  # number of the slot, from 0
    loglevel: str = "WARNING"
    logfile: str | None = None  # may hold %I, %p and the like
    log_json: bool = False
    is_process: bool = False  # tasks have this process to themselves
    tell: Callable[[Told], None] | None = None  # safe in any thread; None where nobody hears it
    on_loop: bool = False  # the runner has to be an AsyncRunner


# Runs what users wrote through `guard.call_guarded`: there, and nowhere else, a soft limit raises.
Runner = Callable[[Job], Outcome]


class AsyncRunner(Protocol):
    """A runner that can also run `async def` tasks on the caller's event loop."""

    def __call__(self, job: Job) -> Outcome: ...
    def is_async(self, task: str) -> bool: ...
    async def run(self, job: Job) -> Outcome:
        """Raises CancelledError when the awaiting asyncio task was cancelled, and only then."""
        ...


class Host(Protocol):
    """What a pool asks of the app, inside a child."""

    def start_child(self, context: ChildContext) -> Runner:
        """Make ready: loader, logging, a tracer per task, `worker_process_init`."""
        ...

    def stop_child(self) -> None:
        """The child is about to end in good order: `worker_process_shutdown`."""
        ...


@runtime_checkable
class PreparedHost(Protocol):
    """A host that has something to do before there are children, where it was loaded."""

    def before_children(self, node: str, *, forks: bool) -> None:
        """Once in each process that loads the app, after that and before a task can run.

        `forks`: in the fork server, whose children are copies of it. Else tasks run in this process. What it
        raises keeps the pool from starting, as an error while loading does.
        """
        ...


@runtime_checkable
class LimitedHost(Protocol):
    """A host whose tasks know another class for the soft limit than `SoftTimeLimitExceeded`."""

    @property
    def soft_limit_error(self) -> type[Exception]:
        """Raised in the task without arguments. Coroutines (pool `asyncio`) get ours all the same."""
        ...


class PoolSettings(msgspec.Struct, frozen=True):
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
    max_memory_hard_bytes: int | None = None  # one that holds more is killed
    batch_max: int = 64
    batch_target_s: float = 0.010  # a child gets a batch that should take about this long
    batch_patience_s: float = 0.050  # after this, what waits behind a slow job is taken back
    stop_grace_s: float = 5.0  # between asking a child to end and SIGKILL


class PoolListener(Protocol):
    """Called on the worker's event loop; must not block."""

    def on_started(self, started: Sequence[tuple[int, float, int]]) -> None:
        """(job number, Unix time, pid) of jobs now known to run; not called for every job."""
        ...

    def on_told(self, told: Told) -> None:
        """A job that runs has something to tell; before its outcome, and of no job twice the same."""
        ...

    def on_outcomes(self, outcomes: Sequence[Outcome], pid: int) -> None: ...
    def on_lost(self, lost: Sequence[LostJob]) -> None: ...
    def on_child(self, what: str, fields: dict[str, Any]) -> None:
        """A child came or went, for logs and counters.

        "started", "ended" (as it was asked to), "died" (`how`: exit, killed, out-of-memory, signal);
        "heavy" (over `max_memory_bytes`: replaced after its job); "server-died" (the fork server,
        and all children with it), "spawning" (children start afresh, `because`), "reloaded" and
        "not-reloaded" (the app), "failed" (no child process survived start-up; the pool goes on
        trying, more and more slowly).
        """
        ...


@runtime_checkable
class Restartable(Protocol):
    """A pool whose children can be replaced while it works."""

    def restart(self, *, reload: bool = False) -> None:
        """Replace the children one by one, as they become idle; `reload`: load the app again first."""
        ...


class Pool(Protocol):
    @property
    def abilities(self) -> Abilities:
        """What it can do; the worker refuses settings and messages that ask for more."""
        ...

    @property
    def is_green(self) -> bool:
        """Whether many jobs share a loop that each must yield voluntarily.

        Such a pool in the main process can hold it up, so remote control gets a separate
        loop, thread and connection (P6).
        """
        ...

    async def start(self, listener: PoolListener) -> None:
        """Return when the children can take jobs; PoolError when they cannot be made."""
        ...

    def submit(self, jobs: Sequence[Job]) -> None:
        """Run these in this order as children become free. Never blocks, and refuses none: what
        cannot be run here comes back as lost, with its `fault`."""
        ...

    def room(self) -> int:
        """How many more jobs it could use now to keep its children busy for a moment."""
        ...

    def withdraw(self) -> Sequence[Job]:
        """Take back every job that has not started; those do not come back by the listener."""
        ...

    def cancel_job(self, number: int) -> bool:
        """Raise TaskCancelled inside this job, and in no other; False when it cannot.

        Nobody knows whether the job ends by that: it may catch it, or not be interrupted where it
        is. Asking again is harmless: it is raised once.
        """
        ...

    def terminate_job(self, number: int, signum: int) -> bool:
        """Signal the child that runs this job; False when it is not running."""
        ...

    def interrupt(self) -> int:
        """The worker stops: raise `WorkerStopping` in every job that runs; how many will hear it.

        0 where code cannot be interrupted from outside: then the jobs run on until the pool is stopped.
        """
        ...

    def resize(self, by: int) -> int:
        """More children, or fewer (F4); how many there will be.

        Children that run a job end when it has. NotSupported where the size is fixed.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """For `health` and `stats`: implementation, pids, and by task id the process each job runs in."""
        ...

    async def stop(self, *, grace_s: float) -> None:
        """End the children; jobs that still run after `grace_s` come back as lost."""
        ...
