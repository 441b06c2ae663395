"""What a child says of a message it was given, whatever the message."""

from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from umbel import App, Ignore, Reject, Task
from umbel.app.options import SendOptions
from umbel.app.running.tracer import Tracer
from umbel.errors import BrokerUnavailable
from umbel.pools.interface import ChildContext, Job, Outcome
from umbel.wire.message import Message
from umbel.wire.result import decode_result


def job_of(app: App, task: str, *args: Any, redelivered: bool = False, **options: Any) -> Job:
    outgoing = app.prepare(task, args, {}, options).outgoing  # type: ignore[arg-type]
    message = outgoing.message
    return Job(7, task, message.correlation_id, outgoing.queue, message, redelivered=redelivered)


@pytest.fixture
def tracer(app: App) -> Iterator[Tracer]:
    made = Tracer(app, hostname="w@host")
    yield made
    made.close()


def test_a_job_that_may_not_start_any_more_does_not(app: App, tracer: Tracer) -> None:
    ran: list[int] = []
    job = job_of(app, app.task(lambda: ran.append(1)).name)
    outcome = tracer(replace(job, start_by=monotonic() - 0.001))
    assert (outcome.number, outcome.kind, outcome.results, ran) == (7, "late", (), [])
    assert tracer(replace(job, start_by=monotonic() + 600)).kind == "success"
    assert ran == [1]


def test_a_success_carries_its_result_encoded(app: App, tracer: Tracer) -> None:
    task = app.task(lambda: [1, "two"])
    outcome = tracer(job_of(app, task.name, task_id="t"))
    assert (outcome.number, outcome.kind, outcome.summary) == (7, "success", "[1, 'two']")
    [stored] = outcome.results
    assert (stored.task_id, stored.status) == ("t", "SUCCESS")
    assert decode_result(stored.payload).result == [1, "two"]
    assert outcome.runtime_s >= 0


def test_a_failure_carries_exception_and_traceback(app: App, tracer: Tracer) -> None:
    @app.task
    def fail() -> None:
        raise ValueError("why")

    outcome = tracer(job_of(app, fail.name, task_id="t"))
    assert (outcome.kind, outcome.summary) == ("failure", "ValueError('why')")
    [stored] = outcome.results
    found = decode_result(stored.payload)
    assert found.result == {"exc_type": "ValueError", "exc_message": ["why"], "exc_module": "builtins"}
    assert found.traceback == outcome.traceback
    assert outcome.traceback.endswith("ValueError: why\n")


def test_a_very_long_traceback_keeps_its_end(app: App, tracer: Tracer) -> None:
    @app.task
    def fail() -> None:
        raise ValueError("x" * 100_000 + "the end")

    text = tracer(job_of(app, fail.name)).traceback
    assert len(text) <= 64 * 1024 + 1
    assert text.startswith("…")
    assert text.endswith("the end\n")


def test_a_retry_is_the_same_message_with_new_headers(app: App, tracer: Tracer) -> None:
    @app.task(bind=True)
    def fetch(self: Task[..., Any], url: str) -> None:
        self.retry(ConnectionError("host"), eta=1893456000)

    job = job_of(
        app, fetch.name, "u", task_id="t", queue="q", priority=3, headers={"tenant": 7}, reply_to="r"
    )
    outcome = tracer(job)
    assert (outcome.kind, outcome.not_before) == ("retry", 1893456000)
    [again] = outcome.follow_ups
    assert (again.queue, again.not_before) == ("q", 1893456000)
    assert (again.message.body, again.message.priority, again.message.reply_to) == (job.message.body, 3, "r")
    before, after = (msgspec.json.decode(one.headers) for one in (job.message, again.message))
    changed = {name: after[name] for name in after if after[name] != before[name]}
    assert changed == {"retries": 1, "eta": "2030-01-01T00:00:00.000000+00:00", "parent_id": "t"}
    assert decode_result(outcome.results[0].payload).status == "RETRY"


def test_a_redelivered_message_says_so_in_the_request(app: App, tracer: Tracer) -> None:
    @app.task(bind=True)
    def look(self: Task[..., Any]) -> list[Any]:
        return [self.request.delivery_info["redelivered"], self.request.hostname, self.request.is_eager]

    assert tracer(job_of(app, look.name, redelivered=True)).summary == "[True, 'w@host', False]"


@pytest.mark.parametrize(
    ("raised", "kind", "summary", "states"),
    [
        (Ignore(), "ignored", "", []),
        (Reject("not mine"), "rejected", "not mine", ["FAILURE"]),
        (Reject("busy", requeue=True), "requeued", "busy", []),
    ],
)
def test_a_task_may_say_how_it_ends(
    app: App, tracer: Tracer, raised: Exception, kind: str, summary: str, states: list[str]
) -> None:
    @app.task
    def end() -> None:
        raise raised

    outcome = tracer(job_of(app, end.name))
    assert (outcome.kind, outcome.summary, [one.status for one in outcome.results]) == (kind, summary, states)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (Message(b'{"task":"t","id":"i"}', b"[1, 2"), "BadMessage"),
        (Message(b'{"task":"t","id":"i"}', b"[1, {}, {}]"), "BadMessage"),
        (Message(b'{"task":"t","id":"i"}', b"[[], {}, {}]", "application/x-yaml"), "accept_content"),
        (Message(b'{"task":"t","id":"i"}', b"\x80", "application/x-python-serialize"), "not accepted here"),
        (Message(b"not json", b"[[], {}, {}]"), "BadMessage"),
        (Message(b'{"task":"t","id":"i"}', b"[[], {}, {}]"), "NotRegistered: no task named 't'"),
    ],
)
def test_a_message_no_child_can_run_is_rejected_with_the_reason(
    tracer: Tracer, message: Message, problem: str
) -> None:
    outcome = tracer(Job(7, "t", "i", "q", message))
    assert outcome.kind == "rejected"
    assert problem in outcome.summary
    assert [(one.task_id, one.status) for one in outcome.results] == [("i", "FAILURE")]


def test_arguments_that_do_not_fit_fail_the_task(app: App, tracer: Tracer) -> None:
    @app.task(name="shop.pack")
    def pack(box: str) -> None: ...

    outcome = tracer(job_of(app, "shop.pack", 1, 2, 3))
    assert outcome.kind == "failure"
    assert outcome.summary.startswith("TypeError(")


def test_a_backend_that_is_away_does_not_stop_a_tracked_task(
    app: App, tracer: Tracer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(track_started=True)
    def work() -> str:
        return "done"

    def away(results: object) -> None:
        raise BrokerUnavailable("away")

    monkeypatch.setattr(app.backend, "store", away)
    assert tracer(job_of(app, work.name)).kind == "success"
    assert [(one.name, one.message) for one in caplog.records] == [
        ("umbel.task", "cannot store state STARTED; the task runs anyway")
    ]


def test_extended_results_tell_the_call_too(tmp_path: Path) -> None:
    app = App(
        "tests",
        broker=f"sqlite:///{tmp_path}/never.db",
        result_extended=True,
        accept_content=["json", "pickle"],
    )
    task = app.task(name="shop.echo")(lambda value: None)
    tracer = Tracer(app, hostname="w@host")

    def told(outcome: Outcome) -> dict[str, Any]:
        found = msgspec.json.decode(outcome.results[0].payload)
        return {name: found[name] for name in ("name", "args", "kwargs", "worker", "retries", "queue")}

    assert told(tracer(job_of(app, task.name, 1, queue="q"))) == {
        "name": "shop.echo",
        "args": [1],
        "kwargs": {},
        "worker": "w@host",
        "retries": 0,
        "queue": "q",
    }
    object_of_no_json = {3j}
    # A pickled argument need not have a form in JSON; then it is told as text.
    outcome = tracer(job_of(app, task.name, object_of_no_json, serializer="pickle"))
    assert outcome.kind == "success"
    assert told(outcome)["args"] == "({3j},)"


def test_a_started_child_runs_jobs_until_it_is_stopped(app: App) -> None:
    @app.task
    async def add(a: int, b: int) -> int:
        return a + b

    run = app.start_child(ChildContext("w@host", 0))
    assert run(job_of(app, add.name, 1, 2)).summary == "3"
    app.stop_child()


# -- whatever a peer may have written --------------------------------------------------------------

odd: list[Any] = [None, True, 0, -1, 2**70, "", "x", [[]], {"a": []}]
anything = st.sampled_from(odd)
option_names = st.sampled_from([*SendOptions.__annotations__, "no_such_option"])


def signature_maps(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {"task": st.sampled_from(["ok", "fail", "again", "unknown", "celery.chain"])},
        optional={
            "args": st.lists(anything, max_size=2) | anything,
            "kwargs": st.fixed_dictionaries({"tasks": st.lists(inner, max_size=2)}) | anything,
            "options": st.dictionaries(option_names, anything, max_size=3),
            "subtask_type": st.sampled_from([None, "chain", "group"]),
            "immutable": st.booleans(),
        },
    )


signatures = st.recursive(st.just({"task": "ok"}), signature_maps, max_leaves=3)
embeds = st.dictionaries(
    st.sampled_from(["callbacks", "errbacks", "chain"]), st.lists(signatures, max_size=2), max_size=3
)


@settings(max_examples=60)
@given(st.sampled_from(["ok", "fail", "again", "unknown"]), embeds)
def test_no_follow_up_a_message_asks_for_can_break_the_child(task: str, embed: Any) -> None:
    app = App("tests", broker="sqlite:////never/opened.db")

    @app.task(name="ok")
    def ok(*args: Any, **kwargs: Any) -> None: ...

    @app.task(name="fail")
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError

    @app.task(name="again", bind=True)
    def again(self: Task[..., Any], *args: Any) -> None:
        self.retry()

    message = Message(f'{{"task":"{task}","id":"t"}}'.encode(), msgspec.json.encode([[], {}, embed]))
    outcome = Tracer(app, hostname="w@host")(Job(1, task, "t", "q", message))
    assert outcome.kind in ("success", "failure", "retry", "rejected")
    # It must survive the way to the parent, too.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(outcome), type=Outcome).kind == outcome.kind


@pytest.mark.parametrize("task_id", [5, [], "", "a\0b", "x" * 256])
def test_a_call_whose_next_step_cannot_be_sent_is_refused_before_it_runs(
    app: App, tracer: Tracer, task_id: Any
) -> None:
    """N1: a task that has run must not fail because of what was wrong with its message from the start."""
    ran: list[int] = []

    @app.task
    def note() -> None:
        ran.append(1)

    chain = [{"task": "x", "options": {"task_id": "fine"}}, {"task": "x", "options": {"task_id": task_id}}]
    outcome = tracer(job_of(app, note.name, task_id="t", chain=chain))
    assert (outcome.kind, ran, [one.task_id for one in outcome.results]) == ("rejected", [], ["t"])
    assert "task_id" in outcome.summary
