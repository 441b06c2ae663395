"""What an outcome carries beside its kind: who, where, what follows, how much of it is shown."""

import asyncio
import io
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Lock
from time import time
from typing import Any

import msgspec
import pytest

from tests.app.test_tracer import job_of
from umbel import App, Reject, Task, chord
from umbel.app.app import make_tracer
from umbel.app.running.async_tracer import AsyncTracer
from umbel.app.running.child_logs import LoggedStream
from umbel.app.running.progress import BURST
from umbel.app.running.tracer import (
    EXCEPTION_ARGS_MAX,
    EXCEPTION_MAX_CHARS,
    SUMMARY_MAX_CHARS,
    Tracer,
)
from umbel.backends.interface import ChordPart
from umbel.clock import correct, offset_s
from umbel.errors import BrokerUnavailable, Retry, TaskCancelled, WorkerStopping
from umbel.pools.interface import ChildContext, Job, UserEvent
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
    assert found.keys() & {"name", "args", "kwargs", "worker", "retries", "queue"} == set()


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
        assert outcome.summary
        app.tasks.pop("fail")  # for the next one


def test_what_was_cancelled_is_not_tried_again_whatever_is(app: App, tracer: Tracer) -> None:
    @app.task(name="stubborn", autoretry_for=(Exception, TaskCancelled))
    def stubborn() -> None:
        raise TaskCancelled("t")

    assert tracer(job_of(app, stubborn.name)).kind == "cancelled"


def released_twice(interruption: Exception) -> None:
    """As after a signal between two steps of `Condition.wait()`."""
    lock = Lock()
    with lock:
        lock.release()
        raise interruption


def retried_for_it(interruption: Exception) -> None:
    try:
        raise interruption
    except Exception as error:
        raise Retry(exc=error) from error


def failed_to_clean_up(interruption: Exception) -> None:
    try:
        raise interruption
    finally:
        raise KeyError("its connection")


def fails_on_purpose(interruption: Exception) -> None:
    try:
        raise interruption
    except TaskCancelled:
        raise ValueError("its own") from None


def retries_on_purpose(interruption: Exception) -> None:
    try:
        raise interruption
    except TaskCancelled:
        raise Retry(when=1.0) from None


def goes_in_circles(interruption: Exception) -> None:
    error, other = ValueError("a"), ValueError("b")
    error.__cause__, other.__cause__ = other, error
    raise error


@pytest.mark.parametrize(
    ("interruption", "kind"), [(WorkerStopping(), "requeued"), (TaskCancelled("t"), "cancelled")]
)
@pytest.mark.parametrize("way", [released_twice, retried_for_it, failed_to_clean_up])
def test_what_an_interruption_breaks_is_not_a_failure_of_the_task(
    app: App, tracer: Tracer, way: Callable[[Exception], None], interruption: Exception, kind: str
) -> None:
    @app.task(name="broken", autoretry_for=(RuntimeError, KeyError))
    def broken() -> None:
        way(interruption)

    outcome = tracer(job_of(app, broken.name))
    assert (outcome.kind, list(outcome.results), list(outcome.follow_ups)) == (kind, [], [])


@pytest.mark.parametrize(
    ("way", "kind"),
    [(fails_on_purpose, "failure"), (retries_on_purpose, "retry"), (goes_in_circles, "failure")],
)
def test_what_a_task_says_on_purpose_when_it_is_interrupted_is_kept(
    app: App, tracer: Tracer, way: Callable[[Exception], None], kind: str
) -> None:
    assert tracer(job_of(app, app.task(name="own")(lambda: way(TaskCancelled("t"))).name)).kind == kind


@pytest.mark.parametrize(("given", "said"), [("not mine", "not mine"), ("", "rejected by the task")])
def test_who_waits_for_a_rejected_task_is_told_why(app: App, tracer: Tracer, given: str, said: str) -> None:
    outcome = tracer(job_of(app, failing(app, Reject(given))))
    found = decode_result(outcome.results[0].payload)
    assert (found.result["exc_type"], found.result["exc_message"]) == ("TaskRejected", [said])
    assert "in fail" in (found.traceback or "")


def test_an_endless_reason_is_cut(app: App, tracer: Tracer) -> None:
    outcome = tracer(job_of(app, failing(app, Reject("x" * 2 * SUMMARY_MAX_CHARS, requeue=True))))
    assert outcome.kind == "requeued"
    assert SUMMARY_MAX_CHARS - 10 < len(outcome.summary) <= SUMMARY_MAX_CHARS + len("...")


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
    assert not any(decode_result(one.payload).traceback for one in refused.results)  # nothing ran
    assert [(one.task_id, one.status) for one in refused.results] == [("t", "FAILURE"), ("next", "FAILURE")]
    assert refused.kind == "rejected"


@pytest.mark.parametrize(
    ("raised", "ended"), [(None, "failure"), (KeyError(), "failure"), (Reject("odd"), "rejected")]
)
@pytest.mark.parametrize(
    ("problem", "may_help"),
    [
        (WorkerStopping(), True),
        (BrokerUnavailable("away"), True),  # once its time limits allow no more waiting
        (ValueError("a bug"), False),
    ],
)
def test_a_part_that_its_chord_cannot_count_is_left_to_redelivery_if_that_may_help(
    app: App,
    tracer: Tracer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    raised: Exception | None,
    ended: str,
    problem: Exception,
    may_help: bool,
) -> None:
    def refuse(_: object) -> None:
        raise problem

    monkeypatch.setattr(app.backend, "add_chord_part", refuse)
    name = failing(app, raised) if raised else app.task(name="part")(lambda: 5).name
    job = job_of(app, name, task_id="t", group_id="g", chord={"task": "body", "options": {"task_id": "b"}})
    outcome = tracer(msgspec.structs.replace(job, soft_limit_s=0.5))
    assert not any("waiting" in record.getMessage() for record in caplog.records)
    states = [(one.task_id, one.status) for one in outcome.results]
    assert (outcome.kind, states) == (("requeued", []) if may_help else (ended, [("t", "FAILURE")]))
    assert list(outcome.follow_ups) == []
    assert (str(problem) in outcome.summary) is (may_help or raised is None)


@pytest.mark.parametrize("fails", [False, True])
def test_a_chain_whose_end_is_a_part_of_a_chord_is_counted_when_a_step_fails(
    app: App, tracer: Tracer, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    counted: list[ChordPart] = []
    monkeypatch.setattr(app.backend, "add_chord_part", counted.append)
    end = {"task_id": "end", "group_id": "g", "chord": {"task": "body", "options": {"task_id": "b"}}}
    name = failing(app, KeyError()) if fails else app.task(name="step")(lambda: 5).name
    outcome = tracer(job_of(app, name, chain=[{"task": "x", "options": end}]))
    assert outcome.kind == ("failure" if fails else "success")
    assert [(one.task_id, one.status) for one in counted] == ([("end", "FAILURE")] if fails else [])


def test_a_task_whose_next_step_cannot_be_begun_now_is_left_to_redelivery(
    app: App, tracer: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise BrokerUnavailable("away")

    monkeypatch.setattr(app.backend, "start_chord", away)
    first = app.task(name="first")(lambda: 5)
    step: Any = chord([first.s(), first.s()], first.s()).to_map()
    outcome = tracer(job_of(app, first.name, chain=[step]))
    assert (outcome.kind, list(outcome.results), list(outcome.follow_ups)) == ("requeued", [], [])


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_task_sent_while_the_broker_was_away_goes_out_with_its_end(
    tmp_path: Path, fails: bool
) -> None:
    def away(_: object) -> None:
        raise BrokerUnavailable("away")

    made = App("tests", broker=f"sqlite:///{tmp_path}/umbel.db", publish_timeout_s=0)
    with closing(made) as app, pytest.MonkeyPatch.context() as patch:
        other = app.task(name="other")(lambda *_: None)
        patch.setattr(app.producer, "publish", away)

        @app.task(name="send")
        def send() -> None:
            other.apply_async(task_id="sent")
            assert not fails

        link = other.s().set(task_id="link")
        outcome = Tracer(app, hostname="w@host")(job_of(app, send.name, link=[link]))
        ids = [one.message.correlation_id for one in outcome.follow_ups]
        assert (outcome.kind, ids) == (("failure", ["sent"]) if fails else ("success", ["sent", "link"]))


def test_a_task_that_cancels_itself_has_failed(app: App, tracer: Tracer) -> None:
    outcome = tracer(job_of(app, failing(app, asyncio.CancelledError("why"))))
    assert (outcome.kind, outcome.summary.partition("(")[0]) == ("failure", "TaskError")


@pytest.mark.parametrize(("is_eager", "known_s"), [(False, 50.0), (True, 3.0)])
def test_a_child_takes_over_its_workers_correction_of_the_clock(
    app: App, is_eager: bool, known_s: float
) -> None:
    """A task that runs in the caller's process leaves the caller's clock alone."""
    task = app.task(name="when")(offset_s)
    correct(3.0)
    try:
        tracer = Tracer(app, hostname="w@host", is_eager=is_eager)
        corrected, as_before = (
            msgspec.structs.replace(job_of(app, task.name), clock_offset_s=by_s) for by_s in (50.0, 3.0)
        )
        assert tracer(corrected).summary == str(known_s)
        assert tracer(as_before).summary == "3.0"
    finally:
        correct(0.0)


def test_what_a_task_tells_is_told_as_of_its_job_and_the_last_of_it_before_its_result(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[UserEvent] = []
    monkeypatch.setattr(app.backend, "store", lambda _: None)

    @app.task(bind=True, name="talk")
    def talk(self: Task[..., Any]) -> None:
        for place in range(BURST + 5):
            self.update_state(state="PROGRESS", meta={"place": place})

    outcome = Tracer(app, hostname="w@host", send_event=told.append)(job_of(app, talk.name))
    assert outcome.kind == "success"
    assert {(one.number, one.event_type) for one in told} == {(7, "task-progress")}
    assert msgspec.json.decode(told[-1].fields) == {"place": BURST + 4}


def test_a_line_that_a_task_began_is_logged_when_it_ends(
    app: App, tracer: Tracer, caplog: pytest.LogCaptureFixture
) -> None:
    stream = LoggedStream("printed", logging.WARNING, io.StringIO())

    def say() -> None:
        stream.write("half a line")

    tracer(job_of(app, app.task(name="say")(say).name))
    assert [record.message for record in caplog.records] == ["half a line"]


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
    assert outcome.kind == "failure" and "not a time" in outcome.summary
