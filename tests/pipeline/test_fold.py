"""D2: the fold by columns answers what Spark's transforms answer, in every column of every table.

One lake has everything: the story whose answers are known, random histories, elections of all kinds,
senders with gaps, some events recorded twice. Spark builds it once.
"""

import random
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.fold.reading import holes, rows_of
from tests.fold.running import tables_of
from tests.pipeline.lakes import Wire, read, table_of
from tests.pipeline.test_equality import random_histories
from tests.pipeline.test_tables import BEATS, NUMBERED, STORY, T0, task, told
from tests.pipeline.transforms.anomalies import anomalies
from tests.pipeline.transforms.attempts import attempts
from tests.pipeline.transforms.elections import elections
from tests.pipeline.transforms.metrics import metrics
from tests.pipeline.transforms.parts import parts_of
from tests.pipeline.transforms.schemas import EVENTS
from tests.pipeline.transforms.tasks import tasks
from tests.pipeline.transforms.timeline import timeline
from tests.pipeline.transforms.workers import workers
from umbel.events.tables import TABLES
from umbel.fold.buckets import bucket_of, hash_of
from umbel.fold.columns import SCHEMAS, moments

HISTORIES = 30
BROKEN = 12
"""Elections whose reports are drawn at random."""

TEXTS = ["", "a", "ab", "abc", "abcd", "abcde", "Spark", "ümläut€", "é" * 9, "x" * 100, "\U0001f300" * 3]
MOMENTS = [
    "2026-11-15T07:00:00+00:00",
    "2026-11-15T07:00:00.123456+05:30",
    "2026-11-15 07:00:00.1",
    "2026-11-15T07:00:00.12345678Z",
    "2026-11-15T07:00:00-0130",
    "2026-11-15T07:00:00+2",
    "2026-11-15T07:00:00 UTC",
    "2026-11-15T07:00:00UTC+01:00",
    "2026-11-15T7:0:0",
    "2026-11-15T07:00",
    "2026-1-5",
    "2026-11",
    "2026",
    " 2026-11-15 ",
    "2026-11-15T",
    "2026-11-15T07",
    "2026-11-15T07Z",
    "2026-11-15T07:00Z",
    "2026-11-15T07:00:00.",
    "2026-11-15T07:00:00+19:00",
    "2026-11-15T07:00:00+01:75",
    "2026-02-30",
    "2026-13-01",
    "2026-11-15T24:00:00",
    "20261115",
    "26-11-15",
    "soon",
    "",
]


def reports(seed: int) -> list[Wire]:
    """Of elections of both kinds, in all confusion."""
    chance = random.Random(seed)
    found: list[Wire] = []
    for number in range(BROKEN):
        for _ in range(chance.randint(1, 8)):
            node, clock, at = (
                chance.choice(["a@h", "b@h", 'q"\\\n\x1b@ü']),
                chance.randint(1, 3),
                chance.randint(0, 2),
            )
            topic, pid = chance.choice([None, "t", "u"]), chance.choice([9, 10])
            if chance.random() < 0.5:
                kind = chance.choice(["worker-elect", "worker-elect-ack"])
                found.append(told(kind, at, clock, id=f"c{number}", topic=topic, node=node, pid=pid))
            else:
                fields = {
                    "phase": chance.choice([None, "elected", "elected", "done", "failed", "retrying"]),
                    "winner": chance.choice([None, "a@h", "b@h"]),
                    "term": chance.choice([None, 1, 2]),
                    "attempt": chance.choice([None, 1, 2]),
                    "policy": chance.choice([None, "once"]),
                }
                found.append(
                    told("worker-elected", at, clock, eid=f"s{number}", topic=topic, node=node, **fields)
                )
    return found


def numbered(seed: int) -> list[Wire]:
    """Beats with numbers that are missing here and there, of clocks that go back, in sessions."""
    chance = random.Random(seed)
    return [
        told(
            chance.choice(["worker-heartbeat", "worker-heartbeat", "worker-online", "worker-offline"]),
            chance.randint(0, 60),
            chance.choice([0, 5, 9, 3_000_000]),
            node=f"n{chance.randint(0, 3)}@h",
            freq=chance.choice([None, 1.0, 3.3, -1.0]),
            active=chance.choice([None, 1, 4]),
            processed=chance.choice([None, 7]),
            inc=chance.choice([None, 1, 2]),
            seq=chance.choice([None, chance.randint(0, 40), 32_760 + chance.randint(0, 20)]),
        )
        for _ in range(150)
    ]


def tables_in(seed: int) -> list[pa.Table]:
    """The lake as three files; the last has some of the others' events again, recorded later."""
    eta = datetime.fromtimestamp(T0 + 1.75, UTC).isoformat()
    special = [
        *task("due", ("sent", 0, 0), ("received", 1, 2), ("started", 3, 3), ("straße", 4, 4), eta=eta),
        *task(
            "refused", ("received", 1, 2), ("rejected", 10, 3), ("started", 130, 4)
        ),  # ended before its state
        *task("held", ("sent", 0, 0), ("received", 1, 5), node="w3@h"),  # by a node that is alive
        *task("young", ("sent", 9_960, 0), ("received", 9_970, 5), node="w2@h"),  # not lost yet
        *(told("worker-elect", 1, 7, id="tie", topic="t", pid=pid) for pid in (9, 10)),
        *(told("worker-offline", at, 7, node="w7@h") for at in (40, 41)),
        told("recorder-lost", 3, recorder="r", lost=12),
        told("recorder-deaf", 4, recorder="r"),
        told("recorder-gap", 5, recorder="r", first="3", last=7.5, count=4),
    ]
    first = read([*BEATS, *STORY, *NUMBERED, *special, *reports(seed)])
    second = read([*numbered(seed), *random_histories(HISTORIES)])
    again = random.Random(seed).sample([*first, *second], 200)
    skewed = read([told("worker-offline", 90.25, 1, node="w4@h"), told("worker-offline", 0, 1, node="w6@h")])
    return [
        pa.concat_tables(
            [table_of(first, recorded_us=None), table_of(skewed, recorded_us=round((T0 + 80) * 1e6))]
        ),
        table_of(second, recorded_us=None),
        table_of(again, recorded_us=round((T0 + 60) * 1e6)),
    ]


def built_by_spark(spark: SparkSession, events: pa.Table) -> dict[str, pa.Table]:
    """As a build makes them."""
    parts = parts_of(spark.createDataFrame(events, EVENTS))
    frames = {"tasks": tasks(parts.states), "attempts": attempts(parts.states)}
    frames |= {"workers": workers(parts.others, parts.marks), "elections": elections(parts.others)}
    kept = {name: frame.persist(StorageLevel.MEMORY_ONLY) for name, frame in frames.items()}
    kept |= {"metrics": metrics(kept["attempts"]), "timeline": timeline(parts.events)}
    of = (kept["workers"], kept["elections"], parts.others, parts.marks)
    kept["anomalies"] = anomalies(kept["tasks"], kept["attempts"], *of)
    found = {name: _collected(frame) for name, frame in kept.items()}
    for frame in frames.values():
        frame.unpersist()
    return found


def _collected(frame: DataFrame) -> pa.Table:
    return frame.toArrow()


def counted(table: pa.Table) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row.items()) for row in rows_of(table))


def test_every_column_of_every_table_is_sparks(spark: SparkSession) -> None:
    lake = tables_in(seed=5)
    spark_says = built_by_spark(spark, pa.concat_tables(lake))
    fold_says = tables_of(lake, buckets=5)
    assert list(fold_says) == list(TABLES)
    for name, table in fold_says.items():
        assert table.schema == SCHEMAS[name]
        assert not holes(table), name
        theirs, ours = counted(spark_says[name]), counted(table)
        assert ours - theirs == Counter(), f"{name}: rows that Spark has not"
        assert theirs - ours == Counter(), f"{name}: rows that only Spark has"
        assert len(ours) >= 10, f"{name} is hardly tested"
    kinds = set(fold_says["anomalies"].column("kind").to_pylist())
    assert kinds >= {"election", "seq_gap", "lost", "stuck", "recorder_lost", "time_skew", "clock_jump"}


def test_texts_are_hashed_and_read_as_spark_does_it(spark: SparkSession) -> None:
    texts = [*TEXTS, *MOMENTS]
    found = spark.createDataFrame([(text,) for text in texts], "text string").select(
        F.hash("text").alias("hash"),
        F.pmod(F.hash("text"), F.lit(48)).alias("bucket"),
        F.unix_micros(F.col("text").try_cast("timestamp")).alias("moment"),
    )
    rows = found.collect()
    array = pa.array(texts)
    assert hash_of(array).tolist() == [row["hash"] for row in rows]
    assert bucket_of(array, 48).tolist() == [row["bucket"] for row in rows]
    micros, known = moments(array)
    read_by_fold = [
        one if there else None for one, there in zip(micros.tolist(), known.tolist(), strict=True)
    ]
    assert dict(zip(texts, read_by_fold, strict=True)) == {
        text: row["moment"] for text, row in zip(texts, rows, strict=True)
    }
