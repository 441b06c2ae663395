"""Schedulers: the steps that send periodic tasks while this node holds the lease.

One drives Umbel's schedule, as the shell of `protocol/leadership/schedule.py`; the other runs a scheduler of
another library.
"""

import asyncio
import logging
import threading
from collections.abc import Mapping
from contextlib import suppress

from umbel.coordination.driver import Change, drive
from umbel.errors import BrokerError
from umbel.pools.event_loop import OffLoop
from umbel.protocol.leadership.lease import LeadershipLost, LeaseAcquired, LeaseSettings
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
    Schedule,
    SendSlots,
    SlotsRefused,
    SlotsSent,
    Unsure,
)
from umbel.wire.records import decode_marks, decode_pauses, encode_marks
from umbel.worker.bootsteps import Step
from umbel.worker.context import PeriodicTask, WorkerContext
from umbel.worker.foreign_scheduler import CALL_TIMEOUT_S, SchedulerTerm, SchedulerThread
from umbel.worker.steps.gossip import PHASES, Gossip

log = logging.getLogger("umbel.worker.scheduler")

SCHEDULER_LEASE = "scheduler"
PAUSES_LEASE = "scheduler-pauses"
PAUSES_EVERY_S = 1.0
ASK_AGAIN_S = 0.5
INBOX_MAX = 100
RENEWALS_PER_TTL = 3


def lease_settings(ttl_s: float) -> LeaseSettings:
    """Return the timing of a lease whose holder publishes messages."""
    return LeaseSettings(ttl_s=ttl_s, renew_s=ttl_s / RENEWALS_PER_TTL, wait_s=ttl_s / 10)


class SchedulerStep(Step):
    """A step that sends periodic tasks while this node holds a lease.

    Every worker that has such tasks is a candidate for the lease, and any may lead.
    """

    requires = ("control", "gossip")

    def __init__(self, context: WorkerContext, gossip: Gossip, lease: str) -> None:
        super().__init__(context)
        settings = lease_settings(context.settings.scheduler_lease_s)
        self._keeper = gossip.campaign(lease, self._changed, settings=settings)

    def _campaign(self, what: str) -> bool:
        """Begin to campaign; return whether the broker has leases."""
        capabilities = self._context.broker.capabilities
        if not capabilities.leases:
            log.warning("%s disabled: %s", what, capabilities.why_not("leases"))
            return False
        self.run_in_background(self._keeper.run())
        return True

    async def stop(self) -> None:
        """End the scheduler, then release the lease."""
        is_candidate = bool(self._background)
        await self.end_background()
        if is_candidate:
            await self._keeper.stop()

    def _changed(self, change: Change) -> None:
        raise NotImplementedError


# ---- Umbel's schedule ------------------------------------------------------------------------------


class Scheduler(SchedulerStep):
    """The step that sends the app's periodic tasks.

    The leader publishes under the lease, together with the record of the slots that are done, so a worker
    that was cut off sends nothing. Pauses are stored as the data of another lease, which is held only while
    they are changed.
    """

    name = "scheduler"

    def __init__(self, context: WorkerContext, gossip: Gossip) -> None:
        super().__init__(context, gossip, SCHEDULER_LEASE)
        self._tasks: Mapping[str, PeriodicTask] = context.settings.periodic
        self._schedule = Schedule([task.entry for task in self._tasks.values()])
        self._inbox: asyncio.Queue[Event] = asyncio.Queue(INBOX_MAX)

    async def start(self) -> None:
        """Begin to campaign, if the app has periodic tasks and the broker has leases."""
        if self._tasks and self._campaign("periodic tasks"):
            self.run_in_background(drive(self._schedule, self._inbox, self._perform))
            self.run_in_background(self._watch_pauses())

    def _changed(self, change: Change) -> None:
        if isinstance(change, LeaseAcquired):
            self._put(Lead(decode_marks(change.data)))
        else:
            self._put(Follow())
        self._context.log_leadership(log, "scheduler", PHASES[type(change)], change.term)

    def _put(self, event: Event) -> None:
        # Leadership changes a few times a minute at most, and each other event answers an effect.
        self._inbox.put_nowait(event)

    # -- effects of the schedule ---------------------------------------------------------------

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case SendSlots():
                self._put(await self._send(effect))
            case ReadMarks():
                self._put(await self._read_marks())
            case ReadPauses():
                self._put(await self._read_pauses())
            case Missed(name, count, _):
                self._context.counters.periodic_missed += count
                log.warning("periodic task %s: %d missed runs skipped", name, count)

    async def _send(self, send: SendSlots) -> Event:
        """Publish slots under the lease. Unsure: the broker did not answer, so they may have been sent."""
        batch = [message for slot in send.slots for message in self._tasks[slot.name].messages(slot.at_us)]
        store, term = self._context.broker.coordination, self._keeper.term
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
            return SlotsRefused()
        self._context.counters.periodic_sent += len(send.slots)
        return SlotsSent()

    async def _read_marks(self) -> Event:
        """Read from the lease which slots were sent, after an answer was lost."""
        await asyncio.sleep(ASK_AGAIN_S)
        if not self._keeper.still_mine():
            return Unsure()
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                found = await self._context.broker.coordination.read_lease(SCHEDULER_LEASE)
        except (BrokerError, TimeoutError):
            return Unsure()
        mine = (found.holder, found.term) == (self._keeper.holder, self._keeper.term)
        return MarksRead(decode_marks(found.data)) if mine else Unsure()

    async def _read_pauses(self) -> Event:
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
            found = await self._context.broker.coordination.read_lease(PAUSES_LEASE)
        return PausesRead(decode_pauses(found.data))


# ---- foreign scheduler -----------------------------------------------------------------------------


class ForeignSchedulerStep(SchedulerStep):
    """The step that runs a scheduler of another library, in a thread for each term as the leader.

    The state that the scheduler saves for the next leader is the data of the lease.
    """

    name = "foreign_scheduler"

    def __init__(self, context: WorkerContext, gossip: Gossip) -> None:
        super().__init__(context, gossip, context.settings.scheduler_lease)
        self._thread: SchedulerThread | None = None
        self._term: SchedulerTerm | None = None
        self._turn = threading.Lock()

    async def start(self) -> None:
        """Begin to campaign, if the app has such a scheduler and the broker has leases."""
        if self._context.settings.scheduler is not None:
            self._campaign("scheduler")

    async def stop(self) -> None:
        """End the scheduler while the lease is held, so that it can save; then release the lease."""
        self._end_term(lost=False)
        if self._thread is not None:
            try:
                await OffLoop("umbel-scheduler-end", self._thread.over.wait).ended(
                    self._context.settings.hooks.timeout_s
                )
            except TimeoutError:
                log.error("scheduler did not stop in time; the worker shuts down without waiting for it")
        await super().stop()

    def _changed(self, change: Change) -> None:
        make = self._context.settings.scheduler
        assert make is not None, "only a worker with a scheduler campaigns"
        if isinstance(change, LeaseAcquired):
            self._term = SchedulerTerm(
                self._context.broker.coordination, self._keeper, change.term, self._context.counters
            )
            self._thread = SchedulerThread(make, self._term, self._turn)
        else:
            self._end_term(lost=isinstance(change, LeadershipLost))
        phase, lease = PHASES[type(change)], self._keeper.name
        self._context.log_leadership(log, "foreign scheduler", phase, change.term, lease=lease)

    def _end_term(self, *, lost: bool) -> None:
        if self._term is not None and self._thread is not None:
            self._term.has_ended = True
            self._thread.end(lost=lost)
