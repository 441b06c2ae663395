"""RedisAsyncProducer: publishing from an event loop, on the one connection that it has to the server.

A message and the mark that it was sent are one script, so the same message again changes nothing
while the mark lasts: a publish whose reply never came can be repeated.
"""

from collections.abc import Sequence
from itertools import chain
from time import monotonic
from typing import Any

from umbel.brokers.interface import (
    SENT_REMEMBERED_S,
    Attempt,
    BrokerSettings,
    Capabilities,
)
from umbel.brokers.redis import loop_links
from umbel.brokers.redis.address import parse_addresses
from umbel.brokers.redis.bindings import Bindings, refusal
from umbel.brokers.redis.broker import CAPABILITIES
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.producer import DECLARE_AGAIN_S
from umbel.brokers.redis.publishing import check_weight, delivery_tags, sealed
from umbel.brokers.redis.scripts import script
from umbel.errors import AccessRefused
from umbel.wire.message import Outgoing

_PUBLISH, _UNIQUE = script("publish_once"), script("unique")
_REMEMBERED_MS = round(SENT_REMEMBERED_S * 1000)


class RedisAsyncProducer:
    repeats = True

    def __init__(self, settings: BrokerSettings) -> None:
        self._addresses = parse_addresses(settings.url)
        self._timeout_s = settings.connect_timeout_s
        self._keys = Keys.of(settings, self._addresses[0].database)
        self._bindings = Bindings(self._keys, settings.declared)
        self._held: loop_links.LoopLink | None = None
        self._declared: set[str] = set()
        self._declared_on = 0  # the generation of the link
        self._declare_again_at = 0.0

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    async def publish(self, batch: Sequence[Outgoing], attempt: Attempt) -> None:
        if not batch:
            return
        link = self._link()
        check_weight(batch)
        await link.connect()
        if exchanges := self._bindings.exchanges(batch):
            batch = await self._routed(link, batch, exchanges)
        await self._declare(link, {one.queue for one in batch})
        args = _arguments(self._keys, batch)
        await link.connect()
        was_out, attempt.is_out = attempt.is_out, True
        try:
            await link.run(_PUBLISH, self._keys.prefix, _REMEMBERED_MS, *args)
        except AccessRefused:  # the server's answer: it has done nothing of this
            attempt.is_out = was_out
            raise

    async def hold_unique(self, key: str, task_id: str, *, ttl_s: float) -> str:
        ttl_ms = max(1, round(ttl_s * 1000))
        holder: bytes = await self._link().run(_UNIQUE, "hold", self._keys.prefix, key, task_id, ttl_ms)
        return holder.decode()

    async def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        if held:
            await self._link().run(_UNIQUE, "release", self._keys.prefix, *chain.from_iterable(held))

    async def close(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            loop_links.release(held)

    def abandon(self) -> None:
        self._held = None
        loop_links.abandon()

    def _link(self) -> Link:
        if self._held is None:
            self._held = loop_links.hold(self._addresses, timeout_s=self._timeout_s)
        return self._held.link

    async def _routed(
        self, link: Link, batch: Sequence[Outgoing], exchanges: Sequence[str]
    ) -> Sequence[Outgoing]:
        tables = await link.call_all(self._bindings.read(exchanges))
        routed = self._bindings.route(batch, dict(zip(exchanges, tables, strict=True)))
        if routed.refused:
            raise refusal(routed.refused)
        return routed.batch

    async def _declare(self, link: Link, queues: set[str]) -> None:
        """Who consumes declares too, so that may be refused: the messages come all the same."""
        now = monotonic()
        if link.generation != self._declared_on or now > self._declare_again_at:
            self._declared.clear()  # another server, or one that was emptied meanwhile
            self._declared_on, self._declare_again_at = link.generation, now + DECLARE_AGAIN_S
        new = queues - self._declared
        if new:
            await link.attempt_all(self._bindings.declare(new))
            self._declared |= new


def _arguments(keys: Keys, batch: Sequence[Outgoing]) -> list[Any]:
    """Of the script after the prefix and the time: id, list and envelope of each message."""
    args: list[Any] = []
    for one, tag in zip(batch, delivery_tags(len(batch)), strict=True):
        key = keys.list_of(one.queue, one.message.priority)
        args += (one.message.correlation_id, key, sealed(one, tag, one.not_before))
    return args
