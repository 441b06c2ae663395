"""What the commands that query workers share: their options, the target workers, exit codes and printed
replies.

Exit codes: 0 all expected workers replied; 69 none did; 75 some did not.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import wraps
from time import time
from typing import Any

import click

from umbel.brokers.interface import FanOut
from umbel.cli import completion, exits
from umbel.cli.broker import ask_in_time, known_commands
from umbel.cli.options import (
    app_option,
    broker_option,
    json_option,
    print_json,
    print_table,
    say,
    timeout_option,
)
from umbel.control.client import ControlClient
from umbel.control.panel import Command
from umbel.protocol.pidbox import Answers, MemberReport, error_of
from umbel.text import one_line, without_password
from umbel.wire.control import LetterRow, QueueRow, ScheduledRow, TaskRow, rows

# ---- asking ----------------------------------------------------------------------------------------
#
# What the commands that query workers share: their options, the target workers, exit codes.
#
# Exit codes: 0 all expected workers answered; 69 none did; 75 some did not.


@dataclass(frozen=True)
class Targets:
    """Which workers a command addresses, and how long it waits for their replies."""

    destination: tuple[str, ...] | None
    pattern: str | None
    matcher: str | None
    timeout_s: float | None

    def __str__(self) -> str:
        return ", ".join(self.destination) if self.destination else self.pattern or "all workers"


@dataclass(frozen=True)
class Question:
    """The options that every command that queries workers has: app, broker, targets, output format."""

    app_name: str | None
    url: str | None
    to: Targets
    as_json: bool

    def ask(self, method: str, arguments: Mapping[str, Any] | None = None) -> "Answers":
        """Send the remote command, and return the replies of the workers."""
        asked = arguments or {}
        return ask_in_time(
            self.app_name,
            lambda broker: ask_on(broker, self.to, method, asked),
            self.to.timeout_s,
            url=self.url,
        )

    def tell(self, method: str, arguments: Mapping[str, Any]) -> None:
        """Send the remote command without waiting for replies."""
        whom: dict[str, Any] = {
            "destination": self.to.destination,
            "pattern": self.to.pattern,
            "matcher": self.to.matcher,
        }
        ask_in_time(
            self.app_name,
            lambda broker: ControlClient(broker).tell(method, arguments, **whom),
            self.to.timeout_s,
            url=self.url,
        )

    def show(self, answers: "Answers", print_answers: Callable[["Answers"], None], **more: Any) -> int:
        """Print the replies, as JSON together with `more`, or for people; return the exit code."""
        if self.as_json:
            print_json({**as_data(answers), **more})
        elif answers.replies:
            print_answers(answers)
        return judge(answers, self._how_to_start())

    def _how_to_start(self) -> str:
        named = [f" -A {self.app_name}"] if self.app_name else []
        named += [f" -b {without_password(self.url)}"] if self.url else []
        elsewhere = "" if self.url else ", or name the broker of a running one with -b"
        return f"; start one with `umbel worker{''.join(named)}`{elsewhere}"


def asks_workers(function: Callable[..., int]) -> Callable[..., int]:
    """Add the options of a command that queries workers, and pass them to it as one `Question`."""

    @wraps(function)
    def gathered(
        *,
        app_name: str | None,
        url: str | None,
        destination: str | None,
        glob: str | None,
        regex: str | None,
        timeout_s: float | None,
        as_json: bool,
        **rest: Any,
    ) -> int:
        to = targets_of(destination, glob, regex, timeout_s)
        return function(Question(app_name, url, to, as_json), **rest)

    for option in (
        json_option,
        timeout_option,
        click.option("--regex", metavar="PATTERN", help="Only nodes that match this regular expression."),
        click.option("--glob", metavar="PATTERN", help="Only nodes that match, as in 'web*@host'."),
        click.option(
            "-d",
            "--destination",
            metavar="NODE[,NODE]",
            shell_complete=completion.nodes,
            help="Only these nodes.",
        ),
        broker_option,
        app_option,
    ):
        gathered = option(gathered)
    return gathered


def targets_of(
    destination: str | None, glob: str | None, regex: str | None, timeout_s: float | None
) -> Targets:
    """The targets that -d, --glob, --regex and --timeout name; UsageError if they contradict each other."""
    if sum(given is not None for given in (destination, glob, regex)) > 1:
        raise click.UsageError("give only one of --destination, --glob and --regex")
    if timeout_s is not None and not timeout_s > 0:
        raise click.UsageError(f"--timeout must be above 0, not {timeout_s:g}")
    names = (
        None
        if destination is None
        else tuple(name.strip() for name in destination.split(",") if name.strip())
    )
    return Targets(names, glob or regex, "glob" if glob else "pcre" if regex else None, timeout_s)


async def ask_on(broker: FanOut, to: Targets, method: str, arguments: Mapping[str, Any]) -> "Answers":
    """Send a remote command through an open broker, and return the replies of the workers."""
    return await ControlClient(broker).ask(
        method,
        arguments,
        destination=to.destination,
        pattern=to.pattern,
        matcher=to.matcher,
        timeout_s=to.timeout_s,
    )


def judge(answers: "Answers", if_nobody: str = "") -> int:
    """Print on stderr which workers did not reply and which replies were cut; return the exit code.

    `if_nobody`: a hint that is printed where no worker is known at all.
    """
    for node, total in sorted(answers.totals.items()):
        shown = len(answers.replies[node])
        say(f"umbel: {node} sent the first {shown:,} of {total:,} entries", err=True)
    if not answers.replies:
        named = ", ".join(worker.node for worker in answers.silent)
        say(f"umbel: no worker answered{f': {named}' if named else if_nobody}", err=True)
        return exits.NOBODY_ANSWERED
    for worker in answers.lost:
        say(f"umbel: {_silence(worker)}", err=True)
    if not answers.silent:
        return exits.OK
    count = len(answers.replies)
    missing = "; ".join(map(_silence, answers.silent))
    say(f"umbel: {count} of {count + len(answers.silent)} replied; {missing}", err=True)
    return exits.PARTIAL


def _silence(known: "MemberReport") -> str:
    if known.state == "unknown":
        return f"{known.node} did not answer"
    return f"{known.node} silent for {known.silent_s:.0f} s ({known.state})"


def as_data(answers: "Answers") -> dict[str, Any]:
    """For --json: the replies, and the workers that should have replied."""
    return {
        "replies": dict(answers.replies),
        "silent": [
            {"node": worker.node, "state": worker.state, "silent_s": worker.silent_s}
            for worker in answers.silent
        ],
        "lost": [{"node": worker.node, "silent_s": worker.silent_s} for worker in answers.lost],
        "unknown": list(answers.unknown),
        "totals": dict(answers.totals),
    }


def find_command(app_name: str | None, name: str, *, changes: bool) -> "Command":
    """Find a built-in command or one of the app's; UsageError with the nearest name if there is none."""
    panel = known_commands(app_name)
    command = panel.find(name)
    verb, other = ("control", "inspect") if changes else ("inspect", "control")
    if command is None:
        near = get_close_matches(name, [entry.name for entry in panel if entry.changes is changes], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; `umbel {verb}` lists them"
        raise click.UsageError(f"unknown command {name!r}{hint}")
    if command.changes is not changes:
        raise click.UsageError(f"{name!r} belongs to `umbel {other}`: use `umbel {other} {name}`")
    return command


def list_commands(app_name: str | None, *, changes: bool) -> None:
    """Print the remote commands that change something, or those that only query."""
    rows = [
        (f"{entry.name} {entry.usage}".strip(), entry.help)
        for entry in sorted(known_commands(app_name), key=lambda entry: entry.name)
        if entry.changes is changes and not entry.is_hidden
    ]
    print_table(("command", "what it does"), rows)


def arguments_of(command: "Command", words: Sequence[str]) -> dict[str, Any]:
    """The arguments of a remote command from words of the command line; UsageError if they do not fit."""
    try:
        return command.arguments_from(words)
    except TypeError as error:
        raise click.UsageError(str(error)) from None


# ---- answers ---------------------------------------------------------------------------------------
#
# How replies of workers are printed for people: as tables where they have rows, else unchanged.

TEXT_MAX = 60


def print_answers(command: str, answers: "Answers") -> None:
    """Print a table of all nodes' rows where the command has one; replies without rows are printed below."""
    if command not in TABLES:
        print_replies(answers)
        return
    columns, rows_of = TABLES[command]
    replies = sorted(answers.replies.items())
    whole = {node: value for node, value in replies if _has_rows(value)}
    found = [[node, *row] for node, value in whole.items() for row in rows_of(value)]
    if found:
        print_table(("node", *columns), found)
    for node in whole:
        if not any(row[0] == node for row in found):
            say(f"{node}: - none -")
    print_values([(node, value) for node, value in replies if node not in whole])


def print_replies(answers: "Answers") -> None:
    """Print the replies of all nodes, each below the name of its node."""
    print_values(sorted(answers.replies.items()))


def print_values(values: Iterable[tuple[str, Any]]) -> None:
    """Print a value below the name of each node."""
    for node, value in values:
        click.echo(f"{click.style(one_line(node), bold=True)}: {_mark(value)}")
        for line in _lines(value):
            say(f"    {line}")


def _has_rows(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def _mark(value: Any) -> str:
    return "ok" if error_of(value) is None else click.style("error", fg="red")


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict) and len(value) == 1 and ("ok" in value or "error" in value):
        return str(next(iter(value.values()))).strip().splitlines()
    if value is None:
        return []
    if isinstance(value, str):
        return value.splitlines()
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return list(value) or ["- none -"]
    if value in ([], {}):
        return ["- none -"]
    return json.dumps(value, indent=2, ensure_ascii=False, default=str).splitlines()


def _requests(value: list[Any]) -> Iterable[Sequence[object]]:
    for row, given in zip(rows(value, TaskRow), value, strict=True):
        running = "" if row.time_start is None else f"{max(0.0, time() - row.time_start):.1f} s"
        arguments = ", ".join(_short(given[name]) for name in ("args", "kwargs") if given.get(name))
        yield row.id or "", row.name or "", arguments, running, row.worker_pid or ""


def _scheduled(value: list[Any]) -> Iterable[Sequence[object]]:
    for row in rows(value, ScheduledRow):
        yield row.eta or "", row.request.id or "", row.request.name or ""


def _queues(value: list[Any]) -> Iterable[Sequence[object]]:
    for row in rows(value, QueueRow):
        yield row.name or "", row.exchange.name or "", row.routing_key or ""


def _fields(*names: str) -> Callable[[list[Any]], Iterable[Sequence[object]]]:
    return lambda value: ([row.get(name, "") for name in names] for row in value)


def _letters(value: list[Any]) -> Iterable[Sequence[object]]:
    for row in rows(value, LetterRow):
        at = row.buried_at
        buried = "" if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
        yield tuple(
            "" if cell is None else cell for cell in (row.id, row.queue, buried, row.starts, row.reason)
        )


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= TEXT_MAX else f"{text[: TEXT_MAX - 1]}…"


Rows = Callable[[list[Any]], Iterable[Sequence[object]]]
REQUEST_COLUMNS = ("id", "task", "arguments", "running for", "pid")
LEASE_COLUMNS = ("name", "holder", "term", "left_s", "mine")
MEMBER_COLUMNS = ("node", "state", "software", "pid", "clock", "silent_s")
TABLES: dict[str, tuple[Sequence[str], Rows]] = {
    "active": (REQUEST_COLUMNS, _requests),
    "reserved": (REQUEST_COLUMNS, _requests),
    "scheduled": (("due", "id", "task"), _scheduled),
    "active_queues": (("queue", "exchange", "routing key"), _queues),
    "leases": (LEASE_COLUMNS, _fields(*LEASE_COLUMNS)),
    "members": (("knows", *MEMBER_COLUMNS[1:]), _fields(*MEMBER_COLUMNS)),
    "dlq": (("letter", "queue", "since", "starts", "reason"), _letters),
}
