"""Telling: what is done through the dashboard is an event too, so that it is in the cluster's history."""

import os
import socket
from time import time, time_ns
from typing import Any, Protocol

from umbel.brokers.interface import Broadcast, EventLog, FanOut
from umbel.events.stamp import EVENT_EXCHANGE, EVENT_TTL_S, EventStamper
from umbel.protocol.clock import LamportClock
from umbel.wire.event import LOGGED, encode_event
from umbel.wire.told import EventTeller

ACTION, MARK = "control-action", "control-mark"


class TellingBroker(FanOut, EventLog, Protocol):
    """Where events go: to all who listen, and into the log if somebody records."""


class Teller:
    """Its events carry the clock of who listens, so they come after what it had heard."""

    def __init__(self, broker: TellingBroker, clock: LamportClock, name: str = "web") -> None:
        self._broker = broker
        self._teller = EventTeller(
            EventStamper(
                hostname=f"{name}@{socket.gethostname()}",
                pid=os.getpid(),
                incarnation=time_ns() // 1000,
                clock=clock,
            )
        )

    async def tell(self, type_name: str, fields: dict[str, Any]) -> None:
        key, body = self._teller.tell(type_name, fields, at=time())
        logged = await self._broker.log_events([(key, body)])
        headers = {"hostname": self._teller.stamper.hostname} | ({LOGGED: True} if logged else {})
        await self._broker.broadcast(
            [Broadcast(EVENT_EXCHANGE, key, body, encode_event(headers))], ttl_s=EVENT_TTL_S
        )
