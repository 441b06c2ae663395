"""A task that kills its process is tried three times, then kept with the reason."""

from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.scenarios.chaos_tasks import journal_of
from tests.waiting import wait_until
from umbel.errors import WorkerLost

TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(180)]


def test_a_deadly_task_is_buried_after_three_deliveries_and_can_be_requeued(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        cluster.start_worker("w1", "-c", "2")
        neighbours = cluster.app.send_many(cluster.app.tasks["chaos_tasks.add"].s(n, n) for n in range(200))
        deadly = cluster.app.send_task("chaos_tasks.deadly", [str(tmp_path), 3])
        with pytest.raises(WorkerLost, match="SIGKILL"):
            deadly.get(timeout=60)
        assert journal_of(str(tmp_path)).read_text().splitlines() == ["deadly"] * 3
        assert [one.get(timeout=90) for one in neighbours] == [2 * n for n in range(200)]

        (letter,) = cluster.umbel_json("dlq", "ls")
        assert letter["task_id"] == deadly.id
        assert letter["starts"] == 3
        assert "SIGKILL" in letter["reason"]
        assert "chaos_tasks.deadly" in cluster.umbel("dlq", "ls").stdout

        deadly.forget()
        assert cluster.umbel_json("dlq", "requeue", deadly.id) == {"requeued": 1, "missing": []}
        assert deadly.get(timeout=90) == "survived"
        assert cluster.umbel_json("dlq", "ls") == []
        # The second and the third start, and the one after the dead letters.
        wait_until(lambda: cluster.counters("w1").get("repeated") == 3, what="the repeats to be counted")


def test_a_task_that_dies_once_is_run_again(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        cluster.start_worker("w1", "-c", "1")
        assert cluster.app.send_task("chaos_tasks.deadly", [str(tmp_path), 1]).get(timeout=90) == "survived"
        wait_until(lambda: cluster.counters("w1").get("repeated") == 1, what="the repeat to be counted")


def test_a_task_acknowledged_early_fails_with_its_process(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        cluster.start_worker("w1", "-c", "1")
        with pytest.raises(WorkerLost, match="SIGKILL"):
            cluster.app.send_task("chaos_tasks.deadly_early").get(timeout=90)
        assert cluster.umbel_json("dlq", "ls") == []
