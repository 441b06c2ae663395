"""Rows of the lake, made by the column (D1): the same as `columns.row()` makes them."""

import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.events.histories import EXAMPLES, event
from umbel.brokers.interface import LoggedEvent
from umbel.events.columns import COLUMNS, row
from umbel.events.reading import EventReader
from umbel.events.types import VOCABULARY
from umbel.history.arrow import event_schema
from umbel.history.rows import Rows
from umbel.wire.event import decode_events

AT = 1_700_000_000.25
INSTANTS = [column.name for column in COLUMNS if column.kind == "instant"]

_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.lists(st.integers(0, 9), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=2),
)
_good: dict[str, st.SearchStrategy[Any]] = {
    "hostname": st.sampled_from(["w1@a", "w2@b"]),
    "pid": st.integers(0, 99_999),
    "clock": st.integers(0, 2**40),
    "timestamp": st.floats(0, 4e9),
    "inc": st.integers(0, 2**51),
    "seq": st.integers(0, 2**30),
    "uuid": st.uuids().map(str),
    "retries": st.integers(0, 20),
    "runtime": st.floats(0, 1e6),
    "terminated": st.booleans(),
    "signum": st.one_of(st.integers(0, 64), st.just("TERM")),
}


@st.composite
def wire_events(draw: st.DrawFn) -> dict[str, Any]:
    """Mostly as they should be, sometimes with fields or values that nobody should send."""
    known = draw(st.sampled_from([*VOCABULARY, *VOCABULARY, "task-progress", "zork", "task-"]))
    fields = VOCABULARY.get(known, VOCABULARY["task-received"])
    told: dict[str, Any] = {"type": known, "uuid": draw(_good["uuid"])}
    for name in draw(st.sets(st.sampled_from([*fields]))):
        strange = draw(st.integers(0, 9)) == 0
        told[name] = draw(_values if strange else _good.get(name, st.text(max_size=12)))
    if draw(st.integers(0, 4)) == 0:
        told[draw(st.sampled_from(["own", "*", "local_received", "extra", "slot"]))] = draw(_values)
    return told


def as_logged(*bodies: bytes) -> list[LoggedEvent]:
    return [LoggedEvent(offset, AT, "task.x", body) for offset, body in enumerate(bodies, start=1)]


def made(rows: Rows) -> list[dict[str, Any]]:
    """The table's rows without what is null, instants in microseconds."""
    table = rows.table()
    assert table.schema == event_schema()
    for name in INSTANTS:
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, table[name].cast("int64"))
    found: list[dict[str, Any]] = table.to_pylist()
    return [{name: value for name, value in one.items() if value is not None} for one in found]


def expected(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    reader = EventReader()
    records = [reader.read(one) for one in events]
    return [row(one, recorded_us=round(AT * 1e6), source="redis") for one in records if one is not None]


def ordered(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(repr(sorted(one.items())) for one in rows)


@settings(max_examples=EXAMPLES * 2)
@given(st.lists(wire_events(), max_size=6))
def test_the_quick_way_makes_the_rows_of_the_reference(events: list[dict[str, Any]]) -> None:
    bodies = [msgspec.json.encode(one) for one in events]
    read_back = [one for body in bodies for one in decode_events(body)]
    rows = Rows("redis")
    heard = rows.add(as_logged(*bodies))
    wanted = expected(read_back)
    assert rows.count == len(wanted)
    assert len(heard.unreadable) == len(events) - len(wanted)
    assert ordered(made(rows)) == ordered(wanted)


@given(st.lists(wire_events(), min_size=1, max_size=6))
def test_a_list_of_events_is_as_good_as_one_by_one(events: list[dict[str, Any]]) -> None:
    one_by_one, together = Rows("redis"), Rows("redis")
    one_by_one.add(as_logged(*[msgspec.json.encode(one) for one in events]))
    together.add(as_logged(msgspec.json.encode(events)))
    assert ordered(made(one_by_one)) == ordered(made(together))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"junk",
        b"[]]",
        b"7",
        b'{"no":"type"}',
        b'{"type":7}',
        b'{"type":"task-sent"}',
        b"\xff",
        b"[" * 99_999,
    ],
)
def test_what_is_no_event_is_set_aside_with_the_reason(body: bytes) -> None:
    rows = Rows("redis")
    (unreadable,) = rows.add(as_logged(body)).unreadable
    assert unreadable.entry.body == body
    assert unreadable.why
    assert rows.count == 0


def test_a_time_or_number_beyond_all_reason_is_no_reason_to_fail() -> None:
    told = [
        event("succeeded", timestamp=1e300, clock=2**80, pid=2**70, seq=-(2**65), result="ok"),
        event("received", timestamp=-1, retries=10**9, name=5),
        event("started", timestamp=250_000_000_000.123456),
    ]
    rows = Rows("redis")
    assert not rows.add(as_logged(*[msgspec.json.encode(one) for one in told])).unreadable
    found = {one["type"]: one for one in made(rows)}
    assert found["task-succeeded"]["timestamp"] == 0
    assert found["task-succeeded"]["pid"] == 0
    assert found["task-received"]["extra"] == '{"name":5}'


def test_who_numbers_nothing_is_named_and_who_does_is_counted() -> None:
    now = time.time()
    told = [
        {"type": "worker-online", "hostname": "celery@a", "timestamp": now},
        {"type": "worker-heartbeat", "hostname": "celery@b", "timestamp": now},
        {"type": "worker-heartbeat", "hostname": "umbel@c", "pid": 1, "inc": 5, "seq": 9, "timestamp": 2.0},
        event("started", inc=5, seq=10, timestamp=3.0),
    ]
    heard = Rows("redis").add(as_logged(*[msgspec.json.encode(one) for one in told]))
    assert (heard.strangers, heard.arrived) == ({"celery@a", "celery@b"}, {"celery@a"})
    assert heard.stamped == [("umbel@c", 1, 5, 9, 2_000_000), ("u1@a", 1, 5, 10, 3_000_000)]
