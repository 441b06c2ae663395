"""`umbel celery`: check whether Umbel supports what a Celery project uses."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from umbel.cli import exits
from umbel.cli.lazy import Lazy, LazyGroup
from umbel.cli.options import app_option, json_option, print_json, print_table, say
from umbel.launch.loading import find_app

if TYPE_CHECKING:
    from umbel.celery.usage import Finding


# ---- check -----------------------------------------------------------------------------------------


@click.command("check")
@app_option
@click.option(
    "--all", "all_settings", is_flag=True, help="Show every setting, including those with default values."
)
@json_option
def check_command(app_name: str | None, all_settings: bool, as_json: bool) -> int:
    """List the Celery features that a project uses, and whether `umbel worker` supports them.

    Shows settings, queues, schedule, task options, signals, bootsteps, control commands and classes that
    differ from Celery's defaults. Sends nothing and needs no broker.

    Exit code: 0 if the worker can run the project, 1 if it uses something that is not supported.
    """
    found = find_app(app_name)
    if found.project is None:
        raise click.UsageError(
            f"{found.app.name} is an umbel.App, not a Celery app: there is nothing to check"
        )
    # Celery is needed only here.
    from umbel.celery.loading import load
    from umbel.celery.project import CeleryProject
    from umbel.celery.usage import findings, recommendations

    assert isinstance(found.project, CeleryProject)
    app = load(found.project.app)
    listed, advice = findings(app, all_settings=all_settings), recommendations(app)
    unsupported = [finding for finding in findings(app) if finding.is_unsupported]
    if as_json:
        print_json(
            {
                "app": app.main or "",
                "supported": not unsupported,
                "findings": [_data(finding) for finding in listed],
                "recommendations": advice,
            }
        )
    else:
        _print(listed, advice, unsupported)
    return exits.FAILED if unsupported else exits.OK


def _data(finding: "Finding") -> dict[str, Any]:
    """Return a finding for --json."""
    return {
        "group": finding.group,
        "name": finding.name,
        "value": finding.value,
        "verdict": finding.judged.verdict.value,
        "note": finding.judged.note,
        "refused": finding.judged.refused,
    }


def _print(listed: Sequence["Finding"], advice: Sequence[str], unsupported: Sequence["Finding"]) -> None:
    """Print the findings by group, then the recommendations and the verdict."""
    for group, found in groupby(listed, key=lambda item: item.group):
        rows = [(item.name, item.value, item.judged.verdict.value, item.judged.note) for item in found]
        print_table((group, "value", "verdict", "note"), rows)
        click.echo()
    for item in advice:
        say(f"recommended: {item}")
    if not unsupported:
        say("Nothing that the project uses is unsupported: umbel worker can run it.")
        return
    refused = [item for item in unsupported if item.judged.refused]
    say(f"{len(unsupported)} not supported: {', '.join(f'{item.group} {item.name}' for item in unsupported)}")
    if refused:
        say(
            "`umbel worker` does not start until these are changed: "
            + ", ".join(item.name for item in refused)
        )


# ---- group -----------------------------------------------------------------------------------------

COMMANDS = {
    "check": Lazy(
        "celery:check_command", "List what a Celery project uses: works, differs, or is not supported."
    ),
}


@click.group("celery", cls=LazyGroup, places=COMMANDS)
def command() -> None:
    """Check what a Celery project uses before Umbel runs its worker."""
