"""What a stream that was killed has left in the lake, and what it was doing then."""

from pathlib import Path

import msgspec


class Leavings:
    """Of one life: made before it begins, asked after its end."""

    def __init__(self, lake: Path) -> None:
        self._tables = lake / "tables"
        self._before = self._seen()

    def are_new(self) -> bool:
        return self._seen() != self._before

    def phase(self) -> str:
        """What is begun and not ended. What an earlier life left does not count."""
        if not self.are_new():
            return "starting"
        named = {_read(path).build for path in self._tables.glob("_manifest/[0-9]*.json")}
        begun = [one for one in self._tables.glob("2*") if one.name not in named and one not in self._before]
        if not begun:
            return "waiting or cleaning up"
        [build] = begun
        if (build / "state.json").exists():
            return "publishing"
        for step in ("join", "fold", "deal"):
            if (build / f"scratch/{step}.json").exists():
                return step
        return "beginning" if (build / "scratch").exists() else "writing the state"

    def _seen(self) -> set[Path]:
        """Folders and files that come and go with each step."""
        return {path for one in ("*", "*/*", "*/*/*") for path in self._tables.glob(one)}


class _Told(msgspec.Struct):
    """Of a manifest as much as is asked for."""

    build: str = ""


def _read(path: Path) -> _Told:
    return msgspec.json.decode(path.read_bytes(), type=_Told)
