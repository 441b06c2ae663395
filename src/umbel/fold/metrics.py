"""Metrics: per minute, task name, queue and worker, counted from attempts.

A bucket gives samples, one for each attempt; with all samples of a minute its rows are made. An
attempt counts in the minute in which it ended, else was last heard of. Percentiles are exact, reckoned as
Spark's `percentile` does it: between the two nearest values, in proportion.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from umbel.fold.columns import Flags, Floats, Ints, float_array, instants, int_array, nullable, present
from umbel.fold.groups import groups
from umbel.fold.schemas import INSTANT, made

MINUTE_S = 60.0
MINUTE_US = 60_000_000
_KEYS = ("minute", "name", "queue", "worker")
SAMPLES = pa.schema(
    [
        ("minute", INSTANT),
        *((name, pa.string()) for name in ("name", "queue", "worker", "outcome")),
        ("wait_s", pa.float64()),
        ("run_s", pa.float64()),
    ]
)
_OUTCOMES = {
    "n_succeeded": "SUCCESS",
    "n_failed": "FAILURE",
    "n_retried": "RETRY",
    "n_revoked": "REVOKED",
    "n_rejected": "REJECTED",
}
_SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def samples(attempts: pa.Table) -> pa.Table:
    """What metrics need of a part of the table `attempts`."""
    at = pc.coalesce(attempts.column("ended_at"), attempts.column("state_at")).combine_chunks()
    minute = instants(int_array(at) // MINUTE_US * MINUTE_US, present(at))
    return pa.table([minute, *(attempts.column(name) for name in SAMPLES.names[1:])], schema=SAMPLES)


def by_minute(sampled: pa.Table) -> pa.Table:
    """Samples in the order of their minutes."""
    minute = int_array(sampled.column("minute").combine_chunks())
    return sampled.combine_chunks().take(pa.array(np.argsort(minute, kind="stable")))


def counts_by_minute(sampled: pa.Table) -> dict[int, int]:
    """The minutes in microseconds, in their order, and how many samples each has."""
    minutes, counts = np.unique(int_array(sampled.column("minute").combine_chunks()), return_counts=True)
    return dict(zip(minutes.tolist(), counts.tolist(), strict=True))


def metrics(sampled: pa.Table) -> pa.Table:
    """From all samples of the minutes that they are of."""
    column = {name: sampled.column(name).combine_chunks() for name in SAMPLES.names}
    group, firsts = groups(*(column[name] for name in _KEYS))
    count = len(firsts)
    n_attempts = np.bincount(group, minlength=count)
    counts = {
        name: _count(pc.equal(column["outcome"], outcome), group, count)
        for name, outcome in _OUTCOMES.items()
    }
    n_open = _count(pc.is_null(column["outcome"]), group, count)
    decided = counts["n_succeeded"] + counts["n_failed"]
    rate = counts["n_failed"] / np.maximum(decided, 1)
    return made(
        "metrics",
        {
            **{name: column[name].take(pa.array(firsts)) for name in _KEYS},
            "n_attempts": pa.array(n_attempts),
            **{name: pa.array(values) for name, values in counts.items()},
            "n_open": pa.array(n_open),
            "per_s": pa.array((n_attempts - n_open) / MINUTE_S),
            "failure_rate": nullable(rate, decided > 0, pa.float64()),
            **_percentiles("wait", column["wait_s"], group, count),
            **_percentiles("run", column["run_s"], group, count),
        },
    )


def _count(where: pa.Array, group: Ints, count: int) -> Ints:
    chosen: Flags = where.fill_null(False).to_numpy(zero_copy_only=False)
    return np.bincount(group[chosen], minlength=count)


def _percentiles(what: str, column: pa.Array, group: Ints, count: int) -> dict[str, pa.Array]:
    there = present(column)
    values, group = float_array(column)[there], group[there]
    values = values[np.lexsort((values, group))]
    sizes = np.bincount(group, minlength=count)
    begins = np.cumsum(sizes) - sizes
    return {
        f"{what}_{name}_s": nullable(_share(values, begins, sizes, share), sizes > 0, pa.float64())
        for name, share in _SHARES.items()
    }


def _share(values: Floats, begins: Ints, sizes: Ints, share: float) -> Floats:
    """Of sorted values of each group, that below which this share lies. Groups without values get any."""
    if not len(values):
        return np.zeros(len(sizes))
    place = np.maximum(sizes - 1, 0) * share
    low, high = np.floor(place), np.ceil(place)
    last = len(values) - 1
    below = values[np.minimum(begins + low.astype(np.int64), last)]
    above = values[np.minimum(begins + high.astype(np.int64), last)]
    return below + (place - low) * (above - below)
