"""Commands about single tasks: what runs, what waits, what must not run."""

import signal as signals
from collections.abc import Mapping
from typing import Any

from umbel.control.commands.cluster import ids_in
from umbel.control.panel import Panel
from umbel.control.state import TasksSection
from umbel.protocol.pidbox import Request

panel = Panel()

DEFAULT_SIGNAL = "SIGTERM"
SHOWN_REVOKED_MAX = 50_000


@panel.inspect_command(alias="dump_active", args=[("safe", bool)], signature="[safe]")
def active(state: TasksSection, safe: bool = False, **_: Any) -> list[dict[str, Any]]:
    """The tasks that run there."""
    return state.active(safe=safe)


@panel.inspect_command(alias="dump_reserved")
def reserved(state: TasksSection, **_: Any) -> list[dict[str, Any]]:
    """The tasks that were taken and have not started."""
    return state.reserved()


@panel.inspect_command(alias="dump_schedule")
def scheduled(state: TasksSection, **_: Any) -> list[dict[str, Any]]:
    """The tasks that were found before their time and wait in the broker."""
    return state.scheduled()


@panel.inspect_command(alias="dump_revoked")
def revoked(state: TasksSection, **_: Any) -> list[str]:
    """The ids of tasks that must not start."""
    return list(state.revoked_ids())[-SHOWN_REVOKED_MAX:]


@panel.inspect_command(variadic="ids", signature="ID [ID ...]")
def query_task(state: TasksSection, ids: list[Any], **_: Any) -> Mapping[str, Any]:
    """What becomes of these tasks there."""
    return {task_id: list(found) for task_id, found in state.find(ids_in(ids)).items()}


@panel.control_command(variadic="task_id", signature="ID [ID ...]")
async def revoke(
    state: TasksSection,
    task_id: list[Any],
    terminate: bool = False,
    signal: Any = None,
    recorded: bool = False,
    *,
    request: Request,
    **_: Any,
) -> dict[str, str]:
    """See to it that tasks never start."""
    task_ids = ids_in(task_id)
    await state.revoke(task_ids, is_recorded=recorded or not _is_for_all(request))
    if not terminate:
        return {"ok": f"tasks {set(task_ids) or '{}'} flagged as revoked"}
    ended = state.terminate(task_ids, signal_name(signal))
    return {"ok": f"terminate: {', '.join(ended) if ended else 'tasks unknown'}"}


@panel.control_command(variadic="task_id", signature="ID [ID ...]")
async def unrevoke(
    state: TasksSection, task_id: list[Any], recorded: bool = False, *, request: Request, **_: Any
) -> dict[str, str]:
    """Take a revoke back: tasks that were not refused yet may start."""
    task_ids = ids_in(task_id)
    await state.unrevoke(task_ids, is_recorded=recorded or not _is_for_all(request))
    return {"ok": f"tasks {set(task_ids) or '{}'} may start again"}


@panel.control_command(args=[("signal", str)], variadic="task_id", signature="SIGNAL ID [ID ...]")
async def terminate(
    state: TasksSection, signal: Any, task_id: list[Any], *, request: Request, **_: Any
) -> dict[str, str]:
    """Revoke tasks and end the processes that run them."""
    return await revoke(state, task_id, terminate=True, signal=signal, request=request)


@panel.control_command(variadic="headers", signature="KEY=VALUE [KEY=VALUE ...]")
async def revoke_by_stamped_headers(
    state: TasksSection,
    headers: Any,
    terminate: bool = False,
    signal: Any = None,
    *,
    request: Request,
    **_: Any,
) -> dict[str, str]:
    """See to it that tasks with a stamped header never start."""
    stamps = _stamps(headers)
    lines = [f"{key}={value}" for key, values in stamps.items() for value in _listed(values)]
    if not lines:
        raise ValueError(f"{headers!r} is not a header; write KEY=VALUE")
    await state.revoke((), headers=lines, is_recorded=not _is_for_all(request))
    if not terminate:
        return {"ok": f"headers {stamps} flagged as revoked, but not terminated"}
    ended = state.terminate(state.running_with(lines), signal_name(signal))
    return {"ok": f"headers {stamps} {'revoked' if ended else 'were not terminated'}"}


def _is_for_all(request: Request) -> bool:
    """A request to some nodes only is not recorded: the record applies to all nodes."""
    return request.destination is None and not request.pattern


def _stamps(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return {str(key): value for key, value in given.items()}
    pairs = [str(one).partition("=") for one in _listed(given)]
    return {key: value for key, found, value in pairs if key and found}


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, list | tuple) else [values]


def signal_name(given: Any) -> str:
    """SIGTERM from "SIGTERM", "term" or 15; ValueError for what is no signal."""
    if given is None or given == "":
        return DEFAULT_SIGNAL
    try:
        if isinstance(given, int) or str(given).isdecimal():
            return signals.Signals(int(given)).name
        name = str(given).upper()
        return signals.Signals[name if name.startswith("SIG") else f"SIG{name}"].name
    except (KeyError, ValueError):
        raise ValueError(f"unknown signal {given!r}; use SIGTERM or SIGKILL") from None
