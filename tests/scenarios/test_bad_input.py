"""Whatever is wrong gets one clear line; the worker goes on or says why not; others are untouched."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.waiting import wait_until
from umbel import Task
from umbel.errors import NotRegistered, StorageFull, TooLarge
from umbel.wire.message import Message, Outgoing

TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(180)]


def errors_in(log: str) -> list[str]:
    return [line for line in log.splitlines() if " ERROR " in line]


def test_a_corrupt_message_is_buried_and_the_worker_goes_on(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        corrupt = Message(headers=b"\xff\x00 not json", body=b"")
        cluster.app.producer.publish([Outgoing("celery", corrupt)])
        cluster.start_worker("w1", "-c", "1")
        assert cluster.app.send_task("chaos_tasks.add", [1, 2]).get(timeout=90) == 3
        (letter,) = cluster.umbel_json("dlq", "ls")
        assert "corrupt" in letter["reason"]
        assert len(errors_in(cluster.log("w1"))) == 1


def test_a_corrupt_body_is_buried_and_its_task_fails(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        headers = b'{"task": "chaos_tasks.add", "id": "broken"}'
        cluster.app.producer.publish([Outgoing("celery", Message(headers=headers, body=b"[[1, "))])
        cluster.start_worker("w1", "-c", "1")
        assert cluster.app.send_task("chaos_tasks.add", [1, 2]).get(timeout=90) == 3
        wait_until(lambda: cluster.app.AsyncResult("broken").failed(), what="the broken task to fail")
        (letter,) = cluster.umbel_json("dlq", "ls")
        assert letter["task_id"] == "broken"


def test_an_unknown_task_is_buried_and_fails_with_its_name(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        cluster.start_worker("w1", "-c", "1")
        with pytest.raises(NotRegistered, match="no_such_task"):
            cluster.app.send_task("no_such_task").get(timeout=90)
        (letter,) = cluster.umbel_json("dlq", "ls")
        assert "no_such_task" in letter["reason"]
        assert cluster.app.send_task("chaos_tasks.add", [1, 2]).get(timeout=90) == 3


def test_a_message_over_the_size_limit_is_refused_by_client_and_worker(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        with pytest.raises(TooLarge, match="message_max_bytes"):
            cluster.app.send_task("chaos_tasks.add", ["x" * 17_000_000, 1])
        assert cluster.umbel_json("queues", "ls") == []
        cluster.app.send_task("chaos_tasks.add", ["x" * 100_000, 1])
        cluster.app.send_task("chaos_tasks.add", ["x" * 300_000, 1])
        cluster.start_worker("w1", "-c", "1", message_max_bytes=50_000)
        assert cluster.app.send_task("chaos_tasks.add", [1, 2]).get(timeout=90) == 3
        letters = cluster.umbel_json("dlq", "ls")
        assert ["limit of 50000" in letter["reason"] for letter in letters] == [True, True]
        assert sum("it was not read" in letter["reason"] for letter in letters) == 1
        assert "over message_max_bytes; moved to dead letters unread" in cluster.log("w1")


def test_a_full_disk_is_named_and_the_worker_makes_room_by_working(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE, storage_max_bytes=400 * 1024) as cluster:
        add = cluster.app.tasks["chaos_tasks.add"]
        early = add.delay(1, 2)
        with pytest.raises(StorageFull, match=r"queue\.db"):
            fill(add)
        cluster.start_worker("w1", "-c", "1")
        assert early.get(timeout=90) == 3
        wait_until(
            lambda: all(row["ready"] + row["claimed"] == 0 for row in cluster.umbel_json("queues", "ls")),
            what="the worker to make room by working",
        )
        assert add.delay(3, 4).get(timeout=90) == 7
        assert cluster.umbel("health").returncode == 0


def fill(add: Task[..., object]) -> None:
    for _ in range(100):
        add.apply_async(("x" * 20_000, "y"), ignore_result=True)


def read_only_path(tmp_path: Path) -> Path:
    """A directory in which nobody can make a file, root included."""
    if os.geteuid() == 0:
        return Path("/proc")
    tmp_path.chmod(0o500)
    return tmp_path


def test_a_database_on_a_read_only_path_ends_the_worker_with_the_reason(tmp_path: Path) -> None:
    broker = f"sqlite:///{read_only_path(tmp_path)}/umbel.db"
    done = subprocess.run(
        [sys.executable, "-m", "umbel.cli.main", "worker", "-A", f"{TASKS_FILE}:app"],
        env={**os.environ, "UMBEL_BROKER": broker},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 69
    assert "umbel.db" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("these are my notes\n" * 100)
    done = subprocess.run(
        [sys.executable, "-m", "umbel.cli.main", "worker", "-A", f"{TASKS_FILE}:app"],
        env={**os.environ, "UMBEL_BROKER": f"sqlite:///{path}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "notes.txt" in done.stderr
    assert "Traceback" not in done.stderr
    assert path.read_text().startswith("these are my notes")


def test_a_worker_survives_a_database_that_is_locked_for_a_while(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        cluster.start_worker("w1", "-c", "1")
        sent = [cluster.app.send_task("chaos_tasks.add", [n, n]) for n in range(3)]
        blocker = sqlite3.connect(tmp_path / "queue.db", isolation_level=None, timeout=30)
        blocker.execute("BEGIN IMMEDIATE")
        assert cluster.workers["w1"].poll() is None
        blocker.execute("ROLLBACK")
        blocker.close()
        assert [one.get(timeout=90) for one in sent] == [0, 2, 4]
