"""Schedulers: the steps that send periodic tasks while this node holds the lease.

One drives Umbel's own schedule, the shell of `protocol/leadership/schedule.py`; one runs a scheduler from
another library.
"""

import asyncio
import logging
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from umbel.brokers.coordination import CoordinationStore
from umbel.coordination.driver import Change, LeaseKeeper, drive
from umbel.errors import BrokerError, BrokerUnavailable
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
from umbel.wire.message import Outgoing
from umbel.wire.records import decode_marks, decode_pauses, encode_marks
from umbel.worker.bootsteps import Step
from umbel.worker.context import Counters, PeriodicTask, WorkerContext
from umbel.worker.events import Events
from umbel.worker.foreign_scheduler import STATE_MAX_BYTES, SchedulerThread
from umbel.worker.steps.gossip import PHASES, Gossip, announced_lease

# ---- scheduler -------------------------------------------------------------------------------------
#
# Sends periodic tasks while this node leads; the shell of `protocol/leadership/schedule.py`.
#
# Every worker whose app has periodic tasks is a candidate for the lease, and any may lead. The leader
# publishes under the lease, together with the record of the slots that are done, so a worker that was cut
# off sends nothing. Pauses are stored as the data of another lease, which is held only while they are
# changed.

log = logging.getLogger("umbel.worker.scheduler")

SCHEDULER_LEASE = "scheduler"
PAUSES_LEASE = "scheduler-pauses"
PAUSES_EVERY_S = 1.0
CALL_TIMEOUT_S = 5.0
ASK_AGAIN_S = 0.5
INBOX_MAX = 100
RENEWALS_PER_TTL = 3


def lease_settings(ttl_s: float) -> LeaseSettings:
    """Return the timing of a lease whose holder publishes messages."""
    return LeaseSettings(ttl_s=ttl_s, renew_s=ttl_s / RENEWALS_PER_TTL, wait_s=ttl_s / 10)


class Scheduler(Step):
    """The step that campaigns for the lease and drives the schedule."""

    name = "scheduler"
    requires = ("control", "gossip")

    def __init__(self, context: WorkerContext, events: Events, gossip: Gossip) -> None:
        super().__init__()
        self._context = context
        self._events = events
        self._gossip = gossip
        self._tasks: Mapping[str, PeriodicTask] = context.settings.periodic
        self._schedule = Schedule([task.entry for task in self._tasks.values()])
        self._inbox: asyncio.Queue[Event] = asyncio.Queue(INBOX_MAX)
        self._keeper: LeaseKeeper | None = None

    async def start(self) -> None:
        """Begin to campaign, if the app has periodic tasks and the broker has leases."""
        if not self._tasks:
            return
        capabilities = self._context.broker.capabilities
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
        """End the schedule, then release the lease."""
        await self.end_background()
        if self._keeper is not None:
            await self._keeper.stop()

    # -- the lease -------------------------------------------------------------------------------

    def _changed(self, change: Change) -> None:
        if isinstance(change, LeaseAcquired):
            self._put(Lead(decode_marks(change.data)))
        else:
            self._put(Follow())
        text, fields = f"scheduler {PHASES[type(change)]}", self._context.log_fields(term=change.term)
        self._context.outages.consequence(log, logging.INFO, text, named=text, **fields)

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
        assert self._keeper is not None
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
        assert self._keeper is not None
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
            found = await self._context.broker.coordination.read_lease(PAUSES_LEASE)
        return PausesRead(decode_pauses(found.data))


# ---- foreign scheduler step ------------------------------------------------------------------------
#
# Runs a scheduler from another library while this node holds the lease for it.
#
# Every worker that has one is a candidate for the lease, and any may lead. The state that the scheduler
# leaves for its next leader is the data of the lease, as in Umbel's own scheduler.

R = TypeVar("R")


class ForeignSchedulerStep(Step):
    """The step that campaigns for the lease and starts the scheduler's thread for each term."""

    name = "foreign_scheduler"
    requires = ("control", "gossip")

    def __init__(self, context: WorkerContext, events: Events, gossip: Gossip) -> None:
        super().__init__()
        self._context = context
        self._events = events
        self._gossip = gossip
        self._keeper: LeaseKeeper | None = None
        self._thread: SchedulerThread | None = None
        self._term: SchedulerTerm | None = None
        self._turn = threading.Lock()

    async def start(self) -> None:
        """Begin to campaign, if the app has such a scheduler and the broker has leases."""
        if self._context.settings.scheduler is None:
            return
        capabilities = self._context.broker.capabilities
        if not capabilities.leases:
            log.warning("scheduler disabled: %s", capabilities.why_not("leases"))
            return
        self._keeper = announced_lease(
            self._context,
            self._events,
            self._gossip,
            self._context.settings.scheduler_lease,
            settings=lease_settings(self._context.settings.scheduler_lease_s),
            changed=self._changed,
        )
        self.run_in_background(self._keeper.run())

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
        await self.end_background()
        if self._keeper is not None:
            await self._keeper.stop()

    def _changed(self, change: Change) -> None:
        make = self._context.settings.scheduler
        assert self._keeper is not None
        assert make is not None
        if isinstance(change, LeaseAcquired):
            self._term = SchedulerTerm(
                self._context.broker.coordination, self._keeper, change.term, self._context.counters
            )
            self._thread = SchedulerThread(make, self._term, self._turn)
        else:
            self._end_term(lost=isinstance(change, LeadershipLost))
        text = f"foreign scheduler {PHASES[type(change)]}"
        fields = self._context.log_fields(lease=self._keeper.name, term=change.term)
        self._context.outages.consequence(log, logging.INFO, text, named=text, **fields)

    def _end_term(self, *, lost: bool) -> None:
        if self._term is not None and self._thread is not None:
            self._term.has_ended = True
            self._thread.end(lost=lost)


class SchedulerTerm:
    """One term of `Leadership`: built on the loop, used in the scheduler's thread."""

    def __init__(
        self, store: CoordinationStore, keeper: LeaseKeeper, number: int, counters: Counters
    ) -> None:
        self.has_ended = False
        self._store = store
        self._keeper = keeper
        self._number = number
        self._counters = counters
        self._loop = asyncio.get_running_loop()

    def still_leader(self) -> bool:
        """Return whether this term's lease is still held, by the local clock."""
        return not self.has_ended and self._keeper.term == self._number and self._keeper.still_mine()

    def load_state(self) -> bytes:
        """Return the lease's data."""
        return self._ask(self._store.read_lease(self._keeper.name)).data

    def save_state(self, state: bytes) -> bool:
        """Store the state under the lease; false if the lease is lost."""
        _check(state)
        keeper = self._keeper
        return self._ask(self._store.update_lease(keeper.name, keeper.holder, self._number, state))

    def publish(self, messages: Sequence[Outgoing], state: bytes) -> bool:
        """Send the messages and store the state in one fenced step; false if the lease is lost."""
        _check(state)
        if not self.still_leader():
            return False
        name, holder = self._keeper.name, self._keeper.holder
        done = self._ask(self._store.fenced_publish(name, holder, self._number, tuple(messages), data=state))
        self._counters.periodic_sent += len(messages) if done else 0
        return done

    def _ask(self, question: Coroutine[Any, Any, R]) -> R:
        """Return the store's answer. The call runs on the loop, which owns the broker's connection."""
        asked = asyncio.run_coroutine_threadsafe(_in_time(question), self._loop)
        try:
            return asked.result(2 * CALL_TIMEOUT_S)  # a stopped loop never answers
        except TimeoutError:
            asked.cancel()
            raise BrokerUnavailable(
                "the broker, which stores the scheduler's lease, did not answer in time"
            ) from None


async def _in_time(question: Coroutine[Any, Any, R]) -> R:
    async with asyncio.timeout(CALL_TIMEOUT_S):
        return await question


def _check(state: bytes) -> None:
    if len(state) > STATE_MAX_BYTES:
        raise ValueError(
            f"the scheduler's state has {len(state)} bytes, over the limit of {STATE_MAX_BYTES}: nothing was "
            "saved or sent; define fewer periodic tasks"
        )
