"""Eager mode takes the worker's path: encode, decode, trace, store. Only the waiting is left out."""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any

import pytest

from umbel import App, AsyncResult, Ignore, Reject, Task
from umbel.app.request import current_request
from umbel.errors import NotRegistered, RemoteError, ResultTimeout, TaskError
from umbel.wire.result import decode_result


class OutOfStock(ValueError):
    pass


def children_of(app: App, result: AsyncResult[Any]) -> list[str]:
    stored = app.backend.read([result.id])[result.id]
    return [child[0][0] for child in decode_result(stored.payload).children or ()]


# -- how a task ends -------------------------------------------------------------------------------


def test_a_task_that_returns_succeeds(app: App) -> None:
    @app.task
    def add(a: int, b: int) -> int:
        return a + b

    with app.eager():
        result = add.delay(2, 3)
        assert result.get() == 5
        assert (result.state, result.ready(), result.successful(), result.failed()) == (
            "SUCCESS",
            True,
            True,
            False,
        )


def test_values_come_out_as_they_come_out_of_a_broker(app: App) -> None:
    @app.task
    def echo(value: Any) -> Any:
        return value

    with app.eager():
        assert echo.delay((1, (2, 3))).get() == [1, [2, 3]]


def test_a_task_that_raises_fails_with_its_exception_and_the_workers_traceback(app: App) -> None:
    @app.task
    def sell(item: str) -> None:
        raise OutOfStock(item, 0)

    with app.eager():
        result = sell.delay("pears")
        with pytest.raises(OutOfStock) as caught:
            result.get()
    assert caught.value.args == ("pears", 0)
    [note] = caught.value.__notes__
    assert "in the worker:" in note
    assert "raise OutOfStock(item, 0)" in note
    assert result.state == "FAILURE"
    assert isinstance(result.result, OutOfStock)


def test_the_traceback_begins_in_the_users_code(app: App) -> None:
    @app.task
    def broken() -> None:
        raise OutOfStock

    @app.task
    async def broken_async() -> None:
        raise OutOfStock

    with app.eager():
        for task in (broken, broken_async):
            lines = (task.delay().traceback or "").splitlines()
            assert lines[0] == "Traceback (most recent call last):"
            assert __file__ in lines[1]


def test_a_failure_can_be_looked_at_without_raising(app: App) -> None:
    @app.task
    def sell() -> None:
        raise OutOfStock("pears")

    with app.eager():
        error = sell.delay().get(propagate=False)
    assert isinstance(error, OutOfStock)


def test_leaving_the_process_is_a_failure_like_any_other(app: App) -> None:
    @app.task
    def leave() -> None:
        raise SystemExit(3)

    with app.eager():
        result = leave.delay()
        # Raised as itself it would end whoever asks for the result.
        with pytest.raises(RemoteError, match="SystemExit"):
            result.get()


def test_a_value_that_cannot_be_sent_is_a_failure_that_says_what_and_where(app: App) -> None:
    @app.task
    def give() -> Any:
        return {"fine": 1, "thing": object()}

    with app.eager():
        result = give.delay()
        with pytest.raises(Exception, match="object") as caught:
            result.get()
    assert type(caught.value).__name__ == "BadValue"
    assert "thing" in str(caught.value)


def test_an_argument_that_cannot_be_sent_is_refused_where_it_is_sent(app: App) -> None:
    @app.task
    def take(thing: Any) -> None: ...

    with app.eager(), pytest.raises(Exception, match=r"args\[0\]") as caught:
        take.delay(object())
    assert type(caught.value).__name__ == "BadValue"


def test_a_value_that_nobody_keeps_need_not_be_sendable(app: App) -> None:
    @app.task(ignore_result=True)
    def give() -> Any:
        return object()

    with app.eager():
        assert give.delay().state == "PENDING"


def test_an_exception_whose_text_raises_is_stored_all_the_same(app: App) -> None:
    class Sulking(Exception):
        def __repr__(self) -> str:
            raise RuntimeError

        __str__ = __repr__

    @app.task(autoretry_for=(Sulking,), max_retries=1)
    def sulk() -> None:
        raise Sulking(1)

    with app.eager():
        assert sulk.delay().failed()


def test_an_exception_with_very_many_arguments_is_cut(app: App) -> None:
    @app.task
    def flood() -> None:
        raise OutOfStock(*range(100))

    with app.eager():
        result = flood.delay()
        assert result.failed()
        assert len(result.result.args) == 17


def test_a_task_that_ignores_leaves_its_state_as_it_is(app: App) -> None:
    @app.task(bind=True)
    def leave_it(self: Task[..., Any]) -> None:
        self.update_state("HANDED_ON", {"to": "somebody"})
        raise Ignore

    with app.eager():
        result = leave_it.delay()
        assert (result.state, result.result) == ("HANDED_ON", {"to": "somebody"})
        assert not result.ready()
        with pytest.raises(ResultTimeout, match="HANDED_ON"):
            result.get(timeout=0.1)


def test_a_rejected_task_fails_and_is_not_run_again(app: App) -> None:
    runs: list[int] = []

    @app.task
    def refuse() -> None:
        runs.append(1)
        raise Reject("not mine")

    with app.eager():
        assert refuse.delay().state == "FAILURE"
    assert len(runs) == 1


def test_a_task_that_gives_its_message_back_gets_it_again_but_not_for_ever(app: App) -> None:
    runs: list[int] = []

    @app.task
    def give_back(until: int) -> str:
        runs.append(1)
        if len(runs) < until:
            raise Reject("busy", requeue=True)
        return "done"

    with app.eager():
        assert give_back.delay(2).get() == "done"
        runs.clear()
        assert give_back.delay(99).state == "PENDING"
    assert len(runs) == app.settings.task_max_deliveries


def test_an_unknown_task_fails_by_name(app: App) -> None:
    with app.eager():
        result = app.send_task("shop.sell")
        with pytest.raises(NotRegistered, match=r"'shop\.sell'"):
            result.get()


# -- where it runs and what is left ----------------------------------------------------------------


def test_results_stay_readable_when_eager_mode_has_ended(app: App) -> None:
    @app.task
    def one() -> int:
        return 1

    with app.eager():
        result = one.delay()
    assert (result.state, result.get()) == ("SUCCESS", 1)


def test_apply_runs_one_call_eagerly(app: App) -> None:
    @app.task
    def add(a: int, b: int = 1) -> int:
        return a + b

    assert add.apply((1,), {"b": 3}).get() == 4
    assert add.s(1).apply((5,)).get() == 6
    assert app.eager_backend is None


def test_eager_blocks_may_be_nested(app: App) -> None:
    @app.task
    def one() -> int:
        return 1

    with app.eager():
        with app.eager():
            inner = one.delay()
        assert app.AsyncResult(inner.id).get() == 1
        assert one.delay().get() == 1


def test_an_app_can_always_be_eager(tmp_path: Any) -> None:
    app = App("tests", broker=f"sqlite:///{tmp_path}/never.db", task_always_eager=True)

    @app.task
    async def one() -> int:
        return 1

    result = one.delay()
    assert result.get() == 1
    assert app.AsyncResult(result.id).state == "SUCCESS"
    app.close()
    assert list(tmp_path.iterdir()) == []


def test_eager_mode_opens_no_broker(app: App, tmp_path: Any) -> None:
    @app.task
    def one() -> int:
        return 1

    with app.eager():
        one.apply_async(countdown=3600)
    assert list(tmp_path.iterdir()) == []


def test_an_eta_is_due_at_once(app: App) -> None:
    @app.task
    def one() -> int:
        return 1

    with app.eager():
        assert one.apply_async(countdown=86_400).get() == 1


def test_a_forgotten_result_is_unknown(app: App) -> None:
    @app.task
    def one() -> int:
        return 1

    with app.eager():
        result = one.delay()
        assert result.get() == 1
        result.forget()
        assert result.state == "PENDING"


def test_a_result_nobody_will_bring_is_not_waited_for(app: App) -> None:
    with app.eager(), pytest.raises(ResultTimeout, match="no-such-id"):
        app.AsyncResult("no-such-id").get()


# -- inside the task -------------------------------------------------------------------------------


def test_a_bound_task_sees_its_request(app: App) -> None:
    @app.task(bind=True)
    def look(self: Task[..., Any], what: str, *, how: str) -> dict[str, Any]:
        request = self.request
        return {
            "id": request.id,
            "task": request.task,
            "args": request.args,
            "kwargs": request.kwargs,
            "retries": request.retries,
            "root_id": request.root_id,
            "parent_id": request.parent_id,
            "hostname": request.hostname,
            "queue": request.delivery_info["routing_key"],
            "priority": request.delivery_info["priority"],
            "redelivered": request.delivery_info["redelivered"],
            "headers": request.headers,
            "directly": request.called_directly,
            "eager": request.is_eager,
            "timelimit": request.timelimit,
        }

    with app.eager():
        seen = look.apply_async(
            ("up",),
            {"how": "far"},
            task_id="t-1",
            queue="sky",
            priority=4,
            headers={"tenant": 7},
            time_limit=9,
        ).get()
    assert seen == {
        "id": "t-1",
        "task": look.name,
        "args": ["up"],
        "kwargs": {"how": "far"},
        "retries": 0,
        "root_id": "t-1",
        "parent_id": None,
        "hostname": "eager@localhost",
        "queue": "sky",
        "priority": 4,
        "redelivered": False,
        "headers": {"tenant": 7},
        "directly": False,
        "eager": True,
        "timelimit": [9, None],
    }


def test_after_a_task_nothing_of_its_request_is_left(app: App) -> None:
    @app.task
    def fail() -> None:
        raise OutOfStock

    with app.eager():
        fail.delay()
        assert current_request() is None


def test_a_state_of_ones_own_is_seen_while_the_task_runs(app: App) -> None:
    seen: list[tuple[str, Any]] = []

    @app.task(bind=True)
    def work(self: Task[..., Any]) -> str:
        self.update_state("PROGRESS", {"done": 50})
        mine = self.app.AsyncResult(self.request.id)
        seen.append((mine.state, mine.result))
        return "done"

    with app.eager():
        result = work.delay()
        assert result.get() == "done"
    assert seen == [("PROGRESS", {"done": 50})]


def test_a_task_that_is_tracked_shows_that_it_started(app: App) -> None:
    seen: list[tuple[str, Any]] = []

    @app.task(bind=True, track_started=True)
    def work(self: Task[..., Any]) -> None:
        mine = self.app.AsyncResult(self.request.id)
        seen.append((mine.state, mine.result))

    with app.eager():
        assert work.delay().successful()
    assert seen == [("STARTED", {"pid": os.getpid(), "hostname": "eager@localhost"})]


def test_a_state_needs_a_task_that_runs(app: App) -> None:
    @app.task(bind=True)
    def work(self: Task[..., Any]) -> None:
        self.update_state("PROGRESS")

    with app.eager(), pytest.raises(RuntimeError, match="called directly"):
        work()


def test_tasks_sent_by_a_task_are_its_children(app: App) -> None:
    @app.task(bind=True)
    def leaf(self: Task[..., Any]) -> list[str | None]:
        return [self.request.root_id, self.request.parent_id]

    @app.task
    def stem() -> list[str]:
        return [leaf.delay().id, leaf.delay().id]

    with app.eager():
        result = stem.delay()
        leaves = result.get()
        assert children_of(app, result) == leaves
        assert app.AsyncResult(leaves[0]).get() == [result.id, result.id]


def test_the_list_of_children_is_bounded(app: App) -> None:
    @app.task(ignore_result=True)
    def leaf() -> None: ...

    @app.task
    def stem() -> None:
        app.send_many(leaf.s() for _ in range(1500))

    with app.eager():
        result = stem.apply_async(link=leaf.s())
        assert len(children_of(app, result)) == 1000


# -- async tasks -----------------------------------------------------------------------------------


def test_an_async_task_is_really_awaited(app: App) -> None:
    @app.task
    async def meet() -> str:
        met = asyncio.Event()
        asyncio.get_running_loop().call_soon(met.set)
        await met.wait()
        return "met"

    with app.eager():
        assert meet.delay().get() == "met"


def test_an_async_task_is_awaited_inside_a_running_loop_too(app: App) -> None:
    @app.task(bind=True)
    async def meet(self: Task[..., Any]) -> str:
        met = asyncio.Event()
        asyncio.get_running_loop().call_soon(met.set)
        await met.wait()
        return self.request.id

    async def use() -> None:
        with app.eager():
            result = meet.delay()
            assert await result == result.id
            assert result.get() == result.id

    asyncio.run(use())


def test_an_async_task_may_send_and_await_another(app: App) -> None:
    @app.task
    async def inner(value: int) -> int:
        return value + 1

    @app.task
    async def outer() -> int:
        return await inner.delay(1) + await inner(10)

    with app.eager():
        assert outer.delay().get() == 13


def test_async_tasks_share_a_loop_so_that_clients_can_be_kept(app: App) -> None:
    loops: list[object] = []

    @app.task
    async def note() -> None:
        loops.append(asyncio.get_running_loop())

    with app.eager():
        note.delay()
        note.delay()
    assert loops[0] is loops[1]


def test_async_tasks_of_several_threads_do_not_wait_for_one_loop(tmp_path: Any) -> None:
    app = App("tests", broker=f"sqlite:///{tmp_path}/never.db", task_always_eager=True)
    both = threading.Barrier(2)

    @app.task
    async def meet() -> str:
        both.wait(timeout=10.0)
        return "met"

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(lambda _: meet.delay(), range(2)))
    assert [result.get() for result in results] == ["met", "met"]
    app.close()


def test_an_async_function_in_a_plain_wrapper_is_awaited(app: App) -> None:
    async def work(value: int) -> int:
        return value

    @wraps(work)
    def wrapped(value: int) -> Any:
        return work(value)

    with app.eager():
        assert app.task(wrapped).delay(3).get() == 3


def test_a_task_that_cancels_itself_fails(app: App) -> None:
    @app.task
    async def give_up() -> None:
        asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)  # type: ignore[union-attr]
        await asyncio.Event().wait()

    @app.task
    def give_up_in_a_loop_of_its_own() -> None:
        asyncio.run(give_up())

    async def use() -> AsyncResult[None]:
        with app.eager():
            return give_up.delay()

    with app.eager():
        for result in (give_up.delay(), give_up_in_a_loop_of_its_own.delay(), asyncio.run(use())):
            with pytest.raises(TaskError, match="awaited something that had been cancelled"):
                result.get()
