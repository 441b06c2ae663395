"""Calls of `async def` tasks on a loop that many share (F10): each ending is told as in a child."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.app.test_tracer import job_of
from umbel import App
from umbel.app.app import make_tracer
from umbel.app.request import current_request
from umbel.app.running.async_tracer import AsyncTracer
from umbel.app.running.tracer import Tracer
from umbel.pools.interface import ChildContext, Outcome
from umbel.pools.loop_thread import CancelAsked, SoftLimitPassed, WorkerStops


@pytest.fixture
def tracer(app: App) -> AsyncTracer:
    return AsyncTracer(app, hostname="w@host")


def test_a_child_gets_the_tracer_that_its_pool_needs(app: App) -> None:
    assert type(make_tracer(app, ChildContext("w@host", 0))) is Tracer
    assert type(make_tracer(app, ChildContext("w@host", 0, on_loop=True))) is AsyncTracer


def test_each_coroutine_sees_its_own_request(app: App, tracer: AsyncTracer) -> None:
    together = asyncio.Barrier(50)

    @app.task
    async def who() -> str:
        await together.wait()
        request = current_request()
        assert request is not None
        return request.id

    async def scenario() -> list[Outcome]:
        jobs = [job_of(app, who.name, task_id=f"t{number}") for number in range(50)]
        return await asyncio.gather(*map(tracer.run, jobs))

    outcomes = asyncio.run(scenario())
    assert [outcome.summary for outcome in outcomes] == [f"'t{number}'" for number in range(50)]


def test_arguments_are_of_the_types_that_the_task_states(app: App, tracer: AsyncTracer) -> None:
    @app.task
    async def name_of(path: Path) -> str:
        return path.name

    fits = job_of(app, name_of.name, "/a/b")
    stranger = App("stranger", broker="sqlite:////nowhere/stranger.db")
    stranger.task(name=name_of.name)(lambda path: None)
    outcomes = [asyncio.run(tracer.run(job)) for job in (fits, job_of(stranger, name_of.name, 5))]
    assert [one.kind for one in outcomes] == ["success", "failure"]
    assert outcomes[0].summary == "'b'"
    assert outcomes[1].summary.startswith("WrongType(\"argument 'path' of")


@pytest.mark.parametrize(
    ("error", "kind", "summary"),
    [
        (ValueError("why"), "failure", "ValueError('why')"),
        (SoftLimitPassed(), "failure", "SoftTimeLimitExceeded('soft time limit exceeded')"),
        (WorkerStops(), "requeued", "the worker is shutting down"),
        (CancelAsked(), "cancelled", "TaskCancelled('cancelled')"),
        (ExceptionGroup("in a TaskGroup", [WorkerStops()]), "requeued", "the worker is shutting down"),
        (
            asyncio.CancelledError(),
            "failure",
            "TaskError('the task awaited something that had been cancelled",
        ),
    ],
)
def test_an_exception_ends_it_as_what_it_means(
    app: App, tracer: AsyncTracer, error: BaseException, kind: str, summary: str
) -> None:
    @app.task
    async def fail() -> None:
        raise error

    outcome = asyncio.run(tracer.run(job_of(app, fail.name)))
    assert outcome.kind == kind
    assert outcome.summary.startswith(summary) or kind == "cancelled"


def test_who_cancels_it_from_outside_gets_the_cancellation(app: App, tracer: AsyncTracer) -> None:
    begun = asyncio.Event()

    @app.task
    async def wait() -> None:
        begun.set()
        await asyncio.Event().wait()

    async def scenario() -> None:
        running = asyncio.ensure_future(tracer.run(job_of(app, wait.name)))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scenario())


def test_errbacks_run_off_the_loop(app: App, tracer: AsyncTracer) -> None:
    ran_in: list[int] = []

    @app.task
    def on_error(request: Any, error: Any, traceback: Any) -> None:
        ran_in.append(threading.get_ident())

    @app.task
    async def fail() -> None:
        raise ValueError("why")

    outcome = asyncio.run(tracer.run(job_of(app, fail.name, link_error=on_error.s())))
    assert outcome.kind == "failure"
    (thread,) = ran_in
    assert thread != threading.get_ident()


def test_async_tasks_in_several_threads_have_loops_of_their_own(app: App) -> None:
    """The plain way, as in the threads pool: each thread keeps its loop."""
    loops: list[tuple[int, asyncio.AbstractEventLoop]] = []
    together = threading.Barrier(2)

    @app.task
    async def where() -> None:
        loops.append((threading.get_ident(), asyncio.get_running_loop()))
        await asyncio.to_thread(together.wait, 10)

    plain = Tracer(app, hostname="w@host")

    def work() -> None:
        for _ in range(2):
            plain(job_of(app, where.name))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(loops) == 4
    assert len({id(loop) for _, loop in loops}) == 2
    assert len(set(loops)) == 2
    plain.close()
