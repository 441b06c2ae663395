"""Writing: what a job has folded, as files of a segment."""

from collections.abc import Iterable, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from umbel.fold import metrics as measured
from umbel.fold.claims import index_of
from umbel.fold.kernel import Bucket, fold_bucket
from umbel.fold.names import TABLES
from umbel.pipeline.parts import write_dealt, write_index, write_part
from umbel.pipeline.plan import Counted, Dealt, Folded, Plan, Samples, Segment
from umbel.stores.interface import Store

SAMPLES_A_GROUP = 8_192
KEPT = "kept"
"""The folder of what is not a table: events, samples, suspects, keys."""


class Written:
    """What a job has written so far. `counts`: say how many samples each minute has."""

    def __init__(self, store: Store, plan: Plan, *, counts: bool = False) -> None:
        self._store = store
        self._plan = plan
        self._counts = counts
        self._segments: list[Segment] = []
        self._hot: Segment | None = None
        self._aside: Dealt | None = None
        self._minutes: dict[int, int] = {}

    def folded(self) -> Folded:
        return Folded(self._segments, self._hot, self._aside, self._minutes)

    def put(self, events: pa.Table) -> None:
        """A segment of these events."""
        if events.num_rows:
            bucket = fold_bucket(events)
            self._segments.append(self._segment(bucket, [events], [bucket.timeline]))

    def put_hot(self, events: pa.Table) -> None:
        if events.num_rows:
            bucket = fold_bucket(events)
            self._hot = self._segment(bucket, [events], [bucket.timeline])

    def put_large(self, kept: pa.Table, events: Iterable[pa.Table], timeline: Iterable[pa.Table]) -> None:
        """A segment of one task. `kept`: those of its events that `tasks` and `attempts` rest on."""
        self._segments.append(self._segment(fold_bucket(kept), events, timeline))

    def put_aside(self, stretches: Iterable[tuple[int, pa.Table]]) -> None:
        """Events for other jobs of this build."""
        self._aside = write_dealt(self._store, f"{self._plan.folder}/scratch", stretches)

    def change(self, minutes: Mapping[int, int]) -> None:
        self._minutes |= minutes

    def write(self, table: pa.Table, name: str) -> Counted | None:
        """A part of a table, if there is anything to write."""
        return self._part(table, name) if table.num_rows else None

    def _segment(self, bucket: Bucket, events: Iterable[pa.Table], timeline: Iterable[pa.Table]) -> Segment:
        tables = {"tasks": [bucket.tasks], "attempts": [bucket.attempts], "timeline": timeline}
        tables["anomalies"] = [bucket.anomalies]
        written = {
            name: [told for part in parts if (told := self.write(part, name)) is not None]
            for name, parts in tables.items()
            if name in self._plan.wanted
        }
        every, last_us, ids = list[Counted](), 0, list[pa.ChunkedArray]()
        for part in events:
            if part.num_rows:
                every.append(self._kept(_without_nulls(part)))
                last_us = max(last_us, pc.max(part.column("recorded_at").cast(pa.int64())).as_py() or 0)
                ids.append(part.column("uuid"))
        index = write_index(self._store, index_of(ids), f"{self._plan.folder}/{KEPT}")
        name = index.removeprefix(f"{TABLES}/")
        samples = self._sampled(bucket.samples)
        return Segment(every, name, last_us, written, samples, *self._suspects(bucket))

    def _sampled(self, samples: pa.Table) -> Samples | None:
        """Sorted, so that a range of minutes is read without the rest."""
        if "metrics" not in self._plan.wanted or not samples.num_rows:
            return None
        counts = measured.counts_by_minute(samples)
        if self._counts:
            for minute, count in counts.items():
                self._minutes[minute] = self._minutes.get(minute, 0) + count
        table = measured.by_minute(samples)
        file = self._part(table, KEPT, row_group_size=SAMPLES_A_GROUP).file
        return Samples(file, min(counts), max(counts))

    def _suspects(self, bucket: Bucket) -> list[Counted | None]:
        """Tasks that are open, those without a sending, and since when names have sendings."""
        if "anomalies" not in self._plan.wanted:
            return [None, None, None]
        suspects = bucket.suspects
        parts = [suspects.filter(suspects.column(name)) for name in ("is_open", "is_untold")]
        return [self._kept(part) if part.num_rows else None for part in (*parts, bucket.told)]

    def _kept(self, table: pa.Table) -> Counted:
        return self._part(table, KEPT)

    def _part(self, table: pa.Table, name: str, *, row_group_size: int = 2**20) -> Counted:
        folder = f"{self._plan.folder}/{name}"
        return kept_name(write_part(self._store, table, folder, row_group_size=row_group_size))


def _without_nulls(events: pa.Table) -> pa.Table:
    """Without columns that are null throughout, half of them: who reads events fills in what is missing."""
    return events.select(
        [name for name in events.schema.names if events.column(name).null_count < len(events)]
    )


def kept_name(written: Counted) -> Counted:
    """Named from the folder of tables."""
    return Counted(written.file.removeprefix(f"{TABLES}/"), written.rows)
