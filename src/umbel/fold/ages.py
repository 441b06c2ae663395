"""Ages: which tasks are likely to get more events, told by what was recorded of them.

Whatever is said here, tables are the same: it decides only which tasks are folded again together. A task
is *hot* while it has not ended, and for some seconds after that; one that was silent for long is not. The
others are settled. Late events and repetitions come soon if at all, so what settled a short time ago lies
in small segments, which cost little to fold again.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from umbel.events.precedence import ENDINGS
from umbel.fold.columns import Flags, Ints, int_array

SECOND_US = 1_000_000
SETTLED_US = 5 * SECOND_US
"""A task that ended and was silent for so long is settled."""

SILENT_US = 600 * SECOND_US
"""One that was silent for so long is not waited for, though it has not ended."""

RECENT_US = 120 * SECOND_US
"""Who settled within this time may well get a late event."""

SLICE_US = RECENT_US // 8
"""In a first build, what settled within one such stretch of time lies together."""

SEGMENT_EVENTS = 16_384
"""Later, of what settled a short time ago, so many lie together."""

HOT_EVENTS = 50_000
"""More are not folded again with every increment: those that have ended are settled first, and of them
those that were silent longest."""

_ENDED = pa.array([*ENDINGS, "rejected"])


@dataclass(frozen=True, slots=True)
class Aged:
    """Events by the age of their tasks; all events of a task are in one table."""

    old: pa.Table
    recent: pa.Table
    """Those that were silent longest come first."""
    hot: pa.Table
    _task: Ints
    _silent_us: Ints
    """For each row of `recent`: a number of its task, and how long that was silent."""

    def parts(self) -> Iterator[pa.Table]:
        """What is recent, in parts of about SEGMENT_EVENTS."""
        for rows in _cut(self._task):
            yield self.recent.take(pa.array(rows))

    def slices(self) -> Iterator[tuple[int, pa.Table]]:
        """What is recent, by time: numbers of slices, from 0 for what was silent for the shortest."""
        number = self._silent_us // SLICE_US
        for one in np.unique(number):
            yield int(one), self.recent.filter(pa.array(number == one))


def aged(events: pa.Table, horizon_us: int, *, hot_max: int = HOT_EVENTS) -> Aged:
    """`events`: of tasks. `horizon_us`: when the last event of all was recorded."""
    task = _numbered(events)
    count = int(task.max()) + 1 if len(task) else 0
    recorded = int_array(events.column("recorded_at").combine_chunks())
    last = np.zeros(count, dtype=np.int64)
    np.maximum.at(last, task, recorded)
    is_ended = np.zeros(count, dtype=bool)
    is_ended[task[_flags(pc.is_in(events.column("slot"), value_set=_ENDED))]] = True
    silent_us = horizon_us - last
    may_go_on = silent_us < np.where(is_ended, SETTLED_US, SILENT_US)
    order = np.lexsort((-last, is_ended))  # those that run are surely told of again
    is_hot = may_go_on & _first(task, order[may_go_on[order]], hot_max)
    is_old = ~is_hot & (silent_us >= RECENT_US)
    recent = np.flatnonzero((~is_hot & ~is_old)[task])
    recent = recent[np.argsort(last[task[recent]], kind="stable")]
    return Aged(
        old=_where(is_old[task], events),
        recent=events.take(pa.array(recent)),
        hot=events.take(pa.array(np.flatnonzero(is_hot[task]))),
        _task=task[recent],
        _silent_us=silent_us[task[recent]],
    )


def _where(wanted: Flags, events: pa.Table) -> pa.Table:
    """These rows. Those before the first that is not wanted are not copied: in a lake most of what is old
    comes first."""
    first = len(wanted) if wanted.all() else int(np.argmin(wanted))
    rest = events.slice(first).filter(pa.array(wanted[first:]))
    return pa.concat_tables([events.slice(0, first), rest])


def _numbered(events: pa.Table) -> Ints:
    ids = events.column("uuid").combine_chunks().dictionary_encode()
    return np.asarray(ids.indices.to_numpy(), dtype=np.int64)


def _flags(column: pa.ChunkedArray) -> Flags:
    found: Flags = column.combine_chunks().to_numpy(zero_copy_only=False)
    return found


def _first(task: Ints, order: Ints, events_max: int) -> Flags:
    """The first tasks in this order that together have at most so many events."""
    sizes = np.bincount(task)
    found = np.zeros(len(sizes), dtype=bool)
    found[order[np.cumsum(sizes[order]) <= events_max]] = True
    return found


def _cut(task: Ints) -> Iterator[Ints]:
    """Rows, of which the tasks are given, in parts of about SEGMENT_EVENTS; all of one task in one part."""
    if not len(task):
        return
    _, first, of_row = np.unique(task, return_index=True, return_inverse=True)
    part = first[of_row] // SEGMENT_EVENTS
    for number in np.unique(part):
        yield np.flatnonzero(part == number)
