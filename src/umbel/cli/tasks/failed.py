"""`umbel task failed`, `umbel task retry`: failed tasks whose messages are kept, and sending them again."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

from umbel.cli import exits
from umbel.cli.broker import ask_broker
from umbel.cli.history.moments import Moment
from umbel.cli.options import app_option, broker_option, json_option
from umbel.cli.show.printing import print_json, print_table, say
from umbel.coordination.failures import (
    ANY_CONTENT,
    FIELDS,
    Condition,
    FailedTask,
    Retried,
    Wanted,
    find_failed,
    hides_everything,
    parse_condition,
    retry_failed,
)
from umbel.launch.loading import find_app
from umbel.text import numbered, one_line

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
LIST_MAX = 100_000
NAMES_SHOWN = 5


class Where(click.ParamType[Condition]):
    """FIELD=GLOB or FIELD~PART."""

    name = "condition"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Condition:
        if isinstance(value, Condition):
            return value
        try:
            return parse_condition(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def filter_options(function: FunctionT) -> FunctionT:
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
    rows = [_row(one) for one in found[:limit]]
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
@json_option
def retry(
    app_name: str | None,
    url: str | None,
    task_ids: tuple[str, ...],
    every: bool,
    yes: bool,
    as_json: bool,
    **filters: Any,
) -> int:
    """Send failed tasks again, each as a new task with the same arguments.

    Tasks are named by their ids, or chosen by filters. Those that match are counted first; then it asks.
    A new task names the old one in its header `retry_of`; the old result stays as it is. What is interrupted
    can be repeated: no task is retried twice.

    Exit code: 0; 3 if no such task is kept; 75 if some were not retried.
    """
    _check_choice(task_ids, filters, every=every)
    wanted = _wanted(task_ids, filters)
    found = _find(app_name, url, wanted)
    if not found:
        click.echo("umbel: no such failed task is kept; `umbel task failed` lists those that are", err=True)
        return exits.NOT_FOUND
    if not yes:  # no connection waits for the answer: its heartbeats would stop
        click.confirm(one_line(f"Retry {_counted(found)}?"), err=True, abort=True)
    accept = _accepted(app_name, url)
    done = ask_broker(app_name, lambda broker: retry_failed(broker, found, accept=accept), url=url)
    missing = [one for one in task_ids if one not in {task.task_id for task in found}]
    if as_json:
        told = {"retried": done.sent, "refused": done.refused, "gone": done.gone, "missing": missing}
        print_json(told)
    else:
        _tell(done, missing)
    return exits.OK if not (done.refused or done.gone or missing) else exits.PARTIAL


def _tell(done: Retried, missing: Sequence[str]) -> None:
    if len(done.sent) <= NAMES_SHOWN:
        for old, new in done.sent.items():
            say(f"{old} retried as {new}")
    click.echo(f"{len(done.sent)} retried")
    for task_id, why in done.refused.items():
        say(f"umbel: {task_id} not retried: {why}", err=True)
    for task_id in done.gone:
        say(f"umbel: {task_id} not retried: its message is gone; somebody else may have retried it", err=True)
    for task_id in missing:
        say(f"umbel: no message of the task {task_id} is kept", err=True)


def _check_choice(task_ids: Collection[str], filters: dict[str, Any], *, every: bool) -> None:
    if sum((bool(task_ids), any(filters.values()), every)) != 1:
        raise click.UsageError(
            "give exactly one: ids of tasks, filters (--name, --since, --until, --where), or --all"
        )


def _wanted(task_ids: Collection[str], filters: dict[str, Any]) -> Wanted:
    since, until = filters["since"], filters["until"]
    return Wanted(
        ids=frozenset(task_ids),
        name=filters["name"],
        since=since.timestamp() if since else 0.0,
        until=until.timestamp() if until else float("inf"),
        where=filters["where"],
    )


def _find(app_name: str | None, url: str | None, wanted: Wanted) -> list[FailedTask]:
    """Without an app nobody knows which arguments are sensitive: then none that may be is shown."""
    tasks = {} if url else find_app(app_name).app.tasks

    def hides(name: str | None) -> bool:
        task = tasks.get(name or "")
        return task is not None and task.options.hides is not None

    hidden = hides_everything if url else hides
    return ask_broker(app_name, lambda broker: find_failed(broker, wanted, hidden), url=url)


def _accepted(app_name: str | None, url: str | None) -> Collection[str]:
    return ANY_CONTENT if url else find_app(app_name).app.settings.accept_content


def _counted(found: Sequence[FailedTask]) -> str:
    ids = {one.task_id: one.task for one in found}
    names = Counter(ids.values()).most_common()
    shown = ", ".join(f"{count} {name}" for name, count in names[:NAMES_SHOWN])
    more = f" and {len(names) - NAMES_SHOWN} more names" if len(names) > NAMES_SHOWN else ""
    return f"{numbered(len(ids), 'failed task')} ({shown}{more})"


def _row(one: FailedTask) -> dict[str, object]:
    letter = one.letter
    return {
        "failed": datetime.fromtimestamp(letter.buried_at, UTC).isoformat(timespec="seconds"),
        "task": one.task,
        "task_id": one.task_id,
        "kind": one.kind,
        "queue": letter.queue,
        "args": one.args,
        "kwargs": one.kwargs,
        "reason": letter.reason,
        "root_id": one.root_id,
        "retry_of": one.retry_of or None,
        "sender": one.sender,
        "bytes": len(letter.message.body),
    }
