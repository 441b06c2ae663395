"""Elections: this worker takes part in elections of the node that runs a handler once (E1 to E5).

The rules here are those of the store (`election_protocol = v2`); the classic rules are in
`classic_elections`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic, time
from typing import Any, TypeVar

from umbel.brokers.coordination import CoordinationStore
from umbel.chance import uniform
from umbel.control.client import ControlClient
from umbel.control.panel import ELECTION_REFUSED, NOT_NOW
from umbel.coordination.driver import Change as LeaseChange
from umbel.coordination.driver import LeaseKeeper, instant
from umbel.errors import BrokerError, WireError
from umbel.protocol.election.classic import PublishAck, PublishElect
from umbel.protocol.election.election import Elections
from umbel.protocol.election.events import (
    Asked,
    CallClaim,
    CallFinish,
    CallRenew,
    CallStart,
    CancelHandler,
    ClaimReplied,
    Dropped,
    Effect,
    Event,
    Finished,
    FinishReplied,
    HandlerEnded,
    HolderLost,
    Phase,
    Prolong,
    PublishElected,
    RenewReplied,
    Resend,
    RunHandler,
    StartReplied,
    StopElections,
    Swept,
)
from umbel.protocol.election.mixed import Enter, MixedElections, StopMixed, Unfenced, WorkerCounts
from umbel.protocol.election.mixed import Event as MixedEvent
from umbel.protocol.election.table import ElectionSettings
from umbel.protocol.leadership.coordination import ElectionRequest, ElectionState, Policy
from umbel.protocol.leadership.lease import LeaseAcquired, LeaseSettings
from umbel.protocol.membership.members import Change, Joined, Member, MemberState
from umbel.wire import coordination as wire
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext
from umbel.worker.events import Events
from umbel.worker.steps.election_rules import ElectionRules
from umbel.worker.steps.gossip import Gossip
from umbel.worker.steps.heart import Heart

log = logging.getLogger("umbel.worker.elections")

# ---- calls of the store ----------------------------------------------------------------------------

AT_ONCE_MAX = 16
UNDER_WAY_MAX = 1000
Call = CallClaim | CallStart | CallRenew | CallFinish
T = TypeVar("T")


class StoreCalls:
    """Calls of the store, made concurrently with the machine and answered as events.

    The machine repeats a request by a timer when an answer is late. A call that is under way is not made
    twice: its late answer serves as well, and a slow store is not flooded. Failed calls are counted;
    `Outages` logs an unavailable broker. At most AT_ONCE_MAX calls run; beyond UNDER_WAY_MAX a new call is
    skipped until the machine repeats it. `timeout_s`: when a call is given up, well after the machine has
    repeated it.
    """

    def __init__(self, store: CoordinationStore, timeout_s: float, answer: Callable[[Event], None]) -> None:
        self.failed = 0
        self._store = store
        self._timeout_s = timeout_s
        self._answer = answer
        self._turns = asyncio.Semaphore(AT_ONCE_MAX)
        self._under_way: dict[tuple[type[Call], str, int], asyncio.Task[None]] = {}

    def make(self, call: Call, group: asyncio.TaskGroup) -> None:
        """Start the call, unless the same one is under way; its answer goes to `answer`."""
        same = (type(call), call.election_id, 0 if isinstance(call, CallClaim) else call.term)
        if same in self._under_way:
            return
        if len(self._under_way) >= UNDER_WAY_MAX:
            self.failed += 1
            return
        task = group.create_task(self._make(call), name="umbel-election-call")
        self._under_way[same] = task
        task.add_done_callback(lambda _: self._under_way.pop(same))

    async def attempt(self, call: Awaitable[T]) -> T | None:
        """Return the answer of the store, or None if it failed or took too long."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except (BrokerError, TimeoutError) as error:
            self.failed += 1
            why = str(error) or f"no answer within {self._timeout_s:g} s"
            log.debug("cannot read or write an election in the broker; retrying", extra={"why": why})
            return None

    async def close(self) -> None:
        """Cancel all calls under way."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _make(self, call: Call) -> None:
        async with self._turns:
            answer = await self.attempt(self._ask(call))
        if answer is not None:
            self._answer(answer)

    async def _ask(self, call: Call) -> Event:
        store = self._store
        match call:
            case CallClaim(election_id, key, holder, request, ttl_s, sent_s):
                reply = await store.claim_election(key, holder, request, ttl_s=ttl_s)
                return ClaimReplied(election_id, sent_s, reply)
            case CallStart(election_id, key, holder, term, sent_s):
                ok = await store.start_election(key, holder, term)
                return StartReplied(election_id, term, sent_s, ok)
            case CallRenew(election_id, key, holder, term, sent_s):
                ok = await store.renew_election(key, holder, term)
                return RenewReplied(election_id, term, sent_s, ok)
            case CallFinish(election_id, key, holder, term, outcome):
                ok = await store.finish_election(key, holder, term, outcome)
                return FinishReplied(election_id, term, ok)


# ---- rules of the store ----------------------------------------------------------------------------

SWEPT_MAX = 200
OURS = "@v2"


class StoreElections(ElectionRules):
    """The rules of `election_protocol = v2`: the shell of `protocol/election/election.py`.

    Commands and events come in on the loop and go to the machine's inbox; store calls, handlers and
    broadcasts run concurrently. A command from a Celery client passes through `MixedElections` first, which
    decides what Celery's workers must receive before anything else.
    """

    def __init__(self, context: WorkerContext, events: Events) -> None:
        identity, settings = context.identity, context.settings
        topics, machine_settings = frozenset(settings.election_handlers), ElectionSettings()
        self._machine = Elections(identity.node, identity.owner, topics, machine_settings, uniform)
        super().__init__(context, events, self._machine)
        compat = settings.election_v1_compat
        if compat == "auto" and settings.without_gossip:  # it cannot know whether a classic worker is there
            compat = "always"
        self._mixed = MixedElections(identity.node, topics, compat)
        self._store = context.broker.coordination
        self._calls = StoreCalls(self._store, machine_settings.ttl_s, self._inbox.put_nowait)
        self._asker = ControlClient(context.broker)

    # -- what comes in ---------------------------------------------------------------------------

    def asked(self, arguments: Mapping[str, Any]) -> str:
        """Take part in what a command asks for; return why this node has no handler, or ""."""
        if wire.is_classic(arguments):
            called = wire.called_from(arguments)
            self._step_mixed(called)
            return self._unknown(called.topic)
        request = wire.request_from(arguments, now=time())
        self._put(Asked(request))
        return self._unknown(request.topic)

    def elected(self, event: Mapping[str, Any]) -> None:
        """Take in the outcome of an election on another node."""
        self._put(wire.elected_from(event))

    def candidacy(self, event: Mapping[str, Any]) -> None:
        """Take in the candidacy of a Celery worker."""
        self._step_mixed(wire.elect_from(event))

    def ack(self, event: Mapping[str, Any]) -> None:
        """Take in the ack of a Celery worker."""
        self._step_mixed(wire.ack_from(event))

    def members_changed(self, ours: Sequence[Member], others: Sequence[Member]) -> None:
        """Note how many nodes take part by the store and how many by the classic rules."""
        self._machine.nodes = len(ours)
        self._step_mixed(WorkerCounts(classic=len(others), ours=len(ours)))

    def holder_gone(self, holder: str) -> None:
        """Tell the machine that a possible holder has left or was lost."""
        self._put(HolderLost(holder))

    async def sweep(self) -> None:
        """Look for elections without a holder and claim each; the sweeper calls this every few seconds."""
        found = await self._calls.attempt(self._store.unfinished_elections(SWEPT_MAX))
        for _, record in found or ():
            self._put(Swept(record.request))

    def begin_stop(self) -> None:
        """Take part in no new election."""
        self._step_mixed(StopMixed())
        self._inbox.put_nowait(StopElections())

    @property
    def busy(self) -> bool:
        """Whether a handler runs or an event waits."""
        return bool(self._machine.acting) or not self._inbox.empty()

    async def close(self) -> None:
        """Cancel the store calls under way."""
        await self._calls.close()

    def _handler_ended(self, ended: HandlerEnded) -> None:
        about = {"election": ended.election_id, "term": ended.term}
        if ended.stopped:
            text = "election handler stopped: it could not renew its claim; another node may take over"
            log.warning(text, extra=about)
        elif not ended.ok:
            self._counters.election_handlers_failed += 1
            log.error("election handler failed", extra={**about, "why": ended.outcome})
        self._inbox.put_nowait(ended)

    # -- what goes out ---------------------------------------------------------------------------

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case CallClaim() | CallStart() | CallRenew() | CallFinish():
                assert self._group is not None
                self._counters.election_calls += 1
                self._calls.make(effect, self._group)
            case PublishElected():
                self._publish(effect)
            case RunHandler():
                self._run(effect)
            case Prolong(election_id, term, deadline_s):
                self._handlers.prolong(election_id, term, deadline_s)
            case CancelHandler(election_id, term, reason):
                text = "election lost while its handler was running; handler cancelled"
                log.warning(text, extra={"election": election_id})
                self._handlers.cancel(election_id, term, reason)
            case Resend(request):
                await self._resend(request)
            case Dropped(election_id, reason, shed):
                self._counters.elections_shed += shed
                fields = {"election": election_id[:128], "why": reason}
                log.warning("election request refused by this node", extra=fields)
            case Finished(election_id, state, outcome):
                about = {"election": election_id, "state": state, "outcome": outcome}
                log.debug("election finished on another node", extra=about)

    def _run(self, order: RunHandler) -> None:
        self._counters.elections_run += 1
        if order.attempt > 1 and order.request.policy is Policy.AT_LEAST_ONCE:
            self._counters.elections_repeated += 1
        fields = {"election": order.request.election_id, "term": order.term, "attempt": order.attempt}
        log.info("elected to run the handler", extra=fields)
        self._handlers.run(order)

    def _publish(self, outcome: PublishElected) -> None:
        if outcome.phase is not Phase.ELECTED:
            counted = {Phase.DONE: "done", Phase.FAILED: "failed", Phase.EXPIRED: "expired"}[outcome.phase]
            name = f"elections_{counted}"
            setattr(self._counters, name, getattr(self._counters, name) + 1)
            state = ElectionState(outcome.phase)
            fields = {"election": outcome.election_id, "state": state, "outcome": outcome.outcome}
            log.info("election decided", extra=fields)
        self._announce(outcome)

    async def _resend(self, request: ElectionRequest) -> None:
        try:
            await self._asker.tell("election", wire.request_arguments(request), destination=[OURS])
        except BrokerError as error:
            log.debug("cannot forward an election request to the other nodes", extra={"why": str(error)})

    def _step_mixed(self, event: MixedEvent) -> None:
        """Feed the machine for Celery's workers, and perform at once what they must receive first."""
        for effect in self._mixed.step(event, instant()):
            match effect:
                case PublishElect():
                    self._events.send(wire.ELECT, **wire.elect_fields(effect, version=wire.VERSION))
                case PublishAck():
                    self._events.send(wire.ELECT_ACK, **wire.ack_fields(effect))
                case Enter(request):
                    self._put(Asked(request))
                case Unfenced(election_id, classic, ours):
                    self._counters.elections_unfenced += 1
                    fields = {"election": election_id, "celery_workers": classic, "our_workers": ours}
                    text = "Celery workers are in this cluster: one of them may run this election too"
                    log.warning(text, extra=fields)


# ---- step ------------------------------------------------------------------------------------------

SWEEPER = "coord-sweeper"
SWEEP_EVERY_S = 5.0
SWEEPER_LEASE = LeaseSettings(ttl_s=30.0, renew_s=10.0)
COUNT_EVERY_S = 1.0
STOP_POLL_S = 0.02
OUR_SOFTWARE = "umbel"
RULES, OFF = "elections", "off"  # the field of heartbeats, and its value where no elections are held
ABSTAINING_MAX = 20_000
NO_GOSSIP = (
    "gossip is off and 'election_protocol' is v1, which needs it; start the worker without --without-gossip, "
    "or set election_protocol to v2"
)
PRESENT = (MemberState.ALIVE, MemberState.SUSPECT)
Take = Callable[[Mapping[str, Any]], None]


class ElectionsStep(Step):
    """The step that connects gossip, the control command and the sweep with one set of rules.

    The control command `election` brings requests, gossip the outcomes on other nodes. A sweep finds dropped
    elections: every five seconds the holder of the lease `coord-sweeper` searches for elections that have no
    holder.
    The setting `election_protocol` chooses the rules, the store's or the classic rules; API and handlers are
    the same. Heartbeats announce which rules a worker follows, or that it takes part in no election: a
    classic election waits for every member except those.
    """

    name = "elections"
    requires = ("control", "gossip")

    def __init__(self, context: WorkerContext, events: Events, gossip: Gossip, heart: Heart) -> None:
        super().__init__(context)
        self._events = events
        self._gossip = gossip
        self._rules: ElectionRules | None = None
        self._takes_part = False
        self._abstaining: set[str] = set()  # nodes that announce that they take part in no election
        heart.announce(RULES, lambda: OFF if self._why_off() else context.settings.election_protocol)
        self._sweeper: LeaseKeeper | None = None
        self._acquired = asyncio.Event()
        self._counted_at = -COUNT_EVERY_S

    async def start(self) -> None:
        """Begin to take part, unless transport or settings rule elections out."""
        off = self._why_off()
        if off:
            log.warning("elections disabled: %s", off)
            return
        assert self._group is not None
        classic = self._context.settings.election_protocol == "v1"
        rules = self._classic_rules() if classic else StoreElections(self._context, self._events)
        self._rules = rules
        self._listen(rules)
        self._count_members(rules)
        self._takes_part = True
        self.run_in_background(rules.run(self._group))
        if not classic:
            self._sweeper = self._gossip.campaign(SWEEPER, self._sweep_when_it_leads, settings=SWEEPER_LEASE)
            self.run_in_background(self._sweeper.run())
            self.run_in_background(self._sweep(rules, self._sweeper))

    async def stop(self) -> None:
        """Take part in nothing new and wait for running handlers, at most the grace period."""
        self._takes_part = False
        rules = self._rules
        if rules is None:
            return
        rules.begin_stop()
        for _ in range(int(self._context.settings.grace_s / STOP_POLL_S)):
            # After an error all background tasks were cancelled: there is nothing to wait for.
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
        if settings.election_protocol != "v1":
            return "" if capabilities.leases else capabilities.why_not("leases")
        if not capabilities.events:
            return capabilities.why_not("events")
        return NO_GOSSIP if settings.without_gossip else ""

    # -- what comes in ---------------------------------------------------------------------------

    def asked(self, arguments: Mapping[str, Any]) -> str:
        """Take part in an election; return why this worker cannot, or ""."""
        if self._rules is None or not self._takes_part:
            why_off = self._why_off()
            return f"{ELECTION_REFUSED}: {why_off}" if why_off else NOT_NOW
        if monotonic() - self._counted_at > COUNT_EVERY_S:
            self._count_members(self._rules)
        return self._rules.asked(arguments)

    def _classic_rules(self) -> ElectionRules:
        from umbel.worker.steps.classic_elections import ClassicElectionsShell  # few workers need it

        return ClassicElectionsShell(self._context, self._events)

    def _listen(self, rules: ElectionRules) -> None:
        listen = self._gossip.listen
        listen(wire.ELECTED, self._unless_malformed(rules.elected))
        listen(wire.ELECT, self._unless_malformed(rules.candidacy))
        listen(wire.ELECT_ACK, self._unless_malformed(rules.ack))
        self._gossip.on_change(lambda change: self._member_changed(rules, change))
        for beat in ("worker-online", "worker-heartbeat"):
            listen(beat, lambda event: self._note_rules(rules, event))

    def _note_rules(self, rules: ElectionRules, event: Mapping[str, Any]) -> None:
        node, abstains = event.get("hostname"), event.get(RULES) == OFF
        if not isinstance(node, str) or (node in self._abstaining) == abstains:
            return
        if not abstains:
            self._abstaining.discard(node)
        elif len(self._abstaining) < ABSTAINING_MAX:
            self._abstaining.add(node)
        self._count_members(rules)

    def _unless_malformed(self, take: Take) -> Take:
        def taken(event: Mapping[str, Any]) -> None:
            try:
                take(event)
            except WireError as error:
                self._context.counters.election_errors += 1
                log.warning("unreadable election event from another node ignored", extra={"why": str(error)})

        return taken

    def _member_changed(self, rules: ElectionRules, change: Change) -> None:
        if not isinstance(change, Joined):
            rules.holder_gone(change.member.holder)
        self._count_members(rules)

    def _count_members(self, rules: ElectionRules) -> None:
        """Pass the rules the nodes that take part, Umbel's and Celery's separately."""
        here = [
            member
            for member in self._gossip.members()
            if member.state in PRESENT and member.node not in self._abstaining
        ]
        # A node whose software is not known yet counts as Umbel's.
        others = [member for member in here if member.software not in (OUR_SOFTWARE, "")]
        rules.members_changed([member for member in here if member not in others], others)
        self._counted_at = monotonic()

    # -- the sweep -------------------------------------------------------------------------------

    async def _sweep(self, rules: ElectionRules, lease: LeaseKeeper) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_EVERY_S + uniform(0.0, 1.0)):
                    await self._acquired.wait()  # a new sweeper sweeps at once
            self._acquired.clear()
            if lease.still_mine():
                await rules.sweep()

    def _sweep_when_it_leads(self, change: LeaseChange) -> None:
        if isinstance(change, LeaseAcquired):
            self._acquired.set()
