"""Connection: the bytes of one TCP or TLS connection, for threads.

Reading and writing never wait, so that who has the connection for itself lets go of it at once; `wait` does,
and needs nobody's leave. TLS depends on that: its state stands no reader beside a writer.
"""

import select
import socket
from contextlib import suppress

from umbel.brokers.amqp.location import Location
from umbel.brokers.amqp.refusals import unreachable
from umbel.brokers.tls import nothing_to_read

RECEIVE_BYTES = 65_536
SEND_BUFFER_BYTES = 1_048_576  # the larger, the larger the batches that are sent in one piece


class Connection:
    """Not for two threads at once, but for `wait` and `interrupt`."""

    def __init__(self, location: Location, *, timeout_s: float) -> None:
        try:
            plain = socket.create_connection((location.host, location.port), timeout=timeout_s)
        except OSError as error:
            raise unreachable(location, error) from None
        self._socket: socket.socket = plain
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _keep_alive(plain)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            if (context := location.tls_context()) is not None:
                self._socket = context.wrap_socket(plain, server_hostname=location.host)
            self._socket.setblocking(False)
        except OSError as error:
            self.abandon()
            raise unreachable(location, error) from None
        except BaseException:
            self.abandon()
            raise
        self._is_tls = location.tls
        self._unwritten = memoryview(b"")

    @property
    def is_written(self) -> bool:
        return not self._unwritten

    def write(self, data: bytes) -> None:
        """Write what can be written at once; the rest is kept for `write_on`."""
        if self._unwritten:
            data = b"".join((self._unwritten, data))
        self._unwritten = memoryview(data)
        self.write_on()

    def write_on(self) -> None:
        while self._unwritten:
            try:
                self._unwritten = self._unwritten[self._socket.send(self._unwritten) :]
            except OSError as error:
                if not _must_wait(error):
                    raise
                return

    def read(self) -> bytes:
        """What has arrived; "" if nothing has."""
        data = self._read_once()
        if len(data) < RECEIVE_BYTES and not (data and self._is_tls):
            return data
        pieces = [data]  # TLS may have more, of which `wait` knows nothing
        while data := self._read_once():
            pieces.append(data)
        return b"".join(pieces)

    def wait(self, timeout_s: float | None) -> bool:
        """Until something can be read, or written if something is left; False at the time-out."""
        number = self._socket.fileno()
        if number < 0:  # closed: who reads or writes now is told so
            return True
        poll = select.poll()  # one serves one thread
        poll.register(number, select.POLLIN | select.POLLOUT if self._unwritten else select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))

    def interrupt(self) -> None:
        """End it under a thread that waits; the thread sees that it was lost."""
        with suppress(OSError):  # it had ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """Close it without a word, also TLS's: in a forked child it is the parent's."""
        socket.socket.close(self._socket)

    def _read_once(self) -> bytes:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except OSError as error:
            if not _must_wait(error):
                raise
            return b""
        if not data:
            raise ConnectionResetError("RabbitMQ closed the connection")
        return data


def _must_wait(error: OSError) -> bool:
    return nothing_to_read(error) or type(error).__name__ == "SSLWantWriteError"


def _keep_alive(plain: socket.socket) -> None:
    """Let the kernel find out about a peer that went without a word, within half a minute."""
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if (option := getattr(socket, name, None)) is not None:
            plain.setsockopt(socket.IPPROTO_TCP, option, value)
