"""Keeping the messages of failed tasks that were acknowledged before they ran: they can be retried."""

import logging
from collections.abc import Sequence

from umbel.brokers.interface import Messages, Refused
from umbel.errors import BrokerRefused
from umbel.wire.message import Outgoing

log = logging.getLogger("umbel.worker.settling")
SHOWN_MAX = 5


async def keep_or_drop(broker: Messages, failed: Sequence[Refused]) -> None:
    """What the broker refuses to keep is not kept: the results of these tasks must not wait for it."""
    if not broker.capabilities.failures:
        return
    try:
        await broker.keep_failed(failed)
    except BrokerRefused as error:
        ids = [one.part.message.correlation_id for one in failed if isinstance(one.part, Outgoing)]
        fields = {"count": len(failed), "task_ids": ",".join(ids[:SHOWN_MAX]), "why": str(error)}
        log.error("broker refuses to store failed tasks; `umbel task retry` cannot retry them", extra=fields)
