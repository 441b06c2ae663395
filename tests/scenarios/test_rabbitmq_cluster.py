"""A RabbitMQ cluster of two: a node is killed under load, and of what was acknowledged nothing is lost.

The work queue is a quorum queue with a replica on both nodes. With one of two gone no majority is left, so
nothing is accepted until it is back; three nodes would go on meanwhile.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

from tests.cluster import Cluster
from tests.scenarios.chaos_tasks import journal_of
from tests.servers.ports import free_ports
from tests.servers.rabbitmq import RabbitServer
from tests.waiting import wait_until
from umbel.app.app import App
from umbel.brokers.amqp.blocking import BlockingLink
from umbel.brokers.amqp.frames import Method
from umbel.brokers.amqp.handshake import locations_from_url
from umbel.errors import BrokerError

ROOT = str(Path(__file__).parents[2])
TASKS_FILE = Path(__file__).with_name("failover_tasks.py")
SENDS = 200
LONG_S = 240.0
pytestmark = [
    pytest.mark.scenario,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not os.environ.get("UMBEL_SOAK"), reason="two nodes take long to start: UMBEL_SOAK=1"),
]


@contextmanager
def two_nodes(directory: Path) -> Iterator[tuple[RabbitServer, RabbitServer]]:
    first = RabbitServer(_made(directory / "first"))
    second = RabbitServer(_made(directory / "second"), beside=first, ports=free_ports(4))
    try:
        first.start()
        second.start()
        second.join()
        yield first, second
    finally:
        second.stop()
        first.stop()


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def make_quorum_queue(url: str, name: str) -> None:
    """A native app uses a queue as it finds it."""
    (location,) = locations_from_url(url)
    link = BlockingLink(location, timeout_s=LONG_S, name="test")
    arguments = {"x-queue-type": "quorum", "x-quorum-initial-group-size": 2}
    link.call(Method.QUEUE_DECLARE, 0, name, False, True, False, False, False, arguments)
    link.close()


class Sender(Thread):
    """Sends without a pause, and writes down what was acknowledged."""

    def __init__(self, app: App, directory: Path) -> None:
        super().__init__(daemon=True)
        self.acknowledged: set[str] = set()
        self._task, self._directory = app.tasks["failover_tasks.noted"], str(directory)
        self._is_over = Event()

    def run(self) -> None:
        while not self._is_over.is_set():
            try:
                self.acknowledged.add(self._task.delay(self._directory).id)
            except BrokerError:
                continue

    def wait_for(self, count: int) -> None:
        enough = len(self.acknowledged) + count
        wait_until(
            lambda: len(self.acknowledged) >= enough, deadline_s=LONG_S, what=f"{count} more to be sent"
        )

    def stop(self) -> None:
        self._is_over.set()
        self.join()


def ran(directory: Path) -> Counter[str]:
    journal = journal_of(str(directory))
    return Counter(journal.read_text().split()) if journal.exists() else Counter()


def test_a_killed_node_loses_nothing_that_was_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((ROOT, os.environ.get("PYTHONPATH", ""))))
    with two_nodes(tmp_path) as (first, second):
        make_quorum_queue(first.url(), "celery")
        broker, results = f"{first.url()};{second.url()}", f"sqlite:///{tmp_path / 'results.db'}"
        with Cluster(tmp_path, TASKS_FILE, broker=broker, backend=results) as cluster:
            for name in ("one", "two"):
                cluster.start_worker(name, "-c", "1")
            sender = Sender(cluster.app, tmp_path)
            sender.start()
            for node in (second, first):
                sender.wait_for(SENDS)
                node.kill()
                node.start()
            sender.wait_for(SENDS)
            sender.stop()
            acknowledged = sender.acknowledged
            wait_until(
                lambda: acknowledged <= set(ran(tmp_path)), deadline_s=LONG_S, what="all of them to run"
            )
            logs = cluster.log("one") + cluster.log("two")
    runs = ran(tmp_path)
    repeated = sum(count > 1 for count in runs.values())
    print(f"2 nodes killed in turn: acknowledged {len(acknowledged)}, lost 0, run more than once {repeated}")
    assert "Traceback" not in logs
