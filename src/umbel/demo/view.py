"""View: the demo while it runs: who is there, their clocks, how much gets done, and what just happened."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from umbel.monitor.feed import Feed

BARS = "▁▂▃▄▅▆▇█"
COLOURS = {"alive": "green", "silent": "red", "left": "bright_black"}


class View:
    """On a terminal it draws; elsewhere each note is a line."""

    def __init__(self, feed: Feed, progress: Callable[[], str]) -> None:
        self._feed = feed
        self._progress = progress
        self._began = time.monotonic()
        self._live: Live | None = None
        if sys.stderr.isatty():
            self._live = Live(console=Console(stderr=True), refresh_per_second=4, get_renderable=self._draw)

    def note(self, text: str) -> None:
        line = f"{time.monotonic() - self._began:5.1f} s  {text}"
        if self._live is None:
            click.echo(line, err=True)
        else:
            self._live.console.print(line, highlight=False)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def _draw(self) -> Group:
        now = time.time()
        model = self._feed.model
        table = Table(box=None, pad_edge=False)
        for name in ("node", "state", "clock", "running", "done"):
            table.add_column(name, justify="left" if name in ("node", "state") else "right")
        for one in model.members(now):
            state = one.state if one.state != "silent" else f"silent {one.silent_s:.0f} s"
            numbers = (f"{value:,}" for value in (one.clock, one.active, one.processed))
            table.add_row(one.node, Text(state, style=COLOURS[one.state]), *numbers)
        events, done, failed = model.rates(now)
        clock = model.receiver.clock.value
        pace = f"{done:,.0f} done/s  {failed:,.0f} failed/s  {events:,.0f} events/s  clock {clock:,}"
        bars = f"{_bars(list(model.history(now)))} last minute"
        return Group(table, Text(f"{bars}\n{pace}\n{self._progress()}", no_wrap=True))


def _bars(values: list[int]) -> str:
    highest = max(values, default=0) or 1
    return "".join(BARS[min(len(BARS) - 1, value * len(BARS) // (highest + 1))] for value in values)
