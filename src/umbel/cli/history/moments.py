"""Times, periods and patterns as the commands of the history take them."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from umbel.cli.options import FunctionT
from umbel.history.comparing import FIRST, LAST, Span

AGO = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


class Moment(click.ParamType[datetime]):
    """A time in ISO 8601 (UTC where it does not say), or how long ago: 90s, 15m, 2h, 3d, 1w."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        text = str(value).strip()
        try:
            if text[-1:] in AGO:
                return datetime.now(UTC) - timedelta(seconds=float(text[:-1]) * AGO[text[-1]])
            at = datetime.fromisoformat(text)
        except (ValueError, OverflowError):
            self.fail(
                f"{text!r} is not a time; write 2026-11-15T10:00, or how long ago: 90s, 15m, 2h, 3d",
                param,
                ctx,
            )
        return at if at.tzinfo else at.replace(tzinfo=UTC)


class Period(click.ParamType[Span]):
    """Two moments with `..` between them; one that is left out is the history's own begin or end."""

    name = "period"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Span:
        if isinstance(value, Span):
            return value
        since, dots, until = str(value).partition("..")
        if not dots or not (since or until):
            self.fail(
                f"{value!r} is not a period; write 2026-11-15T10:00..2026-11-15T11:00, 2h..1h or 1h..",
                param,
                ctx,
            )
        moment = Moment()
        span = Span(
            moment.convert(since, param, ctx) if since else FIRST,
            moment.convert(until, param, ctx) if until else LAST,
        )
        if span.since >= span.until:
            self.fail(f"{value!r} ends before it begins; write the earlier time first", param, ctx)
        return span


def time_options(function: FunctionT) -> FunctionT:
    return _with(
        function,
        click.option("--since", type=Moment(), help="Not before this time (UTC), or 15m, 2h, 3d ago."),
        click.option("--until", type=Moment(), help="Before this time (UTC), or 15m, 2h, 3d ago."),
    )


def part_options(function: FunctionT) -> FunctionT:
    """Which tasks: by their name and their queue."""
    return _with(
        function,
        click.option("--task", default="", metavar="GLOB", help="Only tasks of this name, as in 'shop.*'."),
        click.option("--queue", default="", metavar="GLOB", help="Only of this queue, as in 'mail*'."),
    )


def _with(function: FunctionT, *options: Callable[[FunctionT], FunctionT]) -> FunctionT:
    for option in reversed(options):
        function = option(function)
    return function
