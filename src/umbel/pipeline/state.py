"""State: what a build has taken and kept, so that the next can extend it; and what is new since then.

The state of the build that is published counts, and no other: it is named by the manifest, and so is there
whole or not at all. The lake says in names of files what it has. A file or a group of files that is not
known is new, unless it was made of files that are (`fold/marks.py` tells of what). Where something that was
taken is gone, or another version made the state, all is built from the events.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from umbel.events.columns import LAKE_VERSION
from umbel.events.tables import TABLES_VERSION
from umbel.fold.names import place_of
from umbel.pipeline.plan import Chunk, Counted, Segment

STATE_VERSION = 1
"""Goes up when what is kept changes in meaning, or the tables that a segment has."""

Tree = Mapping[str, Sequence[str]]
"""What a group was made of, by names, and what those were made of in turn."""


class State(msgspec.Struct, frozen=True):
    """Files are named from the folder `tables`, those of the lake from its root."""

    wanted: list[str]
    files: dict[str, int]
    """What was taken, and how many events each has."""
    segments: list[Segment]
    hot: Segment | None
    others: list[Counted]
    marks: Counted
    since: Counted | None
    chunks: list[Chunk]
    version: tuple[int, int, int] = (STATE_VERSION, TABLES_VERSION, LAKE_VERSION)

    def fits(self, wanted: Sequence[str]) -> bool:
        """Whether a build of these tables can extend it."""
        return self.wanted == list(wanted) and self.version == (STATE_VERSION, TABLES_VERSION, LAKE_VERSION)

    def every(self) -> list[Segment]:
        return [*self.segments, *([self.hot] if self.hot is not None else [])]

    def names(self) -> set[str]:
        """All files that it needs."""
        found = {one.file for one in _counted(msgspec.structs.asdict(self))}
        for segment in self.every():
            found |= {segment.index, segment.samples.file if segment.samples else ""}
        return found - {""}


def _counted(value: Any) -> Iterator[Counted]:
    """Every file with rows, wherever it stands."""
    match value:
        case Counted():
            yield value
        case msgspec.Struct():
            yield from _counted(msgspec.structs.asdict(value))
        case dict():
            yield from _counted(list(value.values()))
        case list():
            for one in value:
                yield from _counted(one)


def new_files(
    known: Mapping[str, int], now: Mapping[str, int], made_of: Callable[[str], Tree]
) -> list[str] | None:
    """Files with events that were not taken; None where events that were taken are gone.

    `known`, `now`: files and how many events each has, as taken and as they are."""
    before, after = _units(known), _units(now)
    fresh = [unit for unit in after if unit not in before]
    if any(unit in before and after[unit] != before[unit] for unit in after):
        return None
    groups = _groups(now)
    trees = {unit: made_of(unit) for unit in fresh if unit in groups}
    replaced = {one for tree in trees.values() for names in tree.values() for one in names}
    if not replaced.issuperset(before.keys() - after.keys()):
        return None
    new = {unit for unit in fresh if not _is_covered(unit, before, trees.get(unit, {}))}
    return [name for name in now if _unit(name) in new]


def _unit(name: str) -> str:
    """The group of a file, or the file itself."""
    place = place_of(name)
    return name if place is None else place.group


def _units(files: Mapping[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, rows in files.items():
        found[_unit(name)] = found.get(_unit(name), 0) + rows
    return found


def _groups(files: Mapping[str, int]) -> set[str]:
    return {place.group for name in files if (place := place_of(name)) is not None}


def _is_covered(unit: str, known: Mapping[str, int], tree: Tree) -> bool:
    """Whether it is known, or all that it was made of is."""
    if unit in known:
        return True
    parts = tree.get(unit, ())
    return bool(parts) and all(_is_covered(one, known, tree) for one in parts)
