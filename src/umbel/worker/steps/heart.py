"""Heart: announces this node, its heartbeats and its end; the shell of `protocol/membership/heartbeat.py`.

The fields are those of Celery's heartbeats, so that Flower and Celery workers see this node. `freq` is the
true interval, because peers take a node for lost after twice that time. With each beat the node renews its
entry at the broker, for peers that check a new or silent node. It comes online after its mailbox is open and
its entry is written, because peers that see its first event check both. By then its clock is past what the
cluster sent before: the broker's clock, its saved state, the answers to its hello.
"""

import asyncio
import logging
import os
import platform
from collections.abc import Callable
from typing import Any

from umbel.chance import uniform
from umbel.coordination.driver import drive, instant
from umbel.errors import BrokerError
from umbel.events.stamp import SOFTWARE
from umbel.protocol.membership.heartbeat import (
    Beat,
    BeatKind,
    BeatNow,
    BeginBeats,
    Echoed,
    Effect,
    EndBeats,
    Event,
    Heartbeat,
    Lagged,
    Resized,
)
from umbel.version import VERSION
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext
from umbel.worker.events import Events

log = logging.getLogger("umbel.worker.heart")

ALIVE_INTERVALS = 3.0
INBOX_MAX = 1000


class Heart(Step):
    """The step that publishes worker-online, worker-heartbeat and worker-offline."""

    name = "heart"
    requires = ("state_store", "mingle")

    def __init__(self, context: WorkerContext, events: Events) -> None:
        super().__init__(context)
        self._events = events
        self._is_on = not context.settings.without_heartbeat
        self._machine = Heartbeat(context.settings.heartbeat_interval_s, uniform)
        self._inbox: asyncio.Queue[Event] = asyncio.Queue(maxsize=INBOX_MAX)
        self._on_lag: list[Callable[[str], None]] = []
        self._announced: dict[str, Callable[[], str]] = {}

    @property
    def freq_s(self) -> float:
        """The heartbeat interval that this node's events announce."""
        return self._machine.freq_s

    def on_lag(self, callback: Callable[[str], None]) -> None:
        """Register a callback that gets the reason when this node's beats are late."""
        self._on_lag.append(callback)

    def announce(self, field: str, value: Callable[[], str]) -> None:
        """Add a field to every event of this step."""
        self._announced[field] = value

    async def start(self) -> None:
        """Announce this node and begin to send heartbeats."""
        if not self._is_on:
            log.info("heartbeats disabled by without_heartbeat")
            return
        for effect in self._machine.step(BeginBeats(), instant()):
            await self._perform(effect)
        self.run_in_background(drive(self._machine, self._inbox, self._perform))

    async def stop(self) -> None:
        """Announce that this node leaves."""
        if not self._background:
            return
        await self.end_background()
        for effect in self._machine.step(EndBeats(), instant()):
            await self._perform(effect)

    def beat(self) -> None:
        """Send a heartbeat now: a command requested it, or a peer suspects this node."""
        self._put(BeatNow())

    def come_online(self) -> None:
        """Announce this node again, because peers declared it lost."""
        self._put(BeginBeats())

    def resized(self, nodes: int) -> None:
        """Adapt the interval to the number of nodes."""
        self._put(Resized(nodes))

    def echoed(self, sent_at: float) -> None:
        """Record that a heartbeat of this node, sent at that time, came back from the broker."""
        self._put(Echoed(sent_at))

    def _put(self, event: Event) -> None:
        if self._is_on and not self._inbox.full():  # a dropped event equals one that waits
            self._inbox.put_nowait(event)

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case Lagged(reason):
                for callback in self._on_lag:
                    callback(reason)
            case Beat(kind, freq_s):
                if kind is BeatKind.ONLINE:
                    await self._mark_alive(freq_s)
                self._events.send(kind.value, freq=freq_s, **self._fields())
                if kind is BeatKind.BEAT:
                    self._context.notices.call("heartbeat")
                    await self._mark_alive(freq_s)

    async def _mark_alive(self, freq_s: float) -> None:
        """Renew this node's entry at the broker; it expires after a few intervals without a heartbeat."""
        identity = self._context.identity
        try:
            async with asyncio.timeout(freq_s):
                await self._context.broker.mark_alive(
                    identity.node, identity.incarnation, ttl_s=ALIVE_INTERVALS * freq_s
                )
        except (BrokerError, TimeoutError) as error:
            log.debug(
                "cannot renew the heartbeat of this node in the broker; retrying", extra={"why": str(error)}
            )

    def _fields(self) -> dict[str, Any]:
        return {
            "active": len(self._context.pool.describe()["running"]),
            "processed": self._context.counters.processed,
            "loadavg": [round(load, 2) for load in os.getloadavg()],
            "sw_ident": SOFTWARE,
            "sw_ver": VERSION,
            "sw_sys": platform.system(),
            "cver": 2,
            **{field: value() for field, value in self._announced.items()},
        }
