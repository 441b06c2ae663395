"""StoreElections: elections by the store, the shell around `protocol/election/election.py`.

Commands and events come in on the loop and go to the machine's inbox; store calls, handlers and
broadcasts go out beside it. A command from a Celery client passes through `election_mixed.py`
first, which says what Celery's workers must hear before anything else.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from time import time
from typing import Any

from umbel.brokers.interface import ClusterRecord
from umbel.chance import uniform
from umbel.control.client import Asker
from umbel.coordination.driver import drive, instant
from umbel.errors import BrokerError
from umbel.protocol.compat.election_mixed import Enter, Membership, MixedElections, Unfenced
from umbel.protocol.compat.election_mixed import Event as MixedEvent
from umbel.protocol.compat.election_v1_events import PublishAck, PublishElect
from umbel.protocol.election.election import Elections
from umbel.protocol.election.events import (
    Asked,
    CallClaim,
    CallFinish,
    CallRenew,
    CallStart,
    CancelHandler,
    ClosedHeard,
    Dropped,
    Effect,
    ElectedHeard,
    Event,
    Finished,
    HandlerEnded,
    HolderLost,
    Phase,
    Prolong,
    Resend,
    RunHandler,
    Stop,
    Swept,
    Tell,
)
from umbel.protocol.election.table import ElectionSettings
from umbel.protocol.leadership.coordination import ElectionRequest, ElectionState, Policy
from umbel.protocol.membership.events import Member
from umbel.wire import election as wire
from umbel.worker.context import WorkerContext
from umbel.worker.elections.calls import StoreCalls
from umbel.worker.elections.handlers import HandlerThreads
from umbel.worker.steps.events import Events
from umbel.worker.user_code.guarded import Guarded

log = logging.getLogger("umbel.worker.elections")

INBOX_MAX = 10_000
SWEPT_MAX = 200
OURS = "@v2"


class StoreElections:
    def __init__(self, context: WorkerContext, events: Events) -> None:
        identity, settings = context.identity, context.settings
        self._context = context
        self._cluster: ClusterRecord = context.broker
        self._events = events
        self._counters = context.counters
        self._node = identity.node
        self._topics = frozenset(settings.election_handlers)
        machine_settings = ElectionSettings()
        self._machine = Elections(identity.node, identity.owner, self._topics, machine_settings, uniform)
        self._mixed = MixedElections(identity.node, settings.election_v1_compat)
        # What this node itself brings about is bounded by its records, and never refused.
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._handlers = HandlerThreads(settings.election_handlers, self._handler_ended)
        store = context.broker.coordination
        self._calls = StoreCalls(store, machine_settings.ttl_s, self._inbox.put_nowait)
        self._asker = Asker(context.broker)
        self._group: asyncio.TaskGroup | None = None

    # -- what comes in ---------------------------------------------------------------------------

    def asked(self, arguments: Mapping[str, Any]) -> str:
        """Take part in what a command asks for; why not, or nothing."""
        if wire.is_classic(arguments):
            called = wire.called_from(arguments)
            self._step_mixed(called)
            return self._unknown(called.topic)
        request = wire.request_from(arguments, now=time())
        self._put(Asked(request))
        return self._unknown(request.topic)

    def _unknown(self, topic: str) -> str:
        if topic in self._topics:
            return ""
        return f"no handler for topic {topic!r} on this node; it has {', '.join(sorted(self._topics))}"

    def elected(self, event: Mapping[str, Any]) -> None:
        heard: ElectedHeard | ClosedHeard = wire.elected_from(event)
        self._put(heard)

    def elect_heard(self, event: Mapping[str, Any]) -> None:
        self._step_mixed(wire.elect_from(event))

    def ack_heard(self, event: Mapping[str, Any]) -> None:
        self._step_mixed(wire.ack_from(event))

    def members_changed(self, ours: Sequence[Member], others: Sequence[Member]) -> None:
        self._machine.nodes = len(ours)
        self._step_mixed(Membership(classic=len(others), ours=len(ours)))

    def holder_gone(self, holder: str) -> None:
        self._put(HolderLost(holder))

    async def sweep(self) -> None:
        """Look for elections that nobody holds, and see to each; the sweeper does so every few seconds."""
        found = await self._calls.attempt(self._cluster.coordination.unfinished_elections(SWEPT_MAX))
        for _, record in found or ():
            self._put(Swept(record.request))

    # -- life ------------------------------------------------------------------------------------

    async def run(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        machine: Guarded[Event, Effect] = Guarded(self._machine, self._counters)
        await drive(machine, self._inbox, self._perform)

    def begin_stop(self) -> None:
        self._inbox.put_nowait(Stop())

    @property
    def busy(self) -> bool:
        return bool(self._machine.acting) or not self._inbox.empty()

    async def close(self) -> None:
        await self._calls.close()

    def _put(self, event: Event) -> None:
        if self._inbox.qsize() >= INBOX_MAX:  # the sweep and the timers bring back what matters
            self._counters.elections_shed += 1
            return
        self._inbox.put_nowait(event)

    def _handler_ended(self, ended: HandlerEnded) -> None:
        if ended.stopped:
            log.warning(
                "election handler stopped: it could not renew its claim; another node may take over",
                extra=_about(ended),
            )
        elif not ended.ok:
            self._counters.election_handlers_failed += 1
            log.error("election handler failed", extra=_about(ended) | {"why": ended.outcome})
        self._inbox.put_nowait(ended)

    # -- what goes out ---------------------------------------------------------------------------

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case CallClaim() | CallStart() | CallRenew() | CallFinish():
                assert self._group is not None
                self._counters.election_calls += 1
                self._calls.make(effect, self._group)
            case Tell():
                self._tell(effect)
            case RunHandler():
                self._run(effect)
            case Prolong(election_id, term, deadline_s):
                self._handlers.prolong(election_id, term, deadline_s)
            case CancelHandler(election_id, term, reason):
                log.warning(
                    "election lost while its handler was running; handler cancelled",
                    extra={"election": election_id},
                )
                self._handlers.cancel(election_id, term, reason)
            case Resend(request):
                await self._resend(request)
            case Dropped(election_id, reason, shed):
                self._counters.elections_shed += shed
                log.warning(
                    "election request refused by this node",
                    extra={"election": election_id[:128], "why": reason},
                )
            case Finished(election_id, state, outcome):
                fields = {"election": election_id, "state": state, "outcome": outcome}
                log.debug("election finished on another node", extra=fields)

    def _run(self, order: RunHandler) -> None:
        self._counters.elections_run += 1
        if order.attempt > 1 and order.request.policy is Policy.AT_LEAST_ONCE:
            self._counters.elections_repeated += 1
        fields = {"election": order.request.election_id, "term": order.term, "attempt": order.attempt}
        log.info("elected to run the handler", extra=fields)
        self._handlers.run(order)

    def _tell(self, tell: Tell) -> None:
        if tell.phase is not Phase.ELECTED:
            counted = {Phase.DONE: "done", Phase.FAILED: "failed", Phase.EXPIRED: "expired"}[tell.phase]
            name = f"elections_{counted}"
            setattr(self._counters, name, getattr(self._counters, name) + 1)
            fields = {"election": tell.election_id, "state": ElectionState(tell.phase)}
            log.info("election decided", extra=fields | {"outcome": tell.outcome})
        freq_s = self._context.settings.heartbeat_interval_s
        self._events.tell(wire.ELECTED, freq=freq_s, **wire.elected_fields(tell))

    async def _resend(self, request: ElectionRequest) -> None:
        try:
            await self._asker.tell("election", wire.request_arguments(request), destination=[OURS])
        except BrokerError as error:
            log.debug("cannot forward an election request to the other nodes", extra={"why": str(error)})

    def _step_mixed(self, event: MixedEvent) -> None:
        for effect in self._mixed.step(event, instant()):
            match effect:
                case PublishElect():
                    fields = wire.elect_fields(effect, version=wire.VERSION)
                    self._publish_classic(wire.ELECT, fields)
                case PublishAck():
                    self._publish_classic(wire.ELECT_ACK, wire.ack_fields(effect))
                case Enter(request):
                    self._put(Asked(request))
                case Unfenced(election_id, classic, ours):
                    self._counters.elections_unfenced += 1
                    fields = {"election": election_id, "celery_workers": classic, "our_workers": ours}
                    log.warning(
                        "Celery workers are in this cluster: one of them may run this election too",
                        extra=fields,
                    )

    def _publish_classic(self, event_type: str, fields: dict[str, Any]) -> None:
        self._events.tell(event_type, **fields)


def _about(ended: HandlerEnded) -> dict[str, Any]:
    return {"election": ended.election_id, "term": ended.term}
