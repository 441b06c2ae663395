"""A worker keeps what it holds for as long as it lives, and not longer; on every broker."""

import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.scenarios.chaos_tasks import journal_of
from tests.scenarios.places import place
from tests.waiting import wait_until

TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")
RUNS_ELSEWHERE_WITHIN_S = 15.0
pytestmark = [
    pytest.mark.scenario,
    pytest.mark.timeout(180),
    pytest.mark.parametrize("broker", ["sqlite", "redis", "amqp"]),
]


def lines(directory: Path) -> list[str]:
    journal = journal_of(str(directory))
    return journal.read_text().splitlines() if journal.exists() else []


def test_a_task_that_takes_ten_leases_runs_once(broker: str, tmp_path: Path) -> None:
    with (
        place(broker, tmp_path) as where,
        Cluster(tmp_path, TASKS_FILE, broker=where.broker, backend=where.backend, lease_s=0.5) as cluster,
    ):
        cluster.start_worker("w1", "-c", "1")
        cluster.start_worker("w2", "-c", "1")
        cluster.app.send_task("chaos_tasks.work", [str(tmp_path), 5.0]).get(timeout=30)
        assert len(lines(tmp_path)) == 1


def test_a_killed_workers_task_runs_elsewhere(broker: str, tmp_path: Path) -> None:
    with (
        place(broker, tmp_path) as where,
        Cluster(tmp_path, TASKS_FILE, broker=where.broker, backend=where.backend) as cluster,
    ):
        cluster.start_worker("w1", "-c", "1")
        cluster.start_worker("w2", "-c", "1")
        long = cluster.app.send_task("chaos_tasks.work", [str(tmp_path), 5.0])
        wait_until(lambda: lines(tmp_path), what="the task to start")
        child = int(lines(tmp_path)[0].split()[2])
        killed, other = ("w1", "w2") if child in cluster.children_of("w1") else ("w2", "w1")
        cluster.kill_worker(killed)
        # With the default lease of 10 s.
        wait_until(
            lambda: len(lines(tmp_path)) == 2, deadline_s=RUNS_ELSEWHERE_WITHIN_S, what="its second run"
        )
        long.get(timeout=30)
        first, second = (line.split() for line in lines(tmp_path))
        assert (first[1], second[1]) == ("0", "1")  # the second run knows that it is one
        wait_until(lambda: cluster.counters(other).get("repeated") == 1, what="the repeat to be counted")


def held_more_than_one(cluster: Cluster) -> int | None:
    (row,) = cluster.umbel_json("queues", "ls")
    return row["claimed"] if row["claimed"] > 1 else None


def test_a_worker_that_lost_its_lease_starts_nothing_that_others_have(broker: str, tmp_path: Path) -> None:
    """A worker that stood still for longer than its lease, with tasks that had not started."""
    if broker == "amqp":
        pytest.skip("the connection is the lease: RabbitMQ ends it after two heartbeats")
    with (
        place(broker, tmp_path, durable=False) as where,
        Cluster(tmp_path, TASKS_FILE, broker=where.broker, backend=where.backend, lease_s=1.0) as cluster,
    ):
        cluster.start_worker("w1", "-c", "1")
        tasks, home = cluster.app.tasks, str(tmp_path)
        # It takes more than it can start at once only when it knows that tasks are short.
        for one in cluster.app.send_many(tasks["chaos_tasks.work"].s(home, 0.001) for _ in range(100)):
            one.get(timeout=60)
        journal_of(home).unlink()
        calls = [tasks["chaos_tasks.waits_for_file"].s(home, "may-end")]
        calls += [tasks["chaos_tasks.work"].s(home, 0.001) for _ in range(3)]
        blocking, *short = cluster.app.send_many(calls)
        wait_until(lambda: lines(tmp_path), deadline_s=30, what="the first task to start")
        held = wait_until(
            lambda: held_more_than_one(cluster), deadline_s=30, what="w1 to hold more than it runs"
        )
        cluster.workers["w1"].send_signal(signal.SIGSTOP)
        cluster.start_worker("w2", "-c", "2")
        for one in short:
            one.get(timeout=60)
        cluster.workers["w1"].send_signal(signal.SIGCONT)
        wait_until(
            lambda: "worker lease expired" in cluster.log("w1"), deadline_s=30, what="w1 to know its lease"
        )
        (tmp_path / "may-end").touch()
        blocking.get(timeout=60)
        wait_until(
            lambda: cluster.counters("w1").get("conflicts") == held,
            deadline_s=60,
            what="w1 to be rid of them",
        )
    runs = Counter(line.split()[0] for line in lines(tmp_path))
    assert runs == {blocking.id: 2} | {one.id: 1 for one in short}
