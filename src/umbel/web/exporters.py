"""Exporters: the cluster for other tools: metrics for Prometheus, and Flower's API.

Names of metrics that begin with `umbel_` are ours. Names that begin with `flower_` are Flower's and have its
labels, so that its dashboards and alerts still work. Of Flower's API the paths that read exist:
`/api/workers`, `/api/tasks`, `/api/task/info/ID` and `/api/queues/length`. Instead of the paths that change
something there is `POST /api/v1/actions`.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import UTC, datetime
from time import monotonic, time
from typing import TYPE_CHECKING, Any, TypeVar

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
from umbel.monitor.cluster import PAGE_MAX, KnownCluster
from umbel.monitor.feed import LETTERS_MAX
from umbel.monitor.records import DETAIL_MAX, LIST_MAX, TaskFilter, redact_data, redact_task
from umbel.web.http import Refused, as_json, dashboard_of
from umbel.wire.control import Stats, typed

if TYPE_CHECKING:
    from umbel.web.dashboard import Dashboard

# ---- metrics ---------------------------------------------------------------------------------------

ASKED_EVERY_S = 15.0
METRICS_TIMEOUT_S = 2.0
GONE_S = 300.0  # the series of a node end so long after it left or was lost
Row = tuple[tuple[str, ...], float]
T = TypeVar("T")


class ClusterCollector(Collector):
    """Collects the metrics of the cluster.

    Nodes and broker are asked at most every ASKED_EVERY_S, however many programs read the metrics. If the
    broker does not answer, the number of dead letters and the lag keep their last values. A node that does
    not answer has no series of its stats, because unknown is not zero. The series of a node end GONE_S after
    the node left.
    """

    def __init__(self, dashboard: "Dashboard") -> None:
        self._dashboard = dashboard
        self._asked_at = -ASKED_EVERY_S
        self._stats: dict[str, Stats] = {}
        self._lag: dict[str, int] = {}

    async def update(self) -> None:
        """Ask the nodes for stats and the broker for dead letters and lag, if the last answers are old."""
        now = monotonic()
        if now - self._asked_at < ASKED_EVERY_S:
            return
        self._asked_at = now
        feed = self._dashboard.feed
        stats, _, lag = await asyncio.gather(
            _answer(feed.ask("stats", {}, timeout_s=METRICS_TIMEOUT_S)),
            _answer(feed.count_letters(ASKED_EVERY_S)),
            _answer(self._dashboard.log_lag()),
        )
        replies = {} if stats is None else stats.replies
        self._stats = {node: typed(reply, Stats) for node, reply in replies.items()}
        self._lag = self._lag if lag is None else lag

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics from the model and the last answers."""
        yield from of_tasks(self._dashboard.cluster.model.meters)
        yield from self._of_queues()
        yield from self._of_nodes()
        yield from self._of_stats()
        yield from self._of_the_dashboard()
        yield from self._as_flower()

    def _of_queues(self) -> Iterator[Metric]:
        queues = self._dashboard.cluster.queues()
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
        letters = [((), float(self._dashboard.feed.letters or 0))]
        yield gauge("umbel_dead_letters", f"Dead letters, counted up to {LETTERS_MAX}.", (), letters)

    def _of_nodes(self) -> Iterator[Metric]:
        cluster = self._dashboard.cluster
        nodes = cluster.nodes()
        states = Counter(node.state for node in nodes)
        rows: list[Row] = [((state,), float(states[state])) for state in ("alive", "suspect", "lost", "left")]
        yield gauge("umbel_nodes", "Nodes by state.", ("state",), rows)
        active = [((node.node,), node.active) for node in nodes if node.state in ("alive", "suspect")]
        yield gauge("umbel_node_active", "Tasks in flight.", ("node",), active)
        leaders = [((lease.name, lease.holder), 1.0) for lease in cluster.leases() if lease.holder]
        yield gauge("umbel_leader", "Who holds which lease.", ("lease", "node"), leaders)
        elections = Counter(election.phase for election in cluster.elections())
        phases = [((phase,), float(number)) for phase, number in sorted(elections.items())]
        yield gauge("umbel_elections", "Elections in memory, by phase.", ("phase",), phases)

    def _of_stats(self) -> Iterator[Metric]:
        """Yield what the nodes report when asked; Celery's nodes report less."""
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
        of_node = ("node",)
        yield gauge("umbel_node_children", "Child processes.", of_node, found["children"])
        yield gauge("umbel_node_memory_bytes", "Peak memory of the main process.", of_node, found["memory"])
        yield counter(
            "umbel_node_reconnects", "Connections that were restored.", of_node, found["reconnects"]
        )
        yield counter("umbel_node_children_died", "Children that died.", of_node, found["died"])
        lag = [((name,), float(events)) for name, events in sorted(self._lag.items())]
        yield gauge("umbel_recorder_lag_events", "Events not recorded yet.", ("recorder",), lag)

    def _of_the_dashboard(self) -> Iterator[Metric]:
        model, hub = self._dashboard.cluster.model, self._dashboard.hub
        unreadable = model.state.unreadable + model.receiver.undecodable + model.dropped
        yield counter("umbel_events_heard", "Events received.", (), [((), model.state.heard)])
        yield counter("umbel_events_unreadable", "Events that could not be read.", (), [((), unreadable)])
        yield gauge("umbel_web_tasks_known", "Tasks in memory.", (), [((), len(model.state))])
        yield gauge("umbel_web_streams", "Open streams.", (), [((), hub.clients)])
        yield counter("umbel_web_streams_dropped", "Streams dropped as too slow.", (), [((), hub.dropped)])
        receives = 0.0 if self._dashboard.feed.problem else 1.0
        yield gauge(
            "umbel_web_hears_cluster", "1 while events are received from the cluster.", (), [((), receives)]
        )

    def _as_flower(self) -> Iterator[Metric]:
        nodes, meters = self._dashboard.cluster.nodes(), self._dashboard.cluster.model.meters
        gone = [node.node for node in nodes if node.state in ("left", "lost") and node.since_s > GONE_S]
        meters.forget(gone)
        present = [node for node in nodes if node.node not in gone]
        yield counter("flower_events", "Number of events", ("worker", "type", "task"), meters.by_node.items())
        online = [((node.node,), 1.0 if node.state == "alive" else 0.0) for node in present]
        yield gauge("flower_worker_online", "Worker online status", ("worker",), online)
        active = [((node.node,), float(node.active)) for node in present]
        name = "flower_worker_number_of_currently_executing_tasks"
        yield gauge(name, "Number of tasks currently executing at a worker", ("worker",), active)
        yield from _flower_tasks(meters.flower)


def _flower_tasks(meters: FlowerMeters) -> Iterator[Metric]:
    labels = ("worker", "task")
    yield histogram("flower_task_runtime_seconds", "Task runtime", labels, meters.runtime.items())
    text = "The time the task spent waiting at the celery worker to be executed."
    yield gauge("flower_task_prefetch_time_seconds", text, labels, meters.prefetch_s.items())
    text = "Number of tasks of given type prefetched at a worker"
    yield gauge("flower_worker_prefetched_tasks", text, labels, meters.prefetched().items())


async def _answer(asked: Awaitable[T]) -> T | None:
    """Return the answer; None if the broker does not answer."""
    try:
        return await asked
    except BrokerError:
        return None


# ---- flower ----------------------------------------------------------------------------------------

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
"""The fields of a task that have the same name in Celery's event state."""
TIMES = ("sent", "received", "started", "rejected", "succeeded", "failed", "retried", "revoked")


def routes(dashboard: "Dashboard") -> list[BaseRoute]:
    """Return the routes of `/metrics` and of Flower's API."""
    collector = ClusterCollector(dashboard)

    async def metrics(_request: Request) -> Response:
        await collector.update()
        return Response(text_of(collector), media_type=CONTENT_TYPE)

    handlers = {
        "/metrics": metrics,
        "/api/workers": _workers,
        "/api/tasks": _tasks,
        "/api/task/info/{task_id}": _task,
        "/api/queues/length": _lengths,
    }
    return [Route(path, handler) for path, handler in handlers.items()]


def as_flower(task: TaskRecord) -> dict[str, Any]:
    """Return a task with the fields of Celery's event state, which Flower shows."""
    same = {name: getattr(task, name) for name in SAME}
    times = {name: getattr(task, f"{name}_at") for name in TIMES}
    renamed: dict[str, Any] = {
        "timestamp": task.state_at,
        "root": task.root_id,
        "parent": task.parent_id,
        "children": [],
    }
    return same | times | renamed


async def _workers(request: Request) -> Response:
    dashboard, name = dashboard_of(request), request.query_params.get("workername")
    known = {node.node: node.state == "alive" for node in dashboard.cluster.nodes()}
    if request.query_params.get("status"):
        return as_json(known)
    if name and name not in known:
        raise Refused(404, "Not Found", f"Unknown worker '{name[:200]}'")
    questions, asked = ((*QUESTIONS, *OF_ONE), [name]) if name else (QUESTIONS, [])
    answers = await asyncio.gather(
        *(dashboard.feed.ask(question, {}, asked, timeout_s=FLOWER_TIMEOUT_S) for question in questions)
    )
    found: dict[str, Any] = {}
    for question, answer in zip(questions, answers, strict=True):
        for node, reply in answer.replies.items():
            found.setdefault(node, {"timestamp": time()})[question] = redact_data(reply, LIST_MAX)
    return as_json(found)


async def _tasks(request: Request) -> Response:
    found = tasks_of(dashboard_of(request).cluster, request.query_params)
    return as_json({record.uuid: as_flower(record) for record in found})


async def _task(request: Request) -> Response:
    cluster, task_id = dashboard_of(request).cluster, request.path_params["task_id"]
    found = cluster.model.state.task(task_id)
    if found is None:
        raise Refused(404, "Not Found", f"Unknown task '{task_id[:200]}'")
    return as_json(as_flower(redact_task(found, DETAIL_MAX, cluster.hides)))


async def _lengths(request: Request) -> Response:
    queues = dashboard_of(request).cluster.queues()
    return as_json({"active_queues": [{"name": queue.queue, "messages": queue.ready} for queue in queues]})


def tasks_of(cluster: KnownCluster, given: Mapping[str, str]) -> list[TaskRecord]:
    """Return the tasks that Flower's parameters select, in their order; Refused for what Flower refuses."""
    limit, offset = _number(given, "limit", PAGE_MAX), _number(given, "offset", 0)
    wanted = TaskFilter(
        name=_chosen(given, "taskname"),
        worker=_chosen(given, "workername"),
        state=_chosen(given, "state"),
        text=given.get("search", ""),
        since=_moment(given, "received_start"),
        until=_moment(given, "received_end"),
    )
    by = given.get("sort_by", "")
    value = SORT_KEYS.get(by.lstrip("-"))
    if by and value is None:
        known = ", ".join(SORT_KEYS)
        raise Refused(400, "Bad Request", f"Invalid sort_by '{by[:50]}', expected one of {known}")

    def key(task: Tracked) -> Any:
        if value is None:
            return task.key
        return (found := value(task)) is not None, found  # unknown values sort lowest, as in Flower

    reverse = value is None or by.startswith("-")
    return cluster.part(wanted, offset, min(limit, PAGE_MAX), key=key, reverse=reverse)


def _chosen(given: Mapping[str, str], name: str) -> str:
    value = given.get(name, "")
    return "" if value == "All" else value


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
