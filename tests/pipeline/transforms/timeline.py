"""Timeline: every event once, in the order of the merge, numbered within its task or its node.

A task's events come by attempt, then by clock, as in `umbel.events.merge`. Events without a task
are listed in the order of their node's clock. Rows are dealt out by what they are about and sorted
there; an event that was recorded twice lies next to itself then, and the one recorded first stays.
"""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from umbel.events.tables import TABLES
from umbel.events.types import RETRIES_MAX

_SAYING = ("result", "exception", "name", "outcome", "winner", "queue", "signum")
"""The most informative fields of an event; the first that it has is shown."""


def timeline(events: DataFrame) -> DataFrame:
    placed = events.select(
        F.coalesce("uuid", "hostname", F.lit("")).alias("subject"),
        F.col("uuid").alias("task_id"),
        F.when(F.col("retries").between(0, RETRIES_MAX), F.col("retries")).alias("attempt"),
        F.coalesce("type", F.lit("")).alias("type"),
        "timestamp",
        F.coalesce("clock", F.lit(0)).alias("clock"),
        *("hostname", "pid", "inc", "seq"),
        F.coalesce("digest", F.lit(0)).alias("digest"),
        F.coalesce(*_SAYING).alias("detail"),
        "extra",
        "recorded_at",
    )
    order = Window.partitionBy("subject").orderBy(*_order(), "recorded_at")
    is_new = F.coalesce(F.lag("digest").over(order) != F.col("digest"), F.lit(True))
    counted = F.sum(F.when(F.col("is_new"), 1).otherwise(0)).over(
        order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    return (
        placed.select("*", is_new.alias("is_new"))
        .select("*", counted.alias("rank"))
        .where("is_new")
        .select(*TABLES["timeline"].names)
    )


def _order() -> tuple[Column, ...]:
    """λ, with events that are alike in all of it ordered by their digest."""
    return (
        F.coalesce("attempt", F.lit(0)),
        F.col("clock"),
        F.col("timestamp"),
        F.col("hostname"),
        F.col("pid"),
        F.col("digest"),
    )
