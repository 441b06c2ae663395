"""Adoption: a message that is redelivered to the worker that still runs it goes on as it is.

A claim may end while its task runs: RabbitMQ takes back what was claimed on a connection that was
cut, every broker what a worker claimed whose lease ended. The same worker may be the next to get it. It must
not run the task beside itself: the run that is under way takes over the new claim, and is settled with it.
It stops being right where the message went to another worker: then both run, which at-least-once allows.
"""

import logging
from collections.abc import Mapping, Sequence

from umbel.brokers.interface import Delivery
from umbel.worker.context import WorkerContext
from umbel.worker.messages.claimed import Claimed

log = logging.getLogger("umbel.worker.tasks")


class Adoption:
    def __init__(self, context: WorkerContext) -> None:
        self._broker = context.broker
        self._counters = context.counters

    async def rest(
        self, deliveries: Sequence[Delivery], claimed: Mapping[int, Claimed]
    ) -> Sequence[Delivery]:
        """All but those that run here already: these are adopted."""
        if not claimed or not any(one.redelivered for one in deliveries):
            return deliveries
        running = {one.headers.id: one for one in claimed.values()}
        return [one for one in deliveries if not await self._adopt(one, running, claimed)]

    async def _adopt(
        self, delivery: Delivery, running: Mapping[str, Claimed], claimed: Mapping[int, Claimed]
    ) -> bool:
        found = running.get(delivery.message.correlation_id) if delivery.redelivered else None
        if found is None or not found.is_of(delivery):
            return False
        has_ended = await self._broker.ended([found.delivery.tag])
        if not has_ended or claimed.get(found.number) is not found:  # it may have ended meanwhile
            return False
        found.delivery = delivery
        self._counters.adopted += 1
        fields = {"task": found.headers.task, "task_id": found.headers.id}
        log.info("message redelivered while its task is running here; run continues", extra=fields)
        return True
