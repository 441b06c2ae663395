"""Health: what a supervisor sees of a worker, and the watchdog that ends it when it stalls."""

import asyncio
import logging
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from umbel.errors import ConfigurationError, WorkerStalled
from umbel.pools.prefork.kernel import resident_bytes
from umbel.protocol.pool.autoscale import StallWatch
from umbel.text import without_password
from umbel.worker.bootsteps import Step
from umbel.worker.connection import Connection
from umbel.worker.context import WorkerContext
from umbel.worker.delivery.take import Tasks
from umbel.worker.run_directory import REFRESH_S, remove_state, write_state

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

    from umbel.events.meters import Meters


# ---- metrics ---------------------------------------------------------------------------------------

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
    """The step that serves this node's counters for Prometheus, in a separate thread (`--metrics PORT`).

    The thread only reads: growing counters, and the pool's description. It never touches the loop.
    """

    name = "metrics"
    requires = ("tasks",)

    def __init__(self, context: WorkerContext, tasks: Tasks, meters: "Meters | None") -> None:
        super().__init__(context)
        self._tasks, self._meters = tasks, meters
        self._server: Any = None

    async def start(self) -> None:
        """Serve metrics if an address is configured; ConfigurationError if it cannot be bound."""
        place = self._context.settings.metrics_address
        if place is None or self._meters is None:
            return
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry(auto_describe=False)
        registry.register(cast("Collector", self))  # it calls `collect`
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
        """Stop the server of the metrics."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def collect(self) -> Iterator["Metric"]:
        """Yield all metrics; called in the thread of the server."""
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


# ---- health ----------------------------------------------------------------------------------------

health_log = logging.getLogger("umbel.worker.health")


def notify_service_manager(*lines: str) -> bool:
    """Send lines such as READY=1 to systemd (`Type=notify`); return whether they were sent.

    The address is in `NOTIFY_SOCKET`. Without it, or if sending fails, the worker runs as usual.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.setblocking(False)
        out.sendto("\n".join(lines).encode(), address.replace("@", "\0", 1))
        return True
    return False


class Health(Step):
    """The step that writes the worker's status to the run directory every second, for `umbel health`.

    A service manager is notified at the same time. The file is removed when the worker stops.
    """

    name = "health"
    requires = ("tasks",)

    def __init__(self, context: WorkerContext, connection: Connection, tasks: Tasks) -> None:
        super().__init__(context)
        self._connection = connection
        self._tasks = tasks
        self._has_failed = False
        self._directory = Path.cwd()
        self._place = (context.settings.run_directory, context.identity.node, context.broker.url)

    async def start(self) -> None:
        """Write the status now and every second."""
        self._write()
        notify_service_manager("READY=1")
        self.run_in_background(self._write_on())

    async def stop(self) -> None:
        """Remove the status file."""
        await self.end_background()
        try:
            remove_state(*self._place)
        except (OSError, ConfigurationError) as error:
            health_log.warning("cannot remove the status file of this worker", extra={"why": str(error)})

    async def _write_on(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            self._write()
            notify_service_manager(
                "WATCHDOG=1", *(["STOPPING=1"] if self._context.shutdown.is_stopping else [])
            )

    def _write(self) -> None:
        identity, shutdown = self._context.identity, self._context.shutdown
        problem = self._tasks.problem or self._connection.problem
        is_consuming = bool(self._context.queues) and not problem
        state = {
            "node": identity.node,
            "pid": identity.pid,
            "incarnation": identity.incarnation,
            "broker": without_password(self._context.broker.url),
            "directory": str(self._directory),
            "queues": list(self._context.queues),
            "pool": self._context.pool.describe(),
            "held": self._tasks.claimed,
            "problem": problem,
            "store_replaced": self._replaced(),
            "ready": is_consuming and not shutdown.is_stopping,
            "stopping": shutdown.describe(asyncio.get_running_loop().time()),
            "counters": self._context.counters.as_dict(),
        }
        try:
            write_state(*self._place, state)
        except (OSError, ConfigurationError) as error:
            if not self._has_failed:
                text = "cannot write the status file that `umbel health` reads; retrying"
                health_log.error(text, extra={"why": str(error)})
            self._has_failed = True

    def _replaced(self) -> dict[str, Any] | None:
        """Return when the broker's data was last replaced, and how many messages were unknown to it."""
        if self._connection.replaced is None:
            return None
        at, replaced = self._connection.replaced
        return {"at": at, "what": replaced.what, "unknown": replaced.unknown}


# ---- watchdog --------------------------------------------------------------------------------------

CHECK_EVERY_S = 20.0
PATIENCE_S = 60.0


class Watchdog(Step):
    """The step that ends a worker which has free children and ready messages and fetches none.

    Whatever the cause, a restart by the supervisor is better than a process that does no work. The exit code
    is not 0, and the last log line gives the reason.
    """

    name = "watchdog"
    requires = ("tasks",)

    def __init__(self, context: WorkerContext, tasks: Tasks) -> None:
        super().__init__(context)
        self._tasks = tasks
        self._watch = StallWatch(patience_s=PATIENCE_S)

    async def start(self) -> None:
        """Begin to watch."""
        self.run_in_background(self._watch_queues())

    async def _watch_queues(self) -> None:
        """Raise WorkerStalled, which ends the worker, when messages stay ready although children are free."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            if self._context.shutdown.is_stopping:  # a stopping worker fetches nothing on purpose
                return
            # A worker that cannot settle has a reason to wait, and a restart would lose its outcomes.
            free = 0 if self._tasks.cannot_settle else self._context.pool.free()
            received = self._context.counters.received
            if not self._watch.is_idle(received=received, free=free):
                continue
            ready = await self._context.ready_messages()
            if self._watch.is_stalled(ready=ready, now=loop.time()):
                raise WorkerStalled(
                    f"{ready} messages are ready and {free} could run, but none was fetched for "
                    f"{PATIENCE_S:.0f} s: this worker is stalled and stops; restart it"
                )
