"""Folding: the jobs of a build, which run in Spark executors or in local processes.

    python -m umbel.pipeline.folding     reads one job per line from stdin, and writes one answer per line

A job reads a plan and files, writes files with new unique names, and returns these names. Two runs of the
same job therefore cannot disturb each other. A job reports unreadable files in its answer instead of raising
an error; the engine decides how to handle them.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from umbel.events.tables import TABLES
from umbel.fold import TABLES as KEPT_IN
from umbel.fold import buckets
from umbel.fold import nodes as odd
from umbel.fold import tasks as measured
from umbel.fold.buckets import claimed, divided
from umbel.fold.columns import EVENTS, INSTANT, Events
from umbel.fold.kernel import fold_bucket
from umbel.fold.registers import Keys, bin_sizes, large_tasks, ordered, reduced, shared_out, within
from umbel.fold.senders import marks_of, merged
from umbel.fold.tasks import timeline
from umbel.pipeline.parts import (
    Source,
    UnreadPart,
    Written,
    chosen,
    event_batches,
    read_index,
    read_part,
    write_dealt,
    write_part,
)
from umbel.pipeline.plan import HOT, Counted, Dealt, Fold, Folded, Judge, Measure, Plan
from umbel.stores.interface import Store, unavailable
from umbel.stores.local import store_at

EVENTS_AT_ONCE = 800_000
"""A bucket with more events does not fit into memory and is folded in pieces."""

LARGE_TASK = EVENTS_AT_ONCE // 4
_KEYS = ("uuid", "retries", "clock", "timestamp")


class Answer(msgspec.Struct, frozen=True):
    """The result of a job: the files that it has written, or the file that it could not read or write."""

    dealt: Dealt | None = None
    folded: Folded | None = None
    joined: Counted | None = None
    unread: str = ""
    failed: str = ""
    why: str = ""


def work(step: str, plan_at: str, number: int) -> bytes:
    """Run one job of a step, and return its answer as JSON. `plan_at` is the full address of the plan."""
    pa.set_cpu_count(1)  # each core runs a separate job
    pa.set_io_thread_count(1)
    if step == "check":  # the process runs and has imported everything that jobs need
        return msgspec.json.encode(Answer())
    try:
        plan = _read_plan(plan_at)
        answer = _STEPS[step](store_at(plan.lake), plan, number)
    except UnreadPart as error:
        answer = Answer(unread=error.name, why=error.why)
    except OSError as error:
        cause = unavailable(error) or error
        answer = Answer(failed=str(cause.filename or "the disk"), why=str(cause.strerror or cause))
    finally:
        pa.default_memory_pool().release_unused()
    return msgspec.json.encode(answer)


def _read_plan(plan_at: str) -> Plan:
    """Read the plan. Raise OSError with its address if it is unreadable."""
    folder, _, name = plan_at.rpartition("/")
    try:
        return msgspec.json.decode(store_at(folder).read(name), type=Plan)
    except OSError as error:
        cause = unavailable(error) or error
        raise OSError(cause.errno or 0, str(cause.strerror or cause), plan_at) from None


def deal(store: Store, plan: Plan, number: int) -> Answer:
    """Divide the events of raw files by target, and write them and their marks."""
    folder = f"{plan.folder}/scratch"
    marks, others = [], [EVENTS.empty_table()]

    def stretches() -> Iterator[tuple[int, pa.Table]]:
        for name in plan.loose[number]:
            for table in event_batches(store, name):
                marks.append(marks_of(table))
                has_task = pc.is_valid(table.column("uuid"))
                others.append(table.filter(pc.invert(has_task)))
                yield from _by_target(store, table.filter(has_task), plan)

    dealt = write_dealt(store, folder, stretches())
    without_task = write_part(store, pa.concat_tables(others), folder)
    seen = write_part(store, merged(marks).as_table(), folder)
    return Answer(dealt=msgspec.structs.replace(dealt, others=without_task.file, marks=seen.file))


def _by_target(store: Store, events: pa.Table, plan: Plan) -> Iterator[tuple[int, pa.Table]]:
    """Yield the events of each target: a bucket, or the segment that contains their task."""
    if plan.claims is None:
        yield from enumerate(divided(events, plan.count))
        return
    yield from claimed(events, [read_index(store, f"{KEPT_IN}/{name}") for name in plan.claims])


def fold(store: Store, plan: Plan, number: int) -> Answer:
    """Fold the tasks of a target: write their rows of the tables, and the data that later jobs join with
    other tasks.
    """
    job = plan.folds[number]
    source, done = Source(store, plan, job), Written(store, plan, counts=job.minutes == "all")
    if source.rows() <= EVENTS_AT_ONCE:
        _fold_whole(source.all(), plan, job, done)
    else:
        _fold_pieces(source, plan, done)
    if job.minutes == "changed" and "metrics" in plan.wanted:
        done.change(_changed_minutes(source))
    return Answer(folded=done.folded())


def _fold_whole(events: pa.Table, plan: Plan, job: Fold, done: "Written") -> None:
    """Fold events that fit into memory.

    In a first build, old tasks become a segment of this job, and all others are put aside for later jobs. In
    an increment, settled tasks get separate segments only if there are enough of them, because small files
    are slow to read.
    """
    if job.seals == "no" or plan.horizon_us is None:
        done.put(events)
        return
    hot_max = buckets.HOT_EVENTS // plan.count
    by_age = buckets.aged(events, plan.horizon_us, hot_max=hot_max)
    if job.seals == "first":
        done.put(by_age.old)
        recent = ((HOT + 1 + number, part) for number, part in by_age.slices())
        done.put_aside([(HOT, by_age.hot), *recent])
    elif by_age.old.num_rows + by_age.recent.num_rows < buckets.SEGMENT_EVENTS:
        done.put_hot(events)
    else:
        for part in (by_age.old, *by_age.parts()):
            done.put(part)
        done.put_hot(by_age.hot)


def _fold_pieces(source: Source, plan: Plan, done: "Written") -> None:
    """Fold more events than fit into memory, in pieces."""
    sizes = bin_sizes((table.column("uuid") for table in source.batches(["uuid"])), plan.count)
    for bins in shared_out(sizes, EVENTS_AT_ONCE):
        if sizes[bins.start : bins.stop].sum() <= EVENTS_AT_ONCE:
            done.put(_within(source, plan, bins))
        else:
            _fold_crowded(source, plan, bins, done)


def _changed_minutes(source: Source) -> dict[int, int]:
    """Return the minutes whose samples change because of new events, and the number of added samples in
    each.
    """
    came = pa.concat_tables([EVENTS.empty_table().select(["uuid"]), *source.fresh(["uuid"])])
    ids = pc.unique(came.column("uuid")).to_pylist()
    before, after = _minutes_of(chosen(source.kept(), ids)), _minutes_of(source.only(ids))
    return {minute: after.get(minute, 0) - before.get(minute, 0) for minute in {*before, *after}}


def _minutes_of(tables: Iterable[pa.Table]) -> dict[int, int]:
    """Count the samples in each minute. Events are reduced when they become too many."""
    events = EVENTS.empty_table()
    for table in tables:
        events = pa.concat_tables([events, table])
        if events.num_rows > EVENTS_AT_ONCE:
            events = reduced(events)
    return measured.counts_by_minute(fold_bucket(events).samples)


def _within(source: Source, plan: Plan, bins: range, without: list[str] | None = None) -> pa.Table:
    """Return the events of some bins, without those of large tasks."""
    every = source.only(without or [], others=True)
    inside = [table.filter(within(table.column("uuid"), bins, plan.count)) for table in every]
    return pa.concat_tables([EVENTS.empty_table(), *inside])


def _fold_crowded(source: Source, plan: Plan, bins: range, done: "Written") -> None:
    """Fold bins that do not fit into memory. Tasks with very many events are folded one at a time."""
    ids = (table.column("uuid") for table in source.batches(["uuid"]))
    inside = [part.filter(within(part, bins, plan.count)) for part in ids]
    large = large_tasks(inside, LARGE_TASK)
    done.put(_within(source, plan, bins, large))
    for task in large:
        essential = EVENTS.empty_table()
        for table in source.only([task]):
            essential = reduced(pa.concat_tables([essential, table])) if table.num_rows else essential
        stretches = _timeline_of(source, task) if "timeline" in plan.wanted else iter(())
        done.put_large(essential, source.only([task]), stretches)


def _timeline_of(source: Source, task: str) -> Iterator[pa.Table]:
    """Yield the timeline of one task in parts, so that it need not fit into memory."""
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
        yield rows.set_column(place, rows.schema.field("rank"), ranked)
        rank += rows.num_rows


def join(store: Store, plan: Plan, number: int) -> Answer:
    """Write a part of a table that combines data of all tasks."""
    join, done = plan.joins[number], Written(store, plan)
    if isinstance(join, Measure):
        return Answer(joined=done.write(measured.metrics(_samples(store, join)), "metrics"))
    if isinstance(join, Judge):
        suspects = pa.concat_tables([read_part(store, f"{KEPT_IN}/{file}") for file in join.files])
        workers = read_part(store, f"{plan.folder}/scratch/workers.parquet")
        found = odd.unfinished(suspects, workers, plan.horizon_us)
    else:
        untold = read_part(store, f"{KEPT_IN}/{join.file}")
        found = odd.never_sent(untold, read_part(store, f"{plan.folder}/scratch/since.parquet"))
    return Answer(joined=done.write(found, "anomalies"))


def _samples(store: Store, measure: Measure) -> pa.Table:
    """Return the samples of the minutes of a job."""
    first, last = (pa.scalar(minute, pa.int64()).cast(INSTANT) for minute in (measure.first, measure.last))
    inside = (pc.field("minute") >= first) & (pc.field("minute") <= last)
    parts = [read_part(store, f"{KEPT_IN}/{file}", filters=inside) for file in measure.files]
    return pa.concat_tables([measured.SAMPLES.empty_table(), *parts])


_STEPS: dict[str, Callable[[Store, Plan, int], Answer]] = {
    "deal": deal,
    "fold": fold,
    "join": join,
}
assert set(TABLES) >= {"tasks", "attempts", "timeline", "metrics", "anomalies"}


def main() -> None:
    """Run jobs from stdin until it closes."""
    for line in _lines():
        step, plan_at, number = msgspec.json.decode(line, type=tuple[str, str, int])
        sys.stdout.buffer.write(work(step, plan_at, number) + b"\n")
        sys.stdout.buffer.flush()


def _lines() -> Iterator[bytes]:
    return iter(sys.stdin.buffer.readline, b"")


if __name__ == "__main__":
    main()
