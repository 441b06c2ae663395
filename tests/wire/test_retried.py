"""C3: the message of a failed task as a new task: same arguments, another id, and nothing that has ended."""

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.errors import BadMessage, WireError
from umbel.wire.call import Embed, TaskCall, TaskHeaders, decode_task
from umbel.wire.message import Message
from umbel.wire.retried import retried, retry_of
from umbel.wire.steps import SignatureMap, step_map
from umbel.wire.task import encode_task

ACCEPT = ("json", "msgpack")


def derive(old: str) -> str:
    return f"new-{old}"


def step(task_id: str, **options: Any) -> SignatureMap:
    return {
        "task": "next",
        "args": [],
        "kwargs": {"tasks": [{"task": "mine", "options": {"task_id": "not ours"}}]},
        "options": {"task_id": task_id, **options},
        "subtask_type": None,
        "immutable": False,
    }


def call(embed: Embed | None = None, **headers: Any) -> TaskCall:
    of = TaskHeaders(**{"task": "shop.pay", "id": "t1", "root_id": "r1", "parent_id": "p1", **headers})
    return TaskCall(of, [1, "zwei"], {"x": None}, embed or Embed(), {"tenant": "a"}, "asker", 3)


def test_it_is_a_new_task_that_names_the_old_one_and_keeps_the_root() -> None:
    old = encode_task(
        call(
            retries=4,
            eta="2026-11-15T10:00:00+00:00",
            expires="2026-11-15T11:00:00+00:00",
            group="g",
            group_index=2,
            umbel_unique="key",
        ),
        expiration_ms=1000,
    )
    new = decode_task(retried(old, derive, accept=ACCEPT))
    headers = new.headers
    assert (headers.task, headers.id) == ("shop.pay", "new-t1")
    assert (headers.root_id, headers.parent_id) == ("r1", "p1")
    assert (headers.retries, headers.eta, headers.expires, headers.group) == (0, None, None, None)
    assert (headers.group_index, headers.umbel_unique) == (None, msgspec.UNSET)
    assert (new.args, new.kwargs, new.priority, new.reply_to) == ([1, "zwei"], {"x": None}, 3, "asker")
    assert new.extra == {"tenant": "a", "retry_of": "t1"}
    message = retried(old, derive, accept=ACCEPT, reply_to="me")
    assert (message.correlation_id, message.reply_to, message.expiration_ms) == ("new-t1", "me", None)
    assert (retry_of(message.headers), retry_of(old.headers)) == ("t1", None)


def test_a_retry_of_a_retry_names_that_one() -> None:
    first = retried(encode_task(call(root_id=None)), derive, accept=ACCEPT)
    second = decode_task(retried(first, derive, accept=ACCEPT))
    assert (second.headers.id, second.headers.root_id) == ("new-new-t1", "t1")
    assert second.extra["retry_of"] == "new-t1"


@pytest.mark.parametrize("serializer", ["json", "msgpack"])
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_later_steps_get_new_ids_and_the_chord_that_failed_is_left(
    serializer: str, compression: str | None
) -> None:
    chord = step("body")
    parts = {**step("c"), "subtask_type": "group", "kwargs": {"tasks": [step("c1"), step("c2")]}}
    last = step("end", chord=chord, group_id="g", group_index=1)
    embed = Embed(callbacks=[step("cb")], errbacks=[step("eb")], chain=[last, parts], chord=chord)  # type: ignore[list-item]
    old = encode_task(call(embed, group="g"), serializer=serializer, compression=compression)
    new = decode_task(retried(old, derive, accept=ACCEPT), accept=ACCEPT)
    assert (new.args, new.kwargs) == ([1, "zwei"], {"x": None})
    assert new.embed.callbacks == [step("cb")] and new.embed.errbacks == [step("new-eb")]
    assert new.embed.chord is None and new.embed.chain is not None
    assert step_map(new.embed.chain[0]) == step("new-end")
    fresh = step_map(new.embed.chain[1])
    assert (fresh["options"]["task_id"], fresh["kwargs"]["tasks"]) == (
        "new-c",
        [step("new-c1"), step("new-c2")],
    )


def test_what_a_later_step_brings_gets_new_ids_too() -> None:
    """A step may be followed by tasks of its own; a chord is among the parts of a group or a body."""
    inner = {**step("i"), "kwargs": {"header": [step("h")], "body": step("b")}, "subtask_type": "chord"}
    followed = step("n", link=[step("l")], link_error=[step("e")], chain=[step("c", chord=step("d"))])
    embed = Embed(chain=[inner, followed])  # type: ignore[list-item]
    new = decode_task(retried(encode_task(call(embed)), derive, accept=ACCEPT)).embed.chain
    assert new is not None
    assert step_map(new[0])["kwargs"] == {"header": [step("new-h")], "body": step("new-b")}
    options = step_map(new[1])["options"]
    assert (options["link"], options["link_error"]) == ([step("new-l")], [step("new-e")])
    assert options["chain"] == [step("new-c", chord=step("new-d"))]


@pytest.mark.parametrize("value", [b'""', b"7", b"null", b"[]"])
def test_what_is_no_id_names_no_task(value: bytes) -> None:
    assert retry_of(b'{"retry_of": %b}' % value) is None
    assert retry_of(b'{"retry_of": "t1"}') == "t1"


@pytest.mark.parametrize("body", [{"args": []}, [1, 2], 7, "abc"])
def test_a_body_of_another_shape_is_refused(body: Any) -> None:
    message = Message(
        b'{"task": "t", "id": "t1"}', msgspec.msgpack.encode(body), "application/x-msgpack", "binary"
    )
    with pytest.raises(BadMessage, match="the body must be"):
        retried(message, derive, accept=ACCEPT)


def test_arguments_stay_the_bytes_that_they_were() -> None:
    plain = encode_task(call())
    assert retried(plain, derive, accept=ACCEPT).body is plain.body
    odd = b'[[1.0, 1e400,  "\\u00e4"],{}, {"chain": null, "chord": {"task": "b"}, "errbacks": null}]'
    body = retried(Message(plain.headers, odd), derive, accept=ACCEPT).body
    assert body.startswith(b'[[1.0, 1e400,  "\\u00e4"],{},{')


@pytest.mark.parametrize(
    "message",
    [
        Message(b"{}", b"[[],{},{}]"),
        Message(b"not JSON", b"[[],{},{}]"),
        Message(b'{"task": "t", "id": ""}', b"[[],{},{}]"),
        Message(b'{"task": "t", "id": "t1"}', b"[1]"),
        Message(b'{"task": "t", "id": "t1"}', b"", "application/x-python-serialize", "binary"),
    ],
)
def test_what_is_no_task_is_refused(message: Message) -> None:
    with pytest.raises(WireError):
        retried(message, derive, accept=ACCEPT)


@given(headers=st.binary(), body=st.binary(), content=st.sampled_from(["application/json", "text/plain"]))
def test_whatever_came_it_is_retried_or_refused(headers: bytes, body: bytes, content: str) -> None:
    retry_of(headers)
    for one in (Message(headers, body, content), Message(b'{"task": "t", "id": "t1"}', body, content)):
        with suppress(WireError):
            retried(one, derive, accept=ACCEPT)
