"""Kernel: the events of one bucket of tasks become that bucket's part of the tables.

One sort puts the events of each task into the order of the merge; everything else follows from that order.
Memory is a multiple of the events, so callers pass a bucket of a bounded size. All events of a task must
be in it: rows made from a part of a task's events cannot be merged with those of another part.

Events without a task (`others`) are folded separately and all at once; they are few. Tables that need all
buckets are made from what each bucket adds: metrics from samples, anomalies from suspects.
"""

from dataclasses import dataclass

import pyarrow as pa

from umbel.fold import nodes as odd
from umbel.fold import tasks as measured
from umbel.fold.columns import EVENTS, Events
from umbel.fold.nodes import elections, of_nodes, workers
from umbel.fold.registers import joined, ordered
from umbel.fold.senders import Marks
from umbel.fold.tasks import attempts, tasks, timeline


@dataclass(frozen=True, slots=True)
class Bucket:
    """The rows of one bucket in the tables, and its samples and suspects for tables that need all buckets."""

    tasks: pa.Table
    attempts: pa.Table
    timeline: pa.Table
    anomalies: pa.Table
    samples: pa.Table
    suspects: pa.Table
    told: pa.Table


def fold_bucket(table: pa.Table) -> Bucket:
    """Fold the events of a bucket. `table`: events with columns of the lake, each with a task's id."""
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
        told=odd.first_sendings(by_task),
    )


@dataclass(frozen=True, slots=True)
class Nodes:
    """The rows that come from events without a task."""

    workers: pa.Table
    elections: pa.Table
    timeline: pa.Table
    anomalies: pa.Table


def fold_others(table: pa.Table, marks: Marks) -> Nodes:
    """Fold all events without a task. `marks`: of all events of the lake."""
    events = Events(table)
    full = pa.table({name: events.column(name) for name in EVENTS.names})
    held = elections(full)
    return Nodes(
        workers=workers(full, marks),
        elections=held,
        timeline=timeline(events, ordered(events, events.text("hostname"))),
        anomalies=of_nodes(full, held, marks),
    )
