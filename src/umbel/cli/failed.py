"""`umbel dlq` and `umbel task failed`: dead letters and retained failures: list, look into, send again,
remove.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import click
from msgspec.structs import asdict

from umbel.brokers.interface import Broker, DeadLetter, Queues
from umbel.cli import exits
from umbel.cli.broker import ask_broker
from umbel.cli.history.lake import Moment
from umbel.cli.options import (
    app_option,
    broker_option,
    even_if_used_option,
    json_option,
    print_json,
    print_table,
    say,
)
from umbel.control.failures import (
    ANY_CONTENT,
    FIELDS,
    FailedTask,
    FailureFilter,
    FilterCondition,
    RetryOutcome,
    find_failed,
    hides_everything,
    parse_condition,
    retry_failed,
)
from umbel.errors import WireError
from umbel.launch.loading import find_app
from umbel.monitor.records import letter_row
from umbel.text import lines, numbered, one_line
from umbel.wire.call import TaskHeaders, read_headers
from umbel.wire.task import to_v2

# ---- dlq -------------------------------------------------------------------------------------------
#
# `umbel dlq`: list the dead letters with their reasons, look into them, requeue or remove them.

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
            if value not in (None, "") and (name, value) != ("earlier_starts", 0):
                click.echo(f"{name:<8} {lines(str(value))}")
    return _ended(len(chosen), missing)


@command.command("requeue")
@app_option
@broker_option
@click.argument("letters", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All of them.")
@even_if_used_option
@json_option
def requeue(
    app_name: str | None,
    url: str | None,
    letters: tuple[str, ...],
    every: bool,
    even_if_used: bool,
    as_json: bool,
) -> int:
    """Requeue dead letters, named by the id or task id that `ls` shows.

    Each runs as the same task, flagged as redelivered. Its starts are counted from 0 again; `show` has
    the earlier ones. With 'signing_keys' those are signed again that a worker vouches for.
    """
    _check_choice(letters, every=every, what="requeue")

    async def give_back(broker: Queues) -> tuple[int, list[str]]:
        known = await broker.dead_letters(LIST_MAX)
        chosen, missing = (known, []) if every else _choose(known, letters)
        ids = [letter.letter_id for letter in chosen]
        return await broker.requeue_dead(ids, even_if_used=even_if_used), missing

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
    """The letters of these names, each once, and the names without a letter. A task may have several
    letters.
    """
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
    """Fields of the message itself, as far as it can be read."""
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


# ---- failed ----------------------------------------------------------------------------------------
#
# `umbel task failed`, `umbel task retry`: failed tasks whose messages are stored, and sending them again.

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
NAMES_SHOWN = 5


class Where(click.ParamType[FilterCondition]):
    """FIELD=GLOB or FIELD~PART."""

    name = "condition"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> FilterCondition:
        """Parse a condition; refuse a text that is not a condition."""
        if isinstance(value, FilterCondition):
            return value
        try:
            return parse_condition(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def filter_options(function: FunctionT) -> FunctionT:
    """Add --name, --since, --until and --where, which choose failed tasks."""
    for option in (
        click.option(
            "--where",
            type=Where(),
            multiple=True,
            metavar="FIELD=GLOB|FIELD~PART",
            help=f"Only where this holds; fields: {', '.join(FIELDS)}.",
        ),
        click.option("--until", type=Moment(), help="Failed before this time (UTC), or 15m, 2h, 3d ago."),
        click.option("--since", type=Moment(), help="Failed since this time (UTC), or 15m, 2h, 3d ago."),
        click.option("--name", default="", metavar="GLOB", help="Only tasks of this name, as in 'shop.*'."),
    ):
        function = option(function)
    return function


@click.command("failed")
@app_option
@broker_option
@filter_options
@click.option("--limit", type=click.IntRange(1, LIST_MAX), default=100, show_default=True)
@json_option
def failed(app_name: str | None, url: str | None, limit: int, as_json: bool, **filters: Any) -> int:
    """List failed tasks that can be retried, newest first: kept failures and dead letters."""
    found = _find(app_name, url, _wanted((), filters))
    rows = [_failed_row(task) for task in found[:limit]]
    if as_json:
        print_json(rows)
    else:
        columns = ("failed", "task", "task_id", "kind", "queue", "args", "kwargs", "reason")
        print_table(columns, [[row[name] for name in columns] for row in rows])
        if len(found) > limit:
            click.echo(f"{len(found) - limit} more; see --limit", err=True)
    return exits.OK


@click.command("retry")
@click.argument("task_ids", nargs=-1, metavar="[TASK_ID]...")
@app_option
@broker_option
@filter_options
@click.option("--all", "every", is_flag=True, help="All that can be retried.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@even_if_used_option
@json_option
def retry(
    app_name: str | None,
    url: str | None,
    task_ids: tuple[str, ...],
    every: bool,
    yes: bool,
    even_if_used: bool,
    as_json: bool,
    **filters: Any,
) -> int:
    """Send failed tasks again, each as a new task with the same arguments.

    Tasks are named by their ids, or chosen by filters. Those that match are counted first; then it asks.
    A new task names the old one in its header `retry_of`; the old result is unchanged. An interrupted
    command can be repeated: no task is retried twice.

    Exit code: 0; 3 if no such task is kept; 75 if some were not retried.
    """
    _check_failed_choice(task_ids, filters, every=every)
    wanted = _wanted(task_ids, filters)
    found = _find(app_name, url, wanted)
    if not found:
        click.echo("umbel: no such failed task is stored; `umbel task failed` lists those that are", err=True)
        return exits.NOT_FOUND
    if not yes:  # no connection waits for the answer: its heartbeats would stop
        click.confirm(one_line(f"Retry {_counted(found)}?"), err=True, abort=True)
    accept = _accepted(app_name, url)

    async def send(broker: Broker) -> RetryOutcome:
        return await retry_failed(broker, found, accept=accept, even_if_used=even_if_used)

    done = ask_broker(app_name, send, url=url)
    missing = [task_id for task_id in task_ids if task_id not in {task.task_id for task in found}]
    if as_json:
        print_json({"retried": done.sent, "refused": done.refused, "gone": done.gone, "missing": missing})
    else:
        _print_outcome(done, missing)
    return exits.OK if not (done.refused or done.gone or missing) else exits.PARTIAL


def _print_outcome(done: RetryOutcome, missing: Sequence[str]) -> None:
    if len(done.sent) <= NAMES_SHOWN:
        for old, new in done.sent.items():
            say(f"{old} retried as {new}")
    click.echo(f"{len(done.sent)} retried")
    for task_id, why in done.refused.items():
        say(f"umbel: {task_id} not retried: {why}", err=True)
    for task_id in done.gone:
        say(f"umbel: {task_id} not retried: its message is gone; somebody else may have retried it", err=True)
    for task_id in missing:
        say(f"umbel: no message of the task {task_id} is stored", err=True)


def _check_failed_choice(task_ids: Collection[str], filters: dict[str, Any], *, every: bool) -> None:
    if sum((bool(task_ids), any(filters.values()), every)) != 1:
        raise click.UsageError(
            "give exactly one: ids of tasks, filters (--name, --since, --until, --where), or --all"
        )


def _wanted(task_ids: Collection[str], filters: dict[str, Any]) -> FailureFilter:
    since, until = filters["since"], filters["until"]
    return FailureFilter(
        ids=frozenset(task_ids),
        name=filters["name"],
        since=since.timestamp() if since else 0.0,
        until=until.timestamp() if until else float("inf"),
        where=filters["where"],
    )


def _find(app_name: str | None, url: str | None, wanted: FailureFilter) -> list[FailedTask]:
    """Find failed tasks. Without an app it is unknown which arguments are sensitive, so all are hidden."""
    tasks = {} if url else find_app(app_name).app.tasks

    def hides(name: str | None) -> bool:
        task = tasks.get(name or "")
        return task is not None and task.options.hides is not None

    hidden = hides_everything if url else hides
    return ask_broker(app_name, lambda broker: find_failed(broker, wanted, hidden), url=url)


def _accepted(app_name: str | None, url: str | None) -> Collection[str]:
    return ANY_CONTENT if url else find_app(app_name).app.settings.accept_content


def _counted(found: Sequence[FailedTask]) -> str:
    ids = {task.task_id: task.task for task in found}
    names = Counter(ids.values()).most_common()
    shown = ", ".join(f"{count} {name}" for name, count in names[:NAMES_SHOWN])
    more = f" and {len(names) - NAMES_SHOWN} more names" if len(names) > NAMES_SHOWN else ""
    return f"{numbered(len(ids), 'failed task')} ({shown}{more})"


def _failed_row(task: FailedTask) -> dict[str, object]:
    letter = task.letter
    return {
        "failed": datetime.fromtimestamp(letter.buried_at, UTC).isoformat(timespec="seconds"),
        "task": task.task,
        "task_id": task.task_id,
        "kind": task.kind,
        "queue": letter.queue,
        "args": task.args,
        "kwargs": task.kwargs,
        "reason": letter.reason,
        "root_id": task.root_id,
        "retry_of": task.retry_of or None,
        "attempt": task.attempt,
        "starts": letter.starts,
        "sender": task.sender,
        "bytes": len(letter.message.body),
    }
