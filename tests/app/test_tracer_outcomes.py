"""What an outcome carries beside its kind: who, where, what follows, how much of it is shown."""

import os
from collections.abc import Iterator
from time import time
from typing import Any

import msgspec
import pytest

from tests.app.test_tracer import job_of
from umbel import App, Task
from umbel.app.running.async_tracer import AsyncTracer
from umbel.app.running.tracer import EXCEPTION_ARGS_MAX, EXCEPTION_MAX_CHARS, Tracer
from umbel.app.running.tracers import make_tracer
from umbel.errors import Retry, TaskCancelled, WorkerStopping
from umbel.pools.interface import ChildContext, Job
from umbel.wire.message import Message, StoredResult
from umbel.wire.result import decode_result


@pytest.fixture
def tracer(app: App) -> Iterator[Tracer]:
    made = Tracer(app, hostname="w@host")
    yield made
    made.close()


def stored(result: StoredResult) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(result.payload)
    return found


def failing(app: App, error: BaseException) -> str:
    def fail() -> None:
        raise error

    return app.task(name="fail")(fail).name


def test_a_result_says_to_what_its_task_belongs_and_what_it_sent(app: App, tracer: Tracer) -> None:
    other = app.task(name="other")(lambda: None)
    parent = app.task(name="parent")(lambda: other.delay().id)
    outcome = tracer(job_of(app, parent.name, task_id="t", group_id="g", parent_id="p"))
    found = stored(outcome.results[0])
    assert (found["task_id"], found["group_id"], found["parent_id"]) == ("t", "g", "p")
    assert [child[0][0] for child in found["children"]] == [found["result"]]


def test_a_tracked_task_is_shown_as_started_by_whom(
    app: App, tracer: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[StoredResult] = []
    monkeypatch.setattr(app.backend, "store", kept.extend)
    task = app.task(name="work", track_started=True)(lambda: None)
    tracer(job_of(app, task.name, task_id="t", reply_to="client"))
    (started,) = kept
    assert (started.task_id, started.status, started.reply_to) == ("t", "STARTED", "client")
    assert decode_result(started.payload).result == {"pid": os.getpid(), "hostname": "w@host"}
    tracer(job_of(app, app.task(name="quiet")(lambda: None).name))
    assert len(kept) == 1


def test_what_stops_with_the_worker_goes_back_and_what_was_cancelled_is_left_to_it(
    app: App, tracer: Tracer
) -> None:
    for error, kind in ((WorkerStopping(), "requeued"), (TaskCancelled("t"), "cancelled")):
        outcome = tracer(job_of(app, failing(app, error)))
        assert (outcome.kind, list(outcome.results), list(outcome.follow_ups)) == (kind, [], [])
        app.tasks.pop("fail")  # for the next one


def test_what_was_cancelled_is_not_tried_again_whatever_is(app: App, tracer: Tracer) -> None:
    @app.task(name="stubborn", autoretry_for=(Exception, TaskCancelled))
    def stubborn() -> None:
        raise TaskCancelled("t")

    assert tracer(job_of(app, stubborn.name)).kind == "cancelled"


def test_who_asked_for_one_retry_too_many_is_told_where(app: App, tracer: Tracer) -> None:
    @app.task(name="again", max_retries=0)
    def again() -> None:
        raise Retry

    outcome = tracer(job_of(app, again.name))
    assert (outcome.kind, outcome.summary.partition("(")[0]) == ("failure", "MaxRetriesExceeded")
    assert "in again" in outcome.traceback


def test_a_long_list_of_what_an_exception_carries_is_cut(app: App, tracer: Tracer) -> None:
    most = list(range(EXCEPTION_ARGS_MAX))
    for given, shown in ((most, most), ([*most, 16, 17], [*most, "…"])):
        outcome = tracer(job_of(app, failing(app, ValueError(*given))))
        assert decode_result(outcome.results[0].payload).result["exc_message"] == shown
        app.tasks.pop("fail")


def test_an_exception_without_a_repr_is_named_by_its_type(app: App, tracer: Tracer) -> None:
    class Shy(Exception):
        def __repr__(self) -> str:
            raise ValueError

    outcome = tracer(job_of(app, failing(app, Shy())))
    assert (outcome.kind, outcome.summary) == ("failure", "<Shy>")


def test_a_long_exception_is_shown_up_to_its_limit(app: App, tracer: Tracer) -> None:
    outcome = tracer(job_of(app, failing(app, ValueError("x" * 3 * EXCEPTION_MAX_CHARS))))
    assert EXCEPTION_MAX_CHARS - 10 < len(outcome.summary) <= EXCEPTION_MAX_CHARS + len("...")


def test_a_failure_ends_the_steps_that_will_never_run(app: App, tracer: Tracer) -> None:
    chain = [{"task": "x", "options": {"task_id": "next"}}]
    outcome = tracer(job_of(app, failing(app, ValueError("why")), task_id="t", chain=chain))
    assert [(one.task_id, one.status) for one in outcome.results] == [("t", "FAILURE"), ("next", "FAILURE")]
    unknown = job_of(app, "no.such", task_id="t", chain=chain)
    refused = tracer(unknown)
    assert [(one.task_id, one.status) for one in refused.results] == [("t", "FAILURE"), ("next", "FAILURE")]
    assert refused.kind == "rejected"


def test_a_task_that_keeps_no_result_still_has_its_outcome(app: App, tracer: Tracer) -> None:
    quiet = app.task(name="quiet", ignore_result=True)(lambda: 5)
    outcome = tracer(job_of(app, quiet.name))
    assert (outcome.kind, outcome.summary, list(outcome.results)) == ("success", "5", [])


def test_an_outcome_says_when_it_began_and_how_long_it_took(app: App, tracer: Tracer) -> None:
    before = time()
    outcome = tracer(job_of(app, app.task(name="quick")(lambda: None).name))
    assert before <= outcome.started_at <= time()
    assert 0 < outcome.runtime_s <= time() - before + 0.001
    assert outcome.not_before == 0.0


def test_a_task_may_be_handed_itself_and_may_return_a_coroutine(app: App, tracer: Tracer) -> None:
    async def later(value: int) -> int:
        return value + 1

    @app.task(bind=True, name="bound")
    def bound(self: Task[..., Any], value: int) -> Any:
        assert self.name == "bound"
        return later(value)

    assert tracer(job_of(app, bound.name, 1)).summary == "2"


def test_signals_say_what_a_task_was_given_and_how_it_ended(app: App, tracer: Tracer) -> None:
    told: list[tuple[str, dict[str, Any]]] = []

    def hear(name: str) -> Any:
        def heard(**fields: Any) -> None:
            fields.pop("task")
            told.append((name, fields))

        return heard

    hearers = {name: hear(name) for name in ("prerun", "postrun", "success", "failure")}
    for name, hearer in hearers.items():
        getattr(app.signals, f"task_{name}").connect(hearer)
    echo = app.task(name="echo")(lambda value: value)
    tracer(job_of(app, echo.name, 5, task_id="t"))
    given = {"task_id": "t", "args": [5], "kwargs": {}}
    assert told == [
        ("prerun", given),
        ("success", {"task_id": "t", "result": 5}),
        ("postrun", given | {"state": "success", "value": 5}),
    ]
    told.clear()
    error = ValueError("why")
    tracer(job_of(app, failing(app, error), task_id="t"))
    assert [name for name, _ in told] == ["prerun", "failure", "postrun"]
    assert (told[1][1]["error"], told[2][1]["value"], told[2][1]["state"]) == (error, error, "failure")


def test_a_child_on_a_loop_gets_a_tracer_that_can_be_awaited(app: App) -> None:
    for on_loop in (False, True):
        made = make_tracer(app, ChildContext("w@host", 0, on_loop=on_loop))
        assert isinstance(made, AsyncTracer) is on_loop
        made.close()


def test_an_unreadable_message_ends_under_the_id_the_worker_knows(tracer: Tracer) -> None:
    outcome = tracer(Job(7, "t", "known", "q", Message(b"{", b"[]")))
    assert (outcome.number, [one.task_id for one in outcome.results]) == (7, ["known"])


@pytest.mark.parametrize("when", [1e300, float("nan"), -1e300, "soon"])
def test_a_retry_at_no_time_fails_the_task(app: App, tracer: Tracer, when: Any) -> None:
    """N1: and its child lives."""
    outcome = tracer(job_of(app, failing(app, Retry(when=when))))
    assert outcome.kind == "failure" and "no time" in outcome.summary
