"""ControlState: what a control command may see and change of its worker.

The worker provides it (`worker/remote/state.py`); commands, ours and users', know nothing else of it. It is
made of sections. A command of ours names the section that it needs, a user's command gets the whole.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from umbel.protocol.clock import LamportClock
from umbel.protocol.delivery.delivery import TaskRules

REVOKE_RETENTION_S = 7 * 86_400.0


class NodeSection(Protocol):
    """Which node this is: what every command may see."""

    @property
    def node(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def clock(self) -> LamportClock:
        """The event clock: it was moved forward for this command already (P4)."""
        ...

    @property
    def app(self) -> Any:
        """The app that the worker runs for; None where nobody has said."""
        ...

    @property
    def uptime_s(self) -> float: ...


class InspectionSection(NodeSection, Protocol):
    """What a worker tells of itself."""

    def stats(self) -> dict[str, Any]: ...
    def health(self) -> dict[str, Any]: ...
    def conf(self, *, with_defaults: bool) -> dict[str, Any]:
        """The settings as they may be shown: passwords are masked."""
        ...

    def report(self) -> str: ...


class TasksSection(NodeSection, Protocol):
    """Single tasks: what runs, what waits, what must not run."""

    def active(self, *, safe: bool) -> list[dict[str, Any]]: ...
    def reserved(self) -> list[dict[str, Any]]: ...
    def scheduled(self) -> list[dict[str, Any]]: ...
    def find(self, task_ids: Sequence[str]) -> Mapping[str, tuple[str, dict[str, Any]]]: ...
    def revoked_ids(self) -> Sequence[str]:
        """What Celery's peers are told: the ids that must not start, newest last, bounded."""
        ...

    async def revoke(
        self, task_ids: Sequence[str], *, headers: Sequence[str] = (), is_recorded: bool
    ) -> None:
        """They must not start from now on, here and, through the durable record, anywhere.

        `headers`: tasks that are stamped so, each written `key=value`.
        """
        ...

    async def unrevoke(
        self, task_ids: Sequence[str], *, headers: Sequence[str] = (), is_recorded: bool
    ) -> None:
        """They may start again, here and, through the durable record, anywhere."""
        ...

    def running_with(self, headers: Sequence[str]) -> Sequence[str]:
        """The ids of tasks that run now and are stamped so."""
        ...

    def terminate(self, task_ids: Sequence[str], signal: str) -> Sequence[str]:
        """End these tasks where they run now; which of them did run.

        SIGTERM asks the task before it ends the process; every other signal goes there at once.
        """
        ...


class LimitsSection(NodeSection, Protocol):
    """The registered tasks and their limits."""

    @property
    def task_rules(self) -> Mapping[str, TaskRules]:
        """Every registered task, with the limits that hold now."""
        ...

    def unenforceable(self, task: str, *, soft: bool, hard: bool) -> str:
        """Why the pool cannot hold the task to such limits; "" when it can."""
        ...

    def change_rules(self, task: str, rules: TaskRules) -> None:
        """The task has these limits from its next start on."""
        ...


class QueuesSection(NodeSection, Protocol):
    """What is consumed, how much of it is held, and the dead letters."""

    @property
    def queues(self) -> Sequence[str]:
        """The queues that are consumed now."""
        ...

    async def paused_queues(self) -> Collection[str]:
        """Every queue of the cluster that is paused."""
        ...

    def add_queue(self, name: str) -> None: ...
    async def cancel_queue(self, name: str) -> None: ...
    @property
    def prefetch_max(self) -> int:
        """How many messages the worker holds at most, running and waiting."""
        ...

    def set_prefetch_max(self, most: int) -> None:
        """Claim at most so many from now on, at least 1; claims made already stay. Thread-safe."""
        ...

    async def dead_letters(self, limit: int) -> list[dict[str, Any]]: ...


class PoolSection(NodeSection, Protocol):
    """The process itself: its children, its memory, its end."""

    def resize_pool(self, by: int) -> int:
        """More children, or fewer; how many there will be. NotSupported where that cannot be."""
        ...

    @property
    def is_autoscaled(self) -> bool: ...
    def autoscale(self, most: int | None, least: int | None) -> tuple[int, int]:
        """Let the pool be between these sizes; ValueError where it is not autoscaled."""
        ...

    def restart_pool(self, *, reload: bool) -> None:
        """Replace the children one by one, as they become idle; `reload`: load the app again first."""
        ...

    async def stacks(self) -> dict[str, dict[str, str]]:
        """By child: the task it runs, and what its threads are at."""
        ...

    def memory_samples(self, count: int) -> Sequence[float]:
        """Resident memory in MiB: so many samples of those kept, the newest last."""
        ...

    def stop(self) -> None:
        """As a SIGTERM does."""
        ...


class ClusterSection(NodeSection, Protocol):
    """What nodes know of one another: hello, members, elections, leases, events."""

    async def hello(self, said: Mapping[str, Any]) -> Any:
        """Take in what a node says that starts; what it is to know, or NO_ANSWER."""
        ...

    def members(self) -> Sequence[Mapping[str, Any]]:
        """Every node that this one knows, itself included."""
        ...

    def elect(self, request: Mapping[str, Any]) -> str:
        """Take part in an election; why this worker cannot, or nothing."""
        ...

    async def leases(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Who holds these leases, or those of the cluster itself that somebody holds."""
        ...

    def enable_task_events(self) -> bool:
        """False when they were on already."""
        ...

    def disable_task_events(self) -> bool:
        """False when no command had switched them on."""
        ...

    async def look_for_recorders(self) -> None:
        """Log events from now on, if anybody records."""
        ...

    def beat(self) -> None:
        """Send a heartbeat at once."""
        ...


class ControlState(
    InspectionSection, TasksSection, LimitsSection, QueuesSection, PoolSection, ClusterSection, Protocol
):
    """All of it."""


Elect = Callable[[Mapping[str, Any]], str]
ELECTION_REFUSED = "elections are disabled on this worker"
