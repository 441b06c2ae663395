"""How much do workers say to each other, at rest and to elect one of them, beside Celery's?

Clusters of 2, 4, 8 and 16 nodes without work, on a Redis of their own. Every PUBLISH that the server
sees is a message; those of elections are told by their channels. Each election is for a task that
the elected node sends. Beside the two stands what Celery's rules come to by the formula.

    scripts/setup bench; scripts/setup servers
    .venv/bin/python benchmarks/coordination.py [--json] [--rounds N] [--tasks ELECTIONS] [--only umbel]
"""

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._coordination.contenders import CELERY, FORMULA, UMBEL, Contender, Formula, Sizes
from benchmarks._harness.benchmark import Benchmark
from benchmarks._harness.measures import Measure, Target

ELECTIONS = 5
SIZES = Sizes()


def grow(contender: Contender | Formula, home: Path, elections: int) -> Mapping[str, float]:
    return contender.measure(home, elections, SIZES)


def _measure(kind: str, nodes: int, title: str, unit: str) -> Measure:
    return Measure(f"{kind}_{nodes}", f"{title}, {nodes} nodes", unit, higher_is_better=False)


BENCHMARK: Benchmark[Contender | Formula] = Benchmark(
    name="coordination",
    question="messages between workers, on Redis",
    contenders=(UMBEL, CELERY, FORMULA),
    stages={"a growing cluster": grow},
    measures=(
        *(_measure("election", nodes, "one election", "messages") for nodes in SIZES.nodes),
        *(_measure("store", nodes, "one election", "store calls") for nodes in SIZES.nodes),
        *(_measure("decided", nodes, "called until known how it ended", "ms") for nodes in SIZES.nodes),
        *(_measure("died", nodes, "died of an election", "nodes") for nodes in SIZES.nodes),
        *(_measure("rest", nodes, "at rest", "messages/s") for nodes in SIZES.nodes),
    ),
    targets=(Target("election_16", "formula", at_least=50.0), Target("election_16", "celery", at_least=50.0)),
    tasks=ELECTIONS,
    notes=(
        "tasks: elections at each size, of which the median is taken. Messages are those published;",
        f"at rest they are counted for {SIZES.idle_s:g} s.",
        "Celery decides by counting messages, Umbel by its store, whose calls are counted apart.",
        "Celery's workers can die of an election, with two nodes mostly: those are counted and replaced.",
    ),
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
