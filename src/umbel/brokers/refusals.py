"""What is said when a broker refuses a message: a periodic one, a chord's body, one that cannot be moved."""

import logging
from collections.abc import Iterable

from umbel.brokers.interface import Refused
from umbel.errors import BrokerRefused
from umbel.wire.message import Outgoing

log = logging.getLogger("umbel.brokers")


def unbound(exchange: str, routing_key: str) -> str:
    """Why a message for an exchange reaches nobody."""
    return (
        f"no queue is bound to the exchange {exchange!r} for the routing key {routing_key!r}: "
        "start a worker that consumes such a queue, or bind one"
    )


def signed_for(queue: str) -> BrokerRefused:
    """Its signature names the queue, and one for another queue would be a second signature to use."""
    return BrokerRefused(
        f"the next message in {queue!r} is signed for that queue and cannot be moved: "
        "let workers consume it where it is (`umbel control add_consumer`)"
    )


def log_refused(refused: Iterable[Refused]) -> None:
    for one in refused:
        if isinstance(one.part, Outgoing):
            fields = {
                "queue": one.part.target,
                "task_id": one.part.message.correlation_id,
                "why": one.reason,
            }
            log.error("broker refused a message; moved to dead letters", extra=fields)
