"""The steps of a chain: cut out of one message and put into the next as bytes."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from tests.wire import strategies
from umbel.errors import BadMessage
from umbel.wire.call import Embed, TaskCall, TaskHeaders, decode_task
from umbel.wire.message import Message
from umbel.wire.steps import SignatureMap, answering, cut_steps, readable_steps, step_map
from umbel.wire.task import encode_task

HEADERS = TaskHeaders(task="app.add", id="1")


def step_of(task: str, args: list[Any], options: dict[str, Any]) -> SignatureMap:
    return {
        "task": task,
        "args": args,
        "kwargs": {},
        "options": options,
        "subtask_type": None,
        "immutable": False,
    }


steps = st.builds(
    step_of,
    st.sampled_from(["app.add", "app.größer", 'app."quoted"']),
    st.lists(strategies.values, max_size=2),
    st.dictionaries(st.sampled_from(["task_id", "queue"]), st.sampled_from(["t1", "t\\2", "tä"]), max_size=2),
)
tails = st.lists(steps, min_size=1, max_size=5)


def written(chain: list[Any], args: list[Any] | None = None) -> Message:
    return encode_task(TaskCall(HEADERS, [1] if args is None else args, {}, Embed(chain=chain)))


def as_maps(call: TaskCall) -> list[SignatureMap]:
    return [step_map(step) for step in call.embed.chain or ()]


@given(tails, st.lists(strategies.values, max_size=2))
def test_steps_passed_on_as_bytes_are_those_that_were_parsed_and_written_again(
    chain: list[SignatureMap], args: list[Any]
) -> None:
    call = decode_task(written(chain, args))
    assert as_maps(call) == chain
    assert call.embed.chain is not None
    remaining = list(call.embed.chain[:-1])
    assert all(isinstance(step, Raw) for step in remaining)
    raw = encode_task(TaskCall(HEADERS, args, {}, Embed(chain=remaining or None)))
    parsed = encode_task(
        TaskCall(HEADERS, args, {}, Embed(chain=[step_map(one) for one in remaining] or None))
    )
    assert raw.body == parsed.body


@given(tails)
def test_a_peer_that_writes_with_blanks_and_escapes_is_read_alike(chain: list[SignatureMap]) -> None:
    body = json.loads(written(chain).body)
    spaced = Message(b'{"task": "app.add", "id": "1"}', json.dumps(body, indent=1).encode())
    assert as_maps(decode_task(spaced)) == chain


@given(tails)
def test_another_serializer_gets_the_steps_as_values(chain: list[SignatureMap]) -> None:
    plain = [{**step, "args": [1]} for step in chain]
    call = decode_task(written(plain))
    packed = encode_task(call, serializer="msgpack")
    assert as_maps(decode_task(packed, accept=("msgpack",))) == plain


def test_an_argument_that_looks_like_a_chain_is_one_no_more_than_before() -> None:
    text = '"chain":[{"task":"evil"}]'
    call = decode_task(written([], [text, {"chain": [{"task": "evil"}]}]))
    assert call.args == [text, {"chain": [{"task": "evil"}]}] and not call.embed.chain


@pytest.mark.parametrize(
    "following", ["7", "null", '{"args": []}', '{"task": ""}', '{"task": "a", "args": 1}']
)
def test_a_next_step_that_is_none_is_refused_before_the_task_runs(following: str) -> None:
    body = b'[[1], {}, {"chain": [{"task": "b"}, %b]}]' % following.encode()
    with pytest.raises(BadMessage, match="signature"):
        decode_task(Message(b'{"task": "app.add", "id": "1"}', body))


def test_a_later_step_that_is_none_is_found_when_it_is_the_next() -> None:
    call = decode_task(
        Message(b'{"task": "app.add", "id": "1"}', b'[[1], {}, {"chain": [7, {"task": "b"}]}]')
    )
    assert call.embed.chain is not None
    assert readable_steps(call.embed.chain)[0] == 7
    with pytest.raises(BadMessage, match="a signature must be a map"):
        step_map(call.embed.chain[0])


def test_the_depth_of_what_is_not_a_step_is_limited_as_ever() -> None:
    deep = b"[" * 70 + b"]" * 70
    for body in (
        b'[[%b], {}, {"chain": [{"task": "b"}]}]' % deep,
        b'[[1], {}, {"chain": [{"task": "b", "args": [%b]}]}]' % deep,
        b'[[1], {}, {"chain": [{"task": "b"}], "callbacks": [{"task": "c", "args": [%b]}]}]' % deep,
    ):
        with pytest.raises(Exception, match="nested deeper than the limit"):
            decode_task(Message(b'{"task": "app.add", "id": "1"}', body))


def test_a_step_that_has_an_address_for_its_result_keeps_it() -> None:
    theirs, none = step_of("b", [], {"reply_to": "theirs"}), step_of("b", [{"reply_to": "x"}], {})
    for known in (theirs, Raw(json.dumps(theirs).encode())):
        assert answering(known, "ours") is known
    for unknown in (none, Raw(json.dumps(none).encode())):
        assert step_map(answering(unknown, "ours"))["options"] == {"reply_to": "ours"}


def test_a_body_without_steps_is_left_as_it_is() -> None:
    assert cut_steps(written([]).body) is None
    assert cut_steps(b'[[1], {}, {"chain": []}]') is None
    assert cut_steps(b'{"chain": [1]}') is None
    assert cut_steps(b'[[1], {}, {"chain": [}]') is None
