"""No message that has not started waits behind a long task while another worker is idle.

The long task ends only when the test lets it, after all others have: a message that waits for it
would wait for ever.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.scenarios.chaos_tasks import journal_of
from tests.scenarios.places import place
from tests.waiting import wait_until
from umbel import AsyncResult

TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")
WARM, BEFORE, BEHIND = 50, 100, 200
PLACES = [
    ("prefork", "sqlite"),
    ("prefork", "redis"),
    ("prefork", "amqp"),
    ("threads", "sqlite"),
    ("gevent", "redis"),
]


@pytest.mark.scenario
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("pool", "broker"), PLACES)
def test_what_was_claimed_behind_a_long_task_runs_on_the_idle_worker(
    pool: str, broker: str, tmp_path: Path
) -> None:
    with (
        place(broker, tmp_path, durable=False) as where,
        Cluster(tmp_path, TASKS_FILE, broker=where.broker, backend=where.backend) as cluster,
    ):
        for name in ("w1", "w2"):
            cluster.start_worker(name, "-c", "1", "-P", pool)
        work, long = (cluster.app.tasks[f"chaos_tasks.{name}"] for name in ("work", "waits_for_file"))
        short = work.s(str(tmp_path), 0.0)
        while len(_processes(tmp_path)) < 2:  # so that both know how short tasks are
            _wait_for(cluster.app.send_many([short] * WARM))
        sent = cluster.app.send_many(
            [*[short] * BEFORE, long.s(str(tmp_path), "gate"), *[short] * BEHIND],
        )
        _wait_for([result for place, result in enumerate(sent) if place != BEFORE])
        assert not sent[BEFORE].ready()
        (tmp_path / "gate").touch()
        wait_until(sent[BEFORE].ready, what="the long task")
        runs = [line.split() for line in journal_of(str(tmp_path)).read_text().splitlines()]
    ids = [one.id for one in sent]
    assert sorted(task_id for task_id, *_ in runs if task_id in ids) == sorted(ids)
    assert {redelivered for _, redelivered, _ in runs} == {"0"}


@pytest.mark.scenario
@pytest.mark.timeout(300)
@pytest.mark.parametrize("broker", ["sqlite", "redis", "amqp"])
def test_a_worker_of_an_older_version_runs_what_went_back(
    broker: str, tmp_path: Path, old_source: Path
) -> None:
    """It knows nothing of messages that go back, and neither breaks nor runs one twice."""
    with (
        place(broker, tmp_path, durable=False) as where,
        Cluster(tmp_path, TASKS_FILE, broker=where.broker, backend=where.backend) as cluster,
    ):
        cluster.start_worker("new", "-c", "1")
        work, long = (cluster.app.tasks[f"chaos_tasks.{name}"] for name in ("work", "waits_for_file"))
        short = work.s(str(tmp_path), 0.0)
        _wait_for(cluster.app.send_many([short] * WARM))
        blocking = long.delay(str(tmp_path), "gate")
        behind = cluster.app.send_many([short] * BEHIND)
        cluster.start_worker("old", "-c", "1", prefix=["env", f"PYTHONPATH={old_source}"])
        _wait_for(behind)
        assert not blocking.ready()
        (tmp_path / "gate").touch()
        wait_until(blocking.ready, what="the long task")
        assert "returned_unstarted" in cluster.counters("new")
        assert "returned_unstarted" not in cluster.counters("old")  # so it is of that version
        assert [cluster.stop_worker(name) for name in ("old", "new")] == [0, 0]
        runs = [line.split()[0] for line in journal_of(str(tmp_path)).read_text().splitlines()]
    assert len(runs) == len(set(runs)) == WARM + BEHIND + 1


def _wait_for(short: Sequence[AsyncResult[Any]]) -> None:
    wait_until(lambda: all(result.ready() for result in short), what="all short tasks to end")


def _processes(directory: Path) -> set[str]:
    journal = journal_of(str(directory))
    return {line.split()[2] for line in journal.read_text().splitlines()} if journal.exists() else set()
