"""Mutants: the same machines and store, each with one rule broken.

A checker is worth what it catches. Each mutant says under which faults it is hunted and which
promises it may break; the hunt must find it, and the real machines must pass the same hunt.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from umbel.protocol.election.election import Elections
from umbel.protocol.election.events import (
    Dropped,
    Effect,
    ElectedReceived,
    Event,
    HandlerEnded,
    Phase,
    RenewReplied,
    RunHandler,
    Stage,
    StartReplied,
)
from umbel.protocol.election.table import RECORDS_MAX, REQUEST_BYTES_MAX, Record, Table
from umbel.protocol.leadership import coordination
from umbel.protocol.leadership.coordination import (
    CLOSED_STATES,
    ElectionRecord,
    ElectionReply,
    ElectionRequest,
    ElectionState,
    Granted,
    Instant,
    LeaseRecord,
    LeaseReply,
    Policy,
    StoreFacts,
)
from umbel.protocol.leadership.lease import AcquireReplied, Lease, LeaseRenewReplied, Role
from umbel.protocol.leadership.lease import Effect as LeaseEffect
from umbel.protocol.leadership.lease import Event as LeaseEvent
from umbel.protocol.machine import Tick
from umbel.sim.plan import Plan, make_plan, parse_faults
from umbel.sim.rounds import REAL, Outcome, Variant, run_plan
from umbel.sim.store import Store

HUNT_ROUNDS = 60


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    variant: Variant
    breaks: frozenset[str]  # the promises that may be the first to break
    faults: str
    nodes: int = 4
    elections: int = 40

    def plans(self) -> Iterator[Plan]:
        for number in range(HUNT_ROUNDS):
            seed = f"hunt {self.name} {number}"
            yield make_plan(seed, self.nodes, self.elections, parse_faults(self.faults))

    def hunt(self) -> Outcome | None:
        """The first round in which it breaks a promise."""
        for plan in self.plans():
            outcome = run_plan(plan, self.variant)
            if outcome.violation is not None:
                return outcome
        return None

    def hunt_real(self, rounds: int) -> Outcome | None:
        """The same rounds with the real machines: None when they keep every promise."""
        for _, plan in zip(range(rounds), self.plans(), strict=False):
            outcome = run_plan(plan, REAL)
            if outcome.violation is not None:
                return outcome
        return None


# ---- machines --------------------------------------------------------------------------------------


class ActsBeforeStart(Elections):
    def _granted(self, record: Record, term: int, attempt: int, sent_s: float, now: Instant) -> list[Effect]:
        effects = super()._granted(record, term, attempt, sent_s, now)
        record.stage, record.ended = Stage.ACT, None
        return [*effects, RunHandler(record.request, record.key, term, attempt, record.deadline_s)]


class CountsFromTheAnswer(Elections):
    """Its time begins when the yes arrives: later than the store's, and never too late."""

    def _started(self, record: Record, replied: StartReplied, now: Instant) -> list[Effect]:
        return super()._started(record, replied.replaced(sent_s=now.boot_s), now)


class ProlongsFromTheAnswer(Elections):
    def step(self, event: Event | Tick, now: Instant) -> list[Effect]:
        if isinstance(event, RenewReplied):
            event = event.replaced(sent_s=now.boot_s)
        return super().step(event, now)


class RunsAtEveryYes(Elections):
    """Forgets that a yes counts once: a second one of the same term runs the handler again."""

    def step(self, event: Event | Tick, now: Instant) -> list[Effect]:
        if isinstance(event, StartReplied) and event.ok:
            record = self._table.records.get(event.election_id)
            if record is not None and record.stage is Stage.ACT and record.term == event.term:
                return self._started(record, event, now)
        return super().step(event, now)


class NeverRenews(Elections):
    def _on_timer(self, record: Record, now: Instant) -> list[Effect]:
        effects = super()._on_timer(record, now)
        return [] if record.stage is Stage.ACT and record.ended is None else effects


class DeafToEndings(Elections):
    """It keeps waiting for elections that others have closed."""

    def _closed_elsewhere(self, election_id: str, phase: Phase, now: Instant) -> list[Effect]:
        return []


class DeafToWinners(Elections):
    def _elected(self, heard: ElectedReceived, now: Instant) -> list[Effect]:
        return []


class ObeysOldTimers(Elections):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._table = TableOfOldTimers("celery", RECORDS_MAX, REQUEST_BYTES_MAX)


class TableOfOldTimers(Table):
    def _is_newest(self, timer: tuple[float, int, str]) -> bool:
        return timer[2] in self.records


class ForgetsTheDead(Elections):
    """No tombstones: what is asked for again is begun again."""

    def _close(self, record: Record, state: ElectionState | None, outcome: str, now: Instant) -> list[Effect]:
        effects = super()._close(record, state, outcome, now)
        if record.election_id in self._table.records:
            self._table.remove(record)
        return effects


class WatchesForEver(Elections):
    def _watch(self, record: Record, now: Instant, wait_s: float) -> list[Effect]:
        effects = super()._watch(record, now, wait_s)
        self._table.disarm(record)
        return effects


class NeverSweeps(Elections):
    def _swept(self, request: ElectionRequest, now: Instant) -> list[Effect]:
        return []


class TellsTheStoreOnce(Elections):
    def _finish(self, record: Record, ended: HandlerEnded, now: Instant) -> list[Effect]:
        effects = super()._finish(record, ended, now)
        self._table.disarm(record)
        return effects


class TakesAnyNumber(Elections):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._table._records_max = 1_000_000


class TellsTwice(Elections):
    def _granted(self, record: Record, term: int, attempt: int, sent_s: float, now: Instant) -> list[Effect]:
        effects = super()._granted(record, term, attempt, sent_s, now)
        return [effects[0], *effects]


class TrustsItsWallClock(Elections):
    """Takes what looks expired by its own clock for expired, without asking the store."""

    def _admit(self, request: ElectionRequest, now: Instant) -> Record | list[Effect]:
        if now.wall_s > request.asked_at + request.expires_s:
            return [Dropped(request.election_id, "expired")]
        return super()._admit(request, now)

    def _swept(self, request: ElectionRequest, now: Instant) -> list[Effect]:
        return [] if now.wall_s > request.asked_at + request.expires_s else super()._swept(request, now)


class LeadsOn(Lease):
    """Never looks whether its time is over."""

    def still_mine(self, now: Instant) -> bool:
        return self.role is Role.LEADER

    def step(self, event: LeaseEvent | Tick, now: Instant) -> list[LeaseEffect]:
        return self._decide(event, now)


class LeadsFromTheAnswer(Lease):
    def step(self, event: LeaseEvent | Tick, now: Instant) -> list[LeaseEffect]:
        if isinstance(event, AcquireReplied | LeaseRenewReplied):
            event = event.replaced(sent_s=now.boot_s)
        return super().step(event, now)


# ---- stores ----------------------------------------------------------------------------------------

Claimed = tuple[ElectionRecord | None, ElectionReply]
Claim = Callable[[ElectionRecord | None, str, ElectionRequest, float, Instant, StoreFacts], Claimed]


def claiming(name: str, decide: Callable[..., Claimed]) -> type[Store]:
    """A store whose claims are decided otherwise; `decide` is given the real decision too."""

    class Claiming(Store):
        def decide_claim(
            self,
            record: ElectionRecord | None,
            holder: str,
            request: ElectionRequest,
            ttl_s: float,
            now: Instant,
            facts: StoreFacts,
        ) -> Claimed:
            real: Claim = super().decide_claim
            return decide(real, record, holder, request, ttl_s, now, facts)

    Claiming.__name__ = name
    return Claiming


def _overwrite(real: Claim, record: ElectionRecord | None, *rest: Any) -> Claimed:
    if record is not None and record.state is ElectionState.HELD and not record.started:
        record = replace(record, expires_at=0.0)
    return real(record, *rest)


def _forget_attempts(real: Claim, record: ElectionRecord | None, *rest: Any) -> Claimed:
    return real(record and replace(record, attempt=0), *rest)


def _forget_policy(real: Claim, record: ElectionRecord | None, *rest: Any) -> Claimed:
    """A winner that was lost after its start is replaced, whatever the policy."""
    if record is None or not record.started or record.state is not ElectionState.HELD:
        return real(record, *rest)
    again = replace(record, request=replace(record.request, policy=Policy.AT_LEAST_ONCE))
    after, reply = real(again, *rest)
    return after and replace(after, request=record.request), reply


def _reopen_done(real: Claim, record: ElectionRecord | None, *rest: Any) -> Claimed:
    if record is not None and record.state in CLOSED_STATES:
        record = replace(record, state=ElectionState.OPEN, started=False, attempt=0)
    return real(record, *rest)


def _repeat_terms(real: Claim, record: ElectionRecord | None, *rest: Any) -> Claimed:
    after, reply = real(record, *rest)
    if after is not None and isinstance(reply, Granted):
        whole = after.term // 10_000_000 * 10_000_000
        return replace(after, term=whole), reply.replaced(term=whole)
    return after, reply


def _hide_birth(
    real: Claim,
    record: ElectionRecord | None,
    holder: str,
    request: ElectionRequest,
    ttl_s: float,
    now: Instant,
    facts: StoreFacts,
) -> Claimed:
    return real(record, holder, request, ttl_s, now, facts.replaced(born=0.0))


class TrustsTheAsker(Store):
    """Keeps an election under its asker's time, which hides that it is older than the store."""

    def open(self, key: str, request: ElectionRequest) -> ElectionRecord:
        kept = super().open(key, request)
        if kept.state is ElectionState.OPEN:
            kept = self.elections[key] = replace(kept, request=request)
        return kept


class StartsAnyone(Store):
    """No fence: every start is answered with yes."""

    def start(self, key: str, holder: str, term: int) -> bool:
        super().start(key, holder, term)
        return True


class FinishesForAnyone(Store):
    def decide_finish(
        self, record: ElectionRecord | None, holder: str, term: int, outcome: str, now: Instant
    ) -> ElectionRecord | None:
        if record is None or record.state is not ElectionState.HELD:
            return None
        return replace(record, state=ElectionState.DONE, outcome=outcome, changed_at=now.wall_s)


class RenewsTheExpired(Store):
    def decide_start(
        self, record: ElectionRecord | None, holder: str, term: int, now: Instant
    ) -> ElectionRecord | None:
        return coordination.start_election(record, holder, term, now.replaced(boot_s=0.0))


class KeepsItsTerm(Store):
    """A lease that changes hands keeps its term, so that nothing tells its holders' effects apart."""

    def acquire_lease(self, name: str, holder: str, ttl_s: float) -> LeaseReply:
        before = self.leases.get(name)
        reply = super().acquire_lease(name, holder, ttl_s)
        return reply if before is None or not reply.granted else reply.replaced(term=before.term)

    def _keep_lease(self, name: str, before: LeaseRecord | None, after: LeaseRecord | None) -> bool:
        if before is not None and after is not None:
            after = after.replaced(term=before.term)
        return super()._keep_lease(name, before, after)


# ---- all of them -----------------------------------------------------------------------------------

CRASHES = "crash,crash-after-grant,crash-after-start,crash-in-handler"
SLOW = "store-delay,pause,stall,slow-handlers"


def _machine(name: str, breaks: str, faults: str, machine: type[Elections], **sizes: int) -> Mutant:
    return Mutant(name, Variant(elections=machine), frozenset(breaks.split()), faults, **sizes)


def _lease(name: str, lease: type[Lease], faults: str) -> Mutant:
    return Mutant(name, Variant(lease=lease), frozenset({"L1"}), faults, elections=4)


def _store(name: str, breaks: str, faults: str, store: type[Store], **sizes: int) -> Mutant:
    return Mutant(name, Variant(store=store), frozenset(breaks.split()), faults, **sizes)


def _claims(name: str, breaks: str, faults: str, decide: Callable[..., Claimed], **sizes: int) -> Mutant:
    return _store(name, breaks, faults, claiming(name, decide), **sizes)


MUTANTS = (
    _machine("acts before the store said yes", "KS1", "none", ActsBeforeStart),
    _machine("counts its time from the answer", "KS2", "store-delay", CountsFromTheAnswer),
    _machine("prolongs from the answer", "KS2", "store-delay,slow-handlers", ProlongsFromTheAnswer),
    _machine("runs at every yes", "KS1 KS2", "store-duplicate", RunsAtEveryYes),
    _machine("never renews", "KS2 KL1", "slow-handlers", NeverRenews),
    _machine("is deaf to endings", "KC1 KM1", "none", DeafToEndings),
    _machine("is deaf to winners", "KC1", "none", DeafToWinners, nodes=9),
    _machine("obeys old timers", "KC1 KM1", "none", ObeysOldTimers),
    _machine("drops tombstones early", "KC1", "client-repeat,duplicate", ForgetsTheDead, elections=200),
    _machine("watches for ever", "KL1 KM1", CRASHES, WatchesForEver),
    _machine("never sweeps", "KL1", "client-crash", NeverSweeps),
    _machine("tells the store once", "KL1 KM1", "store-loss", TellsTheStoreOnce),
    _machine("takes any number of records", "KM1", "flood", TakesAnyNumber, elections=200),
    _machine("tells its win twice", "KC1", "none", TellsTwice),
    _machine("trusts its wall clock", "KL1 KS2", "skew", TrustsItsWallClock),
    _lease("leads beyond its time", LeadsOn, "pause,store-outage"),
    _lease("leads from the answer on", LeadsFromTheAnswer, "store-delay"),
    _claims("overwrites what is held", "KS2", "duplicate", _overwrite),
    _claims("counts no attempts", "KC1", "crash-after-grant", _forget_attempts, nodes=3, elections=2),
    _claims("grants again after a start", "KS1", CRASHES, _forget_policy),
    _claims("reopens what is over", "KS1 KS2 KS3", "client-repeat,delay,loss", _reopen_done),
    _claims("repeats terms", "KS2", "none", _repeat_terms),
    _claims("hides that it was emptied", "KS4 KS2", f"amnesia,{SLOW}", _hide_birth),
    _store("trusts the asker's clock", "KS4 KS2 KL1", "amnesia,skew,slow-handlers", TrustsTheAsker),
    _store("starts anyone", "KS1 KS2", f"{SLOW},{CRASHES}", StartsAnyone),
    _store("finishes for anyone", "KS2 KS3", f"{SLOW},partition", FinishesForAnyone),
    _store("starts what is over", "KS2", SLOW, RenewsTheExpired),
    _store("keeps the term of a lease", "L1", "crash,pause,stop", KeepsItsTerm),
)
