"""Saved views: named filters of the list of tasks, with the order and the columns that it is shown in.

They belong to the dashboard and are shared by all who look at it. There are at most VIEWS_MAX of them, each
of at most VIEW_BYTES_MAX; who saves one under a name that is taken replaces it. Who did so is in the audit.
"""

from typing import Annotated, Literal, get_args

import msgspec

from umbel.monitor.shapes import TaskFilter

VIEWS_MAX = 100
VIEW_BYTES_MAX = 4000
NAME_MAX = 60
Column = Literal["state", "args", "error", "queue", "worker", "retries", "wait", "run", "at", "clock"]
Order = Literal["clock", "time"]
ViewName = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_MAX)]
COLUMNS: tuple[Column, ...] = get_args(Column)
"""As they stand in the list; the task's name is always there."""
USUAL: tuple[Column, ...] = ("state", "args", "worker", "wait", "run", "at", "clock")


class SavedView(msgspec.Struct, frozen=True, kw_only=True):
    """`columns`: those beside the task's name; empty: the usual ones."""

    name: ViewName
    match: TaskFilter = TaskFilter()
    order: Order = "clock"
    columns: list[Column] = []
    saved_at: float = 0.0
