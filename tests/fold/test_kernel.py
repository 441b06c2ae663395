"""D2: the kernel says of every task what the merge says, however its events come.

The merge of `umbel.events` puts one event after the other into registers; the kernel sorts columns. They
share the vocabulary and no code.
"""

import random
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.events.histories import Wire, event, histories
from tests.fold.reading import EXAMPLES, Row, by_key, holes, of_tasks, rows_of, shaken, stories_of
from tests.pipeline.lakes import read
from tests.pipeline.oracle import attempts_of, task_times
from umbel.events.merge import DIGESTS_MAX, Registers, eid, join, registers_of, timeline
from umbel.events.tables import TABLES, to_json
from umbel.events.types import RETRIES_MAX, TaskEvent
from umbel.events.view import TaskRecord, view
from umbel.fold.buckets import divided
from umbel.fold.columns import SCHEMAS
from umbel.fold.kernel import Bucket, fold_bucket

SEEDS = st.integers(0, 2**16)


def expected(record: TaskRecord) -> Row:
    """A record of the merge as a row of `tasks`, but for waiting and running."""

    def told(name: str) -> Any:
        value = getattr(record, "uuid" if name == "task_id" else name)
        if value is not None and name.endswith("_at"):
            return round(value * 1e6)
        if value is not None and name in {"extra", "signum"}:
            return to_json(value).decode()
        return value

    return {name: told(name) for name in TABLES["tasks"].names if name not in {"wait_s", "run_s"}}


def keyed(bucket: Bucket) -> dict[str, dict[tuple[Any, ...], Row]]:
    return {name: by_key(name, getattr(bucket, name)) for name in ("tasks", "attempts", "timeline")}


@settings(max_examples=EXAMPLES, deadline=None)
@given(histories(), SEEDS)
def test_tasks_attempts_and_timeline_are_those_of_the_merge(history: list[Wire], seed: int) -> None:
    """Tasks by the registers, attempts by the rules alone, the timeline by the order of events."""
    events = read(history)
    stories = stories_of(events)
    bucket = fold_bucket(of_tasks(shaken(events, seed)))
    assert by_key("tasks", bucket.tasks) == {
        (uuid,): expected(view(registers_of(uuid, story))) | task_times(story)
        for uuid, story in stories.items()
    }
    assert by_key("attempts", bucket.attempts) == {
        (uuid, number): {"task_id": uuid, "attempt": number} | row
        for uuid, story in stories.items()
        for number, row in attempts_of(story).items()
    }
    told = by_key("timeline", bucket.timeline)
    assert {key: (row["digest"], row["attempt"], row["task_id"]) for key, row in told.items()} == {
        (uuid, rank): (eid(one), one.retries, uuid)
        for uuid, story in stories.items()
        for rank, one in enumerate(timeline(story), start=1)
    }


@settings(max_examples=EXAMPLES, deadline=None)
@given(histories(), SEEDS, st.integers(1, 5))
def test_order_repetition_and_division_change_nothing(history: list[Wire], seed: int, count: int) -> None:
    """Every column of every table, whatever the order of the rows, and in how many buckets they lie."""
    events = read(history)
    at_once = keyed(fold_bucket(of_tasks(events)))
    parts = [keyed(fold_bucket(part)) for part in divided(of_tasks(shaken(events, seed)), count)]
    together: dict[str, dict[tuple[Any, ...], Row]] = {name: {} for name in at_once}
    for part in parts:
        for name, rows in part.items():
            assert not together[name].keys() & rows.keys(), "a task lies in one bucket"
            together[name] |= rows
    assert together == at_once


@settings(max_examples=EXAMPLES, deadline=None)
@given(histories(), SEEDS)
def test_late_events_lead_to_the_same(history: list[Wire], seed: int) -> None:
    """What the merge makes of two partial states is what the kernel makes of all files together."""
    events = read(history)
    chance = random.Random(seed)
    late = [chance.random() < 0.4 for _ in events]
    halves = [
        [one for one, is_late in zip(events, late, strict=True) if is_late == half] for half in (False, True)
    ]
    table = pa.concat_tables([of_tasks(half) for half in halves])
    found = by_key("tasks", fold_bucket(table).tasks)
    known = [{uuid: registers_of(uuid, story) for uuid, story in stories_of(half).items()} for half in halves]
    merged = {
        uuid: view(join(known[0].get(uuid, Registers(uuid)), known[1].get(uuid, Registers(uuid))))
        for uuid in known[0].keys() | known[1].keys()
    }
    assert {key: {**row, "wait_s": 0, "run_s": 0} for key, row in found.items()} == {
        (uuid,): expected(record) | {"wait_s": 0, "run_s": 0} for uuid, record in merged.items()
    }


def test_ties_are_settled_by_the_whole_order() -> None:
    """Of one attempt and one clock: by time, node, process, and what tells events apart at last."""
    alike = read(
        event("started", retries=1, clock=5, timestamp=at, hostname=node, pid=pid, odd=odd)
        for at in (2.0, 1.0)
        for node in ("b@h", "a@h", "B@h", "ä@h")
        for pid in (10, 9)
        for odd in range(4)
    )
    bucket = fold_bucket(of_tasks(shaken(alike, 7)))
    story = timeline(one for one in alike if isinstance(one, TaskEvent))
    found = sorted(rows_of(bucket.timeline), key=lambda row: int(row["rank"]))
    assert [row["digest"] for row in found] == [eid(one) for one in story]
    assert rows_of(bucket.tasks)[0]["extra"] == to_json(story[-1].extra).decode()


def test_of_an_event_that_was_recorded_twice_the_first_record_is_shown() -> None:
    told = read([event("received", retries=0, clock=3), event("started", retries=0, clock=4)])
    tables = [of_tasks(told), of_tasks(told)]
    place = tables[0].schema.get_field_index("recorded_at")
    early = pa.array([5, 6]).cast(tables[0].schema.field(place).type)
    tables[1] = tables[1].set_column(place, tables[0].schema.field(place), early)
    found = rows_of(fold_bucket(pa.concat_tables(tables)).timeline)
    assert [(row["rank"], row["type"], row["recorded_at"]) for row in found] == [
        (1, "task-received", 5),
        (2, "task-started", 6),
    ]


def test_counts_end_at_their_limit() -> None:
    many = range(DIGESTS_MAX + 20)
    kinds = ("received", "succeeded", "failed", "revoked")
    events = read(event(kind, retries=0, clock=number) for number in many for kind in kinds)
    found = fold_bucket(of_tasks(events))
    for table in (found.tasks, found.attempts):
        [row] = rows_of(table)
        assert (row["n_deliveries"], row["n_terminal"]) == (DIGESTS_MAX, 3 * DIGESTS_MAX)
    assert found.timeline.num_rows == len(events)


def test_no_events_make_no_rows_and_missing_columns_are_null() -> None:
    empty = fold_bucket(of_tasks([]))
    assert [getattr(empty, name).schema for name in ("tasks", "attempts", "timeline")] == [
        SCHEMAS[name] for name in ("tasks", "attempts", "timeline")
    ]
    assert empty.tasks.num_rows == empty.attempts.num_rows == empty.timeline.num_rows == 0
    told = of_tasks(read([event("started", retries=2), event("progress", "t2", retries=2)]))
    bucket = fold_bucket(told.select(["uuid", "slot", "retries", "digest"]))
    assert not holes(bucket.tasks) + holes(bucket.attempts) + holes(bucket.timeline)
    assert [(row["attempt"], row["state"]) for row in rows_of(bucket.attempts)] == [(2, "STARTED"), (2, "")]


def test_an_attempt_that_cannot_be_one_counts_as_none() -> None:
    table = of_tasks(read(event("started", retries=0, clock=clock) for clock in (1, 2, 3)))
    place = table.schema.get_field_index("retries")
    told = pa.array([RETRIES_MAX, RETRIES_MAX + 1, -1])
    bucket = fold_bucket(table.set_column(place, table.schema.field(place), told))
    assert {row["clock"]: row["attempt"] for row in rows_of(bucket.timeline)} == {
        1: RETRIES_MAX,
        2: None,
        3: None,
    }
    assert {(row["attempt"], row["clock"]) for row in rows_of(bucket.attempts)} == {(RETRIES_MAX, 1), (0, 3)}


def test_types_without_a_register_are_in_the_timeline_alone() -> None:
    table = of_tasks(read([event("started", retries=0), event("succeeded", retries=0, clock=2)]))
    place = table.schema.get_field_index("slot")
    unknown = table.set_column(place, table.schema.field(place), pa.array(["started", "unheard-of"]))
    bucket = fold_bucket(unknown)
    assert [row["state"] for row in rows_of(bucket.tasks)] == ["STARTED"]
    assert bucket.timeline.num_rows == 2
