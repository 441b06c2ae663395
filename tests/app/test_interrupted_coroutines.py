"""A coroutine in a child is interrupted where it waits, whatever its loop is at just then (P3)."""

import asyncio
import random
import signal
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest

from tests.app.test_tracer import job_of
from tests.waiting import wait_until
from umbel import App
from umbel.app.running.own_loop import InterruptibleLoop
from umbel.app.running.tracer import Tracer
from umbel.errors import SoftTimeLimitExceeded, TaskCancelled
from umbel.pools.guard import interrupt_here
from umbel.pools.threads import JobBegan, JobEnded, Report, ThreadEnded, ThreadWorkers

ENOUGH_S = 60.0
ROUNDS = 60
TURNS_MAX = 200_000  # of a loop that nothing has ended
Arm = Callable[[], object]  # have the signal come soon


@contextmanager
def signals_raise(error: Exception) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, lambda *_: interrupt_here(error))
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


class Turn:
    """Lets the loop turn once."""

    def __await__(self) -> Generator[None]:
        yield


async def turns(arm: Arm) -> None:
    arm()
    for _ in range(TURNS_MAX):
        await Turn()


async def waits_briefly(arm: Arm) -> None:
    arm()
    for _ in range(TURNS_MAX):
        woken = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.0001, wake, woken)
        await woken


def wake(waiting: "asyncio.Future[None]") -> None:
    if not waiting.done():
        waiting.set_result(None)


async def waits(arm: Arm) -> None:
    arm()
    await asyncio.Event().wait()


async def holds_a_group(arm: Arm) -> None:
    async with asyncio.timeout(600), asyncio.TaskGroup() as group:
        for one in (list, list, arm):
            group.create_task(turns(one))


async def waits_in_a_group(arm: Arm) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(turns(list))
        await waits(arm)


async def computes_in_a_group(arm: Arm) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(turns(list))
        await computes(arm)


async def another_computes(arm: Arm) -> None:
    await asyncio.gather(turns(list), computes(arm))


async def computes(arm: Arm) -> None:
    arm()
    for _ in range(TURNS_MAX * 1000):
        pass


WAYS = [
    turns,
    waits_briefly,
    waits,
    holds_a_group,
    waits_in_a_group,
    computes_in_a_group,
    computes,
    another_computes,
]


@pytest.mark.parametrize("wait", WAYS)
def test_a_cancel_ends_it_at_any_moment(app: App, wait: Callable[[Arm], Coroutine[Any, Any, None]]) -> None:
    tidied: list[str] = []

    @app.task
    async def task() -> None:
        try:
            await wait(lambda: signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.0001, 0.01)))
        finally:
            tidied.append("up")

    @app.task
    async def left_over() -> list[str]:
        await Turn()
        return sorted(str(one.get_coro()) for one in asyncio.all_tasks())

    tracer, moments = Tracer(app, hostname="w@host"), random.Random(1)
    for _ in range(ROUNDS):
        tidied.clear()
        with signals_raise(TaskCancelled("cancelled")):
            ended = tracer(job_of(app, task.name))
        assert (ended.kind, tidied) == ("cancelled", ["up"])
    assert tracer(job_of(app, left_over.name)).summary.count("left_over") == 1
    tracer.close()


def test_at_its_soft_limit_it_may_tidy_up_with_awaits(app: App) -> None:
    tidied: list[str] = []

    @app.task
    async def task() -> None:
        try:
            await waits(lambda: signal.setitimer(signal.ITIMER_REAL, 0.001))
        finally:
            await Turn()
            tidied.append("up")

    tracer = Tracer(app, hostname="w@host")
    with signals_raise(SoftTimeLimitExceeded("soft time limit exceeded")):
        ended = [tracer(job_of(app, task.name)) for _ in range(3)]
    assert {one.summary for one in ended} == {"SoftTimeLimitExceeded('soft time limit exceeded')"}
    assert tidied == ["up"] * 3
    tracer.close()


def test_what_comes_when_it_has_just_ended_is_not_lost() -> None:
    """A plain task may run one coroutine after the other."""

    async def ends() -> None:
        current = asyncio.current_task()
        assert current is not None
        current.add_done_callback(lambda _: interrupt_here(TaskCancelled("cancelled")))

    loop = InterruptibleLoop()
    for _ in range(3):
        with pytest.raises(TaskCancelled):
            loop.run(ends())
    loop.close()


class ChosenLoop(asyncio.SelectorEventLoop):
    """What an app's policy makes."""


def test_a_loop_that_the_app_has_chosen_is_interrupted_too(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    went_on: list[str] = []

    @app.task
    async def task() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=ENOUGH_S)
        went_on.append(type(asyncio.get_running_loop()).__name__)

    monkeypatch.setattr(asyncio, "new_event_loop", ChosenLoop)
    tracer = Tracer(app, hostname="w@host")
    with signals_raise(TaskCancelled("cancelled")):
        assert (tracer(job_of(app, task.name)).kind, went_on) == ("cancelled", [])
    tracer.close()


def test_one_that_fails_while_it_tidies_up_was_cancelled_all_the_same(app: App) -> None:
    @app.task
    async def task() -> None:
        try:
            await waits(lambda: signal.setitimer(signal.ITIMER_REAL, 0.001))
        finally:
            raise LookupError("gone")

    tracer = Tracer(app, hostname="w@host")
    with signals_raise(TaskCancelled("cancelled")):
        assert tracer(job_of(app, task.name)).kind == "cancelled"
    tracer.close()


def test_in_a_thread_it_is_woken_to_be_cancelled(app: App) -> None:
    """Nothing else would wake the loop; a plain function waits in C and gets it when that returns."""
    tidied: list[str] = []

    @app.task
    async def task() -> None:
        try:
            await waits(began.set)
        except asyncio.CancelledError:
            await Turn()
            tidied.append("up")
            raise

    tracer, reports, began = Tracer(app, hostname="w@host"), SimpleQueue[Report](), threading.Event()
    workers = ThreadWorkers("test", tracer, reports.put)
    workers.start_threads(1)
    for _ in range(3):
        began.clear()
        job = job_of(app, task.name)
        workers.put(job)
        assert isinstance(reports.get(timeout=ENOUGH_S), JobBegan)
        assert began.wait(ENOUGH_S)
        wait_until(partial(workers.raise_in, job.number, TaskCancelled), what="the right moment")
        ended = reports.get(timeout=ENOUGH_S)
        assert isinstance(ended, JobEnded)
        assert ended.outcome.kind == "cancelled"
    workers.stop_threads(1)
    assert isinstance(reports.get(timeout=ENOUGH_S), ThreadEnded)
    assert tidied == ["up"] * 3
    tracer.close()
