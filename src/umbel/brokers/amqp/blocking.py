"""BlockingLink: a connection to RabbitMQ for threads, as plain calls on a socket.

For clients and running tasks, which have no event loop of ours. It sends no heartbeats, because
nobody would send them between two calls: none are agreed, and a connection that died while it was
idle is found out, and replaced, at its next use.
"""

import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from umbel.brokers.amqp.frames import (
    PROTOCOL_HEADER,
    BadFrames,
    FrameReader,
    Incoming,
    Method,
    encode_method,
)
from umbel.brokers.amqp.handshake import REPLY_TIMEOUT_S, Handshake
from umbel.brokers.amqp.location import Location
from umbel.brokers.amqp.refusals import channel_refusal, connection_refusal, unreachable
from umbel.brokers.tls import nothing_to_read
from umbel.errors import BrokerUnavailable

RECEIVE_BYTES = 65_536
SEND_BUFFER_BYTES = 1_048_576  # the larger, the larger the batches that are sent in one piece
PIECE, UNCONFIRMED_MAX = 1000, 5000
_ACK, _NACK = int(Method.BASIC_ACK), int(Method.BASIC_NACK)


class BlockingLink:
    """One connection and one channel at a time; not for two threads at once."""

    def __init__(self, location: Location, *, timeout_s: float, name: str) -> None:
        self.location = location
        self.deliveries: list[Incoming] = []
        self.returned: list[Incoming] = []
        self.blocked = ""
        self._reader = FrameReader()
        self._arrived: list[Incoming] = []
        self._published = 0
        self._socket = self._connect(timeout_s, name)

    def call(self, method: Method, *fields: Any) -> Incoming:
        self.send(encode_method(1, method, *fields))
        return self._next_answer()

    def send(self, data: bytes) -> None:
        try:
            self._socket.settimeout(REPLY_TIMEOUT_S)
            self._socket.sendall(data)
        except OSError as error:
            raise self._lost(error) from None

    def publish(self, frames: Iterable[bytes]) -> list[int]:
        """Publish messages and return when the server has answered for all; places of those it refused.

        A large batch goes out in pieces, so that its confirmations are read while it is sent.
        """
        batch = list(frames)
        unconfirmed: dict[int, None] = {}
        refused: list[int] = []
        first = self._published + 1
        for start in range(0, len(batch), PIECE):
            piece = batch[start : start + PIECE]
            self.send(b"".join(piece))
            unconfirmed |= dict.fromkeys(range(self._published + 1, self._published + len(piece) + 1))
            self._published += len(piece)
            is_last = start + PIECE >= len(batch)
            while len(unconfirmed) > (0 if is_last else UNCONFIRMED_MAX):
                refused += [number - first for number in self._read_refused(unconfirmed)]
        return refused

    def reopen_channel(self) -> None:
        """After `ChannelClosed`, go on with a new channel."""
        self.call(Method.CHANNEL_OPEN, "")
        self.call(Method.CONFIRM_SELECT, False)
        self._published = 0

    def receive(self, timeout_s: float | None) -> None:
        """Wait for a delivery, which is then in `deliveries`; at the time-out there is none."""
        if self.deliveries:
            return
        try:
            self._next(timeout_s, until_delivery=True)
        except TimeoutError:
            return

    def is_stale(self) -> bool:
        """Whether the server has closed the connection, as far as can be told without asking."""
        try:
            self._arrived += self._read(0.0)
        except (OSError, BadFrames) as error:
            return not nothing_to_read(error)
        return any(incoming.method == Method.CONNECTION_CLOSE for incoming in self._arrived)

    def close(self) -> None:
        try:
            self._socket.settimeout(1.0)
            self._socket.sendall(encode_method(0, Method.CONNECTION_CLOSE, 200, "bye", 0, 0))
            self._socket.recv(RECEIVE_BYTES)  # its goodbye; what else it says concerns nobody now
        except OSError:
            pass
        self._socket.close()

    def interrupt(self) -> None:
        """End the connection under a thread that waits on it; the thread sees that it was lost."""
        with suppress(OSError):  # it had ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """In a forked child: the connection is the parent's, so nothing is said on it."""
        socket.socket.close(self._socket)

    def _connect(self, timeout_s: float, name: str) -> socket.socket:
        try:
            plain = socket.create_connection((self.location.host, self.location.port), timeout=timeout_s)
        except OSError as error:
            raise unreachable(self.location, error) from None
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _keep_alive(plain)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            self._socket = plain
            if (context := self.location.tls_context()) is not None:
                self._socket = context.wrap_socket(plain, server_hostname=self.location.host)
            self._shake_hands(timeout_s, name)
        except (OSError, BadFrames) as error:
            self._socket.close()
            raise unreachable(self.location, error) from None
        except BaseException:
            self._socket.close()
            raise
        return self._socket

    def _shake_hands(self, timeout_s: float, name: str) -> None:
        handshake = Handshake(self.location, heartbeat_s=0, name=name)
        self._socket.sendall(PROTOCOL_HEADER)
        while not handshake.is_done():
            for incoming in self._read(timeout_s):
                self._socket.sendall(handshake.step(incoming))
        self.reopen_channel()

    def _read_refused(self, unconfirmed: dict[int, None]) -> list[int]:
        """Take out what the server has answered for; the numbers of those it refused."""
        incoming = self._next()
        if incoming.method not in (_ACK, _NACK):
            return []
        tag, multiple = incoming.fields[:2]
        ended = [tag]
        if multiple:
            ended = []
            for one in unconfirmed:
                if one > tag:
                    break
                ended.append(one)
        for one in ended:
            unconfirmed.pop(one, None)
        return ended if incoming.method == _NACK else []

    def _next_answer(self) -> Incoming:
        while True:
            incoming = self._next()
            if incoming.method not in (_ACK, _NACK):
                return incoming

    def _next(self, timeout_s: float | None = REPLY_TIMEOUT_S, *, until_delivery: bool = False) -> Incoming:
        """The next method that is meant for the caller; the rest is dealt with here."""
        while True:
            while not self._arrived:
                try:
                    self._arrived = self._read(timeout_s)
                except TimeoutError:
                    if until_delivery:
                        raise
                    why = self.blocked or "no answer in time"
                    raise self._lost(why) from None
                except (OSError, BadFrames) as error:
                    raise self._lost(error) from None
            incoming = self._arrived.pop(0)
            if not self._dealt_with(incoming):
                return incoming
            if until_delivery and self.deliveries:
                return incoming

    def _dealt_with(self, incoming: Incoming) -> bool:
        match incoming.method:
            case Method.BASIC_DELIVER:
                self.deliveries.append(incoming)
            case Method.BASIC_RETURN:
                self.returned.append(incoming)
            case Method.CONNECTION_BLOCKED:
                self.blocked = incoming.fields[0] or "a resource alarm"
            case Method.CONNECTION_UNBLOCKED:
                self.blocked = ""
            case Method.CHANNEL_CLOSE:
                code, text, _, _ = incoming.fields
                self.send(encode_method(1, Method.CHANNEL_CLOSE_OK))
                raise channel_refusal(self.location, code, text)
            case Method.CONNECTION_CLOSE:
                code, text, _, _ = incoming.fields
                self.send(encode_method(0, Method.CONNECTION_CLOSE_OK))
                self._socket.close()
                raise connection_refusal(self.location, code, text)
            case _:
                return False
        return True

    def _read(self, timeout_s: float | None) -> list[Incoming]:
        self._socket.settimeout(timeout_s)
        data = self._socket.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError("RabbitMQ closed the connection")
        return self._reader.feed(data)

    def _lost(self, why: BaseException | str) -> BrokerUnavailable:
        return BrokerUnavailable(f"the connection to RabbitMQ at {self.location} was lost: {why}")


def _keep_alive(plain: socket.socket) -> None:
    """Let the kernel find out about a peer that went without a word, within half a minute."""
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if (option := getattr(socket, name, None)) is not None:
            plain.setsockopt(socket.IPPROTO_TCP, option, value)
