"""Rounds: run one plan to its end; run many of them and add up what they saw."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from umbel.protocol.leadership.coordination import TTL_S
from umbel.sim.checkers import Case, Violation
from umbel.sim.cluster import REAL, Cluster, Variant
from umbel.sim.faults import schedule_faults
from umbel.sim.plan import ASKING_S, STORM_S, Plan, make_plan

# After the storm: a sweeper's lease runs out (15 s) and is taken (2 s), it sweeps (6 s), what it finds
# waits for its ttl, runs for up to 25 s, its end is announced for up to 3 ttl; clocks are 9 % off.
CLOSING_S = 120.0
# Who did not hear the end watches for a ttl more, asks, and keeps a tombstone for 2 ttl; who could not
# store the end keeps announcing it for 3 ttl before that.
FORGETTING_S = 7 * TTL_S * 1.1 + 10.0
ROUND_ELECTIONS = 200


@dataclass(slots=True)
class Tally:
    """What one or more rounds saw."""

    rounds: int = 0
    elections: int = 0
    opened: int = 0
    runs: int = 0
    extra_runs: int = 0
    publishes: int = 0
    resent: int = 0
    deliveries: int = 0
    store_calls: int = 0
    lease_calls: int = 0
    events: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    decided_s: list[float] = field(default_factory=list)
    closed_s: list[float] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        for name in ("rounds", "elections", "opened", "runs", "extra_runs", "publishes", "resent"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("deliveries", "store_calls", "lease_calls", "events"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.ended.update(other.ended)
        self.counts.update(other.counts)
        self.decided_s += other.decided_s
        self.closed_s += other.closed_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """One round: its trace's hash, what it saw, and the first broken promise, if one was."""

    plan: Plan
    trace_hash: str
    violation: Violation | None
    tally: Tally
    last_lines: list[str]


def run_plan(plan: Plan, variant: Variant = REAL) -> Outcome:
    cluster = Cluster(plan, variant)
    world, checkers = cluster.world, cluster.checkers
    if plan.faults:
        schedule_faults(cluster)
    world.run(STORM_S + 1.0 if plan.faults else ASKING_S + 1.0)
    _run_while(cluster, lambda: bool(checkers.open), CLOSING_S)
    if checkers.violation is None:
        checkers.check_all_closed()
        checkers.check_undisturbed(plan)
    _run_while(cluster, lambda: any(len(node.elections) for node in cluster.nodes), FORGETTING_S)
    for node in cluster.nodes:
        checkers.check_forgotten(node.holder, len(node.elections))
    return Outcome(plan, world.trace.digest(), checkers.violation, _tally(cluster), world.trace.last(40))


def _run_while(cluster: Cluster, unfinished: Callable[[], bool], longest_s: float) -> None:
    world = cluster.world
    until = world.now + longest_s
    while cluster.checkers.violation is None and world.now < until and unfinished():
        world.run(world.now + 1.0)


def rounds(
    nodes: int, elections: int, faults: frozenset[str], seed: str, *, variant: Variant = REAL
) -> Iterator[Outcome]:
    """Run rounds until `elections` were asked for or a promise was broken."""
    number = 0
    while size := round_size(elections, number):
        outcome = run_plan(make_plan(f"{seed}:{number}", nodes, size, faults), variant)
        yield outcome
        if outcome.violation is not None:
            return
        number += 1


def round_size(elections: int, number: int) -> int:
    """How many of the elections belong to the round of this number."""
    return max(0, min(ROUND_ELECTIONS, elections - number * ROUND_ELECTIONS))


def hash_of_hashes(hashes: Iterable[str]) -> str:
    return hashlib.blake2b("".join(hashes).encode(), digest_size=16).hexdigest()


def _tally(cluster: Cluster) -> Tally:
    cases = list(cluster.checkers.cases.values())
    calls = cluster.store.calls
    election_calls = sum(case.calls for case in cases)
    decided = [case.decided_at - case.ask.at_s for case in cases if case.decided_at is not None]
    return Tally(
        rounds=1,
        elections=len(cases),
        opened=sum(case.opened_at is not None for case in cases),
        runs=sum(len(case.runs) for case in cases),
        extra_runs=cluster.checkers.extra_runs,
        publishes=cluster.network.sent,
        resent=sum(case.resent for case in cases),
        deliveries=cluster.network.delivered,
        store_calls=election_calls,
        lease_calls=sum(calls.values()) - election_calls,
        events=cluster.world.trace.lines,
        ended=Counter(_ending(case) for case in cases),
        counts=cluster.counts,
        decided_s=decided,
    )


def _ending(case: Case) -> str:
    return str(case.state) if case.state is not None else "unopened or forgotten"
