"""All tables of events that fit into memory, in this process and without files: what a build has to say."""

from collections.abc import Iterable, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from umbel.events.tables import TABLES
from umbel.fold import nodes as odd
from umbel.fold.buckets import buckets_for, divided
from umbel.fold.columns import EVENTS, settled
from umbel.fold.kernel import Bucket, fold_bucket, fold_others
from umbel.fold.senders import marks_of, merged
from umbel.fold.tasks import metrics


def tables_of(parts: Iterable[pa.Table], *, buckets: int | None = None) -> Mapping[str, pa.Table]:
    """Every table by its name. `parts`: events with columns of the lake; `buckets`: enough, unless said."""
    every = [settled(part) for part in parts]
    marks = merged(map(marks_of, every))
    events = pa.concat_tables([EVENTS.empty_table(), *every])
    has_task = pc.is_valid(events.column("uuid"))
    of_tasks, others = events.filter(has_task), events.filter(pc.invert(has_task))
    count = buckets or buckets_for(of_tasks.num_rows, of_tasks.num_rows)
    folded = [fold_bucket(bucket) for bucket in divided(of_tasks, count)]
    nodes = fold_others(others, marks)
    since = odd.earliest_sendings(_all(folded, "told"))
    suspected = odd.judged(_all(folded, "suspects"), since, nodes.workers, marks.horizon_us())
    found = {
        "tasks": _all(folded, "tasks"),
        "attempts": _all(folded, "attempts"),
        "timeline": pa.concat_tables([_all(folded, "timeline"), nodes.timeline]),
        "workers": nodes.workers,
        "elections": nodes.elections,
        "metrics": metrics(_all(folded, "samples")),
        "anomalies": pa.concat_tables([_all(folded, "anomalies"), suspected, nodes.anomalies]),
    }
    return {name: found[name] for name in TABLES}


def _all(folded: Iterable[Bucket], name: str) -> pa.Table:
    return pa.concat_tables([getattr(bucket, name) for bucket in folded])
