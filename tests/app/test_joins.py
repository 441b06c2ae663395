"""F9: a task that waits for another's result could wait for ever; it is told so, not left to hang."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import time
from typing import Any

import pytest

from umbel import App, GroupResult
from umbel.app.running.tracer import Tracer
from umbel.backends.sqlite import SqliteBackend
from umbel.errors import JoinWouldBlock
from umbel.pools.interface import Job, Outcome
from umbel.wire.result import encode_success


def run_as_worker(app: App, function: Callable[..., Any]) -> Outcome:
    """Run it the way a child does; `other` is a task whose result is already there."""
    task = app.task(function)
    app.backend.store([encode_success("other", 5, done_at=time())])
    message = app.prepare(task.name, (), {}, {}).outgoing.message
    tracer = Tracer(app, hostname="w@host")
    try:
        return tracer(Job(1, task.name, message.correlation_id, "celery", message))
    finally:
        tracer.close()


def test_waiting_inside_a_task_is_refused_with_both_tasks_and_the_remedy(app: App) -> None:
    def wait() -> Any:
        return app.AsyncResult("other").get()

    outcome = run_as_worker(app, wait)
    assert outcome.kind == "failure"
    assert JoinWouldBlock.__name__ in outcome.summary
    assert f"{__name__}.wait[" in outcome.summary
    assert "waits for the result of other" in outcome.summary
    assert "allow_join=True" in outcome.summary


def test_awaiting_inside_a_task_is_refused_too(app: App) -> None:
    async def wait() -> Any:
        return await app.AsyncResult("other")

    assert JoinWouldBlock.__name__ in run_as_worker(app, wait).summary


def test_the_call_may_allow_it(app: App) -> None:
    def wait() -> Any:
        return app.AsyncResult("other").get(allow_join=True)

    async def wait_async() -> Any:
        return await app.AsyncResult("other").aget(allow_join=True)

    assert [run_as_worker(app, function).summary for function in (wait, wait_async)] == ["5", "5"]


def test_the_setting_may_allow_it_and_the_call_forbid_it_again(tmp_path: Path) -> None:
    app = App("tests", broker=f"sqlite:///{tmp_path}/umbel.db", task_allow_join=True)

    def wait() -> Any:
        return app.AsyncResult("other").get()

    def wait_not() -> Any:
        return app.AsyncResult("other").get(allow_join=False)

    assert run_as_worker(app, wait).summary == "5"
    assert JoinWouldBlock.__name__ in run_as_worker(app, wait_not).summary
    app.close()


def test_looking_without_waiting_is_always_allowed(app: App) -> None:
    def look() -> Any:
        other = app.AsyncResult("other")
        return [other.state, other.ready(), other.result]

    assert run_as_worker(app, look).summary == "['SUCCESS', True, 5]"


def test_outside_a_task_nobody_is_hindered(app: App) -> None:
    app.backend.store([encode_success("other", 5, done_at=time())])
    assert app.AsyncResult("other").get() == 5


def test_waiting_for_a_group_inside_a_task_is_refused_before_anything_is_waited_for(app: App) -> None:
    never = GroupResult("g", [app.AsyncResult("never sent"), app.AsyncResult("other")], app=app)

    def wait() -> Any:
        return never.get()

    async def wait_async() -> Any:
        return await never

    for function in (wait, wait_async):
        assert JoinWouldBlock.__name__ in run_as_worker(app, function).summary


def test_the_call_may_allow_waiting_for_a_group(app: App) -> None:
    others = GroupResult("g", [app.AsyncResult("other")], app=app)

    def wait() -> Any:
        return others.get(allow_join=True)

    async def wait_async() -> Any:
        return await others.aget(allow_join=True)

    assert [run_as_worker(app, function).summary for function in (wait, wait_async)] == ["[5]", "[5]"]


def test_a_group_waits_once_for_all_its_results(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever portions they come in: to wait again for the rest after each would be quadratic."""
    ids = [str(number) for number in range(30)]
    waits: list[int] = []
    wait = SqliteBackend.wait

    def counted(backend: SqliteBackend, task_ids: Iterable[str], *rest: Any) -> Any:
        wanted = list(task_ids)
        waits.append(len(wanted))
        return wait(backend, wanted, *rest)

    monkeypatch.setattr(SqliteBackend, "wait", counted)
    group = GroupResult("g", [app.AsyncResult(one) for one in ids], app=app)
    with ThreadPoolExecutor(1) as threads:
        joined = threads.submit(group.get, 60)
        for one in ids:
            app.backend.store([encode_success(one, int(one), done_at=time())])
        assert joined.result(60) == list(range(30))
    assert waits == [30]


def test_in_eager_mode_it_is_allowed_because_it_never_waits(app: App) -> None:
    @app.task
    def inner() -> int:
        return 5

    @app.task
    def outer() -> int:
        return inner.delay().get()

    with app.eager():
        assert outer.delay().get() == 5


def test_it_is_an_error_of_use_for_those_who_catch_runtime_errors() -> None:
    with pytest.raises(RuntimeError):
        raise JoinWouldBlock
