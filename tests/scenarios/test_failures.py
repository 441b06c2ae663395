"""C3: what failed is retried, each task once, linked to its retry, whoever is killed meanwhile."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cluster import Cluster
from tests.scenarios.failing_tasks import SECRET, journal_of
from tests.scenarios.places import place
from tests.waiting import wait_until
from umbel.errors import NotKept
from umbel.protocol.delivery.states import FAILURE, SUCCESS

SOAK = bool(os.environ.get("UMBEL_SOAK"))
TASKS = 10_000 if SOAK else 60
CLIENT_KILLS = 8 if SOAK else 3
LETTER_S = {"sqlite": 0.0001, "redis": 0.0004, "amqp": 0.0005}  # about what it takes to retry one
TASKS_FILE = Path(__file__).with_name("failing_tasks.py")
CLIENT = Path(__file__).with_name("retrying_client.py")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(1800)]


class Ran(NamedTuple):
    task_id: str
    retry_of: str
    root_id: str
    redelivered: str
    secret: str


@pytest.mark.parametrize("broker", ["sqlite", "redis", "amqp"] if SOAK else ["redis"])
def test_all_that_failed_is_retried_once_while_clients_and_workers_are_killed(
    broker: str, tmp_path: Path
) -> None:
    with (
        place(broker, tmp_path, durable=False) as where,
        Cluster(tmp_path, TASKS_FILE, broker=where.broker, backend=where.backend, lease_s=2.0) as cluster,
    ):
        cluster.start_worker("w1", "-c", "2")
        _few_words(cluster)
        pays = cluster.app.tasks["failing_tasks.pays"]
        calls = (pays.s(str(tmp_path), number, SECRET) for number in range(TASKS))
        old = [result.id for result in cluster.app.send_many(calls)]
        if SOAK:
            wait_until(
                lambda: len(_runs(tmp_path)) >= TASKS // 2, deadline_s=300, what="half of them to fail"
            )
            _replace_worker(cluster)
        _wait_for(cluster, old, FAILURE)
        listed = cluster.umbel("task", "failed", "--json", "--limit", "100000", "--name", "*pays").stdout
        assert SECRET not in listed
        kept = Counter(row["task_id"] for row in json.loads(listed))
        assert kept.keys() == set(old)
        assert broker == "amqp" or set(kept.values()) == {1}  # there keeping and settling are two steps
        (tmp_path / "mended").touch()
        _retry_and_kill(cluster, where.broker, LETTER_S[broker])
        done = cluster.umbel("task", "retry", "--name", "*pays", "--yes", check=False)
        assert done.returncode in (0, 3), done.stderr  # 3: nothing is left
        wait_until(lambda: len(_retries(tmp_path)) == TASKS, deadline_s=300, what="each to be retried")
        new = _retries(tmp_path)
        _wait_for(cluster, [one for many in new.values() for one in many], SUCCESS)
        assert cluster.umbel_json("task", "failed", "--name", "*pays") == []
        assert _states(cluster, old) == {FAILURE: TASKS}  # what is final stays
        assert cluster.stop_worker("w1") == 0
    _check(broker, old, new, _runs(tmp_path))


def _few_words(cluster: Cluster) -> None:
    """What is kept and what is not, and a retry from a result."""
    tasks = cluster.app.tasks
    early = tasks["failing_tasks.early"].delay(1)
    others = [tasks["failing_tasks.forgotten"].delay(), tasks["failing_tasks.large"].delay("x" * 70_000)]
    for one in (early, *others):
        assert isinstance(one.get(timeout=60, propagate=False), ValueError)
    again = early.retry()
    assert again.id != early.id and early.state == FAILURE
    assert isinstance(again.get(timeout=60, propagate=False), ValueError)
    (row,) = cluster.umbel_json("task", "failed")
    assert (row["task_id"], row["retry_of"], row["root_id"]) == (again.id, early.id, early.id)
    for one in (early, *others):
        with pytest.raises(NotKept, match=one.id):
            one.retry()
    third = cluster.umbel_json("task", "retry", again.id, "--yes")["retried"][again.id]
    wait_until(lambda: cluster.app.AsyncResult(third).ready(), what="the retry of the retry")


def _retry_and_kill(cluster: Cluster, url: str, letter_s: float) -> None:
    for kill in range(CLIENT_KILLS):
        client = [sys.executable, str(CLIENT), url, "*pays", str(letter_s)]
        ended = subprocess.run(client, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
        print(f"client {kill}: found {ended.stdout.strip()}, ended {ended.returncode}")
        if kill == CLIENT_KILLS // 2:
            _replace_worker(cluster)


def _replace_worker(cluster: Cluster) -> None:
    cluster.kill_worker("w1")
    cluster.start_worker("w1", "-c", "2")


def _check(broker: str, old: list[str], new: dict[str, set[str]], runs: list[Ran]) -> None:
    assert new.keys() == set(old)
    assert all(len(ids) == 1 for ids in new.values()), "a task has two retries"
    retries = [one for one in runs if one.retry_of != "-"]
    assert {one.root_id for one in retries} == set(old)
    assert all(one.root_id == one.retry_of for one in retries)
    assert {one.secret for one in runs} == {"right"}
    first: set[str] = set()
    repeated: list[Ran] = []
    for one in retries:
        if one.task_id in first and one.redelivered == "0":
            repeated.append(one)
        first.add(one.task_id)
    # RabbitMQ cannot send and acknowledge in one step: a repeat has the same id there, and runs again.
    assert broker == "amqp" or not repeated
    print(f"{broker}: {len(old)} failed, each retried once; sent again under the same id: {len(repeated)}")


def _runs(directory: Path) -> list[Ran]:
    journal = journal_of(str(directory))
    return [Ran(*line.split(" ")) for line in journal.read_text().splitlines()] if journal.exists() else []


def _retries(directory: Path) -> dict[str, set[str]]:
    """By the failed task, the ids of its retries that ran."""
    found: dict[str, set[str]] = {}
    for one in _runs(directory):
        if one.retry_of != "-":
            found.setdefault(one.retry_of, set()).add(one.task_id)
    return found


def _states(cluster: Cluster, ids: list[str]) -> dict[str, int]:
    return Counter(kept.status for kept in cluster.app.backend.read(ids).values())


def _wait_for(cluster: Cluster, ids: list[str], state: str) -> None:
    wait_until(lambda: _states(cluster, ids) == {state: len(ids)}, deadline_s=300, what=f"all to be {state}")
