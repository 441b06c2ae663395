"""`umbel control`: tell workers what to do."""

import click

from umbel.cli import asking, exits
from umbel.cli.options import app_option, broker_option, json_option, print_json

DESTRUCTIVE = {"shutdown", "terminate", "pool_shrink", "pool_restart", "cancel_consumer"}


@click.command("control")
@app_option
@broker_option
@click.argument("name", metavar="[COMMAND]", required=False)
@click.argument("words", metavar="[ARGUMENTS]...", nargs=-1)
@asking.whom_options
@click.option("--yes", is_flag=True, help="Do not ask before what cannot be undone.")
@json_option
def command(
    app_name: str | None,
    url: str | None,
    name: str | None,
    words: tuple[str, ...],
    destination: str | None,
    glob: str | None,
    regex: str | None,
    timeout_s: float,
    yes: bool,
    as_json: bool,
) -> int:
    """Tell workers COMMAND: rate_limit, add_consumer, shutdown, ... Without COMMAND, list them.

    Exit code: 0 all obeyed, 1 one answered with an error, 69 nobody answered, 75 not all.
    """
    to = asking.whom(destination, glob, regex, timeout_s)
    if name is None:
        asking.list_commands(app_name, changes=True)
        return exits.OK
    found = asking.find_command(app_name, name, changes=True)
    arguments = asking.arguments_of(found, words)
    if found.name in DESTRUCTIVE and not yes:
        who = destination or glob or regex or "all workers"
        click.confirm(f"{' '.join([found.name, *words])} on {who}?", abort=True, err=True)
    if not found.is_answered:
        asking.tell(app_name, url, to, found.name, arguments)
        click.echo(f"umbel: sent; {found.name} is not answered", err=True)
        return exits.OK
    answers = asking.ask(app_name, url, to, found.name, arguments)
    if as_json:
        print_json(asking.as_data(answers))
    else:
        asking.print_replies(answers.replies)
    code = asking.judge(answers)
    failed = any(isinstance(value, dict) and "error" in value for value in answers.replies.values())
    return exits.FAILED if failed and code == exits.OK else code
