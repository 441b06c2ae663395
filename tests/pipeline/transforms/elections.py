"""Elections: one row each, from the events of nodes.

The classic election (v1) is two sets, the candidates and who answered; the lowest candidate leads.
An election by the store (v2) reports its winners with their terms, and how it ended. Both are functions
of sets, so nothing depends on the order of telling.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from tests.pipeline.transforms.view import seconds_between
from umbel.events.tables import TABLES

_ELECT, _ACK, _ELECTED = "worker-elect", "worker-elect-ack", "worker-elected"
_CLOSED = ("done", "failed", "expired")


def elections(others: DataFrame) -> DataFrame:
    """From the events without a task."""
    return _classic(others).unionByName(_by_the_store(others)).select(*TABLES["elections"].names)


def _classic(others: DataFrame) -> DataFrame:
    stands = F.col("type") == _ELECT
    candidate = F.struct("clock", F.concat_ws(".", "hostname", "pid").alias("process"), "hostname", "pid")
    found = (
        others.where(F.col("type").isin(_ELECT, _ACK) & F.col("id").isNotNull())
        .groupBy("id")
        .agg(
            F.sort_array(F.collect_set(F.when(stands, candidate))).alias("stood"),
            F.size(F.collect_set(F.when(F.col("type") == _ACK, F.col("hostname")))).alias("n_acks"),
            F.max("topic").alias("topic"),
            *_times(),
        )
    )
    nobody = F.when(F.size("stood") == 0, F.lit("answers without a candidate"))
    columns = {
        "election_id": F.col("id"),
        "protocol": F.lit("v1"),
        "topic": F.col("topic"),
        "winner": F.get("stood", F.lit(0))["hostname"],
        "term": F.lit(None).cast("long"),
        "outcome": F.when(F.size("stood") > 0, F.lit("elected")),
        "policy": F.lit(None).cast("string"),
        "n_candidates": F.size("stood").cast("long"),
        "candidates": F.to_json(
            F.transform("stood", lambda one: _named(one["hostname"], one["pid"], one["clock"]))
        ),
        "n_acks": F.col("n_acks").cast("long"),
        "attempts": F.lit(1).cast("long"),
        "violations": F.to_json(F.array_compact(F.array(nobody))),
    }
    return _selected(found, columns)


def _by_the_store(others: DataFrame) -> DataFrame:
    is_won = F.col("phase") == "elected"
    won = F.struct("term", "attempt", "winner", "clock")
    ending = F.struct("term", F.col("phase").isin(*_CLOSED).alias("closed"), "timestamp", "phase", "winner")
    found = (
        others.where((F.col("type") == _ELECTED) & F.col("eid").isNotNull())
        .groupBy("eid")
        .agg(
            F.sort_array(F.collect_set(F.when(is_won, won))).alias("won"),
            F.collect_set(F.when(is_won, F.struct("term", "winner"))).alias("reigns"),
            F.collect_set(F.when(F.col("phase") == "done", F.struct("term", "winner"))).alias("done"),
            F.max(ending).alias("last"),
            F.max("attempt").alias("attempt"),
            F.max("topic").alias("topic"),
            F.max("policy").alias("policy"),
            *_times(),
        )
    )
    terms = F.array_distinct(F.transform("reigns", lambda one: one["term"]))
    two_leaders = F.when(F.size(terms) < F.size("reigns"), F.lit("two winners in one term"))
    twice = F.when(F.size("done") > 1, F.lit("done by more than one winner"))
    columns = {
        "election_id": F.col("eid"),
        "protocol": F.lit("v2"),
        "topic": F.col("topic"),
        "winner": F.col("last.winner"),
        "term": F.col("last.term"),
        "outcome": F.col("last.phase"),
        "policy": F.col("policy"),
        "n_candidates": F.size(F.array_distinct(F.transform("reigns", lambda one: one["winner"]))).cast(
            "long"
        ),
        "candidates": F.to_json(
            F.transform("won", lambda one: _named(one["winner"], one["term"], one["clock"], "term"))
        ),
        "n_acks": F.lit(0).cast("long"),
        "attempts": F.greatest(F.coalesce("attempt", F.lit(0)), F.lit(1)).cast("long"),
        "violations": F.to_json(F.array_compact(F.array(two_leaders, twice))),
    }
    return _selected(found, columns)


def _times() -> tuple[Column, ...]:
    return (F.min("timestamp").alias("first_at"), F.max("timestamp").alias("last_at"))


def _named(name: Column, number: Column, clock: Column, what: str = "pid") -> Column:
    return F.struct(name.alias("name"), number.alias(what), clock.alias("clock"))


def _selected(found: DataFrame, columns: dict[str, Column]) -> DataFrame:
    times = {
        "first_at": F.col("first_at"),
        "last_at": F.col("last_at"),
        "duration_s": seconds_between(F.col("first_at"), F.col("last_at")),
    }
    every = columns | times
    return found.select(*(every[name].alias(name) for name in TABLES["elections"].names))
