"""Marks: which of a sender's events are in the lake, and how far its time is from the broker's.

Umbel's senders number their events without gaps. Which numbers were recorded is kept as bits, 32,768
to a row: bits are joined by or, so an event that came twice is one bit, and partial marks of a stream
join to the same. A gap is a number between two others that has no bit.

How far a sender's time is ahead of the broker's is at least the highest difference that any event
shows: one takes time to arrive, so the least delayed says most. A maximum again.
"""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from tests.pipeline.transforms.schemas import MARKS

BITS = 32_768
SEQ_MAX = 2**53
SENDER = ("hostname", "pid", "inc")
_KEYS = (*SENDER, "bucket")


def marks_of(events: DataFrame) -> DataFrame:
    """From events alone; those of senders that do not count are only compared in time."""
    seq = F.when(F.col("inc").isNotNull() & F.col("seq").between(0, SEQ_MAX), F.col("seq"))
    has_time = F.col("timestamp") > F.timestamp_seconds(F.lit(0))
    ahead_us = F.unix_micros("timestamp") - F.unix_micros("recorded_at")
    narrow = events.select(
        *SENDER,
        F.floor(seq / BITS).cast("long").alias("bucket"),
        (seq % BITS).alias("position"),
        F.when(has_time, F.col("timestamp")).alias("at"),
        F.when(has_time, ahead_us / 1_000_000).alias("ahead_s"),
        "recorded_at",
    )
    return narrow.groupBy(*_KEYS).agg(
        F.bitmap_construct_agg("position").alias("seen"),
        F.min("at").alias("first_at"),
        F.max("at").alias("last_at"),
        F.max("ahead_s").alias("ahead_s"),
        F.max("recorded_at").alias("recorded_at"),
    )


def merged_marks(marks: DataFrame) -> DataFrame:
    return marks.groupBy(*_KEYS).agg(
        F.bitmap_or_agg("seen").alias("seen"),
        F.min("first_at").alias("first_at"),
        F.max("last_at").alias("last_at"),
        F.max("ahead_s").alias("ahead_s"),
        F.max("recorded_at").alias("recorded_at"),
    )


def horizon(marks: DataFrame) -> DataFrame:
    """One row: the last moment that the lake knows of, by the broker's clock."""
    return marks.agg(F.max("recorded_at").alias("horizon"))


def senders(marks: DataFrame) -> DataFrame:
    """One row a node: how far its time is ahead of the broker's; below 0 it is behind, or slow to send."""
    return marks.groupBy("hostname").agg(
        F.max("ahead_s").alias("ahead_s"), F.max("last_at").alias("last_at"), F.max("pid").alias("pid")
    )


def gaps(marks: DataFrame) -> DataFrame:
    """One row for each run of missing numbers between two recorded ones: its sender, start, length."""
    order = Window.partitionBy(*SENDER).orderBy("first")
    before = F.lag("last").over(order)
    return (
        _runs(marks)
        .select(*SENDER, F.col("first_at").alias("at"), "first", before.alias("before"))
        .where(F.col("first") > F.col("before") + 1)
        .select(
            *SENDER,
            "at",
            (F.col("before") + 1).alias("start"),
            (F.col("first") - F.col("before") - 1).alias("n"),
        )
    )


def _runs(marks: DataFrame) -> DataFrame:
    """Runs of numbers that are there: a map that is full is one run, of others each bit is a row.

    Rows rather than an array that is filtered: a lambda is interpreted, for each bit and with all that
    it mentions, while rows go through compiled code.
    """
    start, is_full = F.col("bucket") * BITS, F.bitmap_count("seen") == BITS
    told = F.length(F.rtrim(F.hex("seen"), F.lit("0")))  # most senders are brief: behind it there is nothing
    until = F.least(F.lit(BITS - 1), told * 4 + 3)
    places = F.when(is_full, F.array(F.lit(0))).otherwise(F.sequence(F.lit(0), until))
    last = F.when(is_full, start + BITS - 1).otherwise(start + F.col("place"))
    return (
        marks.where(F.col("bucket").isNotNull())
        .select(*SENDER, "first_at", "bucket", "seen", F.explode(places).alias("place"))
        .where(_bit(F.col("seen"), F.col("place")) == 1)
        .select(*SENDER, "first_at", (start + F.col("place")).alias("first"), last.alias("last"))
    )


def _bit(seen: Column, place: Column) -> Column:
    """A bit of a map: its byte is cut out of the map as it is, and only that is written as a number."""
    byte = F.substring(seen, F.floor(place / 8).cast("int") + 1, F.lit(1))
    return F.getbit(F.conv(F.hex(byte), 16, 10).try_cast("long"), (place % 8).cast("int"))


assert tuple(MARKS.names) == (*_KEYS, "seen", "first_at", "last_at", "ahead_s", "recorded_at")
