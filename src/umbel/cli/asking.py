"""Parts that all commands which query workers share: options, target workers, exit codes, printed replies.

Exit codes: 0 if all expected workers replied, 69 if none did, 75 if some did not.
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


@dataclass(frozen=True)
class Targets:
    """The workers that a command addresses, and the seconds that it waits for their replies."""

    destination: tuple[str, ...] | None
    pattern: str | None
    matcher: str | None
    timeout_s: float | None

    def __str__(self) -> str:
        return ", ".join(self.destination) if self.destination else self.pattern or "all workers"


@dataclass(frozen=True)
class Question:
    """The options of every command that queries workers: app, broker, targets, output format."""

    app_name: str | None
    url: str | None
    to: Targets
    as_json: bool

    def ask(self, method: str, arguments: Mapping[str, Any] | None = None) -> "Answers":
        """Send a remote command to the target workers, and return their replies."""
        asked = arguments or {}
        return ask_in_time(
            self.app_name,
            lambda broker: ask_on(broker, self.to, method, asked),
            self.to.timeout_s,
            url=self.url,
        )

    def tell(self, method: str, arguments: Mapping[str, Any]) -> None:
        """Send a remote command without waiting for replies."""
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
        """Print the replies as JSON, together with `more`, or as text; return the exit code."""
        if self.as_json:
            print_json({**as_data(answers), **more})
        elif answers.replies:
            print_answers(answers)
        return judge(answers, self._how_to_start())

    def _how_to_start(self) -> str:
        """Return a hint with the command that starts a worker for the same app or broker."""
        named = [f" -A {self.app_name}"] if self.app_name else []
        named += [f" -b {without_password(self.url)}"] if self.url else []
        elsewhere = "" if self.url else ", or name the broker of a running one with -b"
        return f"; start one with `umbel worker{''.join(named)}`{elsewhere}"


def asks_workers(function: Callable[..., int]) -> Callable[..., int]:
    """Add the options for querying workers to a command, and pass them to it as a `Question`."""

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
        """Pass the parsed options as a `Question`."""
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
    """Return the targets that -d, --glob, --regex and --timeout select. Raise UsageError if they contradict
    each other.
    """
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
    """Send a remote command through an open broker, and return the workers' replies."""
    return await ControlClient(broker).ask(
        method,
        arguments,
        destination=to.destination,
        pattern=to.pattern,
        matcher=to.matcher,
        timeout_s=to.timeout_s,
    )


def judge(answers: "Answers", if_nobody: str = "") -> int:
    """Print missing and truncated replies on stderr, and return the exit code.

    `if_nobody` is a hint to print if no worker is known.
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
    """Describe a worker that did not reply."""
    if known.state == "unknown":
        return f"{known.node} did not answer"
    return f"{known.node} silent for {known.silent_s:.0f} s ({known.state})"


def as_data(answers: "Answers") -> dict[str, Any]:
    """Return the replies and the workers that did not reply, for --json."""
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
    """Find a remote command, built-in or of the app. Raise UsageError with the most similar name if there is
    none.
    """
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
    """Print the remote commands: those that change something, or those that only query."""
    rows = [
        (f"{entry.name} {entry.usage}".strip(), entry.help)
        for entry in sorted(known_commands(app_name), key=lambda entry: entry.name)
        if entry.changes is changes and not entry.is_hidden
    ]
    print_table(("command", "what it does"), rows)


def arguments_of(command: "Command", words: Sequence[str]) -> dict[str, Any]:
    """Parse the arguments of a remote command from words. Raise UsageError if they do not match."""
    try:
        return command.arguments_from(words)
    except TypeError as error:
        raise click.UsageError(str(error)) from None


# ---- answers ---------------------------------------------------------------------------------------

TEXT_MAX = 60


def print_answers(command: str, answers: "Answers") -> None:
    """Print the replies of all nodes as a table if the command has one. Replies without rows, such as
    errors, are printed below the table.
    """
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
    """Print the reply of each node below the node's name."""
    print_values(sorted(answers.replies.items()))


def print_values(values: Iterable[tuple[str, Any]]) -> None:
    """Print the value of each node below the node's name."""
    for node, value in values:
        click.echo(f"{click.style(one_line(node), bold=True)}: {_mark(value)}")
        for line in _lines(value):
            say(f"    {line}")


def _has_rows(value: Any) -> bool:
    """Return whether a reply is a list of dicts, which can be shown as a table."""
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def _mark(value: Any) -> str:
    """Return "ok" or "error" for a reply."""
    return "ok" if error_of(value) is None else click.style("error", fg="red")


def _lines(value: Any) -> list[str]:
    """Return the lines that show a reply: texts unchanged, everything else as JSON."""
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
    """Return the rows for active or reserved tasks."""
    for row, given in zip(rows(value, TaskRow), value, strict=True):
        running = "" if row.time_start is None else f"{max(0.0, time() - row.time_start):.1f} s"
        arguments = ", ".join(_short(given[name]) for name in ("args", "kwargs") if given.get(name))
        yield row.id or "", row.name or "", arguments, running, row.worker_pid or ""


def _scheduled(value: list[Any]) -> Iterable[Sequence[object]]:
    """Return the rows for tasks that wait for their time."""
    for row in rows(value, ScheduledRow):
        yield row.eta or "", row.request.id or "", row.request.name or ""


def _queues(value: list[Any]) -> Iterable[Sequence[object]]:
    """Return the rows for consumed queues."""
    for row in rows(value, QueueRow):
        yield row.name or "", row.exchange.name or "", row.routing_key or ""


def _fields(*names: str) -> Callable[[list[Any]], Iterable[Sequence[object]]]:
    """Return a function for rows with these fields of each dict."""
    return lambda value: ([row.get(name, "") for name in names] for row in value)


def _letters(value: list[Any]) -> Iterable[Sequence[object]]:
    """Return the rows for dead letters."""
    for row in rows(value, LetterRow):
        at = row.buried_at
        buried = "" if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
        yield tuple(
            "" if cell is None else cell for cell in (row.id, row.queue, buried, row.starts, row.reason)
        )


def _short(value: Any) -> str:
    """Return a value as text, shortened for a table."""
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
