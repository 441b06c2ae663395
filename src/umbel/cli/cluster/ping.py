"""`umbel ping`: which workers answer."""

import click

from umbel.cli.cluster import asking
from umbel.cli.show.printing import say
from umbel.protocol.pidbox import Answers


@click.command("ping")
@asking.asks_workers
def command(question: asking.Question) -> int:
    """Check which workers answer.

    Exit code: 0 all expected workers answered, 69 none answered, 75 some did not answer.
    """
    return question.show(question.ask("ping"), _print)


def _print(answers: "Answers") -> None:
    for node, value in sorted(answers.replies.items()):
        answer = value.get("ok", value) if isinstance(value, dict) else value
        say(f"{node}: {answer}")
