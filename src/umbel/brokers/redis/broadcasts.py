"""Broadcasts: pub/sub on the channels of Celery, replies to one client, and the event log.

Redis matches channels by globs, in which `*` matches dots, too; AMQP's patterns are stricter. So a
subscription asks the server for a little more than it wants and drops the rest. A channel that matches two of
its globs comes twice, and is taken once. Pub/sub forgets what is sent while a subscriber's connection is
lost: a subscription reconnects, and misses what was sent meanwhile, as Celery's do. A subscription that is
not read buffers BUFFERED_MAX broadcasts, and BUFFERED_MAX_BYTES of them; then the oldest are dropped and
counted.

Replies. A client that sends a control request names a routing key for the replies. They are pushed to the
list of every queue that is bound with that key, so they wait for the client, unlike a broadcast. The queue is
removed when the client leaves. A client that died leaves nothing behind either: its list expires
REPLY_QUEUE_TTL_MS after the last reply, and its binding, which it no longer renews, is removed by the next
client or by any worker.

The event log is a stream that retains events until every recorder has read them (`cluster.lua`).
"""

import logging
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from umbel.brokers.interface import Broadcast, EventLogState, LoggedEvent
from umbel.brokers.links import LastingSubscription, ignore_link, link_of
from umbel.brokers.redis.address import Address
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.publishing import fan_out, reply_commands
from umbel.errors import BrokerError
from umbel.patterns import Glob
from umbel.protocol.shutdown import LinkChange
from umbel.wire.control import REPLY_EXCHANGE, is_for_replies, patterns_on
from umbel.wire.envelope_redis import unseal
from umbel.wire.message import matches

# ---- replies to one client -------------------------------------------------------------------------

ASKER_LIFE_S, RENEW_EVERY_S = 20, 5.0
BLOCK_S = 1


async def sweep_askers(link: Link, keys: Keys) -> int:
    """Remove the bindings of clients that died; how many there were."""
    swept: int = await link.run(keys.script("askers"), "sweep", REPLY_EXCHANGE, 0)
    return swept


class ReplyQueue:
    """A subscription to a direct exchange; its patterns are literal routing keys."""

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
        self._link = Link(addresses, timeout_s=timeout_s, on_connect=self._bind)

    async def enter(self) -> None:
        """Connect and bind the queue, after removing those of clients that died."""
        await sweep_askers(self._tidy_on, self._keys)
        await self._link.connect()

    async def leave(self) -> None:
        """Close the connection and remove the queue."""
        # On another connection: this one may be in a blocking wait.
        self._link.close()
        with suppress(BrokerError):  # what cannot be removed now is removed by the next client
            await self._tidy_on.run(self._keys.script("askers"), *self._about("leave"))

    async def __aiter__(self) -> AsyncIterator[Broadcast]:
        routing_keys = {self._keys.list_of(queue, 0): key for key, queue in self._queues.items()}
        renew_at = monotonic() + RENEW_EVERY_S
        while True:
            await self._link.connect()
            sent = self._link.send([("BRPOP", *routing_keys, BLOCK_S)], takes_s=BLOCK_S)
            (found,) = self._link.checked(await self._link.reply_to(sent))
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
        members = (self._keys.binding_member(key, "", queue) for key, queue in self._queues.items())
        return [verb, self._exchange, ASKER_LIFE_S, *members]


# ---- fan-out ---------------------------------------------------------------------------------------

log = logging.getLogger("umbel.brokers.redis")

BUFFERED_MAX, BUFFERED_MAX_BYTES = 50_000, 32 * 2**20
KEEP_ALIVE_S = 10.0


async def broadcast(link: Link, keys: Keys, batch: Sequence[Broadcast]) -> int:
    """Send the batch; how many connections received the messages that go to all."""
    commands = fan_out(keys, [item for item in batch if not is_for_replies(item.exchange)])
    to_all = len(commands)
    bound: dict[str, Any] = {}
    for reply in batch:
        if is_for_replies(reply.exchange):
            if reply.exchange not in bound:
                bound[reply.exchange] = await link.call("SMEMBERS", keys.binding(reply.exchange))
            commands += reply_commands(keys, reply, bound[reply.exchange])
    replies = await link.call_all(commands) if commands else []
    return sum(receivers for receivers in replies[:to_all] if isinstance(receivers, int))


class RedisSubscription(LastingSubscription):
    """A pub/sub subscription to one exchange; it reconnects by itself."""

    def __init__(
        self,
        addresses: Sequence[Address],
        keys: Keys,
        exchange: str,
        patterns: Sequence[str],
        *,
        timeout_s: float,
        on_link: Callable[[LinkChange], None] = ignore_link,
    ) -> None:
        super().__init__()
        self._keys = keys
        self._exchange = exchange
        wanted = patterns_on(exchange, patterns)
        self._patterns = [pattern.split(".") for pattern in wanted]
        self._globs = list(dict.fromkeys(self._glob(pattern) for pattern in wanted))
        self._places = {glob.encode(): place for place, glob in enumerate(self._globs)}
        self._fitting = [Glob(re.sub(r"\\(.)", r"[\1]", glob)) for glob in self._globs]
        self._dropped = 0  # since the last warning
        self._unread: deque[tuple[str, bytes]] = deque()  # routing keys, and messages as they came
        self._unread_bytes = 0
        self._link = Link(
            addresses,
            timeout_s=timeout_s,
            resp3=True,
            on_push=self._take,
            on_connect=self._subscribe,
            on_lost=self.arrived.set,
            name=link_of(exchange),
            on_link=on_link,
        )

    async def enter(self) -> None:
        """Connect and subscribe."""
        await self._link.connect()

    async def leave(self) -> None:
        """Close the connection, which ends the subscription."""
        self._link.close()

    def next_broadcast(self) -> Broadcast | None:
        """Return the next broadcast that has arrived, if any; log how many were dropped."""
        if not self._unread:
            if self._dropped:
                fields = {"exchange": self._exchange, "count": self._dropped}
                log.warning("broadcasts dropped: received faster than they could be processed", extra=fields)
                self._dropped = 0
            return None
        routing_key, payload = self._pop()
        message = unseal(payload).message
        return Broadcast(self._exchange, routing_key, message.body, message.headers)

    async def wait_or_reconnect(self) -> None:
        """Wait for a message or the loss of the connection; after silence a PING checks the connection."""
        if not self._link.is_connected or not await self.has_arrived(KEEP_ALIVE_S):
            await self._link.call("PING")

    async def _subscribe(self) -> None:
        # The replies come as pushes, one for each glob, so this waits for the reply to a PING.
        link = self._link
        commands = [("PSUBSCRIBE", glob) for glob in self._globs]
        link.checked(await link.reply_to(link.send_after(commands, ("PING",))))

    def _take(self, pushed: list[Any]) -> None:
        if pushed[0] != b"pmessage":
            return
        _, glob, channel, payload = pushed
        name = channel.decode(errors="replace")
        place = self._places.get(glob)
        if place is None or any(earlier.fits(name) for earlier in self._fitting[:place]):
            return
        rest = name.removeprefix(self._keys.channel(self._exchange))
        if rest and not rest.startswith("/"):
            return  # another exchange, whose name begins like ours
        routing_key = rest.removeprefix("/")
        words = routing_key.split(".")
        if any(matches(pattern, words) for pattern in self._patterns):
            self._unread.append((routing_key, payload))
            self._unread_bytes += len(payload)
            while len(self._unread) > BUFFERED_MAX or self._unread_bytes > BUFFERED_MAX_BYTES:
                self._pop()
                self._dropped += 1
            self.arrived.set()

    def _pop(self) -> tuple[str, bytes]:
        oldest = self._unread.popleft()
        self._unread_bytes -= len(oldest[1])
        return oldest

    def _glob(self, pattern: str) -> str:
        """A glob that matches at least what the pattern matches: `.#` and `#.` may stand for nothing."""
        escaped = re.sub(r"([\\\[\]?^])", r"\\\1", pattern)
        wide = re.sub(r"\.?#\.?", "*", escaped)
        return self._keys.channel(self._exchange) + ("/" + wide if wide not in ("", "*") else "*")


# ---- event log -------------------------------------------------------------------------------------

SWEEP_MAX = 100  # entries at once, with all their events: other clients wait meanwhile


async def read_log(link: Link, keys: Keys, name: str, limit: int, after: int) -> list[LoggedEvent]:
    """The entries after what the recorder has acknowledged, oldest first."""
    acknowledged = await link.call("HGET", keys.recorders, name)
    if acknowledged is None:
        return []
    place = max(int(acknowledged), after)
    found = await link.call("XRANGE", keys.events, f"{place + 1}-0", f"{place + limit}-0")
    if not found:  # the next entry may have more events than that, or those before it are gone
        found = await link.call("XRANGE", keys.events, f"{place + 1}-0", "+", "COUNT", 1)
    return [_event(int(stream_id.partition(b"-")[0]), fields) for stream_id, fields in found]


def _event(offset: int, fields: list[bytes]) -> LoggedEvent:
    """The event of one entry; an entry that another program wrote has an offset and nothing to read."""
    try:
        return LoggedEvent(offset, float(fields[1]), fields[3].decode(), fields[5])
    except (ValueError, IndexError):
        return LoggedEvent(offset, 0.0, "", b"")


async def log_state(link: Link, keys: Keys) -> EventLogState:
    """The last offset, what each recorder has acknowledged, and how many events were lost."""
    last, lost, recorders = await link.call_all(
        [("GET", keys.events_offset), ("GET", keys.events_lost), ("HGETALL", keys.recorders)]
    )
    pairs = zip(recorders[::2], recorders[1::2], strict=True)
    acknowledged = {name.decode(): int(offset) for name, offset in pairs}
    return EventLogState(int(last or 0), acknowledged, int(lost or 0))


async def sweep_log(link: Link, keys: Keys, older_than: float) -> None:
    """Remove acknowledged entries that are older, in portions."""
    swept = SWEEP_MAX
    while swept >= SWEEP_MAX:
        swept = await link.run(keys.script("event_log"), "sweep", f"{older_than:.6f}", SWEEP_MAX)
