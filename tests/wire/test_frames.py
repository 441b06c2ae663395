import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.errors import BadFrame
from umbel.wire.frames import (
    FrameReader,
    JobBatch,
    Outcomes,
    Problem,
    Ready,
    SoftLimit,
    StopChild,
    encode_frame,
)


class Errand(msgspec.Struct, frozen=True, array_like=True):
    number: int
    body: bytes


MARK = bytes(encode_frame(StopChild()))[:4]
Frames = JobBatch[Errand] | Outcomes[Errand] | SoftLimit | StopChild | Ready | Problem

errands = st.builds(Errand, st.integers(0, 2**63 - 1), st.binary(max_size=300))
frames = st.one_of(
    st.builds(JobBatch, st.integers(0, 255), st.lists(errands, max_size=5)),
    st.builds(Outcomes, st.lists(errands, max_size=5)),
    st.builds(SoftLimit, st.integers(0, 2**40)),
    st.just(StopChild()),
    st.builds(Ready, st.integers(1, 2**22)),
    st.builds(Problem, st.text(max_size=50)),
)


@given(st.lists(frames, max_size=8), st.lists(st.integers(1, 400), max_size=20))
def test_a_stream_cut_anywhere_gives_the_same_values(sent: list[msgspec.Struct], cuts: list[int]) -> None:
    stream = b"".join(encode_frame(frame) for frame in sent)
    reader: FrameReader[object] = FrameReader(Frames)
    received: list[object] = []
    start = 0
    for size in cuts:
        received += reader.feed(stream[start : start + size])
        start += size
    received += reader.feed(stream[start:])
    assert received == sent


def test_one_byte_at_a_time_is_enough() -> None:
    reader: FrameReader[object] = FrameReader(Frames)
    stream = encode_frame(Ready(4711)) + encode_frame(StopChild())
    received = [
        value for index in range(len(stream)) for value in reader.feed(bytes(stream[index : index + 1]))
    ]
    assert received == [Ready(4711), StopChild()]


def test_a_length_over_the_limit_is_refused_before_its_payload_arrives() -> None:
    reader: FrameReader[object] = FrameReader(Frames, max_bytes=100)
    with pytest.raises(BadFrame, match=r"data of 101 bytes between .* is over the limit of 100"):
        reader.feed(framed(b"", length=101))


def test_a_value_over_the_limit_is_not_encoded() -> None:
    with pytest.raises(BadFrame, match=r"of \d+ bytes cannot be passed .* over the limit of 10"):
        encode_frame(Problem("x" * 20), max_bytes=10)


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"\xc1", id="a code that there is not"),
        pytest.param(b"\x92\x63\x01", id="an unknown tag"),
        pytest.param(b"\x92\x04\xa1x", id="text for a number"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x92\x07\xa2\xff\xff", id="text that is not UTF-8"),
        pytest.param(b"\x93\x04\x01" + b"\x91" * 100_000, id="deep nesting"),
        pytest.param(b"\x92\x05\xdd\xff\xff\xff\xff", id="four thousand million elements"),
    ],
)
def test_a_payload_of_another_shape_is_refused(payload: bytes) -> None:
    reader: FrameReader[object] = FrameReader(Frames)
    with pytest.raises(BadFrame, match="cannot be read"):
        reader.feed(framed(payload))


def framed(payload: bytes, *, length: int | None = None) -> bytes:
    return MARK + (len(payload) if length is None else length).to_bytes(4, "big") + payload


def test_what_a_task_writes_to_the_wrong_descriptor_is_never_taken_for_a_length() -> None:
    """Else the reader would wait for the rest of it, and take all that follows for that."""
    for garbage in (b"\0", b"\n", b"\0\0\1\0", b"hello\n", b"\x05\0\0\0\0\0\0\0"):
        reader: FrameReader[object] = FrameReader(Frames)
        with pytest.raises(BadFrame, match=r"damaged data .* at byte 0"):
            reader.feed(garbage + encode_frame(Ready(4711)))


def test_what_came_before_a_bad_frame_is_handed_out_first() -> None:
    reader: FrameReader[object] = FrameReader(Frames)
    assert reader.feed(bytes(encode_frame(Ready(4711))) + b"garbage!") == [Ready(4711)]
    assert reader.problem is not None
    with pytest.raises(BadFrame):
        reader.feed(bytes(encode_frame(Ready(4711))))


@st.composite
def spoiled_streams(draw: st.DrawFn) -> bytes:
    """Frames as they should be, with bytes changed, left out and put in."""
    stream = bytearray().join(encode_frame(frame) for frame in draw(st.lists(frames, min_size=1, max_size=5)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(stream)))
        stream[at : at + draw(st.integers(0, 8))] = draw(st.binary(max_size=12))
    return bytes(stream)


@given(
    spoiled_streams() | st.binary(max_size=100) | st.binary(max_size=100).map(framed),
    st.lists(st.integers(1, 60), max_size=20),
)
def test_any_bytes_give_values_or_a_bad_frame_and_are_not_piled_up(stream: bytes, cuts: list[int]) -> None:
    """N1."""
    reader: FrameReader[object] = FrameReader(Frames, max_bytes=200)
    start = 0
    for size in [*cuts, len(stream)]:
        with contextlib.suppress(BadFrame):
            reader.feed(stream[start : start + size])
        start += size
        assert len(reader._rest) <= len(MARK) + 4 + 200
