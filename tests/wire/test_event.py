import json
from contextlib import suppress
from types import MappingProxyType

import pytest
from hypothesis import given

from tests.wire import examples, strategies
from umbel.errors import BadMessage, TooLarge, WireError
from umbel.wire.event import (
    EVENTS_MAX,
    decode_events,
    encode_event,
    encode_events,
    group_of,
    routing_key,
    routing_key_of_list,
)


def test_the_captured_events_are_read() -> None:  # wire 4.1, 4.2
    assert decode_events(examples.HEARTBEAT) == [json.loads(examples.HEARTBEAT)]
    assert decode_events(examples.EVENT_LIST) == json.loads(examples.EVENT_LIST)


def test_an_event_is_written_as_captured() -> None:
    event = json.loads(examples.HEARTBEAT)
    assert list(json.loads(encode_event(event)).items()) == list(event.items())
    assert json.loads(encode_events([event, MappingProxyType(event)])) == [event, event]


def test_the_routing_key_is_the_type_with_dots() -> None:
    assert routing_key("worker-elect-ack") == "worker.elect.ack"
    assert routing_key("task-sent") == "task.sent"
    assert routing_key_of_list("task") == "task.multi"


def test_the_group_is_the_first_word() -> None:
    assert group_of("worker-elect-ack") == "worker"
    assert group_of("task-sent") == "task"
    assert group_of("task") == "task"


@given(strategies.kwargs)
@strategies.quick
def test_an_event_arrives_as_it_was_sent(fields: dict[str, object]) -> None:
    event = {**fields, "type": "task-custom"}
    assert decode_events(encode_event(event)) == [event]
    assert decode_events(encode_events([event, event])) == [event, event]


@given(strategies.any_bytes)
@strategies.quick
def test_any_bytes_are_events_or_refused(body: bytes) -> None:
    with suppress(WireError):
        decode_events(body)


@pytest.mark.parametrize(
    "body", [b"5", b"{}", b'{"type": 5}', b'[{"type": "a-b"}, {}]', b"[5]", b'"type"', b"null"]
)
def test_what_is_no_event_is_refused(body: bytes) -> None:
    with pytest.raises(BadMessage, match="an event must be a map with a 'type'"):
        decode_events(body)


def test_a_list_of_events_has_a_limit() -> None:
    event = {"type": "task-started"}
    assert len(decode_events(encode_events([event] * EVENTS_MAX))) == EVENTS_MAX
    with pytest.raises(TooLarge, match="10001 events; the limit is 10000"):
        decode_events(encode_events([event] * (EVENTS_MAX + 1)))
