"""What is read from a broker is typed and bounded: whatever was accepted, everything behind can hold (N1)."""

import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.wire import strategies
from umbel.brokers.sqlite import messages as sqlite_messages
from umbel.brokers.sqlite import publishing
from umbel.errors import BadMessage, WireError
from umbel.pools.interface import Job
from umbel.pools.prefork.messages import ToChild
from umbel.wire.call import decode_task, read_headers
from umbel.wire.envelope_redis import seal, unseal
from umbel.wire.event import decode_events, encode_event
from umbel.wire.frames import FrameReader, JobBatch, encode_frame
from umbel.wire.message import Message, parse_instant
from umbel.wire.task import to_v2

HUGE = [10**20, 2**63, 2**31, -1, -(2**63) - 1, 10**400]
ODD: list[Any] = [
    *HUGE,
    *(
        1e308,
        -1e308,
        0.5,
        1.0,
        True,
        None,
        [],
        {},
        [[]],
        [None, None, None],
        [None, 10**30],
        ["1", "2"],
        [0, 0],
    ),
    *("", "\0", "a\0b", "x" * 256, "ä" * 200, "x" * 2000, "\x1b[2J\n\u202e", "1e400", "nan", "-1"),
    *("0001-01-01T00:00:00", "0001-01-01T00:00:00+12:00", "9999-12-31T23:59:59-12:00", "99999-01-01"),
    {"__type__": "datetime", "__value__": "2020-01-01T00:00:00"},
    {"__type__": "decimal", "__value__": "1e999999"},
]
odd = st.sampled_from(ODD) | strategies.plain_values
HEADERS = [
    *("lang", "task", "id", "shadow", "eta", "expires", "group", "group_index", "retries", "timelimit"),
    *("root_id", "parent_id", "argsrepr", "kwargsrepr", "origin", "ignore_result", "replaced_task_nesting"),
    *("stamped_headers", "stamps", "compression", "redelivered", "umbel_unique", "mine"),
]
header_maps = st.dictionaries(st.sampled_from(HEADERS), odd, max_size=5).map(
    lambda odd: {"task": "t", "id": "1", **odd}
)
OPTIONS = [
    *("task_id", "queue", "time_limit", "countdown", "eta", "expires", "priority", "retries", "reply_to"),
    *("group_id", "group_index", "headers", "link", "chain", "chord", "stamps", "stamped_headers", "mine"),
]
signatures = st.fixed_dictionaries(
    {"task": st.just("t") | odd},
    optional={"options": st.dictionaries(st.sampled_from(OPTIONS), odd, max_size=3)},
)
embeds = st.dictionaries(
    st.sampled_from(["callbacks", "errbacks", "chain", "chord"]),
    st.lists(signatures, max_size=2) | signatures | odd,
)
bodies = (
    st.tuples(st.just([]), st.just({}), embeds).map(list)
    | odd
    | st.fixed_dictionaries({"task": odd, "id": odd}, optional=dict.fromkeys(("retries", "eta", "args"), odd))
)
PROPERTIES = ("priority", "expiration", "correlation_id", "reply_to", "body_encoding", "delivery_info")


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def assert_that_everything_behind_can_hold(message: Message) -> None:
    """As the worker does with a message: open it, frame it, show it, tell of it, park it."""
    try:
        v2 = to_v2(message)
        headers = read_headers(v2)
        instants = [parse_instant(text) for text in (headers.eta, headers.expires) if text]
    except WireError as error:
        str(error).encode()
        return
    hard, soft = headers.timelimit
    frame = encode_frame(JobBatch(1, (Job(1, headers.task, headers.id, "q", v2, soft, hard),)))
    reader: FrameReader[JobBatch[Job]] = FrameReader(ToChild)
    ((job,),) = [batch.jobs for batch in reader.feed(bytes(frame))]
    assert job.message == v2
    for instant in instants:
        datetime.fromtimestamp(instant, UTC).isoformat()
    event = {"type": "task-received", "uuid": headers.id, **msgspec.to_builtins(headers)}
    decode_events(encode_event(event))
    assert sqlite_messages.decode(publishing.encode(v2)) == v2
    assert unseal(seal(v2, "q", "tag")).message == v2
    try:
        decode_task(v2)
    except WireError as error:
        str(error).encode()


@given(headers=strategies.any_bytes, body=strategies.any_bytes)
@strategies.quick
def test_any_bytes_are_a_message_that_can_be_handled_or_an_error_of_the_wire(
    headers: bytes, body: bytes
) -> None:
    assert_that_everything_behind_can_hold(Message(headers, body))


@given(headers=header_maps, body=bodies)
@strategies.quick
@example(headers={"task": "t", "id": "1", "timelimit": [10**30, None]}, body=[[], {}, None])
@example(headers={"task": "t", "id": "1"}, body={"__type__": "datetime", "__value__": "2020-01-01T00:00:00"})
@example(headers={"task": "t", "id": "1", "retries": -(10**30)}, body=[[], {}, None])
@example(headers={}, body={"task": "t", "id": "1", "retries": 10**30})
def test_odd_headers_and_bodies_can_be_handled_or_are_refused(headers: Any, body: Any) -> None:
    assert_that_everything_behind_can_hold(Message(as_json(headers), as_json(body)))


@given(properties=st.dictionaries(st.sampled_from(PROPERTIES), odd, max_size=3), mark=odd, starts=odd)
@strategies.quick
@example(properties={"priority": 10**20}, mark={}, starts=0)
@example(properties={"expiration": "1e30"}, mark={}, starts=0)
@example(properties={}, mark={}, starts=10**20)
def test_odd_envelopes_can_be_handled_or_are_refused(properties: Any, mark: Any, starts: Any) -> None:
    mark = {**mark, "starts": starts} if isinstance(mark, dict) else mark
    envelope = {"umbel": mark, "body": "e30=", "headers": {"task": "t", "id": "1"}, "properties": properties}
    opened = unseal(as_json(envelope))
    msgspec.msgpack.encode(opened)
    assert_that_everything_behind_can_hold(opened.message)


@given(strategies.any_bytes)
@strategies.quick
def test_whatever_lies_in_a_queue_of_redis_or_sqlite_is_opened(data: bytes) -> None:
    for message in (unseal(data).message, sqlite_messages.decode(data)):
        assert_that_everything_behind_can_hold(message)


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"timelimit": [10**30, None]}, "timelimit"),
        ({"timelimit": [-1, None]}, "timelimit"),
        ({"timelimit": [1]}, "timelimit"),
        ({"retries": -1}, "retries"),
        ({"retries": 2**31}, "retries"),
        ({"retries": True}, "retries"),
        ({"group_index": 2**40}, "group_index"),
        ({"eta": 5}, "eta"),
        ({"expires": 5}, "expires"),
        ({"id": "a\0b"}, r"'a\\x00b' is not a valid id"),
        ({"id": "ä" * 200}, "is not a valid id"),
        ({"id": "x" * 256}, "'id'"),
        ({"root_id": "\0"}, "is not a valid id"),
        ({"task": "a\0b"}, "'task'"),
        ({"task": "x" * 1025}, "'task'"),
        ({"umbel_unique": 5}, "umbel_unique"),
        ({"origin": 5}, "origin"),
        ({"compression": 5}, "compression"),
        ({"stamped_headers": [5]}, "stamped_headers"),
    ],
)
def test_a_header_out_of_its_bounds_is_named(headers: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadMessage, match=reason):
        read_headers(Message(as_json({"task": "t", "id": "1", **headers}), b"[[],{},null]"))


def test_a_time_limit_of_zero_is_none_as_celery_has_it() -> None:
    headers = read_headers(Message(as_json({"task": "t", "id": "1", "timelimit": [0, 0]}), b""))
    assert headers.timelimit == (0, 0)


@pytest.mark.parametrize(
    "option", [{"time_limit": 10**30}, {"queue": "x" * 256}, {"task_id": 5}, {"retries": -1}]
)
def test_a_signature_that_cannot_be_sent_is_found_before_its_task_runs(option: dict[str, Any]) -> None:
    body = [[], {}, {"callbacks": [{"task": "next", "options": option}]}]
    with pytest.raises(BadMessage, match=f"signature of 'next' has the option '{next(iter(option))}'"):
        decode_task(Message(as_json({"task": "t", "id": "1"}), as_json(body)))
