"""Partials: what a stream has made of each batch of files, on disk, and all of it together.

    stream/batches/batch=000000012/{states,others,marks}/*.parquet   of one batch
    stream/batches/batch=000000012/_done.json                        that it is whole, and from which files
    stream/base-000000012/{states,others,marks}/                     all batches up to this one, joined
    stream/base-compacted/{states,others,marks}/                     what was compacted before the stream
    stream/_base.json                                                which base counts
    stream/_passed.json                                              the raw files that were taken
    stream/_version.json                                             which states these are

A batch that is run again overwrites its own folder, and what came twice all the same is absorbed by
the join: so nothing is lost or doubled wherever a stream is killed. Batches are put together into a
base now and then, because every publication reads all of them. A stream watches raw files alone, so
it begins with a base of the files that stand for raw ones which are gone. When days were dropped from
the lake the base is made again from the days that are kept, or it would grow for ever: reading
them once a day is the price of tables that are those of a batch build.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
from pyspark.sql import DataFrame, SparkSession

from umbel.pipeline import io
from umbel.pipeline.faults import BuildFailed
from umbel.pipeline.files import rows_in
from umbel.pipeline.jobs.joining import Parts, parts_of
from umbel.pipeline.schemas import EVENTS, MARKS, STATES, STATES_VERSION
from umbel.pipeline.transforms.marks import merged_marks
from umbel.pipeline.transforms.states import merged

BATCHES_MAX = 32
"""Beyond this many they are merged."""

_SCHEMAS = {"states": STATES, "others": EVENTS, "marks": MARKS}


class Taken(msgspec.Struct, frozen=True):
    """Files of the lake, named from its root, that one batch or the base was made from."""

    files: list[str] = []
    missing: list[str] = []
    events: int = 0
    upto: int = -1
    folder: str = ""
    """Of a base: where it is, if not where its number says."""


class Version(msgspec.Struct, frozen=True):
    states: int


class Partials:
    """The folder `stream` of one lake. Only for who holds the lake's lock."""

    NEW = (-1, "")
    """The version of one that has taken nothing."""

    def __init__(self, lake: Path) -> None:
        self._lake = lake
        self.folder = lake / "stream"
        self.checkpoint = self.folder / "checkpoint"
        self._batches = self.folder / "batches"

    def open(self) -> None:
        """Make the folder, or see that it is one that can be gone on with."""
        told = self.folder / "_version.json"
        if not told.exists():
            io.write_json(told, {"states": STATES_VERSION})
        version = io.read_json(told, Version).states
        if version != STATES_VERSION:
            raise BuildFailed(
                f"{self.folder} contains partial states of version {version}, but this Umbel needs"
                f" {STATES_VERSION}; move {self.folder} away, and the stream is rebuilt from the events"
            )
        if not any((self.checkpoint / "offsets").glob("[0-9]*")):
            if self.taken().upto >= 0:  # the first new batches would pass for those that it has
                raise BuildFailed(
                    f"{self.folder} contains partial states, but its checkpoint {self.checkpoint.name} is"
                    " missing; move {self.folder} away, and the stream is rebuilt from the events"
                )
            # The process that made it ended before its first batch was planned. Spark refuses to begin where
            # such a file was half written, and there is nothing in it to go on with.
            shutil.rmtree(self.checkpoint, ignore_errors=True)

    def begin(self, spark: SparkSession, files: Sequence[Path]) -> None:
        """With what was compacted, if nothing was taken yet. `files`: all of the lake's.

        Raw files that are still there beside the one that stands for them are taken as well: the join
        absorbs them, and only the count of events has them twice.
        """
        compacted = [path for path in files if self._lake / "events" not in path.parents]
        if compacted and self.version() == Partials.NEW:
            self._rebase(spark, compacted, names=[self._name_of(path) for path in compacted])

    def forget_dropped_days(self, spark: SparkSession, files: Sequence[Path]) -> None:
        """Keep what the lake keeps, if days that were taken are gone from it. `files`: all of the lake's,
        listed after the last batch."""
        taken = self.taken().files
        if not files or not any(map(self._is_dropped, {_day_of(name) for name in taken})):
            return
        named = {self._name_of(path): path for path in files}
        compacted = [name for name in named if not name.startswith("events/")]
        kept = [named[name] for name in sorted({*compacted, *named.keys() & set(taken)})]
        # Replaced files that are still there were taken too, or the lake would keep them.
        names = {*compacted, *(name for name in taken if (self._lake / name).exists())}
        self._rebase(spark, kept, names=sorted(names))

    def _is_dropped(self, day: str) -> bool:
        return not any((self._lake / top / day).exists() for top in ("events", "compacted"))

    def version(self) -> tuple[int, str]:
        """Differs where something was taken or given up since."""
        return self.taken().upto, self._base_folder()

    def put(self, frame: DataFrame, batch_id: int) -> None:
        """Write the states of one batch. Run again with the same number it writes the same."""
        if batch_id <= self._base().upto:
            return  # it is in the base: a stream that died before it said so begins with it again
        folder = self._batches / f"batch={batch_id:09d}"
        done = folder / "_done.json"
        done.unlink(missing_ok=True)
        parts = parts_of(frame)
        for name, part in (("states", parts.states), ("others", parts.others), ("marks", parts.marks)):
            io.write(part.select(*_SCHEMAS[name].names), folder / name)
        paths = io.files_of_batch(self.checkpoint, batch_id)
        there = [path for path in paths if path.exists()]
        taken = Taken(
            files=[self._name_of(path) for path in there],
            missing=[self._name_of(path) for path in paths if not path.exists()],
            events=rows_in(there),
            upto=batch_id,
        )
        io.write_file(done, msgspec.json.encode(taken))

    def taken(self) -> Taken:
        """All that the stream has, batches and base."""
        every = [self._base(), *(io.read_json(one / "_done.json", Taken) for one in self._whole_batches())]
        return Taken(
            files=sorted({name for one in every for name in one.files}),
            missing=sorted({name for one in every for name in one.missing}),
            events=sum(one.events for one in every),
            upto=max(one.upto for one in every),
        )

    def tell_passed(self) -> None:
        """Write down which files are no longer needed, for the housekeeping of the lake."""
        io.write_json(self.folder / "_passed.json", {"files": self.taken().files})

    def all(self, spark: SparkSession, event_files: Sequence[Path]) -> Parts:
        base = self._base_folder()
        folders = [*([self.folder / base] if base else []), *self._whole_batches()]

        def read(name: str) -> DataFrame:
            return io.read_parts(spark, _SCHEMAS[name], [folder / name for folder in folders])

        return Parts(
            states=merged(read("states")),
            others=read("others"),
            marks=merged_marks(read("marks")),
            events=io.read_events(spark, event_files),
        )

    def fold(self, spark: SparkSession) -> None:
        """Put the batches together, if they are many."""
        if len(self._whole_batches()) <= BATCHES_MAX:
            return
        taken = self.taken()
        parts = self.all(spark, [])
        self._write_base(parts, taken)

    def _rebase(self, spark: SparkSession, files: Sequence[Path], *, names: Sequence[str]) -> None:
        """Make the base of these files, in place of all that was taken; `names`: what counts as taken."""
        upto = self.taken().upto
        plain = f"base-{upto:09d}" if upto >= 0 else "base-compacted"
        folder = plain if self._base_folder() != plain else f"{plain}-again"
        events = io.read_events(spark, files)
        taken = Taken(files=sorted(names), events=rows_in(files), upto=upto, folder=folder)
        self._write_base(parts_of(events), taken)

    def _write_base(self, parts: Parts, taken: Taken) -> None:
        """Where no reader looks before `_base.json` says so."""
        folder = self.folder / _folder_of(taken)
        distinct = parts.others.dropDuplicates(["hostname", "type", "digest"])
        for name, part in (("states", parts.states), ("others", distinct), ("marks", parts.marks)):
            io.write(part.select(*_SCHEMAS[name].names), folder / name)
        io.write_file(self.folder / "_base.json", msgspec.json.encode(taken))
        self.tidy()

    def tidy(self) -> None:
        """Remove what the base has replaced; also what a process that died has left."""
        upto, base = self._base().upto, self._base_folder()
        for folder in self._batches.glob("batch=*"):
            if _number(folder) <= upto:
                shutil.rmtree(folder)
        for folder in self.folder.glob("base-*"):
            if folder.name != base:
                shutil.rmtree(folder)

    def _base(self) -> Taken:
        told = self.folder / "_base.json"
        return io.read_json(told, Taken) if told.exists() else Taken()

    def _base_folder(self) -> str:
        return _folder_of(self._base())

    def _whole_batches(self) -> list[Path]:
        upto = self._base().upto
        found = sorted(self._batches.glob("batch=*"))
        return [folder for folder in found if _number(folder) > upto and (folder / "_done.json").exists()]

    def _name_of(self, path: Path) -> str:
        return path.relative_to(self._lake).as_posix()


def _folder_of(base: Taken) -> str:
    """Empty where there is none yet."""
    return base.folder or (f"base-{base.upto:09d}" if base.upto >= 0 else "")


def _day_of(name: str) -> str:
    """The folder of its day, from how a file is named in the lake."""
    return name.split("/")[1]


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("batch="))
