"""AmqpProducer: publishing from any thread, before or after a fork, confirmed on return.

One connection for all threads, used in turns. A forked child leaves its parent's connection
alone and opens its own.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from time import monotonic, sleep, time
from typing import Any, TypeVar
from weakref import WeakSet

from umbel.brokers.amqp import outbox, topology
from umbel.brokers.amqp.blocking import BlockingLink
from umbel.brokers.amqp.capabilities import CAPABILITIES
from umbel.brokers.amqp.declared import TaskQueues
from umbel.brokers.amqp.frames import Incoming, Method, encode_ack, encode_publish
from umbel.brokers.amqp.location import locations_from_url
from umbel.brokers.amqp.outbox import Post, refusal
from umbel.brokers.amqp.records import FactsView, QueueFact, RevokeView, encode_record
from umbel.brokers.amqp.refusals import FULL, BrokerStarting, ChannelClosed, closed_publish
from umbel.brokers.amqp.streams import OFFSET, PREFETCH, Followed, offset_of
from umbel.brokers.amqp.topology import Exchange, Queue
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
        self._turns = cycle(self._locations)
        self._lock = threading.RLock()
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
        posts = outbox.tasks(batch, self._queues, cluster_now())
        with self._ready() as link:
            self._send(link, posts)

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
        """Publish what is made elsewhere: results, on their way to who asked for them."""
        with self._ready() as link:
            self._send(link, posts)

    def close(self) -> None:
        with self._lock:
            link, self._link = self._link, None
            if link is not None:
                link.close()

    def after_fork(self) -> None:
        """In the child: another thread of the parent may have held the lock."""
        self._lock = threading.RLock()
        link, self._link = self._link, None
        self._declared = set()
        if link is not None:
            link.abandon()

    @contextmanager
    def _ready(self) -> Iterator[BlockingLink]:
        """The connection, for this thread alone; one that failed is not used again."""
        with self._lock:
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
        for location in [next(self._turns) for _ in self._locations]:
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

    def _send(self, link: BlockingLink, posts: Sequence[Post]) -> None:
        queues = {post.queue.name: post.queue for post in posts if post.queue is not None}
        for queue in queues.values():
            self._declare(link, queue)
        for via in {post.via.name: post.via for post in posts if post.via is not None}.values():
            self._declare(link, via)
        if not posts:
            return
        try:
            nacked = link.publish([post.frames(1) for post in posts])
        except ChannelClosed as error:
            raise closed_publish(link.location, error) from None
        if nacked:
            raise refusal(dict.fromkeys(nacked, FULL), posts)
        returned, link.returned = link.returned, []
        if returned:
            self._send_again(link, returned, queues)
            if unroutable := {(one.fields[2], one.fields[3]) for one in returned if one.fields[2]}:
                raise refusal(
                    {
                        place: unbound(post.exchange, post.key)
                        for place, post in enumerate(posts)
                        if (post.exchange, post.key) in unroutable
                    },
                    posts,
                )

    def _send_again(self, link: BlockingLink, returned: Sequence[Incoming], queues: dict[str, Queue]) -> None:
        """Those whose queues were deleted since they were declared."""
        again = [one for one in returned if not one.fields[2]]
        for key in {one.fields[3] for one in again}:
            self._declared.discard(key)
            self._declare(link, queues[key])
        link.publish(
            encode_publish(1, "", one.fields[3], one.properties, one.body, mandatory=True) for one in again
        )
        if link.returned:
            key, link.returned = link.returned[0].fields[3], []
            raise BrokerRefused(f"the queue {key!r} was deleted twice while publishing; message not sent")

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
                link.publish([outbox.entry(topology.FACTS, encode_record(QueueFact(what.name))).frames(1)])

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
