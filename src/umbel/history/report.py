"""Report: one page of HTML about a period: what it shows of work (queues, workflows, failures), of nodes
(sessions, elections, clocks, anomalies), and the page itself.
"""

from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any

from umbel.events.tables import ANOMALY_KINDS
from umbel.history import charts
from umbel.history.charts import (
    BLUE,
    GREEN,
    GREY,
    LIGHT,
    ORANGE,
    PURPLE,
    VERMILION,
    Content,
    Markup,
    Series,
    Span,
    count,
    duration,
    figure,
    instant,
    joined,
    nothing,
    percent,
    rate,
    section,
    signed,
    some,
    table,
    tag,
)
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
from umbel.history.views import FAR, SAMPLES_MIN, STEPS_MIN

# ---- work sections ---------------------------------------------------------------------------------
#
# What a report shows of queues, workflows, lost time and unusual times.

COLOURS = (BLUE, VERMILION, ORANGE, GREEN, PURPLE)
PARTS = (
    ("waiting in queues", "queue_s", ORANGE),
    ("running", "run_s", BLUE),
    ("attempts in vain", "retry_s", VERMILION),
    ("not yet sent or due", "follow_s", GREY),
)
BAR_WIDTH = 110.0


def depths(found: Figures) -> Content:
    """How much waited in the queues, over time."""
    drawn = found.work.depths
    if drawn is None or not drawn.queues:
        return nothing(
            "How much waited is not known: no attempt has a time at which it was sent or received."
        )
    deepest = drawn.queues[0]
    caption = (
        f"The most that waited in each {duration(drawn.period.step_s)}. Deepest: {_queue(deepest)}, "
        f"{count(deepest['peak'])} at {instant(deepest['peak_at'])}; its mean over the whole period, idle "
        f"times included, is {count(round(deepest['mean'], 2))}."
    )
    series = [
        Series(_queue(row), colour, levels)
        for row, colour, levels in zip(drawn.queues, COLOURS, drawn.steps, strict=False)
    ]
    if len(drawn.queues) > len(series):
        caption += f" Drawn are the deepest {len(series)}."
    rows = [
        [
            _queue(row),
            count(row["peak"]),
            instant(row["peak_at"]),
            count(round(row["mean"], 2)),
            duration(row["backlog_s"]),
        ]
        for row in drawn.queues
    ]
    headings = ["queue", "peak depth", "at", "mean depth", "longest backlog"]
    listed = joined(
        table(headings, rows, numbers=(1, 3, 4), whole=(2,), id_="depths-table"),
        tag(
            "p",
            "Backlog: how long a minute's end depth would take at that minute's rate of starts.",
            class_="note",
        ),
    )
    chart = charts.lines("Queue depth", drawn.period.times, drawn.period.step_s, series, count)
    return figure(caption, chart, listed)


def workflows(found: Figures) -> Content:
    """The section on workflows."""
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
    legend = [
        tag("li", tag("span", "", class_="key", style=f"background:{colour}"), name)
        for name, _, colour in PARTS
    ]
    rows = [
        [
            *(_name(row), _parts_bar(row), count(row["n"]), count(row["n_tasks"]), count(row["n_failed"])),
            *(count(row["n_open"]), duration(row["p50_s"]), duration(row["p95_s"])),
            *(percent(share) for share in _shares(row)),
        ]
        for row in kinds
    ]
    headings = [
        *("first task", "", "workflows", "tasks", "failed", "open", "took p50", "p95"),
        *("queue", "run", "in vain", "follow-up"),
    ]
    note = f" At most {NAMES_MAX} are shown." if len(kinds) == NAMES_MAX else ""
    return joined(
        tag("p", caption + note),
        tag("ul", legend, class_="legend"),
        table(headings, rows, numbers=range(2, 12), id_="workflows-table"),
        _slowest(found.work.slowest),
    )


def _slowest(rows: list[Row]) -> Content:
    if not rows:
        return nothing("None of them has ended yet.")
    cells = [
        [
            *(row["path_names"] or "–", duration(row["duration_s"]), _parts_bar(row)),
            *(duration(row[key]) for _, key, _ in PARTS),
            *(instant(row["began_s"]), row["root_id"]),
        ]
        for row in rows
    ]
    headings = [
        "critical path",
        "took",
        "",
        "queue",
        "run",
        "in vain",
        "follow-up",
        "began",
        "first task's id",
    ]
    title = "The slowest" if len(rows) < SLOWEST_MAX else f"The slowest {SLOWEST_MAX}"
    return joined(
        tag("h3", title),
        table(headings, cells, numbers=(1, *range(3, 7)), whole=(7,), id_="slowest-table"),
    )


def lost_time(found: Figures) -> Content:
    """The section on lost time."""
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
    cells = [
        [
            *(_name(row), count(row["n_tasks"]), count(row["n_failed"]), count(row["n_repeats"])),
            *(duration(row[key]) for key in ("failed_s", "again_s", "repeated_s", "lost_s")),
            duration(row["lost_s"] / row["n_tasks"]),
        ]
        for row in rows
    ]
    headings = [
        *("task", "tasks", "attempts in vain", "repeats", "run in vain", "until the next start"),
        *("started again", "lost", "mean per task"),
    ]
    return joined(tag("p", caption), table(headings, cells, numbers=range(1, 9), id_="lost-table"))


def unusual(found: Figures) -> Content:
    """The section on unusual times."""
    step = duration(found.work.unusual_step_s)
    if not found.work.unusual:
        return nothing(
            f"None: no task's rate, run time or waiting time in a step of {step} was more than {FAR:g} "
            f"deviations from its median. Judged are tasks that ended in at least {STEPS_MIN} steps, and the "
            f"durations of steps with at least {SAMPLES_MIN} attempts."
        )
    rows = [
        [
            *(instant(row["at_s"]), row["name"], row["what"], f"{row['score']:+.1f}"),
            row["detail"],
        ]
        for row in found.work.unusual
    ]
    caption = (
        f"Steps of {step} in which a task's rate, run time or waiting time was more than {FAR:g} deviations "
        "from its median; a deviation is taken from the median of the deviations, so a few wild steps do not "
        "hide others. Farthest first."
    )
    if len(rows) == UNUSUAL_MAX:
        caption += f" At most {UNUSUAL_MAX} are shown."
    headings = ["from", "task", "what", "deviations", "in words"]
    return joined(tag("p", caption), table(headings, rows, numbers=(3,), whole=(0,), id_="unusual-table"))


def _parts_bar(row: Row) -> Markup:
    """Where the time went, as parts of a whole."""
    x, parts = 0.0, []
    for (name, key, colour), share in zip(PARTS, _shares(row), strict=True):
        wide = (share or 0.0) * BAR_WIDTH
        if wide:
            tooltip = tag("title", f"{name}: {duration(row[key])}, {percent(share)}")
            parts.append(tag("rect", tooltip, x=x, y=0, width=max(wide, 0.8), height=12, fill=colour))
        x += wide
    return tag("svg", parts, viewBox=f"0 0 {BAR_WIDTH:g} 12", class_="bar", aria_hidden="true")


def _shares(row: Row) -> list[float | None]:
    whole = sum(row[key] or 0.0 for _, key, _ in PARTS)
    return [(row[key] or 0.0) / whole if whole else None for _, key, _ in PARTS]


def _name(row: Row) -> str:
    return str(row["name"] or "(unknown)")


def _queue(row: Row) -> str:
    return str(row["queue"] or "(unknown)")


def _of_what(found: Figures) -> str:
    return f" Looked at: {found.wanted.said()}." if found.wanted else ""


# ---- node sections ---------------------------------------------------------------------------------
#
# What a report shows of nodes: their sessions, elections and clocks, and what went wrong.

SHORT = 12
ENDINGS = {
    "alive": ("still there at the end", GREEN),
    "offline": ("shut down", BLUE),
    "lost": ("fell silent", VERMILION),
}
ELECTION_COLOURS = {"done": GREEN, "elected": BLUE, "failed": VERMILION, "expired": ORANGE}


def sessions(found: Figures) -> Content:
    """The section on sessions of nodes."""
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
    return figure(caption, drawn, listed)


def elections(found: Figures) -> Content:
    """The section on elections."""
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
        caption,
        drawn,
        _unfolded(table(headings, rows, numbers=(6,), whole=(5,), id_="elections-table"), len(rows)),
    )


def _unfolded(listed: Markup, rows: int) -> Markup:
    """The list, folded if it is long."""
    if rows <= SHORT:
        return listed
    return tag("details", tag("summary", f"The last {rows}"), listed)


def _violations(listed: str) -> str:
    return "none" if listed in {"[]", ""} else listed.strip("[]")


def skew(found: Figures) -> Content:
    """The section on clock skew."""
    if not found.skews:
        return nothing("No event has both its sender's time and the broker's.")
    rows = [(row["hostname"], row["low_s"], row["middle_s"], row["high_s"]) for row in found.skews]
    worst = found.skews[0]
    caption = (
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
    return figure(caption, drawn, tag("details", tag("summary", "The figures"), listed))


def anomalies(found: Figures) -> Content:
    """The section on anomalies."""
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


# ---- report ----------------------------------------------------------------------------------------
#
# The history on one page that needs nothing else: no network, no script, no font.
#
# The figures (`figures.py`) are drawn (`charts.py`) and listed; every number comes from the tables. The
# page's policy forbids scripts and anything from elsewhere, so that even a mistake in escaping could not
# run the name of a task as a script.

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
    """The main figures as text, for the head of the report, for terminals and for the demo."""
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
    """The whole report as one HTML page."""
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
    listed = _steps_table(found.steps, [(name, key, count) for name, key, _ in OUTCOMES])
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
    listed = _steps_table(found.steps, [(name, key, duration) for name, key in keys])
    return figure(f"{caption} Over all: {overall}.", drawn, listed)


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
        name = f"{some(row['keys'], f'other {what}')}" if row["is_rest"] else (row["key"] or "(unknown)")
        numbers = [count(row[key]) for key in ("n_attempts", "n_succeeded", "n_failed", "n_retried")]
        times = [duration(row[f"{kind}_{p}_s"]) for kind in ("wait", "run") for p in ("p50", "p95")]
        bar = "" if row["is_rest"] else _bar(row, most)
        cells.append([name, bar, *numbers, percent(failure_rate(row)), *times])
    headings = [
        *(what, "", "attempts", "succeeded", "failed", "retried", "failure rate"),
        *("wait p50", "p95", "run p50", "p95"),
    ]
    caption = "Most failures first, then most attempts; the bar shows how they ended."
    return joined(tag("p", caption), table(headings, cells, numbers=range(2, 11), id_=f"by-{what}-table"))


def _bar(row: Row, most: int) -> Markup:
    """A bar of how the attempts of one row ended; its length is their share of the largest row."""
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
        [row["name"] or "(unknown)", row["exception"], count(row["n"]), count(row["tasks"])]
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
    return joined(_breakdown(found, found.queues, "queue"), tag("h3", "Depth"), depths(found))


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
    ("Workflows", "tasks", workflows),
    ("Lost time", "attempts", lost_time),
    ("Unusual times", "attempts", unusual),
    ("Worker sessions", "workers", sessions),
    ("Elections", "elections", elections),
    ("Clock skew", "timeline", skew),
    ("Anomalies", "anomalies", anomalies),
)
"""Each with its source table."""
