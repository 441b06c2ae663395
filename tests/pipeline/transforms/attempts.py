"""Attempts: one row for each attempt of each task.

What came with an attempt belongs to it. What came without one (Celery's workers say it on receipt
only) is read as the view of the task reads it: it counts for the attempt that was received last, if
its clock is not before that receipt, else for the one before. Of such a task's earlier attempts the
receipts are known and the last retry, not each start: the registers kept no more.

All of it stays where the exchange by task has put it.
"""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from tests.pipeline.transforms import view
from tests.pipeline.transforms.states import ENDINGS_MAX
from umbel.events.merge import DIGESTS_MAX
from umbel.events.tables import TABLES
from umbel.events.types import SLOTS

_ENDS = ("succeeded", "failed", "revoked", "retried", "rejected")
"""An attempt's outcome is the first of these that was reported."""

_WHOLE = ("task_sent", "task_received")
"""From the newest sending and receipt of the whole task, for the attempts that lack their own."""


def attempts(states: DataFrame) -> DataFrame:
    """From the states of all attempts, each there once."""
    known = _regrouped(_with_whole(states)).select("*", view.winner(F.col("attempt")), _end())
    started, ended = F.col("started.timestamp"), F.col("end.timestamp")
    sent, received = F.col("sent.timestamp"), F.col("received.timestamp")
    columns = {
        "task_id": F.col("uuid"),
        "attempt": F.col("attempt"),
        "state": F.col("winner.state"),
        "state_at": F.col("winner.timestamp"),
        "clock": F.col("winner.clock"),
        "worker": view.worker(),
        "pid": F.when(F.col("winner.slot") != "sent", F.col("winner.pid")),
        **{name: _described(name) for name in ("name", "root_id", "parent_id")},
        "queue": F.coalesce("sent.queue", "task_sent.queue"),
        "client": F.coalesce("sent.hostname", "task_sent.hostname"),
        "sent_at": sent,
        "received_at": received,
        "started_at": started,
        "ended_at": ended,
        "outcome": F.col("end.state"),
        "received_clock": F.col("received.clock"),
        "started_clock": F.col("started.clock"),
        "ended_clock": F.col("end.clock"),
        "runtime": F.col("succeeded.runtime"),
        "exception": view.error("exception"),
        "n_deliveries": F.col("n_deliveries"),
        "n_terminal": F.col("n_terminal"),
        "out_of_order": _against("received", "started")
        | _against("started", "end")
        | _against("received", "end"),
        "wait_s": view.wait_s(sent, received, started, view.described("eta")),
        "run_s": view.run_s(F.col("succeeded.runtime"), started, ended),
    }
    return known.select(*(columns[name].alias(name) for name in TABLES["attempts"].names))


def _with_whole(states: DataFrame) -> DataFrame:
    task = Window.partitionBy("uuid").rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    return states.select(
        "*",
        F.max("sent").over(task).alias("task_sent"),
        F.max("received").over(task).alias("task_received"),
    )


def _regrouped(states: DataFrame) -> DataFrame:
    """Attempts as they are, and what has none dealt out to them, one register at a time."""
    slots = F.explode(
        F.when(F.col("retries").isNull(), F.array(*map(F.lit, SLOTS))).otherwise(F.array(F.lit("")))
    )
    dealt = states.select("*", slots.alias("only"))
    attempt = F.coalesce(
        F.col("retries"), *(F.when(_has(slot), view.attempt_of(slot, "task_received")) for slot in SLOTS)
    )
    return (
        dealt.select(
            "uuid",
            attempt.alias("attempt"),
            *_WHOLE,
            *(F.when(_has(slot), F.col(slot)).alias(slot) for slot in SLOTS),
            F.when(_is_of("received"), F.size("deliveries")).otherwise(0).alias("deliveries"),
            _endings().alias("endings"),
        )
        .where(F.col("attempt").isNotNull())
        .groupBy("uuid", "attempt")
        .agg(
            *(F.max(name).alias(name) for name in (*_WHOLE, *SLOTS)),
            F.least(F.sum("deliveries"), F.lit(DIGESTS_MAX)).cast("long").alias("n_deliveries"),
            F.least(F.sum("endings"), F.lit(ENDINGS_MAX)).cast("long").alias("n_terminal"),
        )
    )


def _is_of(slot: str) -> Column:
    """Whether this row stands for that register: a row with an attempt stands for all of that attempt's."""
    return F.col("only").isin("", slot)


def _has(slot: str) -> Column:
    return _is_of(slot) & F.col(slot).isNotNull()


def _endings() -> Column:
    """Of what has no attempt, all endings count where the strongest of them counts."""
    strongest = (
        F.when(F.col("succeeded").isNotNull(), F.lit("succeeded"))
        .when(F.col("failed").isNotNull(), F.lit("failed"))
        .otherwise(F.lit("revoked"))
    )
    return F.when(F.col("only").isin("") | (F.col("only") == strongest), F.size("endings")).otherwise(0)


def _end() -> Column:
    ends = (
        F.when(
            F.col(slot).isNotNull(),
            F.struct(
                view.state_of(slot).alias("state"),
                *(F.col(f"{slot}.{name}").alias(name) for name in ("timestamp", "clock", "hostname", "pid")),
            ),
        )
        for slot in _ENDS
    )
    return F.coalesce(*ends).alias("end")


def _described(name: str) -> Column:
    return F.coalesce(view.described(name), view.described(name, "task_sent", "task_received"))


def _against(earlier: str, later: str) -> Column:
    """Whether one process reported the later before the earlier, by its own clock; 0 does not count."""
    one, other = F.col(earlier), F.col(later)
    is_same = (one["hostname"] == other["hostname"]) & (one["pid"] == other["pid"])
    is_told = (one["clock"] > 0) & (other["clock"] > 0)
    return F.coalesce(is_same & is_told & (other["clock"] < one["clock"]), F.lit(False))
