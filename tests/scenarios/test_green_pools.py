"""F10, P6: pools that run many tasks at once on one thread: all end, and the worker stays responsive."""

import os
import signal
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.scenarios.chaos_tasks import journal_of
from tests.waiting import wait_until
from umbel import AsyncResult
from umbel.launch.preparation import node_name

SOAK = bool(os.environ.get("UMBEL_SOAK"))
COROUTINES = 1000
TASKS = 20_000 if SOAK else 1000
GREENLETS = 500 if SOAK else 50
STAYING = 1000 if SOAK else 100
HERE = Path(__file__).parent
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(300 if SOAK else 120)]


def ran(home: Path) -> list[str]:
    """The tasks that have run, in the order in which they said so."""
    journal = journal_of(str(home))
    return [line.split()[0] for line in journal.read_text().splitlines()] if journal.exists() else []


def send(cluster: Cluster, task: str, count: int, *args: object) -> list[AsyncResult[str]]:
    return cluster.app.send_many(cluster.app.signature(task, args) for _ in range(count))


def check_own_ids(results: list[AsyncResult[str]]) -> None:
    """Each task returned its own id, although it shared its thread with all the others."""
    assert [result.get(timeout=60) for result in results] == [result.id for result in results]


def test_a_thousand_short_coroutines_end_and_each_knows_its_own_request(tmp_path: Path) -> None:
    with Cluster(tmp_path, HERE / "green_tasks.py") as cluster:
        results = send(cluster, "green_tasks.nap", TASKS, str(tmp_path), 0.01)
        results += send(cluster, "green_tasks.plain", 20, str(tmp_path))
        cluster.start_worker("w1", "-P", "asyncio", "-c", str(COROUTINES))
        check_own_ids(results)
        assert sorted(ran(tmp_path)) == sorted(result.id for result in results)
        assert cluster.stop_worker("w1") == 0


def test_a_coroutine_that_keeps_the_loop_does_not_keep_the_worker(tmp_path: Path) -> None:
    """The worker answers, its heart beats and its lease holds while no other coroutine can run."""
    with Cluster(tmp_path, HERE / "green_tasks.py", lease_s=2.0) as cluster:
        cluster.start_worker("w1", "-P", "asyncio", "-c", "10")
        gate = tmp_path / "gate"
        blocker = cluster.app.send_task("green_tasks.hold_up", [str(tmp_path), str(gate)])
        wait_until(lambda: blocker.id in ran(tmp_path), what="the task to keep the loop")
        other = cluster.app.send_task("green_tasks.nap", [str(tmp_path), 0.0])
        assert "pong" in cluster.umbel("ping", "-d", node_name("w1"), "--timeout", "20").stdout
        assert cluster.umbel("health", "--live").returncode == 0
        wait_until(lambda: "blocks the event loop" in cluster.log("w1"), what="a line in the log")
        assert "hold_up" in cluster.log("w1")
        assert other.id not in ran(tmp_path)
        gate.touch()
        assert blocker.get(timeout=90) == blocker.id
        assert other.get(timeout=90) == other.id
        assert ran(tmp_path).count(blocker.id) == 1


def test_coroutines_of_a_killed_worker_run_elsewhere(tmp_path: Path) -> None:
    with Cluster(tmp_path, HERE / "green_tasks.py", lease_s=1.0) as cluster:
        cluster.start_worker("w1", "-P", "asyncio", "-c", str(STAYING))
        gate = tmp_path / "gate"
        results = send(cluster, "green_tasks.stay", STAYING, str(tmp_path), str(gate))
        wait_until(lambda: len(ran(tmp_path)) == STAYING, what="all to run")
        cluster.kill_worker("w1")
        gate.touch()
        cluster.start_worker("w2", "-P", "asyncio", "-c", str(STAYING))
        check_own_ids(results)


def test_a_warm_shutdown_lets_coroutines_end(tmp_path: Path) -> None:
    with Cluster(tmp_path, HERE / "green_tasks.py") as cluster:
        worker = cluster.start_worker("w1", "-P", "asyncio", "-c", str(STAYING))
        gate = tmp_path / "gate"
        results = send(cluster, "green_tasks.stay", STAYING, str(tmp_path), str(gate))
        wait_until(lambda: len(ran(tmp_path)) == STAYING, what="all to run")
        worker.send_signal(signal.SIGTERM)
        wait_until(
            lambda: "waiting for running tasks to finish" in cluster.log("w1"), what="the worker to wait"
        )
        gate.touch()
        assert worker.wait(60) == 0
        check_own_ids(results)
        assert len(ran(tmp_path)) == STAYING


def test_greenlets_wait_together_in_one_process_and_a_killed_one_loses_nothing(tmp_path: Path) -> None:
    """The tasks' module imports `sleep` by name: gevent patched it before."""
    with Cluster(tmp_path, HERE / "greenlet_tasks.py") as cluster:
        cluster.start_worker("w1", "-P", "gevent", "-c", str(GREENLETS))
        gate = tmp_path / "gate"
        results = send(cluster, "greenlet_tasks.stay", GREENLETS, str(tmp_path), str(gate))
        wait_until(lambda: len(ran(tmp_path)) == GREENLETS, what="all to run at once")
        lines = journal_of(str(tmp_path)).read_text().splitlines()
        (child,) = {int(line.split()[1]) for line in lines}
        assert child in cluster.children_of("w1")
        os.kill(child, signal.SIGKILL)
        gate.touch()
        check_own_ids(results)
        assert cluster.stop_worker("w1") == 0
