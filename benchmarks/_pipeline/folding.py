"""All tables of a lake by the fold, in one process on one core: where its CPU goes, in µs an event."""

import time
from collections import Counter
from collections.abc import Callable
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
    """Read, deal out into buckets, fold, write; the tables lie in the folder `folded` afterwards."""
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    spent = _Spent()
    began = time.perf_counter()
    files = sorted((lake / "events").rglob("*.parquet"))
    parts = spent.on("read", lambda: [pq.read_table(path, partitioning=None) for path in files])
    marks = spent.on("marks", lambda: merged([marks_of(part) for part in parts]))
    events = pa.concat_tables(parts)
    has_task = pc.is_valid(events.column("uuid"))
    of_tasks, others = events.filter(has_task), events.filter(pc.invert(has_task))
    count = of_tasks.num_rows // BUCKET_EVENTS + 1
    dealt = spent.on("buckets", lambda: list(divided(of_tasks, count)))
    folded = [spent.on("kernel", lambda one=one: fold_bucket(one)) for one in dealt]
    nodes = spent.on("others", lambda: fold_others(others, marks))

    def every(name: str) -> pa.Table:
        return pa.concat_tables([getattr(one, name) for one in folded])

    figures = spent.on("metrics", lambda: metrics(every("samples")))
    suspected = spent.on(
        "anomalies",
        lambda: judged(every("suspects"), first_told(every("told")), nodes.workers, marks.horizon_us()),
    )
    made = {name: every(name) for name in ("tasks", "attempts", "timeline")}
    made |= {"metrics": figures, "suspected": suspected, "workers": nodes.workers, "nodes": nodes.timeline}
    (lake / "folded").mkdir(exist_ok=True)
    for name, table in made.items():
        spent.on("write", lambda name=name, table=table: _write(table, lake / "folded" / f"{name}.parquet"))
    seconds = time.perf_counter() - began
    rows = sum(part.num_rows for part in parts)
    return {"events": rows, "seconds": seconds, "buckets": count, "cpu_us_an_event": spent.over(rows)}


class _Spent:
    """CPU of this process, by what it was spent on."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def on(self, what: str, make: Callable[[], MadeT]) -> MadeT:
        began = time.process_time()
        made = make()
        self._seconds[what] += time.process_time() - began
        return made

    def over(self, events: int) -> dict[str, float]:
        return {what: round(seconds / events * 1e6, 3) for what, seconds in self._seconds.items()}


def _write(table: pa.Table, path: Path) -> None:
    """Dictionaries where values repeat, as the pipeline writes them."""
    texts = [
        field.name for field in table.schema if field.type == pa.string() and field.name not in DIFFERING
    ]
    pq.write_table(table, path, compression="zstd", compression_level=1, use_dictionary=texts)
