"""The recorder killed again and again, on every broker (D1): nothing lost, nothing counted twice."""

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.cluster import Cluster
from tests.history.recording import (
    BRIEF_LEASE_S,
    SAFE_LEASE_S,
    LogWriter,
    Teller,
    digests_of,
    facts_of,
    recording,
    rows_of,
)
from tests.scenarios.places import place
from tests.servers.rabbitmq import shared_server
from tests.servers.redis import RedisServer
from tests.waiting import DEADLINE_S, wait_until
from umbel.history.lake import Lake

TASKS_FILE = Path(__file__).with_name("chaos_tasks.py")
SOAK = bool(os.environ.get("UMBEL_SOAK"))
EVENTS, KILLS = (200_000, 50) if SOAK else (3_000, 2)
WORKER_KILLS, TASKS_PER_KILL = (30 if SOAK else 3), 60
BATCH = 100
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(1800 if SOAK else 120)]


@pytest.fixture(params=["sqlite", "redis", "amqp"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'queue.db'}"
    elif request.param == "amqp":
        yield shared_server().url(shared_server().new_vhost())
    else:
        server = RedisServer(tmp_path)
        server.start()
        yield server.url
        server.stop()


def wait_until_there(lake: Path, files: int, log: LogWriter) -> None:
    wait_until(
        lambda: len(Lake(lake).raw_files()) >= files or log.lag() == 0,
        what="the recorder to come that far",
    )


def test_a_recorder_killed_at_any_moment_loses_and_doubles_nothing(url: str, tmp_path: Path) -> None:
    lake, seed = tmp_path / "lake", random.randrange(10**6)
    chance = random.Random(seed)
    print(f"seed {seed}")
    teller, ledger = Teller(), set[int]()
    with LogWriter(url) as log:
        log.register()
        for life in range(KILLS + 1):
            rest = EVENTS * (life + 1) // (KILLS + 1) - len(ledger)
            seen = len(Lake(lake).raw_files()) + chance.randrange(3)
            lease_s = SAFE_LEASE_S if life == KILLS else BRIEF_LEASE_S
            with recording(url, lake, lease_s=lease_s) as recorder:
                while rest > 0:
                    told = teller.tell(min(BATCH, rest))
                    assert log.log(told) == len(told)
                    ledger |= digests_of(told)
                    rest -= len(told)
                if life == KILLS:
                    log.wait_until_recorded()
                    assert recorder.stop() == 0, recorder.log
                    break
                # It dies with so many files done, at whatever it is at then; sometimes before it began.
                wait_until_there(lake, seen, log)
                recorder.kill()
    found = Counter(row["digest"] for row in rows_of(lake) if not row["type"].startswith("recorder-"))
    assert len(ledger) == EVENTS
    assert found.keys() == ledger
    facts = Counter(fact["type"] for fact in facts_of(lake))
    assert facts["recorder-gap"] == facts["recorder-lost"] == facts["recorder-unreadable"] == 0
    assert facts["recorder-offline"] == 1


def test_a_worker_records_and_another_takes_over_when_it_dies(tmp_path: Path) -> None:
    """Also: every event of workers and clients is in the lake, once a recorder is registered."""
    lake = tmp_path / "lake"
    settings = {"task_send_sent_event": True, "lease_s": 1.0}
    with Cluster(tmp_path, TASKS_FILE, **settings) as cluster, LogWriter(cluster.app.settings.broker) as log:
        log.register()
        for name in ("w1", "w2"):
            cluster.start_worker(name, "-c", "1", "-P", "solo", "--record", str(lake))
        (victim,) = wait_until(lambda: _recorded_by(lake, cluster), what="one of them to record")
        sent = [cluster.app.send_task("chaos_tasks.add", [1, n]) for n in range(20)]
        assert [one.get(timeout=90) for one in sent] == [1 + n for n in range(20)]
        cluster.kill_worker(victim)
        (left,) = cluster.workers
        wait_until(
            lambda: _recorded_by(lake, cluster).keys() == {left},
            what="the other to take over",
        )
        more = [cluster.app.send_task("chaos_tasks.add", [1, n]) for n in range(20)]
        assert [one.get(timeout=90) for one in more] == [1 + n for n in range(20)]
        assert cluster.stop_worker(left) == 0
    ids = {one.id for one in [*sent, *more]}
    rows = {row["digest"]: row for row in rows_of(lake, "digest", "type", "uuid", "hostname")}.values()
    per_step = Counter(row["type"] for row in rows if row["uuid"] in ids)
    assert per_step == dict.fromkeys(("task-sent", "task-received", "task-started", "task-succeeded"), 40)
    assert f"{left}@" in next(row["hostname"] for row in rows if row["type"] == "worker-offline")


def _recorded_by(lake: Path, cluster: Cluster) -> dict[str, int]:
    """The worker beside which the history is recorded, and the process that does it; empty: none."""
    lock = lake / "_recorder/recorder.lock"
    said = lock.read_text().removeprefix("pid ") if lock.exists() else ""
    beside = {
        child.pid: name
        for name, process in cluster.workers.items()
        for child in psutil.Process(process.pid).children()
    }
    return {beside[int(said)]: int(said)} if said and int(said) in beside else {}


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_recorder_that_is_killed_beside_its_worker_is_started_again(tmp_path: Path, loop: str) -> None:
    """D1: and two workers have one recorder, in a process that no task waits for."""
    lake = tmp_path / "lake"
    settings = {"lease_s": 2.0, "worker_loop": loop}
    with Cluster(tmp_path, TASKS_FILE, **settings) as cluster, LogWriter(cluster.app.settings.broker) as log:
        log.register()
        said = tmp_path / "workers.log"
        for name in ("w1", "w2"):
            cluster.start_worker(name, "-c", "1", "-P", "solo", "--record", str(lake), "-f", str(said))
        ((_, first),) = wait_until(lambda: _recorded_by(lake, cluster), what="one of them to record").items()
        sent = [cluster.app.send_task("chaos_tasks.add", [1, n]) for n in range(20)]
        os.kill(first, signal.SIGKILL)
        assert [one.get(timeout=DEADLINE_S) for one in sent] == [1 + n for n in range(20)]
        (last,) = wait_until(
            lambda: {
                name
                for name, pid in _recorded_by(lake, cluster).items()
                if pid != first and [pid] == _recorders(cluster)
            },
            what="another one, and nobody beside it",
        )
        for name in sorted(cluster.workers, key=lambda name: name == last):
            assert cluster.stop_worker(name) == 0
    succeeded = {row["uuid"] for row in rows_of(lake, "type", "uuid") if row["type"] == "task-succeeded"}
    assert succeeded == {one.id for one in sent}
    assert "recorder process ended; restarting it code=-9" in said.read_text()
    assert "history segment written" in said.read_text(), "in the worker's log, wherever that is"


def _recorders(cluster: Cluster) -> list[int]:
    found = []
    for process in cluster.workers.values():
        for child in psutil.Process(process.pid).children():
            with suppress(psutil.NoSuchProcess):  # it has ended
                found += [child.pid] if "record" in child.cmdline() else []
    return found


@pytest.mark.parametrize("broker", ["sqlite", "redis", "amqp"])
def test_an_outcome_that_is_settled_is_in_the_log_whoever_is_killed(broker: str, tmp_path: Path) -> None:
    """D1: the log has an ending before its message is acknowledged, so a kill hides none."""
    with (
        place(broker, tmp_path) as where,
        Cluster(tmp_path, TASKS_FILE, broker=where.broker, backend=where.backend, lease_s=2.0) as cluster,
    ):
        with LogWriter(where.broker) as log:
            log.register()
        ids = set[str]()
        for kill in range(WORKER_KILLS):
            cluster.start_worker("w1", "-c", "2")
            sent = {cluster.app.send_task("chaos_tasks.add", [kill, n]).id for n in range(TASKS_PER_KILL)}
            ids |= sent
            wait_until(lambda: len(cluster.app.backend.read(sent)) >= TASKS_PER_KILL // 2, what="half of it")  # noqa: B023
            cluster.kill_worker("w1")
        cluster.start_worker("w1", "-c", "2")
        wait_until(lambda: cluster.app.backend.read(ids).keys() == ids, what="all to end")
        assert cluster.stop_worker("w1") == 0
        with LogWriter(where.broker) as log:
            told = log.read_all()
        assert {event["uuid"] for event in told if event["type"] == "task-succeeded"} == ids


LOOKS_ONCE = """
from umbel import App
from umbel.worker import events

events.RECORDER_CHECK_S = 3600.0
app = App("calm")

@app.task
def add(a, b):
    return a + b
"""


def test_a_worker_that_runs_logs_everything_once_the_recorder_is_ready(url: str, tmp_path: Path) -> None:
    """It would look for recorders in an hour; the recorder that begins has it look at once."""
    tasks, lake = tmp_path / "calm_tasks.py", tmp_path / "lake"
    tasks.write_text(LOOKS_ONCE)
    with Cluster(tmp_path, tasks, broker=url) as cluster:
        cluster.start_worker("w1", "-c", "1", "-P", "solo")
        with recording(url, lake) as recorder:
            recorder.wait_for("history recording started workers=1 ")
            sent = cluster.app.send_task("calm_tasks.add", [1, 2])
            wait_until(
                lambda: lake.exists() and _types_of(lake, sent.id) == ["received", "started", "succeeded"],
                what="all that the worker told of the task in the lake",
            )
            assert recorder.stop() == 0
        assert cluster.stop_worker("w1") == 0


def _types_of(lake: Path, task_id: str) -> list[str]:
    rows = {row["digest"]: row for row in rows_of(lake, "digest", "type", "uuid")}.values()
    return sorted(row["type"].removeprefix("task-") for row in rows if row["uuid"] == task_id)
