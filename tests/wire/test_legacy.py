import json

import msgspec
import pytest

from tests.wire import examples
from umbel.errors import BadMessage
from umbel.wire.call import decode_task, read_headers
from umbel.wire.compression import compress
from umbel.wire.message import Message
from umbel.wire.task import encode_task, to_v2


def v1_of(body: object, headers: object = ()) -> Message:
    return Message(json.dumps(dict(headers or {})).encode(), json.dumps(body).encode())  # type: ignore[call-overload]


def test_the_captured_v1_message_becomes_v2() -> None:  # wire 1.9
    old = Message(b"{}", examples.V1_BODY, priority=3, reply_to="r", expiration_ms=5)
    message = to_v2(old)
    headers = read_headers(message)
    assert (headers.task, headers.id) == ("wapp.add", "d9602d76-be18-4c4b-938b-7718f3f7d519")
    assert headers.eta == "2026-11-15T00:46:04.720981+00:00"
    assert headers.expires == "2026-11-15T00:46:53.720981+00:00"
    assert (headers.argsrepr, headers.kwargsrepr) == ("(4, 5)", "{}")
    assert headers.root_id == headers.id == message.correlation_id
    assert (message.priority, message.reply_to, message.expiration_ms) == (3, "r", 5)
    assert json.loads(message.body) == [
        [4, 5],
        {},
        dict.fromkeys(("callbacks", "errbacks", "chain", "chord")),
    ]
    assert decode_task(message).args == [4, 5]


def test_the_smallest_v1_message_is_enough() -> None:
    call = decode_task(to_v2(v1_of({"task": "t", "id": "1", "args": [1], "kwargs": {"x": 2}})))
    assert (call.args, call.kwargs) == ([1], {"x": 2})


def test_a_taskset_is_the_group_of_v1() -> None:
    body = {"task": "t", "id": "1", "taskset": "new", "group": "old", "retries": None, "timelimit": None}
    assert read_headers(to_v2(v1_of(body))).group == "new"


def test_follow_ups_and_custom_headers_of_v1_are_kept() -> None:
    signature = examples.CHORD_SIGNATURE
    body = {"task": "t", "id": "1", "callbacks": [signature], "chord": signature}
    call = decode_task(to_v2(v1_of(body, {"tenant": "a", "retries": 7})))
    assert call.embed.callbacks == [signature]
    assert call.embed.chord == signature
    assert call.extra == {"tenant": "a"}
    assert call.headers.retries == 0  # what v1 says stands in the body


def test_a_packed_v1_message_is_unpacked() -> None:
    mime, body = compress(examples.V1_BODY, "gzip")
    message = to_v2(Message(json.dumps({"compression": mime}).encode(), body))
    assert decode_task(message).args == [4, 5]


def test_typed_values_of_v1_are_kept() -> None:
    typed = json.loads(examples.TYPED)
    message = to_v2(v1_of({"task": "t", "id": "1", "args": [typed], "kwargs": {}}))
    assert json.loads(message.body)[0] == [typed]


def test_a_v2_message_is_returned_as_it_is() -> None:
    for message in (examples.TASK, encode_task(decode_task(examples.TASK), serializer="pickle")):
        assert to_v2(message) is message


def test_a_hybrid_gets_a_body_of_v2() -> None:  # wire 1.9
    hybrid = msgspec.structs.replace(examples.TASK, body=b' {"args": [2], "kwargs": {"y": 3}, "chord": null}')
    message = to_v2(hybrid)
    assert message.headers == examples.HEADERS
    assert json.loads(message.body) == json.loads(examples.BODY)
    assert decode_task(message) == decode_task(hybrid)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (5, "v1 (n)?or v2"),
        ({}, "v1 (n)?or v2"),
        ({"task": "t"}, "v1 (n)?or v2"),
        ({"task": "t", "id": 5}, "v1 (n)?or v2"),
        ({"task": "", "id": "1"}, "empty task name or id"),
        ({"task": "t", "id": "1", "args": "ab"}, "args of the call must be a list, not 'ab'"),
        ({"task": "t", "id": "1", "kwargs": [1]}, r"kwargs of the call must be a map of names, not \[1\]"),
        ({"task": "t", "id": "1", "callbacks": 5}, "callbacks of the call must be a list, not 5"),
        ({"task": "t", "id": "1", "eta": 5}, "v1 (n)?or v2"),
    ],
)
def test_what_is_neither_v1_nor_v2_is_refused(body: object, problem: str) -> None:
    with pytest.raises(BadMessage, match=problem):
        to_v2(v1_of(body))


def test_v1_is_read_as_json_only() -> None:
    message = Message(b"{}", b"\x80", "application/x-python-serialize", "binary")
    with pytest.raises(
        BadMessage, match="'application/x-python-serialize': a v1 message is read as JSON only"
    ):
        to_v2(message)
