"""`umbel members`, `umbel election` and `umbel cluster-id`: membership, elections, and the id signatures are
bound to.
"""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from secrets import token_hex
from time import localtime, strftime, time
from typing import Any

import click
import msgspec

from umbel.app.app import App
from umbel.app.sending.preparation import new_id
from umbel.brokers.interface import Broadcast, Broker, FanOut
from umbel.cli import exits
from umbel.cli.broker import ask_broker, ask_in_time
from umbel.cli.options import (
    app_option,
    broker_option,
    json_option,
    print_json,
    print_table,
    say,
    timeout_option,
)
from umbel.clock import cluster_now
from umbel.control.client import ControlClient
from umbel.coordination.driver import fairly
from umbel.errors import BrokerError, ConfigurationError, WireError
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.launch.loading import find_app
from umbel.monitor.coordination import MembershipWatch, known_members
from umbel.protocol.delivery.trust import ClusterId
from umbel.protocol.leadership.coordination import NAMESPACE, ElectionRecord, Policy, election_key
from umbel.protocol.membership.members import Member
from umbel.wire.coordination import describe, shown_outcome
from umbel.wire.event import decode_events
from umbel.wire.signing import cluster_problem

# ---- members ---------------------------------------------------------------------------------------
#
# `umbel members`: which nodes are in the cluster, and which join and leave.
#
# Without `--watch` the command queries the workers. With it this process follows the nodes' events itself,
# with the state machine that workers use, so no Umbel worker needs to run. Unlike a worker it announces no
# lost nodes.

ASK_AGAIN_S = 1.0
MEMBERSHIP_COLUMNS = ("node", "state", "software", "pid", "clock", "silent_s", "reason")


@click.command("members")
@app_option
@broker_option
@click.option(
    "--watch", is_flag=True, help="Print which nodes join, go silent, leave or are lost, until Ctrl-C."
)
@timeout_option
@json_option
def members_command(
    app_name: str | None, url: str | None, watch: bool, timeout_s: float | None, as_json: bool
) -> int:
    """Show the nodes of the cluster: alive, suspect, lost, left.

    Exit code: 0, or 69 when no node answered.
    """
    if watch:
        try:
            ask_broker(app_name, lambda broker: Watch(broker, as_json=as_json).run(timeout_s), url=url)
        except KeyboardInterrupt:
            return exits.OK
    rows = ask_in_time(
        app_name, lambda broker: known_members(ControlClient(broker), timeout_s), timeout_s, url=url
    )
    if as_json:
        print_json(rows)
    elif rows:
        print_table(
            MEMBERSHIP_COLUMNS, [[row.get(column, "") for column in MEMBERSHIP_COLUMNS] for row in rows]
        )
    if not rows:
        click.echo("umbel: no node answered; start one with `umbel worker`", err=True)
    return exits.OK if rows else exits.NOBODY_ANSWERED


class Watch:
    """Follows the membership of the cluster and prints every change."""

    def __init__(self, broker: Broker, *, as_json: bool) -> None:
        self._broker = broker
        self._asker = ControlClient(broker)
        self._as_json = as_json
        self._members = MembershipWatch(broker, self._asker, self._show)

    async def run(self, timeout_s: float | None) -> None:
        """Print changes of membership until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._members.run())
            async with self._broker.subscribe(EVENT_EXCHANGE, ["worker.#"]) as subscription:
                group.create_task(self._begin(timeout_s))
                async for broadcast in fairly(subscription):
                    await self._take(broadcast)

    async def _begin(self, timeout_s: float | None) -> None:
        """Introduce the nodes that are there already; later ones are known from their events."""
        while True:
            try:
                return await self._members.introduce(await known_members(self._asker, timeout_s))
            except BrokerError as error:
                say(f"umbel: cannot ask which nodes are there; retrying: {error}", err=True)
                await asyncio.sleep(ASK_AGAIN_S)

    async def _take(self, broadcast: Broadcast) -> None:
        try:
            events = decode_events(broadcast.body)
        except WireError as error:
            say(f"umbel: cannot read an event: {error}", err=True)
            return
        for event in events:
            await self._members.take(event)

    def _show(self, what: str, member: Member, by: str) -> None:
        if self._as_json:
            more = {"by": by} if what == "lost" else {}
            click.echo(json.dumps({"at": time(), "change": what, **describe(member, time()), **more}))
        else:
            why = f": {member.reason}" if member.reason else ""
            say(f"{strftime('%H:%M:%S', localtime())} {member.node} {what}{why}")


# ---- election --------------------------------------------------------------------------------------
#
# `umbel election`: start one, see which are unfinished, how one ended, and watch them happen.

LIST_MAX = 1000
ELECTION_COLUMNS = ("id", "topic", "state", "policy", "winner", "attempt", "outcome")


@click.group("election")
def election_command() -> None:
    """Elect one worker to do something: start an election, look at one, watch all."""


@election_command.command("start")
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


@election_command.command("ls")
@app_option
@click.option("--limit", type=click.IntRange(1, LIST_MAX), default=100, show_default=True)
@json_option
def ls(app_name: str | None, limit: int, as_json: bool) -> int:
    """List the unfinished elections that have no active holder."""
    found = ask_broker(app_name, lambda broker: broker.coordination.unfinished_elections(limit))
    _print([record for _, record in found], as_json=as_json)
    return exits.OK


@election_command.command("show")
@app_option
@click.argument("election_id", metavar="ID")
@json_option
def show_election(app_name: str | None, election_id: str, as_json: bool) -> int:
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


@election_command.command("watch")
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
                    decoded = decode_events(broadcast.body)
                except WireError as error:
                    say(f"umbel: cannot read an event: {error}", err=True)
                    continue
                for event in decoded:
                    _say(event, as_json=as_json)
                    seen += 1
                if limit is not None and seen >= limit:
                    return

    with suppress(KeyboardInterrupt):
        ask_broker(app_name, listen)
    return exits.OK


def _action(app: "App", topic: str, text: str) -> Any:
    """Decode ACTION from JSON; for topic `task` a bare word names a task without arguments."""

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
        print_table(ELECTION_COLUMNS, [[row[column] for column in ELECTION_COLUMNS] for row in rows])


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
    shown = {name: event.get(name) for name in fields}
    if as_json:
        click.echo(msgspec.json.encode(shown, enc_hook=str))
    else:
        outcome = f": {shown['outcome']}" if shown["outcome"] else ""
        say(f"{shown['phase']} {shown['eid']} ({shown['topic']}) by {shown['winner'] or 'none'}{outcome}")


# ---- cluster id ------------------------------------------------------------------------------------
#
# `umbel cluster-id`: the id in the broker that signatures are bound to.

MADE_BYTES = 8


@click.group("cluster-id")
def cluster_id_command() -> None:
    """The id of the cluster, which signatures are bound to (`signing_keys`)."""


@cluster_id_command.command("show")
@app_option
@broker_option
@json_option
def show_cluster_id(app_name: str | None, url: str | None, as_json: bool) -> int:
    """Show the id, and when it was made.

    Exit code: 0; 3 if there is none.
    """
    found = ask_broker(app_name, lambda broker: broker.cluster_id(), url=url)
    if as_json:
        print_json(None if found is None else {"id": found.id, "since": found.since or None})
    elif found is None:
        say("umbel: the broker has no cluster id; `umbel cluster-id make` makes one", err=True)
    else:
        made = f", made {datetime.fromtimestamp(found.since, UTC):%Y-%m-%d %H:%M} UTC" if found.since else ""
        say(f"{found.id}{made}")
    return exits.NOT_FOUND if found is None else exits.OK


@cluster_id_command.command("make")
@app_option
@broker_option
@click.argument("name", default="")
def make(app_name: str | None, url: str | None, name: str) -> int:
    """Give the cluster an id: once, before anything is signed, or after the upgrade from 0.3.

    NAME: letters, digits, '_', '.' and '-'; without it the id is random. Note it: if the broker loses it,
    `restore` brings it back. From now on messages that Umbel 0.3 signs are verified for one more
    'signing_window_s'.
    """
    made = ClusterId(_checked(name or token_hex(MADE_BYTES)), cluster_now())
    found = _kept(app_name, url, made)
    if found != made:
        say(f"umbel: the broker has the cluster id {found.id!r} already", err=True)
        return exits.FAILED
    say(found.id)
    return exits.OK


@cluster_id_command.command("restore")
@app_option
@broker_option
@click.argument("cluster_id", metavar="ID")
def restore(app_name: str | None, url: str | None, cluster_id: str) -> int:
    """Give a broker back the id that it lost, so that what was signed for it is verified.

    Which signatures were used may be lost with it. Then a copy of a message of the last 'signing_window_s'
    would run; where that matters, `make` another id.
    """
    found = _kept(app_name, url, ClusterId(_checked(cluster_id)))
    if found.id != cluster_id:
        say(f"umbel: the broker has another cluster id, {found.id!r}", err=True)
        return exits.FAILED
    say(found.id)
    return exits.OK


def _kept(app_name: str | None, url: str | None, made: ClusterId) -> ClusterId:
    return ask_broker(app_name, lambda broker: broker.keep_cluster_id(made), url=url)


def _checked(name: str) -> str:
    if problem := cluster_problem(name):
        raise ConfigurationError(f"{name!r} cannot be used: {problem}")
    return name
