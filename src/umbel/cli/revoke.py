"""`umbel revoke`: see to it that tasks never start, or end those that run."""

from time import time
from typing import Any

import click

from umbel.cli import asking, exits
from umbel.cli.options import app_option, json_option, print_json


@click.command("revoke")
@app_option
@click.argument("task_ids", metavar="ID...", nargs=-1, required=True)
@click.option("--terminate", is_flag=True, help="End the processes that run them now.")
@click.option("--signal", "signal_name", metavar="SIGNAL", help="What to end them with; else SIGTERM.")
@click.option("--timeout", "timeout_s", type=float, default=1.0, show_default=True, help="In seconds.")
@click.option("--yes", is_flag=True, help="Do not ask before running tasks are ended.")
@json_option
def command(
    app_name: str | None,
    task_ids: tuple[str, ...],
    terminate: bool,
    signal_name: str | None,
    timeout_s: float,
    yes: bool,
    as_json: bool,
) -> int:
    """Revoke tasks by their IDs; it holds although no worker is up.

    Exit code: 0 recorded, and all workers know; 75 recorded, but some workers did not answer.
    """
    from umbel.app.control import REVOKE_RETENTION_S
    from umbel.app.loading import find_app

    to = asking.whom(None, None, None, timeout_s)
    if terminate and not yes:
        click.confirm(f"end the processes that run {', '.join(task_ids)}?", abort=True, err=True)
    app = find_app(app_name).app
    arguments: dict[str, Any] = {"task_id": list(task_ids), "recorded": True}
    if terminate:
        arguments |= {"terminate": True, "signal": signal_name or "SIGTERM"}
    try:
        app.revoke(task_ids, expires_at=time() + REVOKE_RETENTION_S)
        answers = app.control.ask("revoke", arguments, timeout=to.timeout_s)
    finally:
        app.close()
    if as_json:
        print_json({"recorded": list(task_ids), **asking.as_data(answers)})
    else:
        asking.print_replies(answers.replies)
    if not answers.replies:
        click.echo("umbel: recorded; no worker is up to be told", err=True)
        return exits.OK
    return asking.judge(answers)
