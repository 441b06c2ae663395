"""Action events: actions of the dashboard, published as events so that the cluster's history contains
them.
"""

import os
import socket
from time import time, time_ns
from typing import Any

from umbel.brokers.interface import Broadcast, Broker
from umbel.events.stamp import EVENT_EXCHANGE, EVENT_TTL_S, EventStamper
from umbel.protocol.clock import ClockReservation, LamportClock
from umbel.wire.event import LOGGED, EventEncoder, encode_event

ACTION, MARK = "control-action", "control-mark"


class EventPublisher:
    """Publishes control events: `control-action` and `control-mark`.

    They carry this process's Lamport clock, so they are ordered after the events that it received. Like a
    worker, it first raises the clock that is stored at the broker: workers that start later are ordered after
    its events.
    """

    def __init__(self, broker: Broker, clock: LamportClock, name: str = "web") -> None:
        self._broker = broker
        self._reservation = ClockReservation(clock)
        self._encoder = EventEncoder(
            EventStamper(
                hostname=f"{name}@{socket.gethostname()}",
                pid=os.getpid(),
                incarnation=time_ns() // 1000,
                clock=clock,
            )
        )

    async def publish(self, type_name: str, fields: dict[str, Any]) -> None:
        """Publish an event of this type, and add it to the event log if a recorder uses the log."""
        key, body = self._encoder.tell(type_name, fields, at=time())
        if (wanted := self._reservation.wanted) is not None:
            self._reservation.raised(await self._broker.coordination.raise_clock(wanted))
        is_logged = await self._broker.log_events([(key, body)])
        headers = {"hostname": self._encoder.stamper.hostname} | ({LOGGED: True} if is_logged else {})
        await self._broker.broadcast(
            [Broadcast(EVENT_EXCHANGE, key, body, encode_event(headers))], ttl_s=EVENT_TTL_S
        )
