"""Answers to one asker: a queue of its own, bound to a direct exchange, as Celery's mailbox has it.

Who asks by remote control names a routing key to answer to. The answers are pushed to the list of
every queue that is bound with that key, so they wait for the asker, unlike a broadcast. The queue
goes when the asker leaves; the list of one that died goes REPLY_QUEUE_TTL_MS after the last answer.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from umbel.brokers.interface import Broadcast
from umbel.brokers.redis.address import Address
from umbel.brokers.redis.keys import SEP, Keys
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.publishing import delivery_tags
from umbel.errors import BrokerError
from umbel.wire.envelope_redis import seal_broadcast, unseal

REPLY_PREFIX, REPLY_SUFFIX = "reply.", ".pidbox"
REPLY_QUEUE_TTL_MS = 60_000
BINDING_LIFE_MS = 3_600_000  # how long 5.7 leaves the bindings of expiring queues alone
BLOCK_S = 1


def is_direct(exchange: str) -> bool:
    return exchange.startswith(REPLY_PREFIX) and exchange.endswith(REPLY_SUFFIX)


def answer(keys: Keys, one: Broadcast, bound: Sequence[bytes]) -> list[Sequence[Any]]:
    """Push to every queue that is bound with this very routing key; `bound` is the exchange's set."""
    (tag,) = delivery_tags(1)
    envelope = seal_broadcast(one.exchange, one.routing_key, one.body, one.headers, tag)
    commands: list[Sequence[Any]] = []
    for member in bound:
        key, _, queue = [*member.decode(errors="replace").split(SEP), "", ""][:3]
        if key == one.routing_key and queue:
            name = keys.list_of(queue, 0)
            commands += (("LPUSH", name, envelope), ("PEXPIRE", name, REPLY_QUEUE_TTL_MS))
    return commands


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
        await self._link.connect()

    async def leave(self) -> None:
        # On another connection: this one may be in a blocked wait, and nobody should wait for that.
        self._link.close()
        lists = [name for queue in self._queues.values() for name in self._keys.lists_of(queue)]
        with suppress(BrokerError):  # what cannot be removed now is swept later
            await self._tidy_on.call_all(
                [("SREM", self._keys.binding(self._exchange), *self._members()), ("DEL", *lists)]
            )

    async def __aiter__(self) -> AsyncIterator[Broadcast]:
        routing_keys = {self._keys.list_of(queue, 0): key for key, queue in self._queues.items()}
        while True:
            found = await self._link.call("BRPOP", *routing_keys, BLOCK_S)
            if found is not None:
                message = unseal(found[1]).message
                key = routing_keys[found[0].decode()]
                yield Broadcast(self._exchange, key, message.body, message.headers)

    async def _bind(self) -> None:
        link, keys = self._link, self._keys
        seconds, _ = (await link.reply_to(link.send([("TIME",)])))[0]
        deadline = int(seconds) * 1000 + BINDING_LIFE_MS
        await link.reply_to(
            link.send(
                [
                    ("SADD", keys.binding(self._exchange), *self._members()),
                    ("ZADD", keys.binding_deadlines(), "GT", deadline, self._exchange),
                ]
            )
        )

    def _members(self) -> list[str]:
        return [f"{key}{SEP}{SEP}{queue}" for key, queue in self._queues.items()]
