"""D2: a task's bucket is Spark's, and buckets hold every event once."""

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fold.reading import EXAMPLES
from umbel.fold.buckets import BUCKET_EVENTS, bucket_of, buckets_for, divided, hash_of

IDS = st.lists(st.text(max_size=40), max_size=30)


def plain_hash(text: str) -> int:
    """The same function, a byte at a time."""
    data, state = text.encode(), 42
    whole = len(data) // 4 * 4
    words = [int.from_bytes(data[place : place + 4], "little") for place in range(0, whole, 4)]
    words += [byte - 256 if byte > 127 else byte for byte in data[whole:]]
    for word in words:
        mixed = turned(word * 0xCC9E2D51, 15) * 0x1B873593
        state = turned(state ^ (mixed & 0xFFFFFFFF), 13) * 5 + 0xE6546B64 & 0xFFFFFFFF
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ state >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    state ^= state >> 16
    return state - 2**32 if state >= 2**31 else state


def turned(value: int, by: int) -> int:
    value &= 0xFFFFFFFF
    return (value << by | value >> 32 - by) & 0xFFFFFFFF


@settings(max_examples=EXAMPLES, deadline=None)
@given(IDS)
def test_texts_are_hashed_one_by_one_and_together_alike(ids: list[str]) -> None:
    array = pa.array(["cut off", *ids], pa.string())[1:]
    assert hash_of(array).tolist() == [plain_hash(text) for text in ids]
    assert bucket_of(array, 7).tolist() == [plain_hash(text) % 7 for text in ids]
    assert hash_of(array.cast(pa.large_string())).tolist() == hash_of(array).tolist()


def test_the_buckets_of_a_few_ids_stay_what_they_are() -> None:
    """Lakes hold files by these numbers. They are what Spark 4.3 answers."""
    ids = ["", "a", "Spark", "1f0b8a3e-7c1d-4f6e-9a57-2f3b6c8d9e01"]
    assert hash_of(pa.array(ids)).tolist() == [142593372, 1485273170, 228093765, -1533708709]


@settings(max_examples=EXAMPLES, deadline=None)
@given(IDS, st.integers(1, 9))
def test_twice_as_many_buckets_divide_each_in_two(ids: list[str], count: int) -> None:
    array = pa.array(ids, pa.string())
    assert (bucket_of(array, 2 * count) % count == bucket_of(array, count)).all()


@settings(max_examples=EXAMPLES, deadline=None)
@given(IDS, st.integers(1, 9))
def test_every_event_lies_in_its_bucket_in_the_order_it_had(ids: list[str], count: int) -> None:
    events = pa.table({"uuid": pa.array(ids, pa.string()), "place": pa.array(np.arange(len(ids)))})
    parts = [part.to_pydict() for part in divided(events, count)]
    assert len(parts) == count
    assert sorted(place for part in parts for place in part["place"]) == list(range(len(ids)))
    for number, part in enumerate(parts):
        assert part["place"] == sorted(part["place"])
        assert all(plain_hash(text) % count == number for text in part["uuid"])


def test_there_are_as_many_buckets_as_the_events_need_by_doubling() -> None:
    full = BUCKET_EVENTS
    assert [buckets_for(events, 16) for events in (0, 1, full, full + 1, 2 * full, 2 * full + 1)] == [
        *(1, 1, 1, 2, 2),
        4,
    ]
    assert (buckets_for(20_000_000, 4096), buckets_for(10**9, 256)) == (64, 256)
