"""Frames: values on a byte stream between the worker's main process and its children.

A frame is four constant bytes, the length of the payload (four bytes, big-endian), and the payload: one
tagged msgpack array. Only the pools know the types of jobs and outcomes, so the frames that carry them take
the type as a parameter.

Both ends run the same release on one machine, so a frame has no version. A length above the limit or a
payload of another shape means a broken peer: BadFrame is raised, and the stream cannot be used any more. The
four constant bytes detect a task that writes to a file descriptor that it did not open. Without them, its
text could be read as a length, and everything that its process sends afterwards as the payload.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from umbel.errors import BadFrame

FRAME_MAX_BYTES = 256 * 1024 * 1024

_MARK = 0xF5554D42  # no UTF-8 text begins with 0xF5
_HEADER = struct.Struct(">II")
_HEADER_BYTES = _HEADER.size
_LARGE_BYTES = 4096
_UNWRITABLE = (BadFrame, msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError, MemoryError)

FrameT = TypeVar("FrameT")
JobT = TypeVar("JobT")
OutcomeT = TypeVar("OutcomeT")


class JobBatch(msgspec.Struct, Generic[JobT], frozen=True, array_like=True, gc=False, tag=1):
    """To a child: run these jobs, each after taking a token of this number."""

    number: int
    jobs: Sequence[JobT]


class SoftLimit(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2):
    """To a child: this job has reached its soft limit, or the worker stops. A signal follows."""

    job: int
    stopping: bool = False


class StopChild(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3):
    """To a child: exit after finishing everything sent before."""


class Ready(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=4):
    """From a child: it can take jobs."""

    pid: int


class Outcomes(msgspec.Struct, Generic[OutcomeT], frozen=True, array_like=True, gc=False, tag=5):
    """From a child: how jobs ended, in the order in which they ran."""

    outcomes: Sequence[OutcomeT]


class Armed(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=6):
    """From a child: its handler for the soft limit's signal is installed."""


class Problem(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=7):
    """From a child or the fork server: why it cannot continue, in one line, and the place of the error."""

    text: str


class Cancel(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=9):
    """To a child: cancel this job. A signal follows."""

    job: int


def encode_frame(message: msgspec.Struct, *, max_bytes: int = FRAME_MAX_BYTES) -> bytearray:
    """Return a message as a frame. Raises BadFrame if it is too large."""
    frame = bytearray(_HEADER_BYTES)
    _encoder.encode_into(message, frame, _HEADER_BYTES)
    size_bytes = len(frame) - _HEADER_BYTES
    if size_bytes > max_bytes:
        raise BadFrame(
            f"arguments or a result of {size_bytes} bytes cannot be passed between the worker and its child "
            f"process: over the limit of {max_bytes}; pass a reference to the data instead"
        )
    _HEADER.pack_into(frame, 0, _MARK, size_bytes)
    return frame


def encode_frame_or(message: msgspec.Struct, otherwise: Callable[[Exception], msgspec.Struct]) -> bytearray:
    """Encode a message as a frame; if that fails, encode what `otherwise` returns for the error."""
    try:
        return encode_frame(message)
    except _UNWRITABLE as error:
        return encode_frame(otherwise(error))


class FrameReader(Generic[FrameT]):
    """Splits a stream into values of `kind`: a Struct of this module, or a union of them.

    Values before a bad frame are returned first; `problem` is set when no more follow.
    """

    def __init__(self, kind: Any, *, max_bytes: int = FRAME_MAX_BYTES) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._max_bytes = max_bytes
        self._rest = bytearray()  # the beginning of an incomplete frame
        self._awaited_bytes = _HEADER_BYTES  # with fewer bytes in `_rest` no frame can be complete
        self.problem: BadFrame | None = None

    @property
    def is_amid_frame(self) -> bool:
        """Return whether a frame is incomplete."""
        return bool(self._rest)

    def feed(self, data: bytes | memoryview) -> list[FrameT]:
        """Return the values that this data completes. Raises BadFrame. The data is copied."""
        if self.problem is not None:
            raise self.problem
        if self._rest:
            self._rest += data
            if len(self._rest) < self._awaited_bytes:
                return []
            whole, self._rest = self._rest, bytearray()
            return self._cut(whole)
        return self._cut(data)

    def _cut(self, data: bytes | bytearray | memoryview) -> list[FrameT]:
        # Optimized for thousands of small frames per second: only the decoder is called for each frame.
        decode, header_at, max_bytes = self._decode, _HEADER.unpack_from, self._max_bytes
        values: list[FrameT] = []
        start, size = 0, len(data)
        self._awaited_bytes = _HEADER_BYTES
        try:
            while (body := start + _HEADER_BYTES) <= size:
                magic, length = header_at(data, start)
                if magic != _MARK:
                    raise BadFrame(
                        f"damaged data between the worker and its child process, at byte {start} of {size}; "
                        "the child is replaced: does a task write to a file descriptor that it did not open?"
                    )
                if length > max_bytes:
                    raise BadFrame(
                        f"data of {length} bytes between the worker and its child process is over the limit "
                        f"of {max_bytes}; the child is replaced"
                    )
                end = body + length
                if end > size:
                    self._awaited_bytes = end - start
                    break
                # For short payloads a slice is faster than a memoryview.
                values.append(decode(data[body:end] if length < _LARGE_BYTES else memoryview(data)[body:end]))
                start = end
        except BadFrame as error:
            self.problem = error
        except _UNREADABLE as error:
            self.problem = BadFrame(
                f"data between the worker and its child process cannot be read (message {len(values)} of "
                f"{size} bytes); the child is replaced: {error}"
            )
        if self.problem is None:
            self._rest += data[start:]
        elif not values:
            raise self.problem
        return values


_encoder = msgspec.msgpack.Encoder()
