"""Adoption: a message that is redelivered to the worker that runs it, or has run it, is not run again.

A claim may end while its task runs: RabbitMQ takes back what was claimed on a connection that was
cut, every broker what a worker claimed whose lease ended. The same worker may be the next to get it. It must
not run the task beside itself: the run that is under way takes over the new claim, and is settled with it.
So is an outcome that could not be settled with the old one (`kept_outcomes.py`).
It stops being right where the message went to another worker: then both run, which at-least-once allows.
"""

import logging
from collections.abc import Mapping, Sequence

from umbel.brokers.interface import Ack, Delivery, Messages
from umbel.worker.context import WorkerContext
from umbel.worker.messages.claimed import Claimed
from umbel.worker.messages.kept_outcomes import KeptOutcomes, claim_of
from umbel.worker.messages.settling import Settler

log = logging.getLogger("umbel.worker.tasks")
ADOPTED = "message redelivered while its task is running here; run continues"
ENDED = "message redelivered after its task finished here; outcome acknowledged, task not repeated"


class Adoption:
    def __init__(self, context: WorkerContext, kept: KeptOutcomes, settler: Settler) -> None:
        self._broker: Messages = context.broker
        self._counters = context.counters
        self._outages = context.outages
        self._kept = kept
        self._settler = settler

    async def rest(
        self, deliveries: Sequence[Delivery], claimed: Mapping[int, Claimed]
    ) -> Sequence[Delivery]:
        """All but those that run here, or have run: these are adopted."""
        running = {one.headers.id: one for one in claimed.values()}
        return [
            one for one in deliveries if not (one.redelivered and await self._adopt(one, running, claimed))
        ]

    async def _adopt(
        self, delivery: Delivery, running: Mapping[str, Claimed], claimed: Mapping[int, Claimed]
    ) -> bool:
        found = running.get(delivery.message.correlation_id)
        if found is not None and found.is_of(delivery):
            has_ended = await self._broker.ended([found.delivery.tag])
            if has_ended and claimed.get(found.number) is found:  # its task may have ended meanwhile
                found.delivery = delivery
                if found.acked:  # its ack did not arrive
                    self._settler.add(Ack(delivery.tag))
                self._note(ADOPTED, "adopted", delivery)
                return True
        if await self._settle_ended(delivery):
            self._note(ENDED, "outcomes settled", delivery)
            return True
        return False

    async def _settle_ended(self, delivery: Delivery) -> bool:
        tag = claim_of(delivery, self._settler.outcomes)
        if tag is not None and await self._broker.ended([tag]) and tag in self._settler.outcomes:
            self._kept.came_back[tag] = delivery
            return True
        if (ack := self._kept.take(delivery)) is None:
            return False
        self._settler.add_outcome(ack, delivery)
        return True

    def _note(self, text: str, named: str, delivery: Delivery) -> None:
        self._counters.adopted += 1
        self._outages.consequence(
            log,
            logging.INFO,
            text,
            named=named,
            queue=delivery.queue,
            task_id=delivery.message.correlation_id,
        )
