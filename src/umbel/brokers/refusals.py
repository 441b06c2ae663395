"""What is said when a broker refuses a message that nobody waits for: a periodic one, a chord's body."""

import logging
from collections.abc import Iterable

from umbel.brokers.interface import Refused
from umbel.wire.message import Outgoing

log = logging.getLogger("umbel.brokers")


def log_refused(refused: Iterable[Refused]) -> None:
    for one in refused:
        if isinstance(one.part, Outgoing):
            fields = {
                "queue": one.part.queue,
                "task_id": one.part.message.correlation_id,
                "why": one.reason,
            }
            log.error("broker refused a message; moved to dead letters", extra=fields)
