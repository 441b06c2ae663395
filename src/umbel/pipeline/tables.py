"""Tables: make the tables of a build, before it is published. The steps:

deal     divides the events of raw files, by bucket or by the segment that contains their task
fold     folds tasks: in a first build the old tasks of each bucket, then recent and hot tasks of all buckets;
         in an increment the segments with new events, the hot segment, and segments to merge
nodes    folds events without a task, in this process
join     computes metrics of changed minutes, and anomalies that depend on several tasks
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from umbel.fold import TABLES, marks_file, place_of
from umbel.fold.buckets import RECENT_US
from umbel.fold.columns import EVENTS, SCHEMAS
from umbel.fold.kernel import fold_others
from umbel.fold.nodes import FIRST_SENDINGS, earliest_sendings
from umbel.fold.senders import EVENTS_KEY, Marks, merged
from umbel.pipeline.engines import Engine
from umbel.pipeline.folding import Answer
from umbel.pipeline.parts import KEPT, event_batches, kept_name, read_part, write_part
from umbel.pipeline.plan import (
    DEAL_EVENTS,
    HOT,
    JUDGE_SUSPECTS,
    MERGED_EVENTS,
    Chunk,
    Counted,
    Dealt,
    Fold,
    Folded,
    Join,
    Judge,
    Miss,
    Plan,
    Segment,
    State,
    chunked,
    measures,
    merges,
    planned,
    shared,
)
from umbel.stores.interface import Store, raise_unavailable

Tell = Callable[[str, int, int], None]
"""Called with progress: the current step, steps done, steps in total."""

STEPS = 4
OTHERS_MAX = 16
"""Limit of files of events without a task; with more, they are merged into one."""

OF_NODES = frozenset({"timeline", "workers", "elections", "anomalies"})
Parts = dict[str, list[Counted]]


def say_nothing(_what: str, _done: int, _total: int) -> None:
    """Ignore progress; the default when no function is passed."""


@dataclass(frozen=True, slots=True)
class BuiltTables:
    """The files of each table, and the state that the next build can extend."""

    tables: Parts
    state: State


class BuildSite:
    """The context of a running build: its store, its folder, and the engine that runs its jobs."""

    def __init__(self, engine: Engine, store: Store, name: str, wanted: Sequence[str], tell: Tell) -> None:
        self.store = store
        self.wanted = list(wanted)
        self.tell = tell
        self.folder = f"{TABLES}/{name}"
        self.scratch = f"{self.folder}/scratch"
        self._engine = engine
        self._runs = Counter[str]()

    def open(self) -> Plan:
        """Return an empty plan for this build."""
        return Plan(self.store.where, self.folder, self.wanted)

    def clear(self) -> None:
        """Delete everything that this build has written."""
        self.store.delete_folder(self.folder)

    def close(self) -> None:
        """Delete the files that only the jobs of this build needed."""
        self.store.delete_folder(self.scratch)

    def run(self, step: str, plan: Plan, count: int) -> Sequence[Answer]:
        """Write the plan, run `count` jobs of a step, and return their answers."""
        if not count:
            return []
        self._runs[step] += 1
        again = f"-{self._runs[step]}" if self._runs[step] > 1 else ""
        name = f"{self.scratch}/{step}{again}.json"
        with self.store.writer(name) as file:
            file.write(msgspec.json.encode(plan))
        return self._engine.run(step, f"{self.store.where}/{name}", count)

    def deal(self, plan: Plan) -> list[Dealt]:
        """Divide raw files by target, and return the files that the jobs have written."""
        if plan.loose:
            self.tell("dividing", 0, STEPS)
        return [
            answer.dealt for answer in self.run("deal", plan, len(plan.loose)) if answer.dealt is not None
        ]

    def fold(self, plan: Plan) -> list[Folded]:
        """Fold tasks, and return the results in the order of the jobs."""
        self.tell("folding", 1, STEPS)
        return [answer.folded or Folded() for answer in self.run("fold", plan, len(plan.folds))]

    def write(self, table: pa.Table, name: str) -> Counted:
        """Write a table to a folder of this build."""
        return kept_name(write_part(self.store, table, f"{self.folder}/{name}"))

    def write_scratch(self, table: pa.Table, name: str) -> None:
        """Write a table with this name for jobs of this build."""
        with self.store.writer(f"{self.scratch}/{name}") as file:
            pq.write_table(table, file)

    def read(self, part: Counted) -> pa.Table:
        """Read a file of a build."""
        return read_part(self.store, f"{TABLES}/{part.file}")

    def read_all(self, schema: pa.Schema, parts: Iterable[Counted | None]) -> pa.Table:
        """Read files of builds as one table; None means no file."""
        return pa.concat_tables(
            [schema.empty_table(), *(self.read(part) for part in parts if part is not None)]
        )


@dataclass(slots=True)
class FoldedParts:
    """The results of folding, from which the other tables are made."""

    marks: Marks
    others: list[Counted]
    segments: list[Segment]
    hot: Segment | None
    minutes: dict[int, int] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    since: Counted | None = None
    """The first task-sent event of each task name, from the previous build."""

    def every(self) -> list[Segment]:
        """Return all segments, including the hot one."""
        return [*self.segments, *([self.hot] if self.hot is not None else [])]

    def take(self, folded: Folded) -> None:
        """Add the result of a job."""
        self.segments += folded.segments
        self.hot = folded.hot or self.hot
        for minute, more in folded.minutes.items():
            self.minutes[minute] = self.minutes.get(minute, 0) + more


def made_whole(site: BuildSite, rows: Mapping[str, int]) -> BuiltTables:
    """Build from all events. `rows` contains the files of the lake and their numbers of events."""
    known, whole = _marks_in(site.store, rows)
    plan = planned(site.open(), rows, whole)
    dealt = site.deal(plan)
    groups = {group.name for group in plan.groups}
    marks = merged(
        [*(found for group, found in known.items() if group in groups), *_marks_of(site.store, dealt)]
    )
    plan = msgspec.structs.replace(plan, dealt=dealt, horizon_us=marks.horizon_us())
    folded = site.fold(plan)
    of_lake = [table for name in plan.others() for table in event_batches(site.store, name)]
    others = pa.concat_tables([EVENTS.empty_table(), *of_lake, _others_in(site.store, dealt)])
    ground = FoldedParts(marks, [site.write(others, KEPT)], [], None)
    for result in folded:
        ground.take(result)
    aside = [result.aside for result in folded if result.aside is not None]
    targets = sorted({target for part in aside for target in part.targets})
    folds = [Fold(target, minutes="all") for target in targets]
    rest = site.fold(msgspec.structs.replace(plan, dealt=aside, folds=folds)) if folds else []
    for target, result in zip(targets, rest, strict=True):
        is_hot = target == HOT and len(result.segments) == 1
        ground.take(
            msgspec.structs.replace(result, segments=[], hot=result.segments[0]) if is_hot else result
        )
    return _joined(site, ground, rows, marks.horizon_us())


def extended(site: BuildSite, state: State, rows: Mapping[str, int], new: Sequence[str]) -> BuiltTables:
    """Extend the last build with the events of new files."""
    segments = state.segments
    plan = msgspec.structs.replace(
        site.open(),
        loose=shared({name: rows[name] for name in new}, DEAL_EVENTS),
        claims=[segment.index for segment in segments],
    )
    dealt = site.deal(plan)
    marks = merged([Marks.of_table(site.read(state.marks)), *_marks_of(site.store, dealt)])
    horizon_us = marks.horizon_us()
    touched = {target for part in dealt for target in part.targets}
    folds = [
        Fold(place, segments[place].events, minutes="changed") for place in sorted(touched - {len(segments)})
    ]
    spared = [segment for place, segment in enumerate(segments) if place not in touched]
    if len(segments) in touched:
        hot_events = state.hot.events if state.hot is not None else []
        folds.append(Fold(len(segments), hot_events, seals="enough", minutes="changed"))
    came = sum(rows[name] for name in new)
    together = list(merges(spared, horizon_us or 0, RECENT_US, MERGED_EVENTS * came))
    folds += [Fold(-1, [part for segment in those for part in segment.events]) for those in together]
    folds.sort(key=lambda job: job.kept_rows, reverse=True)  # the longest jobs first, for an even load
    replaced = {id(segment) for those in together for segment in those}
    ground = FoldedParts(
        marks,
        _with_others(site, state.others, _others_in(site.store, dealt)),
        [segment for segment in spared if id(segment) not in replaced],
        state.hot if len(segments) not in touched else None,
        chunks=list(state.chunks),
        since=state.since,
    )
    if folds:
        plan = msgspec.structs.replace(plan, dealt=dealt, folds=folds, horizon_us=horizon_us)
        for result in site.fold(plan):
            ground.take(result)
    return _joined(site, ground, rows, horizon_us)


def _with_others(site: BuildSite, files: Sequence[Counted], others: pa.Table) -> list[Counted]:
    if not others.num_rows:
        return list(files)
    if len(files) < OTHERS_MAX:
        return [*files, site.write(others, KEPT)]
    return [site.write(pa.concat_tables([site.read_all(EVENTS, files), others]), KEPT)]


def _joined(
    site: BuildSite, ground: FoldedParts, rows: Mapping[str, int], horizon_us: int | None
) -> BuiltTables:
    """Make the other tables from the results of folding."""
    site.tell("nodes", 2, STEPS)
    tables: Parts = {table: [] for table in site.wanted}
    _put_nodes(site, ground, tables)
    since, stale = _since(site, ground)
    chunks = chunked(ground.chunks, ground.minutes) if "metrics" in site.wanted else []
    segments = ground.every()
    measured = measures(chunks, [segment.samples for segment in segments if segment.samples is not None])
    missed = [
        segment
        for segment in segments
        if segment.untold is not None and (segment.judged is None or segment.index in stale)
    ]
    suspects = {segment.open.file: segment.open.rows for segment in segments if segment.open is not None}
    judges = [Judge(files) for files in shared(suspects, JUDGE_SUSPECTS)]
    misses = [Miss(segment.untold.file) for segment in missed if segment.untold is not None]
    joins: list[Join] = [*measured, *judges, *misses]
    plan = msgspec.structs.replace(site.open(), joins=joins, horizon_us=horizon_us)
    site.tell("joining", 3, STEPS)
    results = iter([answer.joined for answer in site.run("join", plan, len(joins))])
    chunks = [
        chunk if chunk.file is not None else msgspec.structs.replace(chunk, file=next(results))
        for chunk in chunks
    ]
    chunks = [chunk for chunk in chunks if chunk.file is not None]
    found = [next(results) for _ in judges]
    verdicts = {segment.index: next(results) or NONE for segment in missed}
    segments = [
        msgspec.structs.replace(segment, judged=verdicts[segment.index])
        if segment.index in verdicts
        else segment
        for segment in segments
    ]
    for segment in segments:
        for table, parts in segment.tables.items():
            tables[table] += parts
    if "metrics" in tables:
        tables["metrics"] += [chunk.file for chunk in chunks if chunk.file is not None]
    if "anomalies" in tables:
        verdict = [segment.judged for segment in segments]
        tables["anomalies"] += [part for part in (*found, *verdict) if part is not None and part.rows]
    for table, parts in tables.items():
        if not parts:  # an empty table also has a file, with its columns
            parts.append(site.write(SCHEMAS[table].empty_table(), table))
    site.close()
    site.tell("", STEPS, STEPS)
    hot = segments.pop() if ground.hot is not None else None
    marks = site.write(ground.marks.as_table(), KEPT)
    return BuiltTables(
        tables, State(site.wanted, dict(rows), segments, hot, ground.others, marks, since, chunks)
    )


NONE = Counted("", 0)
"""The result of a job that found nothing."""


def _put_nodes(site: BuildSite, ground: FoldedParts, tables: Parts) -> None:
    """Fold the events without a task, which are few, and write their tables."""
    if not OF_NODES & tables.keys():
        return
    nodes = fold_others(site.read_all(EVENTS, ground.others), ground.marks)
    for name in OF_NODES & tables.keys():
        part: pa.Table = getattr(nodes, name)
        if part.num_rows:
            tables[name].append(site.write(part, name))
    site.write_scratch(nodes.workers, "workers.parquet")


def _since(site: BuildSite, ground: FoldedParts) -> tuple[Counted | None, set[str]]:
    """Return the first task-sent event of each task name, and the segments that are affected by changes of
    it.
    """
    if "anomalies" not in site.wanted:
        return None, set()
    since = earliest_sendings(site.read_all(FIRST_SENDINGS, [segment.told for segment in ground.every()]))
    site.write_scratch(since, "since.parquet")
    before = _by_name(site.read_all(FIRST_SENDINGS, [ground.since]))
    after = _by_name(since)
    names = pa.array([name for name in {*before, *after} if before.get(name) != after.get(name)], pa.string())
    stale = {
        segment.index
        for segment in ground.every()
        if len(names)
        and segment.untold is not None
        and segment.judged is not None
        and pc.any(pc.is_in(site.read(segment.untold).column("name"), value_set=names)).as_py()
    }
    return site.write(since, KEPT), stale


def _by_name(since: pa.Table) -> dict[str, object]:
    first_us = since.column("told_since").cast(pa.int64())
    return dict(zip(since.column("name").to_pylist(), first_us.to_pylist(), strict=True))


def _marks_in(store: Store, names: Iterable[str]) -> tuple[dict[str, Marks], dict[str, int]]:
    """Return the readable marks of groups, and the number of events that they describe."""
    found: dict[str, Marks] = {}
    whole: dict[str, int] = {}
    for group in sorted({place.group for place in map(place_of, names) if place is not None}):
        try:
            with store.open(marks_file(group)) as file:
                table = pq.read_table(file, partitioning=None)
            whole[group] = int((table.schema.metadata or {})[EVENTS_KEY])
            found[group] = Marks.of_table(table)
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise_unavailable(error)
            continue  # unreadable marks are computed from the events
    return found, whole


def _marks_of(store: Store, dealt: Sequence[Dealt]) -> list[Marks]:
    return [Marks.of_table(read_part(store, part.marks)) for part in dealt]


def _others_in(store: Store, dealt: Sequence[Dealt]) -> pa.Table:
    return pa.concat_tables([EVENTS.empty_table(), *(read_part(store, part.others) for part in dealt)])
