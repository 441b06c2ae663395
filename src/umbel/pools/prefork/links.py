"""Links: the main process's ends of its connections to child processes and fork servers.

A child has a socket and a token pipe. Writes are queued per child and leave in order, in whole frames. Reads
happen when the event loop reports data. A fork server has a control socket, over which file descriptors are
passed. No method here blocks, except `ended`, which is awaited.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

from umbel.errors import BadFrame
from umbel.pools.guard import Raised, Returned, call_guarded, in_one_line
from umbel.pools.interface import Job, LostJob
from umbel.pools.prefork.kernel import exit_reason
from umbel.pools.prefork.messages import FromChild, FromServer, ToServer
from umbel.pools.prefork.server_process import StartedServer
from umbel.wire.frames import FRAME_MAX_BYTES, FrameReader, JobBatch, encode_frame

# ---- the main process's end of one child -----------------------------------------------------------

log = logging.getLogger(__name__)

STALL_S = 60.0  # a child that begins a frame and writes nothing for this long will not finish it
_NOT_OURS = "invalid data from the child process"
BATCH_FRAME_MAX_BYTES = 256 * 1024  # of bodies; a child can start with a part of a larger batch
_READ_BYTES = 64 * 1024  # below the size at which malloc asks the kernel each time
_TOKENS_READ_BYTES = 4096  # more than two batches need


class ChildLink:
    """The socket and token pipe of one child, and its queued writes.

    `on_messages` is called with received messages. `on_broken` is called once, when the stream can no longer
    be used; its text is empty if the stream merely ended, as it does when a child dies.
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
        self.pid = 0  # until the fork server has created the process
        self.armed = False  # the child has a handler for the soft limit's signal
        self.doom = ""  # why this worker kills it
        self.dismissed = ""  # why the child was asked to end
        self.free_at = 0.0  # Unix time at which the child could start its current job
        self.orphan = False  # whether its fork server has died
        self.problem = ""  # the error that the child reported before it ended
        self.unsaid: dict[int, LostJob] = {}  # jobs that ended without an outcome that could be sent
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
        self._unsent: deque[memoryview] = deque()  # limited: the slots machine sends at most two batches
        self._open = True
        self._stalled: asyncio.TimerHandle | None = None  # set while a frame is incomplete
        self._resume: asyncio.TimerHandle | None = None  # set while reading is paused
        self._loop.add_reader(self._channel, self._on_readable)

    @property
    def broken(self) -> bool:
        """Return whether the socket has been closed."""
        return not self._open

    def child_fds(self) -> list[int]:
        """Return the descriptors for the child; the caller calls `handed_over` after passing them on."""
        assert self._theirs is not None
        return [self._theirs.fileno(), self._tokens]

    def handed_over(self) -> None:
        """Close the main process's copies of the child's descriptors; otherwise the end of the stream is
        never seen.
        """
        if self._theirs is not None:
            self._theirs.close()
            self._theirs = None

    def put_tokens(self, batch: int, count: int) -> None:
        """Allow the child to start this many jobs of the batch."""
        written = os.write(self._tokens_in, bytes((batch,)) * count)
        assert written == count, "two batches of tokens fit into a pipe"

    def take_tokens(self) -> bytes:
        """Take back the tokens that the child has not taken, so that the child can no longer take them."""
        try:
            return os.read(self._tokens, _TOKENS_READ_BYTES)
        except BlockingIOError:
            return b""

    def send(self, *frames: bytearray) -> None:
        """Write whole frames to the child, now or when its socket has room; do nothing after the link is
        broken.
        """
        if not self._open:
            return
        waits = bool(self._unsent)
        self._unsent += map(memoryview, frames)
        if not waits:
            self._write()
            if self._unsent:
                self._loop.add_writer(self._channel, self._on_writable)

    def pause_reading(self, pause_s: float) -> None:
        """Pause reading, so that outcomes collect in the socket and are read together."""
        if self._open and self._resume is None:
            self._loop.remove_reader(self._channel)
            self._resume = self._loop.call_later(pause_s, self._resume_reading)

    def _resume_reading(self) -> None:
        self._resume = None
        self._loop.add_reader(self._channel, self._on_readable)

    def drain(self) -> None:
        """Read the remaining data of a dead child from the socket."""
        while self._open and self._on_readable():
            pass

    def close(self) -> None:
        """Close the socket and the token pipe; may be called twice."""
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
        """Write as much as the socket accepts now."""
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
        except OSError:  # the child has ended; the reader notices that
            unsent.clear()

    def _on_readable(self) -> bool:
        """Read from the socket; return whether there may be more data."""
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
        if self._open:  # otherwise a handler of its messages has closed it
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
    """Encode a batch as one frame, or as one frame per job if it would be large; the child treats both alike.

    Also return, by job number, why jobs are omitted: too large for a frame, or not encodable.
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


# ---- server link -----------------------------------------------------------------------------------

_END_S, _END_STEP_S = 15.0, 0.005  # longer than the server waits for a descendant that does not end


class ServerLink:
    """The control socket of a fork server, and the server's process.

    `on_messages` is called with received messages, `on_lost` once if the server ends without being closed.
    """

    def __init__(
        self,
        server: StartedServer,
        *,
        on_messages: Callable[["ServerLink", Sequence[FromServer]], None],
        on_lost: Callable[["ServerLink"], None],
    ) -> None:
        self.loaded = False
        self.problem = ""  # why the server could not load the app
        self._on_messages = on_messages
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._reader: FrameReader[FromServer] = FrameReader(FromServer)
        self._unsent: deque[tuple[bytearray, Sequence[int], Callable[[], None] | None]] = deque()
        self._control, self._process = server.control, server.process
        self._control.setblocking(False)
        self.pid = self._process.pid  # the guard's pid, until the server reports its own
        self._loop.add_reader(self._control, self._on_readable)

    def send(
        self, message: ToServer, fds: Sequence[int] = (), sent: Callable[[], None] | None = None
    ) -> None:
        """Send a message, now or when the socket has room; call `sent` when the descriptors can be closed."""
        self._unsent.append((encode_frame(message), fds, sent))
        if len(self._unsent) == 1:
            self._on_writable()

    def close(self) -> None:
        """Close the control socket; the server then ends with every descendant."""
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control)
            self._loop.remove_writer(self._control)
            self._control.close()
            if not self.loaded:
                self._process.kill()  # it has no children yet, and does not read while it imports the app

    def dismiss(self, then: Callable[["ServerLink"], None]) -> None:
        """End a replaced server without children; call `then` when it has ended."""
        self.close()
        self._await_end(then)

    async def ended(self) -> None:
        """Wait until the server, and so every descendant, has ended."""
        give_up_at = self._loop.time() + _END_S
        while self._process.poll() is None:
            if self._loop.time() > give_up_at:
                self._process.kill()
            await asyncio.sleep(_END_STEP_S)

    def reason(self) -> str:
        """Describe how the server ended; may be called only after its end."""
        code = self._process.returncode
        assert code is not None, "reason() is called after the end"
        status = -code if code < 0 else code << 8
        return f"the fork server ended: {exit_reason(self.pid, status)}"

    def _on_writable(self) -> None:
        while self._unsent:
            frame, fds, sent = self._unsent[0]
            try:
                count = socket.send_fds(self._control, [frame], fds) if fds else self._control.send(frame)
            except BlockingIOError:
                self._loop.add_writer(self._control, self._on_writable)
                return
            except OSError:  # the server has ended; the reader notices that
                count = len(frame)
            if sent is not None:
                sent()
            self._unsent.popleft()
            if count < len(frame):
                # the descriptors were sent with the first byte
                self._unsent.appendleft((frame[count:], (), None))
        if self._control.fileno() >= 0:  # otherwise it was closed, and the listener is not notified yet
            self._loop.remove_writer(self._control)

    def _on_readable(self) -> None:
        try:
            data = self._control.recv(_READ_BYTES)
            messages = self._reader.feed(data)
        except BlockingIOError:
            return
        except (OSError, BadFrame):
            data, messages = b"", []
        if messages:
            self._on_messages(self, messages)
        if not data:
            self.close()
            self._process.kill()  # it may have closed the socket without ending
            self._await_end(self._on_lost)

    def _await_end(self, then: Callable[["ServerLink"], None]) -> None:
        if self._process.poll() is None:
            self._loop.call_later(_END_STEP_S, self._await_end, then)
        else:
            then(self)
