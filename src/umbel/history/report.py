"""Report: the history on one page that needs nothing else: no network, no script, no font.

It is made of the figures (`figures.py`, `work_figures.py`), drawn (`charts.py`) and listed: every number on
it is a number of the tables. The page forbids itself scripts and anything from elsewhere, so that even a
mistake in escaping could not run what somebody named a task.
"""

from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

from umbel.history import charts, node_sections, work_sections
from umbel.history.charts import BLUE, GREY, LIGHT, ORANGE, PURPLE, VERMILION, Series
from umbel.history.figures import Figures, column, failure_rate
from umbel.history.layout import figure, nothing, section, table
from umbel.history.markup import Content, Markup, joined, tag
from umbel.history.period import Row
from umbel.history.scales import count, duration, instant, percent, rate, some

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
OUTCOMES = (
    ("succeeded", "n_succeeded", BLUE),
    ("failed", "n_failed", VERMILION),
    ("retried", "n_retried", ORANGE),
    ("revoked", "n_revoked", GREY),
    ("rejected", "n_rejected", PURPLE),
)
_OF_ALL = "Sessions, elections, clocks and the number of events are those of all tasks."


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
    asked = f"Only {found.wanted.said()}. {_OF_ALL}" if found.wanted.task or found.wanted.queue else ""
    cards = [
        tag("div", tag("dt", name), tag("dd", value), data_figure=name)
        for name, value in main_figures(found).items()
    ]
    told = joined(tag("p", when, class_="when"), tag("p", asked) if asked else "")
    return tag("header", tag("h1", title), told, tag("dl", cards, class_="cards"))


def _foot(found: Figures) -> Markup:
    build = found.build
    text = f"Build {build['number']}, built {build.get('built_at', '')}"
    outside = found.totals["n_outside"]
    note = (
        f" {some(outside, 'attempt')} ended at times outside the period shown: the clocks of their nodes are"
        " wrong, or their events were recorded later."
        if outside
        else ""
    )
    return tag("footer", tag("p", f"{text}. All times are UTC.{note}"))


def _throughput(found: Figures) -> Content:
    period = found.period
    busiest = found.busiest
    if period is None or busiest is None:
        outside = found.totals["n_outside"]
        said = f"Drawn is none: {some(outside, 'attempt')} ended, at times outside the period shown."
        return nothing(said if outside else _why_nothing(found))
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
        return nothing(f"Nothing was measured. {_why_nothing(found)}")
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


def _why_nothing(found: Figures) -> str:
    """Why there is no attempt to show."""
    if found.totals["n_attempts"]:
        ended = found.totals["n_attempts"] > found.totals["n_open"]
        why = "none has both a start and an end" if ended else "none has ended"
        return f"Of {some(found.totals['n_attempts'], 'attempt')}: {why}."
    if not found.wanted:
        return "No task is known: no worker's events were recorded when these tables were built."
    there = found.recorded
    known = f" The history goes from {instant(there[0])} to {instant(there[1])}." if there else ""
    return f"No attempt fits: {found.wanted.said()}.{known}"


def _breakdown(found: Figures, rows: Sequence[Row], what: str) -> Content:
    if not rows:
        return nothing(f"No {what}s are known. {_why_nothing(found)}")
    most = max(row["n_attempts"] for row in rows if not row["is_rest"])
    cells: list[list[Content]] = []
    for row in rows:
        name = f"{some(row['keys'], f'other {what}')}" if row["is_rest"] else (row["key"] or "(not told)")
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


def _wait(found: Figures) -> Content:
    return _durations(found, "wait", "From being sent to the start, of attempts that ended in a step.")


def _run(found: Figures) -> Content:
    return _durations(found, "run", "From the start to the end, of attempts that ended in a step.")


def _by_task(found: Figures) -> Content:
    return joined(_breakdown(found, found.tasks, "task"), _errors(found))


def _by_worker(found: Figures) -> Content:
    return _breakdown(found, found.nodes, "worker")


def _by_queue(found: Figures) -> Content:
    return joined(_breakdown(found, found.queues, "queue"), tag("h3", "Depth"), work_sections.depths(found))


def _missing(found: Figures, needed: str) -> str:
    return needed if needed in found.left_out else ""


def _not_built(table: str) -> Markup:
    return nothing(f"Unknown: this build does not contain the table {table}.")


SECTIONS: tuple[tuple[str, str, Callable[[Figures], Content]], ...] = (
    ("Throughput", "attempts", _throughput),
    ("Waiting time", "attempts", _wait),
    ("Run time", "attempts", _run),
    ("By task", "attempts", _by_task),
    ("By queue", "attempts", _by_queue),
    ("By worker", "attempts", _by_worker),
    ("Workflows", "tasks", work_sections.workflows),
    ("Lost time", "attempts", work_sections.lost_time),
    ("Unusual times", "attempts", work_sections.unusual),
    ("Worker sessions", "workers", node_sections.sessions),
    ("Elections", "elections", node_sections.elections),
    ("Clock skew", "timeline", node_sections.skew),
    ("Anomalies", "anomalies", node_sections.anomalies),
)
"""Each with its source table."""
