"""View: what people read of registers, as columns; the rules of `umbel.events.view` and `precedence`.

A projection: it looks at one row of registers, never at two, so it needs no exchange and is the same
for a task and for one attempt of it.
"""

from pyspark.sql import Column
from pyspark.sql import functions as F

from umbel.events.precedence import ATTEMPT_STEP, ENDED, ENDINGS, STATES, STRENGTHS
from umbel.events.types import SLOTS, TASK_PREFIX

RUN_MAX_S = 1e12
"""No task runs longer; a larger value is not a measurement."""

WINNER = "winner"


def attempt_of(slot: str, received: str = "received") -> Column:
    """The attempt that a register belongs to, as reported or read from the receipt."""
    newest, receipt_clock = F.col(f"{received}.attempt"), F.col(f"{received}.clock")
    read = (
        F.when(F.col(received).isNull(), F.lit(0).cast("long"))
        .when(F.col(f"{slot}.clock") >= receipt_clock, newest)
        .otherwise(F.greatest(F.lit(0).cast("long"), newest - 1))
    )
    return F.coalesce(F.col(f"{slot}.retries"), read)


def winner(attempt: Column | None = None) -> Column:
    """The register of the highest rank; no two have the same. `attempt`: the one that all belong to."""
    ranked = (_ranked(slot, attempt_of(slot) if attempt is None else attempt) for slot in SLOTS)
    return F.greatest(*ranked).alias(WINNER)


def _ranked(slot: str, attempt: Column) -> Column:
    if slot in ENDINGS:
        rank = F.lit(ENDED + STRENGTHS[slot]).cast("long")
    else:
        rank = (attempt + (1 if slot == "retried" else 0)) * ATTEMPT_STEP + STRENGTHS[slot]
    fields = ("timestamp", "clock", "hostname", "pid", "extra")
    ranked = F.struct(
        rank.alias("rank"),
        attempt.alias("attempt"),
        state_of(slot).alias("state"),
        F.lit(slot).alias("slot"),
        *(F.col(f"{slot}.{name}").alias(name) for name in fields),
    )
    return F.when(F.col(slot).isNotNull(), ranked)


def state_of(slot: str) -> Column:
    if slot in STATES:
        return F.lit(STATES[slot])
    return F.upper(F.substring(F.col(f"{slot}.type"), len(TASK_PREFIX) + 1, 1_000_000))


def worker() -> Column:
    return F.when(F.col(f"{WINNER}.slot") != "sent", F.col(f"{WINNER}.hostname"))


def described(name: str, sent: str = "sent", received: str = "received") -> Column:
    """From the receipt, holes filled from the sending; the other way round if that is a newer attempt."""
    told, taken = F.col(f"{sent}.{name}"), F.col(f"{received}.{name}")
    is_newer = F.col(f"{sent}.attempt") > F.col(f"{received}.attempt")
    return F.when(is_newer, F.coalesce(told, taken)).otherwise(F.coalesce(taken, told)).alias(name)


def error(name: str) -> Column:
    failed = F.when(F.col("failed").isNotNull(), F.col(f"failed.{name}"))
    return failed.otherwise(F.col(f"retried.{name}")).alias(name)


def wait_s(sent: Column, received: Column, started: Column, eta: Column) -> Column:
    """From when it was sent and due, else received, to its start. Clocks of two machines may differ
    by more than a short wait, so less than nothing counts as nothing."""
    due = F.when(sent.isNotNull(), F.greatest(sent, eta.try_cast("timestamp")))
    return _not_below_0(seconds_between(F.coalesce(due, received), started)).alias("wait_s")


def run_s(runtime: Column, started: Column, ended: Column) -> Column:
    """The worker's own measure where it is one, else from start to end."""
    measured = F.when(runtime.between(0.0, RUN_MAX_S), runtime)
    return F.coalesce(measured, _not_below_0(seconds_between(started, ended))).alias("run_s")


def seconds_between(start: Column, end: Column) -> Column:
    """Null where either is."""
    return (F.unix_micros(end) - F.unix_micros(start)) / 1_000_000


def _not_below_0(seconds: Column) -> Column:
    """Null stays null, which Spark's `greatest` would make 0."""
    return F.when(seconds < 0, F.lit(0.0)).otherwise(seconds)
