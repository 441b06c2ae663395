"""Commands by which nodes know one another and keep what all must know: revokes, events, elections."""

import logging
from collections.abc import Iterable
from typing import Any

from umbel.control.panel import Panel
from umbel.control.state import ClusterSection, QueuesSection

panel = Panel()
log = logging.getLogger("umbel.control")

REVOKED_AT_ONCE_MAX = 50_000
TASK_ID_MAX = 1000
DEAD_LETTERS_MAX = 1000
LEASE_NAME_MAX, LEASES_AT_ONCE_MAX = 200, 100


@panel.inspect_command(args=[("from_node", str)], hidden=True)
async def hello(state: ClusterSection, from_node: str, revoked: Any = None, **more: Any) -> Any:
    """A node that starts asks what it must know, and says what it knows."""
    return await state.hello({**more, "from_node": from_node, "revoked": revoked})


@panel.inspect_command
def members(state: ClusterSection, **_: Any) -> list[Any]:
    """Every node that this one knows, and what it knows of it."""
    return list(state.members())


@panel.inspect_command(variadic="names", signature="[NAME ...]")
async def leases(state: ClusterSection, names: list[Any] | None = None, **_: Any) -> list[dict[str, Any]]:
    """Who holds which lease, under which term, and for how long."""
    return await state.leases([str(name)[:LEASE_NAME_MAX] for name in names or ()][:LEASES_AT_ONCE_MAX])


@panel.control_command(args=[("id", str), ("topic", str)], hidden=True)
def election(
    state: ClusterSection, id: str, topic: str, action: Any = None, **more: Any
) -> dict[str, str] | None:
    """Take part in an election. Celery's form of the command has no answer, as with Celery."""
    problem = state.elect({"id": id, "topic": topic, "action": action, **more})
    if problem:
        log.warning(
            "election request refused by this node", extra={"election": str(id)[:128], "why": problem}
        )
        return {"error": problem}
    return {"ok": "taking part"} if "cver" in more else None


@panel.inspect_command(args=[("limit", int)], signature="[LIMIT]")
async def dlq(state: QueuesSection, limit: int = 20, **_: Any) -> list[dict[str, Any]]:
    """The newest dead letters of the broker."""
    return await state.dead_letters(max(1, min(limit, DEAD_LETTERS_MAX)))


@panel.control_command
def enable_events(state: ClusterSection) -> dict[str, str]:
    """Send task events."""
    return {"ok": f"task events {'' if state.enable_task_events() else 'already '}enabled"}


@panel.control_command
def disable_events(state: ClusterSection) -> dict[str, str]:
    """Stop sending the task events that `enable_events` asked for."""
    return {"ok": f"task events {'' if state.disable_task_events() else 'already '}disabled"}


@panel.control_command
async def heartbeat(state: ClusterSection) -> None:
    """Send a heartbeat event now, into the event log too if anybody records."""
    await state.look_for_recorders()
    state.beat()


def ids_in(given: Any) -> list[str]:
    """Task ids from a list, or from the keys of a map, which is how Celery before 5.7 sends them.

    What is no id is passed over: one bad entry must not keep the others from being revoked.
    """
    entries: Iterable[Any] = given if isinstance(given, list | tuple | dict) else [given]
    ids = [one for one in entries if isinstance(one, str) and 0 < len(one) <= TASK_ID_MAX]
    return list(dict.fromkeys(ids))[:REVOKED_AT_ONCE_MAX]
