"""Groups and chords on real workers; a chord's body is sent once although parts are repeated."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.scenarios.chaos_tasks import journal_of
from tests.waiting import wait_until
from umbel import chord, group
from umbel.errors import ChordError

TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(180)]


def test_groups_and_chords_run_on_workers(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        cluster.start_worker("w1", "-c", "2")
        tasks = cluster.app.tasks
        add, total, splits = (tasks[f"chaos_tasks.{name}"] for name in ("add", "total", "splits"))
        same = cluster.app.signature("celery.accumulate", (), {"index": 0})
        assert group(add.s(n, n) for n in range(50)).delay().get(timeout=90) == [2 * n for n in range(50)]
        assert chord([add.s(n, n) for n in range(50)], total.s()).delay().get(timeout=90) == 2450
        whole = add.s(1, 2) | group(add.s(n) for n in range(5)) | total.s() | add.s(100)
        assert whole.delay().get(timeout=90) == 125
        nested = chord([add.s(1, 2) | group(add.s(1), add.s(2)), add.s(5, 5)], same).delay()
        assert nested.get(timeout=90) == [[4, 5], 10]
        assert (splits.s(1, 2, 3) | total.s()).delay().get(timeout=90) == 6
        for never_run in (group(add.s(1), add.s(2)) | total.s(), group(add.s(1), add.s(2))):
            with pytest.raises(TypeError):
                (add.s(1, "x") | never_run).delay().get(timeout=90)
        with pytest.raises(TypeError):
            (group(add.s(1, 1), add.s(1, "x")) | group(same, same)).delay().get(timeout=90)
        body = total.s().on_error(tasks["chaos_tasks.writes_down"].s(directory=str(tmp_path)))
        failing: Any = chord([add.s(1, 1), add.s(1, "x")], body).delay()
        with pytest.raises(ChordError, match=r"Dependency \S+ raised TypeError"):
            failing.get(timeout=90)
        assert f"{failing.id} ChordError TypeError(" in journal_of(str(tmp_path)).read_text()
        assert [one.state for one in failing.parent] == ["SUCCESS", "FAILURE"]
        assert cluster.app.control.purge("celery") == 0


def test_a_part_that_cannot_run_fails_the_body(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        cluster.start_worker("w1", "-c", "2")
        tasks = cluster.app.tasks
        deadly = tasks["chaos_tasks.deadly"].s(str(tmp_path), 99)
        result = chord([tasks["chaos_tasks.add"].s(1, 1), deadly], tasks["chaos_tasks.total"].s()).delay()
        with pytest.raises(ChordError):
            result.get(timeout=60)


def test_a_body_is_sent_once_although_its_parts_are_repeated(tmp_path: Path) -> None:
    with Cluster(tmp_path, TASKS_FILE, lease_s=1.0) as cluster:
        cluster.start_worker("w1", "-c", "2")
        work, count_up = cluster.app.tasks["chaos_tasks.work"], cluster.app.tasks["chaos_tasks.counts_up"]
        results = [
            chord([work.s(str(tmp_path), 0.05) for _ in range(5)], count_up.si(str(tmp_path), str(n))).delay()
            for n in range(20)
        ]
        for kill in range(3):
            lines = 15 * (kill + 1)
            wait_until(lambda: _lines(tmp_path) >= lines, what=f"{lines} runs")  # noqa: B023
            cluster.kill_worker("w1")
            cluster.start_worker("w1", "-c", "2")
        for result in results:
            result.get(timeout=60)
        assert cluster.stop_worker("w1") == 0
    bodies = Counter((tmp_path / "bodies.txt").read_text().splitlines())
    assert set(bodies) == {f"{n} {r}" for n in range(20) for r in (0, 1) if f"{n} {r}" in bodies}
    # A body that was killed with its worker may run again, but no second message of it was sent.
    assert all(bodies[f"{n} 0"] == 1 for n in range(20))


def _lines(directory: Path) -> int:
    journal = journal_of(str(directory))
    return len(journal.read_text().splitlines()) if journal.exists() else 0
