"""Terminating hits the task that was meant, and no other, while children come and go (F8, P3)."""

import os
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.scenarios.chaos_tasks import journal_of
from tests.waiting import wait_until
from umbel.launch.preparation import node_name
from umbel.protocol.delivery.states import READY_STATES

SOAK = bool(os.environ.get("UMBEL_SOAK"))
CANCELS = 10_000 if SOAK else 150
AT_ONCE = 40
TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")


@pytest.mark.scenario
@pytest.mark.timeout(7200 if SOAK else 180)
def test_only_the_task_that_was_meant_is_terminated(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    node = node_name("w1")
    asked, ended, innocent = set[str](), set[str](), set[str]()
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        cluster.start_worker("w1", "-c", "4")
        work = cluster.app.tasks["chaos_tasks.work"]
        while len(ended) < CANCELS:
            # Sometimes mostly quick ones, which go to the children in batches.
            lengths = chance.choice(((0.0, 0.005, 0.02, 0.05), (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.02)))
            seconds = [chance.choice(lengths) for _ in range(AT_ONCE)]
            ids = [
                result.id for result in cluster.app.send_many(work.s(str(tmp_path), one) for one in seconds)
            ]
            targets = set[str]()
            for _ in range(AT_ONCE // 2):
                active = cluster.app.control.ask("active", {"safe": True}, destination=[node], timeout=30.0)
                running = [shown["id"] for shown in active.replies[node] if shown["id"] not in targets]
                target = chance.choice(running if running and chance.random() < 0.8 else ids)
                targets.add(target)
                signal = chance.choice((None, "TERM", "HUP", "KILL"))  # the first two ask the task first
                arguments = {"task_id": target, "terminate": True, "signal": signal}
                told = cluster.app.control.ask("revoke", arguments, destination=[node], timeout=30.0)
                if target in told.replies[node]["ok"]:
                    ended.add(target)
            asked.update(targets)
            innocent.update(set(ids) - targets)
            wait_until(lambda ids=ids: _all_ended(cluster, ids), what="this round to end")  # type: ignore[misc]
        states = {one: kept.status for one, kept in cluster.app.backend.read([*asked, *innocent]).items()}
        assert cluster.stop_worker("w1") == 0
    runs = Counter(line.split()[0] for line in journal_of(str(tmp_path)).read_text().splitlines())
    # Nobody else was interrupted: each ran once, to its end.
    assert {one: (states[one], runs[one]) for one in innocent} == dict.fromkeys(innocent, ("SUCCESS", 1))
    # One that was asked for ended before it was reached, did not start, or was cut off; never twice.
    assert {states[one] for one in asked} <= {"SUCCESS", "REVOKED"}
    assert max((runs[one] for one in asked), default=0) <= 1
    print(f"{len(asked)} asked for, {len(ended)} cut off, {len(innocent)} others unharmed")


def _all_ended(cluster: Cluster, ids: list[str]) -> bool:
    stored = cluster.app.backend.read(ids)
    return len(stored) == len(ids) and all(one.status in READY_STATES for one in stored.values())
