"""Listening: how events of workers that keep no log reach it, and how they are asked to send any.

Celery's workers broadcast their events and keep nothing. On RabbitMQ the log is bound to that
exchange, so there is nothing to do but to ask for events. On Redis the broadcasts are lost without
a listener: the recorder listens and appends them to the log at once, where they are as safe
as our own. What Celery's workers send while no recorder runs, or while its connection is down, is
lost; the recorder writes down when that was.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from time import time
from typing import Protocol

import msgspec

from umbel.brokers.interface import Broadcast, EventLog, FanOut
from umbel.clock import cluster_now
from umbel.errors import BrokerError
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.protocol.pidbox import Request
from umbel.protocol.retry import reconnect_wait_s
from umbel.wire.control import REQUEST_EXCHANGE, encode_request
from umbel.wire.event import LOGGED
from umbel.wire.gossip import NODE_BYTES_MAX
from umbel.wire.values import UNREADABLE

log = logging.getLogger("umbel.history")

WAITING_MAX = 20_000
APPEND_MAX = 500
ASK_EVERY_S = 3.0  # a starting worker sends worker-online before it hears anything
REQUEST_TTL_S = 60.0
STRANGERS_MAX = 200  # that are asked by name; where there are more, all workers are asked


class _Headers(msgspec.Struct):
    logged: bool = False


assert _Headers.__struct_fields__ == (LOGGED,)
_headers = msgspec.json.Decoder(_Headers)


class RecordedBroker(EventLog, FanOut, Protocol):
    """What is recorded: the event log, and what only those hear who listen."""


class Listening:
    """Appends broadcast events to the log that lacks them; asks workers without a log to send task events."""

    def __init__(self, broker: RecordedBroker) -> None:
        self.heard = 0
        self.dropped = 0  # waited here for a broker that did not take them
        self._broker = broker
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._arrived = asyncio.Event()
        self._strangers: set[str] = set()
        self._asked: set[str] = set()
        self._unasked = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        others = self._broker.capabilities.events_of_others
        if others == "none":
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ask_on())
            if others == "fan-out":
                group.create_task(self._append_on())
                group.create_task(self._listen())

    def met(self, strangers: set[str], arrived: set[str]) -> None:
        """Workers that number no events have spoken; of these, some have just come.

        Who was not asked yet is asked at once, all others now and then: one that was restarted has
        forgotten it.
        """
        self._asked -= arrived
        if len(self._strangers) <= STRANGERS_MAX:
            self._strangers |= strangers
        if self._strangers - self._asked:
            self._unasked.set()

    async def _ask_on(self) -> None:
        while True:
            try:
                async with asyncio.timeout(ASK_EVERY_S):
                    await self._unasked.wait()
            except TimeoutError:
                self._asked.clear()
            self._unasked.clear()
            asked, self._strangers = self._strangers, set()
            if not asked:
                continue
            try:
                await self._ask(sorted(asked) if len(asked) <= STRANGERS_MAX else None)
                self._asked = asked if len(self._asked) > STRANGERS_MAX else self._asked | asked
            except BrokerError as error:
                log.debug(
                    "cannot ask workers to send events; they are asked again when they send something",
                    extra={"why": str(error)},
                )

    async def _ask(self, destination: Sequence[str] | None) -> None:
        named = None if destination is None else tuple(name[:NODE_BYTES_MAX] for name in destination)
        request = Request("enable_events", {}, named)
        headers, body = encode_request(request, 0, self._broker.keyring, cluster_now())
        await self._broker.broadcast([Broadcast(REQUEST_EXCHANGE, "", body, headers)], ttl_s=REQUEST_TTL_S)

    async def _listen(self) -> None:
        failures = 0
        while True:
            try:
                async with self._broker.subscribe(EVENT_EXCHANGE, ["#"]) as subscription:
                    failures = 0
                    async for broadcast in subscription:
                        self._take(broadcast)
            except BrokerError as error:
                failures += 1
                log.debug("cannot subscribe to events; retrying", extra={"why": str(error)})
                await asyncio.sleep(reconnect_wait_s(failures, time() % 1))

    def _take(self, broadcast: Broadcast) -> None:
        if _is_logged(broadcast.headers):
            return
        if len(self._waiting) >= WAITING_MAX:
            self.dropped += 1
            return
        self._waiting.append((broadcast.routing_key, broadcast.body))
        self._arrived.set()

    async def _append_on(self) -> None:
        failures = 0
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                batch = [self._waiting[place] for place in range(min(len(self._waiting), APPEND_MAX))]
                try:
                    await self._broker.log_events(batch)
                except BrokerError as error:
                    failures += 1
                    log.debug("cannot append events to the event log; retrying", extra={"why": str(error)})
                    await asyncio.sleep(reconnect_wait_s(failures, time() % 1))
                    continue
                failures = 0
                self.heard += len(batch)
                for _ in batch:
                    self._waiting.popleft()


def _is_logged(headers: bytes) -> bool:
    try:
        return _headers.decode(headers).logged
    except UNREADABLE:
        return False
