"""MessageParts: what handles one message after the other, built once for a worker."""

import asyncio
from collections.abc import Callable, Sequence

from umbel.brokers.interface import Refused
from umbel.protocol.delivery.delivery import AdmissionPolicy
from umbel.protocol.delivery.revoked import RevokedTasks
from umbel.worker.context import WorkerContext
from umbel.worker.messages.admission import Admission
from umbel.worker.messages.adoption import Adoption
from umbel.worker.messages.after_settling import AfterSettling
from umbel.worker.messages.endings import Endings
from umbel.worker.messages.kept_outcomes import KeptOutcomes
from umbel.worker.messages.refused_parts import RefusedParts
from umbel.worker.messages.remains import Remains
from umbel.worker.messages.settling import Settler
from umbel.worker.messages.task_events import TaskEvents

UNCONFIRMED = frozenset({"amqp", "gcpubsub"})  # brokers that do not say whether an ack has arrived


class MessageParts:
    def __init__(
        self,
        context: WorkerContext,
        events: TaskEvents,
        policy: AdmissionPolicy,
        revoked: RevokedTasks,
        settled: Callable[[], None],
    ) -> None:
        broker, backend = context.broker, context.backend
        together = broker.capabilities.stores_results and backend.shares_settle(broker.url)
        confirmed = broker.capabilities.transport not in UNCONFIRMED
        kept = KeptOutcomes(asyncio.get_running_loop().time, confirmed=confirmed)
        self.after = AfterSettling(context.settings.after_settle)
        self.settler = Settler(
            broker,
            backend,
            context.counters,
            outages=context.outages,
            store_outages=context.store_outages,
            together=together,
            events=events.step,
            refused=self._end_refused,
            kept=kept,
            settled=settled,
            after=self.after.add,
        )
        remains = Remains(context, self.settler)
        self._refused_parts = RefusedParts(context.counters, remains, self.settler, events)
        self.endings = Endings(context, policy, self.settler, remains, events)
        self.adoption = Adoption(context, kept, self.settler)
        self.admission = Admission(context, policy, revoked, self.settler, self.endings, events)

    async def drained(self) -> None:
        await self.settler.drained()
        await self.after.drained()

    def _end_refused(self, refused: Sequence[Refused]) -> None:
        self._refused_parts.end(refused)
