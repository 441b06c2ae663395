"""`umbel status`: the workers at a glance, and what their broker supports."""

import asyncio
from typing import Any, Protocol

import click

from umbel.brokers.interface import Capabilities, FanOut, QueueControl
from umbel.cli.broker import ask_in_time
from umbel.cli.cluster import asking
from umbel.cli.show.phases import phase_text
from umbel.cli.show.printing import duration, print_table
from umbel.protocol.pidbox import Answers

COLUMNS = ("node", "state", "pool", "children", "running", "processed", "reconnects", "uptime", "clock")
# What a cluster does together, and the capability that it needs.
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


class StatusBroker(FanOut, QueueControl, Protocol):
    """Who answers, and which queues are paused."""


@click.command("status")
@asking.asks_workers
def command(question: asking.Question) -> int:
    """Show the workers that answer, what they do, and what the broker supports.

    Exit code: 0 all expected workers answered, 69 none answered, 75 some did not answer.
    """
    look = ask_in_time(
        question.app_name,
        lambda broker, left_s: _look(broker, question.to, left_s),
        question.to.timeout_s,
        url=question.url,
    )
    capabilities, paused, answers = look
    features = _features(capabilities)
    if not question.as_json:
        _say_what_is_supported(features)
        if paused:
            click.echo(f"umbel: paused queues: {', '.join(paused)}", err=True)
    return question.show(answers, _print, broker=features, paused_queues=paused)


def _print(answers: "Answers") -> None:
    print_table(COLUMNS, [_row(node, stats) for node, stats in sorted(answers.replies.items())])


def _say_what_is_supported(features: dict[str, Any]) -> None:
    supported = [name for name, why in features["supports"].items() if why is True]
    click.echo(f"umbel: {features['transport']} supports {', '.join(supported)}", err=True)
    for name, why in features["supports"].items():
        if why is not True:
            click.echo(f"umbel: {name} is off: {why}", err=True)


async def _look(
    broker: StatusBroker, to: asking.Whom, left_s: float
) -> tuple[Capabilities, list[str], "Answers"]:
    ends = asyncio.get_running_loop().time() + left_s
    paused = sorted(await broker.paused())
    left_s = max(0.0, ends - asyncio.get_running_loop().time())
    return broker.capabilities, paused, await asking.ask_on(broker, to, "stats", {}, left_s)


def _features(found: Capabilities) -> dict[str, Any]:
    supports: dict[str, Any] = {}
    for feature, capability in FEATURES.items():
        has = getattr(found, capability)
        reason = found.reasons.get(capability, f"transport {found.transport} does not support it")
        supports[feature] = True if has else reason
    return {"transport": found.transport, "supports": supports}


def _row(node: str, stats: Any) -> list[object]:
    if not isinstance(stats, dict) or "pool" not in stats:
        return [node, *[""] * (len(COLUMNS) - 1)]
    pool = stats["pool"]
    ours = stats.get("umbel", {})
    processed = ours.get("counters", {}).get("processed", sum(stats.get("total", {}).values()))
    running = pool.get("running")
    return [
        node,
        phase_text(ours.get("stopping", {})),
        str(pool.get("implementation", "")).rpartition(".")[2],
        pool.get("max-concurrency", ""),
        len(running) if isinstance(running, dict) else "",
        processed,
        sum(ours["links"].values()) if "links" in ours else "",
        duration(stats.get("uptime", 0)),
        stats.get("clock", ""),
    ]
