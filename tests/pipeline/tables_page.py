"""docs/tables.md, made from the tables' own definition.

`python -m tests.pipeline.tables_page > docs/tables.md`
"""

from collections.abc import Iterable

from umbel.events.tables import ANOMALY_KINDS, COLUMNS, TABLES, Table
from umbel.history.views import VIEWS

KINDS = {
    "text": "text",
    "int": "whole number",
    "float": "number",
    "bool": "yes or no",
    "instant": "instant, UTC",
    "json": "JSON text",
}
HEAD = """# The tables

What [`umbel history build`](pipeline.md) makes of the recorded events, column by column. In Parquet a text
is a string, a whole number has 64 bits, an instant has microseconds. **Bold** columns tell one row from
another; a column without a `?` is never null. The [views](#the-views) are computed from the tables when they
are asked for, and read in the same way. This page is made from `events/tables.py` and
`history/views.py`.
"""
VIEWS_HEAD = """## The views

Queries that `umbel history sql`, the report, the dashboard's SQL and `umbel history duckdb` know by name.
They need nothing that a build of an earlier version does not have. Times are those of the nodes' clocks:
where clocks differ, so do the figures.
"""
LAKE = """## The lake: events

One row an event, as it was recorded; the same event may be there twice, with the same `digest`. Names are
those of Celery's events: the task's id, `task_id` in the tables, is `uuid` here.
"""
KINDS_HEAD = """### Kinds of anomalies
"""


def page() -> str:
    parts = [HEAD, *(_table(table) for table in TABLES.values())]
    parts += [KINDS_HEAD + "\n| kind | what happened |\n|---|---|\n" + _rows(ANOMALY_KINDS.items())]
    parts += [VIEWS_HEAD, *(_table(view.table, view.heading) for view in VIEWS.values())]
    lake = _rows((f"`{one.name}`", KINDS[one.kind], one.doc) for one in COLUMNS)
    return "\n".join([*parts, LAKE + "\n| column | is | what it holds |\n|---|---|---|\n" + lake])


def _table(table: Table, heading: str = "") -> str:
    rows = _rows(
        (
            f"**`{one.name}`**" if one.name in table.key else f"`{one.name}`",
            KINDS[one.kind] + ("?" if one.nullable else ""),
            one.doc,
        )
        for one in table.columns
    )
    level = "###" if heading else "##"
    head = f"{level} {heading or table.name}\n\n{table.doc}"
    return f"{head}\n\n| column | is | what it holds |\n|---|---|---|\n{rows}"


def _rows(rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    print(page(), end="")
