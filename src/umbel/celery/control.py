"""Control commands of a Celery project: functions registered with Celery's `Panel`, and revoking.

Registered functions are called as Celery's worker calls them: with a state that has `app`, `hostname` and
`tset`, and with keyword arguments. What depends on Celery's consumer raises NotSupported.

A revoke is stored as soon as a worker receives it, as Celery's workers do: a client that waits for the task
gets its result now, and not when the message would have run. A task that has ended, runs here, or was begun
elsewhere keeps its state. Results that are sent back (rpc) have no address before the message is read, so
they follow with the message.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from celery import states
from celery.worker import control as celerys
from msgspec.structs import replace

from umbel.control.commands import builtin_panel, ids_in
from umbel.control.panel import Command, Panel, UsersPanel
from umbel.errors import NotSupported
from umbel.pools.guard import Raised, call_guarded
from umbel.protocol.pidbox import Request

if TYPE_CHECKING:
    from umbel.worker.remote.view import WorkerView

# ---- revoking --------------------------------------------------------------------------------------
#
# A revoke is stored as soon as a worker receives it, as Celery's workers do.
#
# Callers that wait for the task get its end now, not when its message would have run. A task that has ended,
# runs here, or was started elsewhere keeps its state. Results that are sent back (rpc) have no address before
# the message is read, so they follow with the message.

NOT_BEGUN = frozenset({states.PENDING, states.RECEIVED, states.RETRY, states.REJECTED})
STORE_S = 10.0  # after this the command is answered, whether the backend has stored it or not
log = logging.getLogger("umbel.celery")
Handler = Callable[..., Coroutine[Any, Any, dict[str, str]]]


def revoking_panel() -> Panel:
    """Umbel's `revoke` and `terminate`, which here also store that the tasks are revoked."""
    panel = Panel()
    for command in builtin_panel():
        if command.name in ("revoke", "terminate"):
            panel.add(replace(command, handler=_and_stored(command.handler)))
    return panel


def _and_stored(handler: Handler) -> Handler:
    async def call(
        state: "WorkerView", task_id: list[Any], *, request: Request, **arguments: Any
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


def _waiting(state: "WorkerView", task_ids: list[str]) -> dict[str, str]:
    """The tasks that do not run here, each with its name if that is known."""
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
    kinds = {f"{base.__module__}:{base.__name__}" for base in type(backend).__mro__}
    return kinds.isdisjoint({"celery.backends.rpc:RPCBackend", "celery.backends.base:DisabledBackend"})


# ---- control commands of a celery project ----------------------------------------------------------
#
# Functions registered with Celery's `Panel`, as commands of ours.
#
# They are called as Celery's worker calls them: with a state that has `app`, `hostname` and `tset`, and
# with keyword arguments. What hangs on Celery's consumer is not there, and says so.

# Celery's own commands that show what belongs to Celery, such as its settings by their names.
_CELERYS = ("conf", "report")
_TYPES = (int, float, bool, str, list)


def celery_panel() -> Panel:
    """The commands of such a worker besides Umbel's: the project's, and Celery's `conf` and `report`."""
    panel, users = revoking_panel(), UsersPanel()
    for command in (*map(_command, _CELERYS), *users_commands()):
        users.add(command)
    panel.include(users)
    return panel


def users_commands() -> Iterator[Command]:
    """The commands that the project has registered with Celery's Panel."""
    for name in celerys.Panel.meta:
        if celerys.Panel.data[name].__module__ != celerys.__name__:
            yield _command(name)


class CeleryState:
    """The `state` of a handler: Celery's names, and everything that Umbel's commands see."""

    def __init__(self, state: "WorkerView") -> None:
        self._state = state
        self.app = state.app
        self.hostname = state.node
        self.tset = set

    @property
    def consumer(self) -> Any:
        """Raises NotSupported: there is no consumer of Celery's here."""
        raise NotSupported(
            "state.consumer is Celery's consumer, which a worker of Umbel's does not have; "
            "use state.app, state.hostname, or what umbel.worker.remote.view.WorkerView offers"
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


def _command(name: str) -> Command:
    handler, meta = celerys.Panel.data[name], celerys.Panel.meta[name]
    return Command(
        name,
        _with_state(handler),
        changes=meta.type != "inspect",
        arguments=tuple((str(argument), _type(kind)) for argument, kind in meta.args or ()),
        variadic=meta.variadic or "",
        aliases=(meta.alias,) if meta.alias else (),
        usage=meta.signature or "",
        help=meta.help or "",
        is_hidden=not meta.visible,
    )


def _with_state(handler: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(handler)
    def call(state: "WorkerView", **arguments: Any) -> Any:
        return handler(CeleryState(state), **arguments)

    return call


def _type(kind: Any) -> type:
    """The type of an argument. Celery accepts any function from text to value; Umbel's commands need
    types.
    """
    if kind is celerys.strtobool:
        return bool
    return kind if kind in _TYPES else str
