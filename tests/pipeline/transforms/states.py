"""States: events joined into what is known of each attempt, and those joined again.

The merge of `umbel.events.merge` in Spark's terms. A register is a struct that begins with the total
order of events, so the greatest struct is the register, whatever rows came, in whatever order, how
often and in which batch. Beside the registers go the earliest time of each type and the digests of
deliveries and endings.

One exchange: the events are dealt out by task, and everything after that stays within a task. The
attempts of a task are grouped where they lie, and the task is the merge of its attempts.

Where it stops: all events of one task meet in one place. Rows are reduced as they are read, so
a task with very many events costs time on one core, not memory; its digests are kept up to a limit
(`DIGESTS_MAX` smallest of each kind) once they are merged.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from benchmarks._pipeline.registers import PAYLOADS, register_fields
from umbel.events.merge import DIGESTS_MAX
from umbel.events.precedence import ENDINGS
from umbel.events.types import RETRIES_MAX, SLOTS
from umbel.events.view import TIMED

ENDINGS_MAX = len(ENDINGS) * DIGESTS_MAX


def states_of(events: DataFrame) -> DataFrame:
    """What is known of each attempt, from events alone. Rows of one task lie together afterwards.

    An event's fields are put into its register before the exchange: there it is one run of bytes
    that is compared and copied as it is. A register that is put together only while rows are joined
    is taken apart and rebuilt, field by field, for every row that comes after it.
    """
    ended = F.coalesce(*(F.col(f"{slot}.digest") for slot in sorted(ENDINGS)))
    return (
        _told(events)
        .repartition("uuid")
        .groupBy("uuid", "retries")
        .agg(
            *(F.max(slot).alias(slot) for slot in SLOTS),
            *(F.min(f"{slot}.timestamp").alias(f"first_{slot}") for slot in TIMED),
            F.collect_set("received.digest").alias("deliveries"),
            F.collect_set(ended).alias("endings"),
        )
    )


def merged(states: DataFrame) -> DataFrame:
    """Partial states of the same attempts, joined: of a stream's batches, or of any split of the lake."""
    return (
        states.repartition("uuid")
        .groupBy("uuid", "retries")
        .agg(
            *(F.max(slot).alias(slot) for slot in SLOTS),
            *(F.min(f"first_{slot}").alias(f"first_{slot}") for slot in TIMED),
            _union("deliveries", DIGESTS_MAX),
            _union("endings", ENDINGS_MAX),
        )
    )


def by_task(states: DataFrame) -> DataFrame:
    """What is known of each task: its attempts joined, with the digests counted.

    Two attempts have no event in common, so their counts add up; the same attempt's would not, which
    is why partial states go through `merged` first.
    """
    return states.groupBy("uuid").agg(
        *(F.max(slot).alias(slot) for slot in SLOTS),
        *(F.min(f"first_{slot}").alias(f"first_{slot}") for slot in TIMED),
        F.least(F.sum(F.size("deliveries")), F.lit(DIGESTS_MAX)).cast("long").alias("n_deliveries"),
        F.least(F.sum(F.size("endings")), F.lit(ENDINGS_MAX)).cast("long").alias("n_terminal"),
    )


def _told(events: DataFrame) -> DataFrame:
    """Each event alone: one register, and nothing in the others."""
    registers = (
        F.when(F.col("slot") == slot, F.struct(*register_fields(slot))).alias(slot) for slot in SLOTS
    )
    return _settled(events).select("uuid", "retries", *registers)


def _settled(events: DataFrame) -> DataFrame:
    """Task events only, without holes in what orders them; a reader of the wire leaves none."""
    payload = sorted({name for names in PAYLOADS.values() for name in names})
    retries = F.when(F.col("retries").between(0, RETRIES_MAX), F.col("retries"))
    return events.where(F.col("uuid").isNotNull() & F.col("slot").isin(*SLOTS)).select(
        "uuid",
        "slot",
        retries.alias("retries"),
        F.coalesce(retries, F.lit(0)).alias("attempt"),
        F.coalesce("clock", F.lit(0)).alias("clock"),
        F.coalesce("timestamp", F.timestamp_seconds(F.lit(0))).alias("timestamp"),
        F.coalesce("hostname", F.lit("")).alias("hostname"),
        F.coalesce("pid", F.lit(0)).alias("pid"),
        F.coalesce("digest", F.lit(0)).alias("digest"),
        "extra",
        *payload,
    )


def _union(name: str, most: int) -> Column:
    """The smallest of all digests are kept when they are too many: that is again a join."""
    every = F.array_distinct(F.flatten(F.collect_list(name)))
    return F.slice(F.sort_array(every), 1, most).alias(name)
