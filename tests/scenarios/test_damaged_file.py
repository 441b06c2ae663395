"""N1 for the embedded broker's file, with real workers: malformed rows, and a file or log that is damaged.

`tests/brokers/test_sqlite_malformed.py` walks every column; here a worker runs on what it leaves.
"""

import os
import random
import sqlite3
import subprocess
import sys
from contextlib import closing
from itertools import cycle
from pathlib import Path

import pytest

from tests.brokers.test_sqlite_malformed import ODD, columns_of, fill, spoil
from tests.cluster import Cluster
from tests.waiting import wait_until
from umbel.brokers.sqlite.wakeup import Bell

SOAK = bool(os.environ.get("UMBEL_SOAK"))
TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")
MALFORMED = "malformed row in the database file; set aside"
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(900 if SOAK else 180)]


def add_up(cluster: Cluster, count: int = 20) -> None:
    add = cluster.app.tasks["chaos_tasks.add"]
    sent = cluster.app.send_many(add.s(number, 1) for number in range(count))
    assert [result.get(timeout=90) for result in sent] == [number + 1 for number in range(count)]


def test_a_worker_starts_on_a_file_with_malformed_rows_in_every_table(tmp_path: Path) -> None:
    path = tmp_path / "queue.db"
    bell = Bell(path)
    assert bell.address is not None
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        for turn in range(40 if SOAK else 3):
            for end in ("", "-wal", "-shm", "-lock"):
                Path(f"{path}{end}").unlink(missing_ok=True)
            fill(path, bell.address)
            kinds = cycle(ODD.values())
            for table, columns in columns_of(path).items():
                column, (expression, value) = list(columns)[turn % len(columns)], next(kinds)
                spoil(path, table, 0, column, expression, value)
            cluster.start_worker("w1", "-c", "1")
            add_up(cluster)
            assert MALFORMED in cluster.log("w1")
            assert cluster.stop_worker("w1") == 0
            assert "Traceback" not in cluster.log("w1")
            cluster.log_file("w1").unlink()
            cluster.app.close()
    bell.close()


def test_what_is_changed_under_a_running_worker_is_set_aside_and_tasks_run_on(tmp_path: Path) -> None:
    """Among them what made tasks wait in silence: up to which message all have their place in a queue."""
    changes = [
        "UPDATE meta SET value = 'x' WHERE name = 'filed'",
        "UPDATE meta SET value = 9223372036854775807 WHERE name = 'filed'",
        "DELETE FROM meta WHERE name = 'filed'",
        "UPDATE owners SET expires_at = 'x'",
        "UPDATE subscriptions SET exchange = x'00'",
        "INSERT INTO pauses VALUES ('celery2', 'x', '{')",
        "INSERT INTO messages VALUES (9223372036854775807, 'celery', 0, 0, 0, x'00')",
        "INSERT INTO ready VALUES ('celery', 'x', 1)",
        "INSERT INTO ready VALUES ('celery', 0, 123456)",
        "INSERT INTO delayed VALUES ('x', 5, 'celery', 0)",
        "INSERT INTO revokes (task_id, header, recorded_at, expires_at) VALUES (x'00', '', 0, 0)",
        "UPDATE sqlite_sequence SET seq = 9223372036854775807",
    ]
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        worker = cluster.start_worker("w1", "-c", "1")
        add_up(cluster)
        for change in changes:
            with closing(sqlite3.connect(tmp_path / "queue.db", timeout=60, isolation_level=None)) as db:
                db.execute(change)
            add_up(cluster)
            assert worker.poll() is None, change
        wait_until(lambda: cluster.log("w1").count(MALFORMED) >= 4, what="the rows to be logged")
        assert "Traceback" not in cluster.log("w1")
        assert cluster.stop_worker("w1") == 0
        cluster.start_worker("w1", "-c", "1")
        add_up(cluster)
        assert cluster.stop_worker("w1") == 0


def overwrite(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = random.Random(1).randbytes(len(data) - 4096)
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["overwritten", "cut off", "no database"])
def test_a_damaged_file_is_one_line_and_an_exit_code(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "queue.db"
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        cluster.app.send_many([cluster.app.tasks["chaos_tasks.add"].s(1, 2)] * 200)
        cluster.app.close()
        if damage == "overwritten":
            overwrite(path)
        elif damage == "cut off":
            os.truncate(path, path.stat().st_size // 2)
        else:
            path.write_text("I am no database. " * 1000)
        for command in (["queues", "ls"], ["dlq", "ls"], ["status"], ["task", "failed"], ["result", "x"]):
            done = cluster.umbel(*command, check=False)
            assert done.returncode == 69, (command, done)
            _judge(done.stderr, path)
        worker = cluster.start_worker("w1", "-c", "1", wait=False)
        assert worker.wait(90) == 69
        _judge(cluster.log("w1"), path)


def _judge(errors: str, path: Path) -> None:
    assert "Traceback" not in errors
    last = errors.strip().splitlines()[-1]
    assert last.startswith(f"umbel: {path} is not a usable database: ")
    assert ".recover" in last and "restore a backup" in last


def test_a_worker_lives_on_while_its_log_is_cut_off_and_says_which_file_it_is(tmp_path: Path) -> None:
    path = tmp_path / "queue.db"
    send = "import chaos_tasks as t; t.add.delay(1, 2)"
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        cluster.start_worker("w1", "-c", "1")
        add_up(cluster)
        log = Path(f"{path}-wal")
        os.truncate(log, log.stat().st_size // 3)
        wait_until(lambda: "is not a usable database" in cluster.log("w1"), what="the damage to be logged")
        environment = {
            **os.environ,
            "UMBEL_BROKER": f"sqlite:///{path}",
            "PYTHONPATH": str(TASKS_FILE.parent),
        }
        client = subprocess.run(
            [sys.executable, "-c", send], env=environment, capture_output=True, text=True, check=False
        )
        assert "umbel.errors.AccessRefused" in client.stderr.splitlines()[-1]
        assert "free some space" not in cluster.log("w1") + client.stderr
        assert "Traceback" not in cluster.log("w1")
        assert cluster.stop_worker("w1") == 0
