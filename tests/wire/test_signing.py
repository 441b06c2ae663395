"""What a signature covers, and that nothing else than what was signed is read."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from umbel.protocol.delivery.trust import Doubt, Doubted, Signed
from umbel.wire.message import Message, Outgoing
from umbel.wire.signing import HEADER, Keyring, key_problem, keyring_of, shown_keys
from umbel.wire.task import read_headers

NOW = 1_700_000_000.25
OLD, NEW = ("old", b"o" * 32), ("new", b"n" * 32)
RING = Keyring([NEW, OLD])


def message(**changes: Any) -> Message:
    headers = {"lang": "py", "task": "t.add", "id": "i1", "expires": None, "retries": 0, "root_id": "i1"}
    plain = Message(json.dumps(headers).encode(), b"[[1],{},{}]", correlation_id="i1", reply_to="r")
    return replace(plain, **changes)


def signed(ring: Keyring = RING, queue: str = "q") -> Message:
    return ring.sign_task(Outgoing(queue, message()), NOW).message


def doubt(checked: Message, queue: str = "q", ring: Keyring = RING) -> Doubt | None:
    proof, _ = ring.check_task(checked, queue)
    return proof.doubt if isinstance(proof, Doubted) else None


def test_a_signed_message_is_believed_and_says_when_it_was_signed() -> None:
    proof, checked = RING.check_task(signed(), "q")
    assert isinstance(proof, Signed)
    assert (proof.key_id, proof.at) == ("new", NOW)
    assert read_headers(checked).task == "t.add"


@pytest.mark.parametrize(
    "changed",
    [
        {"body": b"[[2],{},{}]"},
        {"body": b"[[1],{},{}"},
        {"content_type": "application/x-python-serialize"},
        {"content_encoding": "binary"},
        {"reply_to": "thief"},
        {"correlation_id": "i2"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_changed_part_is_noticed(changed: dict[str, Any]) -> None:
    assert doubt(replace(signed(), **changed)) is Doubt.FORGED


@pytest.mark.parametrize(
    ("name", "value"),
    [("task", "t.evil"), ("id", "i2"), ("expires", "2999-01-01T00:00:00+00:00"), ("retries", 1), ("more", 1)],
)
def test_a_changed_header_is_noticed(name: str, value: object) -> None:
    headers = json.loads(signed().headers) | {name: value}
    assert doubt(replace(signed(), headers=json.dumps(headers).encode())) is Doubt.FORGED


def test_a_header_that_is_there_twice_is_read_as_it_was_signed() -> None:
    twice = signed().headers.replace(b'"task":"t.add"', b'"task":"t.evil","task":"t.add"')
    proof, checked = RING.check_task(replace(signed(), headers=twice), "q")
    assert isinstance(proof, Doubted) or b"evil" not in checked.headers


def test_a_message_does_not_hold_in_another_queue() -> None:
    assert doubt(signed(), "other") is Doubt.FORGED


def test_parts_cannot_be_moved_from_one_place_to_the_next() -> None:
    one = RING.sign_task(Outgoing("ab", message(reply_to="c")), NOW).message
    assert doubt(replace(one, reply_to="bc"), "a") is Doubt.FORGED


def test_brokers_and_celery_may_write_the_headers_anew() -> None:
    headers = json.loads(signed().headers)
    rewritten = {"redelivered": True, **dict(reversed(headers.items()))}
    assert doubt(replace(signed(), headers=json.dumps(rewritten, indent=1).encode())) is None


def test_no_signature_is_not_a_wrong_one() -> None:
    assert doubt(message()) is Doubt.UNSIGNED
    assert doubt(message(headers=b"\xff")) is Doubt.UNSIGNED


@pytest.mark.parametrize("text", ["", "1", "1:new:1:00", "2:new:1:" + "0" * 64, 7, None, ["1"], {"a": 1}])
def test_whatever_stands_in_the_header_is_judged(text: object) -> None:
    headers = json.loads(message().headers) | {HEADER: text}
    assert doubt(message(headers=json.dumps(headers).encode())) in (Doubt.FORGED, Doubt.UNSIGNED)


def test_every_key_verifies_and_the_first_signs() -> None:
    before, after = Keyring([OLD]), Keyring([NEW])
    assert doubt(signed(before)) is None
    assert doubt(signed(), ring=after) is None
    assert doubt(signed(before), ring=after) is Doubt.FORGED


def test_a_renewed_message_has_another_signature_and_a_forged_one_is_not_renewed() -> None:
    outgoing = Outgoing("q", signed(), 5.0)
    again = RING.renewed(outgoing, NOW + 1)
    (first, _), (second, _) = RING.check_task(signed(), "q"), RING.check_task(again.message, "q")
    assert isinstance(first, Signed)
    assert isinstance(second, Signed)
    assert first.mark != second.mark
    assert again.not_before == 5.0
    forged = Outgoing("q", replace(signed(), body=b"[]"))
    assert RING.renewed(forged, NOW) is forged


def test_a_control_request_is_signed_as_a_whole() -> None:
    headers = RING.sign_request(b'{"clock":1,"expires":2.5}', b'{"method":"shutdown"}', NOW)
    assert isinstance(RING.check_request(headers, b'{"method":"shutdown"}'), Signed)
    assert isinstance(RING.check_request(headers, b'{"method":"shutdow"}'), Doubted)
    later = headers.replace(b'"expires":2.5', b'"expires":9.5')
    assert isinstance(RING.check_request(later, b'{"method":"shutdown"}'), Doubted)
    assert isinstance(RING.check_request(b"{}", b"{}"), Doubted)


def test_a_task_signature_is_no_control_signature() -> None:
    parts = message(
        headers=b"{}", body=b"{}", content_type="", content_encoding="", correlation_id="", reply_to=""
    )
    task = RING.sign_task(Outgoing("", parts), NOW).message
    assert isinstance(RING.check_request(task.headers, task.body), Doubted)


def test_no_text_shows_a_secret() -> None:
    keys = ("a:" + "s" * 16, "b:" + "t" * 16)
    assert repr(keyring_of(keys)) == "<Keyring a, b>"
    assert shown_keys(keys) == ["a:***", "b:***"]
    assert keyring_of(()) is None


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["nokey"], "ID:SECRET"),
        ([":" + "s" * 16], "the id of key 1"),
        (["a b:" + "s" * 16], "the id of key 1"),
        (["a:short"], "at least 16"),
        (["a:" + "s" * 16, "a:" + "t" * 16], "twice"),
    ],
)
def test_bad_keys_are_refused_without_a_word_of_the_secret(keys: list[str], says: str) -> None:
    problem = key_problem(keys)
    assert says in problem
    assert "short" not in problem
    assert "sss" not in problem
