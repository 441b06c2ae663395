"""Action events: what the dashboard does is published as an event, so that the cluster's history has it."""

import os
import socket
from time import time, time_ns
from typing import Any, Protocol

from umbel.brokers.interface import Broadcast, ClusterRecord, EventLog, FanOut
from umbel.events.stamp import EVENT_EXCHANGE, EVENT_TTL_S, EventStamper
from umbel.protocol.clock import ClockReservation, LamportClock
from umbel.wire.event import LOGGED, EventEncoder, encode_event

ACTION, MARK = "control-action", "control-mark"


class EventBroker(FanOut, EventLog, ClusterRecord, Protocol):
    """What publishing needs of a broker: the fan-out to all listeners, and the log if a recorder uses it."""


class EventPublisher:
    """Publishes control events, such as `control-action` and `control-mark`.

    They carry this process's Lamport clock, so they are ordered after the events that it received. As with a
    worker's events, the clock stored at the broker is raised first: workers that start later are ordered
    after them.
    """

    def __init__(self, broker: EventBroker, clock: LamportClock, name: str = "web") -> None:
        self._broker = broker
        self._reservation = ClockReservation(clock)
        self._teller = EventEncoder(
            EventStamper(
                hostname=f"{name}@{socket.gethostname()}",
                pid=os.getpid(),
                incarnation=time_ns() // 1000,
                clock=clock,
            )
        )

    async def tell(self, type_name: str, fields: dict[str, Any]) -> None:
        """Publish an event of this type, and log it if a recorder uses the log."""
        key, body = self._teller.tell(type_name, fields, at=time())
        if (wanted := self._reservation.wanted) is not None:
            self._reservation.raised(await self._broker.coordination.raise_clock(wanted))
        logged = await self._broker.log_events([(key, body)])
        headers = {"hostname": self._teller.stamper.hostname} | ({LOGGED: True} if logged else {})
        await self._broker.broadcast(
            [Broadcast(EVENT_EXCHANGE, key, body, encode_event(headers))], ttl_s=EVENT_TTL_S
        )
