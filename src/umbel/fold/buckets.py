"""Buckets: into which part of the lake a task's events go, decided by its id alone.

The function is Spark's own for a bucketed table (murmur3 of the id's UTF-8 bytes, seed 42, modulo the
number of buckets, never negative), so Spark may read such files as a table that is bucketed already.
With twice as many buckets each one is divided in two: tasks of bucket b go to b or b + n.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from umbel.fold.columns import Ints

SEED = 42
_SECOND_SEED = 1_794_700_800
BUCKET_EVENTS = 400_000
"""More in one bucket take more memory than a worker should need."""
Words = npt.NDArray[np.uint32]
Keys = npt.NDArray[np.uint64]
_C1, _C2 = np.uint32(0xCC9E2D51), np.uint32(0x1B873593)
_MIX_1, _MIX_2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)


def bucket_of(ids: pa.Array, count: int) -> Ints:
    """The bucket of each id, from 0 to `count` - 1. No id is null."""
    assert not ids.null_count, "what has no task id is in no bucket"
    assert count > 0
    return np.mod(hash_of(ids).astype(np.int64), count)


def buckets_for(events: int, most: int) -> int:
    """How many buckets so many events need: 1, 2, 4 and so on, until none has more than BUCKET_EVENTS on
    average."""
    count = 1
    while count < most and events > count * BUCKET_EVENTS:
        count *= 2
    return count


def divided(events: pa.Table, count: int) -> Iterator[pa.Table]:
    """The events of tasks, a table for each bucket in turn, in the order that they had."""
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
    """A number for each id, from two hashes, so that two of millions are hardly ever equal."""
    high, low = (hash_of(ids, seed).view(np.uint32).astype(np.uint64) for seed in (SEED, _SECOND_SEED))
    found: Keys = high << np.uint64(32) | low
    return found


def hash_of(texts: pa.Array, seed: int = SEED) -> npt.NDArray[np.int32]:
    """Spark's `hash` of each text. Texts of one length are hashed together, four bytes of each at a time."""
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
    """One text a row, all of one length. The bytes behind the last whole word are mixed in one by one, as
    signed numbers, which is Spark's way and not the one of other murmur3."""
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
