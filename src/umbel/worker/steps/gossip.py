"""Gossip: listens to the other nodes and knows which are there.

The shell of `protocol/membership/gossip.py`. In a large cluster only observers subscribe to all heartbeats.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from time import time
from typing import Any

from umbel.brokers.interface import Broadcast
from umbel.brokers.links import EVENTS, MAIN
from umbel.chance import choice, uniform
from umbel.control.client import ControlClient
from umbel.coordination.driver import Change as LeaseChange
from umbel.coordination.driver import Inquiries, LeaseKeeper, drive, listen
from umbel.errors import BrokerError, WireError
from umbel.events.stamp import EVENT_EXCHANGE, SOFTWARE
from umbel.protocol.leadership.lease import LeadershipLost, LeaseAcquired, LeaseReleased, LeaseSettings
from umbel.protocol.membership.gossip import Membership
from umbel.protocol.membership.members import (
    Accuse,
    BroadcastView,
    Change,
    Cleared,
    Condemn,
    Degraded,
    Effect,
    Event,
    Introduced,
    Joined,
    Kind,
    Left,
    Lost,
    Member,
    MemberState,
    Namesake,
    NodeEvent,
    Observe,
    Probe,
    Refute,
    Restored,
    Strained,
    Suspected,
)
from umbel.protocol.membership.observers import (
    ANSWERERS,
    CANDIDATES,
    OBSERVER_LEASES,
    GossipMode,
    is_among_lowest,
    mode_for,
    patterns_for,
)
from umbel.protocol.shutdown import LinkChange
from umbel.wire.coordination import (
    LOST,
    SUSPECT,
    VIEW,
    introduction,
    read_worker_event,
    subject_fields,
    view_fields,
)
from umbel.wire.event import decode_events
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext
from umbel.worker.events import Events
from umbel.worker.steps.heart import Heart
from umbel.worker.user_code import HookQueue

log = logging.getLogger("umbel.worker.gossip")

# ---- observer candidate ----------------------------------------------------------------------------

CHECK_S = (60.0, 120.0)
ASK_S = 2.0


class ObserverCandidate:
    """This node's campaign for one of the three leases whose holders observe all heartbeats.

    Eight nodes are candidates for each lease, chosen by their names, so that a large cluster does not load
    the store. The other nodes read one of the leases every minute or two and become candidates when it is
    free, in case all eight are gone. `changed` is called on the loop at a gain or loss.
    """

    def __init__(self, context: WorkerContext, changed: Callable[[], None]) -> None:
        self.observes = False
        self._store = context.broker.coordination
        self._identity = context.identity
        self._changed = changed
        self._keeper: LeaseKeeper | None = None
        self._campaign: asyncio.Task[None] | None = None
        self._numbers = count(1)
        self._check_at = 0.0

    async def review(self, group: asyncio.TaskGroup, nodes: Sequence[str]) -> None:
        """Campaign for a lease or withdraw, as the online nodes require."""
        if self.observes:
            return
        lease = await self._wanted(nodes)
        if self._keeper is not None and self._keeper.name != lease:
            await self.leave()
        if lease and self._keeper is None:
            holder = f"{self._identity.owner}.{next(self._numbers)}"  # each campaign has a new holder name
            self._keeper = LeaseKeeper(self._store, lease, holder, changed=self._lease_changed)
            self._campaign = group.create_task(self._keeper.run(), name=f"umbel-{lease}")

    async def leave(self) -> None:
        """Withdraw, and release the lease if this node has it."""
        keeper, campaign = self._keeper, self._campaign
        self._keeper = self._campaign = None
        if keeper is None or campaign is None:
            return
        campaign.cancel()
        await asyncio.wait([campaign])
        await keeper.stop()

    async def _wanted(self, nodes: Sequence[str]) -> str:
        """Return the lease to campaign for, a free one if possible; "" for none."""
        present = self._keeper.name if self._keeper else ""
        now = asyncio.get_running_loop().time()
        mine = [
            lease
            for lease in OBSERVER_LEASES
            if is_among_lowest(lease, self._identity.node, nodes, CANDIDATES)
        ]
        if not mine and now >= self._check_at:
            self._check_at = now + uniform(*CHECK_S)
            lease = choice(OBSERVER_LEASES)
            return lease if await self._is_free(lease) else ""
        if self._keeper is not None and (not mine or not self._keeper.leader):
            return present
        for lease in mine:
            if lease != present and await self._is_free(lease):
                return lease
        return present if present in mine else next(iter(mine), "")

    async def _is_free(self, lease: str) -> bool:
        try:
            async with asyncio.timeout(ASK_S):
                return not (await self._store.read_lease(lease)).holder
        except (BrokerError, TimeoutError) as error:
            text = "cannot read which nodes watch the others (gossip observers); retrying"
            log.debug(text, extra={"why": str(error)})
            return False

    def _lease_changed(self, change: LeaseChange) -> None:
        observes = isinstance(change, LeaseAcquired)
        if observes != self.observes:
            self.observes = observes
            self._changed()


# ---- gossip ----------------------------------------------------------------------------------------

INBOX_MAX = 10_000
SUBSCRIBED_WITHIN_S = 1.0  # then a worker starts without gossip, and subscribes as soon as it can
REVIEW_S = 5.0
# Celery's nodes do not move their clocks by these events, and an election's order rests on that.
CLOCKLESS = frozenset({"worker-elect", "worker-elect-ack"})
LEADER = "worker-leader"
_HOOKS = {Joined: "on_node_join", Left: "on_node_leave", Lost: "on_node_lost"}
PHASES = {LeaseAcquired: "acquired", LeadershipLost: "lost", LeaseReleased: "released"}


class Gossip(Step):
    """The step that subscribes to events and feeds the membership machine with them.

    An event of another node moves the clock past its own and is a sign of life. An event of this node only
    advances the clock (S4). Events that cannot be read are counted and logged.

    Other steps read `members()`, register for changes with `on_change` and for events of a type with
    `listen`. Their callbacks run on the loop and must not block.
    """

    name = "gossip"
    requires = ("mingle", "heart")

    def __init__(self, context: WorkerContext, events: Events, heart: Heart, asker: ControlClient) -> None:
        super().__init__(context)
        self._events = events
        self._heart = heart
        identity, settings = context.identity, context.settings
        self._machine = Membership(
            identity.node,
            identity.incarnation,
            identity.pid,
            uniform,
            observing=False,  # until it receives events
            interval_s=settings.gossip_interval_s or 0.0,
        )
        self._inbox: asyncio.Queue[Event] = asyncio.Queue(maxsize=INBOX_MAX)
        self._listeners: dict[str, list[Callable[[dict[str, Any]], None]]] = {}
        self._on_change: list[Callable[[Change], None]] = []
        self._hooks = HookQueue(settings.node_hooks)
        self._inquiries = Inquiries(asker, context.broker, self._put)
        self._subscriptions: list[asyncio.Task[None]] = []  # the last one stays
        self._subscribed = asyncio.Event()
        self._candidate = ObserverCandidate(context, self._subscribe)
        self.undecodable = 0
        self.is_on = False  # without gossip a node knows only itself
        self.mode = mode_for(settings.gossip_mode, GossipMode.FULL, 1)
        self._announced = GossipMode.FULL  # until the first review
        heart.announce("gossip", lambda: self._announced.value)

    # -- for other steps -------------------------------------------------------------------------

    def listen(self, event_type: str, callback: Callable[[dict[str, Any]], None]) -> None:
        """Register a callback for every event of the type, this node's own included."""
        self._listeners.setdefault(event_type, []).append(callback)

    def on_change(self, callback: Callable[[Change], None]) -> None:
        """Register a callback for each node that joined, left or was lost."""
        self._on_change.append(callback)

    def members(self) -> Sequence[Member]:
        """Return all known nodes, this one first; nodes that left or were lost stay listed for an hour."""
        return (self._myself(), *self._machine.members())

    @property
    def nodes(self) -> int:
        """How many nodes are in the cluster, this one included."""
        return self._machine.nodes

    def strained(self, reason: str) -> None:
        """Note that this node was slow or cut off, so that others may only have seemed silent."""
        log.debug("broker connection interrupted; missed heartbeats do not count now", extra={"why": reason})
        self._put(Strained(reason))

    def introduce(self, introduced: Introduced) -> None:
        """Take in what another node knows about a third node."""
        self._put(introduced)

    def introductions(self) -> list[list[Any]]:
        """Return the live members in the form in which a newcomer gets them."""
        return [introduction(member) for member in self.members() if member.state is MemberState.ALIVE]

    def should_answer(self, node: str) -> bool:
        """Return whether this node answers the other's hello: all do in a small cluster, else a few."""
        if self.mode is GossipMode.FULL or self._candidate.observes:
            return True
        return is_among_lowest(node, self._context.identity.node, self._names(), ANSWERERS)

    def campaign(
        self, lease: str, changed: Callable[[LeaseChange], None], *, settings: LeaseSettings | None = None
    ) -> LeaseKeeper:
        """Return this node's campaign for a lease, whose changes it announces; the caller runs it.

        A release by another node is noticed at once: followers need not wait until it would have expired.
        """
        owner, freq_s = self._context.identity.owner, self._context.settings.heartbeat_interval_s

        def announce(change: LeaseChange) -> None:
            changed(change)
            phase = PHASES[type(change)]
            self._events.send(LEADER, lease=lease, leader=owner, term=change.term, phase=phase, freq=freq_s)

        store = self._context.broker.coordination
        keeper = LeaseKeeper(store, lease, owner, settings=settings, changed=announce)

        def note_release(event: Mapping[str, Any]) -> None:
            if event.get("lease") == lease and event.get("phase") == PHASES[LeaseReleased]:
                keeper.note_release()

        self.listen(LEADER, note_release)
        return keeper

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Subscribe to events and wait briefly for that; off where events cannot be received."""
        if self._context.settings.without_gossip:
            log.info("gossip disabled by without_gossip")
            return
        if why := self._context.broker.capabilities.why_no_events():
            log.warning("gossip disabled: %s", why)
            return
        self.is_on = True
        self._heart.on_lag(self.strained)
        self._context.outages.on_link(self._note_link)
        self.run_in_background(drive(self._machine, self._inbox, self._perform))
        self._subscribe()
        self.run_in_background(self._review())
        with suppress(TimeoutError):  # a subscribed node takes part in elections
            await asyncio.wait_for(self._subscribed.wait(), SUBSCRIBED_WITHIN_S)

    async def stop(self) -> None:
        """Leave the campaign for observer leases and end the subscriptions."""
        await self.end_background()
        await self._candidate.leave()
        await self.end_listening()

    async def end_listening(self) -> None:
        """Cancel subscriptions and inquiries, also when the start failed."""
        tasks = [*self._inquiries.under_way, *self._subscriptions]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _myself(self) -> Member:
        identity, now = self._context.identity, time()
        return Member(
            identity.node,
            identity.incarnation,
            identity.pid,
            MemberState.ALIVE,
            SOFTWARE,
            self._events.clock.value,
            self._heart.freq_s,
            now,
            identity.incarnation / 1e6,
        )

    # -- events of other nodes -------------------------------------------------------------------

    async def _review(self) -> None:
        """Choose the gossip mode by the cluster's size, and campaign for observer leases if needed."""
        assert self._group is not None
        settings = self._context.settings
        while True:
            mode = self.mode
            self.mode = mode_for(settings.gossip_mode, mode, self._machine.nodes)
            self._announced = self.mode
            if self.mode is not mode:
                log.info("gossip mode changed", extra={"mode": self.mode.value, "nodes": self._machine.nodes})
                self._subscribe()
            if self.mode is GossipMode.OBSERVED:
                await self._candidate.review(self._group, self._names())
            else:
                await self._candidate.leave()
            await asyncio.sleep(settings.gossip_interval_s or REVIEW_S)

    def _names(self) -> list[str]:
        """Return Umbel's live nodes; Celery's workers all observe by themselves."""
        ours = [member for member in self.members() if member.software == SOFTWARE]
        return [member.node for member in ours if member.state is MemberState.ALIVE]

    def _subscribe(self) -> None:
        """Start a subscription for the present mode; the earlier ones end when it is open."""
        assert self._group is not None
        before = [task for task in self._subscriptions if not task.done()]
        patterns = patterns_for(self.mode, observer=self._candidate.observes)
        listening = self._listen(patterns, before, self._observing())
        task = self._group.create_task(listening, name="umbel-gossip-listens")
        self._subscriptions = [*before, task]

    async def _listen(
        self, patterns: Sequence[str], before: Sequence[asyncio.Task[None]], observing: Observe
    ) -> None:
        """Run a subscription. The earlier ones end when it is open, so that no event between them is lost."""

        def report(error: BrokerError | None) -> None:
            self._context.outages.report(self.name, error)
            if error is None:
                for task in before:
                    task.cancel()
                self._put(observing)

        ttl_s = self._context.settings.heartbeat_interval_s  # older events are worthless (S6)
        await listen(
            lambda: self._context.broker.subscribe(EVENT_EXCHANGE, patterns, unread_ttl_s=ttl_s),
            self._take,
            is_open=self._subscribed,
            report=report,
        )

    def _note_link(self, change: LinkChange) -> None:
        """Suspend failure detection while this node receives no events, or may be about to notice that."""
        is_cut_off = any(map(self._context.outages.is_down, (MAIN, EVENTS)))
        self._put(Observe(False) if is_cut_off else self._observing())

    def _observing(self) -> Observe:
        gets_beats = self.mode is GossipMode.FULL or self._candidate.observes
        return Observe(gets_beats, tells=gets_beats and self.mode is GossipMode.OBSERVED)

    async def _take(self, broadcast: Broadcast) -> None:
        """Move the clock past each event, call the listeners of its type, and feed the membership machine."""
        try:
            events = decode_events(broadcast.body)
        except WireError as error:
            self.undecodable += 1
            fields = {"routing_key": broadcast.routing_key[:100], "why": str(error)}
            log.warning("unreadable event from another node ignored", extra=fields)
            return
        for event in events:
            own = self._is_own(event)
            self._move_clock(event, own=own)
            for callback in self._listeners.get(event["type"], ()):
                callback(event)
            for news in read_worker_event(event):
                # Any process can publish under this node's name: only a beat with its send time counts.
                if own and isinstance(news, NodeEvent) and news.kind is Kind.BEAT and news.sent_at:
                    self._heart.echoed(news.sent_at)
                await self._inbox.put(news)

    def _is_own(self, event: dict[str, Any]) -> bool:
        identity = self._context.identity
        return event.get("hostname") == identity.node and event.get("inc") == identity.incarnation

    def _move_clock(self, event: dict[str, Any], *, own: bool) -> None:
        """Move this node's clock past an event; an event without a clock value gets one from here."""
        clock = self._events.clock
        if event["type"] in CLOCKLESS:
            return
        if own:
            clock.forward()
        elif event.get("clock") is None:
            event["clock"] = clock.forward()
        else:
            clock.adjust(event["clock"])

    # -- effects of the machine ------------------------------------------------------------------

    def _put(self, event: Event) -> None:
        if not self._inbox.full():
            self._inbox.put_nowait(event)

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case Joined() | Left() | Lost():
                self._report_change(effect)
            case Suspected(member):
                log.warning("node missed its heartbeats", extra=_fields(member))
            case Cleared(member):
                log.info("node heartbeats resumed", extra=_fields(member))
            case Accuse(member):
                self._events.send(SUSPECT, freq=self._heart.freq_s, **subject_fields(member))
            case Condemn(member):
                about = subject_fields(member) | {"reason": member.reason}
                self._events.send(LOST, freq=self._heart.freq_s, **about)
            case BroadcastView():
                self._events.send(VIEW, freq=self._heart.freq_s, **view_fields(effect))
            case Probe(member, ping):
                assert self._group is not None
                self._inquiries.probe(member, self._group)
                if ping:
                    self._inquiries.ping(member, self._group)
            case Refute(lost):
                self._heart.come_online() if lost else self._heart.beat()
            case Degraded(suspects, nodes):
                fields = {"silent": suspects, "nodes": nodes}
                log.warning("most nodes went silent; failure detection suspended", extra=fields)
            case Restored():
                log.info("failure detection resumed")
            case Namesake(pid, inc):
                fields = self._context.log_fields(pid=pid, incarnation=inc)
                text = "duplicate node name: another process uses it; rename one of them (-n)"
                log.error(text, extra=fields)

    def _report_change(self, change: Change) -> None:
        """Log a change of the membership, call users' hooks, and pass it to the other steps."""
        member, fields = change.member, _fields(change.member)
        match change:
            case Joined(_, returned):
                log.info("node joined", extra=fields | ({"returned": True} if returned else {}))
            case Left():
                log.info("node left", extra=fields)
            case Lost(_, by):
                log.warning("node lost", extra=fields | {"by": by})
        self._hooks.call(
            _HOOKS[type(change)],
            node=member.node,
            pid=member.pid,
            incarnation=member.inc,
            software=member.software,
            reason=member.reason,
        )
        self._heart.resized(self._machine.nodes)
        for callback in self._on_change:
            callback(change)


def _fields(member: Member) -> dict[str, Any]:
    fields = {"member": member.node, "pid": member.pid, "software": member.software or "unknown"}
    return fields | ({"why": member.reason} if member.reason else {})
