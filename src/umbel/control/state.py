"""ControlState: what a control command may see and change of its worker.

The worker provides it (`worker/state.py`); commands, ours and users', know nothing else of it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from umbel.protocol.clock import LamportClock
from umbel.protocol.delivery import TaskRules


class ControlState(Protocol):
    @property
    def node(self) -> str: ...
    @property
    def pid(self) -> int: ...
    @property
    def clock(self) -> LamportClock:
        """The event clock: it was moved forward for this command already (P4)."""
        ...

    @property
    def uptime_s(self) -> float: ...
    @property
    def task_rules(self) -> Mapping[str, TaskRules]:
        """Every registered task, with the limits that hold now."""
        ...

    # -- the cluster -----------------------------------------------------------------------------

    def revoked_ids(self) -> Sequence[str]:
        """What Celery's peers are told: the ids that must not start, newest last, bounded."""
        ...

    async def revoke(self, task_ids: Sequence[str], *, is_recorded: bool) -> None:
        """They must not start from now on, here and, through the durable record, anywhere."""
        ...

    async def hello(self, said: Mapping[str, Any]) -> Any:
        """Take in what a node says that starts; what it is to know, or NO_ANSWER."""
        ...

    def members(self) -> Sequence[Mapping[str, Any]]:
        """Every node that this one knows, itself included."""
        ...

    def elect(self, request: Mapping[str, Any]) -> str:
        """Take part in an election; why this worker cannot, or nothing."""
        ...

    # -- events ----------------------------------------------------------------------------------

    def enable_task_events(self) -> bool:
        """False when they were on already."""
        ...

    def disable_task_events(self) -> bool:
        """False when no command had switched them on."""
        ...

    def beat(self) -> None:
        """Send a heartbeat at once."""
        ...

    # -- looking ---------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]: ...


Elect = Callable[[Mapping[str, Any]], str]
ELECTION_REFUSED = "this worker holds no elections"
