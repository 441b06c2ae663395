"""`umbel queues pause`, `resume` and `move`."""

import click
from msgspec.structs import asdict

from umbel.brokers.interface import Broker
from umbel.cli import completion, exits
from umbel.cli.broker import ask_broker
from umbel.cli.options import app_option, broker_option, json_option
from umbel.cli.show.printing import print_json, say
from umbel.control.client import Asker
from umbel.control.queue_pauses import (
    PauseOutcome,
    move_messages,
    pause_queue,
    resume_queue,
    waiting_in,
)

STEPS = 20  # in which a move tells how far it is

timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.1, 600),
    default=2.0,
    show_default=True,
    help="Seconds to wait for the answers of Celery's workers.",
)


@click.command("pause")
@app_option
@broker_option
@click.argument("queue", shell_complete=completion.queues)
@timeout_option
@json_option
def pause(app_name: str | None, url: str | None, queue: str, timeout_s: float, as_json: bool) -> int:
    """Let no worker take messages from QUEUE until it is resumed.

    Tasks that were taken before run to their end, and messages can still be sent. Workers that start later
    respect it. Celery's workers are told to stop consuming; tell those that start later by pausing again.

    Exit code: 0 done, 75 done, but some nodes did not answer or obey.
    """
    outcome = ask_broker(
        app_name, lambda broker: pause_queue(broker, Asker(broker), queue, timeout_s=timeout_s), url=url
    )
    return _show(outcome, f"{queue} is paused" if outcome.changed else f"{queue} was paused already", as_json)


@click.command("resume")
@app_option
@broker_option
@click.argument("queue", shell_complete=completion.queues)
@timeout_option
@json_option
def resume(app_name: str | None, url: str | None, queue: str, timeout_s: float, as_json: bool) -> int:
    """Let workers take messages from QUEUE again.

    Exit code: 0 done, 75 done, but some nodes did not answer or obey.
    """
    outcome = ask_broker(
        app_name, lambda broker: resume_queue(broker, Asker(broker), queue, timeout_s=timeout_s), url=url
    )
    return _show(outcome, f"{queue} is resumed" if outcome.changed else f"{queue} was not paused", as_json)


@click.command("move")
@app_option
@broker_option
@click.argument("source", metavar="FROM", shell_complete=completion.queues)
@click.argument("target", metavar="TO", shell_complete=completion.queues)
@click.option("--limit", type=click.IntRange(1), help="Move at most so many; else all that wait now.")
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
    """Move the messages that wait in queue FROM, due or not, to queue TO.

    Ids, headers, priorities and times are kept; what workers have taken stays. It can be interrupted and
    repeated at any time.
    """

    async def work(broker: Broker) -> int | None:
        waiting = await waiting_in(broker, source)
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
    """At most STEPS lines, however many messages there are."""

    def __init__(self) -> None:
        self._step = 0

    def show(self, moved: int, of: int) -> None:
        step = moved * STEPS // of
        if self._step < step < STEPS:
            click.echo(f"umbel: {moved} of {of} messages moved", err=True)
        self._step = step


def _show(outcome: PauseOutcome, said: str, as_json: bool) -> int:
    if as_json:
        print_json(asdict(outcome))
    else:
        say(said)
    for node in outcome.told:
        say(f"umbel: {node} was told to {'stop' if outcome.paused else 'start'} consuming", err=True)
    for node in outcome.silent:
        say(f"umbel: {node} did not answer", err=True)
    for node, why in outcome.refused.items():
        say(f"umbel: {node} refused: {why}", err=True)
    if outcome.ask_again:
        say(f"umbel: to tell them again: {outcome.ask_again}", err=True)
    return exits.PARTIAL if outcome.silent or outcome.refused else exits.OK
