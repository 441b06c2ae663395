"""Housekeeping: writes past hours by bucket, joins hours to days, and drops days that are no longer needed.

Files of an hour that has passed are dealt out into `compacted/` by the bucket of their tasks
(`dealing.py`). When a day has passed its hours are joined; files of an older day go into one group at once.
How many buckets there are follows the events of the lake, by doubling; days that were written for far fewer
are written again. A manifest says which files replace which; from then on readers take the new ones,
and a group names its sources, so that a build knows which events it has already. Replaced files are
deleted later, when no reader can still use them. At every moment each event is in at least one file that
readers see.

Days are dropped whole.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from umbel.fold.names import marks_file, place_of
from umbel.history.lake import COMPACTED, EVENTS, Compacted, Lake, arrow, lock_of, parquet
from umbel.stores.interface import Store, raise_unavailable

SETTLES_S = 300.0
"""Seconds after its end at which an hour is closed: its last files are named a little late."""

GRACE_S = 3600.0
"""Seconds for which a reader may still use a replaced file."""

BUCKETS_MAX = 256
"""Files that are open while a group is written; a build divides buckets that are too large for it."""

REDEAL_AT = 4
"""A day is written again when the lake has this many times more buckets than the day."""

LOCK = "_housekeeping"


@dataclass(slots=True)
class Report:
    """What was done, in names of files."""

    written: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    dropped_days: list[str] = field(default_factory=list)
    set_aside: list[str] = field(default_factory=list)  # could not be read


@dataclass(frozen=True, slots=True)
class HousekeepingBacklog:
    """The backlog of housekeeping."""

    files: int
    """Files of past hours that are not written by bucket yet."""
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
    """Write past hours by bucket, join past days, and delete what was replaced a while ago. `stopped` is
    called now and then and ends the run; what is done by then stays done."""
    at = time.time() if now is None else now
    with lake.locked(LOCK, "housekeeping"):
        work = _Compaction(lake, at, grace_s, stopped)
        work.run()
    return work.report


def backlog_of(lake: Lake, *, now: float | None = None) -> HousekeepingBacklog:
    """Count what housekeeping has still to do."""
    at = time.time() if now is None else now
    compacted = lake.read_compacted()
    loose = [name for names in _loose(lake, compacted, at).values() for name in names]
    return HousekeepingBacklog(
        len(loose), len(_days_to_join(compacted, at, buckets=1)), len(compacted.replaces)
    )


class _Compaction:
    """One run, under the lock of housekeeping. Each hour and each day is published when it is done."""

    def __init__(self, lake: Lake, at: float, grace_s: float, stopped: Callable[[], bool]) -> None:
        self.report = Report()
        self._lake = lake
        self._store = lake.store
        self._at = at
        self._grace_s = grace_s
        self._stopped = stopped
        self._now = lake.read_compacted()

    def run(self) -> None:
        self._store.clear_drafts(COMPACTED, "co-")  # unfinished files of a run that died
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
        from umbel.fold.buckets import buckets_for

        events = sum(self._now.rows.values())
        for name in waiting:
            try:
                with self._store.open(name) as file:
                    events += parquet().read_metadata(file).num_rows
            except (OSError, arrow().ArrowException) as error:
                raise_unavailable(error)
                continue  # it is set aside when it is read
        return buckets_for(events, BUCKETS_MAX)

    def _deal(self, folder: str, names: Sequence[str], buckets: int) -> None:
        """Write the events of raw files of an hour or a day into buckets."""
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
        """Join the groups of a day. A group that is incomplete is divided into buckets like raw files."""
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
                    sources.append(f"{group}: a part")  # not a name that a build may have taken
                    for name in members:
                        for table in read_batches(self._store, name):
                            writer.add(table)
            if not join_groups(writer, self._store, sound, buckets, self._stopped):
                writer.forget()
                return
        except (OSError, arrow().ArrowException) as error:
            writer.forget()
            raise_unavailable(error)
            return  # a build checks its files, and moves the unreadable one to the quarantine
        except BaseException:
            writer.forget()
            raise
        listed = [read_sources(self._store, group) for group in groups]
        trees = {name: parts for sources_of in listed for name, parts in sources_of.items()}
        self._publish(writer.finish(sources, trees).rows, names)

    def _name(self) -> str:
        return f"co-{time.time_ns() // 1000}-{len(self.report.written):06}"

    def _publish(self, rows: dict[str, int], replaced: Sequence[str]) -> None:
        gone = set(replaced)
        times = self._now.replaced_at | dict.fromkeys(replaced, self._at)
        remaining = [name for name in self._now.files if name not in gone]
        known = {name: count for name, count in self._now.rows.items() if name not in gone}
        self._set(Compacted([*remaining, *rows], sorted(times), times, known | rows))
        self.report.written += rows
        self.report.replaced += replaced

    def _set(self, compacted: Compacted) -> None:
        self._store.confirm(lock_of(LOCK))
        self._lake.publish_compacted(compacted)
        self._now = compacted

    def _remove_replaced(self) -> None:
        """Delete files that were replaced more than the grace time ago."""
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
    """All events of a file, read before any is used: a damaged file goes to the quarantine as a whole."""
    return list(read(store, name))


def expire(lake: Lake, keep_days: float, *, now: float | None = None) -> Report:
    """Delete the days that are older than `keep_days`, and report what was deleted."""
    at = time.time() if now is None else now
    first_kept = (datetime.fromtimestamp(at, UTC) - timedelta(days=keep_days)).date().isoformat()
    report = Report()
    with lake.locked(LOCK, "housekeeping"):
        before, store = lake.read_compacted(), lake.store
        groups = [name for name in store.names(COMPACTED) if name.rpartition("/")[2].startswith("co-")]
        report.removed += _before((*lake.raw_files(), *before.files), first_kept)
        due = {*report.removed, *_before(groups, first_kept)}  # also marks, and files that no manifest names
        report.dropped_days += sorted(set(map(_day_of, due)))
        gone = set(report.removed)
        if gone.intersection(before.files):
            # Replaced files stay named until they are gone, or they would come back.
            files = [name for name in before.files if name not in gone]
            rows = {name: count for name, count in before.rows.items() if name not in gone}
            store.confirm(lock_of(LOCK))
            lake.publish_compacted(Compacted(files, before.replaces, before.replaced_at, rows))
        store.delete(due)
    return report


def _loose(lake: Lake, compacted: Compacted, now: float) -> dict[str, list[str]]:
    """Raw files of closed hours, and files that an earlier version joined without buckets, by target folder:
    that of their hour, or of their day once it is closed."""
    replaced, found = set(compacted.replaces), dict[str, list[str]]()
    names = [name for name in _of_closed_hours(lake, now) if name not in replaced]
    names += lake.existing([name for name in compacted.files if place_of(name) is None])
    closed = _closed_day(now)
    for name in names:
        folders = name.split("/")[1:-1]
        found.setdefault("/".join(folders[:1] if _day_of(name) < closed else folders), []).append(name)
    return dict(sorted(found.items()))


def _days_to_join(compacted: Compacted, now: float, buckets: int) -> dict[str, list[str]]:
    """By day, the files written by bucket of days that are closed and have several groups, or were written
    for far fewer buckets than the lake has now."""
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
    """The file of marks of a file's group; its own name where it has none."""
    place = place_of(name)
    return name if place is None else marks_file(place.group)


def _closed_day(now: float) -> str:
    """The first day that is not over."""
    return datetime.fromtimestamp(now - SETTLES_S, UTC).date().isoformat()


def _day_of(name: str) -> str:
    return name.split("/")[1].removeprefix("dt=")


def _of_closed_hours(lake: Lake, now: float) -> list[str]:
    closed = datetime.fromtimestamp(now - SETTLES_S, UTC)
    last = f"{EVENTS}/dt={closed:%Y-%m-%d}/hour={closed:%H}"
    names = [name for name in lake.raw_files() if name.rpartition("/")[0] < last]
    return [name for name in names if name.rpartition("/")[2].startswith("ev-")]


def _before(names: Iterable[str], first_kept: str) -> list[str]:
    return [name for name in names if "/dt=" in name and _day_of(name) < first_kept]
