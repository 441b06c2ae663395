"""Revoking: a revoke is stored as soon as a worker hears of it, as Celery's workers do.

Whoever waits for the task is told now, and not when its message would have run. What has an end already,
runs here, or was begun elsewhere keeps its state. Results that are sent back (rpc) have no address before
the message is read, so they follow with the message.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from celery import states
from msgspec.structs import replace

from umbel.control.commands import tasks
from umbel.control.commands.cluster import ids_in
from umbel.control.panel import Panel
from umbel.control.state import ControlState
from umbel.pools.guard import Raised, call_guarded
from umbel.protocol.pidbox import Request

NOT_BEGUN = frozenset({states.PENDING, states.RECEIVED, states.RETRY, states.REJECTED})
STORE_S = 10.0  # the command is answered then, whether the backend has stored it or not
log = logging.getLogger("umbel.celery")
Handler = Callable[..., Coroutine[Any, Any, dict[str, str]]]


def revoking_panel() -> Panel:
    """Our `revoke` and `terminate`, which then store that the tasks are revoked."""
    panel = Panel()
    for command in tasks.panel:
        if command.name in ("revoke", "terminate"):
            panel.add(replace(command, handler=_and_stored(command.handler)))
    return panel


def _and_stored(handler: Handler) -> Handler:
    async def call(
        state: ControlState, task_id: list[Any], *, request: Request, **arguments: Any
    ) -> dict[str, str]:
        names = _waiting(state, ids_in(task_id))
        reply = await handler(state, task_id, request=request, **arguments)
        try:
            async with asyncio.timeout(STORE_S):
                await asyncio.to_thread(_store, state.app, names)
        except TimeoutError:
            log.warning(
                "tasks are revoked, but not marked REVOKED yet; each will be when its message is fetched"
            )
        return reply

    return call


def _waiting(state: ControlState, task_ids: list[str]) -> dict[str, str]:
    """Those that do not run here, each with its task's name where that is known."""
    found = state.find(task_ids)
    return {
        task_id: found[task_id][1]["name"] if task_id in found else ""
        for task_id in task_ids
        if task_id not in found or found[task_id][0] != "active"
    }


def _store(app: Any, names: Mapping[str, str]) -> None:
    for task_id, name in names.items():
        task = app.tasks.get(name)
        backend = app.backend if task is None else task.backend
        if not _keeps_states(backend):
            continue
        stored = call_guarded(_mark, backend, task_id)
        if isinstance(stored, Raised):
            log.warning(
                "task is revoked, but cannot be marked REVOKED in the result backend",
                extra={"task_id": task_id, "error": repr(stored.error)},
            )


def _mark(backend: Any, task_id: str) -> None:
    if backend.get_state(task_id) in NOT_BEGUN:
        backend.mark_as_revoked(task_id, reason="revoked", store_result=True)


def _keeps_states(backend: Any) -> bool:
    kinds = {f"{one.__module__}:{one.__name__}" for one in type(backend).__mro__}
    return kinds.isdisjoint({"celery.backends.rpc:RPCBackend", "celery.backends.base:DisabledBackend"})
