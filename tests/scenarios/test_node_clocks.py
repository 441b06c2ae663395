"""L1, S2: a worker that starts stamps above everything that was stamped before, also after kills."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.scenarios.places import place
from tests.waiting import wait_until
from umbel.brokers.registry import open_broker
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.wire.event import decode_events

TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")
TASKS = 60
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(180)]


class Listener:
    """Every event of workers, as it was on the wire, from a thread that listens."""

    def __init__(self, cluster: Cluster) -> None:
        self.events: list[dict[str, Any]] = []
        self._settings = cluster.app.settings.for_broker()
        self._listens = threading.Event()

    @contextmanager
    def listening(self) -> Iterator["Listener"]:
        loop = asyncio.new_event_loop()
        task = loop.create_task(self._listen())
        thread = threading.Thread(target=_run, args=(loop, task), daemon=True)
        thread.start()
        wait_until(self._listens.is_set, what="the test to hear events")
        yield self
        loop.call_soon_threadsafe(task.cancel)
        thread.join()

    async def _listen(self) -> None:
        broker = open_broker(self._settings)
        await broker.open()
        try:
            async with broker.subscribe(EVENT_EXCHANGE, ["worker.#", "task.#"]) as subscription:
                self._listens.set()
                async for broadcast in subscription:
                    self.events += decode_events(broadcast.body)
        finally:
            await broker.close()

    def highest(self) -> int:
        return max(int(event["clock"]) for event in self.events)

    def of_run(self, pid: int) -> list[dict[str, Any]]:
        return [event for event in self.events if event["pid"] == pid]


def _run(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[None]") -> None:
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()


def start_above(cluster: Cluster, heard: Listener, name: str) -> None:
    """The worker starts while the others are at work, and all that it says comes after what they had said."""
    highest = heard.highest()
    results = [cluster.app.send_task("chaos_tasks.add", [n, n]) for n in range(TASKS)]
    process = cluster.start_worker(name, "-P", "solo", "-E")
    for result in results:
        result.get(timeout=90)

    def types() -> set[str]:
        return {event["type"] for event in heard.of_run(process.pid)}

    wait_until(lambda: {"worker-online", "worker-heartbeat"} <= types(), what=f"{name} to be heard")
    first = heard.of_run(process.pid)[0]
    assert first["type"] == "worker-online"
    clocks = [event["clock"] for event in heard.of_run(process.pid)]
    assert min(clocks) > highest, f"{name} began at {clocks[:5]}, the cluster was at {highest}"


@pytest.mark.parametrize("broker", ["sqlite", "redis", "amqp"])
def test_a_worker_begins_above_every_clock_that_was_stamped_before(broker: str, tmp_path: Path) -> None:
    with (
        place(broker, tmp_path) as where,
        Cluster(tmp_path, TASKS_FILE, broker=where.broker, backend=where.backend) as cluster,
        Listener(cluster).listening() as heard,
    ):
        for name in ("w1", "w2"):
            cluster.start_worker(name, "-P", "solo", "-E", wait=False)
        for name in ("w1", "w2"):
            cluster.wait_for(name)
        for result in [cluster.app.send_task("chaos_tasks.add", [n, n]) for n in range(TASKS)]:
            result.get(timeout=90)
        start_above(cluster, heard, "w3")  # joins
        cluster.kill_worker("w2")
        start_above(cluster, heard, "w2")  # is back, and the others are there
        for name in ("w1", "w2", "w3"):
            cluster.kill_worker(name)
        start_above(cluster, heard, "w2")  # is back, and is alone: only the broker knows the clock
