"""`umbel queues`: list, peek into, purge, pause and resume queues, and move their messages."""

from functools import partial

import click
from msgspec.structs import asdict

from umbel.app.options import has_secrets
from umbel.brokers.interface import Broker, Queues
from umbel.cli import completion, exits
from umbel.cli.broker import ask_broker
from umbel.cli.options import app_option, broker_option, json_option, print_json, print_table, say
from umbel.control.client import ControlClient
from umbel.control.queue_pauses import PauseOutcome, count_waiting, move_messages, pause_queue, resume_queue
from umbel.launch.loading import find_app
from umbel.monitor.records import waiting_row
from umbel.protocol.delivery.sensitive import hides_nothing

# ---- queue control ---------------------------------------------------------------------------------

STEPS = 20  # progress lines of a move

timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.1, 600),
    help="Seconds to wait for replies of Celery workers; default: 5, or 1 if none replies.",
)


@click.command("pause")
@app_option
@broker_option
@click.argument("queue", shell_complete=completion.queues)
@timeout_option
@json_option
def pause(app_name: str | None, url: str | None, queue: str, timeout_s: float | None, as_json: bool) -> int:
    """Stop all workers from taking messages from QUEUE until it is resumed.

    Tasks that workers have already taken run to the end, and messages can still be sent. The pause also
    holds for workers that start later. Celery workers are asked to stop consuming; pause again for those
    that start later.

    Exit code: 0 done; 75 done, but some nodes did not reply or refused.
    """
    outcome = ask_broker(
        app_name,
        lambda broker: pause_queue(broker, ControlClient(broker), queue, timeout_s=timeout_s),
        url=url,
    )
    return _show(outcome, f"{queue} is paused" if outcome.changed else f"{queue} was paused already", as_json)


@click.command("resume")
@app_option
@broker_option
@click.argument("queue", shell_complete=completion.queues)
@timeout_option
@json_option
def resume(app_name: str | None, url: str | None, queue: str, timeout_s: float | None, as_json: bool) -> int:
    """Let workers take messages from QUEUE again.

    Exit code: 0 done; 75 done, but some nodes did not reply or refused.
    """
    outcome = ask_broker(
        app_name,
        lambda broker: resume_queue(broker, ControlClient(broker), queue, timeout_s=timeout_s),
        url=url,
    )
    return _show(outcome, f"{queue} is resumed" if outcome.changed else f"{queue} was not paused", as_json)


@click.command("move")
@app_option
@broker_option
@click.argument("source", metavar="FROM", shell_complete=completion.queues)
@click.argument("target", metavar="TO", shell_complete=completion.queues)
@click.option(
    "--limit",
    type=click.IntRange(1),
    help="Move at most this many messages; default: all that are waiting now.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
def move(
    app_name: str | None,
    url: str | None,
    source: str,
    target: str,
    limit: int | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Move the waiting messages of queue FROM, including delayed ones, to queue TO.

    Ids, headers, priorities and times do not change. Messages that workers have taken are not moved. The
    command can be interrupted and repeated at any time.
    """

    async def work(broker: Broker) -> int | None:
        waiting = await count_waiting(broker, source)
        count = waiting if limit is None else min(limit, waiting)
        question = f"Move {count} of {waiting} messages from {source!r} to {target!r}?"
        if count and not yes and not click.confirm(question, err=True):
            return None
        show = (lambda _moved, _of: None) if as_json else _Progress().show
        return await move_messages(broker, source, target, limit=limit, on_progress=show)

    moved = ask_broker(app_name, work, url=url)
    if moved is None:
        raise click.Abort
    if as_json:
        print_json({"from": source, "to": target, "moved": moved})
    else:
        say(f"{moved} messages moved from {source} to {target}")
    return exits.OK


class _Progress:
    """Prints the progress of a move, in at most STEPS lines."""

    def __init__(self) -> None:
        self._step = 0

    def show(self, moved: int, of: int) -> None:
        """Print a line if the move has reached the next step."""
        step = moved * STEPS // of
        if self._step < step < STEPS:
            click.echo(f"umbel: {moved} of {of} messages moved", err=True)
        self._step = step


def _show(outcome: PauseOutcome, summary: str, as_json: bool) -> int:
    """Print the result of a pause or resume, and return the exit code."""
    if as_json:
        print_json(asdict(outcome))
    else:
        say(summary)
    for node in outcome.told:
        say(f"umbel: {node} was asked to {'stop' if outcome.paused else 'start'} consuming", err=True)
    for node in outcome.silent:
        say(f"umbel: {node} did not reply", err=True)
    for node, why in outcome.refused.items():
        say(f"umbel: {node} refused: {why}", err=True)
    if outcome.ask_again:
        say(f"umbel: to send the request again: {outcome.ask_again}", err=True)
    return exits.PARTIAL if outcome.silent or outcome.refused else exits.OK


# ---- queues ----------------------------------------------------------------------------------------

PEEK_MAX = 1000
COLUMNS = ("queue", "ready", "delayed", "claimed", "limited", "paused")


@click.group("queues")
def command() -> None:
    """List, peek into, purge, pause or resume queues, or move their messages."""


@command.command("ls")
@app_option
@broker_option
@json_option
def ls(app_name: str | None, url: str | None, as_json: bool) -> int:
    """List the queues: counts of waiting, delayed and running messages, and whether the queue is paused.

    The column "limited" counts messages that wait for a cluster limit.
    """
    depths = ask_broker(app_name, lambda broker: broker.queues(), url=url)
    rows = [
        (name, depth.ready, depth.delayed, depth.claimed, depth.limited, depth.paused)
        for name, depth in sorted(depths.items())
    ]
    if as_json:
        print_json([dict(zip(COLUMNS, row, strict=True)) for row in rows])
    else:
        print_table(COLUMNS, [(*counts, "yes" if paused else "") for *counts, paused in rows])
    return exits.OK


@command.command("peek")
@app_option
@broker_option
@click.argument("queue", shell_complete=completion.queues)
@click.option("--limit", type=click.IntRange(1, PEEK_MAX), default=20, show_default=True)
@json_option
def peek(app_name: str | None, url: str | None, queue: str, limit: int, as_json: bool) -> int:
    """Show the next messages of QUEUE without taking them.

    Arguments that the app marks as sensitive are hidden. With only --broker, arguments are hidden if their
    sender hid them.
    """
    deliveries = ask_broker(app_name, lambda broker: broker.peek(queue, limit), url=url)
    hides = hides_nothing if url and not app_name else partial(has_secrets, find_app(app_name).app)
    rows = [asdict(waiting_row(delivery, hides)) for delivery in deliveries]
    if as_json:
        print_json(rows)
    else:
        columns = ("task_id", "task", "args", "kwargs", "retries", "starts")
        print_table(columns, [[row[column] for column in columns] for row in rows])
    return exits.OK


@command.command("purge")
@app_option
@broker_option
@click.argument("queue", shell_complete=completion.queues)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
def purge(app_name: str | None, url: str | None, queue: str, yes: bool, as_json: bool) -> int:
    """Remove all waiting messages from QUEUE. Running tasks are not affected."""

    async def empty(broker: Queues) -> int | None:
        count = "all"
        if broker.capabilities.depths:
            depth = (await broker.queues()).get(queue)
            count = str(depth.ready + depth.delayed + depth.limited if depth else 0)
        question = f"Remove {count} messages from {queue!r}?"
        if count != "0" and not yes and not click.confirm(question, err=True):
            return None
        return await broker.purge(queue)

    removed = ask_broker(app_name, empty, url=url)
    if removed is None:
        raise click.Abort
    if as_json:
        print_json({"queue": queue, "removed": removed})
    else:
        click.echo(f"{removed} messages removed from {queue}")
    return exits.OK


for _command in (pause, resume, move):
    command.add_command(_command)
