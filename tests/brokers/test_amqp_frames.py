"""AMQP's bytes: what is written is read back, however it arrives, and nonsense is refused."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.brokers.amqp import envelope
from umbel.brokers.amqp.envelope import (
    BYTES_MAX,
    FORMS_MAX,
    Properties,
    decode,
    decode_properties,
    encode_alike,
    encode_properties,
)
from umbel.brokers.amqp.frames import (
    FRAME_MAX,
    HEARTBEAT_FRAME,
    BadFrames,
    FrameReader,
    Incoming,
    Method,
    decode_table,
    encode_ack,
    encode_method,
    encode_publish,
    encode_table,
)
from umbel.errors import TooLarge, WireError
from umbel.wire.call import read_headers

NAMES = st.text(max_size=40)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
SCALARS = st.sampled_from([None, False, True, 0, 1, 0.0, -0.0, 1.0, 2**40, "", "1", "ä"])
NESTED = st.sampled_from([[None, None], [None, 1], [True], [1], {}, {"a": 1}])
TABLES = st.dictionaries(NAMES, VALUES, max_size=8)


def as_delivery(published: bytes) -> bytes:
    """The frames of a published message as the server would deliver it."""
    size = 7 + int.from_bytes(published[3:7]) + 1
    deliver = encode_method(1, Method.BASIC_DELIVER, "tag", 7, True, "by", "key")
    return deliver + published[size:]


@given(TABLES)
def test_a_table_comes_back_as_it_was(table: dict[str, Any]) -> None:
    data = encode_table(table)
    assert decode_table(data, 0) == (table, len(data))


@given(st.lists(st.tuples(SCALARS, SCALARS, SCALARS, NESTED), max_size=9))
def test_tables_that_are_alike_are_written_as_they_are_alone(rows: list[tuple[Any, ...]]) -> None:
    for row in rows:
        table = dict(zip("abcd", row, strict=True))
        assert encode_alike(table) == encode_table(table)


def test_only_so_many_forms_are_kept_and_none_of_a_large_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envelope, "_forms", {})
    for number in range(FORMS_MAX + 10):
        encode_alike({f"name{number}": "x"})
        encode_alike({"large": "x" * BYTES_MAX, f"name{number}": number})
    assert len(envelope._forms) == 10


@given(
    st.builds(
        Properties,
        content_type=NAMES,
        content_encoding=NAMES,
        headers=st.none() | TABLES,
        delivery_mode=st.integers(0, 2),
        priority=st.none() | st.integers(0, 255),
        correlation_id=NAMES,
        reply_to=NAMES,
        expiration=NAMES,
        message_id=NAMES,
        type=NAMES,
    )
)
def test_properties_come_back_as_they_were(properties: Properties) -> None:
    assert decode_properties(encode_properties(properties)) == properties


def test_a_number_beyond_a_table_and_a_name_beyond_255_bytes_are_refused() -> None:
    with pytest.raises(OverflowError):
        encode_table({"n": 2**63})
    with pytest.raises(TooLarge, match="255"):
        encode_table({"n" * 256: 1})


@given(st.binary(max_size=300), st.integers(1, 50))
def test_frames_may_arrive_in_pieces_of_any_size(body: bytes, size: int) -> None:
    wire = as_delivery(encode_publish(1, "", "key", encode_properties(Properties(type="t")), body))
    wire += HEARTBEAT_FRAME + encode_ack(2, 9, multiple=True)
    reader, incoming = FrameReader(), list[Incoming]()
    for start in range(0, len(wire), size):
        incoming += reader.feed(wire[start : start + size])
    properties = encode_properties(Properties(type="t"))
    assert incoming == [
        Incoming(1, Method.BASIC_DELIVER, ("tag", 7, True, "key", "by"), properties, body),
        Incoming(2, Method.BASIC_ACK, (9, True)),
    ]


def test_a_body_larger_than_a_frame_is_put_together() -> None:
    body = bytes(3 * FRAME_MAX + 5)
    wire = as_delivery(encode_publish(1, "", "key", b"\0\0", body))
    (incoming,) = FrameReader().feed(wire)
    assert incoming.body == body


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x01\0\0\0\0\0\x04\xff\xff\xff\xff\xce",
        b"\x09" + bytes(6) + b"\xce",
    ],
)
def test_what_is_not_amqp_is_refused(data: bytes) -> None:
    with pytest.raises(BadFrames):
        FrameReader().feed(data)


def test_a_message_that_claims_to_be_huge_is_refused_before_it_is_read() -> None:
    wire = as_delivery(encode_publish(1, "", "key", b"\0\0", bytes(1000)))
    with pytest.raises(BadFrames, match="1000 bytes"):
        FrameReader(message_max_bytes=999).feed(wire)


@given(st.binary(max_size=60), st.sampled_from([1, 2, 3, 8]))
def test_whatever_is_in_a_frame_it_is_read_or_refused(payload: bytes, kind: int) -> None:
    frame = bytes((kind, 0, 1)) + len(payload).to_bytes(4) + payload + b"\xce"
    with suppress(BadFrames):
        FrameReader().feed(frame)


@given(st.binary(max_size=80))
def test_whatever_the_properties_are_the_message_is_handed_over(properties: bytes) -> None:
    message, _, _ = decode(Incoming(1, Method.BASIC_DELIVER, ("", 1, False, ""), properties, b"body"))
    assert message.body == b"body"


def test_a_table_as_deep_as_a_frame_allows_is_handed_over_to_be_buried() -> None:
    inner = b""
    for _ in range(5000):
        inner = b"\x01aF" + len(inner).to_bytes(4) + inner
    properties = b"\x20\x00" + len(inner).to_bytes(4) + inner
    message, _, _ = decode(Incoming(1, Method.BASIC_DELIVER, ("", 1, False, ""), properties, b"body"))
    assert message.body == b"body"
    with pytest.raises(WireError):  # whether it was read as deep as it is, or given up before
        read_headers(message)
