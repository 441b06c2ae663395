"""RabbitMQ at its limits: an alarm that stops publishers, and a time-out for consumers."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.scenarios.chaos_tasks import journal_of
from tests.servers.rabbitmq import RabbitServer
from tests.waiting import wait_until
from umbel.errors import BrokerUnavailable

TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")
LONG_S = 120.0
WAITING = 20
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    made = RabbitServer(tmp_path_factory.mktemp("rabbitmq"), vhosts=2)
    made.start()
    yield made
    made.stop()


def runs(directory: Path) -> Counter[str]:
    journal = journal_of(str(directory))
    return (
        Counter(line.split()[0] for line in journal.read_text().splitlines())
        if journal.exists()
        else Counter()
    )


def test_under_a_memory_alarm_workers_settle_and_senders_are_told(
    server: RabbitServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server reads nothing more from connections that publish, until the alarm is over."""
    monkeypatch.setattr("umbel.brokers.amqp.blocking.REPLY_TIMEOUT_S", 1.0)
    vhost, results = server.new_vhost(), f"sqlite:///{tmp_path / 'results.db'}"
    settings = {"broker": server.url(vhost), "backend": results, "publish_timeout_s": 1.0}
    with Cluster(tmp_path, TASKS_FILE, **settings) as cluster:
        cluster.start_worker("w", "-c", "1", "-E")
        hold, work = (cluster.app.tasks[f"chaos_tasks.{name}"] for name in ("waits_for_file", "work"))
        sent = [hold.delay(str(tmp_path), "go"), *(work.delay(str(tmp_path), 0.0) for _ in range(WAITING))]
        wait_until(lambda: runs(tmp_path)[sent[0].id], deadline_s=LONG_S, what="the first task to run")
        server.control("set_vm_memory_high_watermark", "0")
        words = r"does not accept messages now \(low on memory\): let queues drain.*vm_memory_high_watermark"
        for _ in range(2):  # on a connection that was open, and on a new one
            with pytest.raises(BrokerUnavailable, match=words):
                work.delay(str(tmp_path), 0.0)
        wait_until(
            lambda: "low on memory" in cluster.log("w"), deadline_s=LONG_S, what="the worker to say so"
        )
        (tmp_path / "go").touch()
        wait_until(lambda: all(one.ready() for one in sent), deadline_s=LONG_S, what="the tasks to end")
        assert "celery\t0" in server.control("list_queues", "-p", vhost, "name", "messages").splitlines()
        server.control("set_vm_memory_high_watermark", "0.4")
        after = work.delay(str(tmp_path), 0.0)
        after.get(timeout=LONG_S)
        wait_until(lambda: "available again" in cluster.log("w"), deadline_s=LONG_S, what="the end of it")
        assert cluster.stop_worker("w") == 0
        log = cluster.log("w")
    found = runs(tmp_path)
    assert all(found[one.id] == 1 for one in [*sent, after])  # the refused ones may have come late
    assert log.count("low on memory") == 1 and "Traceback" not in log


def test_a_task_that_outlasts_the_consumer_timeout_is_told_of_and_runs_once(
    server: RabbitServer, tmp_path: Path
) -> None:
    """The server takes its message back; when it comes to who ran it, its outcome is applied."""
    for name, value_ms in (("consumer_timeout", 1000), ("channel_tick_interval", 500)):  # for new channels
        server.control("eval", f"application:set_env(rabbit, {name}, {value_ms}).")
    results = f"sqlite:///{tmp_path / 'results.db'}"
    with Cluster(tmp_path, TASKS_FILE, broker=server.url(server.new_vhost()), backend=results) as cluster:
        cluster.start_worker("w", "-c", "1")
        long = cluster.app.tasks["chaos_tasks.waits_for_file"].delay(str(tmp_path), "go")
        wait_until(
            lambda: "consumer_timeout" in cluster.log("w"), deadline_s=LONG_S, what="the worker to say so"
        )
        (tmp_path / "go").touch()
        long.get(timeout=LONG_S)
        short = cluster.app.tasks["chaos_tasks.work"].delay(str(tmp_path), 0.0)
        short.get(timeout=LONG_S)
        assert cluster.stop_worker("w") == 0
        log = cluster.log("w")
    assert runs(tmp_path) == {long.id: 1, short.id: 1}
    assert "raise consumer_timeout in rabbitmq.conf" in log and "Traceback" not in log
