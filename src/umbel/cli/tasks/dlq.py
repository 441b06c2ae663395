"""`umbel dlq`: list the dead letters with their reasons, look into them, requeue or remove them."""

from collections.abc import Iterable, Sequence

import click
from msgspec.structs import asdict

from umbel.brokers.interface import DeadLetter, Queues
from umbel.cli import exits
from umbel.cli.broker import ask_broker
from umbel.cli.options import app_option, broker_option, json_option
from umbel.cli.show.printing import print_json, print_table, say
from umbel.errors import WireError
from umbel.monitor.messages import letter_row
from umbel.text import lines
from umbel.wire.compat.legacy import to_v2
from umbel.wire.task import TaskHeaders, read_headers

LIST_MAX = 100_000


@click.group("dlq")
def command() -> None:
    """The dead letters: tasks that could not be run."""


@command.command("ls")
@app_option
@broker_option
@click.option("--limit", type=click.IntRange(1, LIST_MAX), default=100, show_default=True)
@json_option
def ls(app_name: str | None, url: str | None, limit: int, as_json: bool) -> int:
    """List the dead letters, newest first, with the reason for each."""
    letters = ask_broker(app_name, lambda broker: broker.dead_letters(limit), url=url)
    rows = [_row(letter) for letter in letters]
    if as_json:
        print_json(rows)
    else:
        columns = ("id", "buried", "queue", "task", "task_id", "starts", "reason")
        print_table(columns, [[row[column] for column in columns] for row in rows])
    return exits.OK


@command.command("show")
@app_option
@broker_option
@click.argument("letters", nargs=-1, required=True)
@json_option
def show(app_name: str | None, url: str | None, letters: tuple[str, ...], as_json: bool) -> int:
    """Show all that is known of dead letters, named by the id or task id that `ls` shows."""
    known = ask_broker(app_name, lambda broker: broker.dead_letters(LIST_MAX), url=url)
    chosen, missing = _choose(known, letters)
    rows = [_row(letter) | _more(letter) for letter in chosen]
    if as_json:
        print_json(rows)
    for number, row in enumerate(() if as_json else rows):
        if number:
            click.echo()
        for name, value in row.items():
            if value not in (None, ""):
                click.echo(f"{name:<9}{lines(str(value))}")
    return _ended(len(chosen), missing)


@command.command("requeue")
@app_option
@broker_option
@click.argument("letters", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All of them.")
@json_option
def requeue(
    app_name: str | None, url: str | None, letters: tuple[str, ...], every: bool, as_json: bool
) -> int:
    """Requeue dead letters, named by the id or task id that `ls` shows."""
    _check_choice(letters, every=every, what="requeue")

    async def give_back(broker: Queues) -> tuple[int, list[str]]:
        known = await broker.dead_letters(LIST_MAX)
        chosen, missing = (known, []) if every else _choose(known, letters)
        return await broker.requeue_dead([letter.letter_id for letter in chosen]), missing

    returned, missing = ask_broker(app_name, give_back, url=url)
    if as_json:
        print_json({"requeued": returned, "missing": missing})
    else:
        click.echo(f"{returned} requeued")
    return _ended(returned, missing)


@command.command("drop")
@app_option
@broker_option
@click.argument("letters", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All of them.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
def drop(
    app_name: str | None, url: str | None, letters: tuple[str, ...], every: bool, yes: bool, as_json: bool
) -> int:
    """Remove dead letters for good, named by the id or task id that `ls` shows."""
    _check_choice(letters, every=every, what="drop")

    known = ask_broker(app_name, lambda broker: broker.dead_letters(LIST_MAX), url=url)
    chosen, missing = (known, []) if every else _choose(known, letters)
    if chosen and not yes:  # no connection waits for the answer: its heartbeats would stop
        click.confirm(f"Remove {len(chosen)} dead letters for good?", err=True, abort=True)
    ids = [letter.letter_id for letter in chosen]
    dropped = ask_broker(app_name, lambda broker: broker.drop_dead(ids), url=url) if ids else 0
    if as_json:
        print_json({"dropped": dropped, "missing": missing})
    else:
        click.echo(f"{dropped} dropped")
    return _ended(dropped, missing)


def _check_choice(letters: tuple[str, ...], *, every: bool, what: str) -> None:
    if every == bool(letters):
        raise click.UsageError(f"name the dead letters to {what}, or give --all")


def _choose(known: Sequence[DeadLetter], names: Iterable[str]) -> tuple[Sequence[DeadLetter], list[str]]:
    """The letters of these names, each once, and the names that no letter has. A task may have several."""
    by_name: dict[str, list[DeadLetter]] = {}
    for letter in known:
        for name in {str(letter.letter_id), letter_row(letter).task_id}:
            by_name.setdefault(name, []).append(letter)
    chosen = {letter.letter_id: letter for name in names for letter in by_name.get(name, ())}
    return list(chosen.values()), [name for name in names if name not in by_name]


def _ended(done: int, missing: Sequence[str]) -> int:
    for name in missing:
        say(f"umbel: unknown dead letter {name!r}; `umbel dlq ls` lists them", err=True)
    if missing:
        return exits.PARTIAL if done else exits.NOT_FOUND
    return exits.OK


def _row(letter: DeadLetter) -> dict[str, object]:
    return asdict(letter_row(letter))


def _more(letter: DeadLetter) -> dict[str, object]:
    """What the message itself says, as far as it can be read."""
    headers, message = _headers(letter), letter.message
    size: dict[str, object] = {"priority": message.priority, "bytes": len(message.body)}
    if headers is None:
        return size
    return {
        "attempt": headers.retries,
        "args": headers.argsrepr,
        "kwargs": headers.kwargsrepr,
        "sender": headers.origin,
        "root_id": headers.root_id,
        "parent_id": headers.parent_id,
        "eta": headers.eta,
        "expires": headers.expires,
        **size,
    }


def _headers(letter: DeadLetter) -> "TaskHeaders | None":

    try:
        return read_headers(to_v2(letter.message))
    except WireError:
        return None
