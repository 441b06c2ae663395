"""`umbel dlq`: list the dead letters with their reasons, and requeue them."""

import click
from msgspec.structs import asdict

from umbel.brokers.interface import Queues
from umbel.cli import exits
from umbel.cli.broker import ask_broker
from umbel.cli.options import app_option, json_option
from umbel.cli.show.printing import print_json, print_table
from umbel.monitor.messages import letter_row

LIST_MAX = 100_000


@click.group("dlq")
def command() -> None:
    """The dead letters: tasks that could not be run."""


@command.command("ls")
@app_option
@click.option("--limit", type=click.IntRange(1, LIST_MAX), default=100, show_default=True)
@json_option
def ls(app_name: str | None, limit: int, as_json: bool) -> int:
    """List the dead letters, newest first, with the reason for each."""
    letters = ask_broker(app_name, lambda broker: broker.dead_letters(limit))
    rows = [asdict(letter_row(letter)) for letter in letters]
    if as_json:
        print_json(rows)
    else:
        columns = ("id", "buried", "queue", "task", "task_id", "starts", "reason")
        print_table(columns, [[row[column] for column in columns] for row in rows])
    return exits.OK


@command.command("requeue")
@app_option
@click.argument("letters", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All of them.")
@json_option
def requeue(app_name: str | None, letters: tuple[str, ...], every: bool, as_json: bool) -> int:
    """Requeue dead letters, named by the id or task id that `ls` shows."""
    if every == bool(letters):
        raise click.UsageError("name the dead letters to requeue, or give --all")

    async def give_back(broker: Queues) -> tuple[int, list[str]]:
        known = await broker.dead_letters(LIST_MAX)
        chosen = {
            name: letter for letter in known for name in (str(letter.letter_id), letter_row(letter).task_id)
        }
        missing = [name for name in letters if name not in chosen]
        ids = [letter.letter_id for letter in known] if every else []
        ids += [chosen[name].letter_id for name in letters if name in chosen]
        return await broker.requeue_dead(list(dict.fromkeys(ids))), missing

    returned, missing = ask_broker(app_name, give_back)
    if as_json:
        print_json({"requeued": returned, "missing": missing})
    else:
        click.echo(f"{returned} requeued")
    for name in missing:
        click.echo(f"umbel: unknown dead letter {name!r}; `umbel dlq ls` lists them", err=True)
    if missing:
        return exits.PARTIAL if returned else exits.NOT_FOUND
    return exits.OK
