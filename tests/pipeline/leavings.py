"""What a stream that was killed has left in the lake, and what it was doing then."""

from pathlib import Path

import msgspec

from umbel.pipeline.io import BUILDS_KEPT

PARTS = ("states", "others", "marks")


class Leavings:
    """Of one life: made before it begins, asked after its end."""

    def __init__(self, lake: Path) -> None:
        self._lake = lake
        self._before = self._seen()

    def are_new(self) -> bool:
        return self._seen() != self._before

    def phase(self) -> str:
        """What is begun and not ended, the last step first. What an earlier life left does not count."""
        if not self.are_new():
            return "starting"
        return self._publication() or self._fold() or self._batch() or "waiting"

    def _publication(self) -> str | None:
        tables = self._lake / "tables"
        told = {_read(path).build for path in tables.glob("_manifest/[0-9]*.json")}
        for build in tables.glob("2*"):
            if build.name not in told and build not in self._before:
                done = len(list(build.glob("*/_SUCCESS")))
                return f"publication: {done} tables written"
        is_named = any(path not in self._before for path in tables.glob("_manifest/[0-9]*.json"))
        if is_named and (len(list(tables.glob("2*"))) > len(told) or len(told) > BUILDS_KEPT):
            return "publication: named, old builds not yet removed"
        return None

    def _fold(self) -> str | None:
        stream = self._lake / "stream"
        told = stream / "_base.json"
        upto = _read(told).upto if told.exists() else -1
        for base in stream.glob("base-*"):
            if int(base.name.removeprefix("base-")) > upto:
                return f"fold: {self._parts(base)} parts written"
        if any(_number(batch) <= upto for batch in stream.glob("batches/batch=*")):
            return "fold: named, batches not yet removed"
        return None

    def _batch(self) -> str | None:
        stream = self._lake / "stream"
        planned = max((int(path.name) for path in stream.glob("checkpoint/offsets/[0-9]*")), default=-1)
        if planned < 0 or (stream / f"checkpoint/commits/{planned}").exists():
            return None
        folder = stream / f"batches/batch={planned:09d}"
        if (folder / "_done.json").exists():
            return "batch: told, not committed"
        return f"batch: {self._parts(folder)} parts written" if folder.exists() else "batch: planned"

    def _parts(self, folder: Path) -> int:
        return sum((folder / part / "_SUCCESS").exists() for part in PARTS)

    def _seen(self) -> set[Path]:
        """Folders and files that come and go with each step; Spark's own names differ each time."""
        patterns = ("stream/*", "stream/checkpoint/*/*", "stream/*/*", "stream/*/*/*", "stream/*/*/*/*")
        return {path for one in (*patterns, "tables/*", "tables/*/*") for path in self._lake.glob(one)}


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("batch="))


class _Told(msgspec.Struct):
    """Of a manifest or a base as much as is asked for."""

    build: str = ""
    upto: int = -1


def _read(path: Path) -> _Told:
    return msgspec.json.decode(path.read_bytes(), type=_Told)
