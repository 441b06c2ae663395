"""What a broker refuses ends alone; what is unavailable is waited for (N2)."""

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.scenarios.chaos_tasks import journal_of
from tests.servers.rabbitmq import shared_server
from tests.servers.redis import RedisServer, ask_redis
from tests.waiting import wait_until
from umbel import chord
from umbel.errors import BrokerRefused, ChordError, RemoteError, TaskRejected

TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")
NEIGHBOURS = 40


@contextmanager
def _place(broker: str, directory: Path) -> Iterator[tuple[str, str, str]]:
    """Addresses of broker and results, and the name of a queue that the broker refuses to fill."""
    if broker == "amqp":
        results = f"sqlite:///{directory / 'results.db'}"
        yield shared_server().url(shared_server().new_vhost()), results, "amq.closed"
    elif broker == "redis":
        server = RedisServer(directory)
        server.start()
        try:
            yield server.url, server.url, "umbel.dead"
        finally:
            server.stop()
    else:
        url = f"sqlite:///{directory / 'queue.db'}"
        yield url, url, "closed"


def _close_queue(broker: str, directory: Path) -> None:
    if broker == "sqlite":
        with sqlite3.connect(directory / "queue.db") as db:
            db.execute(
                "CREATE TRIGGER no BEFORE INSERT ON messages WHEN NEW.queue = 'closed'"
                " BEGIN SELECT RAISE(ABORT, 'closed for repairs'); END"
            )


@pytest.mark.scenario
@pytest.mark.parametrize("broker", ["sqlite", "redis", "amqp"])
def test_a_refused_follow_up_harms_neither_its_task_nor_others(broker: str, tmp_path: Path) -> None:
    with (
        _place(broker, tmp_path) as (url, results, closed),
        Cluster(tmp_path, TASKS_FILE, broker=url, backend=results) as cluster,
    ):
        worker = cluster.start_worker("w", "-c", "2", "-E")
        _close_queue(broker, tmp_path)
        work, add = cluster.app.tasks["chaos_tasks.work"], cluster.app.tasks["chaos_tasks.add"]
        with pytest.raises(BrokerRefused, match=closed):
            add.apply_async((1, 2), queue=closed)
        sent = [work.delay(str(tmp_path), 0.0) for _ in range(NEIGHBOURS // 2)]
        refused = add.s(1).set(queue=closed)
        first = add.apply_async((1, 2), link=refused)
        chain = (add.s(1, 1) | add.s(2).set(queue=closed)).delay()
        total = cluster.app.tasks["chaos_tasks.total"]
        whole = chord([add.s(1, 1), add.s(2, 2)], total.s().set(queue=closed)).delay()
        sent += [work.delay(str(tmp_path), 0.0) for _ in range(NEIGHBOURS // 2)]
        assert first.get(timeout=90) == 3  # the task's own outcome is kept
        with pytest.raises((BrokerRefused, RemoteError), match=closed):
            chain.get(timeout=90)
        with pytest.raises((ChordError, BrokerRefused, RemoteError), match=closed):
            whole.get(timeout=90)
        for one in sent:
            one.get(timeout=90)
        # A chord's body is sent by the child where broker and results are one store.
        counted = 3 if broker == "amqp" else 2
        wait_until(lambda: cluster.counters("w").get("refused") == counted, what="refusals to be counted")
        letters = cluster.umbel_json("dlq", "ls")
        assert [letter["queue"] for letter in letters] == [closed] * 3
        assert all(letter["reason"] for letter in letters)
        assert "refused" in cluster.log("w")
        assert worker.poll() is None
        assert cluster.stop_worker("w") == 0  # and nothing finished goes back to its queue
        assert not any(row["ready"] + row["claimed"] for row in cluster.umbel_json("queues", "ls"))
    runs = Counter(line.split()[0] for line in journal_of(str(tmp_path)).read_text().splitlines())
    assert runs == Counter(one.id for one in sent)


@pytest.mark.scenario
def test_a_refused_result_harms_no_other_task(tmp_path: Path) -> None:
    with (
        _place("redis", tmp_path) as (url, results, _),
        Cluster(tmp_path, TASKS_FILE, broker=url, backend=results) as cluster,
    ):
        cluster.start_worker("w", "-c", "2")
        work, add = cluster.app.tasks["chaos_tasks.work"], cluster.app.tasks["chaos_tasks.add"]
        ask_redis(url, "LPUSH", "celery-task-meta-taken", "somebody else's")
        add.apply_async((1, 2), task_id="taken")
        sent = [work.delay(str(tmp_path), 0.0) for _ in range(NEIGHBOURS)]
        for one in sent:
            one.get(timeout=90)
        wait_until(lambda: cluster.counters("w").get("refused", 0) >= 1, what="the refusal to be counted")
        assert cluster.stop_worker("w") == 0
        assert "cannot store the result" in cluster.log("w")


@pytest.mark.scenario
def test_a_chord_outlives_a_broker_that_is_away_while_a_part_ends(tmp_path: Path) -> None:
    """The broker is away for longer than a call waits for its answer, and shorter than the lease."""
    server = RedisServer(tmp_path)
    server.start()
    try:
        with Cluster(tmp_path, TASKS_FILE, broker=server.url, backend=server.url) as cluster:
            cluster.start_worker("w", "-c", "2", connect_timeout_s=1.0)
            work, sizes = cluster.app.tasks["chaos_tasks.work"], cluster.app.tasks["chaos_tasks.count_all"]
            whole = chord([work.s(str(tmp_path), 2.0), work.s(str(tmp_path), 2.0)], sizes.s()).delay()
            journal = journal_of(str(tmp_path))
            wait_until(
                lambda: journal.exists() and len(journal.read_text().splitlines()) == 2,
                what="both parts to run",
            )
            server.pause()
            wait_until(
                lambda: "broker unavailable; waiting to publish" in cluster.log("w"),
                what="a child to wait",
            )
            server.resume()
            assert whole.get(timeout=90) == 2
            assert len(journal.read_text().splitlines()) == 2  # and no part ran a second time
            assert cluster.stop_worker("w") == 0
    finally:
        server.resume()
        server.stop()


@pytest.mark.scenario
def test_a_rejected_task_has_an_end_for_who_waits(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        cluster.start_worker("w", "-c", "1")
        refusing, add = cluster.app.tasks["chaos_tasks.refusing"], cluster.app.tasks["chaos_tasks.add"]
        chain = (refusing.si() | add.si(1, 2)).delay()
        with pytest.raises(TaskRejected, match="not today"):
            chain.get(timeout=90)
        (letter,) = cluster.umbel_json("dlq", "ls")
        assert letter["reason"] == "not today"
