"""Which segment has a task, and which tasks are likely to get more events."""

from collections import Counter

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.fold import buckets
from umbel.fold.buckets import RECENT_US, SECOND_US, aged, claimed, index_of
from umbel.fold.columns import INSTANT

IDS = st.lists(st.text(max_size=9), max_size=30)


@given(IDS, IDS, IDS)
def test_events_go_to_the_segment_that_has_their_task(
    first: list[str], second: list[str], new: list[str]
) -> None:
    indexes = [index_of([pa.chunked_array([pa.array(ids, pa.string())])]) for ids in (first, second)]
    events = pa.table({"uuid": pa.array([*first, *second, *new], pa.string())})
    found = {number: part.column("uuid").to_pylist() for number, part in claimed(events, indexes)}
    assert Counter(one for ids in found.values() for one in ids) == Counter([*first, *second, *new])
    for number, ids in found.items():
        claims = {0: set(first) - set(second), 1: set(second), 2: set(new) - set(first) - set(second)}
        assert set(ids) == claims[number] & {*first, *second, *new}


def event(uuid: str, slot: str, silent_s: float) -> dict[str, object]:
    return {"uuid": uuid, "slot": slot, "recorded_at": 10**15 - round(silent_s * SECOND_US)}


SCHEMA = pa.schema([("uuid", pa.string()), ("slot", pa.string()), ("recorded_at", INSTANT)])


def told(table: pa.Table) -> set[str]:
    return set(table.column("uuid").to_pylist())


def test_tasks_are_told_apart_by_their_end_and_their_silence() -> None:
    silent_s, recent_s = buckets.SILENT_US / SECOND_US, RECENT_US / SECOND_US
    rows = [
        event("just ended", "succeeded", 1),
        event("just ended", "sent", 900),
        event("runs", "started", recent_s + 1),
        event("forgotten", "sent", silent_s + 1),
        event("settled", "failed", recent_s - 1),
        event("refused", "rejected", recent_s - 2),
        event("old", "revoked", recent_s + 1),
        event("old", "sent", recent_s + 2),
    ]
    events = pa.Table.from_pylist(rows, schema=SCHEMA)
    found = aged(events, 10**15)
    assert (told(found.hot), told(found.old)) == ({"just ended", "runs"}, {"forgotten", "old"})
    assert [told(part) for part in found.parts()] == [{"settled", "refused"}]
    ((slice_, of_slice),) = found.slices()
    assert (slice_, told(of_slice)) == (7, {"settled", "refused"})
    few = aged(events, 10**15, hot_max=2)
    assert told(few.hot) == {"runs"}, "who has ended is settled first"
    ended = events.filter(pc.equal(events.column("uuid"), "just ended"))
    more = pa.concat_tables([ended, pa.Table.from_pylist([event("later", "failed", 0)], schema=SCHEMA)])
    assert told(aged(more, 10**15, hot_max=2).hot) == {"later"}, "and who was silent longest"


SLOTS = ("sent", "started", "succeeded", "failed")


@given(
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from(SLOTS), st.integers(0, 800)), max_size=80),
    st.integers(0, 40),
)
def test_every_event_is_in_one_part_and_a_task_is_not_divided(
    found: list[tuple[int, str, int]], hot_max: int
) -> None:
    rows = [event(str(task), slot, silent_s) for task, slot, silent_s in found]
    events = pa.Table.from_pylist(rows, schema=SCHEMA)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(buckets, "SEGMENT_EVENTS", 5)
        by_age = aged(events, 10**15, hot_max=hot_max)
        parts, slices = list(by_age.parts()), [one for _, one in by_age.slices()]
    assert by_age.hot.num_rows <= hot_max
    for divided in ([by_age.old, by_age.hot, *parts], [by_age.old, by_age.hot, *slices]):
        together = pa.concat_tables([events.slice(0, 0), *divided])
        assert sorted(map(str, together.to_pylist())) == sorted(map(str, events.to_pylist()))
        tasks = [told(one) for one in divided]
        assert sum(map(len, tasks)) == len(set().union(*tasks))
