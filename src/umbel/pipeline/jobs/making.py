"""Making: the tables of one build, before it is published.

deal     files that are not written by bucket: by bucket, or by the segment that has their tasks
fold     tasks: in a first build the old ones of a bucket, then those of all buckets that are recent or hot;
         in an increment segments that got events, the hot one, and old segments that are put together
nodes    events without a task, in this process
join     metrics of minutes that changed, and what is judged beside other facts
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from umbel.fold.ages import RECENT_US
from umbel.fold.anomalies import TOLD, first_told
from umbel.fold.kernel import fold_others
from umbel.fold.marks import EVENTS_KEY, Marks, merged
from umbel.fold.names import TABLES, marks_file, place_of
from umbel.fold.schemas import EVENTS, SCHEMAS
from umbel.pipeline.engines import Engine
from umbel.pipeline.folding import Answer
from umbel.pipeline.parts import event_batches, read_part, write_part
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
    chunked,
    measures,
    merges,
    planned,
    shared,
)
from umbel.pipeline.state import State
from umbel.pipeline.writing import KEPT, kept_name
from umbel.stores.interface import Store
from umbel.stores.refusals import raise_unavailable

Tell = Callable[[str, int, int], None]
"""Called with progress: the current step, steps done, steps in total."""

STEPS = 4
OTHERS_MAX = 16
"""More files of events without a task are put together."""

OF_NODES = frozenset({"timeline", "workers", "elections", "anomalies"})
Parts = dict[str, list[Counted]]


def say_nothing(_what: str, _done: int, _total: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Made:
    """Files of each table, and what the next build can extend."""

    tables: Parts
    state: State


class Site:
    """Where a build is made, and by whom."""

    def __init__(self, engine: Engine, store: Store, name: str, wanted: Sequence[str], tell: Tell) -> None:
        self.store = store
        self.wanted = list(wanted)
        self.tell = tell
        self.folder = f"{TABLES}/{name}"
        self.scratch = f"{self.folder}/scratch"
        self._engine = engine
        self._runs = Counter[str]()

    def open(self) -> Plan:
        """A plan without anything to do."""
        return Plan(self.store.where, self.folder, self.wanted)

    def clear(self) -> None:
        self.store.delete_folder(self.folder)

    def close(self) -> None:
        self.store.delete_folder(self.scratch)

    def run(self, step: str, plan: Plan, count: int) -> Sequence[Answer]:
        if not count:
            return []
        self._runs[step] += 1
        again = f"-{self._runs[step]}" if self._runs[step] > 1 else ""
        name = f"{self.scratch}/{step}{again}.json"
        with self.store.writer(name) as file:
            file.write(msgspec.json.encode(plan))
        return self._engine.run(step, f"{self.store.where}/{name}", count)

    def deal(self, plan: Plan) -> list[Dealt]:
        if plan.loose:
            self.tell("dealing out", 0, STEPS)
        return [one.dealt for one in self.run("deal", plan, len(plan.loose)) if one.dealt is not None]

    def fold(self, plan: Plan) -> list[Folded]:
        """What became of each job, in turn."""
        self.tell("folding", 1, STEPS)
        return [one.folded or Folded() for one in self.run("fold", plan, len(plan.folds))]

    def write(self, table: pa.Table, name: str) -> Counted:
        return kept_name(write_part(self.store, table, f"{self.folder}/{name}"))

    def write_scratch(self, table: pa.Table, name: str) -> None:
        """For jobs of this build, which find it by this name."""
        with self.store.writer(f"{self.scratch}/{name}") as file:
            pq.write_table(table, file)

    def read(self, part: Counted) -> pa.Table:
        return read_part(self.store, f"{TABLES}/{part.file}")

    def read_all(self, schema: pa.Schema, parts: Iterable[Counted | None]) -> pa.Table:
        return pa.concat_tables([schema.empty_table(), *(self.read(one) for one in parts if one is not None)])


@dataclass(slots=True)
class Ground:
    """What the rest of a build is made from."""

    marks: Marks
    others: list[Counted]
    segments: list[Segment]
    hot: Segment | None
    minutes: dict[int, int] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    since: Counted | None = None
    """That of the build before."""

    def every(self) -> list[Segment]:
        return [*self.segments, *([self.hot] if self.hot is not None else [])]

    def take(self, folded: Folded) -> None:
        self.segments += folded.segments
        self.hot = folded.hot or self.hot
        for minute, more in folded.minutes.items():
            self.minutes[minute] = self.minutes.get(minute, 0) + more


def made_whole(site: Site, rows: Mapping[str, int]) -> Made:
    """From all events. `rows`: the lake's files and how many events each has."""
    known, whole = _marks_in(site.store, rows)
    plan = planned(site.open(), rows, whole)
    dealt = site.deal(plan)
    groups = {group.name for group in plan.groups}
    marks = merged([*(one for group, one in known.items() if group in groups), *_marks_of(site.store, dealt)])
    plan = msgspec.structs.replace(plan, dealt=dealt, horizon_us=marks.horizon_us())
    folded = site.fold(plan)
    of_lake = [table for name in plan.others() for table in event_batches(site.store, name)]
    others = pa.concat_tables([EVENTS.empty_table(), *of_lake, _others_in(site.store, dealt)])
    ground = Ground(marks, [site.write(others, KEPT)], [], None)
    for one in folded:
        ground.take(one)
    aside = [one.aside for one in folded if one.aside is not None]
    targets = sorted({target for one in aside for target in one.targets})
    folds = [Fold(target, minutes="all") for target in targets]
    rest = site.fold(msgspec.structs.replace(plan, dealt=aside, folds=folds)) if folds else []
    for target, one in zip(targets, rest, strict=True):
        is_hot = target == HOT and len(one.segments) == 1
        ground.take(msgspec.structs.replace(one, segments=[], hot=one.segments[0]) if is_hot else one)
    return _joined(site, ground, rows, marks.horizon_us())


def extended(site: Site, state: State, rows: Mapping[str, int], new: Sequence[str]) -> Made:
    """What was built, and events of these files."""
    segments = state.segments
    plan = msgspec.structs.replace(
        site.open(),
        loose=shared({name: rows[name] for name in new}, DEAL_EVENTS),
        claims=[one.index for one in segments],
    )
    dealt = site.deal(plan)
    marks = merged([Marks.of_table(site.read(state.marks)), *_marks_of(site.store, dealt)])
    horizon_us = marks.horizon_us()
    touched = {target for one in dealt for target in one.targets}
    folds = [
        Fold(place, segments[place].events, minutes="changed") for place in sorted(touched - {len(segments)})
    ]
    spared = [one for place, one in enumerate(segments) if place not in touched]
    if len(segments) in touched:
        kept = state.hot.events if state.hot is not None else []
        folds.append(Fold(len(segments), kept, seals="enough", minutes="changed"))
    came = sum(rows[name] for name in new)
    together = list(merges(spared, horizon_us or 0, RECENT_US, MERGED_EVENTS * came))
    folds += [Fold(-1, [part for one in those for part in one.events]) for those in together]
    folds.sort(key=lambda one: one.kept_rows, reverse=True)  # the longest first, so that none is left over
    replaced = {id(one) for those in together for one in those}
    ground = Ground(
        marks,
        _with_others(site, state.others, _others_in(site.store, dealt)),
        [one for one in spared if id(one) not in replaced],
        state.hot if len(segments) not in touched else None,
        chunks=list(state.chunks),
        since=state.since,
    )
    if folds:
        for one in site.fold(msgspec.structs.replace(plan, dealt=dealt, folds=folds, horizon_us=horizon_us)):
            ground.take(one)
    return _joined(site, ground, rows, horizon_us)


def _with_others(site: Site, kept: Sequence[Counted], others: pa.Table) -> list[Counted]:
    if not others.num_rows:
        return list(kept)
    if len(kept) < OTHERS_MAX:
        return [*kept, site.write(others, KEPT)]
    return [site.write(pa.concat_tables([site.read_all(EVENTS, kept), others]), KEPT)]


def _joined(site: Site, ground: Ground, rows: Mapping[str, int], horizon_us: int | None) -> Made:
    """All tables, from what was folded."""
    site.tell("nodes", 2, STEPS)
    tables: Parts = {table: [] for table in site.wanted}
    _put_nodes(site, ground, tables)
    since, stale = _since(site, ground)
    chunks = chunked(ground.chunks, ground.minutes) if "metrics" in site.wanted else []
    segments = ground.every()
    measured = measures(chunks, [one.samples for one in segments if one.samples is not None])
    missed = [
        one for one in segments if one.untold is not None and (one.judged is None or one.index in stale)
    ]
    suspects = {one.open.file: one.open.rows for one in segments if one.open is not None}
    judges = [Judge(files) for files in shared(suspects, JUDGE_SUSPECTS)]
    misses = [Miss(one.untold.file) for one in missed if one.untold is not None]
    joins: list[Join] = [*measured, *judges, *misses]
    plan = msgspec.structs.replace(site.open(), joins=joins, horizon_us=horizon_us)
    site.tell("joining", 3, STEPS)
    told = iter([one.joined for one in site.run("join", plan, len(joins))])
    chunks = [
        one if one.file is not None else msgspec.structs.replace(one, file=next(told)) for one in chunks
    ]
    chunks = [one for one in chunks if one.file is not None]
    found = [next(told) for _ in judges]
    verdicts = {one.index: next(told) or NONE for one in missed}
    segments = [
        msgspec.structs.replace(one, judged=verdicts[one.index]) if one.index in verdicts else one
        for one in segments
    ]
    for segment in segments:
        for table, parts in segment.tables.items():
            tables[table] += parts
    if "metrics" in tables:
        tables["metrics"] += [one.file for one in chunks if one.file is not None]
    if "anomalies" in tables:
        verdict = [one.judged for one in segments]
        tables["anomalies"] += [one for one in (*found, *verdict) if one is not None and one.rows]
    for table, parts in tables.items():
        if not parts:  # it has a file too, with its columns
            parts.append(site.write(SCHEMAS[table].empty_table(), table))
    site.close()
    site.tell("", STEPS, STEPS)
    hot = segments.pop() if ground.hot is not None else None
    kept = site.write(ground.marks.as_table(), KEPT)
    return Made(tables, State(site.wanted, dict(rows), segments, hot, ground.others, kept, since, chunks))


NONE = Counted("", 0)
"""Nothing was found."""


def _put_nodes(site: Site, ground: Ground, tables: Parts) -> None:
    """The events without a task, which are few."""
    if not OF_NODES & tables.keys():
        return
    nodes = fold_others(site.read_all(EVENTS, ground.others), ground.marks)
    for name in OF_NODES & tables.keys():
        part: pa.Table = getattr(nodes, name)
        if part.num_rows:
            tables[name].append(site.write(part, name))
    site.write_scratch(nodes.workers, "workers.parquet")


def _since(site: Site, ground: Ground) -> tuple[Counted | None, set[str]]:
    """Since when names have sendings; and the segments with tasks of names of which that is news."""
    if "anomalies" not in site.wanted:
        return None, set()
    since = first_told(site.read_all(TOLD, [one.told for one in ground.every()]))
    site.write_scratch(since, "since.parquet")
    before = _by_name(site.read_all(TOLD, [ground.since]))
    after = _by_name(since)
    names = pa.array([name for name in {*before, *after} if before.get(name) != after.get(name)], pa.string())
    stale = {
        one.index
        for one in ground.every()
        if len(names)
        and one.untold is not None
        and one.judged is not None
        and pc.any(pc.is_in(site.read(one.untold).column("name"), value_set=names)).as_py()
    }
    return site.write(since, KEPT), stale


def _by_name(since: pa.Table) -> dict[str, object]:
    told = since.column("told_since").cast(pa.int64())
    return dict(zip(since.column("name").to_pylist(), told.to_pylist(), strict=True))


def _marks_in(store: Store, names: Iterable[str]) -> tuple[dict[str, Marks], dict[str, int]]:
    """The marks of the groups that have some, and how many events they are of."""
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
            continue  # they are made again from its events
    return found, whole


def _marks_of(store: Store, dealt: Sequence[Dealt]) -> list[Marks]:
    return [Marks.of_table(read_part(store, one.marks)) for one in dealt]


def _others_in(store: Store, dealt: Sequence[Dealt]) -> pa.Table:
    return pa.concat_tables([EVENTS.empty_table(), *(read_part(store, one.others) for one in dealt)])
