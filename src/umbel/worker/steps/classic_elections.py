"""ClassicElections: `election_protocol = v1`, elections by events alone, without a store."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from umbel.control.panel import NO_HANDLER
from umbel.coordination.driver import drive
from umbel.protocol.election.classic import (
    CLASSIC_VERSION,
    ClassicElections,
    Decided,
    Effect,
    Event,
    Failed,
    LiveNodes,
    PublishAck,
    PublishElect,
    Shed,
    StopClassic,
)
from umbel.protocol.election.events import HandlerEnded, Phase, PublishElected, RunHandler, outcome_text
from umbel.protocol.leadership.coordination import NAMESPACE, ElectionRequest, Policy, election_key
from umbel.protocol.membership.members import Member
from umbel.wire import coordination as wire
from umbel.worker.context import WorkerContext
from umbel.worker.events import Events
from umbel.worker.user_code import HandlerThreads

log = logging.getLogger("umbel.worker.elections")

INBOX_MAX = 10_000
BY_THE_STORE = (
    "'election_protocol' of this worker is v1, and the election was started under v2; "
    "set the same for the workers and for the clients that start elections"
)


class ClassicElectionsShell:
    """The shell of `protocol/election/classic.py`."""

    def __init__(self, context: WorkerContext, events: Events) -> None:
        self._context = context
        self._events = events
        self._counters = context.counters
        self._topics = frozenset(context.settings.election_handlers)
        self._machine = ClassicElections(context.identity.node, context.identity.pid)
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._handlers = HandlerThreads(context.settings.election_handlers, self._handler_ended)
        self._leading: dict[tuple[str, int], RunHandler] = {}

    # -- what comes in ---------------------------------------------------------------------------

    def asked(self, arguments: Mapping[str, Any]) -> str:
        """Enter an election that a Celery client started; return why this node cannot, or ""."""
        if not wire.is_classic(arguments):
            return BY_THE_STORE
        called = wire.called_from(arguments)
        if called.topic not in self._topics:
            return f"{NO_HANDLER} {called.topic!r} on this node; it has {', '.join(sorted(self._topics))}"
        self._put(called)
        return ""

    def elected(self, event: Mapping[str, Any]) -> None:
        """Ignored: outcomes on other nodes matter to monitors only."""

    def elect_heard(self, event: Mapping[str, Any]) -> None:
        """Move the clock past the candidate's and take in its candidacy."""
        candidacy = wire.elect_from(event)
        # A node that acks a candidate claims with a higher clock from then on, so deciders agree.
        # The clock of a candidate under the store's rules means nothing here.
        if candidacy.node != self._context.identity.node and candidacy.version == CLASSIC_VERSION:
            self._events.clock.adjust(candidacy.clock)
        self._put(candidacy)

    def ack_heard(self, event: Mapping[str, Any]) -> None:
        """Take in the ack of another member."""
        self._put(wire.ack_from(event))

    def members_changed(self, ours: Sequence[Member], others: Sequence[Member]) -> None:
        """Wait for the acks of these members in new elections."""
        self._inbox.put_nowait(LiveNodes(frozenset(member.node for member in (*ours, *others))))

    def holder_gone(self, holder: str) -> None:
        """Ignored: the change of the membership says the same."""

    async def sweep(self) -> None:
        """Ignored: nothing is stored."""

    # -- life ------------------------------------------------------------------------------------

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Drive the machine until cancelled."""
        await drive(self._machine, self._inbox, self._perform, on_fault=self._context.note_election_fault)

    def begin_stop(self) -> None:
        """Enter no new election."""
        self._inbox.put_nowait(StopClassic())

    @property
    def busy(self) -> bool:
        """Whether a handler runs or an event waits."""
        return bool(self._leading) or not self._inbox.empty()

    async def close(self) -> None:
        """Does nothing: no call is ever under way."""

    def _put(self, event: Event) -> None:
        if self._inbox.qsize() >= INBOX_MAX:
            self._counters.elections_shed += 1
            return
        self._inbox.put_nowait(event)

    # -- what goes out ---------------------------------------------------------------------------

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case PublishElect():
                fields = wire.elect_fields(effect, version=CLASSIC_VERSION)
                self._events.tell(wire.ELECT, **fields)
            case PublishAck():
                self._events.tell(wire.ELECT_ACK, **wire.ack_fields(effect))
            case Decided():
                self._decided(effect)
            case Failed(election_id, topic, reason):
                self._counters.elections_failed += 1
                log.warning(
                    "election failed and is not repeated; check the nodes that were silent, start it again",
                    extra={"election": election_id, "why": reason},
                )
                self._tell(Phase.FAILED, election_id, topic, "", 0, reason)
            case Shed(election_id):
                self._counters.elections_shed += 1
                log.warning(
                    "election request refused by this node",
                    extra={"election": election_id, "why": "table full"},
                )

    def _decided(self, decided: Decided) -> None:
        log.info("election decided", extra={"election": decided.election_id, "leader": decided.leader.name})
        if not decided.mine:
            return
        self._counters.elections_run += 1
        election_id, clock = decided.election_id, decided.leader.clock
        request = ElectionRequest(election_id, decided.topic, decided.action, Policy.AT_MOST_ONCE, 0.0)
        key = election_key(NAMESPACE, election_id)
        order = RunHandler(request, key, clock, attempt=1, deadline_s=inf)
        self._leading[election_id, clock] = order
        self._handlers.run(order)

    def _handler_ended(self, ended: HandlerEnded) -> None:
        order = self._leading.pop((ended.election_id, ended.term))
        if ended.ok:
            self._counters.elections_done += 1
        else:
            self._counters.elections_failed += 1
            self._counters.election_handlers_failed += 1
            fields = {"election": ended.election_id, "why": ended.outcome}
            log.error("election handler failed", extra=fields)
        phase = Phase.DONE if ended.ok else Phase.FAILED
        outcome = outcome_text(ended.ok, ended.outcome)
        winner = self._context.identity.owner
        self._tell(phase, ended.election_id, order.request.topic, winner, ended.term, outcome)

    def _tell(self, phase: Phase, election_id: str, topic: str, winner: str, term: int, outcome: str) -> None:
        tell = PublishElected(phase, election_id, topic, Policy.AT_MOST_ONCE, winner, term, 1, outcome)
        freq_s = self._context.settings.heartbeat_interval_s
        self._events.tell(wire.ELECTED, freq=freq_s, **wire.elected_fields(tell))
