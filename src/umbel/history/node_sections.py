"""Node sections: what a report shows of nodes: their sessions, elections and clocks, and what went wrong."""

from umbel.events.tables import ANOMALY_KINDS
from umbel.history import charts
from umbel.history.charts import BLUE, GREEN, GREY, ORANGE, VERMILION, Series, Span
from umbel.history.figures import ELECTIONS_MAX, LISTED_MAX, NODES_MAX, Figures
from umbel.history.layout import figure, nothing, table
from umbel.history.markup import Content, Markup, joined, tag
from umbel.history.scales import count, duration, instant, signed, some

SHORT = 12
ENDINGS = {
    "alive": ("still there at the end", GREEN),
    "offline": ("said goodbye", BLUE),
    "lost": ("fell silent", VERMILION),
}
ELECTION_COLOURS = {"done": GREEN, "elected": BLUE, "failed": VERMILION, "expired": ORANGE}


def sessions(found: Figures) -> Content:
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
    said = f"{some(totals['sessions'], 'session')} of {some(totals['nodes'], 'node')}"
    said += f"; {count(totals['sessions_lost'])} lost."
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


def elections(found: Figures) -> Content:
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
    said = f"{some(totals['elections'], 'election')}; {count(totals['elections_broken'])} broke a guarantee."
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


def skew(found: Figures) -> Content:
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


def anomalies(found: Figures) -> Content:
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
