"""OutboxStep: publishes the rows of outboxes, while this node holds the lease of each (`docs/outbox.md`).

Every worker whose app names outboxes is a candidate for their leases, one for each database, and any may
lead. The step is off where the transport has no leases: two relays would send everything twice.
"""

import logging
from typing import TYPE_CHECKING

from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext
from umbel.worker.steps.gossip import Gossip

if TYPE_CHECKING:
    from umbel.worker.steps.outbox_relay import RelayCandidate

log = logging.getLogger("umbel.outbox")


class OutboxStep(Step):
    """The step that runs one campaign for each outbox."""

    name = "outbox"
    requires = ("control", "gossip")

    def __init__(self, context: WorkerContext, gossip: Gossip) -> None:
        super().__init__(context)
        self._gossip = gossip
        self._candidates: list[RelayCandidate] = []

    async def start(self) -> None:
        """Begin to campaign, if the app has outboxes and the broker has leases."""
        settings = self._context.settings.outbox
        if settings is None:
            return
        capabilities = self._context.broker.capabilities
        if not capabilities.leases:
            log.warning("outbox disabled: %s", capabilities.why_not("leases"))
            return
        from umbel.worker.steps.outbox_relay import RelayCandidate  # few workers have an outbox

        assert self._group is not None
        for address in settings.addresses:
            candidate = RelayCandidate(self._context, self._gossip, address, self._group)
            self._candidates.append(candidate)
            self.run_in_background(candidate.keeper.run())
            self.run_in_background(candidate.note_progress())

    async def stop(self) -> None:
        """End the campaigns first, so that no relay begins; release each lease when its relay has ended."""
        await self.end_background()
        for candidate in self._candidates:
            await candidate.end_term()
            await candidate.keeper.stop()
