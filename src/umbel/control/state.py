"""ControlState: what a control command may read and change of its worker.

The worker provides it (`worker/remote`); commands, Umbel's and users', know nothing else of the worker. It is
made of sections. A command of Umbel names the section that it needs; a user's command gets the whole.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from umbel.errors import BadBootsteps
from umbel.protocol.clock import LamportClock
from umbel.protocol.delivery.delivery import TaskRules

# ---- control state ---------------------------------------------------------------------------------
#
# What a control command may read and change of its worker.
#
# The worker provides it (`worker/remote`); commands, Umbel's and users', know nothing else of the worker.
# It is made of sections. A command of Umbel names the section that it needs; a user's command gets the
# whole.


class NodeSection(Protocol):
    """Which node this is: what every command may read."""

    @property
    def node(self) -> str:
        """The node's name."""

    @property
    def pid(self) -> int:
        """The id of the main process."""

    @property
    def clock(self) -> LamportClock:
        """The event clock; it was moved forward for this command already (P4)."""
        ...

    @property
    def app(self) -> Any:
        """The app that the worker runs for; None if it has none."""
        ...

    @property
    def uptime_s(self) -> float:
        """Seconds since the worker started."""


class InspectionSection(NodeSection, Protocol):
    """What a worker reports of itself."""

    def stats(self) -> dict[str, Any]:
        """Return counters, pool and broker, in the form of Celery's `stats`."""

    def health(self) -> dict[str, Any]:
        """Return whether the worker can fetch and settle messages, and how far a shutdown is."""

    def conf(self, *, with_defaults: bool) -> dict[str, Any]:
        """Return the settings as they may be shown: passwords are masked."""
        ...

    def report(self) -> str:
        """Return a text for bug reports."""


class TasksSection(NodeSection, Protocol):
    """Single tasks: running, waiting, revoked."""

    def active(self, *, safe: bool) -> list[dict[str, Any]]:
        """Return the requests that run. `safe`: arguments as text."""

    def reserved(self) -> list[dict[str, Any]]:
        """Return the requests that were claimed and have not started."""

    def scheduled(self) -> list[dict[str, Any]]:
        """Return the requests that this worker parked until they are due."""

    def find(self, task_ids: Sequence[str]) -> Mapping[str, tuple[str, dict[str, Any]]]:
        """Return state (active, reserved, scheduled) and request of those tasks that are here."""

    def revoked_ids(self) -> Sequence[str]:
        """Return the ids that must not start, newest last, bounded; Celery's peers get these."""
        ...

    async def revoke(
        self, task_ids: Sequence[str], *, headers: Sequence[str] = (), is_recorded: bool
    ) -> None:
        """Refuse these tasks from now on, here and, through the durable record, in the cluster.

        `headers`: tasks with such stamps, each written `key=value`. `is_recorded`: the record has the revoke
        already.
        """
        ...

    async def unrevoke(
        self, task_ids: Sequence[str], *, headers: Sequence[str] = (), is_recorded: bool
    ) -> None:
        """Allow these tasks again, here and, through the durable record, in the cluster."""
        ...

    def running_with(self, headers: Sequence[str]) -> Sequence[str]:
        """Return the ids of running tasks with such stamps."""
        ...

    def terminate(self, task_ids: Sequence[str], signal: str) -> Sequence[str]:
        """End these tasks where they run now; return the ids of those that did.

        SIGTERM interrupts the task before its process is ended; every other signal goes to the process at
        once.
        """
        ...


class LimitsSection(NodeSection, Protocol):
    """The registered tasks and their limits."""

    @property
    def task_rules(self) -> Mapping[str, TaskRules]:
        """Every registered task, with its present limits."""
        ...

    def unenforceable(self, task: str, *, soft: bool, hard: bool) -> str:
        """Return why the pool cannot enforce such limits; "" when it can."""
        ...

    def change_rules(self, task: str, rules: TaskRules) -> None:
        """Set the task's limits from its next start on."""
        ...


class QueuesSection(NodeSection, Protocol):
    """What is consumed, the prefetch limit, and the dead letters."""

    @property
    def queues(self) -> Sequence[str]:
        """The queues that are consumed now."""
        ...

    async def paused_queues(self) -> Collection[str]:
        """Return every paused queue of the cluster."""
        ...

    def add_queue(self, name: str) -> None:
        """Consume one more queue."""

    async def cancel_queue(self, name: str) -> None:
        """Consume a queue no longer."""

    @property
    def prefetch_max(self) -> int:
        """How many messages the worker holds at most, running and waiting."""
        ...

    def set_prefetch_max(self, most: int) -> None:
        """Claim at most this many from now on, at least 1; existing claims stay. Thread-safe."""
        ...

    async def dead_letters(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest dead letters as rows."""


class PoolSection(NodeSection, Protocol):
    """The process itself: its children, its memory, its end."""

    def resize_pool(self, by: int) -> int:
        """Add or remove children; return how many there will be. NotSupported where the size is fixed."""
        ...

    @property
    def is_autoscaled(self) -> bool:
        """Whether the autoscaler sets the size."""

    def autoscale(self, most: int | None, least: int | None) -> tuple[int, int]:
        """Set the bounds of the pool's size; ValueError where it is not autoscaled."""
        ...

    def restart_pool(self, *, reload: bool) -> None:
        """Replace the children one by one, as they become idle; `reload`: load the app again first."""
        ...

    async def stacks(self) -> dict[str, dict[str, str]]:
        """Return, by child, the task it runs and the stacks of its threads."""
        ...

    def memory_samples(self, count: int) -> Sequence[float]:
        """Return the last `count` samples of resident memory in MiB, the newest last."""
        ...

    def stop(self) -> None:
        """Request a shutdown, as SIGTERM does."""
        ...


class ClusterSection(NodeSection, Protocol):
    """What nodes know of one another: hello, members, elections, leases, events."""

    async def hello(self, greeting: Mapping[str, Any]) -> Any:
        """Take in the hello of a node; return the reply, or NO_ANSWER."""
        ...

    def members(self) -> Sequence[Mapping[str, Any]]:
        """Return every known node, this one included."""
        ...

    def elect(self, request: Mapping[str, Any]) -> str:
        """Take part in an election; return why this worker cannot, or ""."""
        ...

    async def leases(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the named leases, or those of the cluster itself that are held."""
        ...

    def enable_task_events(self) -> bool:
        """Send task events from now on; false if they were enabled already."""
        ...

    def disable_task_events(self) -> bool:
        """Withdraw that request; false if there was none."""
        ...

    async def look_for_recorders(self) -> None:
        """Check at once whether a recorder runs; log events if so."""
        ...

    def beat(self) -> None:
        """Send a heartbeat now."""
        ...


class ControlState(
    InspectionSection, TasksSection, LimitsSection, QueuesSection, PoolSection, ClusterSection, Protocol
):
    """All sections: what a user's command gets."""


Elect = Callable[[Mapping[str, Any]], str]
ELECTION_REFUSED = "elections are disabled on this worker"
NO_HANDLER = "no handler for topic"
NOT_NOW = "this worker is starting or stopping; ask again"


# ---- step description ------------------------------------------------------------------------------
#
# The description of a user's bootstep. Apps check it without an event loop.


def describe_step(kind: object) -> tuple[str, tuple[str, ...]]:
    """Return the step's name and what it requires; raises BadBootsteps for an invalid class."""
    name: Any = getattr(kind, "name", None)
    if not isinstance(kind, type) or not isinstance(name, str) or not name.isidentifier():
        raise BadBootsteps(f'bootstep {kind!r} is not a class with a name; write a class with name = "mine"')
    requires: Any = getattr(kind, "requires", ())
    if not isinstance(requires, tuple | list) or not all(isinstance(required, str) for required in requires):
        raise BadBootsteps(
            f"requires of bootstep {name!r} is {requires!r}; it must be a tuple of names, as in "
            'requires = ("tasks",)'
        )
    return name, tuple(requires)
