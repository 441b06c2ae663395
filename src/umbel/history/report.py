"""Report: the history on one page that needs nothing else: no network, no script, no font.

It is made of the figures (`figures.py`), drawn (`charts.py`) and listed: every number on it is a
number of the tables. The page forbids itself scripts and anything from elsewhere, so that even a
mistake in escaping could not run what somebody named a task.
"""

from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

from umbel.events.tables import ANOMALY_KINDS
from umbel.history import charts
from umbel.history.charts import BLUE, GREEN, GREY, LIGHT, ORANGE, PURPLE, VERMILION, Series, Span
from umbel.history.figures import (
    ELECTIONS_MAX,
    LISTED_MAX,
    NODES_MAX,
    Figures,
    Row,
    column,
    failure_rate,
)
from umbel.history.layout import figure, nothing, section, table
from umbel.history.markup import Content, Markup, joined, tag
from umbel.history.scales import count, duration, instant, percent, rate, signed

SHORT = 12
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
OUTCOMES = (
    ("succeeded", "n_succeeded", BLUE),
    ("failed", "n_failed", VERMILION),
    ("retried", "n_retried", ORANGE),
    ("revoked", "n_revoked", GREY),
    ("rejected", "n_rejected", PURPLE),
)
ENDINGS = {
    "alive": ("still there at the end", GREEN),
    "offline": ("said goodbye", BLUE),
    "lost": ("fell silent", VERMILION),
}
ELECTION_COLOURS = {"done": GREEN, "elected": BLUE, "failed": VERMILION, "expired": ORANGE}


def main_figures(found: Figures) -> dict[str, str]:
    """What the report says first, as text: for its head, for terminals and for the demo."""
    totals = found.totals
    states = {row["state"]: row["n"] for row in found.states}
    return {
        "tasks": count(totals["tasks"]),
        **{state: count(number) for state, number in states.items()},
        "tried again": count(totals["tasks_retried"]),
        "attempts": count(totals["n_attempts"]),
        "failure rate": percent(failure_rate(totals)),
        "mean throughput": rate(found.mean_per_s),
        "peak throughput": rate(found.peak_per_s),
        **{
            f"{what} {share}": duration(totals[f"{what}_{share}_s"])
            for what in ("wait", "run")
            for share in ("p50", "p95")
        },
        "nodes": count(totals["nodes"]),
        "elections": count(totals["elections"]),
        "anomalies": count(totals["anomalies"]),
        "events": count(totals["events"]),
    }


def page(found: Figures, *, title: str = "Umbel history") -> str:
    sections = [
        section(title, _not_built(missing) if (missing := _missing(found, needs)) else drawn(found))
        for title, needs, drawn in SECTIONS
    ]
    style = (files("umbel.history") / "report.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    body = tag("body", tag("main", _head(found, title), sections, _foot(found)))
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _head(found: Figures, title: str) -> Markup:
    period = found.period
    when = f"{instant(period.start)} to {instant(period.end)} UTC" if period else "nothing was recorded"
    cards = [
        tag("div", tag("dt", name), tag("dd", value), data_figure=name)
        for name, value in main_figures(found).items()
    ]
    return tag("header", tag("h1", title), tag("p", when, class_="when"), tag("dl", cards, class_="cards"))


def _foot(found: Figures) -> Markup:
    build = found.build
    text = f"Build {build['number']}, built {build.get('built_at', '')}"
    outside = found.totals["n_outside"]
    note = (
        f" {count(outside)} attempts ended at times outside the period shown: their nodes' clocks are wrong,"
        " or their events were recorded later."
        if outside
        else ""
    )
    return tag("footer", tag("p", f"{text}. All times are UTC.{note}"))


def _throughput(found: Figures) -> Content:
    period = found.period
    busiest = found.busiest
    if period is None or busiest is None:
        outside = found.totals["n_outside"]
        said = f"All {count(outside)} attempts that ended did so at times outside the period shown."
        return nothing(said if outside else "No attempt of a task has ended.")
    series = [
        Series(name, colour, column(found.steps, key))
        for name, key, colour in OUTCOMES
        if any(row.get(key) for row in found.steps)
    ]
    times = [row["at"] for row in found.steps]
    drawn = charts.stacked_bars(
        "Attempts that ended", times, period.step_s, series, f"attempts per {duration(period.step_s)}"
    )
    said = (
        f"Attempts that ended, per {duration(period.step_s)}, by how. Busiest at {instant(busiest['at'])}: "
        f"{count(busiest['n_attempts'])}, {rate(found.peak_per_s)}. "
        f"Mean over the whole period, idle times included: {rate(found.mean_per_s)}."
    )
    listed = _steps_table(found.steps, [(name, key, count) for name, key, _ in OUTCOMES])
    return figure(said, drawn, listed)


def _durations(found: Figures, what: str, said: str) -> Content:
    keys = [(name, f"{what}_{name}_s") for name in ("p50", "p95", "p99")]
    period = found.period
    if period is None or found.totals[keys[0][1]] is None:
        return nothing("Nothing was measured.")
    overall = ", ".join(f"{name} {duration(found.totals[key])}" for name, key in keys)
    if not any(row.get(keys[0][1]) is not None for row in found.steps):
        why = "no attempt that was measured ended in the period shown"
        return nothing(f"Over all: {overall}. Not drawn: {why}.")
    series = [
        Series(name, colour, column(found.steps, key), width)
        for (name, key), colour, width in zip(keys, (BLUE, ORANGE, VERMILION), (2.4, 1.8, 1.2), strict=True)
    ]
    times = [row["at"] for row in found.steps]
    drawn = charts.lines(f"{what.capitalize()} time", times, period.step_s, series)
    listed = _steps_table(found.steps, [(name, key, duration) for name, key in keys])
    return figure(f"{said} Over all: {overall}.", drawn, listed)


def _steps_table(steps: Sequence[Row], shown: Sequence[tuple[str, str, Callable[[Any], str]]]) -> Markup:
    rows = [
        [
            instant(row["at"]),
            *(form(row.get(key) or 0 if form is count else row.get(key)) for _, key, form in shown),
        ]
        for row in steps
        if row.get("n_attempts")
    ]
    return tag(
        "details",
        tag("summary", "The figures"),
        table(["from", *(name for name, _, _ in shown)], rows, numbers=range(1, len(shown) + 1)),
    )


def _breakdown(rows: Sequence[Row], what: str, many: str) -> Content:
    if not rows:
        return nothing(f"No {many} are known.")
    most = max(row["n_attempts"] for row in rows if not row["is_rest"])
    cells: list[list[Content]] = []
    for row in rows:
        name = f"{count(row['keys'])} other {many}" if row["is_rest"] else (row["key"] or "(not told)")
        numbers = [count(row[key]) for key in ("n_attempts", "n_succeeded", "n_failed", "n_retried")]
        times = [duration(row[f"{kind}_{p}_s"]) for kind in ("wait", "run") for p in ("p50", "p95")]
        bar = "" if row["is_rest"] else _bar(row, most)
        cells.append([name, bar, *numbers, percent(failure_rate(row)), *times])
    headings = [
        *(what, "", "attempts", "succeeded", "failed", "retried", "failure rate"),
        *("wait p50", "p95", "run p50", "p95"),
    ]
    said = "Most failures first, then most attempts; the bar shows how they ended."
    return joined(tag("p", said), table(headings, cells, numbers=range(2, 11), id_=f"by-{what}-table"))


def _bar(row: Row, most: int) -> Markup:
    """How the attempts of one row ended, as long as they are many."""
    width = 110.0
    x, parts = 0.0, []
    for name, key, colour in (*OUTCOMES, ("open", "n_open", LIGHT)):
        wide = row[key] / most * width
        if row[key]:
            parts.append(
                tag(
                    "rect",
                    tag("title", f"{count(row[key])} {name}"),
                    x=x,
                    y=0,
                    width=max(wide, 0.8),
                    height=12,
                    fill=colour,
                )
            )
        x += wide
    return tag("svg", parts, viewBox=f"0 0 {width:g} 12", class_="bar", aria_hidden="true")


def _errors(found: Figures) -> Content:
    if not found.errors:
        return tag("p", "No attempt raised an error.")
    rows = [
        [row["name"] or "(not told)", row["exception"], count(row["n"]), count(row["tasks"])]
        for row in found.errors
    ]
    return joined(
        tag("h3", "Most frequent errors"),
        table(
            ["task", "error (numbers as #)", "attempts", "tasks"], rows, numbers=(2, 3), id_="errors-table"
        ),
    )


def _sessions(found: Figures) -> Content:
    if not found.sessions or found.period is None:
        return nothing("No worker sent events.")
    lanes: dict[str, list[Span]] = {}
    for row in found.sessions:
        start, end = row["start"] or found.period.start, row["end"] or found.period.end
        end = found.period.end if row["ending"] == "alive" else end
        meaning, colour = ENDINGS.get(row["ending"], (row["ending"], GREY))
        title = (
            f"{row['hostname']}, process {row['pid']}: {instant(start)} to {instant(end)}, {meaning}; "
            f"clock {count(row['clock_min'])} to {count(row['clock_max'])}"
        )
        lanes.setdefault(row["hostname"], []).append(Span(start, max(end, start + 1e-3), colour, title))
    legend = [Series(meaning, colour, ()) for meaning, colour in ENDINGS.values()]
    totals = found.totals
    said = f"{count(totals['sessions'])} sessions of {count(totals['nodes'])} nodes"
    said += f"; {count(totals['sessions_lost'])} were lost."
    if totals["nodes"] > NODES_MAX:
        said += f" The first {NODES_MAX} are shown, lost nodes first."
    rows = [
        [
            *(row["hostname"], row["pid"], instant(row["start"]), instant(row["end"]), row["ending"]),
            *(duration(row["up_s"]), count(row["clock_min"]), count(row["clock_max"])),
            f"{row['sw_ident'] or ''} {row['sw_ver'] or ''}".strip(),
        ]
        for row in found.sessions
    ]
    headings = ["node", "process", "first sign", "end", "ending", "up", "clock from", "to", "software"]
    listed = tag(
        "details",
        tag("summary", "The figures"),
        table(headings, rows, numbers=(1, 5, 6, 7), whole=(2, 3), id_="sessions-table"),
    )
    drawn = charts.lanes("Worker sessions", list(lanes.items()), *found.period.shown, legend)
    return figure(said, drawn, listed)


def _elections(found: Figures) -> Content:
    if not found.elections or found.period is None:
        return nothing("There were no elections.")
    lanes: dict[str, list[Span]] = {}
    for row in found.elections:
        at = row["at_s"] or found.period.start
        title = f"{row['election_id']}: {row['outcome']}, {row['winner'] or 'no winner'}, {instant(at)}"
        colour = ELECTION_COLOURS.get(row["outcome"], GREY)
        lanes.setdefault(row["topic"] or "(not told)", []).append(Span(at, at, colour, title))
    outcomes = [name for name in ELECTION_COLOURS if any(row["outcome"] == name for row in found.elections)]
    legend = [Series(name, ELECTION_COLOURS[name], ()) for name in outcomes]
    shown = list(lanes.items())[:NODES_MAX]
    totals = found.totals
    said = f"{count(totals['elections'])} elections; {count(totals['elections_broken'])} broke a guarantee."
    if totals["elections"] > ELECTIONS_MAX:
        said += f" The last {ELECTIONS_MAX} are shown."
    rows = [
        [
            *(row["election_id"], row["topic"] or "", row["winner"] or "", row["outcome"] or ""),
            *(
                row["protocol"],
                instant(row["at_s"]),
                duration(row["duration_s"]),
                _violations(row["violations"]),
            ),
        ]
        for row in found.elections[:LISTED_MAX]
    ]
    headings = ["election", "topic", "winner", "outcome", "protocol", "began", "took", "broken promises"]
    drawn = charts.lanes("Elections by topic", shown, *found.period.shown, legend)
    return figure(
        said,
        drawn,
        _unfolded(table(headings, rows, numbers=(6,), whole=(5,), id_="elections-table"), len(rows)),
    )


def _unfolded(listed: Markup, rows: int) -> Markup:
    """A long list is there when it is asked for, a short one at once."""
    if rows <= SHORT:
        return listed
    return tag("details", tag("summary", f"The last {rows}"), listed)


def _violations(told: str) -> str:
    return "none" if told in {"[]", ""} else told.strip("[]")


def _skew(found: Figures) -> Content:
    if not found.skews:
        return nothing("No event has both its sender's time and the broker's.")
    rows = [(row["hostname"], row["low_s"], row["middle_s"], row["high_s"]) for row in found.skews]
    worst = found.skews[0]
    said = (
        "How far each sender's clock is ahead of the broker's, by its events: the middle, and the range of "
        "nine tenths. An event reaches the log a moment after it happened, so a clock that is right shows a "
        f"little below zero. Farthest off: {worst['hostname']}, {signed(worst['middle_s'])}."
    )
    listed = table(
        ["sender", "events", "5 %", "middle", "95 %"],
        [
            [row["hostname"], count(row["n"]), *(signed(row[key]) for key in ("low_s", "middle_s", "high_s"))]
            for row in found.skews
        ],
        numbers=range(1, 5),
        id_="skew-table",
    )
    drawn = charts.ranges("Clock skew", rows)
    return figure(said, drawn, tag("details", tag("summary", "The figures"), listed))


def _anomalies(found: Figures) -> Content:
    if not found.anomaly_kinds:
        return nothing("None: nothing was lost, run twice or reported out of order.")
    kinds = [
        [row["kind"], count(row["rows"]), ANOMALY_KINDS.get(row["kind"], "")] for row in found.anomaly_kinds
    ]
    rows = [
        [
            row["kind"],
            instant(row["at_s"]),
            row["subject"] or "",
            row["name"] or "",
            row["worker"] or "",
            row["detail"] or "",
        ]
        for row in found.anomalies
    ]
    total = found.totals["anomalies"]
    heading = "All of them" if total <= LISTED_MAX else f"The last {LISTED_MAX} of {count(total)}"
    return joined(
        table(["kind", "rows", "what it means"], kinds, numbers=(1,), id_="anomaly-kinds-table"),
        tag("h3", heading),
        table(
            ["kind", "at", "about", "task", "worker", "what exactly"], rows, whole=(1,), id_="anomalies-table"
        ),
    )


def _wait(found: Figures) -> Content:
    return _durations(found, "wait", "From being sent to the start, of attempts that ended in a step.")


def _run(found: Figures) -> Content:
    return _durations(found, "run", "From the start to the end, of attempts that ended in a step.")


def _by_task(found: Figures) -> Content:
    return joined(_breakdown(found.tasks, "task", "tasks"), _errors(found))


def _by_worker(found: Figures) -> Content:
    return _breakdown(found.nodes, "worker", "workers")


def _missing(found: Figures, needed: str) -> str:
    return needed if needed in found.left_out else ""


def _not_built(table: str) -> Markup:
    return nothing(f"Unknown: this build does not contain the table {table}.")


SECTIONS: tuple[tuple[str, str, Callable[[Figures], Content]], ...] = (
    ("Throughput", "attempts", _throughput),
    ("Waiting time", "attempts", _wait),
    ("Run time", "attempts", _run),
    ("By task", "attempts", _by_task),
    ("By worker", "attempts", _by_worker),
    ("Worker sessions", "workers", _sessions),
    ("Elections", "elections", _elections),
    ("Clock skew", "timeline", _skew),
    ("Anomalies", "anomalies", _anomalies),
)
"""Each with its source table."""
