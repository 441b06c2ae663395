"""All tables of a lake by the fold, in one process on one core: where its CPU goes, in µs an event."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from umbel.fold.anomalies import first_told, judged
from umbel.fold.buckets import divided
from umbel.fold.kernel import fold_bucket, fold_others
from umbel.fold.marks import marks_of, merged
from umbel.fold.metrics import metrics

BUCKET_EVENTS = 400_000
DIFFERING = {"subject", "task_id", "root_id", "args", "kwargs", "result", "detail"}
MadeT = TypeVar("MadeT")


def fold_lake(lake: Path) -> dict[str, Any]:
    """Read, deal out into buckets, fold and write one after the other; the tables lie in `folded` then."""
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    folder = lake / "folded"
    folder.mkdir(exist_ok=True)
    spent, began = _Spent(), time.perf_counter()
    files = sorted((lake / "events").rglob("*.parquet"))
    parts = spent.on("read", lambda: [pq.read_table(path, partitioning=None) for path in files])
    marks = spent.on("marks", lambda: merged([marks_of(part) for part in parts]))
    rows = sum(part.num_rows for part in parts)
    of_tasks, others = _told_apart(pa.concat_tables(parts))
    parts.clear()
    count = of_tasks.num_rows // BUCKET_EVENTS + 1
    dealt = spent.on("buckets", lambda: list(divided(of_tasks, count)))
    whole = [_fold_one(spent, folder, number, dealt) for number in range(count)]
    nodes = spent.on("others", lambda: fold_others(others, marks))
    samples, suspects, told = (pa.concat_tables(found) for found in zip(*whole, strict=True))
    figures = spent.on("metrics", lambda: metrics(samples))
    since = first_told(told)
    odd = spent.on("anomalies", lambda: judged(suspects, since, nodes.workers, marks.horizon_us()))
    rest = {"metrics": figures, "anomalies": odd, "workers": nodes.workers, "timeline": nodes.timeline}
    spent.on("write", lambda: _write(rest, folder, "rest"))
    seconds = time.perf_counter() - began
    return {"events": rows, "seconds": seconds, "buckets": count, "cpu_us_an_event": spent.over(rows)}


def _told_apart(events: pa.Table) -> tuple[pa.Table, pa.Table]:
    has_task = pc.is_valid(events.column("uuid"))
    return events.filter(has_task), events.filter(pc.invert(has_task))


def _fold_one(
    spent: "_Spent", folder: Path, number: int, dealt: list[pa.Table]
) -> tuple[pa.Table, pa.Table, pa.Table]:
    """Write what one bucket adds to the tables; what is needed of it later."""
    bucket = spent.on("kernel", lambda: fold_bucket(dealt[number]))
    dealt[number] = dealt[number].slice(0, 0)
    made = {name: getattr(bucket, name) for name in ("tasks", "attempts", "timeline", "anomalies")}
    spent.on("write", lambda: _write(made, folder, str(number)))
    return bucket.samples, bucket.suspects, bucket.told


class _Spent:
    """CPU of this process, by what it was spent on."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def on(self, what: str, make: Callable[[], MadeT]) -> MadeT:
        began = time.process_time()
        made = make()
        self._seconds[what] += time.process_time() - began
        return made

    def over(self, events: int) -> dict[str, float]:
        return {what: round(seconds / events * 1e6, 3) for what, seconds in self._seconds.items()}


def _write(tables: Mapping[str, pa.Table], folder: Path, part: str) -> None:
    """Dictionaries where values repeat, as the pipeline writes them."""
    for name, table in tables.items():
        texts = [
            field.name for field in table.schema if field.type == pa.string() and field.name not in DIFFERING
        ]
        path = folder / f"{name}-{part}.parquet"
        pq.write_table(table, path, compression="zstd", compression_level=1, use_dictionary=texts)
