"""A cluster of Celery's workers only is recorded (D1), on Redis and on RabbitMQ, without an app of ours."""

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.history.recording import BRIEF_LEASE_S, facts_of, modes_below, recording, rows_of
from tests.interop.mixed_cluster import Client, Process, program_of
from tests.servers.rabbitmq import shared_server
from tests.servers.redis import RedisServer
from tests.waiting import wait_until

SOAK = bool(os.environ.get("UMBEL_SOAK"))
TASKS = 300 if SOAK else 20
pytestmark = pytest.mark.timeout(400)


class CeleryOnly:
    """Workers that were not started with -E: they tell of tasks because the recorder asks them to."""

    def __init__(self, home: Path, broker: str, backend: str, ends: ExitStack) -> None:
        self.broker = broker
        self._home = home
        self._ends = ends
        self._variables = {"CELERY_BROKER_URL": broker, "CELERY_RESULT_BACKEND": backend}
        python = program_of("celery", "python")
        self.client = ends.enter_context(Client("celery", python, home, **self._variables))

    def start_worker(self, name: str) -> Process:
        flags = ["-n", f"{name}@%h", "-P", "threads", "-c", "2", "-l", "INFO"]
        command = [str(program_of("celery", "celery")), "-A", "shared_tasks", "worker", *flags]
        return self._ends.enter_context(Process(f"{name}-worker", command, self._home, **self._variables))


def wait_until_it_tells(worker: Process) -> None:
    def tells() -> bool:
        worker.check()
        return "Events of group {task} enabled" in worker.log

    wait_until(tells, what=f"{worker.name} to be asked for events")


@pytest.fixture(params=["redis", "rabbitmq"])
def celery_only(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CeleryOnly]:
    with ExitStack() as ends:
        redis = RedisServer(tmp_path)
        redis.start()
        ends.callback(redis.stop)
        broker = redis.url
        if request.param == "rabbitmq":
            broker = shared_server().url(shared_server().new_vhost())
        yield CeleryOnly(tmp_path, broker, redis.url, ends)


def states(lake: Path, ids: Sequence[str]) -> dict[str, set[str]]:
    """Of each task the types of its events, each event counted once."""
    found: dict[str, set[str]] = defaultdict(set)
    for row in rows_of(lake, "type", "uuid"):
        if row["uuid"] in ids:
            found[row["uuid"]].add(row["type"].removeprefix("task-"))
    return found


def wait_for_ends(lake: Path, ids: Sequence[str], ends: set[str]) -> None:
    def all_ended() -> bool:
        found = states(lake, ids)
        return len(found) == len(ids) and all(types & ends for types in found.values())

    wait_until(all_ended, what="the end of every task in the lake")


def test_states_and_counts_agree_with_what_was_sent(celery_only: CeleryOnly, tmp_path: Path) -> None:
    """One worker is there before the recorder, another joins later."""
    lake = tmp_path / "lake"
    first = celery_only.start_worker("c1")
    with recording(celery_only.broker, lake) as recorder:
        wait_until_it_tells(first)
        wait_until_it_tells(celery_only.start_worker("c2"))
        ask = celery_only.client
        good = ask("[add.delay(n, 1).id for n in range(tasks)]", tasks=TASKS)
        bad = ask("[fails.delay().id for n in range(5)]")
        again = ask("[flaky.delay(1).id for n in range(3)]")
        wait_for_ends(lake, [*good, *bad, *again], {"succeeded", "failed"})
        assert recorder.stop() == 0, recorder.log
    said = states(lake, [*good, *bad, *again])
    run = {"received", "started"}
    assert {one: said[one] for one in good} == dict.fromkeys(good, run | {"succeeded"})
    assert {one: said[one] for one in bad} == dict.fromkeys(bad, run | {"failed"})
    assert {one: said[one] for one in again} == dict.fromkeys(again, run | {"retried", "succeeded"})
    rows: dict[int, dict[str, Any]] = {row["digest"]: row for row in rows_of(lake)}
    counts = Counter(row["type"] for row in rows.values())
    assert counts["task-received"] == TASKS + 5 + 2 * 3
    assert (counts["task-succeeded"], counts["task-failed"], counts["task-retried"]) == (TASKS + 3, 5, 3)
    told = [row["hostname"] for row in rows.values() if row["type"].startswith("worker-")]
    workers = {hostname.partition("@")[0] for hostname in told}
    assert workers == {"c1", "c2"}
    assert {row["name"] for row in rows.values() if row["uuid"] in bad and row["name"]} == {
        "shared_tasks.fails"
    }
    assert not {"recorder-gap", "recorder-unreadable"} & {fact["type"] for fact in facts_of(lake)}
    if SOAK:  # a build takes half a minute of both cores
        check_history(lake, dict.fromkeys([*good, *again], "SUCCESS") | dict.fromkeys(bad, "FAILURE"))


def check_history(lake: Path, states: dict[str, str]) -> None:
    """Built by Spark, read without it: states and the report's figures are what was sent (D2, D4)."""
    tables = "tasks,attempts,metrics,workers"
    umbel("history", "build", "--lake", str(lake), "--tables", tables, "--json")
    # Also what Spark and its Java wrote, half-way files and logs among it, is the owner's alone.
    assert (lake / "tables").exists() and modes_below(lake) == {"d0700", "f0600"}
    built = umbel("history", "tasks", "--lake", str(lake), "--limit", "1000", "--json")
    assert {row["task_id"]: row["state"] for row in built} == states
    page = lake.parent / "report.html"
    told = umbel("history", "report", "--lake", str(lake), "--html", str(page), "--json")
    assert told["figures"]["tasks"] == str(len(states))
    assert told["figures"]["FAILURE"] == str(sum(state == "FAILURE" for state in states.values()))
    assert told["figures"]["tried again"] == "3"
    assert "shared_tasks.fails" in page.read_text()


def umbel(*arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "umbel.cli.main", *arguments],
        env=os.environ | {"JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1"},  # Spark's Java runs only briefly
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def times_away(lake: Path) -> int:
    return sum("unheard_since" in (fact["extra"] or "") for fact in facts_of(lake))


def test_what_is_told_while_no_recorder_runs(celery_only: CeleryOnly, tmp_path: Path) -> None:
    """On RabbitMQ it is recorded later; on Redis it is lost, and the lake says since when."""
    lake = tmp_path / "lake"
    worker = celery_only.start_worker("c1")
    with recording(celery_only.broker, lake, lease_s=BRIEF_LEASE_S) as recorder:
        wait_until_it_tells(worker)
        wait_until(lambda: lake.exists() and rows_of(lake, "type"), what="the first file")
        recorder.kill()
    away = times_away(lake)  # on a busy machine it may have lost its brief lease for a moment
    ask = celery_only.client
    unheard = ask("[get(task) and task.id for task in [add.delay(n, 1) for n in range(5)]]")
    with recording(celery_only.broker, lake) as recorder:
        if celery_only.broker.startswith("amqp"):
            wait_for_ends(lake, unheard, {"succeeded"})
        else:
            wait_until(
                lambda: times_away(lake) > away,
                what="the recorder to say that it was away",
            )
            assert states(lake, unheard) == {}
        assert recorder.stop() == 0, recorder.log
