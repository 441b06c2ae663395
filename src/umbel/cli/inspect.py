"""`umbel inspect`: ask workers what they know; nothing is changed."""

import click

from umbel.cli import asking, exits
from umbel.cli.options import app_option, broker_option, json_option, print_json


@click.command("inspect")
@app_option
@broker_option
@click.argument("name", metavar="[COMMAND]", required=False)
@click.argument("words", metavar="[ARGUMENTS]...", nargs=-1)
@asking.whom_options
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
    as_json: bool,
) -> int:
    """Ask workers COMMAND: active, stats, registered, ... Without COMMAND, list them.

    Exit code: 0 all that should have answered, 69 nobody, 75 not all.
    """
    to = asking.whom(destination, glob, regex, timeout_s)
    if name is None:
        asking.list_commands(app_name, changes=False)
        return exits.OK
    found = asking.find_command(app_name, name, changes=False)
    answers = asking.ask(app_name, url, to, found.name, asking.arguments_of(found, words))
    if as_json:
        print_json(asking.as_data(answers))
    else:
        asking.print_replies(answers.replies)
    return asking.judge(answers)
