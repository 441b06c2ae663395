"""Periodic tasks with real workers: the leader is killed again and again, on every broker (E6).

Those who send and the one who runs are different workers: what is counted is what was sent, and
not what ran again because its worker was killed.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import time

import pytest

from tests.cluster import Cluster
from tests.scenarios.places import Place, place
from tests.waiting import wait_until
from umbel.app.cluster.periodic import slot_id

SOAK = bool(os.environ.get("UMBEL_SOAK"))
KILLS = 20 if SOAK else 2
BETWEEN = 14 if SOAK else 2  # slots from one kill to the next; no leader is killed before it sent two
LEASE_S = 3.0
SENDERS = ("s1", "s2", "s3") if SOAK else ("s1", "s2")
TASKS_FILE = Path(__file__).with_name("periodic_tasks.py")
FLAGS = ("-c", "1", "-P", "solo", "-l", "INFO")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(900)]


@pytest.fixture(params=["sqlite", "redis", "amqp"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with place(request.param, tmp_path) as made:
        yield made


def test_every_slot_is_sent_once_although_leaders_die(
    where: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = _journal(tmp_path, monkeypatch)
    settings = {"broker": where.broker, "backend": where.backend, "scheduler_lease_s": LEASE_S}
    settings["coordination_store"] = where.coordination_store
    began_s = int(time())
    with Cluster(tmp_path, TASKS_FILE, **settings) as cluster:
        for name in SENDERS:  # they send and run nothing
            cluster.start_worker(name, *FLAGS, "-Q", "nothing")
        first_leader = _leader(cluster)
        cluster.start_worker("runner", *FLAGS)
        killed_at: list[float] = []
        while len(killed_at) < KILLS:
            _await_slots(journal, BETWEEN * (len(killed_at) + 1))
            leader = _leader(cluster)
            if leader == "runner":  # it must not be killed, so it hands over
                cluster.stop_worker(leader)
                cluster.start_worker(leader, *FLAGS)
                continue
            cluster.kill_worker(leader)
            killed_at.append(time())
            cluster.start_worker(leader, *FLAGS, "-Q", "nothing")
        _await_slots(journal, BETWEEN * (KILLS + 1))
        shown = json.loads(cluster.umbel("schedule", "ls", "--json").stdout)
        cluster.umbel("schedule", "pause", "beat")
        paused = json.loads(cluster.umbel("schedule", "ls", "--json").stdout)
    assert first_leader and shown["leader"]
    assert [(one["name"], one["rule"], one["paused"]) for one in shown["tasks"]] == [
        ("beat", "every 1 s", "")
    ]
    assert paused["tasks"][0]["paused"] == "yes"
    _judge(_ran(journal), began_s, killed_at, in_one_step=not where.broker.startswith("amqp"))


def test_a_paused_task_is_not_sent_and_one_that_is_run_by_hand_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = _journal(tmp_path, monkeypatch)
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        assert json.loads(cluster.umbel("schedule", "ls", "--json").stdout)["leader"] is None
        cluster.umbel("schedule", "pause", "beat")  # although no worker is up
        cluster.start_worker("w", *FLAGS)
        _leader(cluster)
        by_hand = cluster.umbel("schedule", "run", "beat").stdout.split()
        wait_until(
            lambda: [task_id for task_id, _, _ in _ran(journal)] == by_hand, what="the one run by hand"
        )
        cluster.umbel("schedule", "resume", "beat")
        wait_until(lambda: len(_ran(journal)) > 1, what="a slot after the pause")
        unknown = cluster.umbel("schedule", "pause", "beet", check=False)
    assert unknown.returncode == 3 and "did you mean 'beat'" in unknown.stderr


def _journal(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = home / "journal"
    path.touch()
    monkeypatch.setenv("PERIODIC_JOURNAL", str(path))
    return path


def _ran(journal: Path) -> list[tuple[str, float, bool]]:
    """Of each run the id, the time, and whether it knew that it may be a repetition."""
    lines = (line.split() for line in journal.read_text().splitlines())
    return [(task_id, float(at), redelivered == "1") for task_id, at, redelivered in lines]


def _await_slots(journal: Path, in_all: int) -> None:
    enough = max(in_all, len(_ran(journal)) + 2)
    wait_until(lambda: len(_ran(journal)) >= enough, what="slots to be sent")


def _leader(cluster: Cluster) -> str:
    def found() -> str:
        shown = json.loads(cluster.umbel("schedule", "ls", "--json").stdout)
        return (shown["leader"] or "").partition("@")[0]

    wait_until(lambda: found() != "", what="somebody to lead")
    return found()


def _judge(
    ran: list[tuple[str, float, bool]], began_s: int, killed_at: list[float], *, in_one_step: bool
) -> None:
    """None is left out, and none runs twice; on RabbitMQ one that a dying leader sent may, and knows it."""
    numbers = {slot_id("beat", one * 1_000_000): one for one in range(began_s, int(time()) + 2)}
    assert {task_id for task_id, _, _ in ran} <= set(numbers), "each id is that of a slot"
    sent = Counter(numbers[task_id] for task_id, _, _ in ran)
    first_runs = Counter(numbers[task_id] for task_id, _, is_again in ran if not is_again)
    twice = [slot for slot, count in sent.items() if count > 1]
    left_out = sorted(set(range(min(sent), max(sent) + 1)) - set(sent))
    pauses = [min(at for _, at, _ in ran if at > killed) - killed for killed in killed_at]
    print(
        f"\nperiodic: {len(sent)} slots in {max(sent) - min(sent) + 1} s, {len(twice)} twice, "
        f"{len(left_out)} left out, {len(killed_at)} leaders killed, "
        f"longest pause {max(pauses):.1f} s with a lease of {LEASE_S:g} s"
    )
    assert not left_out
    assert max(first_runs.values()) == 1, "a repetition knows that it is one"
    assert len(twice) <= (0 if in_one_step else len(killed_at))
