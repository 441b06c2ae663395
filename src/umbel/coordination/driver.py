"""Drivers: the asyncio shells that the worker, the app and the monitor share.

drive() runs a machine of the cluster, listen() a subscription, LeaseKeeper a campaign for a lease; Inquiries
asks about silent nodes.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, NoReturn, TypeVar

from umbel.backoff import Backoff
from umbel.brokers.coordination import CoordinationStore
from umbel.brokers.interface import Broadcast, ClusterRecord
from umbel.chance import uniform
from umbel.clock import boot_time_s
from umbel.control.client import ControlClient
from umbel.errors import AccessRefused, BrokerError
from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.leadership.lease import (
    AcquireReplied,
    CallAcquire,
    CallRelease,
    CallRenewLease,
    Campaign,
    Effect,
    Event,
    LeadershipLost,
    Lease,
    LeaseAcquired,
    LeaseReleased,
    LeaseRenewReplied,
    LeaseSettings,
    ReleaseReceived,
    StopCampaign,
)
from umbel.protocol.machine import ClusterMachine, Tick
from umbel.protocol.membership.members import Answered, Member, MemberState, Probed
from umbel.protocol.membership.members import Event as MembersEvent

# ---- machines and subscriptions --------------------------------------------------------------------
#
# drive() and fairly() occupy the loop for TURN_S at most when input comes faster than it is handled: an await
# that returns at once does not let other tasks run.
#
# Deadlines are on the boot clock, which counts the time a machine was suspended; the loop's clock does not.
# So a wait for a deadline checks the boot clock at least every RECHECK_S.

RECHECK_S = 1.0
TURN_S = 0.005
EventT = TypeVar("EventT")
EffectT = TypeVar("EffectT")


def instant() -> Instant:
    """Return the present time on the boot clock and on the wall clock."""
    return Instant(boot_time_s(), time.time())


async def drive(
    machine: ClusterMachine[EventT, EffectT],
    inbox: asyncio.Queue[EventT],
    perform: Callable[[EffectT], Awaitable[None]],
    *,
    now: Callable[[], Instant] = instant,
    on_fault: Callable[[Exception], None] | None = None,
) -> NoReturn:
    """Feed one machine from one inbox until cancelled.

    Exactly one task drives a machine: step() never awaits, so the machine needs no lock, and its effects are
    performed in the order in which it returns them. `on_fault` gets an exception of the machine, which costs
    one event then, and not the process: for machines whose events come from other nodes.
    """
    turn_ends = time.monotonic() + TURN_S
    while True:
        event = await _next_event(machine, inbox, now)
        try:
            effects = machine.step(event, now())
        except Exception as error:  # of the machine: an internal error
            if on_fault is None:
                raise
            on_fault(error)
            effects = []
        for effect in effects:
            await perform(effect)
        if time.monotonic() >= turn_ends:
            await asyncio.sleep(0)
            turn_ends = time.monotonic() + TURN_S


async def fairly(
    source: AsyncIterable[EventT], *, rest_s: Callable[[float], float] = lambda _used_s: 0.0
) -> AsyncIterator[EventT]:
    """Yield what a subscription receives, and let other tasks run after each turn.

    `rest_s` returns how long to pause, given the CPU time of the turn.
    """
    turn_ends, used_s = time.monotonic() + TURN_S, time.thread_time()
    async for event in source:
        yield event
        if time.monotonic() >= turn_ends:
            await asyncio.sleep(rest_s(time.thread_time() - used_s))
            turn_ends, used_s = time.monotonic() + TURN_S, time.thread_time()


async def listen(
    subscribe: Callable[[], AbstractAsyncContextManager[AsyncIterable[Broadcast]]],
    take: Callable[[Broadcast], Awaitable[None]],
    *,
    is_open: asyncio.Event,
    report: Callable[[BrokerError | None], None],
) -> NoReturn:
    """Hand each broadcast of a subscription to `take` until cancelled; subscribe again after each failure.

    `report` is called with None whenever a subscription is open, else with its error. `is_open` is set by the
    first that is open; an AccessRefused before that is raised, because a retry would not help.
    """
    backoff = Backoff()
    while True:
        try:
            async with subscribe() as subscription:
                is_open.set()
                backoff.reset()
                report(None)
                async for broadcast in fairly(subscription):
                    await take(broadcast)
        except BrokerError as error:
            if isinstance(error, AccessRefused) and not is_open.is_set():
                raise
            report(error)
            await backoff.pause()


async def _next_event(
    machine: ClusterMachine[EventT, EffectT], inbox: asyncio.Queue[EventT], now: Callable[[], Instant]
) -> EventT | Tick:
    while True:
        deadline = machine.deadline
        if deadline is None:
            return await inbox.get()
        # A due deadline goes first, or an inbox that never empties would starve it.
        left_s = deadline - now().boot_s
        if left_s <= 0:
            return Tick()
        try:
            async with asyncio.timeout(min(left_s, RECHECK_S)):
                return await inbox.get()
        except TimeoutError:
            continue


# ---- lease keeper ----------------------------------------------------------------------------------

log = logging.getLogger("umbel.leases")
INBOX_MAX = 100
CALLS_PER_TTL = 3  # a call may take this part of a ttl; no other call is made meanwhile
Change = LeaseAcquired | LeadershipLost | LeaseReleased


class LeaseKeeper:
    """One campaign for one lease; the shell of `protocol/leadership/lease.py`.

    `holder` must be a name that no other campaign has. `changed` is called on the loop.
    """

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
        """The name of the lease."""
        return self._lease.name

    @property
    def term(self) -> int:
        """The fencing token of the present or last term."""
        return self._lease.term

    @property
    def leader(self) -> str:
        """The holder of the lease, as far as this node knows."""
        return self._lease.holder_seen

    def still_mine(self) -> bool:
        """Return whether the lease is certainly held now, by the local clock."""
        return self._lease.still_mine(instant())

    def note_release(self) -> None:
        """Try to acquire the lease now, because its holder announced a release."""
        if not self._inbox.full():
            self._inbox.put_nowait(ReleaseReceived())

    async def run(self) -> None:
        """Acquire and renew the lease until cancelled; then `stop` releases it."""
        await self._inbox.put(Campaign())
        await drive(self._lease, self._inbox, self._perform)

    async def stop(self) -> None:
        """Release the lease; called when `run` has ended."""
        for effect in self._lease.step(StopCampaign(), instant()):
            await self._perform(effect)

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case CallAcquire() | CallRenewLease() | CallRelease():
                await self._call(effect)
            case LeaseAcquired() | LeadershipLost() | LeaseReleased():
                self._changed(effect)

    async def _call(self, call: CallAcquire | CallRenewLease | CallRelease) -> None:
        try:
            async with asyncio.timeout(self._settings.ttl_s / CALLS_PER_TTL):
                await self._ask(call)
        except (BrokerError, TimeoutError) as error:  # the machine retries, or gives up in time
            fields = {"lease": call.name, "why": str(error) or "no answer in time"}
            log.debug("cannot acquire, renew or release a lease in the broker; retrying", extra=fields)

    async def _ask(self, call: CallAcquire | CallRenewLease | CallRelease) -> None:
        match call:
            case CallAcquire(name, holder, ttl_s, sent_s):
                reply = await self._store.acquire_lease(name, holder, ttl_s=ttl_s)
                await self._inbox.put(AcquireReplied(sent_s, reply))
            case CallRenewLease(name, holder, term, ttl_s, sent_s):
                ok = await self._store.renew_lease(name, holder, term, ttl_s=ttl_s)
                await self._inbox.put(LeaseRenewReplied(term, sent_s, ok))
            case CallRelease(name, holder, term):
                await self._store.release_lease(name, holder, term)


# ---- inquiries -------------------------------------------------------------------------------------

inquiry_log = logging.getLogger("umbel.coordination")

WAITING_MAX = 200
NEWCOMERS_MAX = 100  # of these, at most so many about newcomers
AT_ONCE = 32
TIMEOUT_S = 2.0


class Inquiries:
    """Asks about a node that is new or silent, and gives the answers to the membership machine.

    The machine does not wait: a suspect's time runs during the requests. The number of waiting and of running
    requests is limited, and newcomers leave room for suspects. `under_way`: tasks, which the owner cancels
    when it stops.
    """

    def __init__(
        self, asker: ControlClient, cluster: ClusterRecord, report: Callable[[MembersEvent], None]
    ) -> None:
        self.under_way: set[asyncio.Task[None]] = set()
        self._asker = asker
        self._cluster = cluster
        self._report = report
        self._turns = asyncio.Semaphore(AT_ONCE)

    def probe(self, member: Member, group: asyncio.TaskGroup) -> None:
        """Ask the broker what it and other nodes know of the member."""
        is_newcomer = member.state is MemberState.ALIVE
        self._begin(group, self._probe(member), NEWCOMERS_MAX if is_newcomer else WAITING_MAX)

    def ping(self, member: Member, group: asyncio.TaskGroup) -> None:
        """Ask the node itself."""
        self._begin(group, self._ping(member), WAITING_MAX)

    def _begin(self, group: asyncio.TaskGroup, asking: Coroutine[Any, Any, None], waiting_max: int) -> None:
        if len(self.under_way) >= waiting_max:
            asking.close()
            return
        task = group.create_task(self._in_turn(asking), name="umbel-gossip-asks")
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)

    async def _in_turn(self, asking: Coroutine[Any, Any, None]) -> None:
        try:
            async with self._turns:
                await asking
        finally:
            asking.close()  # a coroutine whose turn never came was not awaited

    async def _ping(self, member: Member) -> None:
        wait_s = max(TIMEOUT_S, member.freq_s)
        try:
            answers = await self._asker.ask("ping", destination=[member.node], timeout_s=wait_s)
        except BrokerError as error:
            inquiry_log.debug("cannot ping a silent node", extra={"suspect": member.node, "why": str(error)})
            return
        if member.node in answers.replies:
            self._report(Answered(member.node))

    async def _probe(self, member: Member) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                evidence = await self._cluster.probe(member.node, member.inc)
        except (BrokerError, TimeoutError) as error:
            fields = {"suspect": member.node, "why": str(error)}
            inquiry_log.debug("cannot ask other nodes about a silent node", extra=fields)
            return
        self._report(Probed(member.node, member.inc, member.pid, evidence.value))
