"""What a monitor knows of workers is a join, too; whether they live is a question of time."""

from typing import Any

from umbel.events.state import ClusterState, Workers


def beat(kind: str = "heartbeat", at: float = 100.0, **fields: Any) -> dict[str, Any]:
    return {
        "type": f"worker-{kind}",
        "hostname": "w@a",
        "pid": 1,
        "clock": 1,
        "timestamp": at,
        "freq": 2.0,
    } | fields


def test_a_worker_is_alive_for_two_beats() -> None:
    state = ClusterState()
    state.apply(beat(at=100.0))
    assert [one.hostname for one in state.workers.alive(103.9)] == ["w@a"]
    assert state.workers.alive(104.0) == []


def test_the_receivers_time_counts_where_it_is_known() -> None:
    state = ClusterState()
    state.apply(beat(at=100.0), heard_at=5000.0)
    assert [one.hostname for one in state.workers.alive(5003.0)] == ["w@a"]


def test_a_farewell_ends_it_whenever_it_arrives_and_a_restart_begins_anew() -> None:
    """Its clock begins at 0 again: time says what is newer."""
    events = [
        beat("online", 90.0, clock=500),
        beat("offline", 100.0, clock=900),
        beat("online", 101.0, pid=2, clock=1),
    ]
    for order in (events, events[::-1]):
        state = ClusterState()
        state.apply(order[:])
        worker = state.workers.get("w@a")
        assert worker is not None
        assert (worker.is_offline, worker.newest.pid) == (False, 2)
    state = ClusterState()
    state.apply([events[1], events[0]])
    worker = state.workers.get("w@a")
    assert worker is not None
    assert worker.is_offline and not worker.is_alive(100.5)


def test_their_number_is_bounded_and_the_longest_silent_go_first() -> None:
    state = ClusterState()
    state.workers = Workers(workers_max=20)
    for number in range(100):
        state.apply(beat(at=float(number), hostname=f"w{number:03}@a"))
    assert len(state.workers) <= 20
    assert state.workers.get("w099@a") is not None
    assert state.workers.get("w000@a") is None


def test_names_that_were_heard_once_take_no_place_from_nodes_that_were_heard_twice() -> None:
    """N1."""
    state = ClusterState()
    state.workers = Workers(workers_max=20)
    for at in (0.0, 2.0, 2.0):
        state.apply(beat(at=at, hostname="real@a"))
    for number in range(1000):
        state.apply(beat(at=100.0 + number, hostname=f"ghost{number}@a"))
    assert len(state.workers) <= 20
    assert [one.hostname for one in state.workers if one.is_proven] == ["real@a"]
