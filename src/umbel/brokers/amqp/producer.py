"""AmqpProducer: publishing from any thread, before or after a fork, confirmed on return.

All threads share one connection and send to queues at the same time. A thread that declares, reads a stream
or sends a message that may close the channel has the connection to itself meanwhile. A forked child leaves
its parent's connection alone and opens another.

Messages that were written and have no answer are not written again on the same connection, and are flagged as
redelivered on another (`Unanswered`).
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import monotonic, sleep, time
from typing import Any, TypeVar
from weakref import WeakSet

from umbel.brokers.amqp import publishing, topology
from umbel.brokers.amqp.blocking import PIECE, BlockingLink, Published, SharedExclusiveLock
from umbel.brokers.amqp.confirms import Batch, Unanswered
from umbel.brokers.amqp.frames import Incoming, Method, encode_ack
from umbel.brokers.amqp.handshake import (
    FULL,
    Addresses,
    BrokerStarting,
    ChannelClosed,
    Location,
    Undecided,
    blocked_by,
)
from umbel.brokers.amqp.publishing import DELETED_AGAIN, Post, Refusals, refusal
from umbel.brokers.amqp.signature_view import ClusterView
from umbel.brokers.amqp.streams import (
    OFFSET,
    PREFETCH,
    FactsView,
    QueueFact,
    RevokeView,
    StreamPosition,
    encode_record,
    offset_of,
)
from umbel.brokers.amqp.topology import CAPABILITIES, Exchange, Queue, TaskQueues
from umbel.brokers.interface import Broadcast, BrokerSettings
from umbel.brokers.refusals import unbound, unsupported_blocking
from umbel.clock import cluster_now
from umbel.errors import BrokerError, BrokerRefused, BrokerUnavailable, MayHaveArrived
from umbel.protocol.delivery.trust import ClusterId
from umbel.wire.message import Outgoing
from umbel.wire.records import Revoke

RECORDERS_FRESH_S = 1.0
STARTING_PAUSE_S = 0.1

T = TypeVar("T")
_producers: "WeakSet[AmqpProducer]" = WeakSet()


class AmqpProducer:
    """The blocking producer of clients and running tasks."""

    capabilities = CAPABILITIES
    hold_unique = release_unique = unsupported_blocking(CAPABILITIES.reasons["unique"])

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._queues = TaskQueues(settings)
        self._addresses = Addresses(settings.url)
        self._turns = SharedExclusiveLock()
        self._link: BlockingLink | None = None
        self._unanswered: Unanswered[BlockingLink] = Unanswered()
        self._declared: set[Exchange | str] = set()
        self._revokes, self._facts = StreamPosition(RevokeView()), StreamPosition(FactsView())
        self._facts_read_at = float("-inf")
        _producers.add(self)

    def cluster_id(self) -> ClusterId | None:
        """Return the id that signatures are bound to; None if the cluster has none."""
        view = ClusterView()
        with self._ready() as link:
            if self._exists(link, topology.CLUSTER):
                self._follow(link, topology.CLUSTER, StreamPosition(view))
        return view.found

    def publish(self, batch: Sequence[Outgoing]) -> None:
        """Send task messages, confirmed on return; raise MayHaveArrived if the connection was lost before the
        answer.
        """
        posts = publishing.sendable_tasks(batch, self._queues, cluster_now())
        try:
            self.send(posts)
        except BrokerUnavailable as error:
            if self._unanswered.may_have_arrived(posts):
                raise MayHaveArrived(str(error)) from error
            raise

    def revoke(self, revokes: Sequence[Revoke]) -> None:
        """Record revokes for all workers; raise RevokesFull at the limit."""
        with self._ready() as link:
            self._follow(link, topology.REVOKES, self._revokes)
            view = self._revokes.view
            assert isinstance(view, RevokeView)
            view.check_room(revokes, self._settings.revokes_max, cluster_now())
            self._send_all(
                link, [publishing.entry(topology.REVOKES, encode_record(revoke)) for revoke in revokes]
            )

    def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> None:
        """Send to all current listeners; messages that wait in a queue longer than `ttl_s` are dropped."""
        if ttl_s <= 0:
            return
        posts = [publishing.broadcast(sent, ttl_s) for sent in batch]
        with self._ready() as link:
            for name in {sent.exchange for sent in batch}:
                self._declare(link, topology.exchange(name))
            self._send_all(link, posts)

    def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        """Log events if a recorder is registered; return the number of logged entries."""
        with self._ready() as link:
            if monotonic() - self._facts_read_at > RECORDERS_FRESH_S:
                self._follow(link, topology.FACTS, self._facts)
                self._facts_read_at = monotonic()
            view = self._facts.view
            assert isinstance(view, FactsView)
            if not view.recorders:
                return 0
            self._declare(link, topology.event_stream(self._settings))
            self._send_all(link, publishing.log_entries(entries, counts, time()))
            return len(entries)

    def send(self, posts: Sequence[Post]) -> None:
        """Publish together with other threads, or alone if something has to be declared first."""
        published = None
        try:
            if all(post.is_plain for post in posts) and not self._turns.is_inside:
                with suppress(Undecided):  # sent again alone, which shows which message is refused
                    published = self._send_together(posts)
            if published is None or published.returned:
                with self._ready() as link:
                    refused = self._send(link, posts, published)
            else:
                refused = dict.fromkeys(published.refused, FULL)
        except BrokerRefused:
            self._unanswered.forget(posts)
            raise
        if self._unanswered.given_up:
            self._unanswered.forget(posts)
        if refused:
            raise refusal(refused, posts)

    def close(self) -> None:
        """Close the connection; in a signal handler, end it without waiting for other threads."""
        if self._turns.is_inside and self._link is not None:  # a signal handler must not wait
            self._link.interrupt()
            return
        with self._turns.alone():
            link, self._link = self._link, None
            if link is not None:
                link.close()

    def after_fork(self) -> None:
        """Start afresh in a forked child: other threads of the parent may have been sending."""
        self._turns = SharedExclusiveLock()
        link, self._link = self._link, None
        self._unanswered = Unanswered()
        self._declared = set()
        if link is not None:
            link.abandon()

    def _send_together(self, posts: Sequence[Post]) -> Published | None:
        """Publish; None if a connection or a queue has to be created first, which a thread does alone."""
        with self._turns:
            link, declared = self._link, self._declared
            if link is None or link.is_stale():
                return None
            if any(post.queue is not None and post.queue.name not in declared for post in posts):
                return None
            return self._publish(link, posts) if self._unanswered.given_up else self._write(link, posts)

    @contextmanager
    def _ready(self) -> Iterator[BlockingLink]:
        """Yield the connection, for this thread alone; a failed connection is not used again."""
        if self._turns.is_inside:  # a signal handler: the code that it interrupted uses the connection
            own = self._connect()
            try:
                yield own
            finally:
                own.close()
            return
        with self._turns.alone():
            if self._link is not None and self._link.is_stale():
                self._drop()
            link = self._link = self._link or self._connect()
            if link.blocked:
                raise blocked_by(link.location, link.blocked)
            try:
                yield link
            except BrokerError:
                if link.error is not None:
                    self._drop()
                raise
            except BaseException:
                # The answer to an interrupted call is still to come; the next call would take it for its own.
                self._drop()
                raise

    def _connect(self) -> BlockingLink:
        return self._addresses.connect(self._connect_to)

    def _connect_to(self, location: Location) -> BlockingLink:
        name = f"umbel client {os.getpid()}"
        return BlockingLink(location, timeout_s=self._settings.connect_timeout_s, name=name)

    def _drop(self) -> None:
        link, self._link = self._link, None
        self._declared = set()
        # The next server may not have the same streams.
        self._revokes, self._facts = StreamPosition(RevokeView()), StreamPosition(FactsView())
        self._facts_read_at = float("-inf")
        if link is not None:
            link.abandon()

    def _send_all(self, link: BlockingLink, posts: Sequence[Post]) -> None:
        if refused := self._send(link, posts):
            raise refusal(refused, posts)

    def _send(
        self, link: BlockingLink, posts: Sequence[Post], published: Published | None = None
    ) -> Refusals:
        """Publish, or continue if they are `published`; send returned messages again."""
        if published is None:
            for queue in {post.queue.name: post.queue for post in posts if post.queue is not None}.values():
                self._declare(link, queue)
            for via in {post.via.name: post.via for post in posts if post.via is not None}.values():
                self._declare(link, via)
            published = self._publish(link, posts)
        refused = dict.fromkeys(published.refused, FULL)
        if published.returned:
            refused |= self._send_again(link, {place: posts[place] for place in published.returned})
        return refused

    def _send_again(self, link: BlockingLink, returned: Mapping[int, Post]) -> Refusals:
        """Send again to queues that were deleted since they were declared; return why the others were
        refused.
        """
        refused = {place: unbound(*post.route) for place, post in returned.items() if post.exchange}
        again = {place: post for place, post in returned.items() if not post.exchange}
        for queue in {post.key: post.queue for post in again.values()}.values():
            if queue is not None:
                self._declared.discard(queue.name)
                self._declare(link, queue)
        places, published = [*again], self._publish(link, [*again.values()])
        refused |= {places[number]: DELETED_AGAIN for number in published.returned}
        return refused | {places[number]: FULL for number in published.refused}

    def _publish(self, link: BlockingLink, posts: Sequence[Post]) -> Published:
        """Publish the posts that the server has not accepted yet.

        Return when it has acknowledged or refused them.
        """
        if link.blocked:  # it confirms nothing now
            raise blocked_by(link.location, link.blocked, is_written=True)
        for batch, earlier in self._unanswered.under_way(posts):
            try:
                earlier.answered(batch)
            except BrokerError:
                if batch.is_under_way:
                    raise
        plan = self._unanswered.plan(posts)
        places, published = [*plan.to_send], self._write(link, [*plan.to_send.values()])
        refused = {places[number] for number in published.refused}
        return Published(refused | {*plan.refused}, [places[number] for number in published.returned])

    def _write(self, link: BlockingLink, posts: Sequence[Post]) -> Published:
        if not posts:
            return Published((), ())
        batches: list[Batch] = []
        published, frames = None, [post.frames(1) for post in posts]
        try:
            published = link.publish(frames, [post.sent for post in posts], batches)
        finally:
            # Accepted messages are not sent again, even if a later step fails.
            if published is None or published.returned:
                for number, batch in enumerate(batches):
                    self._unanswered.add(posts[number * PIECE : (number + 1) * PIECE], batch, link)
        return published

    def _declare(self, link: BlockingLink, what: Queue | Exchange) -> None:
        key = what.name if isinstance(what, Queue) else what
        if key in self._declared:
            return
        try:
            self._make(link, what)
        except ChannelClosed as refused:
            kind = "queue" if isinstance(what, Queue) else "exchange"
            raise ChannelClosed(
                refused.code, f"the {kind} {what.name!r} cannot be used: {refused.text}"
            ) from None
        self._declared.add(key)

    def _make(self, link: BlockingLink, what: Queue | Exchange) -> None:
        if isinstance(what, Exchange) or not self._exists(link, what.name):
            for method, fields in what.calls():
                self._call_when_ready(link, method, *fields)
            if isinstance(what, Queue) and what.is_task:  # announce the queue to all nodes
                self._declare(link, topology.stream_of_facts())
                known = [publishing.entry(topology.FACTS, encode_record(QueueFact(what.name)))]
                self._when_ready(link, lambda: self._write(link, known))

    def _exists(self, link: BlockingLink, queue: str) -> bool:
        method, fields = topology.passive(queue)
        return _unless_missing(link, lambda: self._call_when_ready(link, method, *fields)) is not None

    def _call_when_ready(self, link: BlockingLink, method: Method, *fields: Any) -> Incoming:
        return self._when_ready(link, lambda: link.call(method, *fields))

    def _when_ready(self, link: BlockingLink, work: Callable[[], T]) -> T:
        """Retry while the server is starting, for as long as connecting may take."""
        deadline = monotonic() + self._settings.connect_timeout_s
        while True:
            try:
                return work()
            except BrokerStarting:
                if monotonic() > deadline:
                    raise
            sleep(STARTING_PAUSE_S)
            link.reopen_channel()

    def _follow(self, link: BlockingLink, stream: str, followed: StreamPosition) -> None:
        """Read the stream from where the last call stopped to its end."""
        for queue in topology.streams(self._settings):
            if queue.name == stream:
                self._declare(link, queue)

        def begin() -> None:
            link.call(Method.BASIC_QOS, 0, PREFETCH, False)
            start = {OFFSET: followed.next_offset or "first"}
            link.call(Method.BASIC_CONSUME, 0, stream, "f", False, False, False, False, start)

        self._when_ready(link, begin)  # a stream that was just declared may have no replica yet
        is_new = True
        while is_new:
            link.call(Method.BASIC_QOS, 0, PREFETCH, False)
            link.call(Method.BASIC_QOS, 0, PREFETCH, False)
            is_new = bool(link.deliveries)
            for incoming in link.deliveries:
                followed.read(offset_of(incoming), incoming.body)
                link.send(encode_ack(1, incoming.fields[1]))
            link.deliveries = []
        link.call(Method.BASIC_CANCEL, "f", False)
        link.deliveries = []


def _unless_missing(link: BlockingLink, call: Callable[[], T]) -> T | None:
    try:
        return call()
    except ChannelClosed as refused:
        if refused.code != ChannelClosed.NOT_FOUND:
            raise
        link.reopen_channel()
        return None


def _after_fork() -> None:
    for producer in _producers:
        producer.after_fork()


os.register_at_fork(after_in_child=_after_fork)
