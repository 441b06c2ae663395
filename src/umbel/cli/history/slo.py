"""`umbel history slo`: was a promise kept?"""

from dataclasses import asdict
from datetime import datetime

import click

from umbel.cli import exits
from umbel.cli.history.lake import history_options
from umbel.cli.history.moments import part_options, time_options
from umbel.cli.options import json_option
from umbel.cli.show.printing import print_json, print_table
from umbel.errors import ConfigurationError
from umbel.history.query import read, require_duckdb
from umbel.history.scales import count, duration, percent
from umbel.history.slo import RATES, judge, parse_objective
from umbel.history.wanted import Wanted
from umbel.stores.interface import Where


@click.command("slo")
@click.argument("objective")
@history_options
@part_options
@time_options
@json_option
def slo(
    objective: str,
    lake: Where,
    task: str,
    queue: str,
    since: datetime | None,
    until: datetime | None,
    as_json: bool,
) -> int:
    """Say whether OBJECTIVE was kept, by which figure, and how much of its error budget was used.

    \b
    umbel history slo "p95 wait < 2s" --task 'shop.*' --since 1d
    umbel history slo "p99 run < 500ms"
    umbel history slo "p95 total < 1m"          from being sent to the end, retries included
    umbel history slo "failure rate < 1%"
    umbel history slo "success rate > 99.9%"

    A burn rate of 1 uses the whole budget: of p95, one in twenty.

    Exit code: 0 when it was kept, 1 when it was not, 2 when it is not an objective, 3 when nothing is built
    yet or nothing ended that could be judged.
    """
    try:
        wanted = parse_objective(objective)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from None
    require_duckdb()
    part = Wanted(since, until, task, queue)
    verdict = read(lake, lambda tables: judge(tables, wanted), wanted=part)
    if verdict is None:
        about = f" ({part.said()})" if part else ""
        click.echo(f"umbel: nothing ended that could be judged{about}; name another time or task", err=True)
        return exits.NOT_FOUND
    if as_json:
        print_json(asdict(verdict) | {"task": task, "queue": queue, "since": since, "until": until})
    else:
        shown = percent if wanted.measure in RATES else duration
        burn = "no budget, and it was broken" if verdict.burn_rate is None else f"{verdict.burn_rate:.3g}"
        rows = {
            "objective": verdict.objective,
            "kept": "yes" if verdict.is_kept else "no",
            "figure": shown(verdict.figure),
            "judged": count(verdict.n),
            "broke it": f"{count(verdict.n_bad)} ({percent(verdict.n_bad / verdict.n)})",
            "burn rate": burn,
        }
        print_table(("what", "value"), rows.items())
    return exits.OK if verdict.is_kept else exits.FAILED
