"""Rounds: run one plan to its end, run many, and shrink a plan that breaks a guarantee.

`Cluster` holds the workers, the store and the clients of one round of elections. `rounds` adds up the
observations of many plans. `shrink` drops faults, elections and nodes in ever smaller pieces while any
guarantee is still broken. The result is a short plan that a person can understand. Any broken guarantee
counts, not only the first one.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from umbel.protocol.election.election import Elections
from umbel.protocol.election.events import Asked, HolderLost
from umbel.protocol.election.table import ElectionSettings
from umbel.protocol.leadership.coordination import TTL_S, ElectionRecord, ElectionRequest, election_key
from umbel.protocol.leadership.lease import Lease, LeaseSettings
from umbel.sim.checkers import Case, Checkers, Violation
from umbel.sim.node import Node
from umbel.sim.plan import ASKING_S, STORM_S, Ask, Crowd, Plan, Process, make_plan, schedule_faults
from umbel.sim.store import Store
from umbel.sim.sweeper import Sweeper
from umbel.sim.world import EPOCH_S, Network, NodeClock, World

# ---- cluster ---------------------------------------------------------------------------------------

NAMESPACE = "celery"
TOPICS = frozenset({"task"})
ALL_TOPICS = frozenset({"task", "rare"})
RARE_EVERY = 3  # every third node has a handler for the topic `rare`
CLIENT = -1
CLIENT_WAITS_S = 1.0
CLIENT_TRIES_MAX = 60
NOTICED_S = (4.0, 20.0)  # the time until the other nodes declare a crashed node lost

Uniform = Callable[[float, float], float]
MakeElections = Callable[[str, str, frozenset[str], ElectionSettings, Uniform], Elections]
MakeLease = Callable[[str, str, LeaseSettings, Uniform], Lease]
MakeStore = Callable[[World, Network, Checkers], Store]


@dataclass(frozen=True, slots=True)
class Variant:
    """The machines and the store of a simulation: the real ones, or mutants of them."""

    elections: MakeElections = Elections
    lease: MakeLease = Lease
    store: MakeStore = Store


REAL = Variant()


class Cluster(Crowd[Node]):
    """The nodes, the store and the clients of one round, and the checkers that observe them."""

    def __init__(self, plan: Plan, variant: Variant = REAL) -> None:
        super().__init__(plan)
        self.asks = {ask.election_id: ask for ask in plan.asks}
        self.checkers = Checkers(self.world, self.asks, nodes=plan.nodes)
        self.store = variant.store(self.world, self.network, self.checkers)
        self._variant = variant
        self._settings = ElectionSettings(namespace=NAMESPACE, records_max=plan.records_max)
        self._strict = all(fault.kind.startswith("crash") for fault in plan.faults)
        self.populate()
        for ask in plan.asks:
            self.world.at(ask.at_s, self._ask, ask)

    def make_node(self, index: int, pid: int, clock: NodeClock) -> Node:
        """Return a process with this place, process id and clock."""
        return Node(self, index, pid, clock)

    def make_elections(self, node: Node) -> Elections:
        """Return the elections machine of a node."""
        topics = ALL_TOPICS if node.index % RARE_EVERY == 0 else TOPICS
        machine = self._variant.elections(
            node.name, node.holder, topics, self._settings, self.world.random.uniform
        )
        machine.nodes = self.plan.nodes
        return machine

    def make_lease(self, name: str, node: Process) -> Lease:
        """Return the lease machine of a node."""
        return self._variant.lease(name, node.holder, LeaseSettings(), self.world.random.uniform)

    def sweepers(self) -> list[Sweeper]:
        """Return the sweepers of all nodes."""
        return [node.sweeper for node in self.nodes]

    def stepped(self, node: Node) -> None:
        """Check a node's table after a step of its machine."""
        self.checkers.sized(node.holder, len(node.elections), self.plan.records_max)

    # ---- faults ------------------------------------------------------------------------------------

    def died(self, node: Node) -> None:
        """Let the other nodes notice the death of a node after a while."""
        for other in self.nodes:
            if other is not node and other.up:
                self.world.after(self.world.random.uniform(*NOTICED_S), other.hear, HolderLost(node.holder))

    def take_for_lost(self, index: int) -> None:
        """Report a living node as lost to all nodes."""
        for node in self.nodes:
            node.hear(HolderLost(self.nodes[index].holder))

    def set_store_down(self, down: bool) -> None:
        """Make the store unreachable, or reachable again."""
        self.store.down = down

    def empty_store(self) -> None:
        """Let the store lose all data."""
        self.store.forget_everything()

    # ---- clients -----------------------------------------------------------------------------------

    def _ask(self, ask: Ask) -> None:
        asked_at = EPOCH_S + self.world.now + ask.skew_s
        request = ElectionRequest(ask.election_id, ask.topic, b"{}", ask.policy, asked_at, ask.expires_s)
        self._open(ask, request, 1, [])
        if ask.again_s is not None:
            self.world.after(ask.again_s, self._open, ask, request, 1, [])

    def _open(self, ask: Ask, request: ElectionRequest, tries: int, opened: list[bool]) -> None:
        """Call the store until it replies, like a client with a timeout."""
        if opened:
            return
        key = election_key(NAMESPACE, ask.election_id)
        self.store.call(CLIENT, self.store.open, (key, request), self._opened, (ask, opened))
        if tries < CLIENT_TRIES_MAX:
            self.world.after(CLIENT_WAITS_S, self._open, ask, request, tries + 1, opened)

    def _opened(self, context: tuple[Ask, list[bool]], record: ElectionRecord) -> None:
        ask, opened = context
        if opened:
            return
        opened.append(True)
        if not ask.tells:
            return
        case = self.checkers.cases[ask.election_id]
        if self._strict and case.knowers is None:
            case.knowers = {node.holder for node in self.nodes if node.up and self._takes(node, ask)}
        self.network.broadcast(CLIENT, Asked(record.request), self.nodes)

    def _takes(self, node: Node, ask: Ask) -> bool:
        return ask.topic in (ALL_TOPICS if node.index % RARE_EVERY == 0 else TOPICS)


# ---- rounds ----------------------------------------------------------------------------------------

# After the faults: a sweeper's lease expires (15 s) and is acquired (2 s), the holder sweeps (6 s). An
# election that it finds waits for its ttl, runs for up to 25 s, and is announced for up to 3 ttl. Clocks are
# 9 % off.
CLOSING_S = 120.0
# A node that missed the end watches for another ttl, asks, and holds a tombstone for 2 ttl. A node that could
# not store the end retries for 3 ttl before that.
FORGETTING_S = 7 * TTL_S * 1.1 + 10.0
ROUND_ELECTIONS = 200


@dataclass(slots=True)
class Tally:
    """The counts of one or more rounds."""

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
        """Add the counts of another tally."""
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
    """One round: its trace's hash, its counts, and the first broken guarantee, if any."""

    plan: Plan
    trace_hash: str
    violation: Violation | None
    tally: Tally
    last_lines: list[str]


def run_plan(plan: Plan, variant: Variant = REAL) -> Outcome:
    """Run one plan to its end and check it."""
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
    """Run rounds until `elections` were requested or a guarantee was broken."""
    number = 0
    while size := round_size(elections, number):
        outcome = run_plan(make_plan(f"{seed}:{number}", nodes, size, faults), variant)
        yield outcome
        if outcome.violation is not None:
            return
        number += 1


def round_size(elections: int, number: int) -> int:
    """Return how many of the elections belong to the round of this number."""
    return max(0, min(ROUND_ELECTIONS, elections - number * ROUND_ELECTIONS))


def hash_of_hashes(hashes: Iterable[str]) -> str:
    """Return one hash of the traces of many rounds."""
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


# ---- shrink ----------------------------------------------------------------------------------------

TRIES_MAX = 600
COURSES = 3
OneT = TypeVar("OneT")


def shrink(outcome: Outcome, variant: Variant = REAL, *, tries_max: int = TRIES_MAX) -> Outcome:
    """Return the smallest failing outcome that is found in this many runs."""
    tries = 0

    def fails(plan: Plan) -> Outcome | None:
        nonlocal tries
        # Omitting something changes every later delay, so a few other seeds are tried too.
        for seed in (plan.seed, *(f"{outcome.plan.seed}~{number}" for number in range(COURSES))):
            tries += 1
            if tries > tries_max:
                return None
            tried = run_plan(replace(plan, seed=seed), variant)
            if tried.violation is not None:
                return tried
        return None

    smallest = outcome
    improved = True
    while improved and tries < tries_max:
        improved = False
        for make in (_fewer_asks, _fewer_faults, _fewer_nodes):
            found = _first_failing(smallest.plan, make, fails)
            while found is not None:
                smallest, improved = found, True
                found = _first_failing(smallest.plan, make, fails)
    return smallest


def _first_failing(
    plan: Plan, make: Callable[[Plan], Iterator[Plan]], fails: Callable[[Plan], Outcome | None]
) -> Outcome | None:
    return next((found for smaller in make(plan) if (found := fails(smaller)) is not None), None)


def _fewer_asks(plan: Plan) -> Iterator[Plan]:
    for asks in _without_pieces(plan.asks):
        if asks:
            yield replace(plan, asks=asks)


def _fewer_faults(plan: Plan) -> Iterator[Plan]:
    for faults in _without_pieces(plan.faults):
        yield replace(plan, faults=faults)


def _fewer_nodes(plan: Plan) -> Iterator[Plan]:
    for nodes in dict.fromkeys((plan.nodes // 2, plan.nodes - 1)):
        if nodes >= 1:
            faults = tuple(fault for fault in plan.faults if fault.node < nodes)
            yield replace(plan, nodes=nodes, faults=faults)


def _without_pieces(whole: tuple[OneT, ...]) -> Iterator[tuple[OneT, ...]]:
    """Yield the sequence without each half, then without each quarter, and so on down to single items."""
    size = len(whole)
    while size >= 1:
        size = size // 2 if size > 1 else 0
        step = max(size, 1)
        for start in range(0, len(whole), step):
            yield whole[:start] + whole[start + step :]
        if step == 1:
            return
