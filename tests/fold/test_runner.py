"""D2: all tables of a lake in one process, whatever its files and buckets."""

from collections import Counter
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.events.histories import Wire, event, histories
from tests.fold.reading import EXAMPLES, holes, rows_of, shaken
from tests.fold.running import tables_of
from tests.pipeline.lakes import read, table_of
from umbel.events.tables import TABLES
from umbel.fold.columns import SCHEMAS, moment
from umbel.fold.tasks import SAMPLES, metrics

Rows = Counter[tuple[Any, ...]]


def counted(lake: list[pa.Table], buckets: int) -> dict[str, Rows]:
    tables = tables_of(lake, buckets=buckets)
    return {name: Counter(tuple(row.values()) for row in rows_of(table)) for name, table in tables.items()}


@st.composite
def of_nodes(draw: st.DrawFn) -> Wire:
    """What nodes say beside heartbeats: elections, and what recorders tell."""
    kind = draw(st.sampled_from(["worker-elect", "worker-elect-ack", "worker-elected", "recorder-lost"]))
    told: Wire = {"type": kind, "hostname": draw(st.sampled_from(["u1@a", "u2@b"])), "pid": 1}
    told |= {"clock": draw(st.integers(0, 3)), "timestamp": draw(st.sampled_from([1.0, 2.0]))}
    told |= {"inc": 5, "seq": draw(st.integers(0, 9))}
    if kind == "worker-elected":
        told |= {
            "eid": "e",
            "phase": draw(st.sampled_from(["elected", "done"])),
            "term": draw(st.integers(1, 2)),
        }
        told |= {"winner": draw(st.sampled_from(["u1@a", "u2@b"]))}
    return told | ({"lost": 3} if kind == "recorder-lost" else {"id": "e", "topic": "t"})


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(histories(), st.lists(of_nodes(), max_size=8), st.integers(0, 2**16), st.integers(1, 4))
def test_files_order_repetition_and_buckets_change_nothing(
    history: list[Wire], nodes: list[Wire], seed: int, buckets: int
) -> None:
    events = read([*history, *nodes])
    other = shaken(events, seed)
    cut = seed % (len(other) + 1)
    at_once, in_parts = [table_of(events)], [table_of(other[:cut]), table_of(other[cut:])]
    assert counted(in_parts, buckets) == counted(at_once, 1)


def test_an_empty_lake_has_empty_tables() -> None:
    tables = tables_of([])
    assert {name: table.schema for name, table in tables.items()} == SCHEMAS
    assert list(tables) == list(TABLES)
    assert not any(table.num_rows for table in tables.values())


def test_older_and_newer_files_lie_beside_each_other() -> None:
    """A column that a file lacks is null, one that the lake does not know is not read."""
    table = table_of(read([event("started", retries=0), event("succeeded", retries=0, clock=2)]))
    narrow = table.select(["digest", "type", "slot", "uuid", "retries", "clock", "timestamp"]).slice(0, 1)
    wide = table.slice(1).append_column("tomorrow", pa.array(["?"]))
    tables = tables_of([narrow, wide])
    assert [row["state"] for row in rows_of(tables["tasks"])] == ["SUCCESS"]
    assert not any(holes(one) for one in tables.values())


def test_percentiles_are_those_of_spark_to_the_last_bit() -> None:
    waits = [1.25, 0.5, None, 0.5]
    sampled = pa.Table.from_pylist(
        [
            {"minute": 60_000_000, "name": "a", "outcome": outcome, "wait_s": wait}
            for outcome, wait in zip(["SUCCESS", "FAILURE", None, "RETRY"], waits, strict=True)
        ],
        schema=SAMPLES,
    )
    [row] = rows_of(metrics(sampled))
    assert (row["wait_p50_s"], row["wait_p95_s"], row["run_p99_s"]) == (0.5, 1.1749999999999998, None)
    assert (row["n_attempts"], row["n_open"], row["n_retried"], row["failure_rate"]) == (4, 1, 1, 0.5)
    assert row["per_s"] == 3 / 60


def test_moments_are_read_with_and_without_an_offset() -> None:
    assert moment("1970-01-01T00:00:01.400000+00:00") == 1_400_000
    assert moment("1970-01-01 01:00:00+01:00") == 0
    assert moment("1970-01-02") == 86_400_000_000
    assert moment("soon") is moment("1970-02-30T00:00:00") is moment("1970-01-01T00:00:00+19:00") is None
