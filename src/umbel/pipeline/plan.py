"""Plan: decide which jobs a build runs, and what it can reuse from the last build.

The plan is data that all processes of the build read. The state of a build records which files it contains,
so that the next build can extend it. This module does no IO.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from umbel.events.tables import LAKE_VERSION, TABLES_VERSION
from umbel.fold import Place, bucket_file, others_file, place_of
from umbel.fold.buckets import BUCKET_EVENTS, buckets_for

# ---- plan ------------------------------------------------------------------------------------------

BUCKETS_MAX = 4096
DEAL_EVENTS = 500_000
"""The approximate number of events of raw files that one job divides."""

CHUNK_SAMPLES = 100_000
"""The approximate number of samples for one file of metrics."""

JUDGE_SUSPECTS = 500_000
TIERS = ((0, BUCKET_EVENTS // 8, 8), (BUCKET_EVENTS // 8, BUCKET_EVENTS // 3, 3))
"""Tiers of segments: minimum of events, maximum of events, and how many segments are merged into one. A
merged segment has at most as many events as a bucket, so buckets of a first build are never merged.
"""

MERGED_EVENTS = 2
"""Limit of old events that are merged for each new event: one in each tier."""

RECENT_MAX = 64
"""Limit of segments that are not merged because they may get late events."""

HOT = 0
"""The target of hot events in a first build. Higher targets are for recent events, by age."""


class Group(msgspec.Struct, frozen=True):
    """Files that were written together. Their names begin with `name`."""

    name: str
    count: int
    buckets: list[int]
    has_others: bool


class Dealt(msgspec.Struct, frozen=True):
    """Events that one job has divided. The file contains batches of the `targets`, in this order. For raw
    files there are also a file of events without a task and a file of marks.
    """

    file: str
    targets: list[int]
    sizes: list[int]
    others: str = ""
    marks: str = ""


class Counted(msgspec.Struct, frozen=True):
    """A file and the number of its rows."""

    file: str
    rows: int


class Samples(msgspec.Struct, frozen=True):
    """A file of samples for metrics, sorted by minute, with its first and last minute."""

    file: str
    first: int
    last: int


class Segment(msgspec.Struct, frozen=True):
    """Tasks that are folded together. `index` is the file of their sorted keys; `judged` are the anomalies
    among `untold`.
    """

    events: list[Counted]
    index: str
    last_us: int
    """The time at which the last event was recorded, in microseconds."""
    tables: dict[str, list[Counted]] = {}
    samples: Samples | None = None
    open: Counted | None = None
    untold: Counted | None = None
    told: Counted | None = None
    judged: Counted | None = None

    @property
    def rows(self) -> int:
        """The number of events in the segment."""
        return sum(part.rows for part in self.events)


class Folded(msgspec.Struct, frozen=True):
    """The result of a fold job. `aside` contains events to fold with those of other jobs: hot events for the
    target HOT, recent events for higher targets. `minutes` contains the number of added samples in each
    minute; 0 for minutes that changed in other ways.
    """

    segments: list[Segment] = []
    hot: Segment | None = None
    aside: Dealt | None = None
    minutes: dict[int, int] = {}


class Fold(msgspec.Struct, frozen=True):
    """A job: fold the divided events of a target, together with the events of segments (`kept`) and of the
    bucket's files in the lake.

    `seals` decides whether settled tasks get separate segments. With `first`, old tasks do, and all others
    are put aside. With `enough`, they do if there are enough of them, and the others form the hot segment.
    `minutes` selects the minutes to report.
    """

    target: int
    kept: list[Counted] = []
    of_lake: bool = False
    seals: Literal["no", "first", "enough"] = "no"
    minutes: Literal["none", "all", "changed"] = "none"

    @property
    def kept_rows(self) -> int:
        """The number of events in `kept`."""
        return sum(part.rows for part in self.kept)


class Measure(msgspec.Struct, frozen=True, tag=True):
    """A job: compute the metrics of the minutes from `first` to `last`."""

    files: list[str]
    first: int
    last: int


class Judge(msgspec.Struct, frozen=True, tag=True):
    """A job: find anomalies among open tasks."""

    files: list[str]


class Miss(msgspec.Struct, frozen=True, tag=True):
    """A job: find anomalies among tasks without a task-sent event."""

    file: str


Join = Measure | Judge | Miss


class Chunk(msgspec.Struct, frozen=True):
    """A file of metrics: its minutes and its number of samples."""

    first: int
    last: int
    samples: int
    file: Counted | None = None


class Plan(msgspec.Struct, frozen=True):
    """The plan that the jobs of a step read.

    The names of files (`fold/__init__.py`) distinguish groups that are divided into buckets from raw files,
    which the build divides first. Each step consists of independent jobs. A job returns the names of the
    files that it has written, and only these files are published, so a job that runs twice does no harm.
    Tasks are stored in segments. A segment contains all events of its tasks, and the rows that are computed
    from them. A build that extends another build folds only the segments with new events and the hot
    segment. Paths of permanent files are relative to the folder `tables`, so that a lake can be moved.
    """

    lake: str
    """The address of the lake. Paths of its files are relative to it; paths of builds are relative to its
    folder `tables`.
    """
    folder: str
    """The folder of this build in the lake. Its subfolder `scratch` is removed at the end."""
    wanted: list[str]
    count: int = 1
    groups: list[Group] = []
    loose: list[list[str]] = []
    claims: list[str] | None = None
    """Indexes of segments. Events go to the segment that contains their task, else to the target after the
    last segment. None if events are divided by bucket.
    """
    dealt: list[Dealt] = []
    folds: list[Fold] = []
    joins: list[Join] = []
    horizon_us: int | None = None

    def sources(self, bucket: int) -> list[tuple[str, int]]:
        """Return the files of the lake with events of a bucket, each with the number of buckets of its
        group.
        """
        return [
            (bucket_file(group.name, bucket % group.count, group.count), group.count)
            for group in self.groups
            if group.count and bucket % group.count in group.buckets
        ]

    def others(self) -> list[str]:
        """Return the files of the lake with events without a task."""
        return [others_file(group.name) for group in self.groups if group.has_others]


def planned(plan: Plan, rows: Mapping[str, int], whole: Mapping[str, int]) -> Plan:
    """Plan a build from all events.

    `rows` contains the files of the lake and their numbers of events. `whole` contains, for each group, the
    number of events that its marks describe. If it differs from the files, the group is incomplete and is
    divided like raw files.
    """
    places = {name: place_of(name) for name in rows}
    found: dict[str, int] = {}
    for name, place in places.items():
        if place is not None:
            found[place.group] = found.get(place.group, 0) + rows[name]
    sound = {group for group, count in found.items() if whole.get(group) == count}
    groups = _job_groups([place for place in places.values() if place is not None and place.group in sound])
    loose = {name: rows[name] for name, place in places.items() if place is None or place.group not in sound}
    least = max((group.count for group in groups), default=1)
    count = max(least, buckets_for(sum(rows.values()), BUCKETS_MAX))
    folds = [Fold(bucket, of_lake=True, seals="first", minutes="all") for bucket in range(count)]
    return msgspec.structs.replace(
        plan, count=count, groups=groups, loose=shared(loose, DEAL_EVENTS), folds=folds
    )


def _job_groups(places: Sequence[Place]) -> list[Group]:
    """Return the groups of these files, sorted by name."""
    by_name: dict[str, list[Place]] = {}
    for place in places:
        by_name.setdefault(place.group, []).append(place)
    return [
        Group(
            name,
            max(place.count for place in members),
            sorted(place.bucket for place in members if place.bucket is not None),
            any(place.bucket is None for place in members),
        )
        for name, members in sorted(by_name.items())
    ]


def shared(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Divide files into lists of about `most` events each, one list for each job."""
    found: list[list[str]] = []
    total = most
    for name, size in sizes.items():
        if total + size > most and total:
            found.append([])
            total = 0
        found[-1].append(name)
        total += size
    return found


def merges(
    segments: Sequence[Segment], horizon_us: int, recent_us: int, events_max: int
) -> Iterator[list[Segment]]:
    """Yield lists of segments to merge, the oldest first, until they have about `events_max` events.
    Segments that may get late events are merged only if there are too many.
    """
    total = 0
    by_age = sorted(segments, key=lambda segment: segment.last_us)
    spared = [segment for segment in by_age if segment.last_us > horizon_us - recent_us][-RECENT_MAX:]
    excluded = {id(segment) for segment in spared}
    for low, high, count in TIERS:
        own = [segment for segment in by_age if low <= segment.rows < high and id(segment) not in excluded]
        for start in range(0, len(own) - count + 1, count):
            if total >= events_max:
                return
            together = own[start : start + count]
            total += sum(segment.rows for segment in together)
            yield together


def chunked(chunks: Sequence[Chunk], more: Mapping[int, int]) -> list[Chunk]:
    """Return the chunks of metrics after some minutes have changed. Chunks to recompute have no file."""
    found = list(chunks)
    for minute, samples in sorted(more.items()):
        if not found or (minute > found[-1].last and found[-1].samples >= CHUNK_SAMPLES):
            found.append(Chunk(minute, minute, samples))
            continue
        place = max(0, bisect_right(found, minute, key=lambda chunk: chunk.first) - 1)
        chunk = found[place]
        first, last = min(chunk.first, minute), max(chunk.last, minute)
        found[place] = Chunk(first, last, chunk.samples + samples)
    return found


def measures(chunks: Iterable[Chunk], samples: Sequence[Samples]) -> list[Measure]:
    """Return a job for each chunk without a file, in their order."""
    return [
        Measure(
            [part.file for part in samples if part.first <= chunk.last and part.last >= chunk.first], *span
        )
        for chunk in chunks
        if chunk.file is None
        for span in [(chunk.first, chunk.last)]
    ]


# ---- state -----------------------------------------------------------------------------------------

STATE_VERSION = 1
"""Increased when the meaning of the state or of a segment's tables changes."""

Tree = Mapping[str, Sequence[str]]
"""The sources of a group by name, and recursively their sources."""


class State(msgspec.Struct, frozen=True):
    """The state of a build. Paths are relative to the folder `tables`, those of files of the lake to its
    root.

    A build extends the state of the published build. The manifest names the file of the state, so it is
    complete or missing. Files of the lake are identified by name. An unknown file or group of files is new,
    unless it was made from known files (files of marks record the sources). If a known file was deleted, or
    another version wrote the state, the build reads all events.
    """

    wanted: list[str]
    files: dict[str, int]
    """Files of the lake that the build contains, and their numbers of events."""
    segments: list[Segment]
    hot: Segment | None
    others: list[Counted]
    marks: Counted
    since: Counted | None
    chunks: list[Chunk]
    version: tuple[int, int, int] = (STATE_VERSION, TABLES_VERSION, LAKE_VERSION)

    def fits(self, wanted: Sequence[str]) -> bool:
        """Return whether a build of these tables can extend this state."""
        return self.wanted == list(wanted) and self.version == (STATE_VERSION, TABLES_VERSION, LAKE_VERSION)

    def every(self) -> list[Segment]:
        """Return all segments, including the hot one."""
        return [*self.segments, *([self.hot] if self.hot is not None else [])]

    def names(self) -> set[str]:
        """Return the names of all files that the state needs."""
        found = {part.file for part in _counted(msgspec.structs.asdict(self))}
        for segment in self.every():
            found |= {segment.index, segment.samples.file if segment.samples else ""}
        return found - {""}


def _counted(value: Any) -> Iterator[Counted]:
    """Yield every `Counted` in a nested value."""
    match value:
        case Counted():
            yield value
        case msgspec.Struct():
            yield from _counted(msgspec.structs.asdict(value))
        case dict():
            yield from _counted(list(value.values()))
        case list():
            for item in value:
                yield from _counted(item)


def new_files(
    known: Mapping[str, int], now: Mapping[str, int], made_of: Callable[[str], Tree]
) -> list[str] | None:
    """Return the files with new events; None if events of the state were deleted from the lake.

    `known` and `now` are the files of the state and of the lake, with their numbers of events.
    """
    before, after = _units(known), _units(now)
    fresh = [unit for unit in after if unit not in before]
    if any(unit in before and after[unit] != before[unit] for unit in after):
        return None
    groups = _unit_groups(now)
    trees = {unit: made_of(unit) for unit in fresh if unit in groups}
    replaced = {name for tree in trees.values() for names in tree.values() for name in names}
    if not replaced.issuperset(before.keys() - after.keys()):
        return None
    new = {unit for unit in fresh if not _is_covered(unit, before, trees.get(unit, {}))}
    return [name for name in now if _unit(name) in new]


def _unit(name: str) -> str:
    """Return the group of a file, or the file itself."""
    place = place_of(name)
    return name if place is None else place.group


def _units(files: Mapping[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, rows in files.items():
        found[_unit(name)] = found.get(_unit(name), 0) + rows
    return found


def _unit_groups(files: Mapping[str, int]) -> set[str]:
    return {place.group for name in files if (place := place_of(name)) is not None}


def _is_covered(unit: str, known: Mapping[str, int], tree: Tree) -> bool:
    """Return whether a file or group is known, or all its sources are."""
    if unit in known:
        return True
    parts = tree.get(unit, ())
    return bool(parts) and all(_is_covered(part, known, tree) for part in parts)
