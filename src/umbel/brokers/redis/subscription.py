"""Fan-out: broadcasts by pub/sub, on the channels of Celery.

Redis matches channels by globs, in which `*` runs over dots; AMQP's patterns are stricter. So a
subscription asks the server for a little more than it wants and drops the rest. A channel that
fits two of its globs comes twice, and is taken once.

Pub/sub forgets what is sent while a subscriber's connection is away. A subscription that lost its
connection makes a new one and goes on: it misses what was sent meanwhile, as Celery's do. One that
is not listened to keeps BUFFERED_MAX broadcasts, and BUFFERED_MAX_BYTES of them; then the oldest go, and
are counted.
"""

import asyncio
import logging
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from umbel.brokers.interface import Broadcast
from umbel.brokers.links import link_of, unheard
from umbel.brokers.redis.address import Address
from umbel.brokers.redis.answers import answer, is_direct
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.publishing import fan_out
from umbel.chance import random
from umbel.errors import BrokerError
from umbel.protocol.outage import LinkChange
from umbel.protocol.retry import reconnect_wait_s
from umbel.wire.control import patterns_on
from umbel.wire.envelope_redis import unseal
from umbel.wire.topic import matches

log = logging.getLogger("umbel.brokers.redis")

BUFFERED_MAX, BUFFERED_MAX_BYTES = 50_000, 32 * 2**20
KEEP_ALIVE_S = 5.0


async def broadcast(link: Link, keys: Keys, batch: Sequence[Broadcast]) -> int:
    """Send the batch: how many connections heard of what goes to everybody."""
    commands = fan_out(keys, [one for one in batch if not is_direct(one.exchange)])
    to_all = len(commands)
    bound: dict[str, Any] = {}
    for one in batch:
        if is_direct(one.exchange):
            if one.exchange not in bound:
                bound[one.exchange] = await link.call("SMEMBERS", keys.binding(one.exchange))
            commands += answer(keys, one, bound[one.exchange])
    replies = await link.call_all(commands) if commands else []
    return sum(heard for heard in replies[:to_all] if isinstance(heard, int))


class RedisSubscription:
    def __init__(
        self,
        addresses: Sequence[Address],
        keys: Keys,
        exchange: str,
        patterns: Sequence[str],
        *,
        timeout_s: float,
        on_link: Callable[[LinkChange], None] = unheard,
    ) -> None:
        self._keys = keys
        self._exchange = exchange
        heard = patterns_on(exchange, patterns)
        self._patterns = [pattern.split(".") for pattern in heard]
        self._globs = list(dict.fromkeys(self._glob(pattern) for pattern in heard))
        self._fitting = [re.compile(_as_expression(glob), re.DOTALL) for glob in self._globs]
        self._dropped = 0  # since it was said last
        self._heard: deque[tuple[str, bytes]] = deque()  # routing keys, and messages as they came
        self._heard_bytes = 0
        self._arrived = asyncio.Event()
        self._link = Link(
            addresses,
            connect_timeout_s=timeout_s,
            reply_timeout_s=timeout_s,
            resp3=True,
            on_push=self._take,
            on_connect=self._subscribe,
            on_lost=self._arrived.set,
            name=link_of(exchange),
            on_link=on_link,
        )

    async def enter(self) -> None:
        await self._link.connect()

    async def leave(self) -> None:
        self._link.close()

    async def __aiter__(self) -> AsyncIterator[Broadcast]:
        failures = 0
        while True:
            while self._heard:
                routing_key, payload = self._pop()
                message = unseal(payload).message
                yield Broadcast(self._exchange, routing_key, message.body, message.headers)
            if self._dropped:
                fields = {"exchange": self._exchange, "count": self._dropped}
                log.warning("broadcasts dropped: received faster than they could be processed", extra=fields)
                self._dropped = 0
            self._arrived.clear()
            try:
                # Also what finds out that a silent connection is dead.
                await self._link.call("PING")
                failures = 0
            except BrokerError:
                failures += 1
                await asyncio.sleep(reconnect_wait_s(failures, random()))
                continue
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await self._arrived.wait()
            except TimeoutError:
                continue

    async def _subscribe(self) -> None:
        # The replies come as pushes, one for each glob, so it is the echo that is waited for.
        link = self._link
        commands = [("PSUBSCRIBE", glob) for glob in self._globs]
        link.checked(await link.reply_to(link.send_after(commands, ("PING",))))

    def _take(self, pushed: list[Any]) -> None:
        if pushed[0] != b"pmessage":
            return
        _, glob, channel, payload = pushed
        name = channel.decode(errors="replace")
        first = next((at for at, fits in enumerate(self._fitting) if fits.fullmatch(name)), None)
        if first is None or self._globs[first] != glob.decode(errors="replace"):
            return
        rest = name.removeprefix(self._keys.channel(self._exchange))
        if rest and not rest.startswith("/"):
            return  # another exchange, whose name begins like ours
        routing_key = rest.removeprefix("/")
        words = routing_key.split(".")
        if any(matches(pattern, words) for pattern in self._patterns):
            self._heard.append((routing_key, payload))
            self._heard_bytes += len(payload)
            while len(self._heard) > BUFFERED_MAX or self._heard_bytes > BUFFERED_MAX_BYTES:
                self._pop()
                self._dropped += 1
            self._arrived.set()

    def _pop(self) -> tuple[str, bytes]:
        oldest = self._heard.popleft()
        self._heard_bytes -= len(oldest[1])
        return oldest

    def _glob(self, pattern: str) -> str:
        """A glob that fits at least what the pattern fits: `.#` and `#.` may stand for nothing."""
        escaped = re.sub(r"([\\\[\]?^])", r"\\\1", pattern)
        wide = re.sub(r"\.?#\.?", "*", escaped)
        return self._keys.channel(self._exchange) + ("/" + wide if wide not in ("", "*") else "*")


def _as_expression(glob: str) -> str:
    return "".join(".*" if part == "*" else re.escape(part) for part in re.split(r"(\*)", glob))
