"""Adoption: a message that is redelivered to the worker that still runs it goes on as it is.

A claim may end while its task runs: RabbitMQ takes back what was claimed on a connection that was
cut, every broker what a worker held whose lease ended. The same worker may be the next to get it. It must
not run the task beside itself: the run that is under way takes over the new claim, and is settled with it.
It stops being right where the message went to another worker: then both run, which at-least-once allows.
"""

import logging
from collections.abc import Mapping, Sequence

from umbel.brokers.interface import Delivery
from umbel.worker.context import WorkerContext
from umbel.worker.held import Held

log = logging.getLogger("umbel.worker.tasks")
ADOPTED = "message redelivered while its task runs here; adopted"


class Adoption:
    def __init__(self, context: WorkerContext) -> None:
        self._broker = context.broker
        self._counters = context.counters
        self._outages = context.outages

    async def rest(self, deliveries: Sequence[Delivery], held: Mapping[int, Held]) -> Sequence[Delivery]:
        """All but those that run here already: these are adopted."""
        if not held or not any(one.redelivered for one in deliveries):
            return deliveries
        running = {one.headers.id: one for one in held.values()}
        return [one for one in deliveries if not await self._adopt(one, running, held)]

    async def _adopt(self, delivery: Delivery, running: Mapping[str, Held], held: Mapping[int, Held]) -> bool:
        found = running.get(delivery.message.correlation_id) if delivery.redelivered else None
        if found is None or not found.is_of(delivery):
            return False
        has_ended = await self._broker.ended([found.delivery.tag])
        if not has_ended or held.get(found.number) is not found:  # it may have ended meanwhile
            return False
        found.delivery = delivery
        self._counters.adopted += 1
        fields = {"task": found.headers.task, "task_id": found.headers.id}
        self._outages.consequence(log, logging.INFO, ADOPTED, named="adopted", **fields)
        return True
