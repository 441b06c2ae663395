"""Rows of the lake, made by the column (D1): the same as `columns.row()` makes them."""

import time
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.events.histories import EXAMPLES, event
from tests.history.recording import Teller
from umbel.brokers.interface import LoggedEvent
from umbel.events.reorder import KnownSender, Sequences
from umbel.events.tables import COLUMNS, row
from umbel.events.types import VOCABULARY
from umbel.events.view import EventReader
from umbel.history.lake import event_schema
from umbel.history.rows import TOGETHER_MAX, Rows
from umbel.history.segment import account_numbers
from umbel.wire.event import by_type, decode_events, routing_key
from umbel.worker.events import BATCH_MAX

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


def as_logged(*bodies: bytes, key: str = "task.x") -> list[LoggedEvent]:
    return [LoggedEvent(offset, AT, key, body) for offset, body in enumerate(bodies, start=1)]


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
@given(st.lists(wire_events(), max_size=6), st.booleans())
def test_the_quick_way_makes_the_rows_of_the_reference(events: list[dict[str, Any]], honest: bool) -> None:
    """Whether the routing key says what is in an entry, so that many are read at once, or not."""
    bodies = [msgspec.json.encode(one) for one in events]
    read_back = [one for body in bodies for one in decode_events(body)]
    keys = [routing_key(one["type"]) if honest else "task.started" for one in events]
    rows = Rows("redis")
    logged = [one for key, body in zip(keys, bodies, strict=True) for one in as_logged(body, key=key)]
    heard = rows.add(logged)
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


@given(st.lists(wire_events(), min_size=1, max_size=6), st.booleans())
def test_lists_of_one_type_as_our_nodes_log_them_make_the_rows_of_the_reference(
    events: list[dict[str, Any]], honest: bool
) -> None:
    """Also if a list has something strange in it, or its routing key does not say what it holds."""
    bodies: dict[str, list[dict[str, Any]]] = {}
    for one in events:
        bodies.setdefault(routing_key(one["type"]) if honest else "task.started", []).append(one)
    logged = [one for key, told in bodies.items() for one in as_logged(msgspec.json.encode(told), key=key)]
    rows = Rows("redis")
    rows.add(logged)
    read_back = [one for entry in logged for one in decode_events(entry.body)]
    assert ordered(made(rows)) == ordered(expected(read_back))


def test_events_of_one_kind_are_read_together_and_a_strange_one_spoils_none() -> None:
    told = [
        event(kind, timestamp=float(n)) for n in range(2 * TOGETHER_MAX) for kind in ("received", "succeeded")
    ]
    told[TOGETHER_MAX]["own"] = 1
    rows = Rows("redis")
    heard = rows.add(
        [
            one
            for told_one in told
            for one in as_logged(msgspec.json.encode(told_one), key=routing_key(told_one["type"]))
        ]
    )
    assert not heard.unreadable
    assert ordered(made(rows)) == ordered(expected(told))


HEAD, TAIL = b'{"type":"task-started","hostname":"w"', b'"pid":1,"clock":2,"timestamp":3.5,"uuid":"a"}'
STARTED = HEAD + b"," + TAIL
TWO = STARTED + b"," + STARTED


@pytest.mark.parametrize(
    "bodies",
    [
        [TWO],
        [TWO, HEAD, TAIL],  # as many events as bodies, once a comma is put between
        [TWO, HEAD[:-1] + b"}", b'{",' + TAIL],  # the same, within a string
        [HEAD + b"," + TAIL[:-1], b"}"],
        [TWO, b""],
    ],
)
def test_bodies_that_are_events_only_when_put_together_are_none(bodies: list[bytes]) -> None:
    rows = Rows("redis")
    heard = rows.add(as_logged(*bodies, key="task.started"))
    assert [one.entry.body for one in heard.unreadable] == bodies
    assert rows.count == 0


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
@pytest.mark.parametrize("key", ["task.sent", "x"])
def test_what_is_no_event_is_set_aside_with_the_reason(body: bytes, key: str) -> None:
    rows = Rows("redis")
    (unreadable,) = rows.add(as_logged(body, key=key)).unreadable
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
    rows, sequences = Rows("redis"), Sequences()
    heard = rows.add(as_logged(*[msgspec.json.encode(one) for one in told]))
    assert (heard.strangers, heard.arrived) == ({"celery@a", "celery@b"}, {"celery@a"})
    account_numbers(sequences, rows.table(), 0.0)
    assert sequences.known() == [KnownSender("u1@a", 1, 5, 10), KnownSender("umbel@c", 1, 5, 9)]


def test_what_a_worker_logged_at_once_may_be_read_in_parts() -> None:
    """It lies in the log by type, so a part has every other number, or every third."""
    told = Teller().tell(BATCH_MAX)
    entries = [LoggedEvent(place, AT, key, body) for place, (key, body) in enumerate(by_type(told)[0])]
    for cut in range(1, len(entries)):
        sequences = Sequences()
        for part in (entries[:cut], entries[cut:]):
            rows = Rows("redis")
            rows.add(part)
            account_numbers(sequences, rows.table(), 0.0)
        assert sequences.settled(99.0) == []
        assert [one.highest for one in sequences.known()] == [BATCH_MAX]


_numbers = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 12)), max_size=20)


@given(st.lists(_numbers, max_size=4))
def test_numbers_of_a_table_count_as_they_do_one_by_one(batches: list[list[tuple[str, int]]]) -> None:
    """Missing, late, twice, in whatever order: the same gaps are told."""
    by_table, one_by_one = Sequences(), Sequences()
    for batch in batches:
        rows = Rows("redis")
        for name, number in batch:
            told = event("started", hostname=name, pid=1, inc=5, seq=number, timestamp=number / 1e6)
            rows.add(as_logged(msgspec.json.encode(told)))
        account_numbers(by_table, rows.table(), 0.0)
        for name, number in sorted(batch):
            one_by_one.saw((name, 1, 5), [(number, number, number)], 0.0)
    assert sorted(by_table.settled(99.0), key=repr) == sorted(one_by_one.settled(99.0), key=repr)
    assert sorted(by_table.known(), key=repr) == sorted(one_by_one.known(), key=repr)
