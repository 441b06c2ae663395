"""Housekeeping: merges small files, and drops days that are no longer needed.

Files of an hour that has passed are written together into `compacted/`, beside the folder that the
stream watches, which would read them all again. A manifest says which stand for which; from that moment
readers take the new ones. What was replaced is deleted later, when no reader can still be at it and
the stream has taken it. At every moment each event is in at least one file that readers see.

Days are dropped whole. A day with files that the stream has not taken stays.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from umbel.events.columns import REQUIRED
from umbel.history.arrow import arrow, event_schema, parquet
from umbel.history.lake import SUFFIX, Compacted, Lake, create, hidden, publish, sync_file

TARGET_BYTES = 128 * 1024 * 1024
GROUP_ROWS = 250_000
SETTLES_S = 300.0
"""An hour is closed so long after its end: files are renamed into it a little late."""

GRACE_S = 3600.0
"""A reader may use a replaced file for so long."""

LOCK = "_housekeeping"


@dataclass(slots=True)
class Report:
    """What was done, in names of files."""

    written: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    dropped_days: list[str] = field(default_factory=list)
    kept_days: list[str] = field(default_factory=list)  # due, but the stream has not taken them
    set_aside: list[str] = field(default_factory=list)  # could not be read


def compact(lake: Lake, *, now: float | None = None, grace_s: float = GRACE_S) -> Report:
    """Put the small files of past hours together, and delete what was replaced a while ago."""
    at = time.time() if now is None else now
    report = Report()
    with lake.locked(LOCK, "housekeeping"):
        before = lake.read_compacted()
        replaced = set(before.replaces)
        for folder in _closed_hours(lake, at):
            waiting = [
                path for path in sorted(folder.glob(f"ev-*{SUFFIX}")) if lake.name_of(path) not in replaced
            ]
            for group in _groups(waiting):
                _put_together(lake, group, report)
        removable = _removable(lake, before, at, grace_s)
        times = {name: since for name, since in before.replaced_at.items() if name not in removable}
        times |= dict.fromkeys(report.replaced, at)
        if report.written or removable:
            files = [*before.files, *report.written]
            lake.publish_compacted(Compacted(files, sorted(times), times))
        report.removed = sorted(removable)
        lake.remove(lake.root / name for name in report.removed)
    return report


def expire(lake: Lake, keep_days: float, *, now: float | None = None) -> Report:
    """Drop the days that are older; those of which the stream lacks a file stay."""
    at = time.time() if now is None else now
    first_kept = (datetime.fromtimestamp(at, UTC) - timedelta(days=keep_days)).date().isoformat()
    report = Report()
    with lake.locked(LOCK, "housekeeping"):
        before, passed = lake.read_compacted(), lake.passed()
        due = {day for top in (lake.events, lake.compacted) for day in _days(top) if day < first_kept}
        for day in sorted(due):
            raw = [lake.name_of(path) for path in lake.raw_files() if f"/dt={day}/" in path.as_posix()]
            if passed is not None and not passed.issuperset(raw):
                report.kept_days.append(day)
                continue
            report.dropped_days.append(day)
            report.removed += raw
            report.removed += [name for name in before.files if f"/dt={day}/" in name]
        gone = set(report.removed)
        if gone.intersection(before.files):
            # Replaced files stay named until they are gone, or they would come back.
            files = [name for name in before.files if name not in gone]
            lake.publish_compacted(Compacted(files, before.replaces, before.replaced_at))
        lake.remove(lake.root / name for name in report.removed)
        for day in report.dropped_days:
            _remove_empty(lake.events / f"dt={day}")
            _remove_empty(lake.compacted / f"dt={day}")
    return report


def _closed_hours(lake: Lake, now: float) -> list[Path]:
    closed = datetime.fromtimestamp(now - SETTLES_S, UTC)
    last = f"dt={closed:%Y-%m-%d}/hour={closed:%H}"
    return [
        folder for folder in sorted(lake.events.glob("dt=*/hour=*")) if "/".join(folder.parts[-2:]) < last
    ]


def _groups(paths: Iterable[Path]) -> Iterator[list[Path]]:
    """Neighbours that together make about one large file; one alone is left as it is."""
    group: list[Path] = []
    size = 0
    for path in paths:
        own = path.stat().st_size
        if group and size + own > TARGET_BYTES:
            if len(group) > 1:
                yield group
            group, size = [], 0
        group.append(path)
        size += own
    if len(group) > 1:
        yield group


def _put_together(lake: Lake, group: Sequence[Path], report: Report) -> None:
    hour, day = group[0].parent.name, group[0].parent.parent.name
    folder = lake.compacted / day / hour
    lake.make_folder(folder)
    path = folder / f"co-{time.time_ns() // 1000}-{len(report.written):06}{SUFFIX}"
    taken: list[Path] = []
    rows = 0
    with (
        create(hidden(path)).open("wb") as file,
        parquet().ParquetWriter(file, event_schema(), compression="zstd", compression_level=3) as writer,
    ):
        for source in group:
            try:
                table = _read(source)
            except (OSError, arrow().ArrowException) as error:
                if isinstance(error, FileNotFoundError):
                    raise
                report.set_aside.append(lake.name_of(lake.set_aside(source)))
                continue
            if table is None:
                continue
            writer.write_table(table, row_group_size=GROUP_ROWS)
            taken.append(source)
            rows += table.num_rows
    written = parquet().read_metadata(hidden(path)).num_rows
    assert written == rows, "a compacted file has every row of those that it replaces"
    if not taken:
        hidden(path).unlink()
        return
    sync_file(hidden(path))
    publish(hidden(path), path)
    report.written.append(lake.name_of(path))
    report.replaced += [lake.name_of(source) for source in taken]


def _read(path: Path) -> Any:
    """The file in today's columns; None for one of a newer version, which is left as it is."""
    found = parquet().ParquetFile(path).read()
    if not set(found.column_names) <= set(event_schema().names):
        return None
    library = arrow()
    if not set(REQUIRED) <= set(found.column_names):
        raise library.ArrowInvalid(f"{path} is not a file of events")
    columns = [
        found[one.name].cast(one.type)
        if one.name in found.column_names
        else library.nulls(found.num_rows, one.type)
        for one in event_schema()
    ]
    return library.Table.from_arrays(columns, schema=event_schema())


def _removable(lake: Lake, before: Compacted, now: float, grace_s: float) -> set[str]:
    passed = lake.passed()
    return {
        name
        for name in before.replaces
        if before.replaced_at.get(name, 0.0) <= now - grace_s and (passed is None or name in passed)
    }


def _days(top: Path) -> list[str]:
    return [folder.name.removeprefix("dt=") for folder in top.glob("dt=*")]


def _remove_empty(folder: Path) -> None:
    if folder.is_dir():
        for below in [*folder.iterdir(), folder]:
            if below.is_dir() and not any(below.iterdir()):
                below.rmdir()
