"""Elections: one node's part in every election it knows of.

The store decides which node wins an election (`coordination.py`). This machine decides when to ask the store,
how to treat a late reply, and when to act. A node that receives a request waits for a short time that depends
on its name and the request. So on average one of N nodes asks first, and the others receive the report that
it won. The winner acts only after the store has confirmed `start`. It counts its time from its call, not from
the reply.

Why a late reply does no harm: a granted claim is followed by `start`, which the store checks again. A reply
to `start` counts only in its term and stage, and under AT_LEAST_ONCE only before the deadline. So a node that
was paused can act late only under AT_MOST_ONCE, where no other node ever acts.

Limit: a handler may be paused between its last check of `still_mine` and its effect. An effect that must not
happen twice uses the term as a fencing token.
"""

from collections.abc import Callable

from umbel.protocol.election import table
from umbel.protocol.election.events import (
    Asked,
    CallClaim,
    CallFinish,
    CallRenew,
    CallStart,
    CancelHandler,
    ClaimReplied,
    ClosedReceived,
    Dropped,
    Effect,
    ElectedReceived,
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
    Snapshot,
    Stage,
    StartReplied,
    StopElections,
    Swept,
    outcome_text,
)
from umbel.protocol.election.table import ElectionSettings, Record, Table
from umbel.protocol.leadership.coordination import (
    Busy,
    Closed,
    ElectionReply,
    ElectionRequest,
    ElectionState,
    Granted,
    Instant,
    Policy,
)
from umbel.protocol.machine import Tick

SAFE_SHARE = 0.9  # share of a ttl that this node relies on, in case its clock runs slower than the store's
FINISH_TTLS = 3
TOMBSTONE_TTLS = 2
EXPIRED_FOR_ALL_S = 5.0  # after its expiry; then a node without a handler may ask the store to close it
UNHEARD_MAX = 10


class Elections:
    """The machine of one node. `nodes` estimates the number of workers; a wrong estimate never affects
    safety.
    """

    def __init__(
        self,
        node: str,
        holder: str,
        topics: frozenset[str],
        settings: ElectionSettings,
        uniform: Callable[[float, float], float],
    ) -> None:
        self.nodes = 1
        self._node = node
        self._holder = holder
        self._topics = topics
        self._settings = settings
        self._uniform = uniform
        self._table = Table(settings.namespace, settings.records_max, settings.request_bytes_max)
        self._stopping = False

    @property
    def deadline(self) -> float | None:
        """Return when the machine wants a Tick, on the boot clock; None for never."""
        return self._table.next_timer()

    @property
    def acting(self) -> int:
        """Return how many handlers run, or ended without confirmation by the store."""
        return sum(record.stage is Stage.ACT for record in self._table.records.values())

    def __len__(self) -> int:
        return len(self._table.records)

    def snapshot(self) -> Snapshot:
        """Return the state of all elections."""
        return self._table.snapshot(stopping=self._stopping)

    def step(self, event: Event | Tick, now: Instant) -> list[Effect]:
        """Process one event; return the resulting calls, broadcasts and reports."""
        match event:
            case Asked(request):
                return self._asked(request, now)
            case Swept(request):
                return self._swept(request, now)
            case ElectedReceived():
                return self._elected(event, now)
            case ClosedReceived(election_id, phase):
                return self._closed_elsewhere(election_id, phase, now)
            case HolderLost(holder):
                return self._holder_lost(holder, now)
            case StopElections():
                return self._stop()
            case Tick():
                return self._fire(now)
            case ClaimReplied() | StartReplied() | RenewReplied() | FinishReplied() | HandlerEnded():
                record = self._table.records.get(event.election_id)
                return [] if record is None else self._answered(record, event, now)

    # -- events from other nodes -----------------------------------------------------------------

    def _asked(self, request: ElectionRequest, now: Instant) -> list[Effect]:
        if self._stopping or request.election_id in self._table.records:
            return []
        record = self._admit(request, now)
        if not isinstance(record, Record):
            return record
        self._arm(record, now, self._delay_s(record))
        return []

    def _swept(self, request: ElectionRequest, now: Instant) -> list[Effect]:
        if self._stopping:
            return []
        flaw = table.flaw(request)
        if flaw:
            return [Dropped(request.election_id, flaw)]
        record = self._table.records.get(request.election_id)
        if record is not None and record.stage in (Stage.CLAIM, Stage.START, Stage.ACT):
            return []
        eligible = request.topic in self._topics
        if not eligible and not self._is_over_for_all(record, request, now):
            return [Resend(request)]
        if record is None or record.stage is Stage.CLOSED:
            record = self._table.add(request, now.boot_s, eligible=eligible)
            if record is None:
                return [Dropped(request.election_id, "table full", shed=True)]
        return self._claim(record, now)

    def _is_over_for_all(self, record: Record | None, request: ElectionRequest, now: Instant) -> bool:
        """Return whether the sweep has returned it for so long that it must have expired in the store."""
        if record is None:
            record = self._table.add(request, now.boot_s, eligible=False)
            if record is None:
                return False
            self._table.bury(record)
        self._arm(record, now, TOMBSTONE_TTLS * self._settings.ttl_s)
        return now.boot_s > record.over_s + EXPIRED_FOR_ALL_S

    def _elected(self, event: ElectedReceived, now: Instant) -> list[Effect]:
        record = self._table.records.get(event.election_id)
        if record is None:
            if self._stopping or event.request is None or event.request.election_id != event.election_id:
                return []
            admitted = self._admit(event.request, now)
            if not isinstance(admitted, Record):
                return admitted
            record = admitted
        if record.stage in (Stage.WAIT, Stage.WATCH) and event.term > record.term:
            record.term, record.attempt, record.winner = event.term, event.attempt, event.winner
            self._watch(record, now, self._settings.ttl_s + self._delay_s(record))
        return []

    def _closed_elsewhere(self, election_id: str, phase: Phase, now: Instant) -> list[Effect]:
        record = self._table.records.get(election_id)
        if record is None or record.stage in (Stage.ACT, Stage.CLOSED) or phase is Phase.ELECTED:
            return []
        return self._close(record, ElectionState(phase), "", now)

    def _holder_lost(self, holder: str, now: Instant) -> list[Effect]:
        # This only asks the store earlier; the store decides whether the holder's time has expired.
        for record in self._table.records.values():
            if record.stage is Stage.WATCH and record.winner == holder:
                self._arm(record, now, self._delay_s(record))
        return []

    def _stop(self) -> list[Effect]:
        self._stopping = True
        for record in list(self._table.records.values()):
            if record.stage is not Stage.ACT:  # a grant that has not started ends with its ttl
                self._table.remove(record)
        return []

    def _admit(self, request: ElectionRequest, now: Instant) -> Record | list[Effect]:
        """Return a new record in stage WAIT, or the effects of a refusal."""
        flaw = table.flaw(request)
        if not flaw and table.is_forgotten(request, now):
            flaw = "expired"  # for a younger request, the store decides by its clock
        if flaw:
            return [Dropped(request.election_id, flaw)]
        eligible = request.topic in self._topics
        record = self._table.add(request, now.boot_s, eligible=eligible)
        if record is None:
            return [Dropped(request.election_id, "table full", shed=True)] if eligible else []
        return record if eligible else self._close(record, None, "", now)

    # -- timers ----------------------------------------------------------------------------------

    def _fire(self, now: Instant) -> list[Effect]:
        effects: list[Effect] = []
        for record in self._table.due(now.boot_s):
            effects += self._on_timer(record, now)
        return effects

    def _on_timer(self, record: Record, now: Instant) -> list[Effect]:
        match record.stage:
            case Stage.WAIT | Stage.WATCH | Stage.CLAIM:
                return self._claim(record, now)
            case Stage.START if now.boot_s < record.deadline_s:
                return [self._start(record, now)]
            case Stage.START:
                return self._watch(record, now, self._settings.ttl_s)
            case Stage.ACT if record.ended is not None:
                return self._finish(record, record.ended, now)
            case Stage.ACT:
                self._arm(record, now, self._settings.ttl_s / 3)
                return [CallRenew(record.election_id, record.key, self._holder, record.term, now.boot_s)]
            case Stage.CLOSED:
                self._table.remove(record)
                return []

    def _claim(self, record: Record, now: Instant) -> list[Effect]:
        if record.unheard >= UNHEARD_MAX and now.boot_s > record.over_s:
            # The store is unavailable and the request has expired. If it is still stored, the sweep returns
            # it.
            self._table.remove(record)
            return [Dropped(record.election_id, "store silent")]
        record.stage = Stage.CLAIM
        record.unheard += 1
        self._arm(record, now, self._settings.rpc_timeout_s + self._uniform(0.0, self._settings.spread_s))
        ttl_s = self._settings.ttl_s
        return [CallClaim(record.election_id, record.key, self._holder, record.request, ttl_s, now.boot_s)]

    def _start(self, record: Record, now: Instant) -> Effect:
        self._arm(record, now, self._settings.rpc_timeout_s)
        return CallStart(record.election_id, record.key, self._holder, record.term, now.boot_s)

    def _finish(self, record: Record, ended: HandlerEnded, now: Instant) -> list[Effect]:
        if now.boot_s >= record.deadline_s:  # the outcome is reported even if the store never receives it
            return self._tell_end(record, ended, now)
        self._arm(record, now, self._settings.rpc_timeout_s)
        outcome = outcome_text(ended.ok, ended.outcome)
        return [CallFinish(record.election_id, record.key, self._holder, record.term, outcome)]

    # -- replies ---------------------------------------------------------------------------------

    def _answered(
        self,
        record: Record,
        event: ClaimReplied | StartReplied | RenewReplied | FinishReplied | HandlerEnded,
        now: Instant,
    ) -> list[Effect]:
        match event:
            case ClaimReplied(sent_s=sent_s, reply=reply):
                return self._claimed(record, reply, sent_s, now)
            case StartReplied(term=term) if (
                record.stage is Stage.START and record.acted < term == record.term
            ):
                return self._started(record, event, now)
            case _ if record.stage is not Stage.ACT or event.term != record.term:
                return []  # stale: another term or stage
            case RenewReplied() if record.ended is None:
                return self._renewed(record, event)
            case HandlerEnded() if record.ended is None:
                return self._handler_ended(record, event, now)
            case FinishReplied() if record.ended is not None:
                return self._tell_end(record, record.ended, now)
            case _:
                return []

    def _claimed(self, record: Record, reply: ElectionReply, sent_s: float, now: Instant) -> list[Effect]:
        record.unheard = 0
        match reply:
            case Closed() if record.stage in (Stage.WAIT, Stage.CLAIM, Stage.WATCH):
                return self._closed_in_store(record, reply, now)
            case Granted(term, attempt) if record.stage is Stage.CLAIM:
                return self._granted(record, term, attempt, sent_s, now)
            case Busy(holder, term, left_s) if record.stage is Stage.CLAIM:
                record.winner, record.term = holder, max(record.term, term)
                return self._watch(record, now, left_s + self._delay_s(record))
            case _:
                return []

    def _granted(self, record: Record, term: int, attempt: int, sent_s: float, now: Instant) -> list[Effect]:
        if not record.eligible:  # the clocks of this node and the store differ; the grant ends with its ttl
            return self._close(record, None, "", now)
        news = term != record.term or record.winner != self._holder
        record.stage = Stage.START
        record.term, record.attempt, record.winner = term, attempt, self._holder
        record.deadline_s = sent_s + SAFE_SHARE * self._settings.ttl_s
        broadcasts = [self._tell(record, Phase.ELECTED, "", record.request)] if news else []
        return [*broadcasts, self._start(record, now)]

    def _closed_in_store(self, record: Record, reply: Closed, now: Instant) -> list[Effect]:
        record.winner, record.term = reply.holder, reply.term
        broadcasts = [self._tell(record, Phase(reply.state), reply.outcome)] if reply.by_me else []
        return [*broadcasts, *self._close(record, reply.state, reply.outcome, now)]

    def _started(self, record: Record, replied: StartReplied, now: Instant) -> list[Effect]:
        ttl_s = self._settings.ttl_s
        if not replied.ok:
            return self._watch(record, now, self._uniform(0.0, ttl_s))
        record.deadline_s = replied.sent_s + SAFE_SHARE * ttl_s
        alone = record.request.policy is Policy.AT_MOST_ONCE
        in_time = alone or now.boot_s < record.deadline_s
        if not in_time or now.boot_s > record.over_s:
            return self._watch(record, now, ttl_s)
        record.stage, record.lost, record.ended, record.acted = Stage.ACT, False, None, record.term
        self._arm(record, now, ttl_s / 3)
        return [RunHandler(record.request, record.key, record.term, record.attempt, record.deadline_s)]

    def _renewed(self, record: Record, replied: RenewReplied) -> list[Effect]:
        if replied.ok:
            record.deadline_s = max(record.deadline_s, replied.sent_s + SAFE_SHARE * self._settings.ttl_s)
            return [Prolong(record.election_id, record.term, record.deadline_s)]
        if record.lost:
            return []
        record.lost = True
        self._table.disarm(record)  # a lost term never comes back
        if record.request.policy is Policy.AT_MOST_ONCE:
            return []  # no other node will ever run it, so it continues
        return [CancelHandler(record.election_id, record.term, "lease lost")]

    def _handler_ended(self, record: Record, ended: HandlerEnded, now: Instant) -> list[Effect]:
        if (record.lost or ended.stopped) and record.request.policy is Policy.AT_LEAST_ONCE:
            # The handler was stopped, so its return value is no outcome, and its term is no longer used. The
            # store may not know yet that the lease has expired: the next node that claims the election runs
            # it again.
            return self._watch(record, now, self._uniform(0.0, self._settings.ttl_s))
        record.ended = ended
        record.deadline_s = now.boot_s + FINISH_TTLS * self._settings.ttl_s
        return self._finish(record, ended, now)

    def _tell_end(self, record: Record, ended: HandlerEnded, now: Instant) -> list[Effect]:
        phase = Phase.DONE if ended.ok else Phase.FAILED
        outcome = outcome_text(ended.ok, ended.outcome)
        broadcast = self._tell(record, phase, outcome)
        return [broadcast, *self._close(record, ElectionState(phase), outcome, now)]

    # -- transitions -----------------------------------------------------------------------------

    def _watch(self, record: Record, now: Instant, wait_s: float) -> list[Effect]:
        if self._stopping:
            self._table.remove(record)
            return []
        record.stage, record.ended = Stage.WATCH, None
        self._arm(record, now, wait_s)
        return []

    def _close(self, record: Record, state: ElectionState | None, outcome: str, now: Instant) -> list[Effect]:
        self._table.bury(record)
        if self._stopping:
            self._table.remove(record)
        else:
            self._arm(record, now, TOMBSTONE_TTLS * self._settings.ttl_s)
        return [Finished(record.election_id, state, outcome)]

    def _tell(
        self, record: Record, phase: Phase, outcome: str, request: ElectionRequest | None = None
    ) -> Effect:
        return PublishElected(
            phase=phase,
            election_id=record.election_id,
            topic=record.request.topic,
            policy=record.request.policy,
            winner=record.winner,
            term=record.term,
            attempt=record.attempt,
            outcome=outcome,
            request=request,
        )

    def _arm(self, record: Record, now: Instant, wait_s: float) -> None:
        self._table.arm(record, now.boot_s + wait_s)

    def _delay_s(self, record: Record) -> float:
        cohort = table.cohort(record.election_id, self._node, self.nodes)
        return cohort * self._settings.spread_s + self._uniform(0.0, self._settings.spread_s / 2)
