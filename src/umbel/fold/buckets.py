"""Buckets: divide events by the hash of the task id into buckets, and by age into segments."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from umbel.events.precedence import ENDINGS
from umbel.fold.columns import Flags, Ints, int_array

# ---- buckets ---------------------------------------------------------------------------------------

SEED = 42
_SECOND_SEED = 1_794_700_800
BUCKET_EVENTS = 400_000
"""Limit for the average number of events in a bucket, which a process must hold in memory."""
Words = npt.NDArray[np.uint32]
Keys = npt.NDArray[np.uint64]
_C1, _C2 = np.uint32(0xCC9E2D51), np.uint32(0x1B873593)
_MIX_1, _MIX_2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)


def bucket_of(ids: pa.Array, count: int) -> Ints:
    """Return the bucket of each id, from 0 to `count` - 1. No id may be null.

    The bucket depends only on the task id. The function is Spark's for bucketed tables (murmur3 of the id's
    UTF-8 bytes, seed 42, modulo the number of buckets, never negative), so Spark can read the files as a
    bucketed table. If the number of buckets n doubles, each bucket is divided in two: tasks of bucket b go
    to b or b + n.
    """
    assert not ids.null_count, "an event without a task id is in no bucket"
    assert count > 0
    return np.mod(hash_of(ids).astype(np.int64), count)


def buckets_for(events: int, most: int) -> int:
    """Return the number of buckets for this number of events: a power of two, with at most BUCKET_EVENTS in
    each on average.
    """
    count = 1
    while count < most and events > count * BUCKET_EVENTS:
        count *= 2
    return count


def divided(events: pa.Table, count: int) -> Iterator[pa.Table]:
    """Yield a table of events for each bucket. The order of events within a bucket does not change."""
    if count == 1:
        yield events
        return
    buckets = bucket_of(events.column("uuid").combine_chunks(), count)
    order = np.argsort(buckets.astype(np.min_scalar_type(count)), kind="stable")
    dealt = events.combine_chunks().take(pa.array(order))
    ends = np.cumsum(np.bincount(buckets, minlength=count)).tolist()
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        yield dealt.slice(start, end - start)


def key_of(ids: pa.Array) -> Keys:
    """Return a 64-bit number for each id, from two hashes, so that equal numbers are very rare among
    millions of ids.
    """
    high, low = (hash_of(ids, seed).view(np.uint32).astype(np.uint64) for seed in (SEED, _SECOND_SEED))
    found: Keys = high << np.uint64(32) | low
    return found


def hash_of(texts: pa.Array, seed: int = SEED) -> npt.NDArray[np.int32]:
    """Return Spark's `hash` of each text. Texts of the same length are hashed together, four bytes at a
    time.
    """
    texts = texts.cast(pa.string())
    if not len(texts):
        return np.zeros(0, dtype=np.int32)
    _, offsets_buffer, data_buffer = texts.buffers()
    offsets = np.frombuffer(offsets_buffer, dtype=np.int32)[texts.offset : texts.offset + len(texts) + 1]
    data = np.frombuffer(data_buffer or b"", dtype=np.uint8)
    starts, lengths = offsets[:-1].astype(np.int64), np.diff(offsets)
    if (lengths == lengths[0]).all():
        block = data[offsets[0] : offsets[-1]].reshape(len(texts), int(lengths[0]))
        return _hash_block(block, seed)
    found = np.empty(len(texts), dtype=np.int32)
    for length in np.unique(lengths):
        these = np.flatnonzero(lengths == length)
        found[these] = _hash_block(data[starts[these][:, None] + np.arange(length)], seed)
    return found


def _hash_block(block: npt.NDArray[np.uint8], seed: int) -> npt.NDArray[np.int32]:
    """Hash texts of the same length, one in each row. Bytes after the last complete word are mixed in one at
    a time as signed numbers, which is how Spark's murmur3 differs from others.
    """
    count, length = block.shape
    whole = length // 4 * 4
    state = np.full(count, seed, dtype=np.uint32)
    words = np.ascontiguousarray(block[:, :whole]).view("<u4")
    for place in range(whole // 4):
        state = _mixed(state, words[:, place])
    for place in range(whole, length):
        state = _mixed(state, block[:, place].astype(np.int8).astype(np.int32).view(np.uint32))
    return _finished(state ^ np.uint32(length)).view(np.int32)


def _mixed(state: Words, word: Words) -> Words:
    word = _rotated(word * _C1, 15) * _C2
    return _rotated(state ^ word, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _rotated(value: Words, by: int) -> Words:
    return (value << np.uint32(by)) | (value >> np.uint32(32 - by))


def _finished(state: Words) -> Words:
    state = (state ^ (state >> np.uint32(16))) * _MIX_1
    state = (state ^ (state >> np.uint32(13))) * _MIX_2
    return state ^ (state >> np.uint32(16))


# ---- claims ----------------------------------------------------------------------------------------


def index_of(ids: Iterable[pa.ChunkedArray]) -> pa.Buffer:
    """Return the distinct keys of these ids, sorted."""
    keys = [key_of(pc.unique(part)) for part in ids]
    every = np.unique(np.concatenate([np.zeros(0, dtype=np.uint64), *keys]))
    return pa.py_buffer(every.tobytes())


def claimed(events: pa.Table, indexes: Sequence[pa.Buffer]) -> Iterator[tuple[int, pa.Table]]:
    """Yield events by the number of the index that contains their task; `len(indexes)` for tasks in no
    index.

    A segment stores the sorted keys of its task ids. A task belongs to the segment that contains its key.
    Two ids with the same key belong to the same segment, so collisions of keys do no harm.
    """
    # Sorted keys are looked up at neighbouring places of an index, which is ten times as fast.
    keys, task = np.unique(key_of(events.column("uuid").combine_chunks()), return_inverse=True)
    target = np.full(len(keys), len(indexes))
    for number, index in enumerate(indexes):
        claims = np.frombuffer(index, dtype=np.uint64)
        if len(claims):
            place = np.minimum(np.searchsorted(claims, keys), len(claims) - 1)
            target[claims[place] == keys] = number
    target = target[task]
    for number in np.unique(target).tolist():
        yield number, events.filter(pa.array(target == number))


# ---- ages ------------------------------------------------------------------------------------------

SECOND_US = 1_000_000
SETTLED_US = 5 * SECOND_US
"""A task that has ended is settled after this time without events."""

SILENT_US = 600 * SECOND_US
"""A task that has not ended is settled after this time without events."""

RECENT_US = 120 * SECOND_US
"""A task that settled within this time may still get a late event."""

SLICE_US = RECENT_US // 8
"""In a first build, tasks that settled within one slice of this length are in one segment."""

SEGMENT_EVENTS = 16_384
"""In later builds, about this many events of recently settled tasks make one segment."""

HOT_EVENTS = 50_000
"""Limit of events that are folded again in each increment. Above it, tasks settle early: first those that
have ended, and among these the ones without events for the longest time.
"""

_ENDED = pa.array([*ENDINGS, "rejected"])


@dataclass(frozen=True, slots=True)
class Aged:
    """Events by the age of their tasks. All events of a task are in the same table."""

    old: pa.Table
    recent: pa.Table
    """Tasks without events for the longest time come first."""
    hot: pa.Table
    _task: Ints
    _silent_us: Ints
    """For each row of `recent`: the time since the last event of its task. `_task` is the number of that
    task.
    """

    def parts(self) -> Iterator[pa.Table]:
        """Yield recent events in parts of about SEGMENT_EVENTS. A task is never divided."""
        for rows in _cut(self._task):
            yield self.recent.take(pa.array(rows))

    def slices(self) -> Iterator[tuple[int, pa.Table]]:
        """Yield recent events by slices of the time since the last event; slice 0 is the most recent."""
        number = self._silent_us // SLICE_US
        for chosen in np.unique(number):
            yield int(chosen), self.recent.filter(pa.array(number == chosen))


def aged(events: pa.Table, horizon_us: int, *, hot_max: int = HOT_EVENTS) -> Aged:
    """Divide events by the age of their tasks. `horizon_us` is the time at which the last event was
    recorded.

    Tasks are divided by whether they are likely to get more events. This does not affect the tables, only
    which tasks are folded together again. A task is hot until a few seconds after its end, unless it had no
    events for a long time. Other tasks are settled. Late and repeated events usually arrive soon, so tasks
    that settled recently are in small segments, which are cheap to fold again.
    """
    task = _numbered(events)
    count = int(task.max()) + 1 if len(task) else 0
    recorded = int_array(events.column("recorded_at").combine_chunks())
    last = np.zeros(count, dtype=np.int64)
    np.maximum.at(last, task, recorded)
    is_ended = np.zeros(count, dtype=bool)
    is_ended[task[_flags(pc.is_in(events.column("slot"), value_set=_ENDED))]] = True
    silent_us = horizon_us - last
    may_go_on = silent_us < np.where(is_ended, SETTLED_US, SILENT_US)
    order = np.lexsort((-last, is_ended))  # running tasks first, because they will get more events
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
    """Return the wanted rows. Those at the beginning are not copied, because most old events are first in a
    lake.
    """
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
    """Return which tasks are first in this order and together have at most `events_max` events."""
    sizes = np.bincount(task)
    found = np.zeros(len(sizes), dtype=bool)
    found[order[np.cumsum(sizes[order]) <= events_max]] = True
    return found


def _cut(task: Ints) -> Iterator[Ints]:
    """Yield row numbers in parts of about SEGMENT_EVENTS. The rows of a task are never divided."""
    if not len(task):
        return
    _, first, of_row = np.unique(task, return_index=True, return_inverse=True)
    part = first[of_row] // SEGMENT_EVENTS
    for number in np.unique(part):
        yield np.flatnonzero(part == number)
