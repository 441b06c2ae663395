"""AmqpProducer: publishing from any thread, before or after a fork, confirmed on return.

One connection for all threads. They send to queues at the same time; who declares, reads a stream or sends
something that may close the channel has the connection to itself for as long. A forked child leaves its
parent's connection alone and opens its own.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from time import monotonic, sleep, time
from typing import Any, TypeVar
from weakref import WeakSet

from umbel.brokers.amqp import outbox, topology
from umbel.brokers.amqp.blocking import BlockingLink, Published
from umbel.brokers.amqp.capabilities import CAPABILITIES
from umbel.brokers.amqp.confirms import route_of, sent_of
from umbel.brokers.amqp.declared import TaskQueues
from umbel.brokers.amqp.frames import Incoming, Method, encode_ack, encode_publish
from umbel.brokers.amqp.location import locations_from_url
from umbel.brokers.amqp.outbox import DELETED_AGAIN, Post, Refusals, refusal
from umbel.brokers.amqp.records import FactsView, QueueFact, RevokeView, encode_record
from umbel.brokers.amqp.refusals import FULL, BrokerStarting, ChannelClosed, Undecided
from umbel.brokers.amqp.streams import OFFSET, PREFETCH, Followed, offset_of
from umbel.brokers.amqp.topology import Exchange, Queue
from umbel.brokers.amqp.turns import Turns
from umbel.brokers.interface import Broadcast, BrokerSettings, Capabilities
from umbel.brokers.refusals import unbound
from umbel.clock import cluster_now
from umbel.errors import BrokerRefused, BrokerUnavailable, NotSupported, RevokesFull
from umbel.wire.message import Outgoing
from umbel.wire.revoke import Revoke

RECORDERS_FRESH_S = 1.0
STARTING_PAUSE_S = 0.1

T = TypeVar("T")
_producers: "WeakSet[AmqpProducer]" = WeakSet()


class AmqpProducer:
    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._queues = TaskQueues(settings)
        self._locations = locations_from_url(settings.url)
        self._addresses = cycle(self._locations)
        self._turns = Turns()
        self._link: BlockingLink | None = None
        self._declared: set[Exchange | str] = set()
        self._revokes, self._facts = Followed(RevokeView()), Followed(FactsView())
        self._facts_read_at = float("-inf")
        _producers.add(self)

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def hold_unique(self, key: str, task_id: str, *, ttl_s: float) -> str:
        raise NotSupported(CAPABILITIES.reasons["unique"])

    def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        raise NotSupported(CAPABILITIES.reasons["unique"])

    def publish(self, batch: Sequence[Outgoing]) -> None:
        self.send(outbox.tasks(batch, self._queues, cluster_now()))

    def revoke(self, revokes: Sequence[Revoke]) -> None:
        with self._ready() as link:
            self._follow(link, topology.REVOKES, self._revokes)
            view = self._revokes.view
            assert isinstance(view, RevokeView)
            view.check_room(revokes, self._settings.revokes_max, cluster_now())
            self._send(link, [outbox.entry(topology.REVOKES, encode_record(one)) for one in revokes])

    def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> None:
        if ttl_s <= 0:
            return
        posts = [outbox.broadcast(one, ttl_s) for one in batch]
        with self._ready() as link:
            for name in {one.exchange for one in batch}:
                self._declare(link, topology.exchange(name))
            self._send(link, posts)

    def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        with self._ready() as link:
            if monotonic() - self._facts_read_at > RECORDERS_FRESH_S:
                self._follow(link, topology.FACTS, self._facts)
                self._facts_read_at = monotonic()
            view = self._facts.view
            assert isinstance(view, FactsView)
            if not view.recorders:
                return 0
            self._declare(link, topology.event_stream(self._settings))
            self._send(link, outbox.log_entries(entries, counts, time()))
            return len(entries)

    def send(self, posts: Sequence[Post]) -> None:
        """Publish, beside what other threads send unless something has to be made for it first."""
        published = None
        if all(post.is_plain for post in posts) and not self._turns.is_inside:
            with suppress(Undecided):  # alone, it is known whom a refusal concerns
                published = self._send_together(posts)
        if published is None or published.returned:
            with self._ready() as link:
                self._send(link, posts, published)
        elif published.refused:
            raise refusal(dict.fromkeys(published.refused, FULL), posts)

    def close(self) -> None:
        if self._turns.is_inside and self._link is not None:  # a signal's handler: it waits for nobody
            self._link.interrupt()
            return
        with self._turns.alone():
            link, self._link = self._link, None
            if link is not None:
                link.close()

    def after_fork(self) -> None:
        """In the child: other threads of the parent may have been sending."""
        self._turns = Turns()
        link, self._link = self._link, None
        self._declared = set()
        if link is not None:
            link.abandon()

    def _send_together(self, posts: Sequence[Post]) -> Published | None:
        """None: the connection or a queue has to be made first."""
        with self._turns:
            link, declared = self._link, self._declared
            if link is None or link.is_stale():
                return None
            if any(post.queue is not None and post.queue.name not in declared for post in posts):
                return None
            return _published(link, posts)

    @contextmanager
    def _ready(self) -> Iterator[BlockingLink]:
        """The connection, for this thread alone; one that failed is not used again."""
        if self._turns.is_inside:  # a signal's handler: what it interrupted has the connection
            own = self._connect()
            try:
                yield own
            finally:
                own.close()
            return
        with self._turns.alone():
            if self._link is not None and self._link.is_stale():
                self._drop()
            if self._link is None:
                self._link = self._connect()
            try:
                yield self._link
            except BaseException as error:
                # An interrupted call has an answer under way that the next call would take for its own.
                if isinstance(error, ChannelClosed) or not isinstance(error, RevokesFull | BrokerRefused):
                    self._drop()
                raise

    def _connect(self) -> BlockingLink:
        error = BrokerUnavailable("no RabbitMQ address to connect to; set 'broker'")
        for location in [next(self._addresses) for _ in self._locations]:
            try:
                return BlockingLink(
                    location, timeout_s=self._settings.connect_timeout_s, name=f"umbel client {os.getpid()}"
                )
            except BrokerUnavailable as refused:
                error = refused
        raise error

    def _drop(self) -> None:
        link, self._link = self._link, None
        self._declared = set()
        # The next server may not have the same streams.
        self._revokes, self._facts = Followed(RevokeView()), Followed(FactsView())
        self._facts_read_at = float("-inf")
        if link is not None:
            link.abandon()

    def _send(self, link: BlockingLink, posts: Sequence[Post], published: Published | None = None) -> None:
        """Publish, or go on where they are `published`; send again what came back."""
        if published is None:
            for queue in {post.queue.name: post.queue for post in posts if post.queue is not None}.values():
                self._declare(link, queue)
            for via in {post.via.name: post.via for post in posts if post.via is not None}.values():
                self._declare(link, via)
            published = _published(link, posts)
        refused = dict.fromkeys(published.refused, FULL)
        if published.returned:
            refused |= self._send_again(link, published.returned, posts)
        if refused:
            raise refusal(refused, posts)

    def _send_again(
        self, link: BlockingLink, returned: Sequence[Incoming], posts: Sequence[Post]
    ) -> Refusals:
        """Those whose queues were deleted since they were declared; why the others go nowhere."""
        queues = {post.key: post.queue for post in posts if post.queue is not None}
        again = [sent_of(one) for one in returned if not route_of(one)[0]]
        for key in {key for _, key, *_ in again}:
            self._declared.discard(key)
            self._declare(link, queues[key])
        published = link.publish([encode_publish(1, *one, mandatory=True) for one in again], again)
        lost = {route: unbound(*route) for route in map(route_of, returned) if route[0]}
        lost |= {route_of(one): DELETED_AGAIN for one in published.returned}
        lost |= {again[place][:2]: FULL for place in published.refused}
        return {place: lost[post.route] for place, post in enumerate(posts) if post.route in lost}

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
            if isinstance(what, Queue) and what.is_task:  # let it be known
                self._declare(link, topology.stream_of_facts())
                _published(link, [outbox.entry(topology.FACTS, encode_record(QueueFact(what.name)))])

    def _exists(self, link: BlockingLink, queue: str) -> bool:
        method, fields = topology.passive(queue)
        return _unless_missing(link, lambda: self._call_when_ready(link, method, *fields)) is not None

    def _call_when_ready(self, link: BlockingLink, method: Method, *fields: Any) -> Incoming:
        """Declare; a server that is starting gets as long to come up as one that is connected to."""
        deadline = monotonic() + self._settings.connect_timeout_s
        while True:
            try:
                return link.call(method, *fields)
            except BrokerStarting:
                if monotonic() > deadline:
                    raise
            sleep(STARTING_PAUSE_S)
            link.reopen_channel()

    def _follow(self, link: BlockingLink, stream: str, followed: Followed) -> None:
        """Read the stream from where it was last left to its end."""
        for queue in topology.streams(self._settings):
            if queue.name == stream:
                self._declare(link, queue)
        link.call(Method.BASIC_QOS, 0, PREFETCH, False)
        start = {OFFSET: followed.next_offset or "first"}
        link.call(Method.BASIC_CONSUME, 0, stream, "f", False, False, False, False, start)
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


def _published(link: BlockingLink, posts: Sequence[Post]) -> Published:
    return link.publish([post.frames(1) for post in posts], [post.sent for post in posts])


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
