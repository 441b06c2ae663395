"""RedisProducer: publishing from any thread, before or after a fork, in one round trip.

While the server cannot be reached, `publish` raises; other calls are retried for as long as the connect
time-out. A call whose connection broke before the reply may be sent twice: at least once.
"""

from collections.abc import Sequence
from itertools import chain
from time import monotonic
from typing import Any

from umbel.brokers.interface import Broadcast, BrokerSettings, Capabilities
from umbel.brokers.redis.address import parse_addresses
from umbel.brokers.redis.keys import CAPABILITIES, Keys, cluster_of
from umbel.brokers.redis.publishing import (
    DECLARE_AGAIN_S,
    Bindings,
    Command,
    append_arguments,
    fan_out,
    hold_arguments,
    publication,
    questions,
    reply_commands,
    revokes_to_record,
)
from umbel.brokers.redis.replies import ServerRefused, checked
from umbel.brokers.redis.sockets import SocketConnection, SocketPool
from umbel.protocol.delivery.trust import ClusterId
from umbel.wire.control import is_for_replies
from umbel.wire.message import Outgoing
from umbel.wire.records import Revoke


class RedisProducer:
    """The synchronous producer, for clients and running tasks."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        addresses = parse_addresses(settings.url)
        self._keys = Keys.of(settings, addresses[0].database)
        self._bindings = Bindings(self._keys, settings.declared)
        self._pool = SocketPool(addresses, timeout_s=settings.connect_timeout_s)

    @property
    def capabilities(self) -> Capabilities:
        """What Redis supports as a broker."""
        return CAPABILITIES

    def publish(self, batch: Sequence[Outgoing]) -> None:
        """Publish the batch as a whole, without a retry: the caller decides how long to wait for a server."""
        if not batch:
            return
        if not self._bindings.are_plain(batch):
            read = self._bindings.read(batch)
            found = self._pool.use(lambda link: link.call_all(read), patience_s=0.0) if read else []
            batch = self._bindings.route_all(batch, found)
        made = publication(self._keys, batch)
        self._pool.use(lambda connection: self._publish(connection, batch, *made), patience_s=0.0)

    def revoke(self, revokes: Sequence[Revoke]) -> None:
        """Record revokes in batches; RevokesFull when the record is at its limit."""
        for batch in revokes_to_record(revokes, self._settings.revokes_max):
            batch.check(self._pool.run(self._keys.script("revoke"), *batch.arguments))

    def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> None:
        """Publish to the channels of Celery, and replies to the queues of their clients."""
        if batch and ttl_s > 0:
            self._pool.use(lambda connection: self._broadcast(connection, batch))

    def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        """Append events while a recorder is registered; how many entries were stored."""
        if not entries:
            return 0
        args = append_arguments(entries, counts, self._settings.event_log_max)
        stored: int = self._pool.run(self._keys.script("event_log"), *args)
        return stored

    def hold_unique(self, key: str, task_id: str, *, ttl_s: float) -> str:
        """Take the key if it is free; returns the id of the task that holds it now."""
        holder: bytes = self._pool.run(self._keys.script("unique"), *hold_arguments(key, task_id, ttl_s))
        return holder.decode()

    def cluster_id(self) -> ClusterId | None:
        """The id stored in this database, if any."""
        return cluster_of(self._pool.use(lambda connection: connection.call("GET", self._keys.cluster)))

    def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        """(key, task id): free each key that this task holds."""
        if held:
            self._pool.run(self._keys.script("unique"), "release", *chain.from_iterable(held))

    def close(self) -> None:
        """Close the idle connections of the pool."""
        self._pool.close()

    def _publish(
        self,
        connection: SocketConnection,
        batch: Sequence[Outgoing],
        args: list[Any],
        commands: list[Command],
    ) -> None:
        if args:
            connection.run(self._keys.script("publish"), *args)
        now = monotonic()
        if now > connection.declare_again_at:
            connection.declared.clear()
            connection.declare_again_at = now + DECLARE_AGAIN_S
        new: set[str] = set()
        if len(batch) > 1 or batch[0].queue not in connection.declared:
            new = {outgoing.queue for outgoing in batch} - connection.declared
        declared = self._bindings.declare(new) if new else []
        if commands or declared:
            replies = connection.exchange([*declared, *commands])
            try:
                # Consumers declare too, so a refused declaration is ignored: the messages are sent.
                checked(replies[len(declared) :], connection.address)
            except ServerRefused:  # the script's error text is clearer
                connection.run(self._keys.script("publish"), *questions(self._keys, batch))
                raise
        if new:
            connection.declared |= new

    def _broadcast(self, connection: SocketConnection, batch: Sequence[Broadcast]) -> None:
        commands = fan_out(self._keys, [item for item in batch if not is_for_replies(item.exchange)])
        for message in batch:
            if is_for_replies(message.exchange):
                bound = connection.call("SMEMBERS", self._keys.binding(message.exchange))
                commands += reply_commands(self._keys, message, bound)
        if commands:
            connection.call_all(commands)
