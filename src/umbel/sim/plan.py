"""Plan: everything that is decided before a round of simulation begins.

A round is one small world: some nodes, a few hundred elections, and faults at chosen times in its
first minute; then the weather is fair again and everything must come to its end. A plan together
with its seed decides the whole course, and is plain data: it can be printed, replayed and made
smaller (`shrink.py`).
"""

from collections.abc import Collection
from dataclasses import dataclass
from random import Random

from umbel.errors import ConfigurationError
from umbel.protocol.election.table import RECORDS_MAX
from umbel.protocol.leadership.coordination import EXPIRES_S, Policy

STORM_S = 60.0  # faults happen in this time
ASKING_S = 45.0  # elections are asked for in this time
DAY_S = 86_400.0
QUICK_S = 0.2  # the longest that a handler takes which is not slow

FAULTS = {
    "crash": "a node dies at a random moment and comes back as a new process",
    "crash-after-grant": "a node dies when the store gave it the election",
    "crash-after-start": "a node dies when the store let it start, before it acts",
    "crash-in-handler": "a node dies while its handler runs",
    "crash-after-handler": "a node dies when its handler has ended, before it notices",
    "crash-before-done": "a node dies before it tells the store that it is done",
    "crash-in-renew": "a node dies when it should renew",
    "stop": "a node stops gracefully and comes back",
    "pause": "a node stands still for seconds, up to beyond its ttl",
    "stall": "a node stands still between a decision and its effects",
    "partition": "a node is cut off from broadcasts, from the store, or from both",
    "loss": "broadcasts are lost",
    "duplicate": "broadcasts come twice",
    "delay": "broadcasts come late and overtake one another",
    "store-loss": "calls of the store or their replies are lost",
    "store-duplicate": "calls of the store or their replies come twice",
    "store-delay": "calls of the store or their replies come late and overtake one another",
    "store-outage": "the store is down",
    "amnesia": "the store forgets everything",
    "slow-handlers": "handlers run longer than a ttl",
    "wall-jump": "a node's wall clock jumps, to up to a day before or behind",
    "skew": "wall clocks of nodes and clients differ by up to a day",
    "drift": "clocks run up to 9 % fast or slow",
    "false-lost": "a living node is taken for lost",
    "client-crash": "a client dies between opening an election and telling the workers",
    "client-repeat": "a client asks for the same election again",
    "flood": "more elections than the tables of the nodes hold",
}
WINDOWS = {"loss", "duplicate", "delay", "store-loss", "store-duplicate", "store-delay"}
POINTS = {kind for kind in FAULTS if kind.startswith("crash-")} | {"stall"}
# Under these alone nothing is lost: every election runs once and is done.
HARMLESS = {"duplicate", "client-repeat", "client-crash", "slow-handlers", "skew", "wall-jump", "drift"}
# Under these alone nothing has to be asked twice either.
THRIFTY = HARMLESS - {"client-crash", "slow-handlers"}
ON_CLIENTS = {"slow-handlers", "client-crash", "client-repeat", "flood"}


@dataclass(frozen=True, slots=True)
class Ask:
    """A client asks for one election."""

    at_s: float
    election_id: str
    policy: Policy
    topic: str = "task"
    handler_s: float = 0.05
    succeeds: bool = True
    expires_s: float = EXPIRES_S
    tells: bool = True  # false: the client dies when the election is open
    again_s: float | None = None  # the client asks once more after so long
    skew_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fault:
    """`node` is the affected node; at a named point it is the first node that gets there."""

    at_s: float
    kind: str
    node: int = 0
    lasts_s: float = 0.0
    amount: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    seed: str
    nodes: int
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    records_max: int = RECORDS_MAX

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of fault that it holds, those of clients too."""
        return frozenset(
            {fault.kind for fault in self.faults}
            | {"slow-handlers" for ask in self.asks if ask.handler_s > QUICK_S}
            | {"client-crash" for ask in self.asks if not ask.tells}
            | {"client-repeat" for ask in self.asks if ask.again_s is not None}
            | ({"flood"} if self.records_max < len(self.asks) else set())
        )


def parse_faults(text: str) -> frozenset[str]:
    """`none`, `all`, or names joined by commas; a name ending in `-` or `*` stands for its family."""
    chosen: set[str] = set()
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name == "none":
            continue
        family = {kind for kind in FAULTS if name == "all" or kind.startswith(name.rstrip("*"))}
        found = {name} if name in FAULTS else family if name == "all" or name[-1] in "*-" else set()
        if not found:
            raise ConfigurationError(
                f"unknown fault {name!r} in --faults; choose the faults to simulate from {', '.join(FAULTS)}"
            )
        chosen |= found
    return frozenset(chosen)


def make_plan(seed: str, nodes: int, elections: int, faults: Collection[str]) -> Plan:
    chance = Random(f"plan {seed}")
    flood = "flood" in faults and chance.random() < (1.0 if len(faults) <= 3 else 0.1)
    asks = tuple(
        sorted((_ask(chance, f"e{number}", nodes, faults) for number in range(elections)), key=_when)
    )
    return Plan(
        seed=seed,
        nodes=nodes,
        asks=asks,
        faults=tuple(sorted(_faults(chance, nodes, faults), key=_when)),
        records_max=max(4, elections // 10) if flood else RECORDS_MAX,
    )


def _when(one: Ask | Fault) -> float:
    return one.at_s


def _ask(chance: Random, election_id: str, nodes: int, faults: Collection[str]) -> Ask:
    slow = "slow-handlers" in faults and chance.random() < 0.1
    return Ask(
        at_s=chance.uniform(0.5, ASKING_S),
        election_id=election_id,
        policy=Policy.AT_MOST_ONCE if chance.random() < 0.5 else Policy.AT_LEAST_ONCE,
        topic="rare" if nodes > 1 and chance.random() < 0.1 else "task",
        handler_s=chance.uniform(4.0, 25.0) if slow else chance.uniform(0.001, QUICK_S),
        succeeds=chance.random() < 0.9,
        tells=not ("client-crash" in faults and chance.random() < 0.05),
        again_s=chance.uniform(0.1, 15.0) if "client-repeat" in faults and chance.random() < 0.05 else None,
        skew_s=_skew(chance) if "skew" in faults else 0.0,
    )


def _faults(chance: Random, nodes: int, kinds: Collection[str]) -> list[Fault]:
    scripted = [kind for kind in FAULTS if kind in kinds and kind not in ON_CLIENTS]
    made: list[Fault] = []
    for kind in scripted:
        if kind in ("skew", "drift"):
            if chance.random() < 0.5:
                amount = _skew if kind == "skew" else _rate
                made += [Fault(0.0, kind, node, 0.0, amount(chance)) for node in range(nodes)]
            continue
        made += [_fault(chance, kind, nodes) for _ in range(_times(chance, kind, alone=len(scripted) <= 3))]
    return made


def _times(chance: Random, kind: str, *, alone: bool) -> int:
    """How often a kind of fault comes: a round meets some, often several at a time, rarely all."""
    if alone:
        return chance.randint(1, 4)
    if kind == "amnesia":  # it ends most of what is going on, and with it what other faults could show
        return chance.choice((0, 0, 0, 0, 1))
    return chance.choice((0, 0, 0, 1, 1, 2, 3))


def _fault(chance: Random, kind: str, nodes: int) -> Fault:
    at_s, node = chance.uniform(1.0, STORM_S * 0.8), chance.randrange(nodes)
    match kind:
        case "amnesia":
            return Fault(at_s, kind)
        case "wall-jump":
            return Fault(at_s, kind, node, 0.0, _skew(chance))
        case "pause" | "stall":
            return Fault(at_s, kind, node, chance.choice((3.0, 8.0, 9.5, 11.0, 16.0, 25.0)))
        case "loss" | "store-loss":
            return Fault(at_s, kind, node, chance.uniform(1.0, 15.0), chance.choice((0.05, 0.3, 0.7, 1.0)))
        case kind if kind in WINDOWS:
            return Fault(at_s, kind, node, chance.uniform(1.0, 20.0), chance.choice((0.1, 0.5, 1.0)))
        case kind if kind in POINTS:
            # `amount` is how many nodes it befalls before it is over.
            return Fault(at_s, kind, node, chance.uniform(0.1, 20.0), float(chance.choice((1, 1, 2, 6))))
        case _:
            return Fault(at_s, kind, node, chance.uniform(0.1, 20.0), chance.random())


def _skew(chance: Random) -> float:
    return chance.choice((0.0, chance.uniform(-3.0, 3.0), chance.uniform(-DAY_S, DAY_S)))


def _rate(chance: Random) -> float:
    return chance.uniform(0.92, 1.09)
