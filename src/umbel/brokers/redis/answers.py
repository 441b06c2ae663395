"""Answers to one asker: its reply queue, bound to a direct exchange, as Celery's mailbox has it.

Who asks by remote control names a routing key to answer to. The answers are pushed to the list of
every queue that is bound with that key, so they wait for the asker, unlike a broadcast. The queue
goes when the asker leaves. One that died leaves nothing behind either: its list ends
REPLY_QUEUE_TTL_MS after the last answer, and its binding, which it does not renew any more, is swept
by the next asker or by any worker.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from umbel.brokers.interface import Broadcast
from umbel.brokers.redis.address import Address
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.publishing import delivery_tags
from umbel.errors import BrokerError
from umbel.wire.control import REPLY_EXCHANGE, is_for_replies
from umbel.wire.envelope_redis import seal_broadcast, unseal

REPLY_QUEUE_TTL_MS = 30_000
ASKER_LIFE_S, RENEW_EVERY_S = 20, 5.0
BLOCK_S = 1

is_direct = is_for_replies


def answer(keys: Keys, one: Broadcast, bound: Sequence[bytes]) -> list[Sequence[Any]]:
    """Push to every queue that is bound with this very routing key; `bound` is the exchange's set."""
    commands: list[Sequence[Any]] = []
    beginning = one.routing_key.encode(errors="replace") + keys.sep.encode()
    for member in bound:
        if not member.startswith(beginning):
            continue
        _, _, queue = [*member.decode(errors="replace").split(keys.sep), "", ""][:3]
        if queue:
            (tag,) = delivery_tags(1)
            envelope = seal_broadcast(one.exchange, one.routing_key, one.body, one.headers, tag)
            name = keys.list_of(queue, 0)
            commands += (("LPUSH", name, envelope), ("PEXPIRE", name, REPLY_QUEUE_TTL_MS))
    return commands


async def sweep_askers(link: Link, keys: Keys) -> int:
    """Remove what askers that died left behind; how many there were."""
    swept: int = await link.run(keys.script("askers"), "sweep", keys.prefix, REPLY_EXCHANGE, 0)
    return swept


class AnswerQueue:
    """A subscription to a direct exchange; its patterns are routing keys, taken as they are."""

    def __init__(
        self,
        addresses: Sequence[Address],
        keys: Keys,
        exchange: str,
        routing_keys: Sequence[str],
        *,
        timeout_s: float,
        tidy_on: Link,
    ) -> None:
        self._keys = keys
        self._exchange = exchange
        self._tidy_on = tidy_on
        self._queues = {key: f"{key}.{exchange}" for key in routing_keys}
        self._link = Link(
            addresses,
            connect_timeout_s=timeout_s,
            reply_timeout_s=timeout_s + BLOCK_S,
            on_connect=self._bind,
        )

    async def enter(self) -> None:
        await sweep_askers(self._tidy_on, self._keys)
        await self._link.connect()

    async def leave(self) -> None:
        # On another connection: this one may be in a blocked wait, and nobody should wait for that.
        self._link.close()
        with suppress(BrokerError):  # what cannot be removed now is swept later
            await self._tidy_on.run(self._keys.script("askers"), *self._about("leave"))

    async def __aiter__(self) -> AsyncIterator[Broadcast]:
        routing_keys = {self._keys.list_of(queue, 0): key for key, queue in self._queues.items()}
        renew_at = monotonic() + RENEW_EVERY_S
        while True:
            found = await self._link.call("BRPOP", *routing_keys, BLOCK_S)
            if found is not None:
                message = unseal(found[1]).message
                key = routing_keys[found[0].decode()]
                yield Broadcast(self._exchange, key, message.body, message.headers)
            if monotonic() > renew_at:
                renew_at = monotonic() + RENEW_EVERY_S
                await self._tidy_on.run(self._keys.script("askers"), *self._about("renew"))

    async def _bind(self) -> None:
        link = self._link
        enter = ("EVAL", self._keys.script("askers").text, 0, *self._about("enter"))
        link.checked(await link.reply_to(link.send([enter])))

    def _about(self, verb: str) -> list[Any]:
        return [verb, self._keys.prefix, self._exchange, ASKER_LIFE_S, *self._members()]

    def _members(self) -> list[str]:
        return [self._keys.binding_member(key, "", queue) for key, queue in self._queues.items()]
