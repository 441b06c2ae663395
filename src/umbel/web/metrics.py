"""Metrics of the cluster in Prometheus's text format, made from what is known when they are asked for.

Names that begin with `umbel_` are ours. Those that begin with `flower_` are Flower's, with its labels: its
dashboards and alerts go on. Series of nodes that left go away with the node; task names are bounded.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from time import monotonic
from typing import TYPE_CHECKING, Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from umbel.errors import BrokerError
from umbel.events.flower_meters import FlowerMeters
from umbel.exposition import CONTENT_TYPE, counter, gauge, histogram, of_tasks, text_of

if TYPE_CHECKING:
    from umbel.web.dashboard import Dashboard

ASKED_EVERY_S = 15.0
ASK_S = 2.0
LETTERS_MAX = 1000
GONE_S = 300.0  # a node that is gone so long has no series any more
Row = tuple[tuple[str, ...], float]


def routes(dashboard: "Dashboard") -> list[BaseRoute]:
    collector = ClusterCollector(dashboard)

    async def metrics(_request: Request) -> Response:
        await collector.look()
        return Response(text_of(collector), media_type=CONTENT_TYPE)

    return [Route("/metrics", metrics, methods=["GET"])]


class ClusterCollector(Collector):
    """What must be asked for is asked at most every ASKED_EVERY_S, however many scrape."""

    def __init__(self, dashboard: "Dashboard") -> None:
        self._dashboard = dashboard
        self._asked_at = -ASKED_EVERY_S
        self._stats: dict[str, Any] = {}
        self._letters = 0
        self._log: dict[str, int] = {}

    async def look(self) -> None:
        now = monotonic()
        if now - self._asked_at < ASKED_EVERY_S:
            return
        self._asked_at = now
        asked = (
            self._dashboard.feed.ask("stats", {}, timeout_s=ASK_S),
            self._dashboard.dead_letter_count(LETTERS_MAX),
            self._dashboard.log_lag(),
        )
        stats, letters, lag = await asyncio.gather(*asked, return_exceptions=True)
        for one in (stats, letters, lag):
            if isinstance(one, BaseException) and not isinstance(one, BrokerError):
                raise one
        self._stats = {} if isinstance(stats, BaseException) else dict(stats.replies)
        self._letters = self._letters if isinstance(letters, BaseException) else letters
        self._log = self._log if isinstance(lag, BaseException) else lag

    def collect(self) -> Iterator[Metric]:
        yield from of_tasks(self._dashboard.cluster.model.meters)
        yield from self._of_queues()
        yield from self._of_nodes()
        yield from self._of_stats()
        yield from self._of_the_dashboard()
        yield from self._as_flower()

    def _of_queues(self) -> Iterator[Metric]:
        queues = self._dashboard.queues()
        for name, said in (
            ("ready", "Messages that wait"),
            ("delayed", "Messages not due yet"),
            ("claimed", "Messages with workers"),
            ("paused", "Whether no worker takes from it"),
        ):
            rows = [((one.queue,), float(getattr(one, name))) for one in queues]
            yield gauge(f"umbel_queue_{name}", f"{said}.", ("queue",), rows)
        oldest = [((one.queue,), one.oldest_s) for one in queues if one.oldest_s is not None]
        yield gauge("umbel_queue_oldest_seconds", "Age of the oldest known waiting task.", ("queue",), oldest)
        yield gauge(
            "umbel_dead_letters", f"Dead letters, counted up to {LETTERS_MAX}.", (), [((), self._letters)]
        )

    def _of_nodes(self) -> Iterator[Metric]:
        nodes = self._dashboard.nodes()
        states = Counter(one.state for one in nodes)
        rows: list[Row] = [((state,), float(states[state])) for state in ("alive", "suspect", "lost", "left")]
        yield gauge("umbel_nodes", "Nodes by state.", ("state",), rows)
        present = [one for one in nodes if one.state in ("alive", "suspect")]
        yield gauge(
            "umbel_node_active", "Tasks in flight.", ("node",), [((one.node,), one.active) for one in present]
        )
        leases = [one for one in self._dashboard.leases() if one.holder]
        held = [((one.name, one.holder), 1.0) for one in leases]
        yield gauge("umbel_leader", "Who holds which lease.", ("lease", "node"), held)
        elections = Counter(one.phase for one in self._dashboard.elections())
        ended = [((phase,), float(one)) for phase, one in sorted(elections.items())]
        yield gauge("umbel_elections", "Elections in memory, by phase.", ("phase",), ended)

    def _of_stats(self) -> Iterator[Metric]:
        """What the nodes say when they are asked; Celery's say less."""
        found: dict[str, list[Row]] = {"children": [], "memory": [], "reconnects": [], "died": []}
        for node, stats in sorted(self._stats.items()):
            if not isinstance(stats, dict):
                continue
            pool, usage, ours = (_map(stats.get(one)) for one in ("pool", "rusage", "umbel"))
            found["children"].append(((node,), float(len(pool.get("processes") or ()))))
            found["memory"].append(((node,), float(usage.get("maxrss") or 0) * 1024))
            if ours:
                links, counters = _map(ours.get("links")), _map(ours.get("counters"))
                found["reconnects"].append(((node,), float(sum(links.values()))))
                found["died"].append(((node,), float(counters.get("children_died", 0))))
        yield gauge("umbel_node_children", "Child processes.", ("node",), found["children"])
        yield gauge(
            "umbel_node_memory_bytes", "Most memory its main process had.", ("node",), found["memory"]
        )
        yield counter("umbel_node_reconnects", "Links that were restored.", ("node",), found["reconnects"])
        yield counter("umbel_node_children_died", "Children that died.", ("node",), found["died"])
        lag = [((name,), float(one)) for name, one in sorted(self._log.items())]
        yield gauge("umbel_recorder_lag_events", "Events not recorded yet.", ("recorder",), lag)

    def _of_the_dashboard(self) -> Iterator[Metric]:
        model, hub = self._dashboard.cluster.model, self._dashboard.hub
        unreadable = model.state.unreadable + model.receiver.undecodable
        yield counter("umbel_events_heard", "Events heard.", (), [((), model.state.heard)])
        yield counter("umbel_events_unreadable", "Events that could not be read.", (), [((), unreadable)])
        yield gauge("umbel_web_tasks_known", "Tasks in memory.", (), [((), len(model.state))])
        yield gauge("umbel_web_streams", "Open streams.", (), [((), hub.clients)])
        yield counter("umbel_web_streams_dropped", "Streams dropped as too slow.", (), [((), hub.dropped)])
        is_hearing = 0.0 if self._dashboard.problem else 1.0
        yield gauge("umbel_web_hears_cluster", "Whether it hears the cluster.", (), [((), is_hearing)])

    def _as_flower(self) -> Iterator[Metric]:
        nodes = self._dashboard.nodes()
        meters = self._dashboard.cluster.model.meters
        gone = [one.node for one in nodes if one.state in ("left", "lost") and one.since_s > GONE_S]
        meters.forget(gone)
        shown = [one for one in nodes if one.node not in gone]
        yield counter("flower_events", "Number of events", ("worker", "type", "task"), meters.by_node.items())
        online = [((one.node,), 1.0 if one.state == "alive" else 0.0) for one in shown]
        yield gauge("flower_worker_online", "Worker online status", ("worker",), online)
        active = [((one.node,), float(one.active)) for one in shown]
        name = "flower_worker_number_of_currently_executing_tasks"
        yield gauge(name, "Number of tasks currently executing at a worker", ("worker",), active)
        yield from _flower_tasks(meters.flower)


def _flower_tasks(measured: FlowerMeters) -> Iterator[Metric]:
    labels = ("worker", "task")
    yield histogram("flower_task_runtime_seconds", "Task runtime", labels, measured.runtime.items())
    said = "The time the task spent waiting at the celery worker to be executed."
    yield gauge("flower_task_prefetch_time_seconds", said, labels, measured.prefetch_s.items())
    said = "Number of tasks of given type prefetched at a worker"
    yield gauge("flower_worker_prefetched_tasks", said, labels, measured.prefetched().items())


def _map(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
