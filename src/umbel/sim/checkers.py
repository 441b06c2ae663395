"""Checkers: the guarantees of elections and leases, checked after every step of a simulation.

They observe the store and the nodes, with the world's time, and keep separate records: a record of the store
or of a machine may be wrong, so they do not rely on it. A handler counts as run at the moment when its effect
is performed.

| guarantee | what is checked |
|---|---|
| KS1 | policy at_most_once: one run for each election |
| KS2 | policy at_least_once: terms of runs increase; one valid holder at a time, in store and nodes |
| KS3 | nothing runs, and nothing is granted, after DONE |
| KS4 | KS1 even if the store lost all data |
| KL1 | every opened election is closed in time |
| KM1 | no table exceeds its limits, and every record is removed in the end |
| KC1 | the number of broadcasts and store calls for each election |
| L1 | a node leads only while the store agrees, under increasing terms |
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, log2

from umbel.protocol.election.events import Phase, PublishElected, RunHandler
from umbel.protocol.election.table import SPREAD_S
from umbel.protocol.leadership.coordination import (
    ATTEMPTS_MAX,
    CLOSED_STATES,
    TTL_S,
    ElectionRecord,
    ElectionState,
    LeaseRecord,
    Policy,
)
from umbel.sim.plan import HARMLESS, THRIFTY, Ask, Plan
from umbel.sim.world import NEAR_S, World

CALLS_EXPECTED = 4.25  # for an election: open, 1.1 claims, start, finish
CALLS_SPARE = 8  # calls that chance may add in a few elections
LATE_S = 1e-6  # tolerance for rounding between clocks


@dataclass(frozen=True, slots=True)
class Violation:
    """The first broken guarantee of a simulation."""

    promise: str
    at_s: float
    election_id: str
    detail: str


@dataclass(slots=True)
class Case:
    """The observations of one election."""

    ask: Ask
    opened_at: float | None = None
    closed_at: float | None = None
    state: ElectionState | None = None
    resets: int = 0  # how often the store had lost its data when this election was opened
    holder: str = ""
    held_until: float = -1.0
    attempts: int = 0
    crashes: int = 0
    since_term: int = 0  # terms up to this one belong to a lost election with the same id
    started: list[tuple[str, int]] = field(default_factory=list)
    runs: list[tuple[float, str, int]] = field(default_factory=list)
    acting: dict[str, float] = field(default_factory=dict)  # by holder: until when it may act
    decided_at: float | None = None
    done_at: float | None = None
    tells: int = 0
    closings: int = 0
    calls: int = 0
    resent: int = 0
    knowers: set[str] | None = None


class Checkers:
    """Observes one simulation and stops it at the first broken guarantee."""

    def __init__(self, world: World, asks: Mapping[str, Ask], *, nodes: int) -> None:
        self.violation: Violation | None = None
        self.cases = {election_id: Case(ask) for election_id, ask in asks.items()}
        self.open: set[str] = set()
        self.resets = 0
        self.extra_runs = 0
        self._world = world
        self._nodes = nodes
        self._last_term = 0
        self._reset_at = -1.0
        self._dead: set[str] = set()

    # ---- the store ---------------------------------------------------------------------------------

    def called(self, election_id: str) -> None:
        """Count a call to the store about an election."""
        self.cases[election_id].calls += 1

    def changed(self, key: str, before: ElectionRecord | None, after: ElectionRecord) -> None:
        """Check a change of an election in the store."""
        case = self.cases[after.request.election_id]
        if after.state is ElectionState.OPEN:
            self._opened(case)
        elif after.state is ElectionState.HELD:
            if before is None or before.state is not ElectionState.HELD or before.term != after.term:
                self._granted(case, after)
            else:
                self._kept(case, before, after)
        else:
            self._closed(case, before, after)

    def forgot_everything(self) -> None:
        """Record that the store lost its data, and with it the guarantee that open elections are closed."""
        self.resets += 1
        self._reset_at = self._world.now
        for election_id in self.open:
            self.cases[election_id].opened_at = None
        self.open.clear()
        for case in self.cases.values():
            case.held_until = -1.0

    def _opened(self, case: Case) -> None:
        if case.runs or case.resets != self.resets:
            # A client that opens it again after the loss has started a new election: a known limit.
            case.runs.clear()
            case.acting.clear()
            case.done_at = None
            case.since_term = self._last_term
        case.resets = self.resets
        case.opened_at = self._world.now
        case.closed_at = case.state = None
        self.open.add(case.ask.election_id)

    def _granted(self, case: Case, after: ElectionRecord) -> None:
        now = self._world.now
        if now < case.held_until:
            self._report("KS2", case, f"granted to {after.holder} while {case.holder} held it")
        if case.done_at is not None and self._reset_at < case.done_at:
            self._report("KS3", case, f"granted to {after.holder} after it was done")
        if after.term <= self._last_term:
            self._report("KS2", case, f"term {after.term} is not above {self._last_term}")
        self._last_term = max(self._last_term, after.term)
        case.attempts += 1
        if case.attempts > ATTEMPTS_MAX * (1 + self.resets):
            self._report("KC1", case, f"attempt {case.attempts} of {ATTEMPTS_MAX}")
        case.crashes += after.holder in self._dead  # it died while its claim was in transit
        case.holder = after.holder
        case.held_until = now + after.ttl_s
        if case.opened_at is None:
            self._opened_by_claim(case)

    def _opened_by_claim(self, case: Case) -> None:
        case.opened_at = self._world.now
        case.closed_at = case.state = None
        self.open.add(case.ask.election_id)

    def _kept(self, case: Case, before: ElectionRecord, after: ElectionRecord) -> None:
        if after.started and not before.started:
            if case.ask.policy is Policy.AT_MOST_ONCE and self._started(case):
                promise = "KS1" if self.resets == case.resets else "KS4"
                self._report(promise, case, f"{after.holder} may start after {case.started[-1][0]} did")
            case.started.append((after.holder, after.term))
        case.held_until = after.expires_at

    def _started(self, case: Case) -> bool:
        return bool(case.started) and case.started[-1][1] > case.since_term

    def _closed(self, case: Case, before: ElectionRecord | None, after: ElectionRecord) -> None:
        if before is not None and before.state is ElectionState.DONE and after.state is not before.state:
            self._report("KS3", case, f"{after.state} after it was done")
        if after.state is ElectionState.DONE:
            if f"{after.holder} {after.term}" not in after.outcome:
                self._report("KS2", case, f"done by {after.outcome}, held by {after.holder} {after.term}")
            case.done_at = self._world.now if case.done_at is None else case.done_at
        if case.closed_at is None:
            case.closed_at = self._world.now
        case.state = after.state
        case.held_until = -1.0
        if case.opened_at is not None:
            self._check_time(case)
        self.open.discard(case.ask.election_id)

    def lease_changed(self, name: str, before: LeaseRecord | None, after: LeaseRecord) -> None:
        """Check a change of a lease in the store."""
        if after.holder and (before is None or (before.holder, before.term) != (after.holder, after.term)):
            if after.term <= self._last_term:
                self._fail("L1", name, f"term {after.term} is not above {self._last_term}")
            if before is not None and before.holder and self._world.now < before.expires_at:
                self._fail("L1", name, f"given to {after.holder} while {before.holder} held it")
            self._last_term = max(self._last_term, after.term)

    # ---- the nodes ---------------------------------------------------------------------------------

    def ran(self, holder: str, run: RunHandler, until: float) -> None:
        """Check the start of a handler, which may act until `until` by the node's clock."""
        case = self.cases[run.request.election_id]
        now = self._world.now
        if case.decided_at is None:
            case.decided_at = now
        if (holder, run.term) not in case.started:
            self._report("KS1", case, f"{holder} acts in term {run.term}, which it did not start")
        if run.term <= case.since_term:
            return
        lost = self.resets > case.resets
        if case.ask.policy is Policy.AT_MOST_ONCE:
            if case.runs:
                self._report("KS4" if lost else "KS1", case, f"{holder} runs it after {case.runs[-1][1]}")
        else:
            self._check_repeated(case, holder, run, until)
        if case.done_at is not None and self._reset_at < case.done_at:
            self._report("KS3", case, f"{holder} runs it after it was done")
        self.extra_runs += bool(case.runs)
        case.runs.append((now, holder, run.term))

    def prolonged(self, holder: str, election_id: str, until: float) -> None:
        """Check a handler that may act for longer."""
        case = self.cases[election_id]
        if holder in case.acting:
            case.acting[holder] = until
            self._check_inside(case, holder, until)

    def ended(self, holder: str, election_id: str) -> None:
        """Record that a handler ended."""
        self.cases[election_id].acting.pop(holder, None)

    def told(self, tell: PublishElected) -> None:
        """Count a broadcast about an election."""
        case = self.cases[tell.election_id]
        case.tells += 1
        case.closings += tell.phase is not Phase.ELECTED
        # A silent winner can still announce an election as done that the store closed as failed.
        allowed = 2 * case.attempts + 1 + self.resets
        if case.tells > allowed:
            self._report("KC1", case, f"{case.tells} broadcasts for {case.attempts} attempts")

    def resent(self, election_id: str) -> None:
        """Count a request that a node without a handler broadcast again."""
        self.cases[election_id].resent += 1

    def crashed(self, holder: str) -> None:
        """Record that a node crashed."""
        self._dead.add(holder)
        for election_id in self.open:
            case = self.cases[election_id]
            case.crashes += case.holder == holder and self._world.now < case.held_until
            if case.knowers is not None:
                case.knowers.discard(holder)
        for case in self.cases.values():
            case.acting.pop(holder, None)

    def sized(self, holder: str, records: int, records_max: int) -> None:
        """Check the size of a node's table."""
        if records > records_max:
            self._fail("KM1", "", f"{holder} keeps {records} records, {records_max} are allowed")

    def led(self, holder: str, term: int, until: float, lease: LeaseRecord | None) -> None:
        """Check a node that believes it leads until `until` against the lease in the store."""
        if self._world.now >= until:
            self._fail("L1", holder, f"leads in term {term} beyond its own time")
        if lease is None or (lease.holder, lease.term) != (holder, term):
            if self._reset_at < 0:
                self._fail("L1", holder, f"leads in term {term}, which the store gave away")
        elif lease.expires_at + LATE_S < until:
            self._fail("L1", holder, f"would lead until {until:.3f}, the store says {lease.expires_at:.3f}")

    # ---- at the end --------------------------------------------------------------------------------

    def check_all_closed(self) -> None:
        """Check at the end that every opened election is closed."""
        for election_id in sorted(self.open):
            self._report("KL1", self.cases[election_id], "still not closed")
            return

    def check_undisturbed(self, plan: Plan) -> None:
        """Check plans whose faults excuse nothing: one run, done, announced once, at the expected cost."""
        if plan.kinds <= HARMLESS:
            for case in self.cases.values():
                if len(case.runs) != 1 or case.state is not ElectionState.DONE:
                    self._report(
                        "KS2", case, f"{len(case.runs)} runs and {case.state}, though nothing was lost"
                    )
        if plan.kinds <= THRIFTY:
            for case in self.cases.values():
                if case.closings != 1 or case.tells != 2:
                    self._report("KC1", case, f"{case.tells} broadcasts, {case.closings} of them endings")
            calls = sum(case.calls - (case.ask.again_s is not None) for case in self.cases.values())
            if calls > CALLS_EXPECTED * len(self.cases) + CALLS_SPARE:
                self._fail("KC1", "", f"{calls} store calls for {len(self.cases)} elections")

    def check_forgotten(self, holder: str, records: int) -> None:
        """Check at the end that a node has removed all records."""
        if records:
            self._fail("KM1", "", f"{holder} still keeps {records} records")

    # ---- inside ------------------------------------------------------------------------------------

    def _check_repeated(self, case: Case, holder: str, run: RunHandler, until: float) -> None:
        now = self._world.now
        if case.runs and run.term <= case.runs[-1][2]:
            self._report("KS2", case, f"{holder} runs it in term {run.term} after {case.runs[-1][2]}")
        if now >= until:
            self._report("KS2", case, f"{holder} runs it after its time")
        for other, other_until in case.acting.items():
            if other != holder and now < other_until:
                self._report("KS2", case, f"{holder} runs it while {other} may act")
        case.acting[holder] = until
        self._check_inside(case, holder, until)

    def _check_inside(self, case: Case, holder: str, until: float) -> None:
        if self._reset_at >= 0 or case.state in CLOSED_STATES:
            return  # the store no longer has the grant
        repeats = case.ask.policy is Policy.AT_LEAST_ONCE
        if repeats and case.holder == holder and until > case.held_until + LATE_S:
            self._report("KS2", case, f"{holder} would act until {until:.3f}, not {case.held_until:.3f}")

    def _check_time(self, case: Case) -> None:
        """Check the time bound of `coordination.md` 5, for plans with no faults except crashes."""
        if case.knowers is None or not case.knowers or case.opened_at is None or case.closed_at is None:
            return
        spread = SPREAD_S * (ceil(log2(self._nodes + 1)) + 0.5)
        lost = case.crashes * (TTL_S + 5.0 + SPREAD_S * log2(self._nodes + 1) + SPREAD_S)
        bound = NEAR_S[1] * 9 + spread + lost + (1 + case.crashes) * case.ask.handler_s + LATE_S
        took = case.closed_at - case.opened_at
        if took > bound:
            self._report("KL1", case, f"closed after {took:.3f} s, {bound:.3f} s are allowed")

    def _report(self, promise: str, case: Case, detail: str) -> None:
        self._fail(promise, case.ask.election_id, f"{case.ask.policy}: {detail}")

    def _fail(self, promise: str, subject: str, detail: str) -> None:
        if self.violation is None:
            self.violation = Violation(promise, self._world.now, subject, detail)
            self._world.stop()
