"""Scheduler: sends periodic tasks while this node leads; the shell of `protocol/leadership/schedule.py`.

Every worker whose app has periodic tasks stands for the lease, and any may lead. What the leader
sends it sends under the lease and together with the marks of what is settled, so a worker that
was cut off sends nothing. Pauses are kept in the data of another lease, which nobody holds for
longer than it takes to change them.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress

from umbel.brokers.interface import ClusterRecord
from umbel.coordination.driver import drive
from umbel.coordination.lease_keeper import Change, LeaseKeeper
from umbel.errors import BrokerError
from umbel.protocol.leadership.lease import Acquired, LeaseSettings
from umbel.protocol.leadership.schedule import (
    Effect,
    Event,
    Follow,
    Lead,
    MarksRead,
    Missed,
    PausesRead,
    ReadMarks,
    ReadPauses,
    Refused,
    Schedule,
    Send,
    Sent,
    Unproven,
    Unsure,
)
from umbel.wire.schedule import decode_marks, decode_pauses, encode_marks
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext
from umbel.worker.leases.announced import PHASES, announced_lease
from umbel.worker.settings import PeriodicTask
from umbel.worker.steps.events import Events
from umbel.worker.steps.gossip import Gossip

log = logging.getLogger("umbel.worker.scheduler")

SCHEDULER_LEASE = "scheduler"
PAUSES_LEASE = "scheduler-pauses"
PAUSES_EVERY_S = 1.0
CALL_TIMEOUT_S = 5.0
ASK_AGAIN_S = 0.5
INBOX_MAX = 100
RENEWALS_PER_TTL = 3


def lease_settings(ttl_s: float) -> LeaseSettings:
    """Of who sends a schedule."""
    return LeaseSettings(ttl_s=ttl_s, renew_s=ttl_s / RENEWALS_PER_TTL, wait_s=ttl_s / 10)


class Scheduler(Step):
    name = "scheduler"
    requires = ("control", "gossip")

    def __init__(self, context: WorkerContext, events: Events, gossip: Gossip) -> None:
        super().__init__()
        self._context = context
        self._cluster: ClusterRecord = context.broker
        self._events = events
        self._gossip = gossip
        self._tasks: Mapping[str, PeriodicTask] = context.settings.periodic
        self._schedule = Schedule([one.entry for one in self._tasks.values()])
        self._inbox: asyncio.Queue[Event] = asyncio.Queue(INBOX_MAX)
        self._keeper: LeaseKeeper | None = None

    async def start(self) -> None:
        if not self._tasks:
            return
        capabilities = self._cluster.capabilities
        if not capabilities.leases:
            log.warning("periodic tasks disabled: %s", capabilities.why_not("leases"))
            return
        settings = lease_settings(self._context.settings.scheduler_lease_s)
        self._keeper = announced_lease(
            self._context,
            self._events,
            self._gossip,
            SCHEDULER_LEASE,
            settings=settings,
            changed=self._changed,
        )
        self.run_in_background(self._keeper.run())
        self.run_in_background(drive(self._schedule, self._inbox, self._perform))
        self.run_in_background(self._watch_pauses())

    async def stop(self) -> None:
        await self.end_background()
        if self._keeper is not None:
            await self._keeper.stop()

    # -- who leads -------------------------------------------------------------------------------

    def _changed(self, change: Change) -> None:
        if isinstance(change, Acquired):
            self._put(Lead(decode_marks(change.data)))
        else:
            self._put(Follow())
        text, fields = f"scheduler {PHASES[type(change)]}", self._context.log_fields(term=change.term)
        self._context.outages.consequence(log, logging.INFO, text, named=text, **fields)

    def _put(self, event: Event) -> None:
        # Leadership changes a few times a minute at most, and each other event answers an effect.
        self._inbox.put_nowait(event)

    # -- what the machine asks for ---------------------------------------------------------------

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._put(await self._send(effect))
            case ReadMarks():
                self._put(await self._read_marks())
            case ReadPauses():
                self._put(await self._read_pauses())
            case Missed(name, count, _):
                self._context.counters.periodic_missed += count
                log.warning("periodic task %s: %d missed runs skipped", name, count)
            case Unproven(slots):
                if "fenced_publish" in self._cluster.capabilities.reasons:
                    self._context.counters.periodic_missed += len(slots)
                    names = ", ".join(sorted({slot.name for slot in slots}))
                    log.warning(
                        "broker connection lost while sending periodic tasks; possibly not sent: %s", names
                    )

    async def _send(self, send: Send) -> Event:
        assert self._keeper is not None
        batch = [one for slot in send.slots for one in self._tasks[slot.name].messages(slot.at_us)]
        store, term = self._cluster.coordination, self._keeper.term
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                done = self._keeper.still_mine() and await store.fenced_publish(
                    SCHEDULER_LEASE, self._keeper.holder, term, batch, data=encode_marks(send.marks)
                )
        except (BrokerError, TimeoutError) as error:
            log.debug(
                "cannot send periodic tasks; retrying", extra={"why": str(error) or "no answer in time"}
            )
            return Unsure()
        if not done:
            return Refused()
        self._context.counters.periodic_sent += len(send.slots)
        return Sent()

    async def _read_marks(self) -> Event:
        assert self._keeper is not None
        await asyncio.sleep(ASK_AGAIN_S)
        if not self._keeper.still_mine():
            return Unsure()
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                found = await self._cluster.coordination.read_lease(SCHEDULER_LEASE)
        except (BrokerError, TimeoutError):
            return Unsure()
        mine = (found.holder, found.term) == (self._keeper.holder, self._keeper.term)
        return MarksRead(decode_marks(found.data)) if mine else Unsure()

    async def _read_pauses(self) -> Event:
        assert self._keeper is not None
        while self._keeper.still_mine():
            with suppress(BrokerError, TimeoutError):
                return await self._pauses()
            await asyncio.sleep(ASK_AGAIN_S)
        return Follow()

    async def _watch_pauses(self) -> None:
        while True:
            await asyncio.sleep(PAUSES_EVERY_S)
            if self._schedule.leads:
                with suppress(BrokerError, TimeoutError):
                    await self._inbox.put(await self._pauses())

    async def _pauses(self) -> PausesRead:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            found = await self._cluster.coordination.read_lease(PAUSES_LEASE)
        return PausesRead(decode_pauses(found.data))
