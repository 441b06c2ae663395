"""The built-in control commands, family by family; the shapes of replies are Celery's (wire 5.3 to 5.5)."""

import asyncio
import gc
import logging
import os
import signal as signals
from collections.abc import Iterable, Mapping
from importlib import import_module
from shutil import which
from typing import TYPE_CHECKING, Any

from umbel.control.panel import Panel
from umbel.protocol.delivery.delivery import TaskRules
from umbel.protocol.delivery.limits import parse_rate, show_rate
from umbel.protocol.pidbox import Request
from umbel.wire.message import TIME_LIMIT_MAX_S, is_name

if TYPE_CHECKING:
    from umbel.worker.remote.view import WorkerView

log = logging.getLogger("umbel.control")

# ---- the state of a worker -------------------------------------------------------------------------

panel = Panel()  # all families of commands register here

BUILTIN_PREFIX = "celery."
DEFAULT_ITEMS = ("exchange", "routing_key", "rate_limit")


@panel.inspect_command(stateless=True)
def ping(_state: "WorkerView", **_: Any) -> dict[str, str]:
    """Check whether a worker answers."""
    return {"ok": "pong"}


@panel.inspect_command
def clock(state: "WorkerView", **_: Any) -> dict[str, int]:
    """The logical clock."""
    return {"clock": state.clock.value}


@panel.inspect_command
def stats(state: "WorkerView", **_: Any) -> dict[str, Any]:
    """Counters, pool, broker and resources."""
    return state.stats()


@panel.inspect_command
def health(state: "WorkerView", **_: Any) -> dict[str, Any]:
    """Whether it can fetch and settle messages, and its counters."""
    return state.health()


@panel.inspect_command(alias="dump_conf", args=[("with_defaults", bool)], signature="[with_defaults]")
def conf(state: "WorkerView", with_defaults: bool = False, **_: Any) -> dict[str, Any]:
    """The settings of its app, passwords masked."""
    return state.conf(with_defaults=with_defaults)


@panel.inspect_command
def report(state: "WorkerView") -> dict[str, str]:
    """Versions and settings, for a bug report."""
    return {"ok": state.report()}


@panel.inspect_command(alias="dump_tasks", variadic="taskinfoitems", signature="[ATTRIBUTE ...]")
def registered(
    state: "WorkerView", taskinfoitems: list[Any] | None = None, builtins: bool = False, **_: Any
) -> list[str]:
    """The tasks that the worker can run."""
    items = [str(item) for item in taskinfoitems or DEFAULT_ITEMS]
    return [
        _described(name, rules, items)
        for name, rules in sorted(state.task_rules.items())
        if builtins or not name.startswith(BUILTIN_PREFIX)
    ]


def _described(name: str, rules: TaskRules, items: list[str]) -> str:
    attributes = {
        "name": name,
        "rate_limit": show_rate(rules.rate_per_second) if rules.rate_per_second else None,
        "time_limit": rules.hard_limit_s,
        "soft_time_limit": rules.soft_limit_s,
        "acks_late": not rules.acks_before,
    }
    shown = [f"{item}={attributes[item]}" for item in items if attributes.get(item) is not None]
    return f"{name} [{' '.join(shown)}]" if shown else name


# ---- members, leases, elections, events ------------------------------------------------------------

REVOKED_AT_ONCE_MAX = 50_000
TASK_ID_MAX = 1000
DEAD_LETTERS_MAX = 1000
LEASE_NAME_MAX, LEASES_AT_ONCE_MAX = 200, 100


@panel.inspect_command(args=[("from_node", str)], hidden=True)
async def hello(state: "WorkerView", from_node: str, revoked: Any = None, **more: Any) -> Any:
    """Exchange revokes, clock and members with a node that starts."""
    return await state.hello({**more, "from_node": from_node, "revoked": revoked})


@panel.inspect_command
def members(state: "WorkerView", **_: Any) -> list[Any]:
    """Every node that this one knows, with its state."""
    return list(state.members())


@panel.inspect_command(variadic="names", signature="[NAME ...]")
async def leases(state: "WorkerView", names: list[Any] | None = None, **_: Any) -> list[dict[str, Any]]:
    """The holder of each lease, its term, and how long it is valid."""
    return await state.leases([str(name)[:LEASE_NAME_MAX] for name in names or ()][:LEASES_AT_ONCE_MAX])


@panel.control_command(args=[("id", str), ("topic", str)], hidden=True)
def election(
    state: "WorkerView", id: str, topic: str, action: Any = None, **more: Any
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
async def dlq(state: "WorkerView", limit: int = 20, **_: Any) -> list[dict[str, Any]]:
    """The newest dead letters of the broker."""
    return await state.dead_letters(max(1, min(limit, DEAD_LETTERS_MAX)))


@panel.control_command
def enable_events(state: "WorkerView") -> dict[str, str]:
    """Send task events."""
    return {"ok": f"task events {'' if state.enable_task_events() else 'already '}enabled"}


@panel.control_command
def disable_events(state: "WorkerView") -> dict[str, str]:
    """Stop sending the task events that `enable_events` asked for."""
    return {"ok": f"task events {'' if state.disable_task_events() else 'already '}disabled"}


@panel.control_command
async def heartbeat(state: "WorkerView") -> None:
    """Send a heartbeat event now, into the event log too if a recorder runs."""
    await state.look_for_recorders()
    state.beat()


def ids_in(given: Any) -> list[str]:
    """Return the task ids in a list, or in the keys of a map, which is how Celery before 5.7 sends them.

    Invalid ids are skipped: one bad entry must not prevent the revoke of the others.
    """
    entries: Iterable[Any] = given if isinstance(given, list | tuple | dict) else [given]
    ids = [entry for entry in entries if isinstance(entry, str) and 0 < len(entry) <= TASK_ID_MAX]
    return list(dict.fromkeys(ids))[:REVOKED_AT_ONCE_MAX]


# ---- tasks -----------------------------------------------------------------------------------------

DEFAULT_SIGNAL = "SIGTERM"
SHOWN_REVOKED_MAX = 50_000


@panel.inspect_command(alias="dump_active", args=[("safe", bool)], signature="[safe]")
def active(state: "WorkerView", safe: bool = False, **_: Any) -> list[dict[str, Any]]:
    """The tasks that run on the worker."""
    return state.active(safe=safe)


@panel.inspect_command(alias="dump_reserved")
def reserved(state: "WorkerView", **_: Any) -> list[dict[str, Any]]:
    """The tasks that the worker has claimed and not started."""
    return state.reserved()


@panel.inspect_command(alias="dump_schedule")
def scheduled(state: "WorkerView", **_: Any) -> list[dict[str, Any]]:
    """The tasks that the worker parked in the broker until they are due."""
    return state.scheduled()


@panel.inspect_command(alias="dump_revoked")
def revoked(state: "WorkerView", **_: Any) -> list[str]:
    """The ids of tasks that must not start."""
    return list(state.revoked_ids())[-SHOWN_REVOKED_MAX:]


@panel.inspect_command(variadic="ids", signature="ID [ID ...]")
def query_task(state: "WorkerView", ids: list[Any], **_: Any) -> Mapping[str, Any]:
    """The state of these tasks on the worker."""
    return {task_id: list(found) for task_id, found in state.find(ids_in(ids)).items()}


@panel.control_command(variadic="task_id", signature="ID [ID ...]")
async def revoke(
    state: "WorkerView",
    task_id: list[Any],
    terminate: bool = False,
    signal: Any = None,
    recorded: bool = False,
    *,
    request: Request,
    **_: Any,
) -> dict[str, str]:
    """Revoke tasks, so that they never start."""
    task_ids = ids_in(task_id)
    await state.revoke(task_ids, is_recorded=recorded or not _is_for_all(request))
    if not terminate:
        return {"ok": f"tasks {set(task_ids) or '{}'} flagged as revoked"}
    ended = state.terminate(task_ids, signal_name(signal))
    return {"ok": f"terminate: {', '.join(ended) if ended else 'tasks unknown'}"}


@panel.control_command(variadic="task_id", signature="ID [ID ...]")
async def unrevoke(
    state: "WorkerView", task_id: list[Any], recorded: bool = False, *, request: Request, **_: Any
) -> dict[str, str]:
    """Undo a revoke: tasks that were not refused yet may start."""
    task_ids = ids_in(task_id)
    await state.unrevoke(task_ids, is_recorded=recorded or not _is_for_all(request))
    return {"ok": f"tasks {set(task_ids) or '{}'} may start again"}


@panel.control_command(args=[("signal", str)], variadic="task_id", signature="SIGNAL ID [ID ...]")
async def terminate(
    state: "WorkerView", signal: Any, task_id: list[Any], *, request: Request, **_: Any
) -> dict[str, str]:
    """Revoke tasks and end the processes that run them."""
    return await revoke(state, task_id, terminate=True, signal=signal, request=request)


@panel.control_command(variadic="headers", signature="KEY=VALUE [KEY=VALUE ...]")
async def revoke_by_stamped_headers(
    state: "WorkerView",
    headers: Any,
    terminate: bool = False,
    signal: Any = None,
    *,
    request: Request,
    **_: Any,
) -> dict[str, str]:
    """Revoke all tasks with a stamped header."""
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
    pairs = [str(pair).partition("=") for pair in _listed(given)]
    return {key: value for key, found, value in pairs if key and found}


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, list | tuple) else [values]


def signal_name(given: Any) -> str:
    """Return SIGTERM for "SIGTERM", "term" or 15; raises ValueError for an unknown signal."""
    if given is None or given == "":
        return DEFAULT_SIGNAL
    try:
        if isinstance(given, int) or str(given).isdecimal():
            return signals.Signals(int(given)).name
        name = str(given).upper()
        return signals.Signals[name if name.startswith("SIG") else f"SIG{name}"].name
    except (KeyError, ValueError):
        raise ValueError(f"unknown signal {given!r}; use SIGTERM or SIGKILL") from None


# ---- limits ----------------------------------------------------------------------------------------


@panel.control_command(args=[("task_name", str), ("rate_limit", str)], signature="TASK RATE")
def rate_limit(state: "WorkerView", task_name: str, rate_limit: Any, **_: Any) -> dict[str, str]:
    """Limit how often each worker starts a task: 10/s, 100/m, 500/h; 0 removes the limit."""
    rules = state.task_rules.get(task_name)
    try:
        per_second = parse_rate(rate_limit or 0)
    except ValueError as error:
        return {"error": f"Invalid rate limit string: {error}"}
    if rules is None:
        return {"error": "unknown task"}
    state.change_rules(task_name, rules.replaced(rate_per_second=per_second))
    if not per_second:
        return {"ok": "rate limit disabled successfully"}
    return {"ok": "new rate limit set successfully"}


@panel.control_command(
    args=[("task_name", str), ("soft", float), ("hard", float)], signature="TASK SOFT_S [HARD_S]"
)
def time_limit(
    state: "WorkerView", task_name: str, hard: float | None = None, soft: float | None = None, **_: Any
) -> dict[str, str]:
    """End a task after this many seconds; at the soft limit it is asked to end by itself."""
    rules = state.task_rules.get(task_name)
    if rules is None:
        return {"error": "unknown task"}
    for name, limit in (("soft", soft), ("hard", hard)):
        if limit and not 0 < limit <= TIME_LIMIT_MAX_S:
            return {"error": f"{name} must be a number of seconds above 0, at most ten years, not {limit!r}"}
    if reason := state.unenforceable(task_name, soft=bool(soft), hard=bool(hard)):
        return {"error": f"this worker's pool cannot enforce this limit: {reason}; start it with prefork"}
    state.change_rules(task_name, rules.replaced(soft_limit_s=soft or None, hard_limit_s=hard or None))
    return {"ok": "time limits set successfully"}


# ---- queues ----------------------------------------------------------------------------------------

QUEUE_NAME_MAX = 200


@panel.inspect_command
async def active_queues(state: "WorkerView") -> list[dict[str, Any]]:
    """The queues that the worker consumes, and which of them are paused."""
    paused = await state.paused_queues()
    return [queue_map(name) | ({"paused": True} if name in paused else {}) for name in state.queues]


@panel.control_command(
    args=[("queue", str), ("exchange", str), ("exchange_type", str), ("routing_key", str)],
    signature="QUEUE",
)
def add_consumer(
    state: "WorkerView",
    queue: str,
    exchange: str | None = None,
    exchange_type: str | None = None,
    routing_key: str | None = None,
    **_: Any,
) -> dict[str, str]:
    """Consume one more queue."""
    if problem := queue_name_problem(queue):
        return {"error": problem}
    if (exchange or queue, exchange_type or "direct", routing_key or queue) != (queue, "direct", queue):
        return {"error": "exchange and routing_key must equal the queue, and the exchange type direct"}
    state.add_queue(queue)
    return {"ok": f"add consumer {queue}"}


@panel.control_command(args=[("queue", str)], signature="QUEUE")
async def cancel_consumer(state: "WorkerView", queue: str, **_: Any) -> dict[str, str]:
    """Stop consuming a queue; its running tasks go on."""
    await state.cancel_queue(queue)
    return {"ok": f"no longer consuming from {queue}"}


def queue_name_problem(queue: str) -> str:
    """Return why this cannot be the name of a queue; "" if it can."""
    if 0 < len(queue) <= QUEUE_NAME_MAX and is_name(queue):
        return ""
    return f"a queue name must have 1 to {QUEUE_NAME_MAX} characters and no NUL"


def queue_map(name: str) -> dict[str, Any]:
    """Return a queue in the form of Celery's `active_queues`."""
    return {
        "name": name,
        "exchange": {
            "name": name,
            "type": "direct",
            "arguments": None,
            "durable": True,
            "passive": False,
            "auto_delete": False,
            "delivery_mode": None,
            "no_declare": False,
        },
        "routing_key": name,
        "queue_arguments": None,
        "binding_arguments": None,
        "consumer_arguments": None,
        "durable": True,
        "exclusive": False,
        "auto_delete": False,
        "no_ack": False,
        "alias": None,
        "bindings": [],
        "no_declare": None,
        "expires": None,
        "message_ttl": None,
        "max_length": None,
        "max_length_bytes": None,
        "max_priority": None,
    }


# ---- the process: pool, memory, shutdown -----------------------------------------------------------

GROW_MAX = 1000
GRAPHED_MAX, GRAPH_DEPTH_MAX = 1000, 20
_AUTOSCALED = "{} is not supported with autoscale. Adjust autoscale range instead."


@panel.control_command(args=[("n", int)], signature="[N=1]")
def pool_grow(state: "WorkerView", n: int = 1, **_: Any) -> dict[str, str]:
    """Start more children."""
    if state.is_autoscaled:
        return {"error": _AUTOSCALED.format("pool_grow")}
    state.resize_pool(_checked(n))
    return {"ok": "pool will grow"}


@panel.control_command(args=[("n", int)], signature="[N=1]")
def pool_shrink(state: "WorkerView", n: int = 1, **_: Any) -> dict[str, str]:
    """End idle children, or busy ones as soon as they are idle."""
    if state.is_autoscaled:
        return {"error": _AUTOSCALED.format("pool_shrink")}
    state.resize_pool(-_checked(n))
    return {"ok": "pool will shrink"}


@panel.control_command(args=[("reload", bool)], signature="[RELOAD]")
def pool_restart(state: "WorkerView", reload: bool = False, **_: Any) -> dict[str, str]:
    """Replace the children one by one, as they become idle; with RELOAD, load the app again first."""
    state.restart_pool(reload=bool(reload))
    return {"ok": "reload started"}


@panel.control_command(args=[("max", int), ("min", int)], signature="[MAX [MIN]]")
def autoscale(state: "WorkerView", max: int | None = None, min: int | None = None) -> dict[str, str]:
    """Let the pool grow and shrink between these sizes."""
    most, least = state.autoscale(max, min)
    return {"ok": f"autoscale now max={most} min={least}"}


@panel.control_command(args=[("msg", str)], answered=False)
def shutdown(state: "WorkerView", msg: str = "", **_: Any) -> None:  # noqa: ARG001 (Celery sends it)
    """Finish running tasks and shut down."""
    state.stop()


@panel.inspect_command
async def stacks(state: "WorkerView", **_: Any) -> dict[str, dict[str, str]]:
    """The stack trace of each child, for a task that is stuck."""
    return await state.stacks()


@panel.inspect_command
def memsample(state: "WorkerView", **_: Any) -> str | None:
    """How much memory the main process uses."""
    samples = state.memory_samples(1)
    return _shown(samples[-1]) if samples else None


@panel.inspect_command(args=[("samples", int)], signature="[N=10]")
def memdump(state: "WorkerView", samples: int = 10, **_: Any) -> str:
    """The memory samples that `memsample` took."""
    taken = [_shown(sample) for sample in state.memory_samples(max(1, samples))] or ["unknown"]
    return "\n".join(
        ["- rss (sample):", *(f"-    > {sample}," for sample in taken), f"- rss (end): {taken[-1]}."]
    )


@panel.inspect_command(
    args=[("num", int), ("max_depth", int), ("type", str)], signature="[NUM [DEPTH [TYPE]]]"
)
async def objgraph(
    _state: "WorkerView", num: int = 200, max_depth: int = 10, type: str = "Request"
) -> dict[str, str]:
    """Draw what refers to objects of TYPE in the main process, into a file there; needs objgraph."""
    if not (1 <= num <= GRAPHED_MAX and 1 <= max_depth <= GRAPH_DEPTH_MAX):
        limits = f"num from 1 to {GRAPHED_MAX}, max_depth from 1 to {GRAPH_DEPTH_MAX}"
        raise ValueError(f"num {num} and max_depth {max_depth} are out of range; give {limits}")
    return {"filename": await asyncio.to_thread(_draw_referrers, type, num, max_depth)}


def _draw_referrers(type_name: str, num: int, max_depth: int) -> str:
    """Return the path of the picture, or of the graph as text where Graphviz is not installed."""
    from tempfile import mkstemp  # half a megabyte of modules that few workers need

    try:
        library: Any = import_module("objgraph")
    except ImportError:
        raise ImportError(
            "objgraph is not installed where this worker runs; run: pip install objgraph"
        ) from None
    frozen = gc.get_freeze_count()
    gc.unfreeze()  # else objects from the start are hidden, which refer to many of the others
    try:
        objects = library.by_type(type_name)[:num]
        if not objects:
            raise ValueError(f"the main process of this worker has no objects of type {type_name!r}")
        descriptor, path = mkstemp(prefix="umbel-objgraph-", suffix=".png" if which("dot") else ".dot")
        os.close(descriptor)
        chosen = {id(item) for item in objects}
        library.show_backrefs(
            objects, max_depth=max_depth, filename=path, highlight=lambda item: id(item) in chosen
        )
    finally:
        if frozen:
            gc.freeze()
    return path


def _checked(n: int) -> int:
    if not 1 <= n <= GROW_MAX:
        raise ValueError(
            f"the number of child processes to add or remove, n, must be from 1 to {GROW_MAX}, not {n}"
        )
    return n


def _shown(mebibytes: float) -> str:
    return f"{mebibytes:.3f}MB"


def builtin_panel() -> Panel:
    """Return a new panel with all built-in commands, for a worker or a command line."""
    builtin = Panel()
    builtin.include(panel)
    return builtin
