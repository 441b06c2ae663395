"""PubsubProducer: publishing from any thread, before or after a fork, confirmed on return.

One connection for all threads, used in turns. A forked child leaves its parent's connection alone and
opens its own. HTTP rather than gRPC, whose threads do not survive a fork (decision 32).
"""

import os
import threading
from collections.abc import Sequence
from weakref import WeakSet

from umbel.brokers.gcpubsub import api, posts
from umbel.brokers.gcpubsub.address import address_from_url
from umbel.brokers.gcpubsub.blocking import BlockingLink
from umbel.brokers.gcpubsub.capabilities import CAPABILITIES
from umbel.brokers.gcpubsub.posts import Post
from umbel.brokers.gcpubsub.refusals import Missing
from umbel.brokers.gcpubsub.tokens import Tokens
from umbel.brokers.gcpubsub.topology import Calls, Topology, next_of
from umbel.brokers.gcpubsub.unsupported import refuse
from umbel.brokers.interface import Broadcast, BrokerSettings, Capabilities
from umbel.brokers.refusals import unbound
from umbel.clock import cluster_now
from umbel.errors import BrokerRefused
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.wire.message import Outgoing
from umbel.wire.revoke import Revoke

_producers: "WeakSet[PubsubProducer]" = WeakSet()


class PubsubProducer:
    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        address = address_from_url(settings.url)
        self._project = address.project
        self._tokens = Tokens(address)
        self._link = BlockingLink(address, self._tokens, connect_timeout_s=settings.connect_timeout_s)
        exactly_once = settings.exactly_once or address.exactly_once
        self._topology = Topology(settings, address.project, exactly_once=exactly_once)
        self._lock = threading.RLock()
        _producers.add(self)

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def publish(self, batch: Sequence[Outgoing]) -> None:
        with self._lock:
            for queue in {one.queue for one in batch if not one.exchange}:
                self._make(self._topology.make_queue(queue))
            now = cluster_now()
            self._send([posts.task(one, self._topology.names, now) for one in batch])

    def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> None:
        heard = [one for one in batch if one.exchange != EVENT_EXCHANGE]
        if ttl_s <= 0 or not heard:
            return
        with self._lock:
            for exchange in {one.exchange for one in heard}:
                self._make(self._topology.make_topic(exchange, self._settings.subscription_expires_s))
            self._send([posts.broadcast(one) for one in heard])

    def revoke(self, revokes: Sequence[Revoke]) -> None:
        refuse("revokes")

    def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        return 0  # nobody can record them

    def hold_unique(self, key: str, task_id: str, *, ttl_s: float) -> str:
        refuse("unique")

    def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        refuse("unique")

    def close(self) -> None:
        with self._lock:
            self._link.close()

    def after_fork(self) -> None:
        """In the child: another thread of the parent may have held the lock."""
        self._lock = threading.RLock()
        self._tokens.after_fork()
        self._link.abandon()

    def _send(self, sent: Sequence[Post]) -> None:
        for places in posts.requests(sent):
            portion = [sent[place] for place in places]
            try:
                self._link.call(api.publish(self._project, portion))
            except Missing:
                self._send_again(portion)
            except BrokerRefused as refused:
                targets = ", ".join(sorted({repr(one.target) for one in portion})[:3])
                raise BrokerRefused(f"cannot send a message to {targets}: {refused}") from None

    def _send_again(self, portion: Sequence[Post]) -> None:
        """To a topic that was deleted since it was made; to one that nobody made, nothing is sent."""
        topic, names = portion[0].topic, self._topology.names
        queues = [queue for queue in self._topology.made if names.place(queue).topic == topic]
        was_known = topic in self._topology.topics
        self._topology.forget(topic)
        if not queues and not was_known:
            raise BrokerRefused(
                f"cannot send a message: {unbound(topic, portion[0].attributes.get('routing_key', ''))}"
            )
        for queue in queues:
            self._make(self._topology.make_queue(queue))
        self._make(self._topology.make_topic(topic, self._settings.subscription_expires_s))
        self._link.call(api.publish(self._project, portion))

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
