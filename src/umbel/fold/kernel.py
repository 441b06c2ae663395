"""Kernel: fold the events of one bucket into its rows of the tables.

A single sort puts the events of each task into the merge order, from which all rows are computed. The memory
is a multiple of the events' size, so callers limit the size of a bucket. A bucket must contain all events of
its tasks, because rows that are computed from parts of a task's events cannot be merged.

Events without a task (`others`) are few and are folded together. Tables that depend on all buckets are
computed from intermediate results of each bucket: metrics from samples, anomalies from suspects.
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
    """The rows of one bucket, and its samples and suspects for tables that depend on all buckets."""

    tasks: pa.Table
    attempts: pa.Table
    timeline: pa.Table
    anomalies: pa.Table
    samples: pa.Table
    suspects: pa.Table
    told: pa.Table


def fold_bucket(table: pa.Table) -> Bucket:
    """Fold the events of a bucket. `table` contains events with the lake's columns; each has a task id."""
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
    """The rows that are computed from events without a task."""

    workers: pa.Table
    elections: pa.Table
    timeline: pa.Table
    anomalies: pa.Table


def fold_others(table: pa.Table, marks: Marks) -> Nodes:
    """Fold all events without a task. `marks` describes all events of the lake."""
    events = Events(table)
    full = pa.table({name: events.column(name) for name in EVENTS.names})
    held = elections(full)
    return Nodes(
        workers=workers(full, marks),
        elections=held,
        timeline=timeline(events, ordered(events, events.text("hostname"))),
        anomalies=of_nodes(full, held, marks),
    )
