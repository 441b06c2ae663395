"""What a running task tells of itself: states and events, bounded, the last one always."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel import App, Task
from umbel.app.request import Request
from umbel.app.running.progress import BURST, EVENT_MAX_BYTES, Reports, check_type
from umbel.backends.interface import Backend
from umbel.errors import WireError
from umbel.pools.interface import UserEvent
from umbel.wire.message import StoredResult
from umbel.wire.result import decode_result


class Kept:
    """A backend that remembers all that was stored."""

    def __init__(self) -> None:
        self.stored: list[StoredResult] = []

    def store(self, results: list[StoredResult]) -> None:
        self.stored += results

    def metas(self) -> list[Any]:
        return [decode_result(one.payload).result for one in self.stored]


class FewNames:
    """The part of an app that reports use."""

    def __init__(self) -> None:
        self.backend: Backend = Kept()  # type: ignore[assignment]


def made() -> tuple[Reports, Kept, list[UserEvent]]:
    app, told = FewNames(), list[UserEvent]()
    reports = Reports(app, Request(id="t", send_event=told.append, number=7))  # type: ignore[arg-type]
    return reports, app.backend, told  # type: ignore[return-value]


def test_a_state_is_stored_and_told() -> None:
    reports, kept, told = made()
    reports.state("PROGRESS", {"done": 3, "total": 4, "uuid": "mine", "at": "noon"})
    (one,) = kept.stored
    assert (one.task_id, one.status) == ("t", "PROGRESS")
    (event,) = told
    assert (event.number, event.event_type) == (7, "task-progress")
    assert json.loads(event.fields) == {"done": 3, "total": 4, "at": "noon"}  # uuid is the task's own


def test_a_flood_is_cut_down_and_the_last_arrives_before_the_end() -> None:
    reports, kept, told = made()
    for done in range(10_000):
        reports.state("PROGRESS", {"done": done})
    assert BURST <= len(kept.stored) < BURST + 100
    reports.flush()
    metas = kept.metas()
    assert metas[-1] == {"done": 9_999}
    assert metas == sorted(metas, key=lambda meta: meta["done"])
    assert len(told) == len(metas)
    reports.flush()
    assert len(kept.stored) == len(metas)


@given(st.lists(st.integers(0, 120), max_size=5))
def test_whatever_the_pace_states_never_go_back(floods: list[int]) -> None:
    reports, kept, _ = made()
    number = 0
    for flood in floods:
        for _ in range(flood):
            reports.state("PROGRESS", number)
            number += 1
    reports.flush()
    assert kept.metas() == sorted(kept.metas())
    assert kept.metas()[-1:] == ([number - 1] if number else [])


def test_states_that_workers_tell_are_stored_but_not_told_again() -> None:
    reports, kept, told = made()
    for state in ("STARTED", "SUCCESS", "no name at all"):
        reports.state(state, None)
    assert (len(kept.stored), told) == (3, [])


def test_what_cannot_be_sent_is_refused_at_once() -> None:
    reports, kept, _ = made()
    with pytest.raises(WireError):
        reports.state("PROGRESS", object())
    assert kept.stored == []


def test_an_event_that_is_too_large_says_so() -> None:
    reports, _, told = made()
    assert reports.event("task-paid", {"text": "x" * EVENT_MAX_BYTES})
    assert json.loads(told[0].fields) == {"left_out_bytes": EVENT_MAX_BYTES + 11}


@pytest.mark.parametrize(
    "event_type", ["task-succeeded", "worker-online", "worker-mine", "paid", "task-", "task-a b"]
)
def test_types_of_others_are_refused(event_type: str) -> None:
    with pytest.raises(ValueError, match="event type"):
        check_type(event_type)


def test_called_as_a_function_a_task_tells_nobody() -> None:
    app = App("shop", task_always_eager=True)

    @app.task(bind=True)
    def work(self: Task[..., Any]) -> bool:
        self.progress(1, 2)
        return self.send_event("task-paid", cents=5)

    assert work() is False
    result = work.delay()
    assert result.get() is False
    assert result.info is False
