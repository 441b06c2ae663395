"""The full set of simulations (`make sim`): some minutes, a table of figures, non-zero when a promise broke.

`make test` runs a slice of the same. The parts run in as many processes as there are cores. Words after the
command choose among them (`make sim ARGS="mutants exhaustive"`): under_faults, many_nodes, mutants,
exhaustive, celerys_rules.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

from tests.sim.exhaustive import explore
from tests.sim.mutants import MUTANTS
from umbel.cli.options import print_table
from umbel.protocol.leadership.coordination import Policy
from umbel.sim.plan import FAULTS, parse_faults
from umbel.sim.rounds import Tally, rounds
from umbel.sim.v1 import V1Tally, rounds_v1

SEED = os.environ.get("SEED", "full")
ELECTIONS = {1: 20_000, 2: 30_000, 3: 40_000, 5: 60_000, 9: 30_000, 16: 12_000, 25: 5_000, 50: 4_000}
CHUNK = 5_000
MANY_NODES, MANY_ELECTIONS = 1000, 200
V1_NODES, V1_ELECTIONS = (2, 3, 5, 9), 2_000


@dataclass(frozen=True)
class Part:
    """What one part found: a line of the table, and whether all is well."""

    name: str
    well: bool
    figures: str


def main(*wanted: str) -> int:
    began = time.perf_counter()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        parts = [pool.submit(run, *arguments) for run, *arguments in chosen(wanted)]
        done = [_told(part) for part in parts]
    print_table(
        ("part", "well", "figures"), [(one.name, "yes" if one.well else "NO", one.figures) for one in done]
    )
    print(f"{len(done)} parts in {time.perf_counter() - began:.0f} s")
    return 0 if all(one.well for one in done) else 1


Job = tuple[Callable[..., Part], *tuple[object, ...]]


def chosen(wanted: Sequence[str]) -> list[Job]:
    """The jobs of the parts that were named; all without a name."""
    known = {job[0].__name__ for job in jobs()}
    for name in wanted:
        if name not in known:
            sys.exit(f"there is no part {name!r}; one of {', '.join(sorted(known))}")
    return [job for job in jobs() if not wanted or job[0].__name__ in wanted]


def jobs() -> list[Job]:
    made: list[Job] = []
    made += [(exhaustive, policy) for policy in Policy]
    made.append((many_nodes,))
    for nodes, elections in sorted(ELECTIONS.items(), reverse=True):
        for chunk in range(0, elections, CHUNK):
            made.append((under_faults, nodes, min(CHUNK, elections - chunk), f"{SEED} {nodes} {chunk}"))
    made.append((mutants,))
    made += [(celerys_rules, nodes, faults) for nodes in V1_NODES for faults in ("none", "all")]
    return made


def under_faults(nodes: int, elections: int, seed: str) -> Part:
    tally, broken = Tally(), ""
    for outcome in rounds(nodes, elections, frozenset(FAULTS), seed):
        tally.add(outcome.tally)
        if outcome.violation is not None:
            broken = f"round {outcome.plan.seed!r}: {outcome.violation}"
    ended = ", ".join(f"{count} {name}" for name, count in sorted(tally.ended.items()))
    runs = f"{tally.runs} runs, {tally.extra_runs} of them again"
    return Part(f"{elections} elections, {nodes} nodes, all faults", not broken, broken or f"{ended}; {runs}")


def many_nodes() -> Part:
    tally, well = Tally(), True
    for outcome in rounds(MANY_NODES, MANY_ELECTIONS, parse_faults("none"), SEED):
        tally.add(outcome.tally)
        well = well and outcome.violation is None
    publishes, calls = tally.publishes / tally.elections, tally.store_calls / tally.elections
    decided = sorted(tally.decided_s)
    p50, p99 = decided[len(decided) // 2], decided[int(len(decided) * 0.99)]
    times = f"decided in {p50:.2f} s (p50), {p99:.2f} s (p99)"
    figures = f"{publishes:.3f} publishes and {calls:.3f} store calls for an election; {times}"
    return Part(f"{MANY_ELECTIONS} elections, {MANY_NODES} nodes, no faults", well and calls < 4.5, figures)


def mutants() -> Part:
    caught = [mutant.hunt() for mutant in MUTANTS]
    missed = [mutant.name for mutant, found in zip(MUTANTS, caught, strict=True) if found is None]
    return Part(
        "mutants", not missed, f"{len(MUTANTS) - len(missed)} of {len(MUTANTS)} caught {missed or ''}"
    )


def exhaustive(policy: Policy) -> Part:
    found = explore(policy)
    well = found.complete and found.violation is None
    return Part(
        f"every course, {policy}", well, f"{found.states:,} states, {found.violation or 'none is bad'}"
    )


def celerys_rules(nodes: int, faults: str) -> Part:
    tally = V1Tally()
    for one in rounds_v1(nodes, V1_ELECTIONS, parse_faults(faults), SEED):
        tally.add(one)
    shares = ", ".join(
        f"{name} {tally.runs[name] / tally.elections:.1%}" for name in ("none", "one", "several")
    )
    cost = f"{tally.publishes / tally.elections:.0f} publishes"
    return Part(
        f"Celery's rules, {nodes} nodes, faults: {faults}",
        True,
        f"ran by {shares}; {tally.died} died; {cost}",
    )


def _told(part: "Future[Part]") -> Part:
    found = part.result()
    print(
        f"{found.name}: {'well' if found.well else 'unhealthy'}; {found.figures}", file=sys.stderr, flush=True
    )
    return found


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
