"""`umbel control`: send commands to workers."""

import click

from umbel.cli import completion, exits
from umbel.cli.cluster import asking
from umbel.cli.show.answers import print_replies

DESTRUCTIVE = {"shutdown", "terminate", "pool_shrink", "pool_restart", "cancel_consumer"}


@click.command("control")
@click.argument("name", metavar="[COMMAND]", required=False, shell_complete=completion.control_commands)
@click.argument("words", metavar="[ARGUMENTS]...", nargs=-1)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@asking.asks_workers
def command(question: asking.Question, name: str | None, words: tuple[str, ...], yes: bool) -> int:
    """Send COMMAND to workers: rate_limit, add_consumer, shutdown, ... Without COMMAND, list them.

    Exit code: 0 all obeyed, 1 one answered with an error, 69 none answered, 75 some did not answer.
    """
    if name is None:
        asking.list_commands(question.app_name, changes=True)
        return exits.OK
    found = asking.find_command(question.app_name, name, changes=True)
    arguments = asking.arguments_of(found, words)
    if found.name in DESTRUCTIVE and not yes:
        click.confirm(f"{' '.join([found.name, *words])} on {question.to}?", abort=True, err=True)
    if not found.is_answered:
        question.tell(found.name, arguments)
        click.echo(f"umbel: sent; workers do not answer {found.name}", err=True)
        return exits.OK
    answers = question.ask(found.name, arguments)
    code = question.show(answers, print_replies)
    failed = any(isinstance(value, dict) and "error" in value for value in answers.replies.values())
    return exits.FAILED if failed and code == exits.OK else code
