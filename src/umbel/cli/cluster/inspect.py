"""`umbel inspect`: ask workers what they know; nothing is changed."""

import click

from umbel.cli import completion, exits
from umbel.cli.cluster import asking
from umbel.cli.show.answers import print_answers


@click.command("inspect")
@click.argument("name", metavar="[COMMAND]", required=False, shell_complete=completion.inspect_commands)
@click.argument("words", metavar="[ARGUMENTS]...", nargs=-1)
@asking.asks_workers
def command(question: asking.Question, name: str | None, words: tuple[str, ...]) -> int:
    """Query workers with COMMAND: active, stats, registered, ... Without COMMAND, list them.

    Exit code: 0 all expected workers answered, 69 none answered, 75 some did not answer.
    """
    if name is None:
        asking.list_commands(question.app_name, changes=False)
        return exits.OK
    found = asking.find_command(question.app_name, name, changes=False)
    answers = question.ask(found.name, asking.arguments_of(found, words))
    return question.show(answers, lambda given: print_answers(found.name, given))
