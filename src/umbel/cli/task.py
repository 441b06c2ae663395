"""`umbel task show`: the history of one task, from all sources that know it.

The lake and its tables contain recorded events, the broker's event log those that are not recorded yet, and
the result backend contains the result. Every source that exists is queried; none is required.
"""

from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import click
import msgspec

from umbel.brokers.interface import EventLog
from umbel.cli import exits
from umbel.cli.broker import ask_broker
from umbel.cli.failed import failed, retry
from umbel.cli.history.lake import lake_option
from umbel.cli.options import app_option, broker_option, json_option, print_json, print_table, say
from umbel.errors import AppNotFound, BadMessage
from umbel.events.types import TaskEvent
from umbel.events.view import EventReader
from umbel.history.lake import Lake
from umbel.history.query import require_duckdb
from umbel.history.story import (
    Link,
    Story,
    events_in_files,
    links_in_events,
    links_in_files,
    links_in_tables,
    rows_in_tables,
    story_of,
)
from umbel.launch.loading import find_app
from umbel.protocol.delivery.states import READY_STATES
from umbel.stores.interface import Where
from umbel.text import one_line
from umbel.wire.event import decode_events
from umbel.wire.result import ResultMap, decode_result

READ_AT_ONCE = 5000
LOG_MAX = 500_000
LINE_MAX = 20  # limit of shown tasks in a chain of retries
SHOWN = (
    "name",
    "args",
    "kwargs",
    "worker",
    "retries",
    "queue",
    "parent_id",
    "root_id",
    "result",
    "exception",
)


@click.group("task")
def command() -> None:
    """Show the history of a task; list and retry failed tasks."""


command.add_command(failed)
command.add_command(retry)


@command.command("show")
@click.argument("task_id")
@app_option
@broker_option
@lake_option
@json_option
def show(task_id: str, app_name: str | None, url: str | None, lake: Where, as_json: bool) -> int:
    """Show all events of TASK_ID in causal order, and its result.

    The sources are the lake (--lake), the event log of the broker (the app's, or -b URL; not on RabbitMQ,
    where only the recorder can read it) and the app's result backend. A task that was retried, or is a
    retry, is shown with the other tasks of its chain of retries.

    Exit code: 0, or 3 if the task is unknown.
    """

    def ask(asked_id: str) -> _TaskFacts:
        return _ask(asked_id, app_name, url, lake)

    known = ask(task_id)
    if known.story is None and known.result is None and not known.links:
        click.echo(
            f"umbel: unknown task {task_id}: it has no events in the lake {str(lake)!r} and no"
            " result; name another lake with --lake, or the app with -A",
            err=True,
        )
        return exits.NOT_FOUND
    others, left_out = _line(known, ask)
    if as_json:
        line = [_as_data(task) for task in others]
        print_json(_as_data(known) | {"line": line, "line_left_out": left_out})
    else:
        for task in (known, *others):
            _print(task)
        if left_out:
            click.echo(f"umbel: {left_out} more tasks of this chain of retries are not shown", err=True)
    return exits.OK


class _TaskFacts(NamedTuple):
    """Everything that the sources contain about one task."""

    task_id: str
    story: Story | None
    result: ResultMap | None
    links: set[Link]

    @property
    def retry_of(self) -> list[str]:
        """The tasks that this task retries."""
        return [link.old for link in self.links if link.new == self.task_id]

    @property
    def retried_as(self) -> list[str]:
        """The tasks that retry this task."""
        return sorted(link.new for link in self.links if link.old == self.task_id)


class _RetryChain(NamedTuple):
    others: list[_TaskFacts]
    left_out: int  # further tasks that are known, beyond the limit


def _line(first: _TaskFacts, ask: Callable[[str], _TaskFacts]) -> _RetryChain:
    """Follow retries in both directions from a task, up to LINE_MAX tasks including this one."""
    seen, found, waiting = {first.task_id}, list[_TaskFacts](), deque([first])
    while waiting:
        task = waiting.popleft()
        for other in (*task.retry_of, *task.retried_as):
            if other in seen:
                continue
            seen.add(other)
            if len(found) + 1 < LINE_MAX:
                found.append(ask(other))
                waiting.append(found[-1])
    return _RetryChain(found, len(seen) - 1 - len(found))


def _ask(task_id: str, app_name: str | None, url: str | None, lake: Where) -> _TaskFacts:
    """Collect the events, the result and the retries of one task from all sources."""
    logged, result = _ask_cluster(app_name, url, task_id)
    links = {link for link in links_in_events(logged) if task_id in link}
    found = Lake(lake)
    if not found.store.is_there():
        return _TaskFacts(task_id, story_of(task_id, logged), result, links)
    require_duckdb()
    files = found.event_files()
    events = [*events_in_files(found.store, files, task_id), *logged]
    story = story_of(task_id, events, rows_in_tables(lake, task_id))
    return _TaskFacts(
        task_id,
        story,
        result,
        links | links_in_files(found.store, files, task_id) | links_in_tables(lake, task_id),
    )


def _ask_cluster(
    app_name: str | None, url: str | None, task_id: str
) -> "tuple[list[TaskEvent], ResultMap | None]":
    """Return the events in the broker's log and the stored result; nothing if there is neither an app nor a
    broker.
    """

    if url is not None:
        return ask_broker(None, lambda broker: _logged(broker, task_id), url=url), None
    try:
        app = find_app(app_name).app
    except AppNotFound:
        if app_name is not None:
            raise
        return [], None
    stored = app.backend.read([task_id]).get(task_id)
    logged = ask_broker(app_name, lambda broker: _logged(broker, task_id))
    return logged, decode_result(stored.payload) if stored else None


async def _logged(broker: EventLog, task_id: str) -> "list[TaskEvent]":
    """Return the events that no recorder has acknowledged yet. Reading them does not remove them."""

    if not broker.capabilities.event_log or broker.capabilities.transport == "amqp":
        return []
    wanted, reader, found = task_id.encode(), EventReader(), []
    for name in await broker.recorders():
        place = 0
        for _ in range(LOG_MAX // READ_AT_ONCE):
            entries = await broker.read_events(name, READ_AT_ONCE, after=place)
            if not entries:
                break
            place = entries[-1].offset
            for entry in entries:
                if wanted not in entry.body:
                    continue
                try:
                    events = [reader.read(event) for event in decode_events(entry.body)]
                except BadMessage:
                    continue
                found += [read for read in events if isinstance(read, TaskEvent) and _is_about(read, task_id)]
    return found


def _is_about(event: TaskEvent, task_id: str) -> bool:
    """Return whether an event belongs to the task or records its retry."""
    return event.uuid == task_id or any(link.old == task_id for link in links_in_events([event]))


def _as_data(known: _TaskFacts) -> dict[str, Any]:
    """Return the facts about a task for --json."""
    story, result = known.story, known.result
    return {
        "task_id": known.task_id,
        "state": _state(story, result),
        "retry_of": next(iter(known.retry_of), None),
        "retried_as": known.retried_as,
        "task": msgspec.to_builtins(story.record) if story and story.record else None,
        "result": None if result is None else {"status": result.status, "result": result.result},
        "timeline": [
            {
                "rank": rank,
                **{name: getattr(event, name) for name in event.__struct_fields__ if name != "order"},
                "at": _instant(event.timestamp),
            }
            for rank, event in enumerate(story.events if story else (), start=1)
        ],
    }


def _print(known: _TaskFacts) -> None:
    """Print the facts about a task, then its events as a table."""
    story, result = known.story, known.result
    click.echo(f"{click.style(one_line(known.task_id), bold=True)}: {one_line(_state(story, result))}")
    for old in known.retry_of:
        say(f"    retry of: {old}")
    for new in known.retried_as:
        say(f"    retried as: {new}")
    record = story.record if story else None
    for name in SHOWN:
        value = getattr(record, name, None)
        if value is not None:
            say(f"    {name.replace('_', ' ')}: {value}")
    if story is None:
        click.echo("umbel: no events of the task were recorded; showing its result only", err=True)
        return
    click.echo()
    rows = [
        (
            rank,
            "" if event.attempt is None else event.attempt,
            event.clock or "",
            _instant(event.timestamp),
            event.type,
            event.hostname,
            " ".join((event.detail or "").split())[:120],
        )
        for rank, event in enumerate(story.events, start=1)
    ]
    print_table(("", "attempt", "clock", "at (UTC)", "event", "reported by", "detail"), rows)


def _state(story: "Story | None", result: "ResultMap | None") -> str:
    """Return the state from the events. The stored result decides if there are no events, or if only the
    result is final.
    """

    state = story.state if story else ""
    if result is not None and (not state or (state not in READY_STATES and result.status in READY_STATES)):
        return result.status
    return state or "recorded"


def _instant(seconds: float) -> str:
    """Return a time in UTC, with milliseconds."""
    return (
        datetime.fromtimestamp(seconds, UTC)
        .isoformat(sep=" ", timespec="milliseconds")
        .removesuffix("+00:00")
    )
