"""OutboxStep: publishes what is in outboxes, while this node holds the lease of each (`docs/outbox.md`).

Every worker whose app names outboxes stands for their leases, one for each database, and any may lead. Off
where the transport has no leases: two relays at work would send everything twice.
"""

import asyncio
import logging
from time import time

from umbel.brokers.interface import ClusterRecord
from umbel.coordination.lease_keeper import Change
from umbel.errors import BrokerError, OutboxUnavailable
from umbel.outbox.addresses import Address
from umbel.outbox.database import OutboxDatabase
from umbel.outbox.progress import Progress, decode_progress, encode_progress
from umbel.outbox.relay import Relay
from umbel.protocol.leadership.lease import Acquired
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext
from umbel.worker.leases.announced import PHASES, announced_lease
from umbel.worker.process.outages import Outages
from umbel.worker.steps.events import Events
from umbel.worker.steps.gossip import Gossip
from umbel.worker.steps.scheduler import lease_settings

log = logging.getLogger("umbel.outbox")
PART = "outbox"
NOTE_EVERY_S = 2.0
NOTE_S = 5.0


class OutboxStep(Step):
    name = "outbox"
    requires = ("control", "gossip")

    def __init__(self, context: WorkerContext, events: Events, gossip: Gossip) -> None:
        super().__init__()
        self._context = context
        self._events = events
        self._gossip = gossip
        self._candidates: list[RelayCandidate] = []

    async def start(self) -> None:
        settings = self._context.settings.outbox
        if settings is None:
            return
        capabilities = self._context.broker.capabilities
        if not capabilities.leases:
            log.warning("outbox disabled: %s", capabilities.why_not("leases"))
            return
        assert self._group is not None
        for address in settings.addresses:
            candidate = RelayCandidate(self._context, self._events, self._gossip, address, self._group)
            self._candidates.append(candidate)
            self.run_in_background(candidate.keeper.run())
            self.run_in_background(candidate.note_progress())

    async def stop(self) -> None:
        """The campaigns end first, so that no relay begins; a lease is released when its relay has ended."""
        await self.end_background()
        for candidate in self._candidates:
            await candidate.end_term()
            await candidate.keeper.stop()


class RelayCandidate:
    """This node's campaign for one outbox, and its relay while it leads; a `relay.Listener`."""

    def __init__(
        self,
        context: WorkerContext,
        events: Events,
        gossip: Gossip,
        address: Address,
        group: asyncio.TaskGroup,
    ) -> None:
        assert context.settings.outbox is not None
        self._context = context
        self._cluster: ClusterRecord = context.broker
        self._settings = context.settings.outbox
        self._address = address
        self.keeper = announced_lease(
            context,
            events,
            gossip,
            address.lease(self._settings.table),
            settings=lease_settings(context.settings.lease_s),
            changed=self._changed,
        )
        self._group = group
        self._database_outages = Outages("outbox database", address.shown)
        self._term: asyncio.Task[None] | None = None
        self._progress = self._noted = Progress()

    async def end_term(self) -> None:
        term, self._term = self._term, None
        if term is not None:
            term.cancel()
            await asyncio.wait([term])

    def _changed(self, change: Change) -> None:
        if self._term is not None:
            self._term.cancel()
            self._term = None
        if isinstance(change, Acquired):
            self._progress = self._noted = decode_progress(change.data)
            self._term = self._group.create_task(self._relay(), name="umbel-outbox-relay")
        text = f"outbox relay {PHASES[type(change)]}"
        fields = self._context.log_fields(database=self._address.shown, term=change.term)
        self._context.outages.consequence(log, logging.INFO, text, named=text, **fields)

    async def _relay(self) -> None:
        settings, producer = self._settings, self._settings.open_producer()
        relay = Relay(
            lambda: OutboxDatabase(self._address, settings.table),
            producer,
            self,
            poll_s=settings.poll_s,
            tell_sent=settings.tell_sent,
        )
        try:
            await relay.run()
        finally:
            self._database_outages.closed(PART)
            self._context.outages.closed(PART)
            await relay.close()
            await producer.close()

    # -- what the relay tells --------------------------------------------------------------------

    def still_mine(self) -> bool:
        return self.keeper.still_mine()

    def database_answered(self, error: OutboxUnavailable | None) -> None:
        self._database_outages.report(PART, error)

    def broker_answered(self, error: BrokerError | None) -> None:
        self._context.outages.report(PART, error)

    def published(self, count: int, set_aside: int) -> None:
        self._context.counters.outbox_published += count
        self._context.counters.outbox_set_aside += set_aside
        self._progress = self._progress.and_more(count, time())

    async def note_progress(self) -> None:
        """For people: how much was published, and when."""
        while True:
            await asyncio.sleep(NOTE_EVERY_S)
            if self._progress == self._noted or not self.still_mine():
                continue
            progress, keeper = self._progress, self.keeper
            try:
                async with asyncio.timeout(NOTE_S):
                    await self._cluster.coordination.update_lease(
                        keeper.name, keeper.holder, keeper.term, encode_progress(progress)
                    )
                self._noted = progress
            except (BrokerError, TimeoutError) as error:
                log.debug("cannot store the progress of the outbox; retrying", extra={"why": str(error)})
