"""What the monitor shows, from what it heard (L7)."""

from typing import Any

from umbel.monitor.model import STORIES_MAX, STORY_MAX, ClusterModel, Filter
from umbel.wire.event import encode_events

NOW = 1_000_000.0


def told(type_name: str, uuid: str = "t1", clock: int = 1, **fields: Any) -> dict[str, Any]:
    said = {"type": type_name, "uuid": uuid, "clock": clock, "hostname": "w@h", "pid": 1, "timestamp": NOW}
    return {**said, "retries": 0, **fields}


def seeing(*events: dict[str, Any], at: float = NOW) -> ClusterModel:
    model = ClusterModel()
    model.take(encode_events(list(events)), at)
    return model


def test_tasks_are_listed_newest_first_by_logical_time_whatever_came_first() -> None:
    model = seeing(
        told("task-received", "late", clock=9, name="b"), told("task-received", "early", clock=3, name="a")
    )
    assert [task.uuid for task in model.tasks(Filter(), 10)] == ["late", "early"]
    assert [task.uuid for task in model.tasks(Filter(), 1)] == ["late"]


def test_tasks_are_found_by_name_id_state_and_worker() -> None:
    model = seeing(
        told("task-received", "aa", name="shop.pay"),
        told("task-failed", "bb", clock=2, hostname="v@h"),
        told("task-received", "bb", clock=1, name="shop.ship", hostname="v@h"),
    )

    def found(**wanted: str) -> list[str]:
        return [task.uuid for task in model.tasks(Filter(**wanted), 10)]

    assert found(text="pay") == ["aa"]
    assert found(text="b") == ["bb"]
    assert found(state="FAILURE") == ["bb"]
    assert found(worker="v@h") == ["bb"]
    assert found(text="pay", state="FAILURE") == []


def test_a_story_is_in_causal_order_and_without_repeats() -> None:
    ended, begun = told("task-succeeded", clock=7, result="1"), told("task-received", clock=3, name="a")
    model = seeing(ended, begun, ended)
    assert [event.type_name for event in model.story("t1")] == ["task-received", "task-succeeded"]
    assert model.story("unknown") == []


def test_a_member_that_falls_silent_shows_for_how_long() -> None:
    beat = told("worker-heartbeat", freq=2.0, active=3, processed=40, sw_ident="umbel", loadavg=[0.5, 1, 1])
    model = seeing(
        told("worker-online", clock=0, timestamp=NOW - 2), beat, told("worker-online", hostname="x")
    )
    (alive,) = model.members(NOW + 1)  # the other was heard once
    assert (alive.node, alive.state, alive.active, alive.load) == ("w@h", "alive", 3, "0.50")
    (silent,) = model.members(NOW + 30)
    assert (silent.state, silent.silent_s) == ("silent", 30.0)
    model.take(encode_events([told("worker-offline", clock=2, timestamp=NOW + 31)]), NOW + 31)
    assert model.members(NOW + 32)[0].state == "left"


def test_rates_count_whole_seconds() -> None:
    model = seeing(*(told("task-succeeded", f"t{n}", clock=n) for n in range(10)))
    model.take(encode_events([told("task-failed", "x", clock=99)]), NOW + 1)
    assert model.rates(NOW + 2.5, over=2) == (5.5, 5.0, 0.5)
    assert model.rates(NOW + 60) == (0.0, 0.0, 0.0)
    assert list(model.history(NOW + 2))[-2:] == [10, 1]


def test_memory_is_bounded() -> None:
    twice = [told("task-progress", "t0", clock=n) for n in range(2)]
    model = seeing(*twice, *(told("task-progress", f"t{n}", clock=n) for n in range(1, STORIES_MAX)))
    assert len(model.story("t0")) == 2
    model.take(encode_events([told("task-progress", f"t{STORIES_MAX}", clock=9)]), NOW)
    assert len(model.story("t0")) == 1 and model.story(f"t{STORIES_MAX}")  # the newest of each type is left
    model = seeing(*(told("task-progress", clock=n) for n in range(STORY_MAX + 50)))
    assert len(model.story("t1")) == STORY_MAX


def test_what_cannot_be_read_is_counted_and_nothing_else_happens() -> None:
    model = ClusterModel()
    model.take(b"\xff no event", NOW)
    assert model.receiver.undecodable == 1 and model.tasks(Filter(), 10) == []
