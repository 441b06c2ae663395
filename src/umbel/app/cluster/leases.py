"""Leases for users' code: lead something for as long as the block runs (E6).

    async with app.lease("nightly-report") as lease:
        while lease.still_mine():
            ...

The block begins when the lease is ours. When it is lost meanwhile, `still_mine()` is false from
then on, and `lost` is set; it is not taken again behind the block's back, because what it does
belongs to one term.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from umbel.app.canvas.signature import Signature
from umbel.app.sending.prepare import new_id, origin
from umbel.brokers.interface import BrokerSettings, ClusterRecord
from umbel.brokers.registry import open_broker
from umbel.coordination.lease_keeper import LeaseKeeper
from umbel.errors import LeaseTimeout
from umbel.protocol.leadership.coordination import LEASE_TTL_S
from umbel.protocol.leadership.lease import Acquired, LeaseSettings, Lost, Released

RENEWALS_PER_TTL = 3
ASK_EVERY_S = 0.5  # a client does not hear of releases


class HeldLease:
    """A lease that is ours, at least it was when the block began."""

    def __init__(self, broker: ClusterRecord, name: str, ttl_s: float) -> None:
        settings = LeaseSettings(ttl_s=ttl_s, renew_s=ttl_s / RENEWALS_PER_TTL, ask_every_s=ASK_EVERY_S)
        self.name = name
        self.data = b""  # what the last leader left with `update`
        self.term = 0
        self.lost = asyncio.Event()
        self._broker = broker
        self._acquired = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        holder = f"{origin()}.{new_id()}"  # unique: two campaigns must not share one
        self._keeper = LeaseKeeper(
            broker.coordination, name, holder, settings=settings, changed=self._changed
        )

    def still_mine(self) -> bool:
        """To be asked before each effect; who cannot undo an effect also hands on the term."""
        return not self.lost.is_set() and self._keeper.still_mine()

    async def update(self, data: bytes) -> bool:
        """Store a value for the next leader; False when the lease is no longer ours."""
        store = self._broker.coordination
        return await store.update_lease(self.name, self._keeper.holder, self.term, data)

    async def send(self, signatures: Sequence[Signature[Any]]) -> bool:
        """Send tasks in one step with the look whether the lease is ours; False: nothing was sent."""
        prepared = [one for signature in signatures for one in _frozen(signature).prepare()]
        store = self._broker.coordination
        batch = [one.outgoing for one in prepared]
        return await store.fenced_publish(self.name, self._keeper.holder, self.term, batch)

    async def acquire(self, timeout_s: float | None) -> None:
        self._task = asyncio.create_task(self._keeper.run(), name=f"umbel-lease-{self.name}")
        try:
            async with asyncio.timeout(timeout_s):
                await self._acquired.wait()
        except TimeoutError:
            assert timeout_s is not None
            raise LeaseTimeout.after(self.name, self._keeper.leader, timeout_s) from None

    async def release(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._keeper.stop()

    def _changed(self, change: Acquired | Lost | Released) -> None:
        match change:
            case Acquired(term, data):
                self.term, self.data = term, data
                self._acquired.set()
            case Lost():
                self.lost.set()
                assert self._task is not None
                self._task.cancel()
            case Released():
                pass


@asynccontextmanager
async def hold_lease(
    broker_settings: BrokerSettings, name: str, *, ttl: float = LEASE_TTL_S, timeout: float | None = None
) -> AsyncIterator[HeldLease]:
    broker = open_broker(broker_settings)
    await broker.open()
    try:
        lease = HeldLease(broker, name, ttl)
        try:
            await lease.acquire(timeout)
            yield lease
        finally:
            await lease.release()
    finally:
        await broker.close()


def _frozen(signature: Signature[Any]) -> Signature[Any]:
    call = signature.clone()
    call.freeze()
    return call
