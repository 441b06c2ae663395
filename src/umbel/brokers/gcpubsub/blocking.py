"""BlockingLink: calls to Pub/Sub from any thread, one after the other, on one connection."""

import socket
from time import monotonic

from umbel.brokers.gcpubsub.address import Address
from umbel.brokers.gcpubsub.api import Call
from umbel.brokers.gcpubsub.http import Answer, AnswerReader, encode_request
from umbel.brokers.gcpubsub.refusals import cut_off, error_of, unreachable
from umbel.brokers.gcpubsub.tokens import Tokens
from umbel.brokers.tls import nothing_to_read

REPLY_S = 30.0
_READ_BYTES = 256 * 1024


class BlockingLink:
    def __init__(self, address: Address, tokens: Tokens, *, connect_timeout_s: float) -> None:
        self.address = address
        self._tokens = tokens
        self._timeout_s = connect_timeout_s
        self._socket: socket.socket | None = None

    def call(self, call: Call) -> bytes:
        """The body of the answer; BrokerError for any other answer than yes."""
        token = self._tokens.known
        if token is None:
            token = self._tokens.fetch()
        request = encode_request(call.verb, self.address.authority, call.path, call.body, token)
        connection, answer = self._connection(), None
        try:
            connection.settimeout(REPLY_S)
            connection.sendall(request)
            answer = self._read(connection)
        except OSError as error:
            raise unreachable(self.address, error, REPLY_S) from None
        finally:
            if answer is None or not answer.keeps_open:
                self.close()
        if answer.status >= 300:
            raise error_of(answer, self.address, call.what)
        return answer.body

    def close(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def abandon(self) -> None:
        """In a forked child: the connection is the parent's, who goes on with it."""
        connection, self._socket = self._socket, None
        if connection is not None:
            socket.socket(fileno=connection.detach()).close()

    def _connection(self) -> socket.socket:
        if self._socket is not None and _has_ended(self._socket):
            self.close()
        if self._socket is None:
            try:
                plain = socket.create_connection((self.address.host, self.address.port), self._timeout_s)
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                tls = self.address.tls_context()
                self._socket = (
                    plain if tls is None else tls.wrap_socket(plain, server_hostname=self.address.host)
                )
            except OSError as error:
                raise unreachable(self.address, error, self._timeout_s) from None
        return self._socket

    def _read(self, connection: socket.socket) -> Answer:
        answers, ends = AnswerReader(), monotonic() + REPLY_S
        while True:
            connection.settimeout(max(0.01, ends - monotonic()))
            data = connection.recv(_READ_BYTES)
            answer = answers.feed(data) if data else answers.end()
            if answer is not None:
                return answer
            if not data:
                raise cut_off(self.address)


def _has_ended(connection: socket.socket) -> bool:
    """Whether the server closed an idle connection: it has nothing to say on one."""
    connection.setblocking(False)
    try:
        connection.recv(1)
    except OSError as error:
        return not nothing_to_read(error)
    return True
