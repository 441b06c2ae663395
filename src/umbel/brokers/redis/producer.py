"""RedisProducer: publishing from any thread, before or after a fork, in one round trip.

While the server cannot be reached, `publish` raises, and another call is tried again for as long as
the connect time-out. A call whose connection broke before the reply may be sent twice: at least once.
"""

import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

from umbel.brokers.interface import Broadcast, BrokerSettings, Capabilities
from umbel.brokers.redis.address import parse_addresses
from umbel.brokers.redis.answers import answer, is_direct
from umbel.brokers.redis.bindings import Bindings, refusal
from umbel.brokers.redis.broker import CAPABILITIES
from umbel.brokers.redis.event_log import append_arguments
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.publishing import Command, fan_out, publication, questions
from umbel.brokers.redis.replies import ServerRefused, checked
from umbel.brokers.redis.revokes import revokes_to_record
from umbel.brokers.redis.scripts import script
from umbel.brokers.redis.sockets import SocketConnection, SocketPool
from umbel.wire.message import Outgoing
from umbel.wire.revoke import Revoke

DECLARE_AGAIN_S = 10.0

_LOG, _REVOKE, _UNIQUE = script("event_log"), script("revoke"), script("unique")


class RedisProducer:
    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        addresses = parse_addresses(settings.url)
        self._keys = Keys.of(settings, addresses[0].database)
        self._bindings = Bindings(self._keys, settings.declared)
        self._pool = SocketPool(addresses, timeout_s=settings.connect_timeout_s)

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def publish(self, batch: Sequence[Outgoing]) -> None:
        if not batch:
            return
        if exchanges := self._bindings.exchanges(batch):
            batch = self._routed(batch, exchanges)
        made = publication(self._keys, batch)
        # Who waits for a server that is away, and how long, is decided in front of this.
        self._pool.use(lambda connection: self._publish(connection, batch, *made), patience_s=0.0)

    def revoke(self, revokes: Sequence[Revoke]) -> None:
        for batch in revokes_to_record(self._keys, revokes, self._settings.revokes_max):
            batch.check(self._pool.run(_REVOKE, *batch.arguments))

    def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> None:
        if batch and ttl_s > 0:
            self._pool.use(lambda connection: self._broadcast(connection, batch))

    def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        if not entries:
            return 0
        args = append_arguments(self._keys, entries, counts, self._settings.event_log_max)
        kept: int = self._pool.run(_LOG, *args)
        return kept

    def hold_unique(self, key: str, task_id: str, *, ttl_s: float) -> str:
        ttl_ms = max(1, round(ttl_s * 1000))
        holder: bytes = self._pool.run(_UNIQUE, "hold", self._keys.prefix, key, task_id, ttl_ms)
        return holder.decode()

    def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        if held:
            self._pool.run(_UNIQUE, "release", self._keys.prefix, *chain.from_iterable(held))

    def close(self) -> None:
        self._pool.close()

    def _routed(self, batch: Sequence[Outgoing], exchanges: Sequence[str]) -> Sequence[Outgoing]:
        read = self._bindings.read(exchanges)
        tables = self._pool.use(lambda connection: connection.call_all(read), patience_s=0.0)
        routed = self._bindings.route(batch, dict(zip(exchanges, tables, strict=True)))
        if routed.refused:
            raise refusal(routed.refused)
        return routed.batch

    def _publish(
        self,
        connection: SocketConnection,
        batch: Sequence[Outgoing],
        args: list[Any],
        commands: list[Command],
    ) -> None:
        if args:
            connection.run(self._keys.script("publish"), self._keys.prefix, *args)
        now = time.monotonic()
        if now > connection.declare_again_at:  # the server may have been emptied meanwhile
            connection.declared.clear()
            connection.declare_again_at = now + DECLARE_AGAIN_S
        new: set[str] = set()
        if len(batch) > 1 or batch[0].queue not in connection.declared:
            new = {outgoing.queue for outgoing in batch} - connection.declared
        declared = self._bindings.declare(new) if new else []
        if commands or declared:
            replies = connection.exchange([*declared, *commands])
            try:
                # Who consumes declares too, so that may be refused: the messages are there all the same.
                checked(replies[len(declared) :], connection.address)
            except ServerRefused:  # the script says it in better words
                connection.run(self._keys.script("publish"), self._keys.prefix, *questions(self._keys, batch))
                raise
        if new:
            connection.declared |= new

    def _broadcast(self, connection: SocketConnection, batch: Sequence[Broadcast]) -> None:
        commands = fan_out(self._keys, [one for one in batch if not is_direct(one.exchange)])
        for one in batch:
            if is_direct(one.exchange):
                bound = connection.call("SMEMBERS", self._keys.binding(one.exchange))
                commands += answer(self._keys, one, bound)
        if commands:
            connection.call_all(commands)
