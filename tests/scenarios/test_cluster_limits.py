"""Limits that hold for the whole cluster: never above them, no key stuck after a kill, nobody else held up.

The ledger that the tasks write is the judge. With UMBEL_SOAK=1 eight workers and a large backlog:
SOAK_MESSAGES says how large. `test_rate_soak.py` does the same for a rate.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.scenarios.cluster_limit_tasks import AT_ONCE, PER_MINUTE, STUCK
from tests.scenarios.limit_ledger import (
    Call,
    Ledger,
    Workers,
    late_s,
    longest_rest_s,
    most_at_once,
    most_within,
    send_all,
)
from tests.scenarios.places import place
from tests.waiting import wait_until
from umbel.errors import NotSupported

SOAK = bool(os.environ.get("UMBEL_SOAK"))
# A message that waits and is called takes SQLite three commits of its own.
FULL = {"sqlite": 100_000, "redis": 1_000_000}
MESSAGES = {name: int(os.environ.get("SOAK_MESSAGES", full)) if SOAK else 240 for name, full in FULL.items()}
KEYS, WORKERS, KILLS = (1000, 8, 6) if SOAK else (24, 3, 1)
PACED_KEYS, PACED_EACH, PLAIN = 4, 30, 40
WAIT_S = 3600.0 if SOAK else 90.0
LEASE_S = 2.0
TASKS_FILE = Path(__file__).with_name("cluster_limit_tasks.py")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(7200 if SOAK else 240)]


def test_the_judge_sees_what_is_too_much() -> None:
    assert most_at_once([(0, 2), (1, 3), (2, 4)]) == 2
    assert most_at_once([(0, 2), (1, 3), (1.5, 4)]) == 3
    assert most_within([(0, 0), (59, 0), (60, 0)], 60) == 2
    assert longest_rest_s([0, 2, 7, 8]) == 5
    assert late_s([10, 12, 17], 3.0) == 1.0


def calls(messages: int) -> Iterator[Call]:
    for number in range(messages // KEYS):
        for key in range(KEYS):
            yield "few", (f"k{key}", number)
    for number in range(PACED_EACH):
        for key in range(PACED_KEYS):
            yield "paced", (f"k{key}", number)
    for number in range(2 * AT_ONCE + 1):
        yield "few", (STUCK, number)
    for number in range(PLAIN):
        yield "plain", (number,)


@pytest.mark.parametrize("broker", ["sqlite", "redis"])
def test_limits_hold_for_the_cluster_and_outlive_its_workers(broker: str, tmp_path: Path) -> None:
    with (
        place(broker, tmp_path, durable=False) as where,
        Cluster(tmp_path, TASKS_FILE, broker=where.broker, backend=where.backend, lease_s=LEASE_S) as cluster,
    ):
        ledger = Ledger(tmp_path / "ledger.txt")
        send_all(cluster, calls(MESSAGES[broker]))
        # One child more than tasks that do not end: or what a worker has claimed beside them would wait.
        workers = Workers(cluster, ledger, WORKERS, children=AT_ONCE + 1)
        workers.start()
        wanted = MESSAGES[broker] // KEYS * KEYS
        for kill in range(1, KILLS + 1):
            ledger.wait_for("few", wanted * kill // (KILLS + 2), deadline_s=WAIT_S)
            workers.kill(kill)
        # While two of one key do not end, all others do.
        wait_until(
            lambda: (
                ledger.read().ended_of("few") == wanted
                and ledger.ended_of("plain") == PLAIN
                and ledger.running_of("few", STUCK) == AT_ONCE
            ),
            deadline_s=WAIT_S,
            what="the end of all other keys and tasks",
        )
        (queue,) = cluster.umbel_json("queues", "ls")
        assert queue["limited"] >= 2 * AT_ONCE + 1 - AT_ONCE - 1
        (tmp_path / "gate").touch()
        wait_until(
            lambda: ledger.read().ended_of("few", stuck=True) == 2 * AT_ONCE + 1,
            deadline_s=WAIT_S,
            what="the end of those that waited",
        )
        few, paced = ledger.times("few"), ledger.times("paced")
        assert max(map(most_at_once, few.values())) == AT_ONCE
        assert all(1 <= most_within(times, 60.0) <= PER_MINUTE for times in paced.values())
        assert len(paced) == PACED_KEYS


@pytest.mark.parametrize("name", ["few", "paced"])
def test_rabbitmq_refuses_limits_in_one_line_that_names_the_remedy(name: str, tmp_path: Path) -> None:
    broker = "amqp://guest:guest@127.0.0.1:1//"  # nobody is there: it is refused before that matters
    with Cluster(tmp_path, TASKS_FILE, broker=broker, backend="rpc://") as cluster:
        with pytest.raises(
            NotSupported, match=rf"limit_tasks\.{name}'.*RabbitMQ has no.*use Redis"
        ) as refused:
            cluster.app.tasks[f"cluster_limit_tasks.{name}"].delay("k", 1)
        assert "\n" not in str(refused.value)
        process = cluster.start_worker("w", wait=False)
        assert process.wait(60) != 0
        assert "RabbitMQ has no value that can be compared" in cluster.log("w")
