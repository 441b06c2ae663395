import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.wire.envelope_redis import Opened, seal, seal_broadcast, unseal
from umbel.wire.message import Message, encode_others, others_of

HEADERS: dict[str, Any] = {
    "lang": "py",
    "task": "wapp.add",
    "id": "2a91b34a-34ae-4cce-8eb3-93671edda338",
    "timelimit": [None, None],
    "argsrepr": "(2,)",
    "stamps": {},
}
BODY = b'[[2], {"y": 3}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]'

# As a Celery 5.7 client wrote it.
CELERYS: dict[str, Any] = {
    "body": base64.b64encode(BODY).decode(),
    "content-encoding": "utf-8",
    "content-type": "application/json",
    "headers": HEADERS,
    "properties": {
        "correlation_id": "2a91b34a-34ae-4cce-8eb3-93671edda338",
        "reply_to": "e5d17151-a39b-3239-b559-ad6951ad970f",
        "delivery_mode": 2,
        "delivery_info": {"exchange": "", "routing_key": "celery"},
        "priority": 0,
        "body_encoding": "base64",
        "delivery_tag": "0b665011-6d77-4f40-a5fb-52db2bc1f5c5",
    },
}
MESSAGE = Message(
    headers=json.dumps(HEADERS).encode(),
    body=BODY,
    correlation_id=CELERYS["properties"]["correlation_id"],
    reply_to=CELERYS["properties"]["reply_to"],
)

texts = st.text(st.characters(codec="utf-8"), max_size=20)
messages = st.builds(
    Message,
    headers=st.dictionaries(texts, st.integers() | texts, max_size=4).map(
        lambda one: json.dumps(one).encode()
    ),
    body=st.binary(max_size=200),
    content_type=st.just("application/json") | texts.filter(bool),
    content_encoding=st.sampled_from(["utf-8", "binary"]),
    priority=st.integers(0, 255),
    correlation_id=texts,
    reply_to=texts,
    expiration_ms=st.none() | st.integers(0, 2**40),
    properties=st.dictionaries(texts, texts, max_size=2).map(encode_others),
)


def test_we_write_what_celery_writes() -> None:
    sealed = seal(MESSAGE, "celery", CELERYS["properties"]["delivery_tag"])
    assert json.loads(sealed) == CELERYS
    assert list(json.loads(sealed)) == list(CELERYS)


def test_we_read_what_celery_writes() -> None:
    assert unseal(json.dumps(CELERYS).encode()) == Opened(MESSAGE, 0, False)


def test_what_a_sender_adds_to_the_properties_is_kept() -> None:
    sent = CELERYS | {"properties": CELERYS["properties"] | {"app_id": "shop", "origin": "gen1@vm"}}
    opened = unseal(json.dumps(sent).encode())
    assert others_of(opened.message) == {"app_id": "shop", "origin": "gen1@vm"}
    again = seal(opened.message, "celery", CELERYS["properties"]["delivery_tag"])
    assert json.loads(again) == sent
    assert again.endswith(b'"}}')  # it is known by its end, where its delivery tag is


def test_a_message_says_by_which_exchange_it_came() -> None:
    sealed = seal(MESSAGE, "eu", "tag", exchange="orders", routing_key="eu.new")
    assert json.loads(sealed)["properties"]["delivery_info"] == {
        "exchange": "orders",
        "routing_key": "eu.new",
    }
    message = unseal(sealed).message
    assert (message.exchange, message.routing_key) == ("orders", "eu.new")


@given(messages)
def test_every_message_comes_back_as_it_was(message: Message) -> None:
    assert unseal(seal(message, "q", "tag")) == Opened(message, 0, False)
    assert unseal(seal(message, "q", "tag", not_before=1794703129.25)).message == message


def test_a_message_for_later_says_so_at_its_very_beginning() -> None:
    sealed = seal(MESSAGE, "celery", "tag", not_before=1794703129.25)
    assert sealed.startswith(b'{"umbel": {"not_before": 1794703129.250000}, "body"')


def test_what_celery_restored_is_marked_as_redelivered() -> None:
    restored = json.loads(json.dumps(CELERYS))
    restored["headers"]["redelivered"] = True
    restored["properties"]["delivery_info"]["redelivered"] = True
    opened = unseal(json.dumps(restored).encode())
    assert opened.redelivered
    assert json.loads(opened.message.headers)["redelivered"] is True


def test_our_own_mark_is_taken_off_the_headers_again() -> None:
    rest = seal(MESSAGE, "celery", "tag").replace(b'"headers":{', b'"headers":{"redelivered": true, ')
    marked = b'{"umbel": {"starts": 2, "redelivered": true}, ' + rest[1:]
    assert unseal(marked) == Opened(MESSAGE, 2, True)


def test_a_plain_body_and_missing_properties_are_understood() -> None:
    opened = unseal(b'{"body": "text \\u00e4", "properties": {"delivery_tag": 7, "priority": null}}')
    assert opened.message == Message(headers=b"{}", body="text ä".encode())


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"nothing",
        b"[1]",
        b'{"body": 1}',
        b'{"body": "abc", "properties": {"body_encoding": "base64"}}',
        b'{"body": "", "properties": {"expiration": "soon"}}',
        b'{"body": "", "properties": {"expiration": "inf"}}',
        b"\xff\xfe",
    ],
)
def test_what_is_no_envelope_comes_as_a_message_without_headers(garbage: bytes) -> None:
    opened = unseal(garbage)
    assert (opened.message.headers, opened.message.body) == (b"", garbage)


def test_a_broadcast_is_a_transient_envelope() -> None:
    payload = json.loads(seal_broadcast("celeryev", "worker.online", b"{}", b'{"hostname": "a"}', "tag"))
    assert payload["headers"] == {"hostname": "a"}
    assert payload["properties"] == {
        "delivery_mode": 1,
        "delivery_info": {"exchange": "celeryev", "routing_key": "worker.online"},
        "priority": 0,
        "body_encoding": "base64",
        "delivery_tag": "tag",
    }
