"""D2 on a recorded run: what tasks really did, what a monitor's memory says, and the tables agree."""

import json
import os
import random
import signal
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from tests.cluster import Cluster
from tests.fold.reading import stories_of
from tests.history.recording import LogWriter, recording, rows_of
from tests.pipeline.lakes import read
from tests.pipeline.test_build import HereEngine
from tests.pipeline.test_equality import expected, rows_by_task
from tests.pipeline.test_follow import caught_up, contents, look
from tests.scenarios.chaos_tasks import journal_of
from tests.waiting import wait_until
from umbel.events.merge import registers_of
from umbel.events.tables import COLUMNS
from umbel.events.view import view
from umbel.pipeline.build import build
from umbel.pipeline.engines import SparkEngine
from umbel.protocol.delivery.states import READY_STATES

SOAK = bool(os.environ.get("UMBEL_SOAK"))
TASKS, KILLS = (10_000, 6) if SOAK else (300, 1)
TASKS_FILE = Path(__file__).parents[1] / "scenarios" / "chaos_tasks.py"
JSON = {column.name for column in COLUMNS if column.kind == "json"} - {"extra"}
NOT_ON_THE_WIRE = {"digest", "slot", "recorded_at", "source", "extra"}


def run_and_record(home: Path, lake: Path) -> list[str]:
    """Tasks under two workers; children are killed, and a whole worker; all of it recorded."""
    chance = random.Random(7)
    settings = {"lease_s": 2.0, "task_send_sent_event": True}
    with Cluster(home, TASKS_FILE, **settings) as cluster, LogWriter(cluster.app.settings.broker) as log:
        log.register()
        with recording(cluster.app.settings.broker, lake) as recorder:
            for name in ("w1", "w2"):
                cluster.start_worker(name, "-c", "2")
            work, breaks = cluster.app.tasks["chaos_tasks.work"], cluster.app.tasks["chaos_tasks.breaks"]
            calls = [work.s(str(home), chance.choice((0.001, 0.01))) for _ in range(TASKS)]
            ids = [result.id for result in cluster.app.send_many([*calls, breaks.s(), breaks.s()])]
            for kill in range(KILLS):
                done = TASKS * (kill + 1) // (KILLS + 2)
                wait_until(lambda: len(runs(home)) >= done, deadline_s=200, what=f"{done} runs")  # noqa: B023
                for child in cluster.children_of("w1")[:1]:
                    os.kill(child, signal.SIGKILL)
                cluster.kill_worker("w2")
                cluster.start_worker("w2", "-c", "2")
            wait_until(
                lambda: (
                    all(kept.status in READY_STATES for kept in cluster.app.backend.read(ids).values())
                    and len(cluster.app.backend.read(ids)) == len(ids)
                ),
                deadline_s=200,
                what="every task to end",
            )
            for name in ("w1", "w2"):
                assert cluster.stop_worker(name) == 0
            log.wait_until_recorded()
            assert recorder.stop() == 0, recorder.log
    return ids


def runs(home: Path) -> list[list[str]]:
    """The ledger: task, whether the run knew that it was a repetition, process."""
    journal = journal_of(str(home))
    return [line.split() for line in journal.read_text().splitlines()] if journal.exists() else []


def told_again(lake: Path) -> list[dict[str, Any]]:
    """The lake's rows as events of the wire."""

    def wire(row: dict[str, Any]) -> dict[str, Any]:
        fields = {
            name: value for name, value in row.items() if value is not None and name not in NOT_ON_THE_WIRE
        }
        fields |= {name: json.loads(fields[name]) for name in JSON & fields.keys()}
        seconds = (fields["timestamp"] - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()
        extra: dict[str, Any] = json.loads(row["extra"] or "{}")
        return extra | fields | {"timestamp": seconds}

    return [wire(row) for row in rows_of(lake)]


@pytest.mark.scenario
@pytest.mark.timeout(900)
def test_the_ledger_and_the_tables_agree(spark: SparkSession, tmp_path: Path) -> None:
    """D1, D2, L6: ledger = memory = batch = stream, on a run in which processes died."""
    lake = tmp_path / "lake"
    ids = run_and_record(tmp_path, lake)
    manifest = build(SparkEngine(spark), lake, look(lake))

    def table(name: str) -> DataFrame:
        return spark.read.parquet(*(str(lake / "tables" / one) for one in manifest.tables[name]))

    def rows(name: str) -> list[Row]:
        return table(name).collect()

    tasks = table("tasks")
    memory = stories_of(read(told_again(lake)))
    assert rows_by_task(tasks) == {
        uuid: expected(view(registers_of(uuid, one))) for uuid, one in memory.items()
    }

    states = {row["task_id"]: row["state"] for row in tasks.collect()}
    assert states.keys() == set(ids)
    assert Counter(states.values()) == {"SUCCESS": TASKS, "FAILURE": 2}
    ledger = Counter(task for task, _, _ in runs(tmp_path))
    assert ledger.keys() == {uuid for uuid, state in states.items() if state == "SUCCESS"}
    repeated = {task for task, is_repetition, _ in runs(tmp_path) if is_repetition == "1"}
    assert {task for task, count in ledger.items() if count > 1} <= repeated

    kinds: dict[str, set[str]] = {}
    for row in rows("anomalies"):
        kinds.setdefault(row["kind"], set()).add(row["subject"])
    assert kinds.get("delivered_twice", set()) <= repeated
    assert not kinds.keys() & {"lost", "stuck", "causality", "clock_reset", "recorder_lost"}
    succeeded = sum(row["n_succeeded"] for row in rows("metrics"))
    assert succeeded == sum(row["outcome"] == "SUCCESS" for row in rows("attempts")) == TASKS
    endings = Counter(row["ending"] for row in rows("workers"))
    assert endings["offline"] == 2 and endings["alive"] + endings["lost"] == KILLS

    batch, files = contents(lake), sorted(lake.glob("events/*/*/*.parquet"))
    moved = {path: tmp_path / path.name for path in files[len(files) // 2 :]}
    for path, elsewhere in moved.items():
        path.rename(elsewhere)
    build(HereEngine(), lake, look(lake), afresh=True)
    for path, elsewhere in moved.items():
        elsewhere.rename(path)
        caught_up(HereEngine(), lake)
    assert contents(lake) == batch
