"""States of users' own reach results and events, from every pool, although the child is gone at once."""

from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.events_tail import EventsTail
from tests.waiting import wait_until

TASKS_FILE = Path(__file__).with_name("progress_tasks.py")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(120)]


@pytest.mark.parametrize("pool", ["prefork", "solo", "threads", "asyncio"])
def test_progress_is_seen_while_the_task_runs_and_its_events_come_in_order(pool: str, tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        with EventsTail(tmp_path, cluster.app.settings.broker) as tail:
            cluster.start_worker("w1", "-c", "1", "-E", "-P", pool)
            gate = tmp_path / "gate"
            half = cluster.app.send_task("progress_tasks.waits", [str(gate)])
            wait_until(lambda: half.state == "HALFWAY", what="the state")
            assert half.info == {"percent": 50}
            gate.touch()
            assert half.get(timeout=90) == "through"
            counted = cluster.app.send_task("progress_tasks.counts", [40])
            assert counted.get(timeout=90) == "counted"
            assert counted.state == "SUCCESS"
            tail.wait_for("the end", type="task-succeeded", uuid=counted.id)
            events = [one for one in tail.seen() if one.get("uuid") == counted.id]
            moved = cluster.app.send_task("progress_tasks.moves")
            assert moved.get(timeout=90) is True
            tail.wait_for("the blind event", type="task-moved", uuid=moved.id, place="here")
        told = [(one["type"], one.get("done"), one.get("total")) for one in events]
        progress = [("task-progress", done, 40) for done in range(1, 41)]
        assert told == [
            ("task-received", None, None),
            ("task-started", None, None),
            *progress,
            ("task-counted", None, 40),
            ("task-succeeded", None, None),
        ]


def test_what_a_child_told_before_it_died_is_not_lost(tmp_path: Path) -> None:
    with (
        Cluster(tmp_path, TASKS_FILE, task_max_deliveries=1) as cluster,
        EventsTail(tmp_path, cluster.app.settings.broker) as tail,
    ):
        cluster.start_worker("w1", "-c", "1", "-E")
        dead = cluster.app.send_task("progress_tasks.tells_and_dies")
        tail.wait_for("its end", type="task-failed", uuid=dead.id)
        types = [one["type"] for one in tail.seen() if one.get("uuid") == dead.id]
    assert types == ["task-received", "task-started", "task-progress", "task-failed"]


def test_what_tasks_tell_is_not_lost_although_each_has_a_child_of_its_own(tmp_path: Path) -> None:
    with (
        Cluster(tmp_path, TASKS_FILE, worker_max_tasks_per_child=1) as cluster,
        EventsTail(tmp_path, cluster.app.settings.broker) as tail,
    ):
        cluster.start_worker("w1", "-c", "2", "-E")
        counts = cluster.app.tasks["progress_tasks.counts"]
        ids = {one.id for one in cluster.app.send_many(counts.s(5) for _ in range(6))}
        for task_id in ids:
            tail.wait_for("its end", type="task-succeeded", uuid=task_id)
        seen = tail.seen()
    for task_id in ids:
        told = [one["done"] for one in seen if one.get("uuid") == task_id and one["type"] == "task-progress"]
        assert told == [1, 2, 3, 4, 5]
