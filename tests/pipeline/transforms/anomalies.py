"""Anomalies: what should not have been, one row each, seen in the other tables and in the marks.

They are views: nothing is added up over time, so a later build takes back what a late event explains.
Moments are compared with the lake's end, not with the time of building, so that a build of the same
lake tomorrow says the same.

What is a question of measure: a task is lost when its node is gone for a minute, stuck after an hour
without a word (a task that waits for its time is not), a node's time is skewed from five seconds on,
a clock leaps from a million on within one heartbeat.
"""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from tests.pipeline.transforms import marks as marked
from tests.pipeline.transforms.workers import beats_of
from umbel.events.precedence import ENDINGS, REJECTED, STATES
from umbel.events.tables import TABLES

LOST_AFTER_S = 60
STUCK_AFTER_S = 3600
SKEW_S = 5.0
BEHIND_S = 60.0
"""Behind, or slow to send: an event may lie in a buffer for a while."""
LEAP = 1_000_000
_SETTLED = (*sorted(STATES[slot] for slot in ENDINGS), REJECTED)
_RECORDER = ("recorder-gap", "recorder-lost", "recorder-deaf", "recorder-unreadable")


def anomalies(
    tasks: DataFrame,
    attempts: DataFrame,
    workers: DataFrame,
    elections: DataFrame,
    others: DataFrame,
    marks: DataFrame,
) -> DataFrame:
    end = F.broadcast(marked.horizon(marks))
    found = [
        *_of_attempts(attempts),
        _delivered_twice(tasks),
        _unfinished(tasks, workers, end),
        _never_sent(tasks),
        *_of_clocks(others),
        _skewed(marks),
        _missing(marks),
        _of_elections(elections),
        _of_recorders(others),
    ]
    every = found[0]
    for one in found[1:]:
        every = every.unionByName(one)
    return every


def _of_attempts(attempts: DataFrame) -> tuple[DataFrame, DataFrame]:
    of = {"subject": "task_id", "at": "state_at", "task_id": "task_id", "attempt": "attempt", "name": "name"}
    of |= {"worker": "worker", "pid": "pid", "clock": "clock"}
    clocks = F.format_string(
        "received at clock %s, started at %s, ended at %s",
        *(
            F.coalesce(F.col(f"{what}_clock").cast("string"), F.lit("?"))
            for what in ("received", "started", "ended")
        ),
    )
    return (
        _rows(attempts.where("out_of_order"), "causality", clocks, **of),
        _rows(
            attempts.where(F.col("n_terminal") > 1),
            "run_twice",
            F.format_string("attempt %d ended %d times", "attempt", "n_terminal"),
            n="n_terminal",
            **of,
        ),
    )


def _delivered_twice(tasks: DataFrame) -> DataFrame:
    return _rows(
        tasks.where(F.col("n_deliveries") > F.col("retries") + 1),
        "delivered_twice",
        F.format_string("%d deliveries of %d attempts", "n_deliveries", F.col("retries") + 1),
        n="n_deliveries",
        **_TASK,
    )


def _unfinished(tasks: DataFrame, workers: DataFrame, end: DataFrame) -> DataFrame:
    """Lost or stuck, not both."""
    nodes = workers.groupBy(F.col("hostname").alias("node")).agg(
        F.max(F.col("ending") == "alive").alias("is_alive")
    )
    open_tasks = tasks.where(~F.col("state").isin(*_SETTLED)).crossJoin(end)
    silent_s = (F.unix_micros("horizon") - F.unix_micros("state_at")) / 1_000_000
    is_due = F.coalesce(F.col("eta").try_cast("timestamp") <= F.col("horizon"), F.lit(True))
    is_lost = ~F.coalesce("is_alive", F.lit(True)) & (F.col("silent_s") > LOST_AFTER_S)
    is_stuck = is_due & (F.col("silent_s") > STUCK_AFTER_S)
    judged = (
        open_tasks.join(F.broadcast(nodes), F.col("worker") == F.col("node"), "left")
        .select("*", silent_s.alias("silent_s"))
        .select("*", F.when(is_lost, F.lit("lost")).when(is_stuck, F.lit("stuck")).alias("judged"))
        .where(F.col("judged").isNotNull())
    )
    detail = F.format_string("%s, and no event for %d s", "state", F.col("silent_s").cast("long"))
    return _rows(judged, F.col("judged"), detail, **_TASK)


def _never_sent(tasks: DataFrame) -> DataFrame:
    """Only for tasks whose sendings are reported, and after the first: many clients report none.

    What a task sends on, as a chain does, goes out with its outcome, without a task-sent event.
    """
    told = (
        tasks.groupBy("name").agg(F.min("first_sent_at").alias("told_since")).where("told_since is not null")
    )
    is_untold = F.col("sent_at").isNull() & F.col("received_at").isNotNull() & F.col("parent_id").isNull()
    late = (
        tasks.where(is_untold)
        .join(F.broadcast(told), "name")
        .where(F.col("first_received_at") > F.col("told_since"))
    )
    return _rows(late, "received_without_sent", F.lit("no task-sent event"), **_TASK)


def _of_clocks(others: DataFrame) -> tuple[DataFrame, DataFrame]:
    """A node's clock as its signs of life show it, in the order of its processes and their events."""
    order = Window.partitionBy("hostname").orderBy(
        F.coalesce("inc", F.lit(0)), "timestamp", "clock", "digest"
    )
    beats = (
        beats_of(others)
        .where(F.col("clock") > 0)
        .select("*", F.lag("clock").over(order).alias("before"))
        .where(F.col("before").isNotNull())
    )
    detail = F.format_string("from %d to %d", "before", "clock")
    of = {
        "subject": "hostname",
        "at": "timestamp",
        "worker": "hostname",
        "pid": "pid",
        "inc": "inc",
        "clock": "clock",
    }
    return (
        _rows(beats.where(F.col("clock") < F.col("before")), "clock_reset", detail, **of),
        _rows(beats.where(F.col("clock") - F.col("before") > LEAP), "clock_jump", detail, **of),
    )


def _skewed(marks: DataFrame) -> DataFrame:
    found = marked.senders(marks).where((F.col("ahead_s") > SKEW_S) | (F.col("ahead_s") < -BEHIND_S))
    side = F.when(F.col("ahead_s") > 0, F.lit("ahead of")).otherwise(F.lit("behind"))
    detail = F.format_string("%.1f s %s the broker's time", F.abs("ahead_s"), side)
    return _rows(found, "time_skew", detail, subject="hostname", at="last_at", worker="hostname", pid="pid")


def _missing(marks: DataFrame) -> DataFrame:
    detail = F.format_string("%d events from number %d on", "n", "start")
    of = {"subject": "hostname", "at": "at", "worker": "hostname", "pid": "pid", "inc": "inc"}
    return _rows(marked.gaps(marks), "seq_gap", detail, n="n", **of)


def _of_elections(elections: DataFrame) -> DataFrame:
    found = elections.where(F.col("violations") != "[]")
    return _rows(found, "election", F.col("violations"), subject="election_id", at="last_at", worker="winner")


def _of_recorders(others: DataFrame) -> DataFrame:
    told = others.where(F.col("type").isin(*_RECORDER)).dropDuplicates(["hostname", "digest"])

    def number(name: str) -> Column:
        return F.get_json_object("extra", f"$.{name}").try_cast("long")

    count = F.coalesce(number("last") - number("first") + 1, number("lost"), number("count"), F.lit(1))
    found = told.select("*", count.alias("n"))
    kind = F.regexp_replace("type", "-", "_")
    of = {
        "subject": "hostname",
        "at": "timestamp",
        "worker": "hostname",
        "pid": "pid",
        "inc": "inc",
        "clock": "clock",
    }
    return _rows(found, kind, F.col("extra"), n="n", **of)


_TASK = {
    "subject": "task_id",
    "at": "state_at",
    "task_id": "task_id",
    "attempt": "retries",
    "name": "name",
    "worker": "worker",
    "clock": "clock",
}


def _rows(frame: DataFrame, kind: str | Column, detail: Column, **taken: str) -> DataFrame:
    """The table's columns from those of a frame; what it has nothing for is null, `n` then 1."""
    given = {"kind": F.lit(kind) if isinstance(kind, str) else kind, "detail": detail}
    columns = [
        given[one.name]
        if one.name in given
        else F.col(taken[one.name]).cast("long" if one.name == "n" else _TYPES[one.kind])
        if one.name in taken
        else F.lit(1 if one.name == "n" else None).cast(_TYPES[one.kind])
        for one in TABLES["anomalies"].columns
    ]
    return frame.select(
        *(column.alias(one.name) for one, column in zip(TABLES["anomalies"].columns, columns, strict=True))
    )


_TYPES = {"text": "string", "int": "long", "instant": "timestamp"}
