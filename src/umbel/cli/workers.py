"""`umbel status`, `ping`, `inspect`, `control`, `revoke` and `clock`: query and control workers."""

from time import time
from typing import Any

import click

from umbel.brokers.interface import Broker, Capabilities
from umbel.cli import asking, completion, exits
from umbel.cli.asking import print_answers, print_replies
from umbel.cli.broker import ask_in_time
from umbel.cli.options import (
    app_option,
    broker_option,
    duration,
    json_option,
    phase_text,
    print_json,
    print_table,
    say,
    timeout_option,
)
from umbel.control.client import ControlClient
from umbel.launch.loading import find_app
from umbel.protocol.pidbox import Answers
from umbel.wire.control import ClockReply, OwnStats, Stats, typed

# ---- status ----------------------------------------------------------------------------------------

COLUMNS = ("node", "state", "pool", "children", "running", "processed", "reconnects", "uptime", "clock")
# Features of a cluster, and the broker's capability that each needs.
FEATURES = {
    "remote control": "fanout",
    "mingle": "fanout",
    "gossip": "events",
    "elections": "leases",
    "leases": "leases",
    "delayed tasks": "delayed",
    "event log": "event_log",
    "unique tasks": "unique",
    "cluster limits": "limits",
    "recorded revokes": "revokes",
    "queue lengths": "depths",
    "paused queues": "pauses",
    "kept failures": "failures",
    "signed tasks": "signatures",
}


@click.command("status")
@asking.asks_workers
def status_command(question: asking.Question) -> int:
    """Show the workers that reply, their state, and the features that the broker supports.

    Exit code: 0 if all expected workers replied, 69 if none did, 75 if some did not.
    """
    look = ask_in_time(
        question.app_name,
        lambda broker: _look(broker, question.to),
        question.to.timeout_s,
        url=question.url,
    )
    capabilities, paused, answers = look
    features = _features(capabilities)
    if not question.as_json:
        _say_what_is_supported(features)
        if paused:
            click.echo(f"umbel: paused queues: {', '.join(paused)}", err=True)
    return question.show(answers, _print_workers, broker=features, paused_queues=paused)


def _print_workers(answers: "Answers") -> None:
    """Print a row for each worker."""
    print_table(COLUMNS, [_row(node, stats) for node, stats in sorted(answers.replies.items())])


def _say_what_is_supported(features: dict[str, Any]) -> None:
    """Print the supported features on stderr, and the reason for each that is off."""
    supported = [name for name, why in features["supports"].items() if why is True]
    click.echo(f"umbel: {features['transport']} supports {', '.join(supported)}", err=True)
    for name, why in features["supports"].items():
        if why is not True:
            click.echo(f"umbel: {name} is off: {why}", err=True)


async def _look(broker: Broker, to: asking.Targets) -> tuple[Capabilities, list[str], "Answers"]:
    """Return the broker's capabilities, its paused queues, and the replies to `stats`."""
    paused = sorted(await broker.paused())
    return broker.capabilities, paused, await asking.ask_on(broker, to, "stats", {})


def _features(found: Capabilities) -> dict[str, Any]:
    """Return which features the broker supports, with the reason for each that is missing."""
    supports: dict[str, Any] = {}
    for feature, capability in FEATURES.items():
        has = getattr(found, capability)
        reason = found.reasons.get(capability, f"transport {found.transport} does not support it")
        supports[feature] = True if has else reason
    return {"transport": found.transport, "supports": supports}


def _row(node: str, stats: Any) -> list[object]:
    """Return the row of one worker from its reply to `stats`."""
    found = typed(stats, Stats)
    pool, ours = found.pool, found.umbel or OwnStats()
    total = None if found.total is None else sum(found.total.values())
    shown = (
        phase_text(ours.stopping),
        (pool.implementation or "").rpartition(".")[2],
        pool.max_concurrency,
        None if pool.running is None else len(pool.running),
        (ours.counters or {}).get("processed", total),
        None if ours.links is None else sum(ours.links.values()),
        None if found.uptime is None else duration(found.uptime),
        found.clock,
    )
    return [node, *("" if cell is None else cell for cell in shown)]


# ---- ping ------------------------------------------------------------------------------------------


@click.command("ping")
@asking.asks_workers
def ping_command(question: asking.Question) -> int:
    """Check which workers reply.

    Exit code: 0 if all expected workers replied, 69 if none did, 75 if some did not.
    """
    return question.show(question.ask("ping"), _print_pings)


def _print_pings(answers: "Answers") -> None:
    """Print the reply of each worker."""
    for node, value in sorted(answers.replies.items()):
        answer = value.get("ok", value) if isinstance(value, dict) else value
        say(f"{node}: {answer}")


# ---- inspect ---------------------------------------------------------------------------------------


@click.command("inspect")
@click.argument("name", metavar="[COMMAND]", required=False, shell_complete=completion.inspect_commands)
@click.argument("words", metavar="[ARGUMENTS]...", nargs=-1)
@asking.asks_workers
def inspect_workers_command(question: asking.Question, name: str | None, words: tuple[str, ...]) -> int:
    """Query workers with COMMAND: active, stats, registered, ... Without COMMAND, list them.

    Exit code: 0 if all expected workers replied, 69 if none did, 75 if some did not.
    """
    if name is None:
        asking.list_commands(question.app_name, changes=False)
        return exits.OK
    found = asking.find_command(question.app_name, name, changes=False)
    answers = question.ask(found.name, asking.arguments_of(found, words))
    return question.show(answers, lambda given: print_answers(found.name, given))


# ---- control ---------------------------------------------------------------------------------------

DESTRUCTIVE = {"shutdown", "terminate", "pool_shrink", "pool_restart", "cancel_consumer"}


@click.command("control")
@click.argument("name", metavar="[COMMAND]", required=False, shell_complete=completion.control_commands)
@click.argument("words", metavar="[ARGUMENTS]...", nargs=-1)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@asking.asks_workers
def control_workers_command(
    question: asking.Question, name: str | None, words: tuple[str, ...], yes: bool
) -> int:
    """Send COMMAND to workers: rate_limit, add_consumer, shutdown, ... Without COMMAND, list them.

    Exit code: 0 if all succeeded, 1 if a worker replied with an error, 69 if none replied, 75 if some did
    not.
    """
    if name is None:
        asking.list_commands(question.app_name, changes=True)
        return exits.OK
    found = asking.find_command(question.app_name, name, changes=True)
    arguments = asking.arguments_of(found, words)
    if found.name in DESTRUCTIVE and not yes:
        click.confirm(f"{' '.join([found.name, *words])} on {question.to}?", abort=True, err=True)
    if not found.is_answered:
        question.tell(found.name, arguments)
        click.echo(f"umbel: sent; workers do not reply to {found.name}", err=True)
        return exits.OK
    answers = question.ask(found.name, arguments)
    code = question.show(answers, print_replies)
    return exits.FAILED if answers.refusals and code == exits.OK else code


# ---- revoke ----------------------------------------------------------------------------------------


@click.command("revoke")
@app_option
@click.argument("task_ids", metavar="ID...", nargs=-1, required=True)
@click.option(
    "--terminate", is_flag=True, help="Also terminate running tasks; TaskCancelled is raised in them first."
)
@click.option(
    "--signal",
    "signal_name",
    metavar="SIGNAL",
    help="Terminate running tasks at once: send this signal to their processes.",
)
@click.option(
    "--undo", is_flag=True, help="Cancel the revoke; tasks that no worker has rejected yet may start."
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@timeout_option
@json_option
def revoke_command(
    app_name: str | None,
    task_ids: tuple[str, ...],
    terminate: bool,
    signal_name: str | None,
    undo: bool,
    yes: bool,
    timeout_s: float | None,
    as_json: bool,
) -> int:
    """Revoke tasks by their IDs. Also works while no worker is running.

    Exit code: 0 if recorded and all workers replied, 75 if recorded but some workers did not reply.
    """

    question = asking.Question(app_name, None, asking.targets_of(None, None, None, timeout_s), as_json)
    if undo and (terminate or signal_name):
        raise click.UsageError(
            "--undo cannot be combined with --terminate or --signal; terminated tasks cannot be restored"
        )
    if (terminate or signal_name) and not yes:
        click.confirm(f"Terminate {', '.join(task_ids)} if running?", abort=True, err=True)
    app = find_app(app_name).app
    arguments: dict[str, Any] = {"task_id": list(task_ids), "recorded": True}
    if terminate or signal_name:
        arguments |= {"terminate": True, "signal": signal_name or "SIGTERM"}
    try:
        app.revoke(task_ids, expires_at=time() if undo else None)
        answers = app.control.ask("unrevoke" if undo else "revoke", arguments, timeout=timeout_s)
        capabilities = app.producer.capabilities
    finally:
        app.close()
    if not capabilities.revokes:
        click.echo(f"umbel: the revoke is not recorded: {capabilities.why_not('revokes')}", err=True)
    if answers.replies or as_json:
        code = question.show(answers, print_replies, recorded=list(task_ids))
        return code if answers.replies else exits.OK
    if not capabilities.revokes:
        click.echo("umbel: no worker is running", err=True)
        return exits.NOBODY_ANSWERED
    click.echo("umbel: revoke recorded; no worker is running", err=True)
    return exits.OK


# ---- clock -----------------------------------------------------------------------------------------


@click.command("clock")
@app_option
@broker_option
@timeout_option
@json_option
def clock_command(app_name: str | None, url: str | None, timeout_s: float | None, as_json: bool) -> int:
    """Show the cluster's clock mark, at which new nodes start, and each node's Lamport clock.

    The mark is ahead of the clocks by up to 16,384.
    """

    async def ask(broker: Broker) -> tuple[int, dict[str, int]]:
        answers = await ControlClient(broker).ask("clock", timeout_s=timeout_s)
        found = {node: typed(reply, ClockReply).clock for node, reply in answers.replies.items()}
        clocks = {node: clock for node, clock in found.items() if clock is not None}
        return await broker.coordination.raise_clock(0), clocks

    clock_mark, clocks = ask_in_time(app_name, ask, timeout_s, url=url)
    if as_json:
        print_json({"mark": clock_mark, "nodes": clocks})
    else:
        print_table(("node", "clock"), [("(mark)", clock_mark), *sorted(clocks.items())])
    return exits.OK
