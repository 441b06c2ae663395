"""A worker keeps what it holds for as long as it lives, and not longer; on every broker."""

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.scenarios.chaos_tasks import journal_of
from tests.scenarios.places import place
from tests.waiting import wait_until

TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")
RUNS_ELSEWHERE_WITHIN_S = 15.0
BROKERS = ("sqlite", "redis", "amqp")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(180)]


@contextmanager
def everywhere(home: Path, **settings: object) -> Iterator[dict[str, Cluster]]:
    """Two workers on each broker. What they are waited for passes on all brokers at the same time."""
    with ExitStack() as stack:
        clusters: dict[str, Cluster] = {}
        for broker in BROKERS:
            (directory := home / broker).mkdir()
            where = stack.enter_context(place(broker, directory))
            made = Cluster(directory, TASKS_FILE, broker=where.broker, backend=where.backend, **settings)
            clusters[broker] = stack.enter_context(made)
            for name in ("w1", "w2"):
                made.start_worker(name, "-c", "1", wait=False)
        for made in clusters.values():
            for name in ("w1", "w2"):
                made.wait_for(name)
        yield clusters


def lines(directory: Path) -> list[str]:
    journal = journal_of(str(directory))
    return journal.read_text().splitlines() if journal.exists() else []


def test_a_task_that_takes_ten_leases_runs_once(tmp_path: Path) -> None:
    with everywhere(tmp_path, lease_s=0.5) as clusters:
        sent = [
            cluster.app.send_task("chaos_tasks.work", [str(cluster.home), 5.0])
            for cluster in clusters.values()
        ]
        for one in sent:
            one.get(timeout=90)
        assert {broker: len(lines(tmp_path / broker)) for broker in clusters} == dict.fromkeys(BROKERS, 1)


def test_a_killed_workers_task_runs_elsewhere(tmp_path: Path) -> None:
    with everywhere(tmp_path) as clusters:
        sent, other = {}, {}
        for broker, cluster in clusters.items():
            home = cluster.home
            sent[broker] = cluster.app.send_task("chaos_tasks.waits_for_file", [str(home), "may-end"])
            wait_until(lambda: lines(home), what=f"the task to start on {broker}")  # noqa: B023
            child = int(lines(home)[0].split()[2])
            killed, other[broker] = ("w1", "w2") if child in cluster.children_of("w1") else ("w2", "w1")
            cluster.kill_worker(killed)
        # With the default lease of 10 s.
        wait_until(
            lambda: {broker for broker in BROKERS if len(lines(tmp_path / broker)) == 2} == set(BROKERS),
            deadline_s=RUNS_ELSEWHERE_WITHIN_S,
            what="the second runs",
        )
        for broker, cluster in clusters.items():
            (cluster.home / "may-end").touch()
            sent[broker].get(timeout=90)
            first, second = (line.split() for line in lines(cluster.home))
            assert (first[1], second[1]) == ("0", "1"), broker  # the second run knows that it is one
            wait_until(
                lambda: cluster.counters(other[broker]).get("repeated") == 1,  # noqa: B023
                what=f"the repeat to be counted on {broker}",
            )


def held_more_than_one(cluster: Cluster) -> int | None:
    (row,) = cluster.umbel_json("queues", "ls")
    return row["claimed"] if row["claimed"] > 1 else None


# On RabbitMQ the connection is the lease, which ends after two heartbeats.
@pytest.mark.parametrize("broker", ["sqlite", "redis"])
def test_a_worker_that_lost_its_lease_starts_nothing_that_others_have(broker: str, tmp_path: Path) -> None:
    """A worker that stood still for longer than its lease, with tasks that had not started."""
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
        wait_until(lambda: lines(tmp_path), what="the first task to start")
        held = wait_until(lambda: held_more_than_one(cluster), what="w1 to hold more than it runs")
        cluster.workers["w1"].send_signal(signal.SIGSTOP)
        cluster.start_worker("w2", "-c", "2")
        for one in short:
            one.get(timeout=60)
        cluster.workers["w1"].send_signal(signal.SIGCONT)
        wait_until(lambda: "worker lease expired" in cluster.log("w1"), what="w1 to know its lease")
        (tmp_path / "may-end").touch()
        blocking.get(timeout=60)
        wait_until(
            lambda: cluster.counters("w1").get("conflicts") == held,
            what="w1 to be rid of them",
        )
    runs = Counter(line.split()[0] for line in lines(tmp_path))
    assert runs == {blocking.id: 2} | {one.id: 1 for one in short}
