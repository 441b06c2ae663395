"""The main process's end of the fork server: talks to it, sees it end."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence

from umbel.errors import BadFrame
from umbel.pools.prefork.exits import exit_reason
from umbel.pools.prefork.messages import FromServer, ToServer
from umbel.pools.prefork.server_process import StartedServer
from umbel.wire.frames import FrameReader, encode_frame

_READ_BYTES = 64 * 1024
_END_S, _END_STEP_S = 15.0, 0.005  # longer than the server takes to give up on a descendant


class ServerLink:
    """`on_messages` is called with what arrived; `on_lost` once, when it ended without being closed."""

    def __init__(
        self,
        server: StartedServer,
        *,
        on_messages: Callable[["ServerLink", Sequence[FromServer]], None],
        on_lost: Callable[["ServerLink"], None],
    ) -> None:
        self.loaded = False
        self.problem = ""  # why it could not load the app
        self._on_messages = on_messages
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._reader: FrameReader[FromServer] = FrameReader(FromServer)
        self._unsent: deque[tuple[bytearray, Sequence[int], Callable[[], None] | None]] = deque()
        self._control, self._process = server.control, server.process
        self._control.setblocking(False)
        self.pid = self._process.pid  # its guard's, until it says its own
        self._loop.add_reader(self._control, self._on_readable)

    def send(
        self, message: ToServer, fds: Sequence[int] = (), sent: Callable[[], None] | None = None
    ) -> None:
        """`sent` is called when the descriptors have been passed on and can be closed."""
        self._unsent.append((encode_frame(message), fds, sent))
        if len(self._unsent) == 1:
            self._on_writable()

    def close(self) -> None:
        """The server takes the end of the control socket as its order to end everything."""
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control)
            self._loop.remove_writer(self._control)
            self._control.close()
            if not self.loaded:
                self._process.kill()  # it has no children yet, and while it imports the app it does not look

    def dismiss(self, then: Callable[["ServerLink"], None]) -> None:
        """It has no children left and a successor: let it end; `then` is called when it has."""
        self.close()
        self._await_end(then)

    async def ended(self) -> None:
        """Wait until the server, and so every descendant, is gone."""
        give_up_at = self._loop.time() + _END_S
        while self._process.poll() is None:
            if self._loop.time() > give_up_at:
                self._process.kill()
            await asyncio.sleep(_END_STEP_S)

    def reason(self) -> str:
        code = self._process.returncode
        assert code is not None, "asked when it has ended"
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
            except OSError:  # it is gone; the reader notices
                count = len(frame)
            if sent is not None:
                sent()
            self._unsent.popleft()
            if count < len(frame):
                self._unsent.appendleft((frame[count:], (), None))  # the descriptors went with the first byte
        if self._control.fileno() >= 0:  # else it was closed, and the listener is not notified yet
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
            self._process.kill()  # it may have closed the socket and live on
            self._await_end(self._on_lost)

    def _await_end(self, then: Callable[["ServerLink"], None]) -> None:
        if self._process.poll() is None:
            self._loop.call_later(_END_STEP_S, self._await_end, then)
        else:
            then(self)
