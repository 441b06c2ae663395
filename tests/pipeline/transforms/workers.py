"""Workers: sessions of nodes, from what they say of themselves.

Whether a node was there is a question of physical time. A sign of life covers the time until two
heartbeats would be due; signs that overlap are one session; a farewell ends it, and so does silence.
A union of intervals does not depend on the order or the number of times they are reported.

At the lake's end a node whose last sign still covers that moment is alive. The moment is the broker's;
it is put into the node's own time by how far that is ahead, so a wrong clock does not bury a node.
"""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from tests.pipeline.transforms.marks import SENDER, horizon, senders
from tests.pipeline.transforms.view import seconds_between
from umbel.events.state import BEAT_S, BEATS_MISSED
from umbel.events.tables import TABLES

BEAT_MAX_S = 86_400.0
OFFLINE = "worker-offline"
BEATS = ("worker-online", "worker-heartbeat", OFFLINE)
_TOLD = ("freq", "processed", "sw_ident", "sw_ver", "sw_sys")


def workers(others: DataFrame, marks: DataFrame) -> DataFrame:
    """From the events without a task, and the marks of all events."""
    sessions = _sessions(beats_of(others))
    here = sessions.join(F.broadcast(senders(marks).select("hostname", "ahead_s")), "hostname", "left")
    moment = F.unix_micros("horizon") + (F.coalesce("ahead_s", F.lit(0.0)) * 1_000_000).cast("long")
    ending = (
        F.when(F.col("last_type") == OFFLINE, F.lit("offline"))
        .when(F.unix_micros("covered_to") > moment, F.lit("alive"))
        .otherwise(F.lit("lost"))
    )
    ended_at = F.when(F.col("ending") == "offline", F.col("last_at")).when(
        F.col("ending") == "lost", F.col("covered_to")
    )
    return (
        here.crossJoin(F.broadcast(horizon(marks)))
        .select("*", ending.alias("ending"))
        .select(
            "*",
            ended_at.alias("ended_at"),
            seconds_between(F.col("online_at"), F.col("last_at")).alias("up_s"),
        )
        .select(*TABLES["workers"].names)
    )


def beats_of(others: DataFrame) -> DataFrame:
    """Signs of life, each once."""
    return (
        others.where(F.col("type").isin(*BEATS))
        .select(
            F.coalesce("hostname", F.lit("")).alias("hostname"),
            F.coalesce("pid", F.lit(0)).alias("pid"),
            *("inc", "type", "timestamp", "digest", "active", *_TOLD),
            F.coalesce("clock", F.lit(0)).alias("clock"),
        )
        .dropDuplicates(["hostname", "pid", "digest"])
    )


def _sessions(beats: DataFrame) -> DataFrame:
    order = Window.partitionBy(*SENDER).orderBy("timestamp", "clock", "digest")
    earlier = order.rowsBetween(Window.unboundedPreceding, -1)
    so_far = order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    is_new = (
        F.lag("type").over(order).isNull()
        | (F.col("timestamp") >= F.max("covered_to").over(earlier))
        | ((F.lag("type").over(order) == OFFLINE) & (F.col("type") != OFFLINE))
    )
    last = F.struct("timestamp", "clock", "digest", F.col("type").alias("last_type"), *_TOLD)
    return (
        beats.select("*", _covered_to().alias("covered_to"))
        .select("*", F.when(is_new, 1).otherwise(0).alias("is_new"))
        .select("*", F.sum("is_new").over(so_far).alias("session"))
        .groupBy(*SENDER, "session")
        .agg(
            F.min("timestamp").alias("online_at"),
            F.max("timestamp").alias("last_at"),
            F.max("covered_to").alias("covered_to"),
            F.min("clock").alias("clock_min"),
            F.max("clock").alias("clock_max"),
            F.count(F.lit(1)).alias("n_beats"),
            F.max("active").alias("active_max"),
            F.max(last).alias("last"),
        )
        .select("*", "last.last_type", *(f"last.{name}" for name in _TOLD))
    )


def _covered_to() -> Column:
    freq = F.when(F.col("freq").between(0.001, BEAT_MAX_S), F.col("freq")).otherwise(BEAT_S)
    covered = F.timestamp_micros(
        F.unix_micros("timestamp") + (freq * (BEATS_MISSED * 1_000_000)).cast("long")
    )
    return F.when(F.col("type") == OFFLINE, F.col("timestamp")).otherwise(covered)
