"""Work sections: what a report shows of queues, workflows, lost time and unusual times."""

from umbel.history import charts
from umbel.history.charts import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION, Series
from umbel.history.figures import Figures
from umbel.history.layout import figure, nothing, table
from umbel.history.markup import Content, Markup, joined, tag
from umbel.history.period import Row
from umbel.history.scales import count, duration, instant, percent, some
from umbel.history.views.unusual import FAR, SAMPLES_MIN, STEPS_MIN
from umbel.history.work_figures import NAMES_MAX, SLOWEST_MAX, UNUSUAL_MAX

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
    said = (
        f"The most that waited in each {duration(drawn.period.step_s)}. Deepest: {_queue(deepest)}, "
        f"{count(deepest['peak'])} at {instant(deepest['peak_at'])}; its mean over the whole period, idle "
        f"times included, is {count(round(deepest['mean'], 2))}."
    )
    series = [
        Series(_queue(row), colour, levels)
        for row, colour, levels in zip(drawn.queues, COLOURS, drawn.steps, strict=False)
    ]
    if len(drawn.queues) > len(series):
        said += f" Drawn are the deepest {len(series)}."
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
    return figure(said, chart, listed)


def workflows(found: Figures) -> Content:
    kinds = found.work.workflow_kinds
    if not kinds:
        return nothing(
            "No task led to another one: chains, chords and tasks that send tasks make workflows."
            + _of_what(found)
        )
    said = (
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
        tag("p", said + note),
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
    rows = found.work.lost
    if not rows:
        return nothing(
            "None: no attempt failed or was retried, and none was started twice." + _of_what(found)
        )
    total = sum(row["lost_s"] for row in rows)
    said = (
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
    return joined(tag("p", said), table(headings, cells, numbers=range(1, 9), id_="lost-table"))


def unusual(found: Figures) -> Content:
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
    said = (
        f"Steps of {step} in which a task's rate, run time or waiting time was more than {FAR:g} deviations "
        "from its median; a deviation is taken from the median of the deviations, so a few wild steps do not "
        "hide others. Farthest first."
    )
    if len(rows) == UNUSUAL_MAX:
        said += f" At most {UNUSUAL_MAX} are shown."
    headings = ["from", "task", "what", "deviations", "in words"]
    return joined(tag("p", said), table(headings, rows, numbers=(3,), whole=(0,), id_="unusual-table"))


def _parts_bar(row: Row) -> Markup:
    """Where the time went, as parts of a whole."""
    x, parts = 0.0, []
    for (name, key, colour), share in zip(PARTS, _shares(row), strict=True):
        wide = (share or 0.0) * BAR_WIDTH
        if wide:
            said = tag("title", f"{name}: {duration(row[key])}, {percent(share)}")
            parts.append(tag("rect", said, x=x, y=0, width=max(wide, 0.8), height=12, fill=colour))
        x += wide
    return tag("svg", parts, viewBox=f"0 0 {BAR_WIDTH:g} 12", class_="bar", aria_hidden="true")


def _shares(row: Row) -> list[float | None]:
    whole = sum(row[key] or 0.0 for _, key, _ in PARTS)
    return [(row[key] or 0.0) / whole if whole else None for _, key, _ in PARTS]


def _name(row: Row) -> str:
    return str(row["name"] or "(not told)")


def _queue(row: Row) -> str:
    return str(row["queue"] or "(not told)")


def _of_what(found: Figures) -> str:
    return f" Looked at: {found.wanted.said()}." if found.wanted else ""
