"""Plan: what a build has to do, as data that every process of it reads. Pure.

A build knows its files by their names (`fold/names.py`): groups that are written by bucket, and loose
files, which are dealt out first. Every step is a number of jobs that know nothing of one another. A job
tells what it has written, and only what was told is published: a job that ran twice adds nothing.

Tasks are kept in segments. A segment has all events of its tasks, and what was made of them; a build that
extends another folds those segments again that got events, and the hot one. Files that last are named from
the folder `tables`, so that a lake can be moved.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from umbel.fold.buckets import BUCKET_EVENTS, buckets_for
from umbel.fold.names import Place, bucket_file, others_file, place_of

BUCKETS_MAX = 4096
DEAL_EVENTS = 500_000
"""About as many events of loose files are dealt out by one job."""

CHUNK_SAMPLES = 100_000
"""So many samples make a file of metrics."""

JUDGE_SUSPECTS = 500_000
TIERS = ((0, BUCKET_EVENTS // 8, 8), (BUCKET_EVENTS // 8, BUCKET_EVENTS // 3, 3))
"""Segments with so many events, from and below, are put together when there are so many of them. What
comes of it has no more events than a bucket: the buckets of a first build stay as they are."""

MERGED_EVENTS = 2
"""For each event that is new, so many that are old are put together: one in each of the tiers."""

RECENT_MAX = 64
"""More segments that may get late events are put together like older ones."""

HOT = 0
"""The target of what jobs of a first build put aside because it is hot; behind it, what is recent, by age."""


class Group(msgspec.Struct, frozen=True):
    """Files that were written together; `name` is what their names begin with."""

    name: str
    count: int
    buckets: list[int]
    has_others: bool


class Dealt(msgspec.Struct, frozen=True):
    """Events that one job has dealt out: one stretch of the file a target, in this order. Of loose files,
    apart from them, what has no task, and the marks."""

    file: str
    targets: list[int]
    sizes: list[int]
    others: str = ""
    marks: str = ""


class Counted(msgspec.Struct, frozen=True):
    file: str
    rows: int


class Samples(msgspec.Struct, frozen=True):
    """A file of samples for metrics, sorted by minute, and the minutes that it begins and ends with."""

    file: str
    first: int
    last: int


class Segment(msgspec.Struct, frozen=True):
    """Tasks that are folded together. `index`: their keys, sorted. `judged`: what became of `untold`."""

    events: list[Counted]
    index: str
    last_us: int
    """When the last of its events was recorded."""
    tables: dict[str, list[Counted]] = {}
    samples: Samples | None = None
    open: Counted | None = None
    untold: Counted | None = None
    told: Counted | None = None
    judged: Counted | None = None

    @property
    def rows(self) -> int:
        return sum(one.rows for one in self.events)


class Folded(msgspec.Struct, frozen=True):
    """What a job has made. `aside`: events that are folded with those of other jobs: hot ones, for the target
    HOT, and recent ones, for those behind it.
    `minutes`: how many samples more each minute has; minutes that changed otherwise have 0 more."""

    segments: list[Segment] = []
    hot: Segment | None = None
    aside: Dealt | None = None
    minutes: dict[int, int] = {}


class Fold(msgspec.Struct, frozen=True):
    """Fold what was dealt out to a target, with events that are kept, and with that bucket of the lake.

    `seals`: tasks that have settled go into segments of their own; `first`: the old ones, and all others are
    put aside, else when there are enough, and the rest is the hot segment. `minutes`: those to tell."""

    target: int
    kept: list[Counted] = []
    of_lake: bool = False
    seals: Literal["no", "first", "enough"] = "no"
    minutes: Literal["none", "all", "changed"] = "none"

    @property
    def kept_rows(self) -> int:
        return sum(one.rows for one in self.kept)


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Metrics of the minutes from `first` to `last`."""

    files: list[str]
    first: int
    last: int


class Judge(msgspec.Struct, frozen=True, tag=True):
    """Anomalies among these tasks, which are open."""

    files: list[str]


class Miss(msgspec.Struct, frozen=True, tag=True):
    """Anomalies among these tasks, which have no sending."""

    file: str


Join = Measure | Judge | Miss


class Chunk(msgspec.Struct, frozen=True):
    """A file of metrics: of these minutes, from so many samples."""

    first: int
    last: int
    samples: int
    file: Counted | None = None


class Plan(msgspec.Struct, frozen=True):
    lake: str
    """Where it is. Files of the lake are named from there; those that are kept, from its folder `tables`."""
    folder: str
    """Where in the lake this build's tables are made; `scratch` in it is removed in the end."""
    wanted: list[str]
    count: int = 1
    groups: list[Group] = []
    loose: list[list[str]] = []
    claims: list[str] | None = None
    """Indexes of segments: what is dealt out goes to those, else to the target behind the last. None: by
    bucket."""
    dealt: list[Dealt] = []
    folds: list[Fold] = []
    joins: list[Join] = []
    horizon_us: int | None = None

    def sources(self, bucket: int) -> list[tuple[str, int]]:
        """Files of the lake with events of a bucket, each with the number of buckets that it was made for."""
        return [
            (bucket_file(group.name, bucket % group.count, group.count), group.count)
            for group in self.groups
            if group.count and bucket % group.count in group.buckets
        ]

    def others(self) -> list[str]:
        return [others_file(group.name) for group in self.groups if group.has_others]


def planned(plan: Plan, rows: Mapping[str, int], whole: Mapping[str, int]) -> Plan:
    """A build of all. `rows`: the lake's files and how many events each has. `whole`: for groups whose marks
    are there, how many events these are of; a group that lacks a file is dealt out like loose files."""
    places = {name: place_of(name) for name in rows}
    found: dict[str, int] = {}
    for name, place in places.items():
        if place is not None:
            found[place.group] = found.get(place.group, 0) + rows[name]
    sound = {group for group, count in found.items() if whole.get(group) == count}
    groups = _groups([place for place in places.values() if place is not None and place.group in sound])
    loose = {name: rows[name] for name, place in places.items() if place is None or place.group not in sound}
    least = max((group.count for group in groups), default=1)
    count = max(least, buckets_for(sum(rows.values()), BUCKETS_MAX))
    folds = [Fold(bucket, of_lake=True, seals="first", minutes="all") for bucket in range(count)]
    return msgspec.structs.replace(
        plan, count=count, groups=groups, loose=shared(loose, DEAL_EVENTS), folds=folds
    )


def _groups(places: Sequence[Place]) -> list[Group]:
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
    """Files put together, neighbours with neighbours, until there is about enough for one job."""
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
    """Segments that are to be put together, the oldest first, until they have about so many events; those
    that may get late events only if there are too many."""
    total = 0
    by_age = sorted(segments, key=lambda one: one.last_us)
    spared = [one for one in by_age if one.last_us > horizon_us - recent_us][-RECENT_MAX:]
    kept = {id(one) for one in spared}
    for low, high, count in TIERS:
        own = [one for one in by_age if low <= one.rows < high and id(one) not in kept]
        for start in range(0, len(own) - count + 1, count):
            if total >= events_max:
                return
            together = own[start : start + count]
            total += sum(one.rows for one in together)
            yield together


def chunked(chunks: Sequence[Chunk], more: Mapping[int, int]) -> list[Chunk]:
    """The files of metrics after some minutes have changed. Those that are to be made again have no file."""
    found = list(chunks)
    for minute, samples in sorted(more.items()):
        if not found or (minute > found[-1].last and found[-1].samples >= CHUNK_SAMPLES):
            found.append(Chunk(minute, minute, samples))
            continue
        place = max(0, bisect_right(found, minute, key=lambda one: one.first) - 1)
        one = found[place]
        first, last = min(one.first, minute), max(one.last, minute)
        found[place] = Chunk(first, last, one.samples + samples)
    return found


def measures(chunks: Iterable[Chunk], samples: Sequence[Samples]) -> list[Measure]:
    """How those that have no file are made, in turn."""
    return [
        Measure([one.file for one in samples if one.first <= chunk.last and one.last >= chunk.first], *span)
        for chunk in chunks
        if chunk.file is None
        for span in [(chunk.first, chunk.last)]
    ]
