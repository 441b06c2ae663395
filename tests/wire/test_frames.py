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
    Stop,
    encode_frame,
)


class Errand(msgspec.Struct, frozen=True, array_like=True):
    number: int
    body: bytes


Frames = JobBatch[Errand] | Outcomes[Errand] | SoftLimit | Stop | Ready | Problem

errands = st.builds(Errand, st.integers(0, 2**63 - 1), st.binary(max_size=300))
frames = st.one_of(
    st.builds(JobBatch, st.integers(0, 255), st.lists(errands, max_size=5)),
    st.builds(Outcomes, st.lists(errands, max_size=5)),
    st.builds(SoftLimit, st.integers(0, 2**40)),
    st.just(Stop()),
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
    stream = encode_frame(Ready(4711)) + encode_frame(Stop())
    received = [
        value for index in range(len(stream)) for value in reader.feed(bytes(stream[index : index + 1]))
    ]
    assert received == [Ready(4711), Stop()]


def test_a_length_over_the_limit_is_refused_before_its_payload_arrives() -> None:
    reader: FrameReader[object] = FrameReader(Frames, max_bytes=100)
    with pytest.raises(BadFrame, match="a frame of 101 bytes is over the limit of 100"):
        reader.feed((101).to_bytes(4, "big"))


def test_a_value_over_the_limit_is_not_encoded() -> None:
    with pytest.raises(BadFrame, match=r"a Problem of \d+ bytes is over the limit of 10"):
        encode_frame(Problem("x" * 20), max_bytes=10)


@pytest.mark.parametrize("payload", [b"\xc1", b"\x92\x63\x01", b"\x92\x04\xa1x", b""])
def test_a_payload_of_another_shape_is_refused(payload: bytes) -> None:
    reader: FrameReader[object] = FrameReader(Frames)
    with pytest.raises(BadFrame, match="cannot be read"):
        reader.feed(len(payload).to_bytes(4, "big") + payload)
