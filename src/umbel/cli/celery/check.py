"""`umbel celery check`: before switching, what a Celery project uses and what becomes of it here."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from umbel.cli import exits
from umbel.cli.options import app_option, json_option
from umbel.cli.show.printing import print_json, print_table, say
from umbel.launch.loading import find_app

if TYPE_CHECKING:
    from umbel.celery.usage import Finding


@click.command("check")
@app_option
@click.option("--all", "all_settings", is_flag=True, help="Show every setting, also those at their defaults.")
@json_option
def command(app_name: str | None, all_settings: bool, as_json: bool) -> int:
    """List what a Celery project uses, and what becomes of it under `umbel worker`.

    Shows settings, queues, schedule, options of tasks, signals, bootsteps, control commands and classes
    that are not as Celery has them by default. Sends nothing and needs no broker.

    Exit code: 0 the worker can run it, 1 something that the project uses is not supported.
    """
    found = find_app(app_name)
    if found.project is None:
        raise click.UsageError(
            f"{found.app.name} is an umbel.App, not a Celery app: there is nothing to check"
        )
    # Only now, and only for a Celery project: it needs Celery.
    from umbel.celery.loading import load
    from umbel.celery.project import CeleryProject
    from umbel.celery.usage import findings, recommendations

    assert isinstance(found.project, CeleryProject)
    app = load(found.project.app)
    listed, advice = findings(app, all_settings=all_settings), recommendations(app)
    unsupported = [one for one in findings(app) if one.is_unsupported]
    if as_json:
        print_json(
            {
                "app": app.main or "",
                "supported": not unsupported,
                "findings": [_data(one) for one in listed],
                "recommendations": advice,
            }
        )
    else:
        _print(listed, advice, unsupported)
    return exits.FAILED if unsupported else exits.OK


def _data(one: "Finding") -> dict[str, Any]:
    return {
        "group": one.group,
        "name": one.name,
        "value": one.value,
        "verdict": one.judged.verdict.value,
        "note": one.judged.note,
        "refused": one.judged.refused,
    }


def _print(listed: Sequence["Finding"], advice: Sequence[str], unsupported: Sequence["Finding"]) -> None:
    for group, found in groupby(listed, key=lambda one: one.group):
        rows = [(one.name, one.value, one.judged.verdict.value, one.judged.note) for one in found]
        print_table((group, "value", "verdict", "note"), rows)
        click.echo()
    for one in advice:
        say(f"recommended: {one}")
    if not unsupported:
        say("Nothing that the project uses is unsupported: umbel worker can run it.")
        return
    refused = [one for one in unsupported if one.judged.refused]
    say(f"{len(unsupported)} not supported: {', '.join(f'{one.group} {one.name}' for one in unsupported)}")
    if refused:
        say(
            "`umbel worker` does not start until these are changed: " + ", ".join(one.name for one in refused)
        )
