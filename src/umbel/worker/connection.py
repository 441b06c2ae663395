"""Connection: the link to the broker, and this worker's lease on what it claims.

The lease is renewed four times per lease, so three renewals may fail before other workers get the messages,
and a late renewal is not taken for an outage of the server. While the broker is unreachable the worker
retries with growing pauses; `Outages` logs the beginning and the end once each. Lost links are restored at
once, including idle ones. At the start the worker waits for the broker up to `broker_connection_wait_s`.

If the broker's data was replaced (emptied, deleted, restored from a backup), that is logged once, with the
number of messages that only this worker knows. Their tasks continue, and their results are stored (see
`Settler`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from time import time

from umbel.backoff import Backoff
from umbel.brokers.interface import Replaced
from umbel.errors import AccessRefused, BrokerError, BrokerUnavailable
from umbel.protocol.shutdown import LinkChange, LinkLost
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext

log = logging.getLogger("umbel.worker.connection")
SWEEP_EVERY_S = 60.0
OPEN_PAUSE_MAX_S = 1.0
RENEWALS_PER_LEASE, LOST_CHECKS_PER_LEASE = 4, 3
REPLACED_TEXT = (
    "broker data was replaced (emptied, deleted or restored from a backup): it does not know the messages "
    "claimed here; running tasks continue and their results will be stored; waiting messages are lost "
    "unless the new data has them, and messages that a backup restored run again"
)
RETURNED_TEXT = "messages of dead workers returned to their queues"


class Connection(Step):
    """The step that opens, watches and closes the broker."""

    name = "connection"

    def __init__(
        self,
        context: WorkerContext,
        *,
        on_replaced: Sequence[Callable[[], object]],
        on_lease_ended: Callable[[], None],
    ) -> None:
        super().__init__(context)
        self._broker = context.broker
        self._owner = context.identity.owner
        self._opened = False
        self.problem = ""  # why the lease cannot be renewed now
        self.replaced: tuple[float, Replaced] | None = None  # the last time, and what was found
        self._on_replaced = on_replaced
        self._on_lease_ended = on_lease_ended
        self._relink = asyncio.Event()
        self._broker.on_replaced(self._note_replaced)
        self._broker.on_link(self._note_link)

    async def start(self) -> None:
        """Connect to the broker, take the lease, and begin to renew it."""
        await self._open()
        if self._broker.keyring is not None and (signer := self._broker.signer) is not None:
            self._context.settings.learn_cluster(signer.cluster.id)
        lease_s = self._context.settings.lease_s
        self.run_in_background(self._reconnect_on())
        for part, work, every_s in (
            ("lease", self._renew, lease_s / RENEWALS_PER_LEASE),
            ("lost messages", self._return_lost, lease_s / LOST_CHECKS_PER_LEASE),
            ("sweep", self._broker.sweep, SWEEP_EVERY_S),
        ):
            self.run_in_background(self._repeat(part, work, every_s=every_s))

    async def _open(self) -> None:
        """Open the broker, with retries only while it is unreachable."""
        loop, backoff = asyncio.get_running_loop(), Backoff(most_s=OPEN_PAUSE_MAX_S)
        wait_s = self._context.settings.broker_connection_wait_s
        deadline = loop.time() + wait_s
        while True:
            try:
                await self._broker.open()
                self._opened = True
                await self._broker.renew(self._owner)
                break
            except BrokerUnavailable as error:
                if isinstance(error, AccessRefused) or loop.time() >= deadline:
                    raise
                if not backoff.failures:
                    fields = {"why": str(error), "wait_s": wait_s}
                    log.warning("cannot connect to the broker; retrying", extra=fields)
            await backoff.pause()
        if backoff.failures:
            log.info("connected to the broker", extra={"after_failures": backoff.failures})

    async def stop(self) -> None:
        """Give claimed messages back to the broker, and disconnect."""
        await self.end_background()
        if not self._opened:
            await self._broker.close()
            return
        try:
            returned = await self._broker.forget_owner(self._owner)
        except BrokerError as error:
            log.warning(
                "cannot return unacknowledged messages; the broker does so when this worker's lease expires",
                extra={"why": str(error)},
            )
        else:
            if returned:
                log.info("unstarted messages returned to their queues", extra={"count": returned})
        await self._broker.close()

    def _note_replaced(self, replaced: Replaced) -> None:
        self._context.counters.store_replaced += 1
        self.replaced = (time(), replaced)
        log.error(REPLACED_TEXT, extra={"unknown": replaced.unknown, "what": replaced.what})
        for callback in self._on_replaced:
            callback()

    def _note_link(self, change: LinkChange) -> None:
        self._context.outages.link(change)
        if isinstance(change, LinkLost):
            self._relink.set()

    async def _reconnect_on(self) -> None:
        """Restore lost links at once, not only when they are used next."""
        outages = self._context.outages
        while True:
            await self._relink.wait()
            self._relink.clear()
            backoff = Backoff()
            while not outages.is_linked:
                try:
                    await self._broker.reconnect()
                    break
                except BrokerError as error:
                    outages.failed(self.name, error)
                    await backoff.pause()
            outages.worked(self.name)

    async def _renew(self) -> None:
        try:
            stood = await self._broker.renew(self._owner)
        except BrokerError as error:
            self.problem = f"cannot reach the broker: {error}"
            raise
        self.problem = ""
        if not stood:
            self._on_lease_ended()

    async def _return_lost(self) -> None:
        returned = await self._broker.return_lost(by_turn=True)
        if returned:
            self._context.outages.consequence(
                log, logging.WARNING, RETURNED_TEXT, named="returned of others", count=returned
            )

    async def _repeat(self, part: str, work: Callable[[], Awaitable[object]], *, every_s: float) -> None:
        """Call the work periodically; after a failure the next call comes sooner, with growing pauses."""
        backoff, wait_s, outages = Backoff(), every_s, self._context.outages
        while True:
            await asyncio.sleep(wait_s)
            try:
                await work()
            except BrokerError as error:
                outages.failed(part, error)
                wait_s = min(every_s, backoff.wait_s())
            else:
                outages.worked(part)
                backoff.reset()
                wait_s = every_s
