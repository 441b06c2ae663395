"""Plan: what a build has to do, as data that every process of it reads. Pure.

A build knows its files by their names (`fold/names.py`): groups that are written by bucket, and loose
files, which are dealt out first. Every step is a number of jobs that know nothing of one another. A job
tells what it has written, and only what was told is published: a job that ran twice adds nothing.
"""

from collections.abc import Mapping, Sequence

import msgspec

from umbel.fold.buckets import buckets_for
from umbel.fold.names import Place, bucket_file, others_file, place_of

BUCKETS_MAX = 4096
DEAL_EVENTS = 500_000
"""About as many events of loose files are dealt out by one job."""

MEASURE_SAMPLES = 500_000
JUDGE_SUSPECTS = 500_000


class Group(msgspec.Struct, frozen=True):
    """Files that were written together; `name` is what their names begin with."""

    name: str
    count: int
    buckets: list[int]
    has_others: bool


class Dealt(msgspec.Struct, frozen=True):
    """What one job has made of loose files: one stretch of the file a bucket, in this order, and apart from
    them what has no task, and the marks."""

    file: str
    buckets: list[int]
    sizes: list[int]
    others: str
    marks: str


class Samples(msgspec.Struct, frozen=True):
    """A file of samples for metrics, sorted by minute, and how many it has of each minute."""

    file: str
    minutes: list[int]
    counts: list[int]


class Counted(msgspec.Struct, frozen=True):
    file: str
    rows: int


class Folded(msgspec.Struct, frozen=True):
    """What a job has written: files of tables with their rows, and what is joined afterwards."""

    tables: dict[str, list[Counted]] = {}
    samples: list[Samples] = []
    suspects: list[Counted] = []
    told: list[str] = []


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Metrics of the minutes from `first` to `last`."""

    files: list[str]
    first: int
    last: int


class Judge(msgspec.Struct, frozen=True, tag=True):
    """Anomalies among these suspects."""

    files: list[str]


class Plan(msgspec.Struct, frozen=True):
    folder: str
    """Where this build's tables are made; `scratch` in it is removed in the end."""
    wanted: list[str]
    count: int
    groups: list[Group] = []
    loose: list[list[str]] = []
    dealt: list[Dealt] = []
    joins: list[Measure | Judge] = []
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


def planned(
    folder: str,
    wanted: Sequence[str],
    rows: Mapping[str, int],
    whole: Mapping[str, int],
) -> Plan:
    """`rows`: the lake's files and how many events each has. `whole`: for groups whose marks are there, how
    many events these are of; a group that lacks a file is dealt out like loose files."""
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
    return Plan(folder, list(wanted), count, groups, shared(loose, DEAL_EVENTS))


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


def joins_of(folded: Sequence[Folded], wanted: Sequence[str]) -> list[Measure | Judge]:
    """What is to be made of all buckets together."""
    joins: list[Measure | Judge] = []
    if "metrics" in wanted:
        joins += _measures([one for part in folded for one in part.samples])
    if "anomalies" in wanted:
        suspects = {one.file: one.rows for part in folded for one in part.suspects}
        joins += [Judge(files) for files in shared(suspects, JUDGE_SUSPECTS)]
    return joins


def _measures(samples: Sequence[Samples]) -> list[Measure]:
    """Whole minutes, as many as make one job."""
    sizes: dict[int, int] = {}
    for one in samples:
        for minute, count in zip(one.minutes, one.counts, strict=True):
            sizes[minute] = sizes.get(minute, 0) + count
    found: list[Measure] = []
    first, total = None, 0
    minutes = sorted(sizes)
    for place, minute in enumerate(minutes):
        first, total = minute if first is None else first, total + sizes[minute]
        is_last = place + 1 == len(minutes)
        if is_last or total + sizes[minutes[place + 1]] > MEASURE_SAMPLES:
            files = [one.file for one in samples if one.minutes[0] <= minute and one.minutes[-1] >= first]
            found.append(Measure(files, first, minute))
            first, total = None, 0
    return found
