"""Paused queues and moved messages with real workers, on each broker."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.scenarios.places import place
from tests.waiting import wait_until

TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")
FLAGS = ("-c", "2", "-Q", "celery,quiet")
MOVED = 900  # more than a portion of any broker
MAYBE_TWICE = 100  # what RabbitMQ may have in both queues when a move is killed


@pytest.mark.scenario
@pytest.mark.timeout(300)
@pytest.mark.parametrize("broker", ["redis", "sqlite", "amqp"] if os.environ.get("UMBEL_SOAK") else ["redis"])
def test_a_paused_queue_rests_until_it_is_resumed_and_a_killed_move_loses_nothing(
    broker: str, tmp_path: Path
) -> None:
    with (
        place(broker, tmp_path) as where,
        Cluster(tmp_path, TASKS_FILE, broker=where.broker, backend=where.backend) as cluster,
    ):
        cluster.start_worker("w1", *FLAGS)
        _pause_and_resume(cluster, where.restart)
        _move_and_kill(cluster)
        for name in ("w1", "w2"):
            assert cluster.stop_worker(name) == 0


def _pause_and_resume(cluster: Cluster, restart: Any) -> None:
    tasks = cluster.app.tasks
    add, held = tasks["chaos_tasks.add"], tasks["chaos_tasks.waits_for_file"]
    running = held.apply_async((str(cluster.home), "go"), queue="quiet")
    journal = cluster.home / "journal.txt"
    wait_until(journal.exists, what="a task that runs")
    assert "quiet is paused" in cluster.umbel("queues", "pause", "quiet").stdout
    waiting = [add.apply_async((number, 1), queue="quiet") for number in range(5)]
    (cluster.home / "go").touch()
    running.get(timeout=90)  # what runs ends
    if restart is not None:
        restart()
    cluster.start_worker("w2", *FLAGS)  # it has heard nothing of the pause
    assert [add.delay(number, 2).get(timeout=90) for number in range(10)] == list(range(2, 12))
    assert _depth(cluster, "quiet") == {"ready": 5, "delayed": 0, "claimed": 0, "limited": 0, "paused": True}
    assert "paused queues: quiet" in cluster.umbel("status").stderr
    shown = cluster.umbel_json("inspect", "active_queues")["replies"]
    assert {node: [one["name"] for one in queues if one.get("paused")] for node, queues in shown.items()} == {
        node: ["quiet"] for node in shown
    }
    assert len(shown) == 2
    outcome = cluster.app.control.resume_queue("quiet")
    assert outcome.changed and not outcome.told and not outcome.refused
    assert [one.get(timeout=90) for one in waiting] == list(range(1, 6))


def _move_and_kill(cluster: Cluster) -> None:
    cluster.app.control.pause_queue("quiet")
    add = cluster.app.tasks["chaos_tasks.add"]
    calls = [add.s(number, 1).set(queue="quiet", ignore_result=True) for number in range(MOVED)]
    sent = {one.id for one in cluster.app.send_many(calls)}
    with subprocess.Popen(
        [sys.executable, "-m", "umbel.cli.main", *("queues", "move", "quiet", "elsewhere", "-y")],
        env={**os.environ, **cluster._environment(), "UMBEL_APP": f"{TASKS_FILE}:app"},
        cwd=cluster.home,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as moving:
        assert moving.stderr is not None
        assert b"messages moved" in moving.stderr.readline()
        moving.send_signal(signal.SIGKILL)
    both = sum(_depth(cluster, queue)["ready"] for queue in ("quiet", "elsewhere"))
    assert MOVED <= both <= MOVED + (MAYBE_TWICE if _repeats(cluster) else 0)
    assert cluster.umbel_json("queues", "move", "quiet", "elsewhere", "-y")["moved"] < MOVED
    found = [one["task_id"] for one in cluster.umbel_json("queues", "peek", "elsewhere", "--limit", "1000")]
    assert set(found) == sent and len(found) == both
    assert _depth(cluster, "quiet")["ready"] == 0


def _repeats(cluster: Cluster) -> bool:
    return cluster.app.settings.broker.startswith("amqp")


def _depth(cluster: Cluster, queue: str) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {row.pop("queue"): row for row in cluster.umbel_json("queues", "ls")}
    return rows.get(queue, {"ready": 0})
