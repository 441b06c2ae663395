"""Report: one HTML page about a period, which needs no network, no script and no font.

The figures (`figures.py`) are drawn (`charts.py`) and listed; every number comes from the tables. The page's
policy forbids scripts and content from elsewhere, so that even a mistake in escaping cannot run the name of a
task as a script.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from typing import Any

from umbel.events.tables import ANOMALY_KINDS
from umbel.history import charts
from umbel.history.charts import BLUE, GREEN, GREY, LIGHT, ORANGE, PURPLE, VERMILION, Series, Span, legend_of
from umbel.history.figures import (
    ELECTIONS_MAX,
    LISTED_MAX,
    NAMES_MAX,
    NODES_MAX,
    SLOWEST_MAX,
    UNUSUAL_MAX,
    Figures,
    Row,
    column,
    failure_rate,
)
from umbel.history.markup import (
    Content,
    Markup,
    count,
    duration,
    instant,
    joined,
    percent,
    rate,
    rect,
    signed,
    some,
    tag,
)
from umbel.history.views import FAR, SAMPLES_MIN, STEPS_MIN

# ---- parts of the page -----------------------------------------------------------------------------

BAR_WIDTH = 110.0


def section(title: str, *content: Content) -> Markup:
    """Return a section of the page with its heading."""
    return tag("section", tag("h2", title), content, id=title.lower().replace(" ", "-"))


def figure(caption: str, drawn: Markup, listed: Markup) -> Markup:
    """Return a drawing with its caption, and the table of its values."""
    return joined(tag("figure", tag("figcaption", caption), drawn, tabindex=0), listed)


def _score(score: float) -> str:
    return f"{score:+.1f}"


def _text(value: object) -> str:
    return str(value or "")


def _known(value: object) -> str:
    return str(value or "(unknown)")


NUMBERS = frozenset({count, duration, percent, signed, int, _score})
Column = tuple[str, "str | Callable[[Row], Content]", "Callable[[Any], Content]"]
"""Of a table: the heading, the name or the function of the value in a row, and how the value is written."""


def table(rows: Sequence[Row], columns: Sequence[Column], id_: str | None = None) -> Markup:
    """Return a table of rows; numbers are aligned, and times are not broken into lines."""

    def kind(form: Callable[[Any], Content]) -> str | None:
        return "number" if form in NUMBERS else "whole" if form is instant else None

    def cell(row: Row, value: str | Callable[[Row], Content], form: Callable[[Any], Content]) -> Markup:
        found = row.get(value) if isinstance(value, str) else value(row)
        return tag("td", form(found), class_=kind(form))

    head = [tag("th", heading, scope="col", class_=kind(form)) for heading, _, form in columns]
    body = [tag("tr", [cell(row, value, form) for _, value, form in columns]) for row in rows]
    listed = tag("table", tag("thead", tag("tr", head)), tag("tbody", body), id=id_)
    # On a narrow screen the table scrolls sideways, also by keyboard.
    return tag("div", listed, class_="wide", tabindex=0, role="group", aria_label="Table; scroll sideways")


def folded(summary: str, listed: Markup) -> Markup:
    """Return content that is shown when its summary is opened."""
    return tag("details", tag("summary", summary), listed)


def nothing(reason: str) -> Markup:
    """Return a line that says why there is nothing to show."""
    return tag("p", reason, class_="nothing")


def bar(parts: Sequence[tuple[str, float, str]]) -> Markup:
    """Return a horizontal bar of parts: tooltip, share of the width, colour."""
    x, drawn = 0.0, []
    for title, share, colour in parts:
        if share:
            wide = max(share * BAR_WIDTH, 0.8)
            drawn.append(rect(x, 0, wide, 12, tag("title", title), fill=colour))
        x += share * BAR_WIDTH
    return tag("svg", drawn, viewBox=f"0 0 {BAR_WIDTH:g} 12", class_="bar", aria_hidden="true")


# ---- queues, workflows, lost time, unusual times ---------------------------------------------------

COLOURS = (BLUE, VERMILION, ORANGE, GREEN, PURPLE)
PARTS = (
    ("waiting in queues", "queue_s", ORANGE),
    ("running", "run_s", BLUE),
    ("attempts in vain", "retry_s", VERMILION),
    ("not yet sent or due", "follow_s", GREY),
)


def depths(found: Figures) -> Content:
    """Return the section on queue depths."""
    drawn = found.work.depths
    if drawn is None or not drawn.queues:
        return nothing(
            "How much waited is not known: no attempt has a time at which it was sent or received."
        )
    deepest = drawn.queues[0]
    caption = (
        f"The most that waited in each {duration(drawn.period.step_s)}. Deepest: {_known(deepest['queue'])}, "
        f"{count(deepest['peak'])} at {instant(deepest['peak_at'])}; its mean over the whole period, idle "
        f"times included, is {count(round(deepest['mean'], 2))}."
    )
    series = [
        Series(_known(row["queue"]), colour, levels)
        for row, colour, levels in zip(drawn.queues, COLOURS, drawn.steps, strict=False)
    ]
    if len(drawn.queues) > len(series):
        caption += f" Drawn are the deepest {len(series)}."
    columns: list[Column] = [
        ("queue", "queue", _known),
        ("peak depth", "peak", count),
        ("at", "peak_at", instant),
        ("mean depth", lambda row: round(row["mean"], 2), count),
        ("longest backlog", "backlog_s", duration),
    ]
    backlog = "Backlog: how long a minute's end depth would take at that minute's rate of starts."
    listed = joined(table(drawn.queues, columns, "depths-table"), tag("p", backlog, class_="note"))
    chart = charts.lines("Queue depth", drawn.period.times, drawn.period.step_s, series, count)
    return figure(caption, chart, listed)


def workflows(found: Figures) -> Content:
    """Return the section on workflows."""
    kinds = found.work.workflow_kinds
    if not kinds:
        return nothing(
            "No task led to another one: chains, chords and tasks that send tasks make workflows."
            + _of_what(found)
        )
    caption = (
        "Tasks that led to others, by the name of the first, those that took most time first. The bar shows "
        "where the time of their critical paths went."
    )
    columns: list[Column] = [
        ("first task", "name", _known),
        ("", _parts_bar, joined),
        ("workflows", "n", count),
        ("tasks", "n_tasks", count),
        ("failed", "n_failed", count),
        ("open", "n_open", count),
        ("took p50", "p50_s", duration),
        ("p95", "p95_s", duration),
        *(
            (heading, partial(_share, place=place), percent)
            for place, heading in enumerate(("queue", "run", "in vain", "follow-up"))
        ),
    ]
    note = f" At most {NAMES_MAX} are shown." if len(kinds) == NAMES_MAX else ""
    return joined(
        tag("p", caption + note),
        legend_of([(name, colour) for name, _, colour in PARTS]),
        table(kinds, columns, "workflows-table"),
        _slowest(found.work.slowest),
    )


def _slowest(rows: list[Row]) -> Content:
    if not rows:
        return nothing("None of them has ended yet.")
    columns: list[Column] = [
        ("critical path", lambda row: row["path_names"] or "–", str),
        ("took", "duration_s", duration),
        ("", _parts_bar, joined),
        ("queue", "queue_s", duration),
        ("run", "run_s", duration),
        ("in vain", "retry_s", duration),
        ("follow-up", "follow_s", duration),
        ("began", "began_s", instant),
        ("first task's id", "root_id", str),
    ]
    title = "The slowest" if len(rows) < SLOWEST_MAX else f"The slowest {SLOWEST_MAX}"
    return joined(tag("h3", title), table(rows, columns, "slowest-table"))


def lost_time(found: Figures) -> Content:
    """Return the section on lost time."""
    rows = found.work.lost
    if not rows:
        return nothing(
            "None: no attempt failed or was retried, and none was started twice." + _of_what(found)
        )
    total = sum(row["lost_s"] for row in rows)
    caption = (
        f"{duration(total)} in {some(sum(row['n_tasks'] for row in rows), 'task')}: the run time of attempts "
        "that failed or were retried, the time from there to the next start, and what was started again."
    )
    columns: list[Column] = [
        ("task", "name", _known),
        ("tasks", "n_tasks", count),
        ("attempts in vain", "n_failed", count),
        ("repeats", "n_repeats", count),
        ("run in vain", "failed_s", duration),
        ("until the next start", "again_s", duration),
        ("started again", "repeated_s", duration),
        ("lost", "lost_s", duration),
        ("mean per task", lambda row: row["lost_s"] / row["n_tasks"], duration),
    ]
    return joined(tag("p", caption), table(rows, columns, "lost-table"))


def unusual(found: Figures) -> Content:
    """Return the section on unusual times."""
    step = duration(found.work.unusual_step_s)
    if not found.work.unusual:
        return nothing(
            f"None: no task's rate, run time or waiting time in a step of {step} was more than {FAR:g} "
            f"deviations from its median. Judged are tasks that ended in at least {STEPS_MIN} steps, and the "
            f"durations of steps with at least {SAMPLES_MIN} attempts."
        )
    caption = (
        f"Steps of {step} in which a task's rate, run time or waiting time was more than {FAR:g} deviations "
        "from its median; a deviation is taken from the median of the deviations, so a few wild steps do not "
        "hide others. Farthest first."
    )
    if len(found.work.unusual) == UNUSUAL_MAX:
        caption += f" At most {UNUSUAL_MAX} are shown."
    columns: list[Column] = [
        ("from", "at_s", instant),
        ("task", "name", _text),
        ("what", "what", str),
        ("deviations", "score", _score),
        ("in words", "detail", _text),
    ]
    return joined(tag("p", caption), table(found.work.unusual, columns, "unusual-table"))


def _parts_bar(row: Row) -> Markup:
    """Return a bar that shows where the time of a workflow went."""
    parts = zip(PARTS, _shares(row), strict=True)
    return bar(
        [
            (f"{name}: {duration(row[key])}, {percent(share)}", share or 0.0, colour)
            for (name, key, colour), share in parts
        ]
    )


def _shares(row: Row) -> list[float | None]:
    whole = sum(row[key] or 0.0 for _, key, _ in PARTS)
    return [(row[key] or 0.0) / whole if whole else None for _, key, _ in PARTS]


def _share(row: Row, place: int) -> float | None:
    return _shares(row)[place]


def _of_what(found: Figures) -> str:
    return f" Looked at: {found.wanted.said()}." if found.wanted else ""


# ---- nodes -----------------------------------------------------------------------------------------

SHORT = 12
ENDINGS = {
    "alive": ("still there at the end", GREEN),
    "offline": ("shut down", BLUE),
    "lost": ("fell silent", VERMILION),
}
ELECTION_COLOURS = {"done": GREEN, "elected": BLUE, "failed": VERMILION, "expired": ORANGE}


def sessions(found: Figures) -> Content:
    """Return the section on sessions of nodes."""
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
    caption = f"{some(totals['sessions'], 'session')} of {some(totals['nodes'], 'node')}"
    caption += f"; {count(totals['sessions_lost'])} lost."
    if totals["nodes"] > NODES_MAX:
        caption += f" The first {NODES_MAX} are shown, lost nodes first."
    columns: list[Column] = [
        ("node", "hostname", str),
        ("process", "pid", int),
        ("first sign", "start", instant),
        ("end", "end", instant),
        ("ending", "ending", str),
        ("up", "up_s", duration),
        ("clock from", "clock_min", count),
        ("to", "clock_max", count),
        ("software", lambda row: f"{row['sw_ident'] or ''} {row['sw_ver'] or ''}".strip(), str),
    ]
    listed = table(found.sessions, columns, "sessions-table")
    drawn = charts.lanes("Worker sessions", list(lanes.items()), *found.period.shown, legend)
    return figure(caption, drawn, folded("The figures", listed))


def elections(found: Figures) -> Content:
    """Return the section on elections."""
    if not found.elections or found.period is None:
        return nothing("There were no elections.")
    lanes: dict[str, list[Span]] = {}
    for row in found.elections:
        at = row["at_s"] or found.period.start
        title = f"{row['election_id']}: {row['outcome']}, {row['winner'] or 'no winner'}, {instant(at)}"
        colour = ELECTION_COLOURS.get(row["outcome"], GREY)
        lanes.setdefault(row["topic"] or "(unknown)", []).append(Span(at, at, colour, title))
    outcomes = [name for name in ELECTION_COLOURS if any(row["outcome"] == name for row in found.elections)]
    legend = [Series(name, ELECTION_COLOURS[name], ()) for name in outcomes]
    shown = list(lanes.items())[:NODES_MAX]
    totals = found.totals
    caption = (
        f"{some(totals['elections'], 'election')}; {count(totals['elections_broken'])} broke a guarantee."
    )
    if totals["elections"] > ELECTIONS_MAX:
        caption += f" The last {ELECTIONS_MAX} are shown."
    rows = found.elections[:LISTED_MAX]
    columns: list[Column] = [
        ("election", "election_id", str),
        ("topic", "topic", _text),
        ("winner", "winner", _text),
        ("outcome", "outcome", _text),
        ("protocol", "protocol", str),
        ("began", "at_s", instant),
        ("took", "duration_s", duration),
        ("broken promises", "violations", lambda listed: listed.strip("[]") or "none"),
    ]
    drawn = charts.lanes("Elections by topic", shown, *found.period.shown, legend)
    listed = table(rows, columns, "elections-table")
    is_long = len(rows) > SHORT
    return figure(caption, drawn, folded(f"The last {len(rows)}", listed) if is_long else listed)


def skew(found: Figures) -> Content:
    """Return the section on clock skew."""
    if not found.skews:
        return nothing("No event has both its sender's time and the broker's.")
    rows = [(row["hostname"], row["low_s"], row["middle_s"], row["high_s"]) for row in found.skews]
    worst = found.skews[0]
    caption = (
        "How far each sender's clock is ahead of the broker's, by its events: the middle, and the range of "
        "nine tenths. An event reaches the log a moment after it happened, so a correct clock shows a little "
        f"below zero. Farthest off: {worst['hostname']}, {signed(worst['middle_s'])}."
    )
    columns: list[Column] = [
        ("sender", "hostname", str),
        ("events", "n", count),
        ("5 %", "low_s", signed),
        ("middle", "middle_s", signed),
        ("95 %", "high_s", signed),
    ]
    listed = table(found.skews, columns, "skew-table")
    drawn = charts.ranges("Clock skew", rows)
    return figure(caption, drawn, folded("The figures", listed))


def anomalies(found: Figures) -> Content:
    """Return the section on anomalies."""
    if not found.anomaly_kinds:
        return nothing("None: nothing was lost, run twice or reported out of order.")
    kinds: list[Column] = [
        ("kind", "kind", str),
        ("rows", "rows", count),
        ("what it means", lambda row: ANOMALY_KINDS.get(row["kind"], ""), str),
    ]
    columns: list[Column] = [
        ("kind", "kind", str),
        ("at", "at_s", instant),
        ("about", "subject", _text),
        ("task", "name", _text),
        ("worker", "worker", _text),
        ("what exactly", "detail", _text),
    ]
    total = found.totals["anomalies"]
    heading = "All of them" if total <= LISTED_MAX else f"The last {LISTED_MAX} of {count(total)}"
    return joined(
        table(found.anomaly_kinds, kinds, "anomaly-kinds-table"),
        tag("h3", heading),
        table(found.anomalies, columns, "anomalies-table"),
    )


# ---- report ----------------------------------------------------------------------------------------

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
    """Return the main figures as text, for the head of the report and for terminals."""
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
    """Return the whole report as one HTML page."""
    sections = [
        section(
            heading,
            nothing(f"Unknown: this build does not contain the table {needs}.")
            if needs in found.left_out
            else made(found),
        )
        for heading, needs, made in SECTIONS
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
    lead = joined(tag("p", when, class_="when"), tag("p", asked) if asked else "")
    return tag("header", tag("h1", title), lead, tag("dl", cards, class_="cards"))


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
        caption = f"Drawn is none: {some(outside, 'attempt')} ended, at times outside the period shown."
        return nothing(caption if outside else _why_nothing(found))
    series = [
        Series(name, colour, column(found.steps, key))
        for name, key, colour in OUTCOMES
        if any(row.get(key) for row in found.steps)
    ]
    times = [row["at"] for row in found.steps]
    drawn = charts.stacked_bars(
        "Attempts that ended", times, period.step_s, series, f"attempts per {duration(period.step_s)}"
    )
    caption = (
        f"Attempts that ended, per {duration(period.step_s)}, by how. Busiest at {instant(busiest['at'])}: "
        f"{count(busiest['n_attempts'])}, {rate(found.peak_per_s)}. "
        f"Mean over the whole period, idle times included: {rate(found.mean_per_s)}."
    )
    listed = _steps_table(found, [(name, key, count) for name, key, _ in OUTCOMES])
    return figure(caption, drawn, listed)


def _durations(found: Figures, what: str, caption: str) -> Content:
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
    listed = _steps_table(found, [(name, key, duration) for name, key in keys])
    return figure(f"{caption} Over all: {overall}.", drawn, listed)


def _steps_table(found: Figures, columns: Sequence[Column]) -> Markup:
    rows = [row for row in found.steps if row.get("n_attempts")]
    return folded("The figures", table(rows, [("from", "at", instant), *columns]))


def _why_nothing(found: Figures) -> str:
    """Return why there is no attempt to show."""
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

    def name(row: Row) -> str:
        return some(row["keys"], f"other {what}") if row["is_rest"] else _known(row["key"])

    columns: list[Column] = [
        (what, name, str),
        ("", lambda row: None if row["is_rest"] else _bar(row, most), joined),
        ("attempts", "n_attempts", count),
        ("succeeded", "n_succeeded", count),
        ("failed", "n_failed", count),
        ("retried", "n_retried", count),
        ("failure rate", failure_rate, percent),
        ("wait p50", "wait_p50_s", duration),
        ("p95", "wait_p95_s", duration),
        ("run p50", "run_p50_s", duration),
        ("p95", "run_p95_s", duration),
    ]
    caption = "Most failures first, then most attempts; the bar shows how they ended."
    return joined(tag("p", caption), table(rows, columns, f"by-{what}-table"))


def _bar(row: Row, most: int) -> Markup:
    """Return a bar of how the attempts of a row ended; its length is their share of the largest row."""
    parts = (*OUTCOMES, ("open", "n_open", LIGHT))
    return bar([(f"{count(row[key])} {name}", row[key] / most, colour) for name, key, colour in parts])


def _errors(found: Figures) -> Content:
    if not found.errors:
        return tag("p", "No attempt raised an error.")
    columns: list[Column] = [
        ("task", "name", _known),
        ("error (numbers as #)", "exception", str),
        ("attempts", "n", count),
        ("tasks", "tasks", count),
    ]
    return joined(tag("h3", "Most frequent errors"), table(found.errors, columns, "errors-table"))


def _by_task(found: Figures) -> Content:
    return joined(_breakdown(found, found.tasks, "task"), _errors(found))


def _by_queue(found: Figures) -> Content:
    return joined(_breakdown(found, found.queues, "queue"), tag("h3", "Depth"), depths(found))


SECTIONS: tuple[tuple[str, str, Callable[[Figures], Content]], ...] = (
    ("Throughput", "attempts", _throughput),
    (
        "Waiting time",
        "attempts",
        lambda found: _durations(
            found, "wait", "From being sent to the start, of attempts that ended in a step."
        ),
    ),
    (
        "Run time",
        "attempts",
        lambda found: _durations(
            found, "run", "From the start to the end, of attempts that ended in a step."
        ),
    ),
    ("By task", "attempts", _by_task),
    ("By queue", "attempts", _by_queue),
    ("By worker", "attempts", lambda found: _breakdown(found, found.nodes, "worker")),
    ("Workflows", "tasks", workflows),
    ("Lost time", "attempts", lost_time),
    ("Unusual times", "attempts", unusual),
    ("Worker sessions", "workers", sessions),
    ("Elections", "elections", elections),
    ("Clock skew", "timeline", skew),
    ("Anomalies", "anomalies", anomalies),
)
"""The sections of the report: heading, the table that the section needs, and the function that makes it."""
