"""`umbel revoke`: prevent tasks from starting, or end those that run; or undo that."""

from time import time
from typing import Any

import click

from umbel.cli import exits
from umbel.cli.cluster import asking
from umbel.cli.options import app_option, json_option, timeout_option
from umbel.cli.show.answers import print_replies
from umbel.control.state import REVOKE_RETENTION_S
from umbel.launch.loading import find_app


@click.command("revoke")
@app_option
@click.argument("task_ids", metavar="ID...", nargs=-1, required=True)
@click.option(
    "--terminate", is_flag=True, help="Also end running tasks; TaskCancelled is raised in them first."
)
@click.option(
    "--signal",
    "signal_name",
    metavar="SIGNAL",
    help="End running tasks at once: send this signal to their processes.",
)
@click.option("--undo", is_flag=True, help="Cancel the revoke; tasks that were not refused yet may start.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@timeout_option
@json_option
def command(
    app_name: str | None,
    task_ids: tuple[str, ...],
    terminate: bool,
    signal_name: str | None,
    undo: bool,
    yes: bool,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Revoke tasks by their IDs; it also works while no worker is running.

    Exit code: 0 recorded and all workers answered; 75 recorded, but some workers did not answer.
    """

    question = asking.Question(app_name, None, asking.whom(None, None, None, timeout_s), as_json)
    if undo and (terminate or signal_name):
        raise click.UsageError(
            "--undo cannot be combined with --terminate or --signal; ended tasks stay ended"
        )
    if (terminate or signal_name) and not yes:
        click.confirm(f"end {', '.join(task_ids)} if running?", abort=True, err=True)
    app = find_app(app_name).app
    arguments: dict[str, Any] = {"task_id": list(task_ids), "recorded": True}
    if terminate or signal_name:
        arguments |= {"terminate": True, "signal": signal_name or "SIGTERM"}
    try:
        app.revoke(task_ids, expires_at=time() + (0.0 if undo else REVOKE_RETENTION_S))
        answers = app.control.ask("unrevoke" if undo else "revoke", arguments, timeout=timeout_s)
        capabilities = app.producer.capabilities
    finally:
        app.close()
    if not capabilities.revokes:
        click.echo(f"umbel: the revoke is not recorded: {capabilities.why_not('revokes')}", err=True)
    if answers.replies or as_json:
        code = question.show(answers, print_replies, recorded=list(task_ids))
        return code if answers.replies else exits.OK
    if not capabilities.revokes:
        click.echo("umbel: no worker is running", err=True)
        return exits.NOBODY_ANSWERED
    click.echo("umbel: revoke recorded; no worker is running", err=True)
    return exits.OK
