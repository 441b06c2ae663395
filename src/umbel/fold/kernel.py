"""Kernel: the events of one bucket of tasks become that bucket's part of the tables.

One sort brings the events of each task into the order of the merge; everything is read off that order.
Memory is some multiple of the events, so a caller gives it a bucket of a bounded size. All events of a
task must be in it: a part of a task's events makes rows that cannot be merged with those of another.

Events without a task (`others`) are folded apart and all at once; they are few. What is seen only in all
buckets together is made from what each bucket adds to it: metrics from samples, anomalies from suspects.
"""

from dataclasses import dataclass

import pyarrow as pa

from umbel.fold import anomalies as odd
from umbel.fold import metrics as measured
from umbel.fold.attempts import attempts
from umbel.fold.columns import Events
from umbel.fold.elections import elections
from umbel.fold.marks import Marks
from umbel.fold.node_anomalies import of_nodes
from umbel.fold.order import ordered
from umbel.fold.registers import joined
from umbel.fold.schemas import EVENTS
from umbel.fold.tasks import tasks
from umbel.fold.timeline import timeline
from umbel.fold.workers import workers


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one bucket adds to the tables, and what it adds to those that need all buckets."""

    tasks: pa.Table
    attempts: pa.Table
    timeline: pa.Table
    anomalies: pa.Table
    samples: pa.Table
    suspects: pa.Table
    told: pa.Table


def fold_bucket(table: pa.Table) -> Bucket:
    """`table`: events of tasks, with columns of the lake; each has a task's id."""
    events = Events(table)
    order = ordered(events, events.column("uuid"))
    known = joined(events, order)
    by_task, by_attempt = tasks(known, order.subjects), attempts(known, order.subjects)
    return Bucket(
        tasks=by_task,
        attempts=by_attempt,
        timeline=timeline(events, order),
        anomalies=odd.of_bucket(by_task, by_attempt),
        samples=measured.samples(by_attempt),
        suspects=odd.suspects(by_task),
        told=odd.told(by_task),
    )


@dataclass(frozen=True, slots=True)
class Nodes:
    """What the events without a task add to the tables."""

    workers: pa.Table
    elections: pa.Table
    timeline: pa.Table
    anomalies: pa.Table


def fold_others(table: pa.Table, marks: Marks) -> Nodes:
    """`table`: all events without a task's id. `marks`: of all events of the lake."""
    events = Events(table)
    full = pa.table({name: events.column(name) for name in EVENTS.names})
    held = elections(full)
    return Nodes(
        workers=workers(full, marks),
        elections=held,
        timeline=timeline(events, ordered(events, events.text("hostname"))),
        anomalies=of_nodes(full, held, marks),
    )
