"""Folding: the jobs of a build, each in any process: an executor of Spark, or one of this machine.

    python -m umbel.pipeline.folding     takes jobs from stdin, a line each, and answers with a line

A job reads a plan and files, writes files under names of its own, and tells their names. What it could not
read or write is told too, instead of raised: who runs it decides what that means.
"""

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from umbel.events.tables import TABLES
from umbel.fold import anomalies as odd
from umbel.fold import metrics as measured
from umbel.fold.buckets import divided
from umbel.fold.columns import Events
from umbel.fold.crowded import Keys, bin_sizes, large_tasks, reduced, shared_out, within
from umbel.fold.kernel import Bucket, fold_bucket
from umbel.fold.marks import marks_of, merged
from umbel.fold.order import ordered
from umbel.fold.schemas import EVENTS, INSTANT
from umbel.fold.timeline import timeline
from umbel.pipeline.parts import Source, UnreadPart, created, event_batches, fresh_path, write_part
from umbel.pipeline.plan import Counted, Dealt, Folded, Judge, Measure, Plan, Samples

EVENTS_AT_ONCE = 800_000
"""A bucket with more is folded piece by piece."""

LARGE_TASK = EVENTS_AT_ONCE // 4
SAMPLES_A_GROUP = 65_536
_KEYS = ("uuid", "retries", "clock", "timestamp")


class Answer(msgspec.Struct, frozen=True):
    """What became of a job."""

    dealt: Dealt | None = None
    folded: Folded | None = None
    unread: str = ""
    failed: str = ""
    why: str = ""


def work(step: str, plan_path: str, number: int) -> bytes:
    """Do one job of a step."""
    pa.set_cpu_count(1)  # one job a core
    pa.set_io_thread_count(1)
    try:
        plan = msgspec.json.decode(Path(plan_path).read_bytes(), type=Plan)
        answer = _STEPS[step](plan, number)
    except UnreadPart as error:
        answer = Answer(unread=error.path, why=error.why)
    except OSError as error:
        answer = Answer(failed=str(error.filename or "the disk"), why=str(error.strerror or error))
    finally:
        pa.default_memory_pool().release_unused()
    return msgspec.json.encode(answer)


def deal(plan: Plan, number: int) -> Answer:
    """Loose files: their events by bucket, and their marks."""
    folder = Path(plan.folder) / "scratch"
    path = fresh_path(folder, ".arrow")
    marks, others = [], [EVENTS.empty_table()]
    buckets: list[int] = []
    sizes: list[int] = []
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with created(path) as file, pa.ipc.new_file(file, EVENTS, options=options) as writer:
        for name in plan.loose[number]:
            for table in event_batches(name):
                marks.append(marks_of(table))
                has_task = pc.is_valid(table.column("uuid"))
                others.append(table.filter(pc.invert(has_task)))
                for bucket, part in enumerate(divided(table.filter(has_task), plan.count)):
                    for batch in part.combine_chunks().to_batches() if part.num_rows else ():
                        writer.write_batch(batch)
                        buckets.append(bucket)
                        sizes.append(batch.num_rows)
    kept = write_part(pa.concat_tables(others), folder)
    seen = write_part(merged(marks).as_table(), folder)
    return Answer(dealt=Dealt(str(path), buckets, sizes, kept.file, seen.file))


def fold(plan: Plan, bucket: int) -> Answer:
    """One bucket: its part of the tables, and what is joined with that of others."""
    source, done = Source(plan, bucket), _Written(plan)
    if source.rows() <= EVENTS_AT_ONCE:
        done.put(fold_bucket(source.all()))
        return Answer(folded=done.folded())
    sizes = bin_sizes((table.column("uuid") for table in source.batches(["uuid"])), plan.count)
    for bins in shared_out(sizes, EVENTS_AT_ONCE):
        if sizes[bins.start : bins.stop].sum() <= EVENTS_AT_ONCE:
            done.put(fold_bucket(_within(source, plan, bins)))
        else:
            _fold_crowded(source, plan, bins, done)
    return Answer(folded=done.folded())


def _within(source: Source, plan: Plan, bins: range, without: list[str] | None = None) -> pa.Table:
    every = source.only(without or [], others=True)
    inside = [table.filter(within(table.column("uuid"), bins, plan.count)) for table in every]
    return pa.concat_tables([EVENTS.empty_table(), *inside])


def _fold_crowded(source: Source, plan: Plan, bins: range, done: "_Written") -> None:
    """Bins that do not fit, because tasks in them have very many events: those are folded one by one."""
    ids = (table.column("uuid") for table in source.batches(["uuid"]))
    inside = [one.filter(within(one, bins, plan.count)) for one in ids]
    large = large_tasks(inside, LARGE_TASK)
    done.put(fold_bucket(_within(source, plan, bins, large)))
    for task in large:
        kept = EVENTS.empty_table()
        for table in source.only([task]):
            kept = reduced(pa.concat_tables([kept, table])) if table.num_rows else kept
        done.put(fold_bucket(kept), with_timeline=False)
        if "timeline" in plan.wanted:
            _put_timeline(source, task, done)


def _put_timeline(source: Source, task: str, done: "_Written") -> None:
    """Of one task, a stretch of the order at a time."""
    keys = Keys.joined(
        [
            Keys.of(table.filter(pc.equal(table.column("uuid").cast(pa.string()), task)))
            for table in source.batches(_KEYS)
        ]
    )
    cuts = [None, *keys.cuts(LARGE_TASK), None]
    rank = 0
    for start, end in pairwise(cuts):
        own = [table.filter(pa.array(Keys.of(table).between(start, end))) for table in source.only([task])]
        events = Events(pa.concat_tables(own))
        rows = timeline(events, ordered(events, events.column("uuid")))
        place = rows.schema.get_field_index("rank")
        ranked = pc.add(rows.column("rank"), pa.scalar(rank, pa.int64()))
        done.put_table("timeline", rows.set_column(place, rows.schema.field("rank"), ranked))
        rank += rows.num_rows


class _Written:
    """What a job has written so far."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._folder = Path(plan.folder)
        self._scratch = self._folder / "scratch"
        self._tables: dict[str, list[Counted]] = {}
        self._samples: list[Samples] = []
        self._suspects: list[Counted] = []
        self._told: list[str] = []

    def put(self, bucket: Bucket, *, with_timeline: bool = True) -> None:
        self.put_table("tasks", bucket.tasks)
        self.put_table("attempts", bucket.attempts)
        self.put_table("anomalies", bucket.anomalies)
        if with_timeline:
            self.put_table("timeline", bucket.timeline)
        if "metrics" in self._plan.wanted and bucket.samples.num_rows:
            self._samples.append(self._sampled(bucket.samples))
        if "anomalies" in self._plan.wanted:
            if bucket.suspects.num_rows:
                self._suspects.append(write_part(bucket.suspects, self._scratch))
            self._told.append(write_part(bucket.told, self._scratch).file)

    def put_table(self, name: str, table: pa.Table) -> None:
        if name in self._plan.wanted and table.num_rows:
            self._tables.setdefault(name, []).append(write_part(table, self._folder / name))

    def _sampled(self, samples: pa.Table) -> Samples:
        """Sorted, so that a range of minutes is read without the rest."""
        table, minutes, counts = measured.by_minute(samples)
        file = write_part(table, self._scratch, row_group_size=SAMPLES_A_GROUP).file
        return Samples(file, minutes, counts)

    def folded(self) -> Folded:
        return Folded(self._tables, self._samples, self._suspects, self._told)


def join(plan: Plan, number: int) -> Answer:
    """What is made of all buckets together."""
    chosen = plan.joins[number]
    if isinstance(chosen, Measure):
        name, table = "metrics", measured.metrics(_samples(chosen))
    else:
        name, table = "anomalies", _judged(plan, chosen)
    written = [write_part(table, Path(plan.folder) / name)] if table.num_rows else []
    return Answer(folded=Folded(tables={name: written}))


def _judged(plan: Plan, chosen: Judge) -> pa.Table:
    scratch = Path(plan.folder) / "scratch"
    since, workers = (_read(str(scratch / f"{what}.parquet")) for what in ("since", "workers"))
    suspects = pa.concat_tables([_read(file) for file in chosen.files])
    return odd.judged(suspects, since, workers, plan.horizon_us)


def _samples(chosen: Measure) -> pa.Table:
    first, last = (pa.scalar(one, pa.int64()).cast(INSTANT) for one in (chosen.first, chosen.last))
    inside = (pc.field("minute") >= first) & (pc.field("minute") <= last)
    parts = [
        pq.read_table(file, filters=inside, partitioning=None, use_threads=False) for file in chosen.files
    ]
    return pa.concat_tables([measured.SAMPLES.empty_table(), *parts])


def _read(path: str) -> pa.Table:
    return pq.read_table(path, partitioning=None, use_threads=False)


def check(_plan: Plan, _number: int) -> Answer:
    """That a process can do jobs: a process that gets here has imported all that they need."""
    return Answer(folded=Folded())


_STEPS: dict[str, Callable[[Plan, int], Answer]] = {"check": check, "deal": deal, "fold": fold, "join": join}
assert set(TABLES) >= {"tasks", "attempts", "timeline", "metrics", "anomalies"}


def main() -> None:
    for line in _lines():
        step, plan_path, number = msgspec.json.decode(line, type=tuple[str, str, int])
        sys.stdout.buffer.write(work(step, plan_path, number) + b"\n")
        sys.stdout.buffer.flush()


def _lines() -> Iterator[bytes]:
    return iter(sys.stdin.buffer.readline, b"")


if __name__ == "__main__":
    main()
