import datetime
import json
import pickle
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire import examples, strategies
from umbel.errors import BadMessage, BadValue, TooLarge, WireError
from umbel.wire.call import Embed, TaskCall, TaskHeaders, decode_task, read_headers
from umbel.wire.message import Limits, Message
from umbel.wire.steps import step_map
from umbel.wire.task import encode_task, to_v2


def a_call(*args: Any, **kwargs: Any) -> TaskCall:
    return TaskCall(TaskHeaders(task="t", id="1"), list(args), kwargs)


def message_of(headers: object, body: object = ([], {}, {})) -> Message:
    return Message(json.dumps(headers).encode(), json.dumps(body).encode())


# ---- the captured message (wire 1.3, 1.4) ----------------------------------------------------------


def test_the_captured_message_is_read() -> None:
    call = decode_task(examples.TASK)
    assert call.args == [2]
    assert call.kwargs == {"y": 3}
    assert call.embed == Embed()
    assert call.extra == {}
    assert call.reply_to == examples.REPLY_TO
    assert call.headers == TaskHeaders(
        task="wapp.add",
        id=examples.TASK_ID,
        root_id=examples.TASK_ID,
        argsrepr="(2,)",
        kwargsrepr="{'y': 3}",
        origin="gen31794@vm",
    )


def test_the_captured_call_is_written_with_the_same_headers_in_the_same_order() -> None:
    message = encode_task(decode_task(examples.TASK))
    written, captured = json.loads(message.headers), json.loads(examples.HEADERS)
    assert list(written.items()) == list(captured.items())
    assert json.loads(message.body) == json.loads(examples.BODY)
    assert message.correlation_id == examples.TASK_ID  # wire 1.2
    assert (message.content_type, message.content_encoding) == ("application/json", "utf-8")
    assert (message.priority, message.reply_to) == (0, examples.REPLY_TO)


def test_what_the_caller_leaves_out_is_filled_in() -> None:
    call = TaskCall(
        TaskHeaders(task="wapp.add", id=examples.TASK_ID, origin="gen31794@vm"),
        [2],
        {"y": 3},
        reply_to=examples.REPLY_TO,
    )
    assert encode_task(call) == encode_task(decode_task(examples.TASK))


def test_the_captured_chain_is_read_and_written() -> None:  # wire 1.7
    message = message_of({"task": "wapp.add", "id": "1"}, [[1, 2], {}, examples.CHAIN_EMBED])
    call = decode_task(message)
    assert call.embed.chain is not None
    assert [step_map(step)["args"] for step in call.embed.chain] == [[4], [3]]
    assert json.loads(encode_task(call).body) == json.loads(message.body)


@given(
    args=st.lists(strategies.values, max_size=3),
    kwargs=strategies.kwargs,
    extra=st.dictionaries(strategies.text.map("x-{}".format), strategies.values, max_size=2),
    stamps=strategies.kwargs,
    serializer=st.sampled_from(["json", "pickle"]),
    compression=st.sampled_from([None, "gzip", "bzip2", "lzma"]),
    retries=st.integers(0, 2**31 - 1),
    priority=st.integers(0, 9),
)
@strategies.quick
def test_a_call_arrives_as_it_was_sent(
    args: list[Any],
    kwargs: dict[str, Any],
    extra: dict[str, Any],
    stamps: dict[str, Any],
    serializer: str,
    compression: str | None,
    retries: int,
    priority: int,
) -> None:
    headers = TaskHeaders(task="t", id="1", retries=retries, stamps=stamps, timelimit=(60, 30.5))
    sent = TaskCall(headers, args, kwargs, extra=extra, reply_to="r", priority=priority)
    message = encode_task(sent, serializer=serializer, compression=compression, expiration_ms=5)
    assert message.expiration_ms == 5
    assert to_v2(message) is message
    read = decode_task(message, accept=("json", "pickle"))
    assert read_headers(message) == read.headers
    assert (read.args, read.kwargs, read.extra) == (args, kwargs, extra)
    assert (read.reply_to, read.priority, read.embed) == ("r", priority, Embed())
    assert msgspec.structs.replace(read.headers, root_id=None, argsrepr="", kwargsrepr="") == (
        msgspec.structs.replace(headers, compression=read.headers.compression)
    )


def test_msgpack_carries_a_whole_call() -> None:
    sent = a_call(b"\xff", 1, x=[None])
    sent.embed.chain = []
    message = encode_task(sent, serializer="msgpack", compression="gzip")
    assert message.content_type == "application/x-msgpack"
    assert message.content_encoding == "binary"
    read = decode_task(message, accept=["msgpack"])
    assert (read.args, read.kwargs, read.embed.chain) == ([b"\xff", 1], {"x": [None]}, [])


def test_compression_is_named_in_a_header_and_not_inherited() -> None:  # wire 1.5
    packed = encode_task(a_call(1), compression="gzip")
    assert json.loads(packed.headers)["compression"] == "application/x-gzip"
    assert packed.body[:2] == b"\x78\x9c"
    again = encode_task(decode_task(packed))
    assert "compression" not in json.loads(again.headers)
    assert decode_task(again).args == [1]


def test_the_mark_of_a_redelivered_copy_is_read_but_not_sent_on() -> None:
    call = decode_task(message_of({"task": "t", "id": "1", "redelivered": True}))
    assert call.headers.redelivered is True
    assert "redelivered" not in json.loads(encode_task(call).headers)


# ---- what peers write otherwise --------------------------------------------------------------------


def test_only_name_and_id_are_needed() -> None:
    assert read_headers(message_of({"task": "t", "id": "1"})) == TaskHeaders(task="t", id="1")


def test_null_means_not_set() -> None:
    nulls = dict.fromkeys(TaskHeaders.__struct_fields__)
    headers = read_headers(message_of({**nulls, "task": "t", "id": "1"}))
    assert (headers.retries, headers.timelimit, headers.stamps) == (0, (None, None), {})
    assert headers.ignore_result is None  # here null is a value of its own


def test_headers_of_the_caller_reach_the_task() -> None:
    headers = {"task": "t", "id": "1", "tenant": "a", "at": {"__type__": "date", "__value__": "2026-01-02"}}
    assert decode_task(message_of(headers)).extra == {"tenant": "a", "at": datetime.date(2026, 1, 2)}


@pytest.mark.parametrize("embed", [None, {}, {"chord": None}, {"unheard": "of"}])
def test_an_embed_may_be_empty(embed: object) -> None:  # wire 1.4
    assert decode_task(message_of({"task": "t", "id": "1"}, [[], {}, embed])).embed == Embed()


@pytest.mark.parametrize(
    ("headers", "problem"),
    [
        ({}, "the headers have no 'task', so this is not a message of protocol v2"),
        ([], "headers of the message must be a map"),
        ({"task": "t"}, "missing required field `id`"),
        ({"task": "", "id": "1"}, "empty task name or id"),
        ({"task": "t", "id": ""}, "empty task name or id"),
        ({"task": 5, "id": "1"}, r"header 'task' is 5: Expected `str`, got `int`"),
        ({"task": "t", "id": "1", "retries": "many"}, r"header 'retries' is 'many': Expected `int`"),
        ({"task": "t", "id": "1", "timelimit": [1]}, r"header 'timelimit' is \[1\]"),
        ({"task": "t", "id": "1", "stamps": []}, "header 'stamps' is"),
    ],
)
def test_headers_that_are_not_v2_are_refused_with_the_value(headers: object, problem: str) -> None:
    with pytest.raises(BadMessage, match=problem):
        read_headers(message_of(headers))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (5, "the body cannot be decoded"),
        ([], "the body cannot be decoded"),
        ([[], {}], "the body cannot be decoded"),
        ([[], {}, {}, 1], "the body cannot be decoded"),
        (["ab", {}, {}], "the body cannot be decoded"),
        ([[], [], {}], "the body cannot be decoded"),
        ([[], {}, []], "the body cannot be decoded"),
        ([[], {}, {"chord": []}], "a signature must be a map"),
        ([[], {}, {"chain": {}}], "chain of the call must be a list"),
        ([[], {}, {"callbacks": [{"task": 5}]}], "a signature must name its task"),
        ([[{"__type__": "x", "__value__": 1}], {}, {}], "unknown __type__ 'x'"),
    ],
)
def test_a_body_of_another_shape_is_refused(body: object, problem: str) -> None:
    with pytest.raises(BadMessage, match=problem):
        decode_task(message_of({"task": "t", "id": "1"}, body))


class Unshowable:
    def __repr__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize("call", [Unshowable(), [Unshowable()], [[], {Unshowable: 1}, {}], ["ab", {}, {}]])
def test_a_pickled_body_of_another_shape_is_refused(call: object) -> None:
    sent = encode_task(a_call(), serializer="pickle")
    with pytest.raises(BadMessage, match="must be"):
        decode_task(msgspec.structs.replace(sent, body=pickle.dumps(call)), accept=["pickle"])


def test_content_that_is_not_accepted_is_refused_unread() -> None:  # wire 1.10
    message = encode_task(a_call(1), serializer="pickle")
    with pytest.raises(BadMessage, match=r"application/x-python-serialize.*accept_content"):
        decode_task(message)
    with pytest.raises(BadMessage, match=r"application/json.*accept_content"):
        decode_task(encode_task(a_call(1)), accept=["pickle"])


def test_the_size_limit_counts_what_is_unpacked() -> None:
    message = encode_task(a_call("0" * 100_000), compression="gzip")
    with pytest.raises(TooLarge, match="unpack to more than the limit of 10000"):
        decode_task(message, limits=Limits(size_max_bytes=10_000))
    with pytest.raises(TooLarge, match="the body of the message has"):
        decode_task(encode_task(a_call("0" * 100_000)), limits=Limits(size_max_bytes=10_000))


def test_deep_headers_are_refused() -> None:
    for depth in (70, 40_000):
        deep = b"[" * depth + b"]" * depth
        with pytest.raises(TooLarge, match="limit of 64 levels"):
            read_headers(Message(b'{"task": "t", "id": "1", "stamps": {"x": ' + deep + b"}}", b""))
        with pytest.raises(TooLarge, match="limit of 64 levels"):
            decode_task(Message(b'{"task": "t", "id": "1", "x": ' + deep + b"}", b"[[], {}, {}]"))


# ---- what cannot be sent ---------------------------------------------------------------------------


def test_an_argument_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(BadValue, match=r"^args\[1\]: json cannot send a <class 'object'>"):
        encode_task(a_call(1, object()))
    with pytest.raises(BadValue, match=r"^kwargs\['x'\]\[0\]: json cannot send"):
        encode_task(a_call(x=[object()]))


def test_what_is_sent_is_never_too_deep_for_the_reader() -> None:
    value: list[Any] = []
    for _ in range(61):
        value = [value]
    assert decode_task(encode_task(a_call(value))).args == [value]
    with pytest.raises(TooLarge, match="args is nested deeper"):
        encode_task(a_call([value]))


def test_headers_that_cannot_be_sent_are_named() -> None:
    with pytest.raises(BadValue, match="custom headers must not use names of the protocol: eta, id"):
        encode_task(TaskCall(TaskHeaders(task="t", id="1"), extra={"id": 1, "eta": 2, "x": 3}))
    with pytest.raises(BadValue, match=r"headers\['x'\]: json cannot send"):
        encode_task(TaskCall(TaskHeaders(task="t", id="1"), extra={"x": object()}))
    with pytest.raises(BadValue, match=r"stamps\['x'\]: json cannot send"):
        encode_task(TaskCall(TaskHeaders(task="t", id="1", stamps={"x": object()})))
    with pytest.raises(BadValue, match="a header of 't' cannot be sent"):
        encode_task(TaskCall(TaskHeaders(task="t", id="\ud800")))


def test_an_unknown_way_of_sending_is_named() -> None:
    with pytest.raises(BadValue, match="serializer 'yaml' is unknown; choose json, msgpack, pickle"):
        encode_task(a_call(), serializer="yaml")
    with pytest.raises(BadValue, match="compression 'zstd'"):
        encode_task(a_call(), compression="zstd")


@given(
    headers=strategies.any_bytes, body=strategies.any_bytes, valid=st.sampled_from(["headers", "body", ""])
)
@strategies.quick
def test_any_bytes_are_a_message_or_refused(headers: bytes, body: bytes, valid: str) -> None:
    message = Message(
        examples.HEADERS if valid == "headers" else headers, examples.BODY if valid == "body" else body
    )
    with suppress(WireError):
        read_headers(message)
    with suppress(WireError):
        decode_task(message, accept=["json", "msgpack"])
    with suppress(WireError):
        rewritten = to_v2(message)
        assert to_v2(rewritten) is rewritten
