"""Crowded: tasks with more events than fit into memory at once.

What `tasks` and `attempts` say of a task rests on few of its events: of each type and attempt the
greatest, the earliest, and as many as are counted. So its events are looked through part by part, and
those are kept. Its timeline is made in stretches of the order, each of which fits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from umbel.events.types import SLOTS
from umbel.fold.buckets import hash_of
from umbel.fold.columns import Events, Flags, Ints
from umbel.fold.groups import starts_of
from umbel.fold.order import attempts_of, ordered, said
from umbel.fold.registers import ENDINGS_MAX, SLOT, numbered, slots_of

BINS = 1024
_COUNTED = [SLOT["received"], *(SLOT[slot] for slot in ("succeeded", "failed", "revoked"))]


def bins_of(ids: pa.ChunkedArray, buckets: int) -> Ints:
    """Where each id lies within its bucket, from 0 to BINS - 1."""
    return np.mod(hash_of(ids.combine_chunks()).astype(np.int64) // buckets, BINS)


def bin_sizes(parts: Iterable[pa.ChunkedArray], buckets: int) -> Ints:
    sizes = np.zeros(BINS, dtype=np.int64)
    for ids in parts:
        sizes += np.bincount(bins_of(ids, buckets), minlength=BINS)
    return sizes


def within(ids: pa.ChunkedArray, bins: range, buckets: int) -> pa.Array:
    """Which of them lie in these bins, as a filter."""
    place = bins_of(ids, buckets)
    return pa.array((place >= bins.start) & (place < bins.stop))


def shared_out(sizes: Ints, most: int) -> list[range]:
    """Bins that lie side by side and together have at most so many events; one alone may have more."""
    found: list[range] = []
    start = total = 0
    for place, size in enumerate(sizes.tolist()):
        if total and total + size > most:
            found.append(range(start, place))
            start, total = place, 0
        total += size
    return [*found, range(start, len(sizes))] if total else found


def large_tasks(parts: Sequence[pa.ChunkedArray], most: int) -> list[str]:
    """Tasks that have more events than that, from the ids of all events."""
    ids = pa.chunked_array([chunk for part in parts for chunk in part.cast(pa.string()).chunks], pa.string())
    counts = pc.value_counts(ids)
    large: list[str] = counts.field("values").filter(pc.greater(counts.field("counts"), most)).to_pylist()
    return large


def reduced(table: pa.Table) -> pa.Table:
    """Of events of tasks those that say all that `tasks` and `attempts` have of them; of parts of a task
    that were reduced, those of the whole."""
    events = Events(table)
    order = ordered(events, events.column("uuid"))
    slot = slots_of(events)[order.rows]
    has_register = slot >= 0
    rows, slot = order.rows[has_register], slot[has_register]
    owner = order.keys[has_register] << 1 | said(events)[rows]
    _, cell = numbered(owner * len(SLOTS) + slot)
    is_kept = np.zeros(len(rows), dtype=bool)
    last = np.zeros(int(cell.max()) + 1 if len(cell) else 0, dtype=np.int64)
    last[cell] = np.arange(len(cell))
    is_kept[last] = True
    by_time = np.lexsort((events.ints("timestamp")[rows], cell))
    is_kept[by_time[starts_of(cell[by_time])]] = True
    is_kept[_counted(events.ints("digest")[rows], cell, np.isin(slot, _COUNTED))] = True
    return table.take(pa.array(np.sort(rows[is_kept])))


def _counted(digest: Ints, cell: Ints, is_counted: Flags) -> Ints:
    """One event for each digest, as many of each cell as a count goes to."""
    places = np.flatnonzero(is_counted)
    places = places[np.lexsort((digest[places], cell[places]))]
    is_new = np.ones(len(places), dtype=bool)
    is_new[1:] = (cell[places][1:] != cell[places][:-1]) | (digest[places][1:] != digest[places][:-1])
    places = places[is_new]
    since = starts_of(cell[places])
    rank = np.arange(len(places)) - np.repeat(since, np.diff(np.append(since, len(places))))
    return places[rank < ENDINGS_MAX]


Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Keys:
    """The beginning of the order of each event: attempt, clock and time."""

    attempt: Ints
    clock: Ints
    at: Ints

    @staticmethod
    def of(table: pa.Table) -> "Keys":
        events = Events(table)
        return Keys(attempts_of(events), events.ints("clock"), events.ints("timestamp"))

    @staticmethod
    def joined(parts: Sequence["Keys"]) -> "Keys":
        every = ((one.attempt, one.clock, one.at) for one in parts)
        return Keys(*(np.concatenate(columns) for columns in zip(*every, strict=True)))

    def cuts(self, most: int) -> list[Key]:
        """Where the order is to be cut so that a stretch has about that many; equal keys stay together."""
        order = np.lexsort((self.at, self.clock, self.attempt))
        places = order[most::most].tolist()
        keys = {(int(self.attempt[one]), int(self.clock[one]), int(self.at[one])) for one in places}
        return sorted(keys)

    def between(self, start: Key | None, end: Key | None) -> Flags:
        """From one cut, which is in, to the next, which is not."""
        inside = np.ones(len(self.attempt), dtype=bool)
        if start is not None:
            inside &= ~self._before(start)
        return inside & self._before(end) if end is not None else inside

    def _before(self, key: Key) -> Flags:
        attempt, clock, at = key
        is_same = self.attempt == attempt
        earlier = (self.clock < clock) | ((self.clock == clock) & (self.at < at))
        found: Flags = (self.attempt < attempt) | (is_same & earlier)
        return found
