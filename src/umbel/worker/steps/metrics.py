"""Metrics: what this node counts, for Prometheus, served by a thread of its own (`--metrics PORT`).

The thread only reads: counts that grow, and the pool as it describes itself. It never touches the loop.
"""

import logging
import resource
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from umbel.errors import ConfigurationError
from umbel.pools.prefork.memory import resident_bytes
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext
from umbel.worker.steps.tasks import Tasks

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from umbel.events.meters import Meters

log = logging.getLogger("umbel.worker.metrics")
COUNTED = (
    "received",
    "parked",
    "buried",
    "repeated",
    "lost",
    "children_died",
    "events_dropped",
    "elections_run",
)


class Metrics(Step):
    name = "metrics"
    requires = ("tasks",)

    def __init__(self, context: WorkerContext, tasks: Tasks, meters: "Meters | None") -> None:
        super().__init__()
        self._context, self._tasks, self._meters = context, tasks, meters
        self._server: Any = None

    async def start(self) -> None:
        place = self._context.settings.metrics_address
        if place is None or self._meters is None:
            return
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.registry import Collector

        step = self

        class Node(Collector):
            def collect(self) -> Iterator["Metric"]:
                return step.collect()

        registry = CollectorRegistry(auto_describe=False)
        registry.register(Node())
        host, port = place
        try:
            self._server, _ = start_http_server(port, host, registry)
        except OSError as error:
            why = error.strerror or error
            raise ConfigurationError(
                f"metrics cannot be served at {host}:{port}: {why}; choose another --metrics"
            ) from None
        log.info("metrics served", extra={"address": f"{host}:{self._server.server_port}"})

    async def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def collect(self) -> Iterator["Metric"]:
        from umbel.exposition import counter, gauge, of_tasks

        assert self._meters is not None, "metrics are served where something is counted"
        yield from of_tasks(self._meters)
        node = self._context.identity.node
        counters = self._context.counters.as_dict()
        for name in COUNTED:
            yield counter(
                f"umbel_node_{name}", f"Since the start: {name}.", ("node",), [((node,), counters[name])]
            )
        pool = self._context.pool.describe()
        reconnects = sum(self._context.outages.reconnects.values())
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        yield gauge("umbel_node_active", "Tasks in flight.", ("node",), [((node,), len(pool["running"]))])
        yield gauge("umbel_node_claimed", "Messages it holds.", ("node",), [((node,), self._tasks.claimed)])
        yield gauge("umbel_node_children", "Child processes.", ("node",), [((node,), len(pool["processes"]))])
        yield gauge("umbel_node_memory_bytes", "Most memory it had.", ("node",), [((node,), memory)])
        yield counter(
            "umbel_node_reconnects", "Links that were restored.", ("node",), [((node,), reconnects)]
        )
        labels, children = ("node", "child"), self._tasks.children
        held = [((node, str(child)), resident_bytes(pid)) for child, pid in list(children.pids.items())]
        yield gauge("umbel_child_memory_bytes", "Memory of each child process.", labels, held)
        replaced = [((node, str(child)), float(times)) for child, times in list(children.restarts.items())]
        yield counter("umbel_child_restarts", "Processes beyond the first, by child.", labels, replaced)
