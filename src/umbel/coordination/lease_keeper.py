"""LeaseKeeper: one campaign for one lease; the shell of `protocol/leadership/lease.py`."""

import asyncio
import logging
from collections.abc import Callable

from umbel.brokers.coordination import CoordinationStore
from umbel.chance import uniform
from umbel.coordination.driver import drive, instant
from umbel.errors import BrokerError
from umbel.protocol.leadership.lease import (
    Acquired,
    AcquireReplied,
    CallAcquire,
    CallRelease,
    CallRenew,
    Campaign,
    Effect,
    Event,
    Lease,
    LeaseSettings,
    Lost,
    Released,
    ReleaseHeard,
    RenewReplied,
    Stop,
)

log = logging.getLogger("umbel.leases")
INBOX_MAX = 100
CALLS_PER_TTL = 3  # a call may take so much of a ttl; meanwhile nothing else is asked
Change = Acquired | Lost | Released


class LeaseKeeper:
    """`holder` must be a name that no other campaign has. `changed` is called on the loop."""

    def __init__(
        self,
        store: CoordinationStore,
        name: str,
        holder: str,
        *,
        settings: LeaseSettings | None = None,
        changed: Callable[[Change], None] = lambda _: None,
    ) -> None:
        self.holder = holder
        self._store = store
        self._settings = settings or LeaseSettings()
        self._changed = changed
        self._lease = Lease(name, holder, self._settings, uniform)
        self._inbox: asyncio.Queue[Event] = asyncio.Queue(INBOX_MAX)

    @property
    def name(self) -> str:
        return self._lease.name

    @property
    def term(self) -> int:
        return self._lease.term

    @property
    def leader(self) -> str:
        """Who leads, as far as this node knows."""
        return self._lease.holder_seen

    def still_mine(self) -> bool:
        return self._lease.still_mine(instant())

    def release_heard(self) -> None:
        if not self._inbox.full():
            self._inbox.put_nowait(ReleaseHeard())

    async def run(self) -> None:
        """Campaign and keep until cancelled; then `stop` gives back what is held."""
        await self._inbox.put(Campaign())
        await drive(self._lease, self._inbox, self._perform)

    async def stop(self) -> None:
        """To be called when `run` has ended: give the lease back."""
        for effect in self._lease.step(Stop(), instant()):
            await self._perform(effect)

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case CallAcquire() | CallRenew() | CallRelease():
                await self._call(effect)
            case Acquired() | Lost() | Released():
                self._changed(effect)

    async def _call(self, call: CallAcquire | CallRenew | CallRelease) -> None:
        try:
            async with asyncio.timeout(self._settings.ttl_s / CALLS_PER_TTL):
                await self._ask(call)
        except (BrokerError, TimeoutError) as error:  # the machine asks again, or gives up in time
            fields = {"lease": call.name, "why": str(error) or "no answer in time"}
            log.debug("cannot acquire, renew or release a lease in the broker; retrying", extra=fields)

    async def _ask(self, call: CallAcquire | CallRenew | CallRelease) -> None:
        match call:
            case CallAcquire(name, holder, ttl_s, sent_s):
                reply = await self._store.acquire_lease(name, holder, ttl_s=ttl_s)
                await self._inbox.put(AcquireReplied(sent_s, reply))
            case CallRenew(name, holder, term, ttl_s, sent_s):
                ok = await self._store.renew_lease(name, holder, term, ttl_s=ttl_s)
                await self._inbox.put(RenewReplied(term, sent_s, ok))
            case CallRelease(name, holder, term):
                await self._store.release_lease(name, holder, term)
