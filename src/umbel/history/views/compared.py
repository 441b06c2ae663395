"""Compared: the figures of each task in two periods, side by side. An attempt counts where it ended."""

from umbel.events.tables import Table, TableColumn
from umbel.history.spelling import percentiles
from umbel.history.views.view import View, sure

MEASURES = tuple(f"{what}_{share}_s" for what in ("wait", "run") for share in ("p50", "p95"))
_SIDES = ("before", "after")


def _figures(side: str) -> str:
    waits, runs = (
        percentiles(f"{what}_s", f"{what}_p{{}}_s_{side}", (50, 95), where=side) for what in ("wait", "run")
    )
    return f"""count(*) filter ({side}) as n_{side},
    count(*) filter ({side} and outcome = 'FAILURE') as failed_{side},
    count(*) filter ({side} and outcome = 'FAILURE')
        / nullif(count(*) filter ({side} and outcome in ('SUCCESS', 'FAILURE')), 0) as failure_rate_{side},
    {waits}, {runs}"""


_CHANGES = ", ".join(f"{one}_after / nullif({one}_before, 0) - 1 as {one}_change" for one in ("n", *MEASURES))

_SQL = f"""
with attempt as (
    select *, ended_at >= before_since and ended_at < before_until as before,
        ended_at >= after_since and ended_at < after_until as after
    from attempts
    where ended_at >= least(before_since, after_since) and ended_at < greatest(before_until, after_until)
), figure as (
    select name, {", ".join(map(_figures, _SIDES))}
    from attempt where before or after group by name
)
select *, {_CHANGES}, failure_rate_after - failure_rate_before as failure_rate_change from figure"""


def _of(side: str) -> tuple[TableColumn, ...]:
    period = "first" if side == "before" else "second"
    return (
        sure(f"n_{side}", "int", f"attempts that ended in the {period} period"),
        sure(f"failed_{side}", "int", "of them failed"),
        TableColumn(
            f"failure_rate_{side}", "float", "failed of those that succeeded or failed; null if neither"
        ),
        *(
            TableColumn(f"{what}_{share}_s_{side}", "float", f"{part} {verb} at most this long")
            for what, verb in (("wait", "waited"), ("run", "ran"))
            for share, part in (("p50", "half"), ("p95", "95 %"))
        ),
    )


COMPARED = View(
    Table(
        "compared",
        "One row per task name: its figures in a first and in a second period. `select * from"
        " compared(before_since, before_until, after_since, after_until)` with four instants; the ends are"
        " not part of the periods.",
        ("name",),
        (
            TableColumn("name", "text", "the task's name"),
            *_of("before"),
            *_of("after"),
            *(
                TableColumn(
                    f"{one}_change",
                    "float",
                    "after / before − 1: 0.5 is half as much again; null without both",
                )
                for one in ("n", *MEASURES)
            ),
            TableColumn("failure_rate_change", "float", "after − before"),
        ),
    ),
    _SQL,
    ("before_since", "before_until", "after_since", "after_until"),
)
