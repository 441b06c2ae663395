"""Exporters: the cluster for other tools: metrics for Prometheus, and Flower's paths in Flower's shapes.

Metric names that begin with `umbel_` are ours; those that begin with `flower_` are Flower's, with its labels,
so its dashboards and alerts still work. `/api/workers`, `/api/tasks`, `/api/task/info/ID` and
`/api/queues/length` only read; what Flower changes there is `POST /api/v1/actions` here.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from umbel.errors import BrokerError
from umbel.events.meters import FlowerMeters
from umbel.events.state import Tracked
from umbel.events.view import TaskRecord
from umbel.exposition import CONTENT_TYPE, counter, gauge, histogram, of_tasks, text_of
from umbel.monitor.records import TaskFilter
from umbel.web.problems import Refused, as_json
from umbel.web.redaction import DETAIL_MAX, LIST_MAX, redact_data, redact_task
from umbel.web.site import PAGE_MAX
from umbel.wire.control import Stats, typed

if TYPE_CHECKING:
    from umbel.web.dashboard import Dashboard


# ---- metrics ---------------------------------------------------------------------------------------
#
# Metrics of the cluster in Prometheus's text format, made from what is known when they are asked for.
#
# Names that begin with `umbel_` are ours. Those that begin with `flower_` are Flower's, with its labels:
# its dashboards and alerts go on. Series of nodes that left go away with the node; task names are bounded.

ASKED_EVERY_S = 15.0
METRICS_TIMEOUT_S = 2.0
LETTERS_MAX = 1000
GONE_S = 300.0  # the series of a node end so long after it left or was lost
Row = tuple[tuple[str, ...], float]


def metrics_routes(dashboard: "Dashboard") -> list[BaseRoute]:
    """Return the route of `/metrics`."""
    collector = ClusterCollector(dashboard)

    async def metrics(_request: Request) -> Response:
        await collector.look()
        return Response(text_of(collector), media_type=CONTENT_TYPE)

    return [Route("/metrics", metrics, methods=["GET"])]


class ClusterCollector(Collector):
    """Collects the metrics of the cluster; the nodes are asked at most every ASKED_EVERY_S, however many
    scrape.

    The series of nodes that left end with the node; task names are bounded.
    """

    def __init__(self, dashboard: "Dashboard") -> None:
        self._dashboard = dashboard
        self._asked_at = -ASKED_EVERY_S
        self._stats: dict[str, Stats] = {}
        self._letters = 0
        self._log: dict[str, int] = {}

    async def look(self) -> None:
        """Ask the nodes for stats and the broker for dead letters and lag, if the last answers are old."""
        now = monotonic()
        if now - self._asked_at < ASKED_EVERY_S:
            return
        self._asked_at = now
        asked = (
            self._dashboard.feed.ask("stats", {}, timeout_s=METRICS_TIMEOUT_S),
            self._dashboard.dead_letter_count(LETTERS_MAX),
            self._dashboard.log_lag(),
        )
        stats, letters, lag = await asyncio.gather(*asked, return_exceptions=True)
        for answer in (stats, letters, lag):
            if isinstance(answer, BaseException) and not isinstance(answer, BrokerError):
                raise answer
        replies = {} if isinstance(stats, BaseException) else stats.replies
        self._stats = {node: typed(reply, Stats) for node, reply in replies.items()}
        self._letters = self._letters if isinstance(letters, BaseException) else letters
        self._log = self._log if isinstance(lag, BaseException) else lag

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics from the model and the last answers."""
        yield from of_tasks(self._dashboard.cluster.model.meters)
        yield from self._of_queues()
        yield from self._of_nodes()
        yield from self._of_stats()
        yield from self._of_the_dashboard()
        yield from self._as_flower()

    def _of_queues(self) -> Iterator[Metric]:
        queues = self._dashboard.queues()
        for name, text in (
            ("ready", "Messages that wait"),
            ("delayed", "Messages not due yet"),
            ("claimed", "Messages claimed by workers"),
            ("paused", "1 while the queue is paused"),
        ):
            rows = [((queue.queue,), float(getattr(queue, name))) for queue in queues]
            yield gauge(f"umbel_queue_{name}", f"{text}.", ("queue",), rows)
        oldest = [((queue.queue,), queue.oldest_s) for queue in queues if queue.oldest_s is not None]
        yield gauge("umbel_queue_oldest_seconds", "Age of the oldest known waiting task.", ("queue",), oldest)
        yield gauge(
            "umbel_dead_letters", f"Dead letters, counted up to {LETTERS_MAX}.", (), [((), self._letters)]
        )

    def _of_nodes(self) -> Iterator[Metric]:
        nodes = self._dashboard.nodes()
        states = Counter(node.state for node in nodes)
        rows: list[Row] = [((state,), float(states[state])) for state in ("alive", "suspect", "lost", "left")]
        yield gauge("umbel_nodes", "Nodes by state.", ("state",), rows)
        present = [node for node in nodes if node.state in ("alive", "suspect")]
        yield gauge(
            "umbel_node_active",
            "Tasks in flight.",
            ("node",),
            [((node.node,), node.active) for node in present],
        )
        leases = [lease for lease in self._dashboard.leases() if lease.holder]
        held = [((lease.name, lease.holder), 1.0) for lease in leases]
        yield gauge("umbel_leader", "Who holds which lease.", ("lease", "node"), held)
        elections = Counter(election.phase for election in self._dashboard.elections())
        ended = [((phase,), float(number)) for phase, number in sorted(elections.items())]
        yield gauge("umbel_elections", "Elections in memory, by phase.", ("phase",), ended)

    def _of_stats(self) -> Iterator[Metric]:
        """Yield what the nodes report when asked; Celery's report less."""
        found: dict[str, list[Row]] = {"children": [], "memory": [], "reconnects": [], "died": []}
        for node, stats in sorted(self._stats.items()):
            if stats.pool.processes is not None:
                found["children"].append(((node,), float(len(stats.pool.processes))))
            if stats.rusage.maxrss is not None:
                found["memory"].append(((node,), stats.rusage.maxrss * 1024.0))
            if stats.umbel is not None:
                links, counters = stats.umbel.links or {}, stats.umbel.counters or {}
                found["reconnects"].append(((node,), float(sum(links.values()))))
                found["died"].append(((node,), float(counters.get("children_died", 0))))
        yield gauge("umbel_node_children", "Child processes.", ("node",), found["children"])
        yield gauge("umbel_node_memory_bytes", "Peak memory of the main process.", ("node",), found["memory"])
        yield counter(
            "umbel_node_reconnects", "Connections that were restored.", ("node",), found["reconnects"]
        )
        yield counter("umbel_node_children_died", "Children that died.", ("node",), found["died"])
        lag = [((name,), float(events)) for name, events in sorted(self._log.items())]
        yield gauge("umbel_recorder_lag_events", "Events not recorded yet.", ("recorder",), lag)

    def _of_the_dashboard(self) -> Iterator[Metric]:
        model, hub = self._dashboard.cluster.model, self._dashboard.hub
        unreadable = model.state.unreadable + model.receiver.undecodable + model.dropped
        yield counter("umbel_events_heard", "Events received.", (), [((), model.state.heard)])
        yield counter("umbel_events_unreadable", "Events that could not be read.", (), [((), unreadable)])
        yield gauge("umbel_web_tasks_known", "Tasks in memory.", (), [((), len(model.state))])
        yield gauge("umbel_web_streams", "Open streams.", (), [((), hub.clients)])
        yield counter("umbel_web_streams_dropped", "Streams dropped as too slow.", (), [((), hub.dropped)])
        is_hearing = 0.0 if self._dashboard.problem else 1.0
        yield gauge(
            "umbel_web_hears_cluster", "1 while events are received from the cluster.", (), [((), is_hearing)]
        )

    def _as_flower(self) -> Iterator[Metric]:
        nodes = self._dashboard.nodes()
        meters = self._dashboard.cluster.model.meters
        gone = [node.node for node in nodes if node.state in ("left", "lost") and node.since_s > GONE_S]
        meters.forget(gone)
        shown = [node for node in nodes if node.node not in gone]
        yield counter("flower_events", "Number of events", ("worker", "type", "task"), meters.by_node.items())
        online = [((node.node,), 1.0 if node.state == "alive" else 0.0) for node in shown]
        yield gauge("flower_worker_online", "Worker online status", ("worker",), online)
        active = [((node.node,), float(node.active)) for node in shown]
        name = "flower_worker_number_of_currently_executing_tasks"
        yield gauge(name, "Number of tasks currently executing at a worker", ("worker",), active)
        yield from _flower_tasks(meters.flower)


def _flower_tasks(measured: FlowerMeters) -> Iterator[Metric]:
    labels = ("worker", "task")
    yield histogram("flower_task_runtime_seconds", "Task runtime", labels, measured.runtime.items())
    text = "The time the task spent waiting at the celery worker to be executed."
    yield gauge("flower_task_prefetch_time_seconds", text, labels, measured.prefetch_s.items())
    text = "Number of tasks of given type prefetched at a worker"
    yield gauge("flower_worker_prefetched_tasks", text, labels, measured.prefetched().items())


# ---- flower ----------------------------------------------------------------------------------------
#
# Flower's paths, in Flower's shapes, for the exporters and scripts that read them.
#
# `/api/workers`, `/api/tasks`, `/api/task/info/ID`, `/api/queues/length`. They only read; what they change
# in Flower is `POST /api/v1/actions` here.

FLOWER_TIMEOUT_S = 2.0
QUESTIONS = ("stats", "active_queues", "registered", "conf")
OF_ONE = ("active", "scheduled", "reserved", "revoked")
SORT_KEYS: Mapping[str, Callable[[Tracked], Any]] = {
    "name": lambda task: task.name,
    "state": lambda task: task.counted,
    "received": lambda task: None if task.received is None else task.received.at_us,
    "started": lambda task: None if task.started is None else task.started.at_us,
}
SAME = (
    *(
        "uuid",
        "name",
        "state",
        "args",
        "kwargs",
        "eta",
        "expires",
        "retries",
        "worker",
        "result",
        "exception",
    ),
    *("runtime", "traceback", "exchange", "routing_key", "clock", "client", "root_id", "parent_id"),
)
TIMES = ("sent", "received", "started", "rejected", "succeeded", "failed", "retried", "revoked")


def flower_routes(dashboard: "Dashboard") -> list[BaseRoute]:
    """Return the routes of Flower's API."""

    async def workers(request: Request) -> Response:
        name = request.query_params.get("workername")
        known = {node.node: node.state == "alive" for node in dashboard.nodes()}
        if request.query_params.get("status"):
            return as_json(known)
        if name and name not in known:
            raise Refused(404, "Not Found", f"Unknown worker '{name[:200]}'")
        return as_json(await _workers(dashboard, name))

    async def tasks(request: Request) -> Response:
        found = _tasks(dashboard, request)
        return as_json(
            {record.uuid: as_flower(redact_task(record, LIST_MAX, dashboard.hides)) for record in found}
        )

    async def task(request: Request) -> Response:
        found = dashboard.cluster.model.state.task(request.path_params["task_id"])
        if found is None:
            raise Refused(404, "Not Found", f"Unknown task '{request.path_params['task_id'][:200]}'")
        return as_json(as_flower(redact_task(found, DETAIL_MAX, dashboard.hides)))

    async def lengths(_request: Request) -> Response:
        rows = [{"name": queue.queue, "messages": queue.ready} for queue in dashboard.queues()]
        return as_json({"active_queues": rows})

    return [
        Route("/api/workers", workers, methods=["GET"]),
        Route("/api/tasks", tasks, methods=["GET"]),
        Route("/api/task/info/{task_id}", task, methods=["GET"]),
        Route("/api/queues/length", lengths, methods=["GET"]),
    ]


def as_flower(task: TaskRecord) -> dict[str, Any]:
    """Return a task with the fields of Celery's event state, which Flower shows."""
    shown = {name: getattr(task, name) for name in SAME} | {
        name: getattr(task, f"{name}_at") for name in TIMES
    }
    return shown | {
        "timestamp": task.state_at,
        "root": task.root_id,
        "parent": task.parent_id,
        "children": [],
    }


async def _workers(dashboard: "Dashboard", name: str | None) -> dict[str, Any]:
    questions = (*QUESTIONS, *OF_ONE) if name else QUESTIONS
    asked = [dashboard.feed.ask(command, {}, name, timeout_s=FLOWER_TIMEOUT_S) for command in questions]
    answers = await asyncio.gather(*asked)
    found: dict[str, Any] = {}
    for question, answer in zip(questions, answers, strict=True):
        for node, reply in answer.replies.items():
            found.setdefault(node, {"timestamp": time()})[question] = redact_data(reply, LIST_MAX)
    return found


def _tasks(dashboard: "Dashboard", request: Request) -> list[TaskRecord]:
    given = request.query_params
    limit, offset = _number(given, "limit", PAGE_MAX), _number(given, "offset", 0)
    wanted = TaskFilter(
        name=_chosen(given.get("taskname")),
        worker=_chosen(given.get("workername")),
        state=_chosen(given.get("state")),
        text=given.get("search", ""),
        since=_moment(given, "received_start"),
        until=_moment(given, "received_end"),
    )
    by = given.get("sort_by", "")
    value = SORT_KEYS.get(by.lstrip("-"))
    if by and value is None:
        known = ", ".join(SORT_KEYS)
        raise Refused(400, "Bad Request", f"Invalid sort_by '{by[:50]}', expected one of {known}")
    return dashboard.cluster.part(
        wanted,
        offset,
        min(limit, PAGE_MAX),
        key=_newest if value is None else lambda task: _sortable(value(task)),
        reverse=value is None or by.startswith("-"),
    )


def _newest(task: Tracked) -> Any:
    return task.key


def _sortable(value: Any) -> tuple[bool, Any]:
    """Unknown values sort lowest, as in Flower."""
    return value is not None, value


def _chosen(value: str | None) -> str:
    return "" if value in (None, "All") else str(value)


def _number(given: Mapping[str, str], name: str, otherwise: int) -> int:
    text = given.get(name, "")
    if text == "":
        return otherwise
    if not text.isdecimal() or len(text) > 9:
        raise Refused(400, "Bad Request", f"{name} is {text[:50]!r}; it must be a whole number")
    return int(text)


def _moment(given: Mapping[str, str], name: str) -> float | None:
    text = given.get(name, "")
    if not text:
        return None
    try:
        return datetime.strptime(text, "%Y-%m-%d %H:%M").replace(tzinfo=UTC).timestamp()
    except ValueError:
        detail = f"{name} is {text[:50]!r}, which is not a time; write it like 2026-01-31 18:00"
        raise Refused(400, "Bad Request", detail) from None
