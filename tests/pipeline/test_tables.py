"""D2: sessions, elections, figures and anomalies, from one small history whose answers are known."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark import StorageLevel
from pyspark.sql import DataFrame, Row, SparkSession

from tests.pipeline.lakes import Wire, read, table_of
from tests.pipeline.transforms.anomalies import anomalies
from tests.pipeline.transforms.attempts import attempts
from tests.pipeline.transforms.elections import elections
from tests.pipeline.transforms.marks import BITS, gaps
from tests.pipeline.transforms.metrics import metrics
from tests.pipeline.transforms.parts import parts_of
from tests.pipeline.transforms.schemas import EVENTS, SCHEMAS
from tests.pipeline.transforms.tasks import tasks
from tests.pipeline.transforms.workers import workers

T0 = 1_700_000_000.0


def told(kind: str, at: float, clock: int = 0, *, node: str = "w1@h", **fields: Any) -> Wire:
    return {"type": kind, "hostname": node, "pid": 1, "timestamp": T0 + at, "clock": clock, **fields}


def task(
    uuid: str, *steps: tuple[str, float, int], node: str = "w1@h", retries: int = 0, **fields: Any
) -> list[Wire]:
    every = {"uuid": uuid, "retries": retries, "node": node, "name": "shop.pay", **fields}
    return [told(f"task-{kind}", at, clock, **every) for kind, at, clock in steps]


BEATS = [
    told("worker-online", 0, 1, freq=2.0, sw_ident="umbel", inc=5, seq=0),
    told("worker-heartbeat", 2, 10, freq=2.0, active=3, processed=7, inc=5, seq=1),
    told("worker-heartbeat", 100, 20, freq=2.0, inc=5, seq=2),  # it was silent for a while
    told("worker-offline", 101, 30, freq=2.0, inc=5, seq=3),
    told("worker-heartbeat", 0, 50, node="w2@h", freq=2.0),
    told("worker-heartbeat", 2, 5, node="w2@h", freq=2.0),  # its clock went back
    told("worker-heartbeat", 4, 5_000_000, node="w2@h", freq=2.0),  # and leapt
    told("worker-heartbeat", 9_999, 6_000, node="w3@h", freq=60.0),
    told("worker-online", 0, 60, node="w5@h", freq=2.0),
    told("worker-offline", 1, 61, node="w5@h", freq=2.0),
    told("worker-online", 2, 62, node="w5@h", freq=2.0),  # back before it would have been missed
]
STORY = [
    *task(
        "done",
        ("sent", 0, 0),
        ("received", 1, 1),
        ("started", 3, 2),
        ("succeeded", 7, 3),
        runtime=3.5,
        queue="q",
    ),
    *task("slow", ("sent", 0, 0), ("received", 1, 4), ("started", 5, 5), ("failed", 6, 6), queue="q"),
    *task("again", ("sent", 0, 0), ("received", 1, 7), ("started", 2, 8), ("retried", 3, 9), queue="q"),
    *task("again", ("received", 4, 10), ("started", 5, 11), ("succeeded", 6, 12), retries=1),
    *task("twice", ("received", 1, 1), ("succeeded", 2, 2)),
    *task("twice", ("received", 1, 3), ("succeeded", 2, 4), node="w3@h"),
    *task("next", ("received", 8, 13), ("started", 8, 14), ("succeeded", 9, 15), parent_id="done"),
    *task("unfinished", ("sent", 0, 0), ("received", 1, 3), ("started", 2, 4), node="w2@h"),
    *task("forgotten", ("sent", 0, 0)),
    *task("waiting", ("sent", 0, 0), eta="2099-01-01T00:00:00+00:00"),
    *task("odd", ("sent", 0, 0), ("received", 1, 9), ("started", 2, 5), ("succeeded", 3, 10)),
    told("worker-elect", 1, 12, id="e1", topic="t", node="w1@h"),
    told("worker-elect", 1, 11, id="e1", topic="t", node="w2@h"),
    told("worker-elect-ack", 2, 13, id="e1", node="w1@h"),
    told("worker-elected", 1, 2, eid="e2", topic="t", phase="elected", winner="w1@h", term=4, attempt=1),
    told("worker-elected", 2, 3, eid="e2", topic="t", phase="done", winner="w1@h", term=4, attempt=1),
    told("worker-elected", 1, 2, eid="e3", topic="t", phase="elected", winner="w1@h", term=4),
    told("worker-elected", 1, 2, eid="e3", topic="t", phase="elected", winner="w2@h", term=4),
    told("recorder-gap", 1, recorder="r", first=3, last=7, inc=5),
    told("something-new", 1, 2, what="unknown"),
]
NUMBERED = [
    told("worker-heartbeat", 50 + n / 1e6, 40, node="w3@h", freq=60.0, inc=8, seq=n)
    for n in (0, 1, 2, 5, 6, BITS - 1, BITS, 3 * BITS + 4)
]


@pytest.fixture(scope="module")
def tables(spark: SparkSession) -> Iterator[dict[str, DataFrame]]:
    events = table_of(read([*BEATS, *STORY, *BEATS, *STORY, *NUMBERED]), recorded_us=None)
    ahead = table_of(read([told("worker-offline", 90, 1, node="w4@h")]), recorded_us=round((T0 + 30) * 1e6))
    parts = parts_of(spark.createDataFrame(pa.concat_tables([events, ahead]), EVENTS))
    made = {"tasks": tasks(parts.states), "attempts": attempts(parts.states), "gaps": gaps(parts.marks)}
    made |= {"workers": workers(parts.others, parts.marks), "elections": elections(parts.others)}
    kept = {name: frame.persist(StorageLevel.DISK_ONLY) for name, frame in made.items()}
    kept["metrics"] = metrics(kept["attempts"])
    of = (kept["workers"], kept["elections"], parts.others, parts.marks)
    kept["anomalies"] = anomalies(kept["tasks"], kept["attempts"], *of)
    yield kept
    for frame in made.values():
        frame.unpersist()


def rows(tables: dict[str, DataFrame], name: str, *columns: str) -> set[tuple[Any, ...]]:
    return {tuple(row) for row in tables[name].select(*columns).collect()}


def test_a_tasks_waiting_and_running(tables: dict[str, DataFrame]) -> None:
    found = {row["task_id"]: (row["wait_s"], row["run_s"]) for row in tables["tasks"].collect()}
    assert found["done"] == (3.0, 3.5)
    assert found["slow"] == (5.0, 1.0)
    assert found["again"] == (1.0, 1.0)  # of its last attempt, which nobody told of sending
    assert found["unfinished"] == (2.0, None)
    assert found["forgotten"] == (None, None)


def test_attempts_have_outcomes(tables: dict[str, DataFrame]) -> None:
    found = rows(tables, "attempts", "task_id", "attempt", "outcome", "queue")
    assert {one for one in found if one[0] == "again"} == {
        ("again", 0, "RETRY", "q"),
        ("again", 1, "SUCCESS", "q"),
    }
    assert ("unfinished", 0, None, None) in found


def test_sessions_end_by_farewell_silence_or_not_at_all(tables: dict[str, DataFrame]) -> None:
    found = rows(
        tables, "workers", "hostname", "inc", "session", "ending", "n_beats", "clock_min", "clock_max"
    )
    assert ("w1@h", 5, 1, "lost", 2, 1, 10) in found
    assert ("w1@h", 5, 2, "offline", 2, 20, 30) in found
    assert ("w2@h", None, 1, "lost", 3, 5, 5_000_000) in found
    assert ("w3@h", None, 1, "alive", 1, 6_000, 6_000) in found
    assert {one for one in found if one[0] == "w5@h"} == {
        ("w5@h", None, 1, "offline", 2, 60, 61),
        ("w5@h", None, 2, "lost", 1, 62, 62),
    }


def test_elections_have_winners_and_broken_promises(tables: dict[str, DataFrame]) -> None:
    found = rows(
        tables, "elections", "election_id", "protocol", "winner", "outcome", "n_candidates", "violations"
    )
    assert found == {
        ("e1", "v1", "w2@h", "elected", 2, "[]"),
        ("e2", "v2", "w1@h", "done", 1, "[]"),
        ("e3", "v2", "w2@h", "elected", 2, '["two winners in one term"]'),
    }


def test_metrics_count_attempts(tables: dict[str, DataFrame]) -> None:
    found = [row.asDict() for row in tables["metrics"].where("worker = 'w1@h' and queue = 'q'").collect()]
    total = {name: sum(row[name] for row in found) for name in found[0] if name.startswith("n_")}
    assert {name: count for name, count in total.items() if count} == {
        "n_attempts": 4,
        "n_succeeded": 2,
        "n_failed": 1,
        "n_retried": 1,
    }
    assert {row["failure_rate"] for row in found} == {1 / 3}
    assert [(row["wait_p50_s"], row["run_p99_s"]) for row in found] == [(2.5, pytest.approx(3.425))]


def test_gaps_are_found_within_and_between_rows_of_bits(tables: dict[str, DataFrame]) -> None:
    """D1: the numbers that are missing, whatever lies between them."""
    found = {(row["start"], row["n"]) for row in tables["gaps"].where("hostname = 'w3@h'").collect()}
    assert found == {(3, 2), (7, BITS - 8), (BITS + 1, 2 * BITS + 3)}


def test_each_anomaly_is_found_and_nothing_else(tables: dict[str, DataFrame]) -> None:
    found = {(row["kind"], row["subject"]) for row in tables["anomalies"].collect()}
    assert found == {
        ("time_skew", "w4@h"),
        ("run_twice", "twice"),
        ("delivered_twice", "twice"),
        ("lost", "unfinished"),
        ("stuck", "forgotten"),
        ("causality", "odd"),
        ("received_without_sent", "twice"),
        ("clock_reset", "w2@h"),
        ("clock_jump", "w2@h"),
        ("clock_reset", "w3@h"),
        ("seq_gap", "w3@h"),
        ("election", "e3"),
        ("recorder_gap", "w1@h"),
    }
    gap: Row
    [gap] = tables["anomalies"].where("kind = 'recorder_gap'").collect()  # it was recorded twice
    assert gap["n"] == 5


def test_what_is_never_null_never_is(tables: dict[str, DataFrame]) -> None:
    for name in tables.keys() & SCHEMAS.keys():
        sure = [field.name for field in SCHEMAS[name] if not field.nullable]
        holes = " or ".join(f"`{column}` is null" for column in sure)
        assert not holes or tables[name].where(holes).isEmpty(), name
