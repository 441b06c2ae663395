"""Nothing is lost while children and workers are killed at random, and brokers restart or take nothing."""

import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.scenarios.chaos_tasks import journal_of
from tests.scenarios.places import Place, place
from tests.waiting import wait_until
from umbel import Signature, chain
from umbel.protocol.delivery.states import READY_STATES, SUCCESS
from umbel.wire.message import Message, Outgoing

SOAK = bool(os.environ.get("UMBEL_SOAK"))
TASKS = 50_000 if SOAK else 1_000
CHAINS = TASKS // 20  # of two of them
BAD = TASKS // 50  # messages that no worker can read, between them
WORKER_KILLS = 10 if SOAK else 2
RESTARTS = 2 if SOAK else 1
CHILD_KILLS_BETWEEN = 5
TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")


@pytest.mark.scenario
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("broker", ["sqlite", "redis", "amqp"])
def test_no_task_is_lost_while_children_workers_and_brokers_die(broker: str, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with (
        place(broker, tmp_path, restarts=True) as where,
        Cluster(tmp_path, TASKS_FILE, broker=where.broker, backend=where.backend, lease_s=2.0) as cluster,
    ):
        for name in ("w1", "w2"):
            cluster.start_worker(name, "-c", "2")
        work = cluster.app.tasks["chaos_tasks.work"]
        calls: list[Signature[Any]] = [
            work.si(str(tmp_path), chance.choice((0.001, 0.004))) for _ in range(TASKS)
        ]
        alone, paired = calls[2 * CHAINS :], calls[: 2 * CHAINS]
        chains = [chain(first, second) for first, second in zip(paired[::2], paired[1::2], strict=True)]
        mixed = [*alone, *chains]
        chance.shuffle(mixed)
        sent = cluster.app.send_many(mixed)
        ids = [result.id for result in [*sent, *(last.parent for last in sent)] if result is not None]
        bad = [f"bad-{number}" for number in range(BAD)]
        cluster.app.producer.publish(
            [Outgoing("celery", Message(b"{}", b"no task", correlation_id=name)) for name in bad]
        )
        _let_chaos_rule(cluster, where, chance)
        wait_until(lambda: _finished(cluster, ids) == TASKS, deadline_s=600, what="every task to end")
        states = Counter(kept.status for kept in cluster.app.backend.read(ids).values())
        wait_until(lambda: not any(_waiting(cluster)), what="the queue to be empty")
        repeated = _repeated_runs(tmp_path)
        dead = [letter["task_id"] for letter in cluster.umbel_json("dlq", "ls", "--limit", str(10 * BAD))]
        for name in ("w1", "w2"):
            assert cluster.stop_worker(name) == 0
    # What was sent is what ended: nothing waits, each good one has its result, each bad one its letter.
    assert states == {SUCCESS: TASKS}
    assert set(dead) == set(bad)
    assert broker == "amqp" or len(dead) == BAD  # there a letter and its ack are two steps
    assert repeated.keys() <= set(ids)
    # A run that is not a task's first knew that it was a repetition: the message was in flight
    # when something died. None was repeated for any other reason.
    unmarked = {task_id: flags for task_id, flags in repeated.items() if 0 in flags[1:]}
    assert not unmarked
    repeats = sum(map(len, repeated.values())) - len(repeated)
    print(f"{broker}: {TASKS} tasks, {WORKER_KILLS} workers killed, lost 0, repeated {repeats}")


def _let_chaos_rule(cluster: Cluster, where: Place, chance: random.Random) -> None:
    restarts = {WORKER_KILLS * (number + 1) // (RESTARTS + 1) for number in range(RESTARTS)}
    for kill in range(WORKER_KILLS):
        _kill_some_children(cluster, chance)
        reached = TASKS * (kill + 1) // (WORKER_KILLS + 2)
        wait_until(lambda: _runs(cluster.home) >= reached, deadline_s=300, what=f"{reached} runs")  # noqa: B023
        if where.restart is not None and kill in restarts:
            where.restart()
        victim = chance.choice(("w1", "w2"))
        with where.alarm():
            _kill_some_children(cluster, chance)
            cluster.kill_worker(victim)
        cluster.start_worker(victim, "-c", "2")


def _kill_some_children(cluster: Cluster, chance: random.Random) -> None:
    for _ in range(CHILD_KILLS_BETWEEN):
        children = [pid for name in ("w1", "w2") for pid in cluster.children_of(name)]
        if children:
            try:
                os.kill(chance.choice(children), signal.SIGKILL)
            except ProcessLookupError:  # killed a moment ago, the state file is a second old
                continue


def _runs(directory: Path) -> int:
    journal = journal_of(str(directory))
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def _finished(cluster: Cluster, ids: list[str]) -> int:
    return sum(kept.status in READY_STATES for kept in cluster.app.backend.read(ids).values())


def _waiting(cluster: Cluster) -> list[int]:
    return [
        row[name] for row in cluster.umbel_json("queues", "ls") for name in ("ready", "delayed", "claimed")
    ]


def _repeated_runs(directory: Path) -> dict[str, list[int]]:
    """For each task that ran more than once, whether each run knew it was a repetition."""
    runs: dict[str, list[int]] = {}
    for line in journal_of(str(directory)).read_text().splitlines():
        task_id, redelivered, _pid = line.split()
        runs.setdefault(task_id, []).append(int(redelivered))
    return {task_id: flags for task_id, flags in runs.items() if len(flags) > 1}
