"""RelayCandidate: this node's campaign for one outbox, and its relay while it leads (`docs/outbox.md`)."""

import asyncio
import logging
from time import time

from umbel.clock import cluster_now
from umbel.coordination.driver import Change
from umbel.errors import BrokerError, OutboxUnavailable
from umbel.outbox.database import Address, OutboxDatabase
from umbel.outbox.relay import Relay
from umbel.outbox.table import Progress, decode_progress, encode_progress
from umbel.protocol.leadership.lease import LeaseAcquired
from umbel.wire.message import Outgoing
from umbel.worker.context import WorkerContext
from umbel.worker.outages import Outages
from umbel.worker.steps.gossip import PHASES, Gossip
from umbel.worker.steps.scheduler import lease_settings

log = logging.getLogger("umbel.outbox")
PART = "outbox"
NOTE_EVERY_S = 2.0
NOTE_S = 5.0


class RelayCandidate:
    """This node's campaign for one outbox. It is the listener of the relay that runs while this node leads.

    It logs outages, counts what was published, and stores the progress in the lease.
    """

    def __init__(
        self, context: WorkerContext, gossip: Gossip, address: Address, group: asyncio.TaskGroup
    ) -> None:
        assert context.settings.outbox is not None
        self._context = context
        self._settings = context.settings.outbox
        self._address = address
        lease, settings = address.lease(self._settings.table), lease_settings(context.settings.lease_s)
        self.keeper = gossip.campaign(lease, self._changed, settings=settings)
        self._group = group
        self._database_outages = Outages("outbox database", address.shown)
        self._term: asyncio.Task[None] | None = None
        self._progress = self._noted = Progress()

    async def end_term(self) -> None:
        """End the relay that runs, if any."""
        term, self._term = self._term, None
        if term is not None:
            term.cancel()
            await asyncio.wait([term])

    def _changed(self, change: Change) -> None:
        if self._term is not None:
            self._term.cancel()
            self._term = None
        if isinstance(change, LeaseAcquired):
            self._progress = self._noted = decode_progress(change.data)
            self._term = self._group.create_task(self._relay(), name="umbel-outbox-relay")
        phase, database = PHASES[type(change)], self._address.shown
        self._context.log_leadership(log, "outbox relay", phase, change.term, database=database)

    async def _relay(self) -> None:
        """Publish rows until the term ends; the database connection and the producer end with it."""
        settings, producer = self._settings, self._settings.open_producer()
        relay = Relay(
            lambda: OutboxDatabase(self._address, settings.table),
            producer,
            self,
            poll_s=settings.poll_s,
            tell_sent=settings.tell_sent,
            signed=self._signed,
        )
        try:
            await relay.run()
        finally:
            self._database_outages.closed(PART)
            self._context.outages.closed(PART)
            await relay.close()
            await producer.close()

    def _signed(self, outgoing: Outgoing) -> Outgoing:
        """Sign for the cluster, which the sender may not have known; the message's age counts from now on."""
        if self._context.broker.keyring is None:
            return outgoing
        signer = self._context.broker.signer
        assert signer is not None, "a worker with keys knows its cluster"
        return signer.published_row(outgoing, cluster_now())

    # -- calls of the relay --------------------------------------------------------------------

    def still_mine(self) -> bool:
        """Return whether this node holds the lease, so that the relay may publish."""
        return self.keeper.still_mine()

    def database_answered(self, error: OutboxUnavailable | None) -> None:
        """Log an outage of the outbox's database, or its end."""
        self._database_outages.report(PART, error)

    def broker_answered(self, error: BrokerError | None) -> None:
        """Log an outage of the broker, or its end."""
        self._context.outages.report(PART, error)

    def published(self, count: int, set_aside: int) -> None:
        """Count published rows and those set aside because they cannot be published."""
        self._context.counters.outbox_published += count
        self._context.counters.outbox_set_aside += set_aside
        self._progress = self._progress.and_more(count, time())

    async def note_progress(self) -> None:
        """Store in the lease, for `umbel` and the dashboard, how much was published and when."""
        while True:
            await asyncio.sleep(NOTE_EVERY_S)
            if self._progress == self._noted or not self.still_mine():
                continue
            progress, keeper = self._progress, self.keeper
            try:
                async with asyncio.timeout(NOTE_S):
                    await self._context.broker.coordination.update_lease(
                        keeper.name, keeper.holder, keeper.term, encode_progress(progress)
                    )
                self._noted = progress
            except (BrokerError, TimeoutError) as error:
                log.debug("cannot store the progress of the outbox; retrying", extra={"why": str(error)})
