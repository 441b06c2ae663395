"""Control requests and replies as bytes: Celery's form, and nothing but WireError for the rest."""

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.errors import TooLarge, WireError
from umbel.protocol.pidbox import MemberReport, Reply, ReplyTo, Request
from umbel.wire.control import decode_reply, decode_request, encode_reply, encode_request

TICKET = "e3cb5e9b-0085-47c1-a8da-587f47317753"
ADDRESS = ReplyTo("reply.celery.pidbox", "2e0907c6-9e4e-37e8-a6d7-dad4d3245f60")
HELLO = Request(
    "hello",
    {"from_node": "w2@vm", "revoked": []},
    ticket=TICKET,
    reply_to=ADDRESS,
    expires_at=1794703095.8502254,
)
# As captured from Celery 5.7 (wire 5.1).
CAPTURED_HEADERS = {"clock": 1, "expires": 1794703095.8502254}
CAPTURED_BODY = {
    "method": "hello",
    "arguments": {"from_node": "w2@vm", "revoked": []},
    "destination": None,
    "pattern": None,
    "matcher": None,
    "ticket": TICKET,
    "reply_to": {"exchange": "reply.celery.pidbox", "routing_key": ADDRESS.routing_key},
}

names = st.text(max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=10,
)
plain_values = values.filter(lambda value: "__type__" not in json.dumps(value))


def test_a_request_has_the_form_of_celery() -> None:
    headers, body = encode_request(HELLO, clock=1)
    assert json.loads(headers) == CAPTURED_HEADERS
    assert json.loads(body) == CAPTURED_BODY


def test_a_request_of_celery_is_read() -> None:
    assert decode_request(json.dumps(CAPTURED_HEADERS).encode(), json.dumps(CAPTURED_BODY).encode()) == HELLO


def test_without_a_reply_address_there_is_no_ticket() -> None:
    _, body = encode_request(Request("heartbeat", destination=("a@x",)), clock=1)
    assert json.loads(body) == {
        "method": "heartbeat",
        "arguments": {},
        "destination": ["a@x"],
        "pattern": None,
        "matcher": None,
    }


def test_a_plain_destination_is_one_node() -> None:
    assert decode_request(b"{}", b'{"method": "ping", "destination": "a@x"}').destination == ("a@x",)


@given(
    st.builds(
        Request,
        names,
        st.dictionaries(names, plain_values, max_size=4),
        st.none() | st.tuples(names, names),
        st.none() | names,
        st.none() | names,
        ticket=st.just(TICKET),
        reply_to=st.just(ADDRESS),
        expires_at=st.floats(0, 2e9),
    )
)
def test_a_request_comes_back_as_it_was(request_: Request) -> None:
    assert decode_request(*encode_request(request_, clock=7)) == request_


def test_a_reply_has_the_form_of_celery() -> None:
    headers, body = encode_reply("w1@vm", {"revoked": [], "clock": 7}, TICKET, 3)
    assert json.loads(headers) == {"ticket": TICKET, "clock": 3}
    assert json.loads(body) == {"w1@vm": {"revoked": [], "clock": 7}}


@given(
    names,
    plain_values,
    st.lists(
        st.builds(MemberReport, names, names, st.floats(0, 9).map(lambda s: round(s, 1)), st.booleans()),
        max_size=3,
    ),
)
def test_a_reply_comes_back_as_it_was(node: str, value: object, members: list[MemberReport]) -> None:
    assert decode_reply(*encode_reply(node, value, TICKET, 3, members)) == Reply(
        node, value, TICKET, tuple(members)
    )


@pytest.mark.parametrize(
    ("exchange", "key"),
    [("", "celery"), ("celeryev", "worker.x"), ("amq.direct", "x"), ("reply.celery.pidbox", "ü" * 200)],
)
def test_a_request_that_wants_its_replies_elsewhere_is_a_wire_error(exchange: str, key: str) -> None:
    """N1: whoever may send a request must not have the worker publish wherever he likes."""
    body = json.dumps({**CAPTURED_BODY, "reply_to": {"exchange": exchange, "routing_key": key}}).encode()
    with pytest.raises(WireError, match="invalid reply address"):
        decode_request(b"{}", body)


def test_a_request_over_the_limits_is_refused() -> None:
    deep = '{"method": "ping", "arguments": {"x": ' + "[" * 40 + "]" * 40 + "}}"
    for body in (b'{"method": "' + b"x" * 2**20 + b'"}', deep.encode()):
        with pytest.raises(TooLarge):
            decode_request(b"{}", body)
    with pytest.raises(TooLarge):
        encode_request(Request("ping", {"x": "x" * 2**20}), clock=1)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\x00",
        b"[]",
        b"null",
        b"{}",
        b'{"method": null}',
        b'{"method": 7}',
        b'{"method": "ping", "arguments": [1]}',
        b'{"method": "ping", "destination": 3}',
        b'{"method": "ping", "destination": [null]}',
        b'{"method": "ping", "pattern": {}}',
        b'{"method": "ping", "reply_to": "me"}',
        b'{"method": "ping", "reply_to": {"exchange": "x"}}',
        b'{"method": "ping", "ticket": 5}',
    ],
)
def test_what_is_no_request_is_a_wire_error(body: bytes) -> None:
    with pytest.raises(WireError):
        decode_request(b"{}", body)


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_bytes_are_read_or_are_a_wire_error(headers: bytes, body: bytes) -> None:
    for decode in (decode_request, decode_reply):
        for pair in (
            (headers, body),
            (b"{}", body),
            (headers, b'{"method": "ping"}'),
            (headers, b'{"a": 1}'),
        ):
            try:
                decode(*pair)
            except WireError:
                continue


@given(st.dictionaries(st.sampled_from(sorted(CAPTURED_BODY)), values))
def test_any_map_is_read_or_is_a_wire_error(fields: dict[str, object]) -> None:
    body = json.dumps(CAPTURED_BODY | fields).encode()
    headers = json.dumps({"expires": fields.get("ticket"), "members": fields.get("pattern")}).encode()
    for decode in (decode_request, decode_reply):
        try:
            decode(headers, body)
        except WireError:
            continue


def test_of_a_list_that_is_too_large_the_first_part_is_sent_and_it_says_so() -> None:
    entries = ["x" * 1000] * 20_000
    reply = decode_reply(*encode_reply("a@x", entries, "t", 1))
    assert reply.total == 20_000 and 1000 < len(reply.value) < 20_000
    whole = decode_reply(*encode_reply("a@x", entries[:10], "t", 1))
    assert (whole.total, len(whole.value)) == (None, 10)
    with pytest.raises(TooLarge):
        encode_reply("a@x", "x" * 10_000_000, "t", 1)


def test_a_pickled_request_is_read_where_pickle_is_accepted() -> None:
    body = pickle.dumps({"method": "revoke", "arguments": {"task_id": "a"}, "destination": None})
    assert decode_request(b"{}", body, accept=("json", "pickle")).method == "revoke"
    with pytest.raises(WireError):
        decode_request(b"{}", body)
