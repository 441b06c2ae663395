"""Tasks: one row a task, the view of its registers."""

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from tests.pipeline.transforms import view
from tests.pipeline.transforms.states import by_task
from umbel.events.precedence import ENDINGS
from umbel.events.tables import TABLES
from umbel.events.types import SLOTS
from umbel.events.view import TIMED

DESCRIBED = ("name", "args", "kwargs", "root_id", "parent_id", "eta", "expires")


def tasks(states: DataFrame) -> DataFrame:
    """From the states of all attempts, each there once."""
    known = by_task(states).select("*", view.winner())
    columns = {
        "task_id": F.col("uuid"),
        "state": F.col("winner.state"),
        "state_at": F.col("winner.timestamp"),
        "clock": F.col("winner.clock"),
        "worker": view.worker(),
        **{name: view.described(name) for name in DESCRIBED},
        "retries": F.greatest(*(F.col(f"{slot}.attempt") for slot in SLOTS)),
        "client": F.col("sent.hostname"),
        **{name: F.col(f"sent.{name}") for name in ("queue", "exchange", "routing_key")},
        **{name: F.col(f"succeeded.{name}") for name in ("result", "runtime")},
        **{name: view.error(name) for name in ("exception", "traceback")},
        **{name: F.col(f"revoked.{name}") for name in ("terminated", "signum", "expired")},
        "requeue": F.col("rejected.requeue"),
        **{f"{slot}_at": F.col(f"{slot}.timestamp") for slot in TIMED},
        **{f"first_{slot}_at": F.col(f"first_{slot}") for slot in TIMED},
        "n_deliveries": F.col("n_deliveries"),
        "n_terminal": F.col("n_terminal"),
        "extra": F.col("winner.extra"),
        "wait_s": _wait_s(),
        "run_s": _run_s(),
    }
    return known.select(*(columns[name].alias(name) for name in TABLES["tasks"].names))


def _wait_s() -> Column:
    """Of the attempt that started last: events of another attempt do not say how long it waited."""
    started = view.attempt_of("started")
    sent = F.when(F.col("sent.attempt") == started, F.col("sent.timestamp"))
    received = F.when(view.attempt_of("received") == started, F.col("received.timestamp"))
    return view.wait_s(sent, received, F.col("started.timestamp"), view.described("eta"))


def _run_s() -> Column:
    is_ended = F.col("winner.slot").isin(*sorted(ENDINGS)) & (
        view.attempt_of("started") == F.col("winner.attempt")
    )
    return view.run_s(
        F.when(F.col("winner.slot") == "succeeded", F.col("succeeded.runtime")),
        F.when(is_ended, F.col("started.timestamp")),
        F.col("winner.timestamp"),
    )
