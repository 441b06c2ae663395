"""Three nodes, one store, and a world that delays, drops, repeats and kills: KS1, KS2, KS3, KL1.

The store is the real one's decisions over a dictionary. Every message between a node and the
store or another node waits in a list from which the test draws: what it never draws is lost.
"""

import random
from dataclasses import dataclass, field

import pytest

from umbel.protocol.election.election import Elections
from umbel.protocol.election.events import (
    Asked,
    CallClaim,
    CallFinish,
    CallRenew,
    CallStart,
    ClaimReplied,
    ClosedReceived,
    Effect,
    ElectedReceived,
    Event,
    FinishReplied,
    HandlerEnded,
    HolderLost,
    Phase,
    PublishElected,
    RenewReplied,
    RunHandler,
    StartReplied,
    Swept,
)
from umbel.protocol.election.table import ElectionSettings
from umbel.protocol.leadership import coordination
from umbel.protocol.leadership.coordination import (
    CLOSED_STATES,
    ElectionRecord,
    ElectionRequest,
    ElectionState,
    Granted,
    Instant,
    Policy,
    StoreFacts,
)
from umbel.protocol.machine import Tick

WALL = 1_000_000.0
NODES = ("ada", "bob", "eve")


@dataclass
class Run:
    node: str
    term: int
    closed_before: bool


@dataclass
class World:
    rng: random.Random
    policy: Policy
    now_s: float = 0.0
    record: ElectionRecord | None = None
    last_term: int = 0
    machines: dict[str, Elections] = field(default_factory=dict)
    holders: dict[str, str] = field(default_factory=dict)
    mail: list[tuple[str, Event]] = field(default_factory=list)
    calls: list[tuple[str, str, Effect]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    told: int = 0

    def __post_init__(self) -> None:
        self.request = ElectionRequest("e", "task", b"{}", self.policy, WALL)
        for node in NODES:
            self.start(node)
            self.post(node, Asked(self.request))

    @property
    def now(self) -> Instant:
        return Instant(self.now_s, WALL + self.now_s)

    def start(self, node: str) -> None:
        self.holders[node] = f"{node}.1.{self.rng.getrandbits(40)}"
        topics = frozenset({"task"})
        self.machines[node] = Elections(
            node, self.holders[node], topics, ElectionSettings(), self.rng.uniform
        )
        self.machines[node].nodes = len(NODES)

    def post(self, node: str, event: Event) -> None:
        self.mail.append((node, event))

    def step(self, node: str, event: Event | Tick) -> None:
        for effect in self.machines[node].step(event, self.now):
            match effect:
                case CallClaim() | CallStart() | CallRenew() | CallFinish():
                    self.calls.append((node, self.holders[node], effect))
                case RunHandler(term=term):
                    closed = self.record is not None and self.record.state is ElectionState.DONE
                    self.runs.append(Run(node, term, closed))
                    self.post(node, HandlerEnded("e", term, ok=self.rng.random() < 0.8))
                case PublishElected():
                    self.tell(effect)
                case _:
                    pass

    def tell(self, told: PublishElected) -> None:
        self.told += 1
        for node in NODES:
            if told.phase is Phase.ELECTED:
                self.post(node, ElectedReceived("e", told.winner, told.term, told.attempt, told.request))
            else:
                self.post(node, ClosedReceived("e", told.phase))

    def answer(self, node: str, holder: str, call: Effect) -> None:
        """The store does what it was asked; whether the answer arrives is another matter."""
        reply: Event
        match call:
            case CallClaim():
                facts = StoreFacts(born=WALL - 1000.0, last_term=self.last_term)
                self.record, answer = coordination.claim_election(
                    self.record, holder, call.request, ttl_s=call.ttl_s, now=self.now, store=facts
                )
                if isinstance(answer, Granted):
                    self.last_term = max(self.last_term, answer.term)
                reply = ClaimReplied("e", call.sent_s, answer)
            case CallStart():
                ok = self.keep(coordination.start_election(self.record, holder, call.term, self.now))
                reply = StartReplied("e", call.term, call.sent_s, ok)
            case CallRenew():
                ok = self.keep(coordination.renew_election(self.record, holder, call.term, self.now))
                reply = RenewReplied("e", call.term, call.sent_s, ok)
            case CallFinish():
                kept = coordination.finish_election(self.record, holder, call.term, call.outcome, self.now)
                reply = FinishReplied("e", call.term, self.keep(kept))
            case _:
                raise AssertionError(call)
        if self.holders[node] == holder:
            self.post(node, reply)

    def keep(self, record: ElectionRecord | None) -> bool:
        self.record = record or self.record
        return record is not None

    def crash(self, node: str) -> None:
        self.mail = [(to, event) for to, event in self.mail if to != node]
        lost = self.holders[node]
        self.start(node)
        for other in NODES:
            self.post(other, HolderLost(lost))

    def sweep(self) -> None:
        if self.record is None or coordination.is_unfinished(self.record, self.now):
            self.step(self.rng.choice(NODES), Swept(self.request))


def disturb(world: World) -> None:
    """One thing that happens: mostly progress, sometimes loss, a second delivery, a crash, a pause."""
    rng, chance = world.rng, world.rng.random()
    if world.mail and chance < 0.45:
        node, event = world.mail.pop(rng.randrange(len(world.mail)))
        world.step(node, event)
        if rng.random() < 0.2:
            world.mail.append((node, event))
    elif world.calls and chance < 0.75:
        node, holder, call = world.calls.pop(rng.randrange(len(world.calls)))
        world.answer(node, holder, call)
        if rng.random() < 0.1:
            world.calls.append((node, holder, call))
    elif chance < 0.78 and world.mail:
        lost = rng.randrange(len(world.mail))
        if not isinstance(world.mail[lost][1], HandlerEnded):  # a handler is not across a network
            del world.mail[lost]
    elif chance < 0.80:
        world.crash(rng.choice(NODES))
    elif chance < 0.82:
        world.sweep()
    else:
        world.now_s += rng.choice((0.05, 0.3, 1.0, 4.0, 12.0))
        for node in rng.sample(NODES, rng.randrange(len(NODES) + 1)):
            world.step(node, Tick())


def settle(world: World) -> None:
    """The store is up, nobody crashes, the sweep goes on: KL1 says that this ends it."""
    for _ in range(400):
        world.now_s += 1.0
        for node in NODES:
            world.step(node, Tick())
        while world.mail or world.calls:
            if world.calls:
                world.answer(*world.calls.pop(0))
            else:
                world.step(*world.mail.pop(0))
        world.sweep()


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("block", range(10))
def test_whatever_happens_it_runs_as_often_as_its_policy_allows_and_ends(policy: Policy, block: int) -> None:
    for seed in range(block * 30, block * 30 + 30):
        world = World(random.Random(seed), policy)
        for _ in range(world.rng.randrange(30, 200)):
            disturb(world)
        settle(world)
        terms = [run.term for run in world.runs]
        assert len(set(terms)) == len(terms), f"seed {seed}: one term acted twice"
        if policy is Policy.AT_MOST_ONCE:
            assert len(terms) <= 1, f"seed {seed}: ran {len(terms)} times"
        assert terms == sorted(terms), f"seed {seed}: terms went back"
        assert not any(run.closed_before for run in world.runs), f"seed {seed}: ran after its end"
        assert world.record is not None and world.record.state in CLOSED_STATES, f"seed {seed}: never ended"
        left = [record for machine in world.machines.values() for record in machine.snapshot().records]
        assert not left, f"seed {seed}: records stay"
        assert world.told <= 2 * coordination.ATTEMPTS_MAX + 1, f"seed {seed}: told {world.told} times"
