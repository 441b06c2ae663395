"""Events as a node sends them: encoded once, whole in whatever lists they travel."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.errors import WireError
from umbel.events.stamp import EventStamper
from umbel.events.types import TASK_TYPES, TaskEvent, TaskFailed, TaskStarted, TaskSucceeded, tag_of
from umbel.events.view import EventReader
from umbel.protocol.clock import LamportClock
from umbel.wire.event import (
    LIST_MAX,
    LIST_MAX_BYTES,
    EncodedEvent,
    EventEncoder,
    by_type,
    decode_events,
    encode_event,
    encoded_fields,
    in_lists,
    routing_key,
)

_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_values: dict[str, st.SearchStrategy[Any]] = {
    "uuid": _texts.filter(bool),
    "retries": st.integers(0, 99),
    "runtime": st.floats(0, 1e6),
    "terminated": st.booleans(),
    "expired": st.booleans(),
    "requeue": st.booleans(),
}


@st.composite
def task_events(draw: st.DrawFn) -> tuple[type[TaskEvent], float, list[Any]]:
    of = draw(st.sampled_from(TASK_TYPES))
    values = [draw(_values.get(name, st.none() | _texts)) for name in encoded_fields(of)]
    return of, draw(st.floats(0, 2e9)), values


def stamper() -> EventStamper:
    return EventStamper(hostname="w@höst", pid=7, incarnation=1_700_000_000_000_000, clock=LamportClock())


@given(st.lists(task_events(), max_size=5))
def test_an_event_written_from_its_values_is_the_event_of_the_wire(
    told: list[tuple[type[TaskEvent], float, list[Any]]],
) -> None:
    teller, reference = EventEncoder(stamper()), stamper()
    for of, at, values in told:
        fields = dict(zip(encoded_fields(of), values, strict=True))
        stamped = reference.stamp(tag_of(of), fields, at=at)
        assert teller.tell_task(of, at, *values) == (routing_key(tag_of(of)), encode_event(stamped))
        read = EventReader().read(stamped)
        assert type(read) is of and read.extra is None  # every field is one of the vocabulary


def test_what_is_no_text_is_refused_and_its_number_is_missing() -> None:
    teller = EventEncoder(stamper())
    with pytest.raises(WireError, match="exception"):
        teller.tell_task(TaskFailed, 1.0, "t", 0, "\ud800", "")
    _, body = teller.tell_task(TaskStarted, 2.0, "t", 0)
    assert msgspec.json.decode(body)["seq"] == 2


def told_by(teller: EventEncoder, sizes: list[int]) -> list[EncodedEvent]:
    """Two types in turn, with results so long."""
    return [
        teller.tell_task(TaskSucceeded, 1.0, "t", 0, "x" * size, 0.1)
        if number % 2
        else teller.tell_task(TaskFailed, 1.0, "t", 0, "x" * size, "")
        for number, size in enumerate(sizes)
    ]


_sizes = st.lists(st.sampled_from([0, 10, LIST_MAX_BYTES // 3, 2 * LIST_MAX_BYTES]), max_size=8)


@given(_sizes)
def test_lists_for_listeners_keep_the_order_and_the_bytes(sizes: list[int]) -> None:
    told = told_by(EventEncoder(stamper()), sizes)
    lists = list(in_lists(told))
    assert b",".join(body[1:-1] for body, _ in lists) == b",".join(body for _, body in told)
    assert [len(decode_events(body)) for body, _ in lists] == [count for _, count in lists]


@given(_sizes)
def test_the_log_gets_the_same_bytes_by_type(sizes: list[int]) -> None:
    told = told_by(EventEncoder(stamper()), sizes)
    entries, counts = by_type(told)
    assert sum(counts) == len(told)
    for key in {key for key, _ in told}:
        logged = [body[1:-1] if body[:1] == b"[" else body for found, body in entries if found == key]
        assert b",".join(logged) == b",".join(body for found, body in told if found == key)
    for (_, body), count in zip(entries, counts, strict=True):
        assert len(decode_events(body)) == count
        assert count == 1 or len(body) <= LIST_MAX_BYTES + count + 1


def test_a_list_has_a_limit_of_events() -> None:
    told = told_by(EventEncoder(stamper()), [1] * (LIST_MAX * 2 + 2))
    assert [count for _, count in in_lists(told)] == [LIST_MAX, LIST_MAX, 2]
    assert by_type(told)[1] == [LIST_MAX, 1, LIST_MAX, 1]
