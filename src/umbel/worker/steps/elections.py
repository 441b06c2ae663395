"""Elections: this worker takes part in choosing who does what is to be done once (E1 to E5).

Requests come by the control command `election`, news by gossip, and what fell through by the
sweep: the holder of the lease `coord-sweeper` looks every five seconds for elections that nobody
holds. Which rules decide, the store's or the classic ones, is a setting; API and handlers are the
same.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Protocol

from umbel.chance import uniform
from umbel.control.state import ELECTION_REFUSED
from umbel.coordination.lease_keeper import Change as LeaseChange
from umbel.coordination.lease_keeper import LeaseKeeper
from umbel.errors import WireError
from umbel.protocol.leadership.lease import Acquired, LeaseSettings
from umbel.protocol.membership.events import Change, Joined, Member, MemberState
from umbel.wire import election as wire
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext
from umbel.worker.elections.stored import StoreElections
from umbel.worker.leases.announced import announced_lease
from umbel.worker.steps.events import Events
from umbel.worker.steps.gossip import Gossip

log = logging.getLogger("umbel.worker.elections")

SWEEPER = "coord-sweeper"
SWEEP_EVERY_S = 5.0
SWEEPER_LEASE = LeaseSettings(ttl_s=30.0, renew_s=10.0)
COUNT_EVERY_S = 1.0
STOP_POLL_S = 0.02
OUR_SOFTWARE = "umbel"
PRESENT = (MemberState.ALIVE, MemberState.SUSPECT)
Take = Callable[[Mapping[str, Any]], None]


class Rules(Protocol):
    """Elections by one set of rules."""

    def asked(self, arguments: Mapping[str, Any]) -> str: ...
    def elected(self, event: Mapping[str, Any]) -> None: ...
    def elect_heard(self, event: Mapping[str, Any]) -> None: ...
    def ack_heard(self, event: Mapping[str, Any]) -> None: ...
    def members_changed(self, ours: Sequence[Member], others: Sequence[Member]) -> None: ...
    def holder_gone(self, holder: str) -> None: ...
    async def sweep(self) -> None: ...
    async def run(self, group: asyncio.TaskGroup) -> None: ...
    def begin_stop(self) -> None: ...
    @property
    def busy(self) -> bool:
        """Whether a handler runs, or news of one is under way."""
        ...

    async def close(self) -> None: ...


class ElectionsStep(Step):
    name = "elections"
    requires = ("control", "gossip")

    def __init__(self, context: WorkerContext, events: Events, gossip: Gossip) -> None:
        super().__init__()
        self._context = context
        self._events = events
        self._gossip = gossip
        self._rules: Rules | None = None
        self._takes_part = False
        self._sweeper: LeaseKeeper | None = None
        self._acquired = asyncio.Event()
        self._counted_at = -COUNT_EVERY_S

    async def start(self) -> None:
        off = self._why_off()
        if off:
            log.warning("elections disabled: %s", off)
            return
        assert self._group is not None
        classic = self._context.settings.election_protocol == "v1"
        rules: Rules
        self._rules = rules = (
            self._classic_rules() if classic else StoreElections(self._context, self._events)
        )
        self._listen(rules)
        self._count_members(rules)
        self._takes_part = True
        self.run_in_background(rules.run(self._group))
        if not classic:
            self._sweeper = announced_lease(
                self._context,
                self._events,
                self._gossip,
                SWEEPER,
                settings=SWEEPER_LEASE,
                changed=self._sweep_when_it_leads,
            )
            self.run_in_background(self._sweeper.run())
            self.run_in_background(self._sweep(rules, self._sweeper))

    async def stop(self) -> None:
        self._takes_part = False
        rules = self._rules
        if rules is None:
            return
        rules.begin_stop()
        for _ in range(int(self._context.settings.grace_s / STOP_POLL_S)):
            # When something went wrong, everything was cancelled: nobody is left to wait for.
            if not rules.busy or all(task.done() for task in self._background):
                break
            await asyncio.sleep(STOP_POLL_S)
        if rules.busy:
            log.warning("election handler did not finish; another node takes over or the election fails")
        await self.end_background()
        await rules.close()
        if self._sweeper is not None:
            await self._sweeper.stop()

    def _why_off(self) -> str:
        settings, capabilities = self._context.settings, self._context.broker.capabilities
        if not capabilities.fanout:
            return capabilities.why_not("fanout")
        if settings.election_protocol == "v1":
            if not capabilities.events:
                return capabilities.why_not("events")
            return "'election_protocol' is v1 and gossip is off" if settings.without_gossip else ""
        return "" if capabilities.leases else capabilities.why_not("leases")

    # -- what comes in ---------------------------------------------------------------------------

    def asked(self, arguments: Mapping[str, Any]) -> str:
        """Take part in an election; why this worker cannot, or nothing."""
        if self._rules is None or not self._takes_part:
            return ELECTION_REFUSED
        if monotonic() - self._counted_at > COUNT_EVERY_S:
            self._count_members(self._rules)
        return self._rules.asked(arguments)

    def _classic_rules(self) -> Rules:
        from umbel.worker.elections.classic import ClassicElectionsShell  # few ask for them

        return ClassicElectionsShell(self._context, self._events)

    def _listen(self, rules: Rules) -> None:
        self._gossip.listen(wire.ELECTED, self._unless_malformed(rules.elected))
        self._gossip.listen(wire.ELECT, self._unless_malformed(rules.elect_heard))
        self._gossip.listen(wire.ELECT_ACK, self._unless_malformed(rules.ack_heard))
        self._gossip.on_change(lambda change: self._member_changed(rules, change))

    def _unless_malformed(self, take: Take) -> Take:
        def taken(event: Mapping[str, Any]) -> None:
            try:
                take(event)
            except WireError as error:
                self._context.counters.election_errors += 1
                log.warning("unreadable election event from another node ignored", extra={"why": str(error)})

        return taken

    def _member_changed(self, rules: Rules, change: Change) -> None:
        if not isinstance(change, Joined):
            rules.holder_gone(change.member.holder)
        self._count_members(rules)

    def _count_members(self, rules: Rules) -> None:
        here = [one for one in self._gossip.members() if one.state in PRESENT]
        # A node whose first event does not say what it runs is taken for one of ours until it does.
        others = [one for one in here if one.software not in (OUR_SOFTWARE, "")]
        rules.members_changed([one for one in here if one not in others], others)
        self._counted_at = monotonic()

    # -- the sweep -------------------------------------------------------------------------------

    async def _sweep(self, rules: Rules, lease: LeaseKeeper) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_EVERY_S + uniform(0.0, 1.0)):
                    await self._acquired.wait()  # a new sweeper sweeps at once
            self._acquired.clear()
            if lease.still_mine():
                await rules.sweep()

    def _sweep_when_it_leads(self, change: LeaseChange) -> None:
        if isinstance(change, Acquired):
            self._acquired.set()
