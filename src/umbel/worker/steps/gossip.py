"""Gossip: listens to the other nodes and knows who is there; the shell of `protocol/membership/gossip.py`.

A message of another node moves the clock past its own and is a sign of life; one of this node only
moves the clock on (S4). What cannot be read is counted and logged.

Other steps ask `members()`, get changes by `on_change` and get the events of a type by
`listen`. What they give is called on the loop and must not block.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import time
from typing import Any

from umbel.brokers.interface import Broadcast, ClusterRecord, FanOut
from umbel.brokers.links import EVENTS, MAIN
from umbel.chance import random, uniform
from umbel.control.client import Asker
from umbel.coordination.driver import drive, fairly
from umbel.coordination.inquiries import Inquiries
from umbel.errors import AccessRefused, BrokerError, WireError
from umbel.events.stamp import EVENT_EXCHANGE, SOFTWARE
from umbel.protocol.membership.events import (
    Accuse,
    Change,
    Cleared,
    Condemn,
    Degraded,
    Effect,
    Event,
    Heard,
    Introduced,
    Joined,
    Kind,
    Left,
    Lost,
    Member,
    MemberState,
    Namesake,
    Observe,
    Probe,
    Refute,
    Restored,
    Strained,
    Suspected,
    TellView,
)
from umbel.protocol.membership.gossip import Membership
from umbel.protocol.membership.mode import ANSWERERS, GossipMode, is_among_lowest, mode_for, patterns_for
from umbel.protocol.outage import LinkChange
from umbel.protocol.retry import reconnect_wait_s
from umbel.wire.event import decode_events
from umbel.wire.gossip import (
    LOST,
    SUSPECT,
    VIEW,
    introduction,
    read_worker_event,
    subject_fields,
    view_fields,
)
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext
from umbel.worker.leases.observers import ObserverCandidate
from umbel.worker.steps.events import Events
from umbel.worker.steps.heart import Heart
from umbel.worker.user_code.hook_queue import HookQueue

log = logging.getLogger("umbel.worker.gossip")

INBOX_MAX = 10_000
HEARS_WITHIN_S = 1.0  # then a worker starts deaf, and listens as soon as it can
REVIEW_S = 5.0
# Celery's nodes do not move their clocks by these, and an election's order rests on that.
CLOCKLESS = frozenset({"worker-elect", "worker-elect-ack"})


class Gossip(Step):
    name = "gossip"
    requires = ("mingle", "heart")

    def __init__(self, context: WorkerContext, events: Events, heart: Heart, asker: Asker) -> None:
        super().__init__()
        self._context = context
        self._fan_out: FanOut = context.broker
        self._cluster: ClusterRecord = context.broker
        self._events = events
        self._heart = heart
        identity = context.identity
        run = (identity.node, identity.incarnation, identity.pid)
        self._machine = Membership(
            *run,
            uniform,
            observing=False,  # until it hears something
            interval_s=context.settings.gossip_interval_s or 0.0,
        )
        self._inbox: asyncio.Queue[Event] = asyncio.Queue(maxsize=INBOX_MAX)
        self._listeners: dict[str, list[Callable[[dict[str, Any]], None]]] = {}
        self._watchers: list[Callable[[Change], None]] = []
        self._hooks = HookQueue(context.settings.node_hooks)
        self._inquiries = Inquiries(asker, self._cluster, self._tell)
        self._ears: list[asyncio.Task[None]] = []  # the last one stays
        self._hears = asyncio.Event()
        self._candidate = ObserverCandidate(
            self._cluster.coordination, identity.node, identity.owner, lambda _: self._listen_anew()
        )
        self.undecodable = 0
        self.is_on = False  # a node that does not listen knows of itself alone
        self.mode = mode_for(context.settings.gossip_mode, GossipMode.FULL, 1)

    # -- for other steps -------------------------------------------------------------------------

    def listen(self, event_type: str, callback: Callable[[dict[str, Any]], None]) -> None:
        """Have every event of the type handed over, this node's own included."""
        self._listeners.setdefault(event_type, []).append(callback)

    def on_change(self, callback: Callable[[Change], None]) -> None:
        """Register a callback for each node that joined, left or was lost."""
        self._watchers.append(callback)

    def members(self) -> Sequence[Member]:
        """Everybody known, this node first, the gone among them for an hour."""
        return (self._myself(), *self._machine.members())

    @property
    def nodes(self) -> int:
        """How many nodes are there, this one included."""
        return self._machine.nodes

    def strained(self, reason: str) -> None:
        """This node was slow, or cut off: others may only have seemed silent."""
        log.debug("broker connection interrupted; missed heartbeats do not count now", extra={"why": reason})
        self._tell(Strained(reason))

    def introduce(self, introduced: Introduced) -> None:
        """Another node knows of this one."""
        self._tell(introduced)

    def introductions(self) -> list[list[Any]]:
        """Those that a newcomer is told of."""
        return [introduction(member) for member in self.members() if member.state is MemberState.ALIVE]

    def should_answer(self, node: str) -> bool:
        """Whether this node answers the other's hello: all do in a small cluster, else a few."""
        if self.mode is GossipMode.FULL or self._candidate.observes:
            return True
        return is_among_lowest(node, self._context.identity.node, self._names(), ANSWERERS)

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        capabilities = self._fan_out.capabilities
        if self._context.settings.without_gossip:
            log.info("gossip disabled by without_gossip")
            return
        if why := capabilities.why_no_events():
            log.warning("gossip disabled: %s", why)
            return
        self.is_on = True
        self._heart.on_lag(self.strained)
        self._context.outages.on_link(self._note_link)
        self.run_in_background(drive(self._machine, self._inbox, self._perform))
        self._listen_anew()
        self.run_in_background(self._review())
        with suppress(TimeoutError):  # who is ready takes part in elections
            await asyncio.wait_for(self._hears.wait(), HEARS_WITHIN_S)

    async def stop(self) -> None:
        await self.end_background()
        await self._candidate.leave()
        await self.end_listening()

    async def end_listening(self) -> None:
        tasks = [*self._inquiries.under_way, *self._ears]
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

    # -- what others say -------------------------------------------------------------------------

    async def _review(self) -> None:
        """Listen in the way that suits the cluster's size, and see to it that there are observers."""
        assert self._group is not None
        while True:
            setting, mode = self._context.settings.gossip_mode, self.mode
            self.mode = mode_for(setting, mode, self._machine.nodes)
            self._heart.tell_mode(self.mode)
            if self.mode is not mode:
                log.info("gossip mode changed", extra={"mode": self.mode.value, "nodes": self._machine.nodes})
                self._listen_anew()
            if self.mode is GossipMode.OBSERVED:
                await self._candidate.review(self._group, self._names())
            else:
                await self._candidate.leave()
            await asyncio.sleep(self._context.settings.gossip_interval_s or REVIEW_S)

    def _names(self) -> list[str]:
        """Our nodes that are there; Celery's observe for themselves."""
        ours = [one for one in self.members() if one.software == SOFTWARE]
        return [one.node for one in ours if one.state is MemberState.ALIVE]

    def _listen_anew(self) -> None:
        """Listen to what is to be heard now; what was heard until now goes on for a moment."""
        assert self._group is not None
        before = [ear for ear in self._ears if not ear.done()]
        patterns = patterns_for(self.mode, observer=self._candidate.observes)
        ear = self._group.create_task(
            self._listen(patterns, before, self._observing()), name="umbel-gossip-listens"
        )
        self._ears = [*before, ear]

    async def _listen(
        self, patterns: Sequence[str], before: Sequence[asyncio.Task[None]], observing: Observe
    ) -> None:
        failures = 0
        while True:
            try:
                ttl_s = self._context.settings.heartbeat_interval_s  # older news are no news (S6)
                heard = self._fan_out.subscribe(EVENT_EXCHANGE, patterns, unread_ttl_s=ttl_s)
                async with heard as subscription:
                    self._context.outages.worked(self.name)
                    for ear in before:
                        ear.cancel()
                    failures, before = 0, ()
                    self._hears.set()
                    self._tell(observing)
                    async for broadcast in fairly(subscription):
                        await self._take(broadcast)
            except BrokerError as error:
                if isinstance(error, AccessRefused) and not self._hears.is_set():
                    raise
                self._context.outages.failed(self.name, error)
                failures += 1
                await asyncio.sleep(reconnect_wait_s(failures, random()))

    def _note_link(self, change: LinkChange) -> None:
        """Who hears nobody, or is about to find that out, judges nobody."""
        is_deaf = any(map(self._context.outages.is_down, (MAIN, EVENTS)))
        self._tell(Observe(False) if is_deaf else self._observing())

    def _observing(self) -> Observe:
        hears_beats = self.mode is GossipMode.FULL or self._candidate.observes
        return Observe(hears_beats, tells=hears_beats and self.mode is GossipMode.OBSERVED)

    async def _take(self, broadcast: Broadcast) -> None:
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
            for told in read_worker_event(event):
                # Anybody can say what only this node should: its beat counts if it says when it was sent.
                if own and isinstance(told, Heard) and told.kind is Kind.BEAT and told.sent_at:
                    self._heart.echoed(told.sent_at)
                await self._inbox.put(told)

    def _is_own(self, event: dict[str, Any]) -> bool:
        identity = self._context.identity
        return event.get("hostname") == identity.node and event.get("inc") == identity.incarnation

    def _move_clock(self, event: dict[str, Any], *, own: bool) -> None:
        clock = self._events.clock
        if event["type"] in CLOCKLESS:
            return
        if own:
            clock.forward()
        elif event.get("clock") is None:
            event["clock"] = clock.forward()
        else:
            clock.adjust(event["clock"])

    # -- what the machine wants ------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        if not self._inbox.full():
            self._inbox.put_nowait(event)

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case Joined() | Left() | Lost():
                self._changed(effect)
            case Suspected(member):
                log.warning("node missed its heartbeats", extra=_fields(member))
            case Cleared(member):
                log.info("node heartbeats resumed", extra=_fields(member))
            case Accuse(member):
                self._events.tell(SUSPECT, freq=self._heart.freq_s, **subject_fields(member))
            case Condemn(member):
                about = subject_fields(member) | {"reason": member.reason}
                self._events.tell(LOST, freq=self._heart.freq_s, **about)
            case TellView():
                self._events.tell(VIEW, freq=self._heart.freq_s, **view_fields(effect))
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
                log.error(
                    "duplicate node name: another process uses it; rename one of them (-n)", extra=fields
                )

    def _changed(self, change: Change) -> None:
        member = change.member
        context = {
            "node": member.node,
            "pid": member.pid,
            "incarnation": member.inc,
            "software": member.software,
            "reason": member.reason,
        }
        match change:
            case Joined(_, returned):
                log.info("node joined", extra=_fields(member) | ({"returned": True} if returned else {}))
                self._hooks.call("on_node_join", **context)
            case Left():
                log.info("node left", extra=_fields(member))
                self._hooks.call("on_node_leave", **context)
            case Lost(_, by):
                log.warning("node lost", extra=_fields(member) | {"by": by})
                self._hooks.call("on_node_lost", **context)
        self._heart.resized(self._machine.nodes)
        for callback in self._watchers:
            callback(change)


def _fields(member: Member) -> dict[str, Any]:
    fields = {"member": member.node, "pid": member.pid, "software": member.software or "unknown"}
    return fields | ({"why": member.reason} if member.reason else {})
