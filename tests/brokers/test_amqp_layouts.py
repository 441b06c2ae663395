"""What is read at a glance is what the decoder reads, whatever comes (wire 1.2)."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from umbel.brokers.amqp.envelope import Properties, decode, encode_properties
from umbel.brokers.amqp.frames import Incoming, Method
from umbel.brokers.amqp.layouts import LAYOUTS_MAX, LEARN_EVERY, Layouts, layout_of

CELERYS: dict[str, Any] = {
    "lang": "py",
    "task": "shop.pay",
    "id": "9f0c",
    "group_index": 3,
    "retries": 0,
    "timelimit": [None, 2.5],
    "argsrepr": "(1, 'a%b')",
    "ignore_result": False,
    "stamps": {},
    "100%": ["50%"],
}
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=40)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.text(max_size=40) | st.sampled_from(["umbel-json", "umbel-x", "x-death", "task", "100%", 'a"b'])
TABLES = st.dictionaries(NAMES, VALUES, max_size=6)
PLAIN = st.text(st.characters(max_codepoint=127), max_size=20)
PROPERTIES = st.builds(
    Properties,
    content_type=st.sampled_from(["", "application/json"]),
    content_encoding=st.sampled_from(["", "utf-8"]),
    headers=st.none() | TABLES,
    delivery_mode=st.integers(0, 2),
    priority=st.none() | st.integers(0, 255),
    correlation_id=PLAIN,
    reply_to=PLAIN,
    expiration=PLAIN,
    message_id=PLAIN,
    type=PLAIN | st.just("umbel:5.0:1"),
)


@given(PROPERTIES, st.lists(st.text(max_size=6) | st.integers(-(2**31), 2**31 - 1), max_size=6), st.data())
def test_what_a_layout_reads_is_what_the_decoder_reads(
    properties: Properties, others: list[str | int], data: st.DataObject
) -> None:
    """The same headers with other values, and those with a byte changed, cut out or put in."""
    layouts = Layouts()
    agree(layouts, encode_properties(properties))
    if properties.headers:
        for name, other in zip(properties.headers, others, strict=False):
            if type(properties.headers[name]) is type(other):
                properties.headers[name] = other
    wire = encode_properties(properties)
    agree(layouts, wire)
    at, length = data.draw(st.integers(0, len(wire))), data.draw(st.integers(0, 2))
    agree(layouts, wire[:at] + data.draw(st.binary(max_size=2)) + wire[at + length :])


def test_a_message_like_celerys_is_read_right_whatever_byte_of_it_is_wrong() -> None:
    """Here a layout is known for certain: every length, name, kind and text is hit."""
    wire, layouts = celerys(), Layouts()
    agree(layouts, wire)
    assert len(layouts) == 1
    for at in range(len(wire)):
        for put in (b"", b"\0", b"S", b'"', b"\xff", bytes((wire[at] ^ 1,)), wire[at : at + 1] * 2):
            agree(layouts, wire[:at] + put + wire[at + 1 :])


def test_texts_and_numbers_may_differ_and_a_layout_still_fits() -> None:
    layout = layout_of(celerys(), decode(delivery(celerys()))[0])
    assert layout is not None
    for changes in (
        {"id": "another-one", "argsrepr": ""},
        {"group_index": -(2**31)},
        {"task": "t" * 255},
    ):
        other = celerys(correlation_id="abcd", **changes)
        assert layout.read(other, b"body") == decode(delivery(other))[0], changes


def test_what_json_would_escape_what_is_long_and_what_is_of_another_kind_fits_no_layout() -> None:
    layout = layout_of(celerys(), decode(delivery(celerys()))[0])
    assert layout is not None
    for changes in (
        {"argsrepr": 'a"b'},
        {"argsrepr": "é"},
        {"task": "t" * 256},
        {"retries": 1},
        {"timelimit": [None, 3.5]},
        {"id": None},
        {"more": "x"},
    ):
        assert layout.read(celerys(**changes), b"body") is None, changes


def test_headers_of_brokers_and_long_names_get_no_layout() -> None:
    brokers: dict[str, Any] = {"x-death": []}
    for headers in (brokers, {"umbel-json": "{}"}, {"a": "text", "n" * 40: None}):
        wire = celerys(**headers)
        assert layout_of(wire, decode(delivery(wire))[0]) is None, headers


def test_layouts_are_learnt_seldom_and_few_are_kept() -> None:
    layouts = Layouts()
    for number in range(2 * LAYOUTS_MAX):
        for _ in range(LEARN_EVERY + 1):
            agree(layouts, celerys(own=[number]))
            assert len(layouts) <= min(number + 1, LAYOUTS_MAX)
    assert len(layouts) == LAYOUTS_MAX


def test_one_layout_fits_the_messages_of_all_clients() -> None:
    """Each process and thread that sends has an id of its own to be answered at."""
    layout = layout_of(celerys(), decode(delivery(celerys()))[0])
    assert layout is not None
    other = celerys(reply_to="c9")
    read = layout.read(other, b"body")
    assert read == decode(delivery(other))[0]
    assert read.reply_to == "c9"
    assert layout.read(celerys(reply_to="longer"), b"body") is None


def celerys(*, correlation_id: str = "9f0c", reply_to: str = "b8", **headers: Any) -> bytes:
    return encode_properties(
        Properties(
            content_type="application/json",
            content_encoding="utf-8",
            headers=CELERYS | headers,
            delivery_mode=2,
            priority=0,
            correlation_id=correlation_id,
            reply_to=reply_to,
        )
    )


def agree(layouts: Layouts, properties: bytes) -> None:
    message, mark, _ = decode(delivery(properties))
    assert layouts.read(delivery(properties)) == (message, mark)


def delivery(properties: bytes) -> Incoming:
    return Incoming(1, Method.BASIC_DELIVER, ("", 1, False, ""), properties, b"body")
