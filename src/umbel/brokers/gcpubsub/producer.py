"""PubsubProducer: publishing from any thread, before or after a fork, confirmed on return.

All threads share one connection and take turns. A forked child leaves its parent's connection alone and opens
another. The connection speaks HTTP, not gRPC, whose threads do not survive a fork (decision 32).
"""

import os
import socket
import threading
from collections.abc import Sequence
from time import monotonic
from weakref import WeakSet

from umbel.brokers.gcpubsub import api, posts
from umbel.brokers.gcpubsub.api import Calls, Topology, next_of
from umbel.brokers.gcpubsub.capabilities import CAPABILITIES
from umbel.brokers.gcpubsub.http import (
    READ_BYTES,
    REPLY_S,
    Address,
    Answer,
    AnswerReader,
    Call,
    NotFound,
    Tokens,
    address_from_url,
    body_of,
    cut_off,
    encode_request,
    unreachable,
)
from umbel.brokers.gcpubsub.posts import Post
from umbel.brokers.interface import Broadcast, BrokerSettings
from umbel.brokers.refusals import unsupported_blocking
from umbel.brokers.tls import nothing_to_read
from umbel.clock import cluster_now
from umbel.errors import BrokerRefused
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.wire.message import Outgoing

# ---- blocking link ---------------------------------------------------------------------------------


class BlockingLink:
    """One connection for blocking calls, one call at a time; a broken connection is replaced at the next
    call.
    """

    def __init__(self, address: Address, tokens: Tokens, *, connect_timeout_s: float) -> None:
        self.address = address
        self._tokens = tokens
        self._timeout_s = connect_timeout_s
        self._socket: socket.socket | None = None
        self._is_calling = False

    def call(self, call: Call) -> bytes:
        """Return the body of a successful answer; any other answer raises a BrokerError."""
        if not self._is_calling:
            self._is_calling = True
            try:
                return self._call(call)
            finally:
                self._is_calling = False
        # A signal handler: the answer to the call that it interrupted is still to come on the connection.
        other = BlockingLink(self.address, self._tokens, connect_timeout_s=self._timeout_s)
        try:
            return other.call(call)
        finally:
            other.close()

    def _call(self, call: Call) -> bytes:
        token = self._tokens.known
        if token is None:
            token = self._tokens.fetch()
        request = encode_request(call, self.address, token)
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
        return body_of(answer, call, self.address)

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def abandon(self) -> None:
        """Close the socket in a forked child without shutting down TLS: the connection is the parent's."""
        connection, self._socket, self._is_calling = self._socket, None, False
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
            data = connection.recv(READ_BYTES)
            answer = answers.feed(data) if data else answers.end()
            if answer is not None:
                return answer
            if not data:
                raise cut_off(self.address)


def _has_ended(connection: socket.socket) -> bool:
    """Whether the server has closed an idle connection; it sends nothing on a healthy one."""
    connection.setblocking(False)
    try:
        connection.recv(1)
    except OSError as error:
        return not nothing_to_read(error)
    return True


# ---- pubsub producer -------------------------------------------------------------------------------

_producers: "WeakSet[PubsubProducer]" = WeakSet()


class PubsubProducer:
    """The blocking producer of clients and running tasks.

    Its lock is re-entrant, because a signal handler may send while the thread that it interrupted does.
    """

    capabilities = CAPABILITIES
    revoke = unsupported_blocking(CAPABILITIES.reasons["revokes"])
    hold_unique = release_unique = unsupported_blocking(CAPABILITIES.reasons["unique"])
    cluster_id = unsupported_blocking(CAPABILITIES.reasons["signatures"])

    def __init__(self, settings: BrokerSettings) -> None:
        address = address_from_url(settings.url)
        self._project = address.project
        self._tokens = Tokens(address)
        self._link = BlockingLink(address, self._tokens, connect_timeout_s=settings.connect_timeout_s)
        self._topology = Topology(settings, address)
        self._lock = threading.RLock()
        _producers.add(self)

    def publish(self, batch: Sequence[Outgoing]) -> None:
        """Send task messages, confirmed on return; raise BrokerRefused if one was refused."""
        with self._lock:
            for queue in {outgoing.queue for outgoing in batch if not outgoing.exchange}:
                self._make(self._topology.make_queue(queue))
            now = cluster_now()
            self._send([posts.task(outgoing, self._topology.names, now) for outgoing in batch])

    def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> None:
        """Send to all current listeners; events are dropped, because no node can listen to them."""
        deliverable = [message for message in batch if message.exchange != EVENT_EXCHANGE]
        if ttl_s <= 0 or not deliverable:
            return
        with self._lock:
            for exchange in {message.exchange for message in deliverable}:
                self._make(self._topology.make_topic(exchange))
            self._send([posts.broadcast(message) for message in deliverable])

    def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        """Return 0: Pub/Sub has no event log, so nothing is logged."""
        return 0  # there is no event log

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        with self._lock:
            self._link.close()

    def after_fork(self) -> None:
        """Replace the lock in a forked child: another thread of the parent may have held it."""
        self._lock = threading.RLock()
        self._tokens.after_fork()
        self._link.abandon()

    def _send(self, sent: Sequence[Post]) -> None:
        for places in posts.requests(sent):
            portion = [sent[place] for place in places]
            topic = portion[0].topic
            was_made = topic in self._topology.topics
            try:
                self._link.call(api.publish(self._project, portion))
            except NotFound:
                if not was_made:
                    raise BrokerRefused(f"cannot send a message: {posts.unbound_post(portion[0])}") from None
                self._make(self._topology.make_again(topic))  # it was deleted
                self._link.call(api.publish(self._project, portion))
            except BrokerRefused as refused:
                targets = ", ".join(sorted({repr(post.target) for post in portion})[:3])
                raise BrokerRefused(f"cannot send a message to {targets}: {refused}") from None

    def _make(self, calls: Calls) -> None:
        answer: bytes | BrokerRefused | None = None
        while (call := next_of(calls, answer)) is not None:
            try:
                answer = self._link.call(call)
            except BrokerRefused as refused:
                answer = refused


def _after_fork() -> None:
    for producer in _producers:
        producer.after_fork()


os.register_at_fork(after_in_child=_after_fork)
