"""`umbel ping`: which workers are there."""

import click

from umbel.cli import asking
from umbel.cli.options import app_option, broker_option, json_option, print_json


@click.command("ping")
@app_option
@broker_option
@asking.whom_options
@json_option
def command(
    app_name: str | None,
    url: str | None,
    destination: str | None,
    glob: str | None,
    regex: str | None,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Ask the workers whether they are there.

    Exit code: 0 all that should have answered, 69 nobody, 75 not all.
    """
    answers = asking.ask(app_name, url, asking.whom(destination, glob, regex, timeout_s), "ping", {})
    if as_json:
        print_json(asking.as_data(answers))
    else:
        for node, value in sorted(answers.replies.items()):
            answer = value.get("ok", value) if isinstance(value, dict) else value
            click.echo(f"{node}: {answer}")
    return asking.judge(answers)
