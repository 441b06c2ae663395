"""The main process's end of one child: its socket, its token pipe, and what waits to be written.

Writes are queued per child and leave in order, whole frames; reads happen when the loop says so.
Nothing here waits.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

from umbel.errors import BadFrame
from umbel.pools.guard import Raised, Returned, call_guarded
from umbel.pools.hosting import in_one_line
from umbel.pools.interface import Job, LostJob
from umbel.pools.prefork.messages import FromChild
from umbel.wire.frames import FRAME_MAX_BYTES, FrameReader, JobBatch, encode_frame

log = logging.getLogger(__name__)

STALL_S = 60.0  # a child that has begun a frame and writes nothing for so long never ends it
_NOT_OURS = "invalid data from the child process"
BATCH_FRAME_MAX_BYTES = 256 * 1024  # of bodies; a child need not have all of a larger batch to begin with it
_READ_BYTES = 64 * 1024  # below the size from which malloc asks the kernel each time
_TOKENS_READ_BYTES = 4096  # more than two batches have


class ChildLink:
    """`on_messages` is called with what arrived; `on_broken` once, when the stream is of no more use.

    The text given to it is empty when the stream merely ended, as it does when a child dies.
    """

    def __init__(
        self,
        key: int,
        child: int,
        *,
        on_messages: Callable[["ChildLink", Sequence[FromChild]], None],
        on_broken: Callable[["ChildLink", str], None],
    ) -> None:
        self.key = key
        self.child = child
        self.pid = 0  # until the fork server has made the process
        self.armed = False  # it has a handler for the soft limit's signal
        self.doom = ""  # why it is being killed by us
        self.dismissed = ""  # why it was asked to end
        self.free_at = 0.0  # Unix time: when it could begin the job that it is at
        self.orphan = False  # its fork server has died
        self.problem = ""  # what it said about its own end
        self.unsaid: dict[int, LostJob] = {}  # jobs that ended, and whose outcome it could not send
        self._on_messages = on_messages
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._tokens, self._tokens_in = os.pipe()
        try:
            self._channel, theirs = socket.socketpair()
        except OSError:
            os.close(self._tokens)
            os.close(self._tokens_in)
            raise
        self._channel.setblocking(False)
        os.set_blocking(self._tokens, False)
        os.set_blocking(self._tokens_in, False)
        self._theirs: socket.socket | None = theirs
        self._reader: FrameReader[FromChild] = FrameReader(FromChild)
        self._unsent: deque[memoryview] = deque()  # the slots send two batches at most, so this is bounded
        self._open = True
        self._stalled: asyncio.TimerHandle | None = None  # while a frame has begun and not ended
        self._resume: asyncio.TimerHandle | None = None  # of reading, while that is paused
        self._loop.add_reader(self._channel, self._on_readable)

    @property
    def broken(self) -> bool:
        return not self._open

    def child_fds(self) -> list[int]:
        """What the child is to inherit; to be let go with `handed_over` once it was passed on."""
        assert self._theirs is not None
        return [self._theirs.fileno(), self._tokens]

    def handed_over(self) -> None:
        """Our copy of the child's end has to go, or the end of the stream would never show."""
        if self._theirs is not None:
            self._theirs.close()
            self._theirs = None

    def put_tokens(self, batch: int, count: int) -> None:
        written = os.write(self._tokens_in, bytes((batch,)) * count)
        assert written == count, "two batches of tokens fit into a pipe"

    def take_tokens(self) -> bytes:
        """The tokens that nobody has taken; from now on nobody else can."""
        try:
            return os.read(self._tokens, _TOKENS_READ_BYTES)
        except BlockingIOError:
            return b""

    def send(self, *frames: bytearray) -> None:
        if not self._open:
            return
        waits = bool(self._unsent)
        self._unsent += map(memoryview, frames)
        if not waits:
            self._write()
            if self._unsent:
                self._loop.add_writer(self._channel, self._on_writable)

    def pause_reading(self, pause_s: float) -> None:
        """Let outcomes gather in the socket, and read them together."""
        if self._open and self._resume is None:
            self._loop.remove_reader(self._channel)
            self._resume = self._loop.call_later(pause_s, self._resume_reading)

    def _resume_reading(self) -> None:
        self._resume = None
        self._loop.add_reader(self._channel, self._on_readable)

    def drain(self) -> None:
        """Read what a dead child has left in the socket."""
        while self._open and self._on_readable():
            pass

    def close(self) -> None:
        self.handed_over()
        if self._tokens >= 0:
            self._shut()
            os.close(self._tokens)
            os.close(self._tokens_in)
            self._tokens = self._tokens_in = -1

    def _on_writable(self) -> None:
        self._write()
        if not self._unsent:
            self._loop.remove_writer(self._channel)

    def _write(self) -> None:
        """Write what goes into the socket now."""
        unsent = self._unsent
        try:
            while unsent:
                sent = self._channel.send(unsent[0])
                if sent < len(unsent[0]):
                    unsent[0] = unsent[0][sent:]
                else:
                    unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:  # it is gone; the reader notices, or has
            unsent.clear()

    def _on_readable(self) -> bool:
        """Return whether there may be more."""
        try:
            data = self._channel.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._break("")
            return False
        try:
            messages = self._reader.feed(data)
        except BadFrame as error:
            self._break(f"{_NOT_OURS}: {error}")
            return False
        if messages:
            handled = call_guarded(self._on_messages, self, messages)
            if isinstance(handled, Raised):
                log.error(
                    "internal error while handling a message from a child process; replacing the child",
                    exc_info=handled.error,
                )
                self._break(f"cannot handle a message from the child process: {in_one_line(handled.error)}")
                return False
        if self._reader.problem is not None:
            self._break(f"{_NOT_OURS}: {self._reader.problem}")
            return False
        if self._stalled is not None or self._reader.is_amid_frame:
            self._watch_frame()
        return True

    def _watch_frame(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        if self._reader.is_amid_frame and self._open:
            why = f"{_NOT_OURS}: incomplete frame"
            self._stalled = self._loop.call_later(STALL_S, self._break, why)

    def _break(self, why: str) -> None:
        if self._open:  # else it was closed in answer to what it wrote
            self._shut()
            self._on_broken(self, why)

    def _shut(self) -> None:
        if self._open:
            self._open = False
            for timer in (self._resume, self._stalled):
                if timer is not None:
                    timer.cancel()
            self._loop.remove_reader(self._channel)
            with contextlib.suppress(OSError):
                self._loop.remove_writer(self._channel)
            self._channel.close()


def batch_frames(
    batch: int, jobs: Sequence[Job], *, max_bytes: int = FRAME_MAX_BYTES
) -> tuple[list[bytearray], dict[int, str]]:
    """One frame for the batch, or one for each job where that would be large; to the child it is the same.

    And, by number, why jobs are not in it: too large for a frame, or not to be written at all.
    """
    if len(jobs) == 1 or sum([len(job.message.body) for job in jobs]) <= BATCH_FRAME_MAX_BYTES:
        whole = call_guarded(encode_frame, JobBatch(batch, jobs), max_bytes=max_bytes)
        if isinstance(whole, Returned):
            return [whole.value], {}
    frames, unfit = list[bytearray](), dict[int, str]()
    for job in jobs:
        single = call_guarded(encode_frame, JobBatch(batch, (job,)), max_bytes=max_bytes)
        if isinstance(single, Returned):
            frames.append(single.value)
        else:
            unfit[job.number] = f"cannot be sent to a child process: {in_one_line(single.error)}"
    return frames, unfit
