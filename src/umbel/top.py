"""The terminal monitor (`umbel top`). It draws the model twice a second and sends commands by Feed."""

from collections.abc import Callable, Coroutine, Sequence
from time import localtime, strftime, time
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.coordinate import Coordinate
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Label, Sparkline, Static

from umbel.brokers.interface import Depth
from umbel.errors import UmbelError
from umbel.events.types import TaskEvent
from umbel.events.view import TaskRecord
from umbel.monitor.feed import Feed
from umbel.monitor.model import Filter, MemberRow
from umbel.protocol.pidbox import Answers
from umbel.text import one_line
from umbel.wire.show import brief

DRAW_EVERY_S = 0.5
TASKS_SHOWN = 60
MEMBERS_SHOWN = 500
WIDE_COLUMNS = 110  # a terminal this wide shows members and tasks side by side
COLOURS = {
    "SUCCESS": "green",
    "FAILURE": "red",
    "RETRY": "yellow",
    "REVOKED": "magenta",
    "STARTED": "cyan",
    "RECEIVED": "blue",
    "alive": "green",
    "silent": "red",
    "left": "bright_black",
}
Cells = Sequence[str | Text]


class Confirm(ModalScreen[bool]):
    """Asks for confirmation of an action that cannot be undone."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape", "answer(False)", "no"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """Show the question with its keys."""
        asked = (f"{one_line(self._question)}  ", ("y", "bold"), "es / ", ("n", "bold"), "o")
        yield Label(Text.assemble(*asked), id="question")

    def action_answer(self, answer: bool) -> None:
        """Close the question with this answer."""
        self.dismiss(answer)


class Top(App[None]):
    """The application of `umbel top`: members, queues and tasks, with the events of the selected task."""

    TITLE = "umbel top"
    CSS = """
    #summary { height: 1; padding: 0 1; background: $panel; }
    #pace { height: 2; margin: 0 1; }
    #left { width: 2fr; }
    #right { width: 3fr; }
    #queues { height: 30%; }
    #story { height: 35%; border-top: solid $panel; padding: 0 1; overflow-y: auto; }
    #filter { display: none; height: 3; }
    #filter.shown { display: block; }
    Confirm { align: center middle; }
    #question { padding: 1 3; border: thick $warning; background: $surface; }
    DataTable { height: 1fr; }
    .-narrow #panes { layout: vertical; }
    .-narrow #left { layout: horizontal; width: 100%; height: 7; }
    .-narrow #members { width: 3fr; }
    .-narrow #queues { width: 2fr; height: 100%; }
    .-narrow #right { width: 100%; height: 1fr; }
    .-narrow #pace { height: 1; }
    """
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (WIDE_COLUMNS, "-wide")]  # noqa: RUF012
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("space", "pause", "pause", key_display="␣"),
        Binding("slash", "filter", "filter"),
        Binding("w", "of_worker", "worker's"),
        Binding("escape", "clear", "all"),
        Binding("r", "revoke", "revoke"),
        Binding("t", "terminate", "end"),
        Binding("plus,equals_sign", "resize(1)", "grow"),
        Binding("minus", "resize(-1)", "shrink"),
        Binding("S", "shut_down", "stop"),
    ]

    def __init__(self, feed: Feed, broker: str) -> None:
        super().__init__()
        self.feed = feed
        self.filter = Filter()
        self.paused = False
        self._broker = broker
        self._selected = ""  # the task whose events are shown
        self._shown: dict[str, Sequence[tuple[str, Cells]]] = {}

    def compose(self) -> ComposeResult:
        """Lay out the tables, the sparkline and the filter."""
        yield Static(id="summary")
        yield Sparkline([0.0], id="pace")
        with Horizontal(id="panes"):
            with Vertical(id="left"):
                yield DataTable[str | Text](id="members", cursor_type="row", zebra_stripes=True)
                yield DataTable[str | Text](id="queues", cursor_type="none")
            with Vertical(id="right"):
                yield DataTable[str | Text](id="tasks", cursor_type="row", zebra_stripes=True)
                yield Static(id="story")
        yield Input(
            placeholder="part of a task's name, the beginning of its id, or state:FAILURE", id="filter"
        )
        yield Footer(compact=True)

    def on_mount(self) -> None:
        """Add the columns, start the feed and draw at intervals."""
        self._table("members").add_columns("node", "state", "active", "done", "clock", "load", "software")
        self._table("queues").add_columns("queue", "ready", "delayed", "claimed")
        self._table("tasks").add_columns("clock", "state", "task", "worker", "wait s", "run s", "id")
        self._table("tasks").focus()
        self.listen()
        self.set_interval(DRAW_EVERY_S, self.draw)

    @work(exclusive=True, group="feed")
    async def listen(self) -> None:
        """Run the feed until the screen closes."""
        await self.feed.run()

    # -- drawing ---------------------------------------------------------------------------------

    def draw(self) -> None:
        """Draw the model; while paused, only the summary."""
        if not self.query("#summary"):  # the screen is closing, and the timer outlives the widgets
            return
        now, model = time(), self.feed.model
        members = model.members(now)
        self.query_one("#summary", Static).update(self._summary(members, now))
        self.query_one("#pace", Sparkline).data = [float(row) for row in model.history(now)]
        if self.paused:
            return
        self._fill("members", [(row.node, _member(row)) for row in members[:MEMBERS_SHOWN]])
        self._fill("queues", [(name, _queue(name, depth)) for name, depth in self.feed.queues.items()])
        self._fill("tasks", [(row.uuid, _task(row)) for row in model.tasks(self.filter, TASKS_SHOWN)])
        self._draw_story()

    def _summary(self, members: Sequence[MemberRow], now: float) -> Text:
        if self.feed.problem:
            return Text(one_line(f"{self._broker}: {self.feed.problem}"), style="bold red")
        events, succeeded, failed = self.feed.model.rates(now)
        alive = sum(member.state == "alive" for member in members)
        counts = self.feed.model.state.counts.items()
        states = "  ".join(f"{state.lower()} {count:,}" for state, count in counts)
        text = Text(
            f"members {alive}/{len(members)}  clock {self.feed.model.receiver.clock.value:,}  "
            f"{succeeded:,.0f} done/s  {failed:,.0f} failed/s  {events:,.0f} events/s"
        )
        if self.paused:
            text.append("  PAUSED", style="bold yellow")
        if self.filter != Filter():
            text.append(f"  only {_filter_label(self.filter)}", style="bold yellow")
        return text.append(f"  {states}  {self._broker}")  # last, because a narrow terminal cuts it off

    def _draw_story(self) -> None:
        story = self.feed.model.story(self._selected) if self._selected else []
        lines = [_line(event) for event in story] or [Text("select a task to see its events")]
        self.query_one("#story", Static).update(Text("\n").join(lines))

    def _fill(self, name: str, rows: Sequence[tuple[str, Cells]]) -> None:
        """Show these rows; the cursor stays on its row."""
        table, shown = self._table(name), self._shown.get(name, ())
        self._shown[name] = rows
        if rows == shown:
            return
        if [key for key, _ in rows] == [key for key, _ in shown]:
            _update(table, shown, rows)
            return
        selected = self._key_at_cursor(name)
        scrolled = table.scroll_y
        table.clear()
        for key, cells in rows:
            table.add_row(*cells, key=key)
        keys = [key for key, _ in rows]
        if selected in keys:
            table.move_cursor(row=keys.index(selected), scroll=False)
        table.scroll_to(y=scrolled, animate=False)

    def _table(self, name: str) -> DataTable[str | Text]:
        return self.query_one(f"#{name}", DataTable)

    def _key_at_cursor(self, name: str) -> str:
        table = self._table(name)
        if not table.row_count:
            return ""
        return table.coordinate_to_cell_key(Coordinate(table.cursor_row, 0)).row_key.value or ""

    # -- keys ------------------------------------------------------------------------------------

    def on_data_table_row_selected(self, selected: DataTable.RowSelected) -> None:
        """Show the events of the selected task."""
        if selected.data_table.id == "tasks":
            self._selected = selected.row_key.value or ""
            self._draw_story()

    def on_input_submitted(self, submitted: Input.Submitted) -> None:
        """Filter the tasks by the entered text, or by `state:NAME`."""
        text = submitted.value.strip()
        state = text.removeprefix("state:").upper() if text.startswith("state:") else ""
        self.filter = Filter(text="" if state else text, state=state)
        submitted.input.remove_class("shown")
        self._table("tasks").focus()
        self.draw()

    def action_pause(self) -> None:
        """Freeze the tables, or follow the cluster again."""
        self.paused = not self.paused
        self.draw()

    def action_filter(self) -> None:
        """Open the input of the filter."""
        entry = self.query_one("#filter", Input)
        entry.value = ""
        entry.add_class("shown")
        entry.focus()

    def action_of_worker(self) -> None:
        """List only the tasks of the worker at the cursor."""
        self.filter = Filter(worker=self._key_at_cursor("members"))
        self.draw()

    def action_clear(self) -> None:
        """Remove the filter."""
        self.query_one("#filter", Input).remove_class("shown")
        self.filter = Filter()
        self.draw()

    def action_revoke(self) -> None:
        """Revoke the selected task, after confirmation."""
        self._on_task("revoke", terminate=False)

    def action_terminate(self) -> None:
        """Terminate the selected task, after confirmation."""
        self._on_task("end", terminate=True)

    def action_resize(self, by: int) -> None:
        """Grow or shrink the pool of the worker at the cursor by one process."""
        node = self._key_at_cursor("members")
        if node:
            command = "pool_grow" if by > 0 else "pool_shrink"
            self._act(f"{command} on {node}", lambda: self.feed.ask(command, {"n": 1}, [node]))

    def action_shut_down(self) -> None:
        """Shut down the worker at the cursor, after confirmation."""
        node = self._key_at_cursor("members")

        async def shut_down() -> None:
            await self.feed.tell("shutdown", {}, [node])

        if node:
            self._confirmed(f"Shut {node} down?", lambda: self._act(f"shutdown of {node}", shut_down))

    def _on_task(self, verb: str, *, terminate: bool) -> None:
        uuid = self._selected if self.focused is not self._table("tasks") else self._key_at_cursor("tasks")

        def act() -> None:
            self._act(f"{verb} {uuid}", lambda: self.feed.revoke([uuid], terminate=terminate))

        if uuid:
            self._confirmed(f"{verb.capitalize()} task {uuid}?", act)

    def _confirmed(self, question: str, act: Callable[[], object]) -> None:
        def answered(yes: bool | None) -> None:
            if yes:
                act()

        self.push_screen(Confirm(question), answered)

    @work(group="actions")
    async def _act(self, name: str, act: Callable[[], Coroutine[Any, Any, Answers | None]]) -> None:
        try:
            answers = await act()
        except UmbelError as error:
            self.notify(one_line(f"{name}: {error}"), severity="error", markup=False)
            return
        outcome = "sent" if answers is None else f"{len(answers.replies)} answered"
        errors = [] if answers is None else list(answers.refusals.values())
        self.notify(
            one_line(f"{name}: {errors[0] if errors else outcome}"),
            severity="error" if errors else "information",
            markup=False,
        )


def _update(
    table: DataTable[str | Text], shown: Sequence[tuple[str, Cells]], rows: Sequence[tuple[str, Cells]]
) -> None:
    """Update only the cells that differ: redrawing a large cluster would take most of a CPU core."""
    for at, ((_, before), (_, after)) in enumerate(zip(shown, rows, strict=True)):
        for column, (old, new) in enumerate(zip(before, after, strict=True)):
            if old != new:
                table.update_cell_at(Coordinate(at, column), new, update_width=len(new) > len(old))


def _member(row: MemberRow) -> Cells:
    state = row.state if row.state != "silent" else f"silent {row.silent_s:.0f} s"
    return (
        _printable(row.node),
        Text(state, style=COLOURS[row.state]),
        *_numbers(row.active, row.processed, row.clock, row.load),
        _printable(row.software),
    )


def _task(task: TaskRecord) -> Cells:
    wait = None if task.received_at is None or task.started_at is None else task.started_at - task.received_at
    return (
        *_numbers(task.clock),
        Text(one_line(task.state), style=COLOURS.get(task.state, "")),
        _printable(task.name or "?"),
        _printable(task.worker or ""),
        *_numbers("" if wait is None else f"{max(0.0, wait):.3f}"),
        *_numbers("" if task.runtime is None else f"{task.runtime:.3f}"),
        _printable(task.uuid),
    )


def _line(event: TaskEvent) -> Text:
    fields = [
        f"{name}={one_line(brief(value))}"
        for name in event.__struct_fields__
        if name not in _ENVELOPE and (value := getattr(event, name)) is not None
    ]
    at = f"{strftime('%H:%M:%S', localtime(event.timestamp))}.{event.at_us // 1000 % 1000:03}"
    return Text(
        f"{at} {event.clock:>8} try {event.retries or 0} {event.type_name:<15} {_printable(event.hostname)}  "
        f"{' '.join(fields)}"
    )


_ENVELOPE = frozenset(
    {"hostname", "pid", "clock", "timestamp", "utcoffset", "inc", "seq", "uuid", "retries", "subject"}
)


def _numbers(*values: object) -> Cells:
    shown = [f"{value:,}" if isinstance(value, int) else one_line(str(value)) for value in values]
    return [Text(value, justify="right") for value in shown]


def _queue(name: str, depth: Depth) -> Cells:
    label = f"{name} (paused)" if depth.paused else name
    return _numbers(label, depth.ready, depth.delayed, depth.claimed)


def _printable(text: str) -> Text:
    """Return a peer's text so that it cannot move the cursor or be parsed as markup."""
    return Text(one_line(text))


def _filter_label(wanted: Filter) -> str:
    return " ".join(part for part in (wanted.text, wanted.state, wanted.worker) if part)
