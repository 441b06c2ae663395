"""RedisAsyncProducer: publishing from an event loop, on the loop's one connection to the server.

A script stores the message together with a record that it was sent, so the same message again changes
nothing while that record lasts: a publish whose reply never came can be repeated. Clients without an event
loop do not load this file: asyncio takes three megabytes.
"""

from collections.abc import Sequence
from itertools import chain
from time import monotonic
from typing import Any

from umbel.brokers.interface import SENT_REMEMBERED_S, Attempt, BrokerSettings, Capabilities
from umbel.brokers.redis import link
from umbel.brokers.redis.address import parse_addresses
from umbel.brokers.redis.keys import CAPABILITIES, Keys
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.publishing import (
    DECLARE_AGAIN_S,
    Bindings,
    check_weight,
    delivery_tags,
    hold_arguments,
    sealed,
)
from umbel.errors import AccessRefused
from umbel.wire.message import Outgoing

_REMEMBERED_MS = round(SENT_REMEMBERED_S * 1000)


class RedisAsyncProducer:
    """The producer for the clients of one event loop; they share a connection."""

    repeats = True

    def __init__(self, settings: BrokerSettings) -> None:
        self._addresses = parse_addresses(settings.url)
        self._timeout_s = settings.connect_timeout_s
        self._keys = Keys.of(settings, self._addresses[0].database)
        self._bindings = Bindings(self._keys, settings.declared)
        self._held: link.LoopLink | None = None
        self._declared: set[str] = set()
        self._declared_on = 0  # the generation of the link
        self._declare_again_at = 0.0

    @property
    def capabilities(self) -> Capabilities:
        """What Redis supports as a broker."""
        return CAPABILITIES

    async def publish(self, batch: Sequence[Outgoing], attempt: Attempt) -> None:
        """Publish the batch in one script; messages sent within SENT_REMEMBERED_S are left out."""
        if not batch:
            return
        link = self._link()
        check_weight(batch)
        await link.connect()
        if not self._bindings.are_plain(batch):
            batch = self._bindings.route_all(batch, await link.call_all(self._bindings.read(batch)))
        await self._declare(link, {outgoing.queue for outgoing in batch})
        args: list[Any] = []
        for outgoing, tag in zip(batch, delivery_tags(len(batch)), strict=True):
            key = self._keys.list_of(outgoing.queue, outgoing.message.priority)
            args += (outgoing.message.correlation_id, key, sealed(outgoing, tag, outgoing.not_before))
        await link.connect()
        was_out, attempt.is_out = attempt.is_out, True
        try:
            await link.run(self._keys.script("publish_once"), _REMEMBERED_MS, *args)
        except AccessRefused:  # the server refused, and has done nothing
            attempt.is_out = was_out
            raise

    async def hold_unique(self, key: str, task_id: str, *, ttl_s: float) -> str:
        """Take the key if it is free; returns the id of the task that holds it now."""
        holder: bytes = await self._link().run(
            self._keys.script("unique"), *hold_arguments(key, task_id, ttl_s)
        )
        return holder.decode()

    async def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        """(key, task id): free each key that this task holds."""
        if held:
            await self._link().run(self._keys.script("unique"), "release", *chain.from_iterable(held))

    async def close(self) -> None:
        """Release the loop's connection; the last to release it closes it."""
        held, self._held = self._held, None
        if held is not None:
            link.release_loop_link(held)

    def abandon(self) -> None:
        """Forget the connections of closed loops."""
        self._held = None
        link.abandon_loop_links()

    def _link(self) -> Link:
        if self._held is None:
            self._held = link.hold_loop_link(self._addresses, timeout_s=self._timeout_s)
        return self._held.link

    async def _declare(self, link: Link, queues: set[str]) -> None:
        """Make queues known. Their consumers declare them, too, so a refusal is ignored and the messages are
        sent.
        """
        now = monotonic()
        if link.generation != self._declared_on or now > self._declare_again_at:
            self._declared.clear()  # another server, or one that was emptied meanwhile
            self._declared_on, self._declare_again_at = link.generation, now + DECLARE_AGAIN_S
        new = queues - self._declared
        if new:
            await link.attempt_all(self._bindings.declare(new))
            self._declared |= new
