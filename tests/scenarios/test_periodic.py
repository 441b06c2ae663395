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
from tests.servers.rabbitmq import shared_server
from tests.waiting import wait_until
from umbel.app.periodic import slot_id

SOAK = bool(os.environ.get("UMBEL_SOAK"))
KILLS = 20 if SOAK else 2
BETWEEN_S = 12 if SOAK else 2  # seconds of slots that a leader sends before it is killed
LEASE_S = 3.0
SENDERS = ("s1", "s2", "s3") if SOAK else ("s1", "s2")
TASKS_FILE = Path(__file__).with_name("periodic_tasks.py")
FLAGS = ("-c", "1", "-P", "solo", "-l", "INFO")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(900)]


@pytest.fixture(params=["sqlite", "redis", "amqp"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "amqp":  # the node that other tests use, which takes long to start
        server = shared_server()
        yield Place(server.url(server.new_vhost()), f"sqlite:///{tmp_path / 'results.db'}")
        return
    with place(request.param, tmp_path) as made:
        yield made


def test_every_slot_is_sent_once_although_leaders_die(
    where: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "journal"
    journal.touch()
    monkeypatch.setenv("PERIODIC_JOURNAL", str(journal))

    def ran() -> list[str]:
        return journal.read_text().split()

    settings = {"broker": where.broker, "backend": where.backend, "scheduler_lease_s": LEASE_S}
    began_s = int(time())
    with Cluster(tmp_path, TASKS_FILE, **settings) as cluster:
        for name in SENDERS:  # they send and run nothing
            cluster.start_worker(name, *FLAGS, "-Q", "nothing")
        first_leader = _leader(cluster)
        cluster.start_worker("runner", *FLAGS)
        for _ in range(KILLS):
            enough = len(ran()) + BETWEEN_S
            wait_until(lambda: len(ran()) >= enough, deadline_s=60, what="slots to be sent")  # noqa: B023
            leader = _leader(cluster)
            if leader == "runner":  # it must not be killed, so it hands over
                cluster.stop_worker(leader)
                cluster.start_worker(leader, *FLAGS)
                continue
            cluster.kill_worker(leader)
            cluster.start_worker(leader, *FLAGS, "-Q", "nothing")
        enough = len(ran()) + BETWEEN_S
        wait_until(lambda: len(ran()) >= enough, deadline_s=60, what="slots after the last kill")
        shown = json.loads(cluster.umbel("schedule", "ls", "--json").stdout)
        cluster.umbel("schedule", "pause", "beat")
        paused = json.loads(cluster.umbel("schedule", "ls", "--json").stdout)
    assert first_leader and shown["leader"]
    assert [(one["name"], one["rule"], one["paused"]) for one in shown["tasks"]] == [
        ("beat", "every 1 s", "")
    ]
    assert paused["tasks"][0]["paused"] == "yes"
    _judge(ran(), began_s, lossy=where.broker.startswith("amqp"))


def test_a_paused_task_is_not_sent_and_one_that_is_run_by_hand_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "journal"
    journal.touch()
    monkeypatch.setenv("PERIODIC_JOURNAL", str(journal))
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        assert json.loads(cluster.umbel("schedule", "ls", "--json").stdout)["leader"] is None
        cluster.umbel("schedule", "pause", "beat")  # although no worker is up
        cluster.start_worker("w", *FLAGS)
        _leader(cluster)
        by_hand = cluster.umbel("schedule", "run", "beat").stdout.split()
        wait_until(lambda: journal.read_text().split() == by_hand, deadline_s=20, what="the one run by hand")
        cluster.umbel("schedule", "resume", "beat")
        wait_until(lambda: len(journal.read_text().split()) > 1, deadline_s=20, what="a slot after the pause")
        unknown = cluster.umbel("schedule", "pause", "beet", check=False)
    assert unknown.returncode == 2 and "did you mean 'beat'" in unknown.stderr


def _leader(cluster: Cluster) -> str:
    def found() -> str:
        shown = json.loads(cluster.umbel("schedule", "ls", "--json").stdout)
        return (shown["leader"] or "").partition("@")[0]

    wait_until(lambda: found() != "", deadline_s=30, what="somebody to lead")
    return found()


def _judge(ran: list[str], began_s: int, *, lossy: bool) -> None:
    """No slot twice; none left out, but on RabbitMQ one for each leader that died while it sent."""
    numbers = {slot_id("beat", one * 1_000_000): one for one in range(began_s, int(time()) + 2)}
    assert set(ran) <= set(numbers), "each id is that of a slot"
    sent = Counter(numbers[one] for one in ran)
    twice = [slot for slot, count in sent.items() if count > 1]
    left_out = sorted(set(range(min(sent), max(sent) + 1)) - set(sent))
    print(f"\nperiodic: {len(sent)} slots sent, {len(twice)} twice, {len(left_out)} left out, {KILLS} kills")
    assert not twice
    assert len(left_out) <= (KILLS if lossy else 0), left_out
