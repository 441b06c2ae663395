"""What the commands that ask workers share: their options, which workers to ask, how to end.

Exit codes: 0 all expected workers answered; 69 none did; 75 some did not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from typing import Any

import click

from umbel.brokers.interface import FanOut
from umbel.cli import completion, exits
from umbel.cli.broker import ask_in_time
from umbel.cli.cluster.panels import known_commands
from umbel.cli.options import app_option, broker_option, json_option, timeout_option
from umbel.cli.show.printing import print_json, print_table, say
from umbel.control.client import Asker
from umbel.control.panel import Command
from umbel.protocol.pidbox import Answers, Known
from umbel.urls import without_password


@dataclass(frozen=True)
class Whom:
    """Which workers, and how long they are waited for."""

    destination: tuple[str, ...] | None
    pattern: str | None
    matcher: str | None
    timeout_s: float

    def __str__(self) -> str:
        return ", ".join(self.destination) if self.destination else self.pattern or "all workers"


@dataclass(frozen=True)
class Question:
    """What every command that asks workers is given on its command line."""

    app_name: str | None
    url: str | None
    to: Whom
    as_json: bool

    def ask(self, method: str, arguments: Mapping[str, Any] | None = None) -> "Answers":
        asked = arguments or {}
        return ask_in_time(
            self.app_name,
            lambda broker, left_s: ask_on(broker, self.to, method, asked, left_s),
            self.to.timeout_s,
            url=self.url,
        )

    def tell(self, method: str, arguments: Mapping[str, Any]) -> None:

        whom: dict[str, Any] = {
            "destination": self.to.destination,
            "pattern": self.to.pattern,
            "matcher": self.to.matcher,
        }
        ask_in_time(
            self.app_name,
            lambda broker, _: Asker(broker).tell(method, arguments, **whom),
            self.to.timeout_s,
            url=self.url,
        )

    def show(self, answers: "Answers", print_answers: Callable[["Answers"], None], **more: Any) -> int:
        """Print the answers, as JSON with what else is known, or for people; the exit code."""
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
    """The options of a command that asks workers, handed to it as one `Question`."""

    @wraps(function)
    def gathered(
        *,
        app_name: str | None,
        url: str | None,
        destination: str | None,
        glob: str | None,
        regex: str | None,
        timeout_s: float,
        as_json: bool,
        **rest: Any,
    ) -> int:
        to = whom(destination, glob, regex, timeout_s)
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


def whom(destination: str | None, glob: str | None, regex: str | None, timeout_s: float) -> Whom:
    if sum(given is not None for given in (destination, glob, regex)) > 1:
        raise click.UsageError("give only one of --destination, --glob and --regex")
    if not timeout_s > 0:
        raise click.UsageError(f"--timeout must be above 0, not {timeout_s:g}")
    names = (
        None if destination is None else tuple(one.strip() for one in destination.split(",") if one.strip())
    )
    return Whom(names, glob or regex, "glob" if glob else "pcre" if regex else None, timeout_s)


async def ask_on(
    broker: FanOut, to: Whom, method: str, arguments: Mapping[str, Any], left_s: float
) -> "Answers":

    return await Asker(broker).ask(
        method,
        arguments,
        destination=to.destination,
        pattern=to.pattern,
        matcher=to.matcher,
        timeout_s=left_s,
    )


def judge(answers: "Answers", if_nobody: str = "") -> int:
    """Print on stderr which workers are missing and what was cut; the exit code.

    `if_nobody`: what to do where no worker is known at all.
    """
    for node, total in sorted(answers.totals.items()):
        shown = len(answers.replies[node])
        say(f"umbel: {node} sent the first {shown:,} of {total:,} entries", err=True)
    if not answers.replies:
        named = ", ".join(one.node for one in answers.silent)
        say(f"umbel: no worker answered{f': {named}' if named else if_nobody}", err=True)
        return exits.NOBODY_ANSWERED
    for one in answers.lost:
        say(f"umbel: {_silence(one)}", err=True)
    if not answers.silent:
        return exits.OK
    count = len(answers.replies)
    missing = "; ".join(map(_silence, answers.silent))
    say(f"umbel: {count} of {count + len(answers.silent)} replied; {missing}", err=True)
    return exits.PARTIAL


def _silence(known: "Known") -> str:
    if known.state == "unknown":
        return f"{known.node} did not answer"
    return f"{known.node} silent for {known.silent_s:.0f} s ({known.state})"


def as_data(answers: "Answers") -> dict[str, Any]:
    """For --json: the replies, and who should have answered too."""
    return {
        "replies": dict(answers.replies),
        "silent": [
            {"node": one.node, "state": one.state, "silent_s": one.silent_s} for one in answers.silent
        ],
        "lost": [{"node": one.node, "silent_s": one.silent_s} for one in answers.lost],
        "unknown": list(answers.unknown),
        "totals": dict(answers.totals),
    }


def find_command(app_name: str | None, name: str, *, changes: bool) -> "Command":
    """A built-in command, or one of the app's own; UsageError with the nearest name."""
    panel = known_commands(app_name)
    command = panel.find(name)
    verb, other = ("control", "inspect") if changes else ("inspect", "control")
    if command is None:
        near = get_close_matches(name, [one.name for one in panel if one.changes is changes], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; `umbel {verb}` lists them"
        raise click.UsageError(f"unknown command {name!r}{hint}")
    if command.changes is not changes:
        raise click.UsageError(f"{name!r} belongs to `umbel {other}`: use `umbel {other} {name}`")
    return command


def list_commands(app_name: str | None, *, changes: bool) -> None:

    rows = [
        (f"{one.name} {one.usage}".strip(), one.help)
        for one in sorted(known_commands(app_name), key=lambda one: one.name)
        if one.changes is changes and not one.is_hidden
    ]
    print_table(("command", "what it does"), rows)


def arguments_of(command: "Command", words: Sequence[str]) -> dict[str, Any]:
    try:
        return command.arguments_from(words)
    except TypeError as error:
        raise click.UsageError(str(error)) from None
