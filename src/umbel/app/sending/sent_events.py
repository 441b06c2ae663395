"""SentEvents: sends an event for each task that is sent, if `task_send_sent_event` is set.

A client takes no part in the cluster's clock, so its stamps order only its own events; receivers
give `task-sent` a time of theirs (L3). A process forked from this one is another sender.

The task is sent already then, so a broker that does not take the event is no error for
the sender, who would send the task once more: it is logged and shows as a gap in `seq`.
"""

import logging
import os
from collections.abc import Iterable
from threading import Lock
from time import time_ns
from typing import Any

from umbel.brokers.interface import Broadcast, Producer
from umbel.errors import BrokerError
from umbel.events.stamp import EVENT_EXCHANGE, EVENT_TTL_S, EventStamper
from umbel.protocol.clock import LamportClock
from umbel.wire.event import LOGGED, encode_event
from umbel.wire.message import Outgoing
from umbel.wire.task import read_headers
from umbel.wire.told import EventTeller, by_type

log = logging.getLogger("umbel.events")
TASK_SENT = "task-sent"


class SentEvents:
    def __init__(self, hostname: str) -> None:
        self.pid = os.getpid()
        clock = LamportClock()
        self._teller = EventTeller(
            EventStamper(hostname=hostname, pid=self.pid, incarnation=time_ns() // 1000, clock=clock)
        )
        self._headers = encode_event({"hostname": hostname})
        self._logged_headers = encode_event({"hostname": hostname, LOGGED: True})
        self._in_order = Lock()  # an app may send from several threads

    def tell(self, producer: Producer, sent: Iterable[tuple[Iterable[Outgoing], float]]) -> None:
        """Batches, each with a time before which no worker could take it: else tasks would start before
        they were sent."""
        told = [(_fields(one), at) for batch, at in sent for one in batch]
        try:
            with self._in_order:
                events = [self._teller.tell(TASK_SENT, one, at=at) for one, at in told]
                entries, counts = by_type(events)
                logged = producer.log_events(entries, counts=counts)
                headers = self._logged_headers if logged else self._headers
                messages = [Broadcast(EVENT_EXCHANGE, key, body, headers) for key, body in events]
                producer.broadcast(messages, ttl_s=EVENT_TTL_S)
        except BrokerError as error:
            log.warning(
                "tasks sent, but their task-sent events could not be sent",
                extra={"count": len(told), "why": str(error)},
            )


def _fields(outgoing: Outgoing) -> dict[str, Any]:
    headers = read_headers(outgoing.message)
    return {
        "uuid": headers.id,
        "name": headers.shadow or headers.task,
        "args": headers.argsrepr,
        "kwargs": headers.kwargsrepr,
        "root_id": headers.root_id,
        "parent_id": headers.parent_id,
        "retries": headers.retries,
        "eta": headers.eta,
        "expires": headers.expires,
        "queue": outgoing.queue,
        "exchange": "",
        "routing_key": outgoing.queue,
    }
