"""Hooks that hang cannot make a worker deaf: signals win, at every moment of its life (F7)."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.waiting import wait_until

TASKS_FILE = Path(__file__).with_name("hook_tasks.py")
ROOT = str(Path(__file__).parents[2])
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(120)]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((ROOT, os.environ.get("PYTHONPATH", ""))))
    monkeypatch.chdir(tmp_path)  # where the app leaves word
    return Cluster(tmp_path, TASKS_FILE)


def start(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, hangs: str) -> subprocess.Popen[bytes]:
    """A worker that has begun the hook in which it hangs; it would do so for ten minutes."""
    began = cluster.home / "began.txt"
    began.unlink(missing_ok=True)
    monkeypatch.setenv("HANGS", hangs)
    worker = cluster.start_worker("w1", "-c", "2", wait=False, worker_hook_timeout_s=600)
    awaited = "worker_ready" if hangs == "worker_shutdown" else hangs
    wait_until(lambda: began.exists() and awaited in began.read_text(), what=awaited)
    return worker


@pytest.mark.parametrize("hook", ["import", "worker_init", "worker_process_init", "worker_ready"])
def test_one_signal_stops_a_worker_that_hangs_while_it_starts(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    with cluster:
        worker = start(cluster, monkeypatch, hook)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(30) == 0
    if hook in ("worker_init", "worker_ready"):
        assert f"hook timed out; worker continues without it hook={hook}" in cluster.log("w1")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGQUIT])
def test_a_hook_at_the_end_that_hangs_does_not_outlast_a_second_signal(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, signum: int
) -> None:
    with cluster:
        worker = start(cluster, monkeypatch, "worker_shutdown")
        worker.send_signal(signal.SIGTERM)
        began = cluster.home / "began.txt"
        wait_until(lambda: "worker_shutdown" in began.read_text(), what="the hook to begin")
        worker.send_signal(signum)
        assert worker.wait(30) == 0
    assert "hook=worker_shutdown" in cluster.log("w1") and "worker stopped" in cluster.log("w1")


def test_hooks_that_hang_are_waited_for_so_long_and_no_longer(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANGS", "worker_init,worker_ready,worker_shutdown")
    with cluster:
        worker = cluster.start_worker("w1", "-c", "1", worker_hook_timeout_s=0.2)
        wait_until(lambda: "hook=worker_ready" in cluster.log("w1"), what="it to go on")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(30) == 0
    for hook in ("worker_init", "worker_ready", "worker_shutdown"):
        assert f"without it hook={hook}" in cluster.log("w1")


def test_sigusr1_logs_the_stacks_of_all_processes_and_ends_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANGS", "worker_ready")
    with cluster:
        worker = cluster.start_worker("w1", "-c", "2")
        cluster.app.send_task("hook_tasks.is_stuck_here")
        began = cluster.home / "began.txt"
        wait_until(lambda: "task" in began.read_text(), what="the task to start")
        worker.send_signal(signal.SIGUSR1)
        wait_until(
            lambda: cluster.log("w1").count("stack traces of a child process") == 2,
            what="the children's stacks",
        )
        wait_until(lambda: "stack traces of the main process" in cluster.log("w1"), what="the main process's")
        wait_until(lambda: "in is_stuck_here" in cluster.log("w1"), what="the task's line")
        assert "in when_ready" in cluster.log("w1")  # a thread of the main process
        worker.send_signal(signal.SIGQUIT)
        assert worker.wait(30) == 0
