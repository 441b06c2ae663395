"""The cluster's state: a strict order of tasks (L5), indices, bounded memory, counts that stand."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.events.histories import EXAMPLES, Wire, event, histories
from umbel.events.state import DIGEST_BYTES, RECOUNTED_BYTES, ClusterState, size_of_all

RUN = ("received", "started", "succeeded")


def task(uuid: str, *kinds: str, clock: int = 1, **fields: Any) -> list[Wire]:
    return [
        event(kind, uuid, retries=0, clock=clock + step, timestamp=float(clock + step), **fields)
        for step, kind in enumerate(kinds)
    ]


def ids(state: ClusterState, **options: Any) -> list[str]:
    return [record.uuid for record in state.tasks(**options)]


def test_tasks_are_ordered_by_clock_then_time_then_origin_then_id() -> None:
    state = ClusterState()
    state.apply(event("started", "clock", clock=2, timestamp=1.0))
    state.apply(event("started", "time", clock=1, timestamp=2.0))
    state.apply(event("started", "node", clock=1, timestamp=1.0, hostname="u2@b"))
    state.apply(event("started", "process", clock=1, timestamp=1.0, pid=2))
    state.apply(event("started", "a", clock=1, timestamp=1.0))
    state.apply(event("started", "b", clock=1, timestamp=1.0))
    assert ids(state) == ["clock", "time", "node", "process", "b", "a"]
    assert ids(state, limit=2) == ["clock", "time"]
    assert ids(state, newest_first=False, limit=1) == ["a"]


def test_the_order_is_that_of_the_event_that_says_the_state() -> None:
    state = ClusterState()
    state.apply([*task("first", *RUN, clock=10), *task("second", *RUN, clock=20)])
    state.apply(event("received", "first", retries=0, clock=90))  # late news of a task that has ended
    assert ids(state) == ["second", "first"]


def test_tasks_are_found_by_name_by_worker_and_by_whether_they_ended() -> None:
    state = ClusterState()
    state.apply(task("t1", *RUN, name="add", clock=1))
    state.apply(task("t2", "received", name="add", clock=5, hostname="u2@b"))
    state.apply(task("t3", *RUN, name="mul", clock=9, hostname="u2@b"))
    assert (ids(state, name="add"), ids(state, name="mul"), ids(state, name="none")) == (
        ["t2", "t1"],
        ["t3"],
        [],
    )
    assert (ids(state, worker="u1@a"), ids(state, worker="u2@b")) == (["t1"], ["t3", "t2"])
    assert (ids(state, finished=True), ids(state, finished=False)) == (["t3", "t1"], ["t2"])
    assert ids(state, name="add", worker="u2@b") == ["t2"]
    assert ids(state, name="add", finished=True) == ["t1"]
    assert (state.count_by_name(), state.count_by_worker()) == ({"add": 2, "mul": 1}, {"u1@a": 1, "u2@b": 2})


def test_a_task_leaves_the_worker_it_is_no_longer_on() -> None:
    state = ClusterState()
    state.apply(task("t1", "received", "started", hostname="u1@a"))
    assert state.count_by_worker() == {"u1@a": 1}
    state.apply(task("t1", "succeeded", clock=9, hostname="u2@b"))
    assert state.count_by_worker() == {"u2@b": 1}
    assert ids(state, worker="u1@a") == []


# ---- counts ----------------------------------------------------------------------------------------


def test_counts_follow_the_states_and_repetition_does_not_move_them() -> None:
    state = ClusterState()
    state.apply([*task("t1", *RUN), *task("t2", "received"), *task("t3", "received", "failed")])
    assert state.counts == {"SUCCESS": 1, "RECEIVED": 1, "FAILURE": 1}
    state.apply([*task("t1", *RUN), *task("t2", "received"), *task("t3", "received", "failed")])
    assert state.counts == {"SUCCESS": 1, "RECEIVED": 1, "FAILURE": 1}


@settings(max_examples=EXAMPLES)
@given(histories())
def test_counts_are_those_of_the_records(events: list[Wire]) -> None:
    state = ClusterState()
    state.apply(events)
    counted: dict[str, int] = {}
    for record in state.tasks():
        counted[record.state] = counted.get(record.state, 0) + 1
    assert state.counts == counted


def test_what_is_no_event_is_counted_and_nothing_else_happens() -> None:
    state = ClusterState()
    state.apply(
        [{"type": "task-started"}, {"type": 3}, {}, {"type": "task-"}, {"type": "task-sent", "uuid": 7}]
    )
    assert (state.heard, state.unreadable, len(state)) == (5, 5, 0)


# ---- bounded memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("tasks_max", [1, 3, 50])
def test_memory_is_bounded_and_the_oldest_finished_go_first(tasks_max: int) -> None:
    state = ClusterState(tasks_max=tasks_max)
    for number in range(200):
        state.apply(task(f"t{number}", *RUN, clock=10 * number, name=f"n{number}", hostname=f"h{number}"))
    assert len(state) == tasks_max
    assert ids(state) == [f"t{number}" for number in range(199, 199 - tasks_max, -1)]
    assert state.evicted == 200 - tasks_max
    assert len(state.count_by_name()) == len(state.count_by_worker()) == tasks_max  # no index is left behind
    assert state.counts == {"SUCCESS": 200}


def test_unfinished_tasks_are_dropped_last() -> None:
    state = ClusterState(tasks_max=3)
    state.apply([*task("old", "received"), *task("older", "sent")])
    for number in range(10):
        state.apply(task(f"t{number}", *RUN, clock=100 + number))
    assert sorted(ids(state)) == ["old", "older", "t9"]
    state.apply([*task("new", "received", clock=500), *task("newer", "received", clock=501)])
    assert ids(state) == ["newer", "new", "old"]  # nothing finished was left to drop


def test_a_dropped_task_is_partial_when_it_is_heard_of_again_and_neither_counted_nor_moved_back() -> None:
    state = ClusterState(tasks_max=2)
    state.apply(task("t1", *RUN, name="add"))
    state.apply([*task("t2", *RUN, clock=10), *task("t3", *RUN, clock=20)])
    assert state.task("t1") is None
    state.apply(task("t1", "received", name="add", clock=30))  # redelivered, or late
    record = state.task("t1")
    assert record is not None
    assert (record.partial, record.state, record.name, record.result) == (True, "SUCCESS", "add", None)
    assert ids(state, finished=True)[0] == "t1"
    assert state.counts == {"SUCCESS": 3}
    state.apply(task("t1", "failed", clock=40))  # an ending that is told counts
    assert state.counts == {"SUCCESS": 2, "FAILURE": 1}


def test_an_unfinished_task_that_was_dropped_goes_on_where_it_was() -> None:
    state = ClusterState(tasks_max=1)
    state.apply([*task("t1", "received"), *task("t2", "received", clock=9)])
    assert ids(state) == ["t2"]
    assert state.counts == {"RECEIVED": 2}
    state.apply(task("t1", "succeeded", clock=20))
    assert state.counts == {"RECEIVED": 1, "SUCCESS": 1}
    record = state.task("t1")
    assert record is None or record.partial


def test_memory_is_bounded_in_bytes_and_the_oldest_finished_go_first() -> None:
    state = ClusterState(bytes_max=100_000)
    for number in range(50):
        state.apply(task(f"t{number:02}", *RUN, clock=10 * number, args="x" * 5000))
        assert state.size_bytes <= 100_000
    known = ids(state, newest_first=False)
    assert known == [f"t{number}" for number in range(50 - len(known), 50)] and len(known) in (5, 6)
    assert state.counts == {"SUCCESS": 50}


def test_repeats_are_counted_in_bytes_too() -> None:
    state = ClusterState()
    once = task("t", "received")
    state.apply(once)
    before = state.size_bytes
    state.apply([event("received", "t", retries=0, clock=0, timestamp=0.0, pid=pid) for pid in range(10)])
    assert state.size_bytes == before + 10 * DIGEST_BYTES
    (known,) = state.tracked()
    assert size_of_all(known) == before + 10 * DIGEST_BYTES


def test_a_task_larger_than_all_may_be_goes_when_another_comes() -> None:
    state = ClusterState(bytes_max=10_000)
    state.apply(task("large", "received", args="x" * 50_000))
    assert ids(state) == ["large"]
    state.apply(task("small", "received", clock=2))
    assert ids(state) == ["small"] and state.size_bytes < 10_000


def test_states_of_users_making_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.events.state.STATES_MAX", 3)
    state = ClusterState()
    state.apply([event(f"state{number}", f"t{number}", retries=0, clock=1) for number in range(5)])
    assert state.counts == {"OTHER": 2, "STATE0": 1, "STATE1": 1, "STATE2": 1}
    state.apply([event("succeeded", f"t{number}", retries=0, clock=2) for number in range(5)])
    assert sum(state.counts.values()) == 5


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from((*RUN, "progress")), st.integers(0, 9)), max_size=60
    ),
    st.integers(1_000, 30_000),
)
def test_whatever_comes_the_bytes_that_are_counted_are_those_that_are_known(
    told: list[tuple[int, str, int]], bytes_max: int
) -> None:
    """Each task at no less than it has, and all of them at their sum."""
    state = ClusterState(bytes_max=bytes_max)
    for number, kind, clock in told:
        state.apply(event(kind, f"t{number}", clock=clock, more="x" * 700 * clock))
        assert state.size_bytes <= bytes_max or len(state) == 1
    known = list(state.tracked())
    assert state.size_bytes == sum(one.size_bytes for one in known)
    for one in known:
        assert size_of_all(one) <= one.size_bytes <= max(RECOUNTED_BYTES, 2 * size_of_all(one)) + 8_000


@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from(RUN), st.integers(0, 40)), max_size=80),
    st.integers(1, 9),
)
def test_whatever_comes_the_bound_and_the_indices_hold(
    told: list[tuple[int, str, int]], tasks_max: int
) -> None:
    state = ClusterState(tasks_max=tasks_max)
    for number, kind, clock in told:
        named = {"name": f"n{number % 4}"} if kind == "received" else {}
        state.apply(event(kind, f"t{number}", retries=0, clock=clock, hostname=f"h{clock % 3}", **named))
    assert len(state) <= tasks_max
    records = state.tasks()
    keys = [(one.clock, one.state_at, one.worker, one.uuid) for one in records]
    assert keys == sorted(keys, reverse=True)
    assert len(records) == len(state) == len({one.uuid for one in records})
    assert sum(state.counts.values()) == len({number for number, _, _ in told})
    for name in state.names():
        assert ids(state, name=name) == [one.uuid for one in records if one.name == name]
    for worker, count in state.count_by_worker().items():
        assert ids(state, worker=worker) == [one.uuid for one in records if one.worker == worker]
        assert count == len(ids(state, worker=worker))
