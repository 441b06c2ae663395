"""`umbel election`: start one, see which are unfinished, how one ended, and watch them happen."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import click
import msgspec

from umbel.app.app import App
from umbel.app.sending.prepare import new_id
from umbel.brokers.interface import FanOut
from umbel.cli import exits
from umbel.cli.broker import ask_broker
from umbel.cli.options import app_option, json_option
from umbel.cli.show.printing import print_json, print_table, say
from umbel.errors import WireError
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.launch.loading import find_app
from umbel.protocol.leadership.coordination import NAMESPACE, ElectionRecord, Policy, election_key
from umbel.wire.election import shown_outcome
from umbel.wire.event import decode_events

LIST_MAX = 1000
COLUMNS = ("id", "topic", "state", "policy", "winner", "attempt", "outcome")


@click.group("election")
def command() -> None:
    """Elect one worker to do something: start an election, look at one, watch all."""


@command.command("start")
@app_option
@click.argument("topic")
@click.argument("action", default="null")
@click.option("--id", "election_id", help="The id; the same id is the same election. Default: a new one.")
@click.option("--policy", type=click.Choice([str(policy) for policy in Policy]))
@click.option("--expires", type=float, help="Seconds after which the election expires.")
@click.option(
    "--timeout", type=float, default=10.0, show_default=True, help="Seconds to wait; 0: do not wait."
)
@json_option
def start(
    app_name: str | None,
    topic: str,
    action: str,
    election_id: str | None,
    policy: str | None,
    expires: float | None,
    timeout: float,
    as_json: bool,
) -> int:
    """Start an election of TOPIC; ACTION is JSON, for topic `task` a signature or a task's name."""

    app = find_app(app_name).app
    try:
        outcome = app.control.election(
            election_id or new_id(),
            topic,
            _action(app, topic, action),
            policy=policy,
            expires=expires,
            timeout=timeout,
        )
    finally:
        app.close()
    shown = {
        "id": outcome.election_id,
        "state": outcome.state,
        "winner": outcome.winner,
        "term": outcome.term,
        "attempt": outcome.attempt,
        "outcome": outcome.outcome,
    }
    if as_json:
        print_json(shown)
    else:
        print_table(tuple(shown), [list(shown.values())])
    return exits.OK if outcome.ok or outcome.state in ("open", "held") else exits.FAILED


@command.command("ls")
@app_option
@click.option("--limit", type=click.IntRange(1, LIST_MAX), default=100, show_default=True)
@json_option
def ls(app_name: str | None, limit: int, as_json: bool) -> int:
    """List the unfinished elections that have no active holder."""
    found = ask_broker(app_name, lambda broker: broker.coordination.unfinished_elections(limit))
    _print([record for _, record in found], as_json=as_json)
    return exits.OK


@command.command("show")
@app_option
@click.argument("election_id", metavar="ID")
@json_option
def show(app_name: str | None, election_id: str, as_json: bool) -> int:
    """Show the record of one election. Exit code: 3 if there is none."""
    key = election_key(NAMESPACE, election_id)
    record = ask_broker(app_name, lambda broker: broker.coordination.read_election(key))
    if record is None:
        say(
            f"umbel: unknown election {election_id!r}: it was never opened, or ended over a day ago", err=True
        )
        return exits.NOT_FOUND
    if as_json:
        print_json(_row(record) | {"term": record.term, "changed_at": record.changed_at, "key": key})
    else:
        _print([record], as_json=False)
    return exits.OK


@command.command("watch")
@app_option
@click.option("--limit", type=click.IntRange(1), help="Stop after this many events.")
@json_option
def watch(app_name: str | None, limit: int | None, as_json: bool) -> int:
    """Print election events as they happen: which worker is elected, how it ended."""

    async def listen(broker: FanOut) -> None:

        seen = 0
        async with broker.subscribe(EVENT_EXCHANGE, ["worker.elected"]) as events:
            click.echo("watching; press Ctrl-C to stop", err=True)
            async for broadcast in events:
                try:
                    told = decode_events(broadcast.body)
                except WireError as error:
                    say(f"umbel: cannot read an event: {error}", err=True)
                    continue
                for event in told:
                    _say(event, as_json=as_json)
                    seen += 1
                if limit is not None and seen >= limit:
                    return

    with suppress(KeyboardInterrupt):
        ask_broker(app_name, listen)
    return exits.OK


def _action(app: "App", topic: str, text: str) -> Any:
    """JSON; a bare word for topic `task` names a task without arguments."""

    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        if topic == "task" and text.replace(".", "").replace("_", "").isalnum():
            return app.signature(text).to_map()
        raise click.BadParameter(f"ACTION is not JSON: {text[:100]!r}") from None


def _print(records: Sequence[ElectionRecord], *, as_json: bool) -> None:
    rows = [_row(record) for record in records]
    if as_json:
        print_json(rows)
    else:
        print_table(COLUMNS, [[row[column] for column in COLUMNS] for row in rows])


def _row(record: ElectionRecord) -> dict[str, Any]:

    return {
        "id": record.request.election_id,
        "topic": record.request.topic,
        "state": shown_outcome(record.state, record.outcome),
        "policy": str(record.request.policy),
        "winner": record.holder,
        "attempt": record.attempt,
        "outcome": record.outcome,
    }


def _say(event: dict[str, Any], *, as_json: bool) -> None:
    fields = ("eid", "topic", "phase", "winner", "term", "attempt", "outcome", "hostname", "timestamp")
    told = {name: event.get(name) for name in fields}
    if as_json:
        click.echo(msgspec.json.encode(told, enc_hook=str))
    else:
        outcome = f": {told['outcome']}" if told["outcome"] else ""
        say(f"{told['phase']} {told['eid']} ({told['topic']}) by {told['winner'] or 'none'}{outcome}")
