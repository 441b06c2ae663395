"""F7: a worker stops warm, soft or cold, says how far it is, and answers until the end."""

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.scenarios.chaos_tasks import journal_of
from tests.waiting import wait_until
from umbel.launch.preparation import node_name

TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(180)]


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def ready(cluster: Cluster) -> int:
    return int(sum(queue["ready"] + queue["delayed"] for queue in cluster.umbel_json("queues", "ls")))


def test_a_draining_worker_says_so_and_answers_and_is_live_but_not_ready(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        worker = cluster.start_worker("w1", "-c", "1")
        assert cluster.umbel("health", "--ready").returncode == 0
        cluster.app.send_task("chaos_tasks.work", [str(tmp_path), 60])
        wait_until(lambda: lines(journal_of(str(tmp_path))), what="the task to start")
        worker.send_signal(signal.SIGTERM)
        wait_until(
            lambda: "draining, 1 running" in cluster.umbel("health", check=False).stdout, what="it to drain"
        )
        status = cluster.umbel("status", "-d", node_name("w1"), "--timeout", "20")  # remote control goes on
        assert "draining, 1" in " ".join(status.stdout.split())
        assert cluster.umbel("health", "--live", check=False).returncode == 0
        assert cluster.umbel("health", "--ready", check=False).returncode == 1
        (state,) = cluster.umbel_json("health")
        assert (state["live"], state["ready"], state["stopping"]["running"]) == (True, False, 1)
        assert 0 < state["stopping"]["left_s"] <= 30
        worker.send_signal(signal.SIGQUIT)  # cold
        assert worker.wait(30) == 0
        assert ready(cluster) == 1
    assert "cut=1" in cluster.log("w1")


@pytest.mark.parametrize("how", ["raise", "return"])
def test_a_second_signal_to_the_group_interrupts_tasks_and_what_passes_on_returns(
    how: str, tmp_path: Path
) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        worker = cluster.start_worker("w1", "-c", "1")
        result = cluster.app.send_task("chaos_tasks.tidies_up", [str(tmp_path), how])
        wait_until(lambda: lines(journal_of(str(tmp_path))), what="the task to start")
        os.killpg(worker.pid, signal.SIGTERM)
        wait_until(
            lambda: "waiting for running tasks to finish" in cluster.log("w1"), what="the worker to wait"
        )
        assert not lines(tmp_path / "tidied.txt")
        os.killpg(worker.pid, signal.SIGTERM)
        assert worker.wait(30) == 0
        assert lines(tmp_path / "tidied.txt") == [result.id]
        if how == "return":
            assert result.get(timeout=5) == "tidied"
        assert ready(cluster) == (0 if how == "return" else 1)
    assert "worker stopped" in cluster.log("w1") and "cut=" not in cluster.log("w1")


def test_a_signal_to_every_single_process_loses_nothing(tmp_path: Path) -> None:
    """As systemd sends it by default: children end too, and what they ran goes back to its queue."""
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        worker = cluster.start_worker("w1", "-c", "2")
        cluster.app.send_many(cluster.app.tasks["chaos_tasks.work"].s(str(tmp_path), 60) for _ in range(2))
        wait_until(lambda: len(lines(journal_of(str(tmp_path)))) == 2, what="the tasks to start")
        pool = cluster.umbel_json("health")[0]["pool"]
        for pid in (worker.pid, pool["fork-server"], *pool["processes"]):
            os.kill(pid, signal.SIGTERM)
        assert worker.wait(30) == 0
        assert ready(cluster) == 2


def test_a_service_manager_hears_that_it_is_up_alive_and_stopping(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, pytest.MonkeyPatch.context() as patch:
        manager.bind(address)
        manager.settimeout(20)
        patch.setenv("NOTIFY_SOCKET", address)
        with Cluster(tmp_path, TASKS_FILE) as cluster:
            worker = cluster.start_worker("w1", "-c", "1", wait=False)
            assert manager.recv(100) == b"READY=1"
            assert manager.recv(100) == b"WATCHDOG=1"
            cluster.app.send_task("chaos_tasks.work", [str(tmp_path), 3])
            wait_until(lambda: lines(journal_of(str(tmp_path))), what="the task to start")
            worker.send_signal(signal.SIGTERM)
            wait_until(lambda: b"STOPPING=1" in manager.recv(100), what="it to say that it stops")
            assert worker.wait(30) == 0
