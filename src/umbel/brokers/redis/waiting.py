"""Waiting: how an idle worker learns of a message without taking it and without asking again.

The server itself tells: a connection with client tracking reads the lengths of the lists, and is
then told, once, when one of them changes (made for caches; Redis >= 6, Valkey). One connection
serves any number of queues and priorities, nothing is popped, and Celery's consumers of the same
lists notice nothing. A blocked `BLMOVE list list RIGHT RIGHT` takes nothing either, but needs one
connection for each list.

Where tracking is not to be had (some proxies), the lengths are asked for every POLL_S.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from umbel.brokers.redis.address import Address
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link

POLL_S = 0.25


class Watch:
    def __init__(self, addresses: Sequence[Address], keys: Keys, *, timeout_s: float) -> None:
        self._keys = keys
        self._rings = 0
        self._waiting: set[asyncio.Future[bool]] = set()
        self._recheck_s = math.inf
        self._link = Link(
            addresses,
            connect_timeout_s=timeout_s,
            reply_timeout_s=timeout_s,
            resp3=True,
            on_push=self._changed,
            on_connect=self._track,
            on_lost=self._ring,
        )

    async def wait(self, queues: Sequence[str], timeout_s: float) -> None:
        """Return when one of the queues may have a message that is due, or at the time-out."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            seen = self._rings
            due_s = await self._due_s(queues)
            left_s = deadline - loop.time()
            # Who was rung for claims at once: to ask again first would cost an idle worker a round trip.
            if due_s <= 0.0 or left_s <= 0.0 or self._rings != seen:
                return
            if await self._is_rung_within(min(left_s, due_s, self._recheck_s)):
                return

    def close(self) -> None:
        self._link.close()

    async def _due_s(self, queues: Sequence[str]) -> float:
        """The seconds until one of the queues has a message, as far as one can know now.

        Asking is also what arms the server to tell of the next change.
        """
        lists = [("LLEN", key) for queue in queues for key in self._keys.lists_of(queue)]
        delayed = [("ZRANGE", self._keys.delayed(queue), 0, 0, "WITHSCORES") for queue in queues]
        replies = await self._link.call_all([("TIME",), *lists, *delayed])
        if any(replies[1 : 1 + len(lists)]):
            return 0.0
        seconds, microseconds = replies[0]
        now_s = int(seconds) + int(microseconds) / 1e6
        firsts = [first[0][1] for first in replies[1 + len(lists) :] if first]
        return min(firsts) - now_s if firsts else math.inf

    async def _is_rung_within(self, timeout_s: float) -> bool:
        loop = asyncio.get_running_loop()
        ring: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(timeout_s, _settle, ring, False)
        self._waiting.add(ring)
        try:
            return await ring
        finally:
            timer.cancel()
            self._waiting.discard(ring)

    async def _track(self) -> None:
        # Straight to the connection: this is part of making it.
        (reply,) = await self._link.reply_to(self._link.send([("CLIENT", "TRACKING", "ON")]))
        self._recheck_s = math.inf if reply == b"OK" else POLL_S

    def _changed(self, pushed: list[Any]) -> None:
        self._ring()

    def _ring(self) -> None:
        self._rings += 1
        for ring in self._waiting:
            _settle(ring, True)


def _settle(ring: asyncio.Future[bool], value: bool) -> None:
    if not ring.done():
        ring.set_result(value)
