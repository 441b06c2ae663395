"""What a signature covers and is bound to, and that nothing else than what was signed is read."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from umbel.protocol.delivery.trust import ClusterId, Doubt, Doubted, Proof, Signed
from umbel.wire.call import read_headers
from umbel.wire.message import Message, Outgoing
from umbel.wire.signing import (
    BOUND,
    HEADER,
    Keyring,
    Signer,
    cluster_problem,
    key_problem,
    keyring_of,
    marked_unsigned,
    shown_keys,
    signer_of,
    split_voucher,
)

NOW = 1_700_000_000.25
OLD, NEW = ("old", b"o" * 32), ("new", b"n" * 32)
RING = Signer(Keyring([NEW, OLD]), ClusterId("here", 5.0))


def message(**changes: Any) -> Message:
    headers = {"lang": "py", "task": "t.add", "id": "i1", "expires": None, "retries": 0, "root_id": "i1"}
    plain = Message(json.dumps(headers).encode(), b"[[1],{},{}]", correlation_id="i1", reply_to="r")
    return replace(plain, **changes)


def at(cluster: str, *keys: tuple[str, bytes]) -> Signer:
    return signer_of(Keyring(keys or [NEW, OLD]), cluster)


def signed(ring: Signer = RING, queue: str = "q", **changes: Any) -> Message:
    return ring.sign_task(Outgoing(queue, message(**changes)), NOW).message


def proof_of(checked: Message, queue: str = "q", ring: Signer = RING) -> Proof:
    return ring.check_task(checked, queue)[0]


def doubt(checked: Message, queue: str = "q", ring: Signer = RING) -> Doubt | None:
    proof = proof_of(checked, queue, ring)
    return proof.doubt if isinstance(proof, Doubted) else None


def mark_of(checked: Message, queue: str = "q") -> str:
    proof = proof_of(checked, queue)
    assert isinstance(proof, Signed)
    return proof.mark


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
        {"priority": 9},
        {"properties": b'{"app_id":"a"}'},
        {"exchange": "x", "routing_key": "k"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_changed_part_is_noticed(changed: dict[str, Any]) -> None:
    assert doubt(replace(signed(), **changed)) is Doubt.FORGED


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("task", "t.evil"),
        ("id", "i2"),
        ("expires", "2999-01-01T00:00:00+00:00"),
        ("retries", 1),
        ("more", 1),
        (BOUND, "here/9//"),
        (BOUND, 7),
    ],
)
def test_a_changed_header_is_noticed(name: str, value: object) -> None:
    headers = json.loads(signed().headers) | {name: value}
    for separators in ((",", ":"), None):
        changed = json.dumps(headers, separators=separators).encode()
        assert doubt(replace(signed(), headers=changed)) is Doubt.FORGED


def test_a_header_that_is_there_twice_is_read_as_it_was_signed() -> None:
    twice = signed().headers.replace(b'"task":"t.add"', b'"task":"t.evil","task":"t.add"')
    proof, checked = RING.check_task(replace(signed(), headers=twice), "q")
    assert isinstance(proof, Doubted) or b"evil" not in checked.headers


def test_a_message_does_not_hold_in_another_queue() -> None:
    assert doubt(signed(), "other") is Doubt.FORGED


def test_parts_cannot_be_moved_from_one_place_to_the_next() -> None:
    one = RING.sign_task(Outgoing("ab", message(reply_to="c")), NOW).message
    assert doubt(replace(one, reply_to="bc"), "a") is Doubt.FORGED


@pytest.mark.parametrize("changes", [{}, {"properties": b'{"app_id":"a"}'}, {"priority": 3}])
@pytest.mark.parametrize("eta", [None, "2030-01-01T00:00:00+00:00", "tomorrow", 7])
def test_headers_that_a_broker_or_celery_wrote_again_are_judged_as_those_that_were_signed(
    changes: dict[str, Any], eta: object
) -> None:
    headers = json.loads(message().headers) | {"eta": eta, "text": "\u2713 %b", "umbel_x": 1.5}
    sent = signed(headers=json.dumps(headers).encode(), **changes)
    names = list(json.loads(sent.headers).items())
    for order in (names, [("redelivered", True), *reversed(names)], [*names, ("redelivered", False)]):
        for indent in (None, 1):
            again = replace(sent, headers=json.dumps(dict(order), indent=indent).encode())
            assert RING.check_task(again, "q") == RING.check_task(sent, "q")
    assert isinstance(proof_of(sent), Signed)


def test_no_signature_is_not_a_wrong_one() -> None:
    assert doubt(message()) is Doubt.UNSIGNED
    assert doubt(message(headers=b"\xff")) is Doubt.UNSIGNED


@pytest.mark.parametrize("text", ["", "1", "1:new:1:00", "2:new:1:" + "0" * 64, 7, None, ["1"], {"a": 1}])
def test_whatever_stands_in_the_header_is_judged(text: object) -> None:
    headers = json.loads(message().headers) | {HEADER: text}
    assert doubt(message(headers=json.dumps(headers).encode())) in (Doubt.FORGED, Doubt.UNSIGNED)


def test_every_key_verifies_and_the_first_signs() -> None:
    before, after = at("here", OLD), at("here", NEW)
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


@pytest.mark.parametrize("place", ["task", "umbel_x"])
def test_headers_that_are_no_text_are_refused_wherever_that_is(place: str) -> None:
    """Also where nothing looks at them: a dead letter must not keep all others from being requeued."""
    sent = signed(headers=json.dumps(json.loads(message().headers) | {"umbel_x": "x"}).encode())
    odd = replace(
        sent, headers=sent.headers.replace(b'"%b":"' % place.encode(), b'"%b":"\xe9' % place.encode())
    )
    assert odd != sent
    assert doubt(odd) is Doubt.UNSIGNED
    assert RING.letter(odd, "q", "why").nonce == ""


def test_a_signature_holds_in_its_cluster_alone() -> None:
    elsewhere = proof_of(signed(at("there")))
    assert isinstance(elsewhere, Doubted)
    assert (elsewhere.doubt, "'there'" in elsewhere.why) == (Doubt.FORGED, True)
    request = at("there").sign_request(b"{}", b"{}", NOW)
    assert isinstance(RING.check_request(request, b"{}"), Doubted)
    action = at("there").sign_action("e1", {"task": "t.add"}, NOW)
    assert isinstance(RING.check_action("e1", action), Doubted)


def test_what_umbel_0_3_signed_fits_and_is_known_as_bound_to_nothing() -> None:
    """Its form is that of a row of an outbox."""
    plain = RING.keyring.sign_row(
        Outgoing("q", message(priority=3, properties=b'{"app_id":"a"}')), NOW
    ).message
    assert proof_of(plain) == Signed("new", NOW, mark_of(plain), is_bound=False)
    assert doubt(replace(plain, body=b"[]")) is Doubt.FORGED
    bare = json.loads(signed().headers)
    del bare[BOUND]  # nobody can make one of the other
    assert doubt(message(headers=json.dumps(bare).encode())) is Doubt.FORGED


def test_properties_that_a_broker_writes_in_another_order_are_the_same() -> None:
    one = signed(properties=b'{"app_id":"a","type":"b"}')
    assert doubt(replace(one, properties=b'{"type": "b", "app_id": "a"}')) is None


def test_one_for_an_exchange_holds_wherever_that_hands_it_and_is_used_there_once() -> None:
    sent = RING.sign_task(Outgoing("", message(), exchange="x", routing_key="k"), NOW).message
    arrived = replace(sent, exchange="x", routing_key="k")
    assert doubt(arrived, "q1") is doubt(arrived, "q2") is None
    assert mark_of(arrived, "q1") != mark_of(arrived, "q2")
    assert doubt(sent, "") is doubt(replace(arrived, routing_key="other"), "q1") is Doubt.FORGED
    straight = RING.sign_task(Outgoing("q1", arrived), NOW).message  # as a retry or a requeued letter goes
    assert (straight.exchange, doubt(straight, "q1")) == ("", None)


def test_two_renewals_of_one_message_have_one_mark() -> None:
    old = Outgoing("q", signed())
    first, second = (RING.sign_task(old, NOW + later, nonce="n").message for later in (1, 2))
    assert mark_of(first) == mark_of(second) != mark_of(old.message)
    retried = json.loads(first.headers) | {"retries": 1}  # as Umbel 0.3 retries it: it hands on the header
    again = RING.keyring.signed_task(
        Outgoing("q", message(headers=json.dumps(retried).encode())), NOW, retried[BOUND].encode()
    )
    assert mark_of(again.message) != mark_of(first)


def test_the_row_of_an_outbox_is_bound_when_it_is_published_and_nothing_else_is() -> None:
    row = RING.keyring.sign_row(Outgoing("q", message()), NOW)
    published, again = RING.published_row(row, NOW + 9), RING.published_row(row, NOW + 99)
    proof = proof_of(published.message)
    assert isinstance(proof, Signed)
    assert (proof.at, proof.is_bound, proof.mark) == (NOW + 9, True, mark_of(again.message))
    for other in (Outgoing("q", message()), Outgoing("q", signed()), replace(row, queue="other")):
        assert RING.published_row(other, NOW) is other  # unsigned, taken from a broker, for another queue


def test_what_an_unsigned_task_sends_says_who_it_was() -> None:
    marked = marked_unsigned(Outgoing("q", signed()), "i0").message
    refused = proof_of(marked)
    assert isinstance(refused, Doubted)
    assert (refused.doubt, "'i0'" in refused.why) == (Doubt.UNSIGNED, True)
    assert doubt(signed(headers=marked.headers)) is None  # the next who signs it leaves that out
    assert b"umbel_unsigned" not in signed(headers=marked.headers).headers


def test_a_voucher_counts_for_its_letter_alone() -> None:
    stored = RING.vouched("it crashed", signed(), "q", NOW)
    assert split_voucher(stored)[0] == "it crashed"
    assert RING.letter(signed(), "q", stored).nonce
    assert RING.letter(signed(), "q", stored) == RING.letter(signed(), "q", stored)
    later = RING.sign_task(Outgoing("q", message()), NOW + 1).message
    for letter, queue, reason in (
        (later, "q", stored),  # another message
        (signed(), "other", stored),
        (signed(), "q", stored.replace("crashed", "waited")),
        (signed(), "q", "it crashed"),
        (replace(signed(), body=b"[]"), "q", stored),
    ):
        assert not RING.letter(letter, queue, reason).nonce
    assert not at("there").letter(signed(), "q", stored).nonce
    assert RING.vouched("why", message(), "q", NOW) == "why"  # there is nothing to vouch for


@pytest.mark.parametrize("text", ["", "why", "why [verified x]", " [verified 1:new:1:" + "0" * 63 + "]"])
def test_a_reason_without_a_voucher_stays_as_it_is(text: str) -> None:
    assert split_voucher(text) == (text, "")


def test_the_action_of_an_election_is_signed_for_that_election() -> None:
    action = RING.sign_action("e1", {"task": "t.add", "args": [1]}, NOW)
    assert isinstance(RING.check_action("e1", action), Signed)
    for election_id, changed in (("e2", action), ("e1", action | {"args": [2]}), ("e1", {"task": "t.add"})):
        assert isinstance(RING.check_action(election_id, changed), Doubted)


@pytest.mark.parametrize("name", ["", "a/b", "ä", "x" * 65, "a b", "a\n"])
def test_a_cluster_has_a_plain_name(name: str) -> None:
    assert cluster_problem(name)
    assert not cluster_problem("orders-eu_1.prod")


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
