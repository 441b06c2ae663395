"""`umbel simulate`: simulate elections in virtual time, inject faults, and check the guarantees.

No process is started and no message is sent: the simulation runs the same state machines as the workers,
thousands of elections in a second. A violated guarantee ends the run, which prints the seed and the smallest
script that still violates it; `--replay` runs either again.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from umbel.cli import exits
from umbel.cli.options import json_option, print_json, print_table
from umbel.errors import ConfigurationError
from umbel.sim.plan import FAULTS, Plan, make_plan, parse_faults
from umbel.sim.rounds import Outcome, Tally, hash_of_hashes, round_size, rounds, run_plan, shrink
from umbel.sim.v1 import V1Tally, rounds_v1

NODES_MAX = 1000


@click.command("simulate")
@click.option("--nodes", type=click.IntRange(1, NODES_MAX), default=5, show_default=True)
@click.option("--elections", type=click.IntRange(1, 10_000_000), default=2000, show_default=True)
@click.option("--faults", "faults_text", default="all", show_default=True, metavar="none|all|NAME,NAME…")
@click.option("--seed", default="1", show_default=True, help="Seed of the random numbers.")
@click.option("--protocol", type=click.Choice(["v1", "v2"]), default="v2", show_default=True)
@click.option("--replay", metavar="SEED:ROUND|FILE", help="Replay one round (SEED:ROUND) or a script file.")
@click.option("--list-faults", is_flag=True, help="List the faults.")
@json_option
def command(
    nodes: int,
    elections: int,
    faults_text: str,
    seed: str,
    protocol: str,
    replay: str | None,
    list_faults: bool,
    as_json: bool,
) -> int:
    """Simulate elections under faults, and check every guarantee."""

    if list_faults:
        print_json(FAULTS) if as_json else print_table(("fault", "what happens"), FAULTS.items())
        return exits.OK
    faults = parse_faults(faults_text)
    if protocol == "v1":
        return _simulate_v1(nodes, elections, faults, seed, as_json=as_json)
    if replay is not None:
        return _replay(replay, nodes, elections, faults, as_json=as_json)
    return _simulate(nodes, elections, faults, seed, as_json=as_json)


def _simulate(nodes: int, elections: int, faults: frozenset[str], seed: str, *, as_json: bool) -> int:
    """Simulate elections of protocol v2, and report the figures or a violated guarantee."""

    tally, hashes, broken = Tally(), [], None
    began = time.perf_counter()
    for outcome in _shown(rounds(nodes, elections, faults, seed), elections):
        tally.add(outcome.tally)
        hashes.append(outcome.trace_hash)
        broken = outcome if outcome.violation is not None else None
    took_s = time.perf_counter() - began
    figures = {"protocol": "v2", "nodes": nodes, "faults": sorted(faults), "seed": seed}
    figures |= _figures(tally, took_s) | {"trace_hash": hash_of_hashes(hashes)}
    figures["violations"] = [] if broken is None else [broken.violation]
    if broken is None:
        print_json(figures) if as_json else _print_figures(figures)
        return exits.OK
    return _report_violation(broken, figures, as_json=as_json)


def _simulate_v1(nodes: int, elections: int, faults: frozenset[str], seed: str, *, as_json: bool) -> int:
    """Simulate elections by Celery's rules, and count their outcomes. These rules guarantee nothing, so
    nothing is checked.
    """

    tally = V1Tally()
    began = time.perf_counter()
    for outcome in rounds_v1(nodes, elections, faults, seed):
        tally.add(outcome)
    took_s = time.perf_counter() - began
    figures = {"protocol": "v1", "nodes": nodes, "faults": sorted(faults), "seed": seed}
    figures |= {
        "elections": tally.elections,
        "runs": {name: tally.runs[name] for name in ("none", "one", "several")},
        "failed_share": round(1 - tally.runs["one"] / tally.elections, 4),
        "workers_that_died_of_it": tally.died,
        "publishes_per_election": round(tally.publishes / tally.elections, 3),
        "deliveries_per_election": round(tally.deliveries / tally.elections, 3),
        "took_s": round(took_s, 2),
    }
    print_json(figures) if as_json else _print_figures(figures)
    return exits.OK


def _replay(replay: str, nodes: int, elections: int, faults: frozenset[str], *, as_json: bool) -> int:
    """Replay one round, by its number or from the file of a script."""

    if Path(replay).is_file():
        try:
            plan = msgspec.json.decode(Path(replay).read_bytes(), type=Plan)
        except msgspec.DecodeError as error:
            raise ConfigurationError(
                f"{replay} is not a replay script of `umbel simulate`: {error}"
            ) from None
    else:
        number = replay.rpartition(":")[2]
        if not number.isdecimal():
            raise ConfigurationError(f"{replay!r} is neither SEED:ROUND nor the file of a replay script")
        plan = make_plan(replay, nodes, round_size(elections, int(number)), faults)
    outcome = run_plan(plan)
    figures = {"nodes": plan.nodes, "seed": plan.seed, "elections": len(plan.asks)}
    figures |= {"trace_hash": outcome.trace_hash, "events": outcome.tally.events}
    figures["violations"] = [] if outcome.violation is None else [outcome.violation]
    if as_json:
        print_json(figures)
    else:
        print_table(("what", "value"), figures.items())
        for line in outcome.last_lines if outcome.violation else ():
            click.echo(line, err=True)
    return exits.OK if outcome.violation is None else exits.FAILED


def _report_violation(broken: "Outcome", figures: dict[str, Any], *, as_json: bool) -> int:
    """Report a violated guarantee: the seed, the smallest script that violates it, and how to replay it."""

    click.echo("a guarantee was violated; searching for a smaller script", err=True)
    small = shrink(broken)
    script = msgspec.json.encode(small.plan, enc_hook=str)
    if as_json:
        print_json(figures | {"script": msgspec.Raw(script), "script_breaks": small.violation})
    else:
        _print_figures(figures)
        click.echo(msgspec.json.format(script, indent=1))
    click.echo(f"violated: {broken.violation}", err=True)
    click.echo(f"in round {broken.plan.seed}; the script above violates: {small.violation}", err=True)
    click.echo("replay the script with --replay FILE", err=True)
    return exits.FAILED


def _figures(tally: "Tally", took_s: float) -> dict[str, Any]:
    """Return the figures of a simulation."""
    elections = max(tally.elections, 1)
    decided = sorted(tally.decided_s)
    return {
        "elections": tally.elections,
        "rounds": tally.rounds,
        "ended": dict(sorted(tally.ended.items())),
        "runs": tally.runs,
        "extra_runs": tally.extra_runs,
        "publishes_per_election": round(tally.publishes / elections, 3),
        "deliveries_per_election": round(tally.deliveries / elections, 3),
        "store_calls_per_election": round(tally.store_calls / elections, 3),
        "lease_and_sweep_calls": tally.lease_calls,
        "decision_s": {"p50": _share(decided, 0.5), "p99": _share(decided, 0.99)},
        "faults_that_happened": dict(sorted(tally.counts.items())),
        "steps": tally.events,
        "took_s": round(took_s, 2),
        "elections_per_s": round(tally.elections / took_s),
    }


def _share(ordered: list[float], share: float) -> float | None:
    """Return a percentile of sorted values; None without values."""
    return round(ordered[int(len(ordered) * share)], 3) if ordered else None


def _print_figures(figures: dict[str, Any]) -> None:
    """Print figures as a table with one row for each."""

    def flat(value: Any) -> object:
        if isinstance(value, dict):
            return ", ".join(f"{name} {part}" for name, part in value.items())
        return ", ".join(map(str, value)) or "none" if isinstance(value, list) else value

    print_table(("what", "value"), [(name.replace("_", " "), flat(value)) for name, value in figures.items()])


def _shown(outcomes: Iterable["Outcome"], elections: int) -> Iterator["Outcome"]:
    """Yield the outcomes, and show a progress bar on a terminal."""
    if not sys.stderr.isatty():
        yield from outcomes
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("elections", total=elections)
        for outcome in outcomes:
            yield outcome
            progress.update(bar, advance=outcome.tally.elections)
