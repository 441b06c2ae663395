"""Housekeeping: rewrite past hours by bucket, join hours to days, and delete old days.

The events of a past hour are divided into buckets by task id and written to `compacted/` (`dealing.py`). The
hours of a past day are joined; files of an older day are written as one group at once. The number of buckets
doubles as the lake grows, and days that were written with far fewer buckets are rewritten.

A manifest names the new files and those that they replace; after its publication readers use the new files.
Each group records its sources, so that a build knows which events it has already read. Replaced files are
deleted after a grace period, when no reader uses them. At any time each event is in at least one file that
readers see.

Old events are deleted by whole days.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from umbel.fold import marks_file, place_of
from umbel.history.lake import COMPACTED, EVENTS, Compacted, Lake, arrow, lock_of, parquet
from umbel.stores.interface import Store, raise_unavailable

SETTLES_S = 300.0
"""Seconds after the end of an hour until it is closed: its last files may be published a little late."""

GRACE_S = 3600.0
"""Seconds until a replaced file is deleted, because readers may still use it."""

BUCKETS_MAX = 256
"""Limit of buckets, because one file for each is open while a group is written. A build divides a bucket
that is too large for its memory.
"""

REDEAL_AT = 4
"""A day is rewritten when the lake has this many times more buckets than the day."""

LOCK = "_housekeeping"


@dataclass(slots=True)
class Report:
    """The result of a run, as names of files."""

    written: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    dropped_days: list[str] = field(default_factory=list)
    set_aside: list[str] = field(default_factory=list)  # unreadable, moved to the quarantine


@dataclass(frozen=True, slots=True)
class HousekeepingBacklog:
    """The work that housekeeping has not done yet."""

    files: int
    """Files of past hours that are not divided into buckets yet."""
    days: int
    """Past days whose hours are not joined yet."""
    replaced: int
    """Replaced files that are not deleted yet."""


def compact(
    lake: Lake,
    *,
    now: float | None = None,
    grace_s: float = GRACE_S,
    stopped: Callable[[], bool] = lambda: False,
) -> Report:
    """Divide past hours into buckets, join past days, and delete files whose grace period is over.

    The run ends early when `stopped` returns True; hours and days that are finished by then remain
    published.
    """
    at = time.time() if now is None else now
    with lake.locked(LOCK, "housekeeping"):
        work = _Compaction(lake, at, grace_s, stopped)
        work.run()
    return work.report


def backlog_of(lake: Lake, *, now: float | None = None) -> HousekeepingBacklog:
    """Count the files and days that housekeeping has not processed yet."""
    at = time.time() if now is None else now
    compacted = lake.read_compacted()
    loose = [name for names in _loose(lake, compacted, at).values() for name in names]
    return HousekeepingBacklog(
        len(loose), len(_days_to_join(compacted, at, buckets=1)), len(compacted.replaces)
    )


class _Compaction:
    """One run of housekeeping, under its lock. Each hour and each day is published as soon as it is
    finished.
    """

    def __init__(self, lake: Lake, at: float, grace_s: float, stopped: Callable[[], bool]) -> None:
        self.report = Report()
        self._lake = lake
        self._store = lake.store
        self._at = at
        self._grace_s = grace_s
        self._stopped = stopped
        self._now = lake.read_compacted()

    def run(self) -> None:
        """Divide loose files, join days, then delete replaced files.

        The order matters: joining uses the groups that dividing has published. Each step publishes its
        result before the next begins, so a run that is stopped or killed loses at most the work on one hour
        or day.
        """
        self._store.clear_drafts(COMPACTED, "co-")  # unfinished files of a run that crashed
        loose = _loose(self._lake, self._now, self._at)
        if loose:
            buckets = self._buckets(name for names in loose.values() for name in names)
            for folder, names in loose.items():
                if self._stopped():
                    return
                self._deal(folder, names, buckets)
        for day, names in _days_to_join(self._now, self._at, self._buckets()).items():
            if self._stopped():
                return
            self._join(day, names, self._buckets())
        self._remove_replaced()

    def _buckets(self, waiting: Iterable[str] = ()) -> int:
        """Return the number of buckets for the events in the lake and in the waiting files."""
        from umbel.fold.buckets import buckets_for

        events = sum(self._now.rows.values())
        for name in waiting:
            try:
                with self._store.open(name) as file:
                    events += parquet().read_metadata(file).num_rows
            except (OSError, arrow().ArrowException) as error:
                raise_unavailable(error)
                continue  # it goes to the quarantine when it is read
        return buckets_for(events, BUCKETS_MAX)

    def _deal(self, folder: str, names: Sequence[str], buckets: int) -> None:
        """Divide the raw files of an hour or a day into buckets."""
        from umbel.history.dealing import GroupWriter, NewerFile, read_batches

        writer = GroupWriter(self._store, f"{COMPACTED}/{folder}/{self._name()}", buckets)
        taken: list[str] = []
        try:
            for name in names:
                if self._stopped():
                    writer.forget()
                    return
                try:
                    for table in _whole(self._store, name, read_batches):
                        writer.add(table)
                except NewerFile:
                    continue
                except FileNotFoundError:
                    raise
                except (OSError, arrow().ArrowException) as error:
                    raise_unavailable(error)
                    self.report.set_aside.append(self._lake.set_aside(name))
                    continue
                taken.append(name)
        except BaseException:
            writer.forget()
            raise
        if taken:
            self._publish(writer.finish(taken).rows, taken)

    def _join(self, day: str, names: Sequence[str], buckets: int) -> None:
        """Join the groups of a day. An incomplete group is divided into buckets again, like raw files."""
        from umbel.history.dealing import GroupWriter, join_groups, read_batches, read_marks, read_sources

        writer = GroupWriter(self._store, f"{COMPACTED}/dt={day}/{self._name()}", buckets)
        groups: dict[str, list[str]] = {}
        for name in self._lake.existing(list(names)):
            place = place_of(name)
            if place is not None:
                groups.setdefault(place.group, []).append(name)
        try:
            sound: list[str] = []
            sources: list[str] = []
            for group, members in groups.items():
                marks = read_marks(self._store, group)
                if marks is not None and marks[1] == sum(self._now.rows.get(name, 0) for name in members):
                    writer.add_marks(marks[0])
                    sound += members
                    sources.append(group)
                else:
                    # differs from the names that a build may have recorded
                    sources.append(f"{group}: a part")
                    for name in members:
                        for table in read_batches(self._store, name):
                            writer.add(table)
            if not join_groups(writer, self._store, sound, buckets, self._stopped):
                writer.forget()
                return
        except (OSError, arrow().ArrowException) as error:
            writer.forget()
            raise_unavailable(error)
            return  # the next build checks the files and moves an unreadable file to the quarantine
        except BaseException:
            writer.forget()
            raise
        listed = [read_sources(self._store, group) for group in groups]
        trees = {name: parts for sources_of in listed for name, parts in sources_of.items()}
        self._publish(writer.finish(sources, trees).rows, names)

    def _name(self) -> str:
        """Return a unique name for a group. Names sort by time."""
        return f"co-{time.time_ns() // 1000}-{len(self.report.written):06}"

    def _publish(self, rows: dict[str, int], replaced: Sequence[str]) -> None:
        """Replace files by new ones in the manifest. Readers see either all old or all new files."""
        gone = set(replaced)
        times = self._now.replaced_at | dict.fromkeys(replaced, self._at)
        remaining = [name for name in self._now.files if name not in gone]
        known = {name: count for name, count in self._now.rows.items() if name not in gone}
        self._set(Compacted([*remaining, *rows], sorted(times), times, known | rows))
        self.report.written += rows
        self.report.replaced += replaced

    def _set(self, compacted: Compacted) -> None:
        """Publish a manifest, if this process still holds the lock."""
        self._store.confirm(lock_of(LOCK))
        self._lake.publish_compacted(compacted)
        self._now = compacted

    def _remove_replaced(self) -> None:
        """Delete files that were replaced longer ago than the grace period."""
        removable = {
            name for name, since in self._now.replaced_at.items() if since <= self._at - self._grace_s
        }
        if removable:
            times = {name: at for name, at in self._now.replaced_at.items() if name not in removable}
            self._set(Compacted(self._now.files, sorted(times), times, self._now.rows))
        self.report.removed = sorted(removable)
        named = {_marks_of(name) for name in (*self._now.files, *self._now.replaces)}
        marks = {_marks_of(name) for name in removable} - removable - named
        self._store.delete((*self.report.removed, *marks))


def _whole(store: Store, name: str, read: Callable[[Store, str], Iterable[object]]) -> list[object]:
    """Read all events of a file before any is used, so that a damaged file goes to the quarantine as a
    whole.
    """
    return list(read(store, name))


def expire(lake: Lake, keep_days: float, *, now: float | None = None) -> Report:
    """Delete the days that are older than `keep_days`, and return what was deleted."""
    at = time.time() if now is None else now
    first_kept = (datetime.fromtimestamp(at, UTC) - timedelta(days=keep_days)).date().isoformat()
    report = Report()
    with lake.locked(LOCK, "housekeeping"):
        before, store = lake.read_compacted(), lake.store
        groups = [name for name in store.names(COMPACTED) if name.rpartition("/")[2].startswith("co-")]
        report.removed += _before((*lake.raw_files(), *before.files), first_kept)
        # includes files of marks, and files that no manifest names
        due = {*report.removed, *_before(groups, first_kept)}
        report.dropped_days += sorted(set(map(_day_of, due)))
        gone = set(report.removed)
        if gone.intersection(before.files):
            # The manifest names replaced files until they are deleted, or readers would use them again.
            files = [name for name in before.files if name not in gone]
            rows = {name: count for name, count in before.rows.items() if name not in gone}
            store.confirm(lock_of(LOCK))
            lake.publish_compacted(Compacted(files, before.replaces, before.replaced_at, rows))
        store.delete(due)
    return report


def _loose(lake: Lake, compacted: Compacted, now: float) -> dict[str, list[str]]:
    """Return files that are not in buckets, by target folder: raw files of closed hours, and files that
    earlier versions joined without buckets. The target is the folder of the hour, or of the day once the day
    is closed.
    """
    replaced, found = set(compacted.replaces), dict[str, list[str]]()
    names = [name for name in _of_closed_hours(lake, now) if name not in replaced]
    names += lake.existing([name for name in compacted.files if place_of(name) is None])
    closed = _closed_day(now)
    for name in names:
        folders = name.split("/")[1:-1]
        found.setdefault("/".join(folders[:1] if _day_of(name) < closed else folders), []).append(name)
    return dict(sorted(found.items()))


def _days_to_join(compacted: Compacted, now: float, buckets: int) -> dict[str, list[str]]:
    """Return the bucket files of the closed days that need joining, by day. A day needs joining if it has
    several groups, or far fewer buckets than the lake has now.
    """
    closed = _closed_day(now)
    found: dict[str, list[str]] = {}
    groups: dict[str, set[str]] = {}
    made_for: dict[str, int] = {}
    for name in compacted.files:
        place, day = place_of(name), _day_of(name)
        if place is not None and day < closed:
            found.setdefault(day, []).append(name)
            groups.setdefault(day, set()).add(place.group)
            if place.bucket is not None:
                made_for[day] = min(made_for.get(day, place.count), place.count)
    return {
        day: names
        for day, names in sorted(found.items())
        if len(groups[day]) > 1 or made_for.get(day, buckets) * REDEAL_AT <= buckets
    }


def _marks_of(name: str) -> str:
    """Return the file of marks of a file's group; the file's own name if it belongs to no group."""
    place = place_of(name)
    return name if place is None else marks_file(place.group)


def _closed_day(now: float) -> str:
    """Return the first day that is not closed."""
    return datetime.fromtimestamp(now - SETTLES_S, UTC).date().isoformat()


def _day_of(name: str) -> str:
    """Return the day of a file from its path."""
    return name.split("/")[1].removeprefix("dt=")


def _of_closed_hours(lake: Lake, now: float) -> list[str]:
    """Return raw files of hours that get no new files."""
    closed = datetime.fromtimestamp(now - SETTLES_S, UTC)
    last = f"{EVENTS}/dt={closed:%Y-%m-%d}/hour={closed:%H}"
    names = [name for name in lake.raw_files() if name.rpartition("/")[0] < last]
    return [name for name in names if name.rpartition("/")[2].startswith("ev-")]


def _before(names: Iterable[str], first_kept: str) -> list[str]:
    """Return the files of days before `first_kept`."""
    return [name for name in names if "/dt=" in name and _day_of(name) < first_kept]
