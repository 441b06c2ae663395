"""A worker with the ways of another one: how runs end, what it tells, who schedules; with real processes."""

from collections import Counter
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.waiting import wait_until

TASKS_FILE = Path(__file__).with_name("foreign_tasks.py")
LEASE_S = 2.0
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(300)]


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "journal"
    path.touch()
    monkeypatch.setenv("FOREIGN_JOURNAL", str(path))
    return path


def lines(journal: Path, first: str) -> list[str]:
    told = [line.partition(" ") for line in journal.read_text().splitlines()]
    return [rest for what, _, rest in told if what == first]


def test_runs_end_as_the_rules_of_their_tasks_say(
    tmp_path: Path, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of Celery's acknowledgements, and what is told of it."""
    monkeypatch.setenv("FOREIGN_WAYS", "notices")
    # How often each runs, its stored error, and whether its message is a dead letter in the end.
    table = {
        "early.dies": (1, "WorkerLost", False),
        "late.dies": (1, "WorkerLost", False),
        "lost.dies": (2, "WorkerLost", True),  # it has two chances
        "no_acks.dies": (1, "WorkerLost", True),
        "no_acks.fails": (1, "KeyError", True),
        "no_acks.hangs": (2, "TimeLimitExceeded", True),
    }
    with Cluster(tmp_path, TASKS_FILE, task_max_deliveries=2) as cluster:
        cluster.start_worker("w", "-c", "2")
        limits = {"no_acks.hangs": 0.5}
        sent = {
            name: cluster.app.send_task(name, (name,), time_limit=limits.get(name, 60.0)) for name in table
        }
        letters = {name for name, (_, _, dead) in table.items() if dead}
        wait_until(
            lambda: (
                Counter(lines(journal, "ran")) == {name: runs for name, (runs, _, _) in table.items()}
                and cluster.counters("w").get("buried") == len(letters)
            ),
            what="every run",
        )
        ends = {name: type(one.get(timeout=90, propagate=False)).__name__ for name, one in sent.items()}
        assert ends == {name: error for name, (_, error, _) in table.items()}
        assert {one["task"] for one in cluster.umbel_json("dlq", "ls")} == letters
        assert cluster.umbel_json("queues", "ls") == []
        cluster.app.send_task("no.such.task")
        wait_until(lambda: lines(journal, "told")[-1].startswith("unknown"), what="the last word")
        assert cluster.stop_worker("w") == 0
    kinds = Counter(line.partition(" ")[0] for line in lines(journal, "told"))
    lost = sum(runs for name, (runs, _, _) in table.items() if not name.endswith("fails"))
    assert kinds["received"] == sum(runs for runs, _, _ in table.values())
    assert kinds["failed"] == lost - 1  # the first loss of lost.dies is no failure
    assert kinds["unknown"] == 1
    said = journal.read_text().splitlines()
    assert said[0] == "begins"
    assert said.index('told stopping {"signal": "SIGTERM", "how": "warm"} NoneType') < said.index("shut down")


def test_every_slot_of_a_foreign_scheduler_is_sent_once_although_its_leader_dies(
    tmp_path: Path, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREIGN_WAYS", "scheduler")
    with Cluster(tmp_path, TASKS_FILE, scheduler_lease_s=LEASE_S) as cluster:
        flags = ("-c", "1", "-P", "solo")
        for name in ("s1", "s2"):
            cluster.start_worker(name, *flags, "-Q", "nothing")
        wait_until(lambda: len(lines(journal, "leads")) == 1, what="somebody to lead")
        monkeypatch.setenv("FOREIGN_WAYS", "")
        cluster.start_worker("runner", *flags)
        await_slots(journal, 4)
        leader = int(lines(journal, "leads")[0])
        first, second = sorted(("s1", "s2"), key=lambda name: cluster.workers[name].pid != leader)
        cluster.kill_worker(first)
        wait_until(lambda: len(lines(journal, "leads")) == 2, what="the other to lead")
        await_slots(journal, 4)
        assert cluster.stop_worker(second) == 0
        assert lines(journal, "closed") == ["False"]
        wait_until(lambda: cluster.umbel_json("queues", "ls") == [], what="the last slot to run")
    slots = Counter(map(int, lines(journal, "slot")))
    assert sorted(slots) == list(range(min(slots), max(slots) + 1)), "one was left out"
    assert set(slots.values()) == {1}


def await_slots(journal: Path, more: int) -> None:
    enough = len(lines(journal, "slot")) + more
    wait_until(lambda: len(lines(journal, "slot")) >= enough, what="slots to be sent")
