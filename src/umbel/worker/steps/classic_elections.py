"""ClassicElections: `election_protocol = v1`, elections by events alone, without a store."""

import logging
from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from umbel.protocol.election.classic import (
    CLASSIC_VERSION,
    ClassicElections,
    Decided,
    Effect,
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
from umbel.worker.steps.election_rules import ElectionRules

log = logging.getLogger("umbel.worker.elections")

BY_THE_STORE = (
    "'election_protocol' of this worker is v1, and the election was started under v2; "
    "set the same for the workers and for the clients that start elections"
)


class ClassicElectionsShell(ElectionRules):
    """The rules of `election_protocol = v1`: the shell of `protocol/election/classic.py`.

    Outcomes on other nodes matter to monitors only, and a holder that is gone is no longer a member, so both
    are ignored.
    """

    def __init__(self, context: WorkerContext, events: Events) -> None:
        super().__init__(context, events, ClassicElections(context.identity.node, context.identity.pid))
        self._leading: dict[tuple[str, int], RunHandler] = {}

    # -- what comes in ---------------------------------------------------------------------------

    def asked(self, arguments: Mapping[str, Any]) -> str:
        """Enter an election that a Celery client started; return why this node cannot, or ""."""
        if not wire.is_classic(arguments):
            return BY_THE_STORE
        called = wire.called_from(arguments)
        problem = self._unknown(called.topic)
        if not problem:
            self._put(called)
        return problem

    def candidacy(self, event: Mapping[str, Any]) -> None:
        """Move the clock past the candidate's and take in its candidacy."""
        candidacy = wire.elect_from(event)
        # A node that acks a candidate claims with a higher clock from then on, so deciders agree.
        # The clock of a candidate under the store's rules means nothing here.
        if candidacy.node != self._node and candidacy.version == CLASSIC_VERSION:
            self._events.clock.adjust(candidacy.clock)
        self._put(candidacy)

    def ack(self, event: Mapping[str, Any]) -> None:
        """Take in the ack of another member."""
        self._put(wire.ack_from(event))

    def members_changed(self, ours: Sequence[Member], others: Sequence[Member]) -> None:
        """Wait for the acks of these members in new elections."""
        self._inbox.put_nowait(LiveNodes(frozenset(member.node for member in (*ours, *others))))

    def begin_stop(self) -> None:
        """Enter no new election."""
        self._inbox.put_nowait(StopClassic())

    @property
    def busy(self) -> bool:
        """Whether a handler runs or an event waits."""
        return bool(self._leading) or not self._inbox.empty()

    # -- what goes out ---------------------------------------------------------------------------

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case PublishElect():
                self._events.send(wire.ELECT, **wire.elect_fields(effect, version=CLASSIC_VERSION))
            case PublishAck():
                self._events.send(wire.ELECT_ACK, **wire.ack_fields(effect))
            case Decided():
                self._decided(effect)
            case Failed(election_id, topic, reason):
                self._counters.elections_failed += 1
                log.warning(
                    "election failed and is not repeated; check the nodes that were silent, start it again",
                    extra={"election": election_id, "why": reason},
                )
                self._announce_end(Phase.FAILED, election_id, topic, "", 0, reason)
            case Shed(election_id):
                self._counters.elections_shed += 1
                fields = {"election": election_id, "why": "table full"}
                log.warning("election request refused by this node", extra=fields)

    def _decided(self, decided: Decided) -> None:
        """Log the leader, and run the handler if that is this node. Without a store it runs at most once."""
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
        """Count the end of a handler and publish its outcome for monitors."""
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
        winner, topic = self._context.identity.owner, order.request.topic
        self._announce_end(phase, ended.election_id, topic, winner, ended.term, outcome)

    def _announce_end(
        self, phase: Phase, election_id: str, topic: str, winner: str, term: int, outcome: str
    ) -> None:
        self._announce(
            PublishElected(phase, election_id, topic, Policy.AT_MOST_ONCE, winner, term, 1, outcome)
        )
