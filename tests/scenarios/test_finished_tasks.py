"""What a kill repeats of the tasks that had ended: few, also while their outcomes cannot be stored."""

import os
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.scenarios.chaos_tasks import journal_of
from tests.scenarios.places import place
from tests.waiting import wait_until
from umbel.protocol.pool.slots import UNSETTLED_PER_CHILD_MAX

TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")
WARM, TASKS = 50, 1500


@pytest.mark.scenario
@pytest.mark.timeout(300)
@pytest.mark.parametrize("broker", ["sqlite", "redis", "amqp"])
def test_a_killed_worker_repeats_few_tasks_although_no_outcome_could_be_stored(
    broker: str, tmp_path: Path
) -> None:
    """The results are in a file that somebody else writes to, so what has ended waits to be settled."""
    results = tmp_path / "results.db"
    with (
        place(broker, tmp_path, durable=False) as where,
        Cluster(tmp_path, TASKS_FILE, broker=where.broker, backend=f"sqlite:///{results}") as cluster,
    ):
        short = cluster.app.tasks["chaos_tasks.work"].s(str(tmp_path), 0.0)
        cluster.start_worker("killed", "-c", "1")
        warm = cluster.app.send_many([short] * WARM)
        wait_until(lambda: all(result.ready() for result in warm), what="the tasks that warm it up")
        returned = _returned(cluster)
        with _locked(results):
            sent = cluster.app.send_many([short] * TASKS)
            # It hands nothing more to its child, and the rest that it has claimed goes back.
            wait_until(
                lambda: _returned(cluster) > returned or len(_runs(tmp_path)) > 500,
                what="the worker to stop handing out tasks",
            )
            cluster.kill_worker("killed")
        ended = _runs(tmp_path)[WARM:]
        assert 0 < len(ended) <= UNSETTLED_PER_CHILD_MAX
        cluster.start_worker("heir", "-c", "1")
        wait_until(lambda: all(result.ready() for result in sent), what="all tasks to end")
        runs = Counter(line.split()[0] for line in _runs(tmp_path)[WARM:])
    assert set(runs) == {result.id for result in sent}
    assert runs.total() - TASKS <= len(ended)


@pytest.mark.scenario
def test_a_killed_child_repeats_no_task_that_had_ended(tmp_path: Path) -> None:
    with place("sqlite", tmp_path) as where, Cluster(tmp_path, TASKS_FILE, broker=where.broker) as cluster:
        work, long = (cluster.app.tasks[f"chaos_tasks.{name}"] for name in ("work", "waits_for_file"))
        cluster.start_worker("w", "-c", "1")
        warm = cluster.app.send_many([work.s(str(tmp_path), 0.0)] * WARM)
        wait_until(lambda: all(result.ready() for result in warm), what="the tasks that warm it up")
        before = cluster.app.send_many([work.s(str(tmp_path), 0.0)] * WARM)
        last = long.delay(str(tmp_path), "gate")
        wait_until(lambda: any(line.startswith(last.id) for line in _runs(tmp_path)), what="the last to run")
        os.kill(cluster.children_of("w")[0], signal.SIGKILL)
        (tmp_path / "gate").touch()
        wait_until(last.ready, what="the task that was running")
        runs = Counter(line.split()[0] for line in _runs(tmp_path))
    assert {task_id for task_id, count in runs.items() if count > 1} == {last.id}
    assert set(runs) == {result.id for result in (*warm, *before, last)}


def _returned(cluster: Cluster) -> int:
    """How many messages the worker has claimed and given back so far."""
    (stats,) = (cluster.app.control.inspect().stats() or {}).values()
    count: int = stats["umbel"]["counters"]["returned_unstarted"]
    return count


@contextmanager
def _locked(database: Path) -> Iterator[None]:
    """Nobody else can write there."""
    with closing(sqlite3.connect(database, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        yield


def _runs(directory: Path) -> list[str]:
    journal = journal_of(str(directory))
    return journal.read_text().splitlines() if journal.exists() else []
