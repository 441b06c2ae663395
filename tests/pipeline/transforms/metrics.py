"""Metrics: per minute, task name, queue and worker, counted from attempts.

An attempt is one row however often its events come, so repeated events cannot inflate a count. It
counts in the minute in which it ended, else was last heard of. Percentiles are exact: approximate ones
depend on how rows were dealt out, and a stream must give what a batch gives.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from umbel.events.tables import TABLES

MINUTE_S = 60.0
_OUTCOMES = {
    "n_succeeded": "SUCCESS",
    "n_failed": "FAILURE",
    "n_retried": "RETRY",
    "n_revoked": "REVOKED",
    "n_rejected": "REJECTED",
}
_SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def metrics(attempts: DataFrame) -> DataFrame:
    minute = F.date_trunc("minute", F.coalesce("ended_at", "state_at"))
    counted = attempts.groupBy(minute.alias("minute"), "name", "queue", "worker").agg(
        F.count(F.lit(1)).alias("n_attempts"),
        *(F.count_if(F.col("outcome") == outcome).alias(name) for name, outcome in _OUTCOMES.items()),
        F.count_if(F.col("outcome").isNull()).alias("n_open"),
        _percentiles("wait_s"),
        _percentiles("run_s"),
    )
    ended = F.col("n_attempts") - F.col("n_open")
    decided = F.col("n_succeeded") + F.col("n_failed")
    columns = {
        "per_s": ended / MINUTE_S,
        "failure_rate": F.when(decided > 0, F.col("n_failed") / decided),
        **{
            f"{what}_{share}_s": F.get(f"{what}_s", F.lit(place))
            for what in ("wait", "run")
            for place, share in enumerate(_SHARES)
        },
    }
    return counted.select(*(columns.get(name, F.col(name)).alias(name) for name in TABLES["metrics"].names))


def _percentiles(name: str) -> Column:
    return F.percentile(name, F.array(*map(F.lit, _SHARES.values()))).alias(name)
