"""How the answers of workers are printed for people: tables where they have rows, else as they are."""

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from time import time
from typing import Any

import click

from umbel.cli.show.printing import print_table, say
from umbel.protocol.pidbox import Answers
from umbel.text import one_line

TEXT_MAX = 60


def print_answers(command: str, answers: "Answers") -> None:
    """A table of all nodes' rows where the command has one; what is no row is printed below."""
    found = TABLES.get(command)
    if found is None:
        print_replies(answers)
        return
    columns, rows_of = found
    replies = sorted(answers.replies.items())
    whole = {node: value for node, value in replies if isinstance(value, list)}
    rows = [[node, *row] for node, value in whole.items() for row in rows_of(value)]
    if rows:
        print_table(("node", *columns), rows)
    for node in whole:
        if not any(row[0] == node for row in rows):
            say(f"{node}: - none -")
    print_values([(node, value) for node, value in replies if node not in whole])


def print_replies(answers: "Answers") -> None:
    print_values(sorted(answers.replies.items()))


def print_values(values: Iterable[tuple[str, Any]]) -> None:
    for node, value in values:
        click.echo(f"{click.style(one_line(node), bold=True)}: {_mark(value)}")
        for line in _lines(value):
            say(f"    {line}")


def _mark(value: Any) -> str:
    return click.style("error", fg="red") if isinstance(value, dict) and "error" in value else "ok"


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict) and len(value) == 1 and ("ok" in value or "error" in value):
        return str(next(iter(value.values()))).strip().splitlines()
    if value is None:
        return []
    if isinstance(value, str):
        return value.splitlines()
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return list(value) or ["- none -"]
    if value in ([], {}):
        return ["- none -"]
    return json.dumps(value, indent=2, ensure_ascii=False, default=str).splitlines()


def _requests(value: list[Any]) -> Iterable[Sequence[object]]:
    for one in value:
        began = one.get("time_start")
        running = f"{max(0.0, time() - began):.1f} s" if isinstance(began, int | float) else ""
        arguments = ", ".join(_short(one.get(name)) for name in ("args", "kwargs") if one.get(name))
        yield one.get("id", ""), one.get("name", ""), arguments, running, one.get("worker_pid") or ""


def _scheduled(value: list[Any]) -> Iterable[Sequence[object]]:
    for one in value:
        request = one.get("request") or {}
        yield one.get("eta", ""), request.get("id", ""), request.get("name", "")


def _fields(*names: str) -> Callable[[list[Any]], Iterable[Sequence[object]]]:
    return lambda value: ([one.get(name, "") for name in names] for one in value)


def _letters(value: list[Any]) -> Iterable[Sequence[object]]:
    for one in value:
        buried = datetime.fromtimestamp(one.get("buried_at") or 0, UTC).isoformat(timespec="seconds")
        yield one.get("id", ""), one.get("queue", ""), buried, one.get("starts", ""), one.get("reason", "")


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
    "active_queues": (
        ("queue", "exchange", "routing key"),
        lambda value: (
            (one.get("name", ""), (one.get("exchange") or {}).get("name", ""), one.get("routing_key", ""))
            for one in value
        ),
    ),
    "leases": (LEASE_COLUMNS, _fields(*LEASE_COLUMNS)),
    "members": (("knows", *MEMBER_COLUMNS[1:]), _fields(*MEMBER_COLUMNS)),
    "dlq": (("letter", "queue", "since", "starts", "reason"), _letters),
}
