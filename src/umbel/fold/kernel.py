"""Kernel: the events of one bucket of tasks become that bucket's part of the tables.

One sort brings the events of each task into the order of the merge; everything is read off that order.
Memory is some multiple of the events, so a caller gives it a bucket of a bounded size. All events of a
task must be in it: a part of a task's events makes rows that cannot be merged with those of another.
"""

from dataclasses import dataclass

import pyarrow as pa

from umbel.fold.attempts import attempts
from umbel.fold.columns import Events
from umbel.fold.order import ordered
from umbel.fold.registers import joined
from umbel.fold.tasks import tasks
from umbel.fold.timeline import timeline


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one bucket adds to the tables."""

    tasks: pa.Table
    attempts: pa.Table
    timeline: pa.Table


def fold_bucket(table: pa.Table) -> Bucket:
    """`table`: events of tasks, with columns of the lake; each has a task's id."""
    events = Events(table)
    order = ordered(events, events.column("uuid"))
    known = joined(events, order)
    return Bucket(tasks(known, order.subjects), attempts(known, order.subjects), timeline(events, order))
