import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path
from time import time
from typing import Any

import pytest

from umbel import App, AsyncResult, GroupResult, group
from umbel.app.request import Request, RequestScope
from umbel.app.results import rebuild_exception
from umbel.app.running.eager import RESULTS_MAX, EagerBackend
from umbel.brokers.interface import Claim
from umbel.brokers.registry import open_broker
from umbel.errors import (
    BadValue,
    JoinWouldBlock,
    MaxRetriesExceeded,
    RemoteError,
    ResultTimeout,
    TaskRevoked,
    TimeLimitExceeded,
    WorkerLost,
)
from umbel.wire.message import StoredResult
from umbel.wire.result import decode_result, encode_failure, encode_state, encode_success, exception_map
from umbel.wire.values import encode_json


class OutOfStock(Exception):
    class Entirely(Exception):
        pass


class NotSupported(Exception):
    """Named like one of Umbel's."""


class Picky(Exception):
    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)


def described(exc_type: str, *args: Any, module: str = "builtins") -> dict[str, Any]:
    return {"exc_type": exc_type, "exc_message": list(args), "exc_module": module}


def same(error: BaseException) -> bool:
    again = rebuild_exception(exception_map(error))
    return type(again) is type(error) and again.args == error.args


# -- exceptions from elsewhere ---------------------------------------------------------------------


def test_builtin_user_and_umbel_exceptions_come_back_as_themselves() -> None:
    assert same(ZeroDivisionError("by zero"))
    assert same(KeyError("k"))
    assert same(OSError(2, "no such file"))
    assert same(OutOfStock("pears", 3))
    assert same(OutOfStock.Entirely())
    assert same(WorkerLost("process 4711 was killed"))
    assert same(RemoteError("shop.Gone", 1))


@pytest.mark.parametrize(
    ("name", "module", "kind"),
    [
        ("TaskRevokedError", "celery.exceptions", TaskRevoked),
        ("WorkerLostError", "billiard.exceptions", WorkerLost),
        ("MaxRetriesExceededError", "celery.exceptions", MaxRetriesExceeded),
        ("TimeLimitExceeded", "billiard.exceptions", TimeLimitExceeded),
    ],
)
def test_celerys_names_are_known(name: str, module: str, kind: type[Exception]) -> None:
    error = rebuild_exception(described(name, "text", module=module))
    assert (type(error), error.args) == (kind, ("text",))


def test_a_class_named_like_one_of_ours_is_still_the_users() -> None:
    assert type(rebuild_exception(described("NotSupported", module=__name__))) is NotSupported
    stranger = rebuild_exception(described("NotSupported", module="elsewhere"))
    assert isinstance(stranger, RemoteError)


def test_an_unknown_class_is_told_by_name_and_arguments() -> None:
    error = rebuild_exception(described("Gone", "a", 2, module="no.such.module"))
    assert isinstance(error, RemoteError)
    assert (error.type_name, error.remote_args, str(error)) == ("Gone", ("a", 2), "Gone('a', 2)")


def test_no_module_is_imported_to_find_a_class() -> None:
    assert "this" not in sys.modules
    assert isinstance(rebuild_exception(described("Zen", module="this")), RemoteError)
    assert "this" not in sys.modules


def test_nothing_is_loaded_from_modules_that_load_on_access(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazy_shop.py").write_text("def __getattr__(name):\n    raise SystemError('was asked')\n")
    monkeypatch.syspath_prepend(tmp_path)
    import lazy_shop  # type: ignore[import-not-found]

    assert lazy_shop.__name__ in sys.modules
    assert isinstance(rebuild_exception(described("Gone", module="lazy_shop")), RemoteError)


@pytest.mark.parametrize("name", ["SystemExit", "KeyboardInterrupt", "GeneratorExit", "print", "int", ""])
def test_only_exceptions_that_do_not_end_the_caller_are_rebuilt(name: str) -> None:
    assert isinstance(rebuild_exception(described(name)), RemoteError)


def test_a_class_that_cannot_be_made_from_its_arguments_is_told_by_name() -> None:
    error = rebuild_exception(exception_map(Picky(reason="because")))
    assert str(error) == "Picky('because')"


@pytest.mark.parametrize("odd", [None, "text", 3, {}, {"exc_message": ["x"]}])
def test_what_describes_no_exception_is_shown_as_it_is(odd: Any) -> None:
    assert isinstance(rebuild_exception(odd), RemoteError)


def test_a_message_that_is_text_is_one_argument() -> None:
    error = rebuild_exception({"exc_type": "ValueError", "exc_message": "bad", "exc_module": "builtins"})
    assert (type(error), error.args) == (ValueError, ("bad",))


# -- handles ---------------------------------------------------------------------------------------


def test_results_of_one_task_are_equal(app: App) -> None:
    assert app.AsyncResult("a") == AsyncResult("a", app=app)
    assert app.AsyncResult("a") != app.AsyncResult("b")
    assert app.AsyncResult("a") != "a"
    assert len({app.AsyncResult("a"), app.AsyncResult("a"), app.AsyncResult("b")}) == 2
    assert repr(app.AsyncResult("a")) == "<AsyncResult a>"


def test_an_unknown_task_is_pending(app: App) -> None:
    result = app.AsyncResult("a")
    assert (result.state, result.status, result.result, result.traceback) == (
        "PENDING",
        "PENDING",
        None,
        None,
    )
    assert not result.ready()


def test_states_are_read_as_they_are_stored(app: App) -> None:
    result = app.AsyncResult("a")
    app.backend.store([encode_state("a", "PROGRESS", {"done": 3})])
    assert (result.state, result.result, result.ready()) == ("PROGRESS", {"done": 3}, False)
    error = exception_map(OutOfStock("pears"))
    app.backend.store([encode_failure("a", error, "Traceback: …", status="RETRY", done_at=None)])
    assert (result.state, repr(result.result), result.traceback) == (
        "RETRY",
        "OutOfStock('pears')",
        "Traceback: …",
    )
    app.backend.store([encode_success("a", [1, 2], done_at=time())])
    assert (result.state, result.result, result.ready(), result.get()) == ("SUCCESS", [1, 2], True, [1, 2])


def test_a_final_state_is_not_asked_for_again(app: App) -> None:
    result = app.AsyncResult("a")
    app.backend.store([encode_success("a", 1, done_at=time())])
    assert result.get() == 1
    app.backend.forget(["a"])
    assert (result.get(), result.state) == (1, "SUCCESS")
    result.forget()
    assert result.state == "PENDING"


def test_waiting_ends_with_a_time_out_that_says_what_is_known(app: App) -> None:
    app.backend.store([encode_state("a", "PROGRESS", None)])
    with pytest.raises(
        ResultTimeout, match=r"no result of task a within 0\.01 s \(its state is PROGRESS\)"
    ) as caught:
        app.AsyncResult("a").get(timeout=0.01)
    assert isinstance(caught.value, TimeoutError)


def test_a_revoked_task_raises_what_revoked_it(app: App) -> None:
    error = exception_map(TaskRevoked("revoked"))
    app.backend.store([encode_failure("a", error, None, status="REVOKED", done_at=time())])
    with pytest.raises(TaskRevoked):
        app.AsyncResult("a").get()


def test_a_result_can_be_awaited(app: App) -> None:
    async def use() -> tuple[Any, Any]:
        waiting = asyncio.create_task(app.AsyncResult("a").aget(timeout=10))
        await asyncio.to_thread(app.backend.store, [encode_success("a", 5, done_at=time())])
        return await waiting, await app.AsyncResult("a")

    assert asyncio.run(use()) == (5, 5)


def test_awaiting_ends_with_a_time_out_too(app: App) -> None:
    async def use() -> None:
        await app.AsyncResult("a").aget(timeout=0.01)

    with pytest.raises(ResultTimeout, match="PENDING"):
        asyncio.run(use())


def test_a_failure_is_raised_where_it_is_awaited(app: App) -> None:
    app.backend.store([encode_failure("a", exception_map(OutOfStock()), "…", done_at=time())])

    async def use() -> None:
        await app.AsyncResult("a")

    with pytest.raises(OutOfStock):
        asyncio.run(use())


def test_revoking_is_recorded_for_workers_that_are_not_up_yet(app: App) -> None:
    app.AsyncResult("a").revoke()

    async def claim() -> Claim:
        broker = open_broker(app.settings.for_broker())
        await broker.open()
        try:
            return await broker.claim("w", ["celery"], 1)
        finally:
            await broker.close()

    [revoke] = asyncio.run(claim()).revokes
    assert revoke.task_id == "a"
    assert revoke.expires_at > time() + 86_400


# -- results of eager mode -------------------------------------------------------------------------


def test_the_first_success_stays() -> None:
    backend = EagerBackend()
    backend.store([encode_success("a", 1, done_at=1.0)])
    backend.store([encode_success("a", 2, done_at=2.0), encode_state("a", "PROGRESS", None)])
    assert backend.read(["a", "b"]).keys() == {"a"}
    assert decode_result(backend.read(["a"])["a"].payload).result == 1


def test_the_oldest_results_go_at_the_limit() -> None:
    backend = EagerBackend()
    backend.store([encode_state(str(number), "PROGRESS", None) for number in range(RESULTS_MAX + 5)])
    assert backend.read(["4", "5"]).keys() == {"5"}
    backend.close()
    assert backend.read(["5"]) == {}


# -- more of a result ------------------------------------------------------------------------------


def double(x: int) -> int:
    return 2 * x


def test_a_result_knows_its_children_and_when_it_was_done(app: App) -> None:
    task = app.task(name="double")(double)
    before = datetime.now(UTC)
    with app.eager():
        last: Any = (task.s(1) | task.s() | group(task.s(), task.s())).delay()
        first = last.parent.parent
        assert first.task_id == first.id
        assert first.children == [last.parent]
        assert before <= first.date_done <= datetime.now(UTC)
        assert [value for _, value in first.collect()] == [2, 4, 8, 8]
        unknown = app.AsyncResult("nobody")
        assert (unknown.children, unknown.date_done) == (None, None)


def test_children_that_celery_wrote_may_be_groups(app: App) -> None:
    stored = {"status": "SUCCESS", "task_id": "t", "result": 1}
    stored["children"] = [[["a", None], None], [["g", [["a", None], None]], [[["b", None], None]]]]
    with app.eager():
        app.backend.store([StoredResult("t", "SUCCESS", encode_json(stored))])
        children = app.AsyncResult("t").children
        assert children is not None
        alone, together = children
        assert isinstance(together, GroupResult)
        assert (alone.id, together.id, together.parent) == ("a", "g", alone)
        assert [one.id for one in together.children or ()] == ["b"]
        app.backend.store([StoredResult("u", "SUCCESS", encode_json({**stored, "children": [5]}))])
        with pytest.raises(BadValue, match="is not a saved result"):
            _ = app.AsyncResult("u").children


def test_a_callback_is_given_ids_and_values(app: App) -> None:
    task, told = app.task(name="double")(double), list[Any]()
    with app.eager():
        one, several = task.delay(1), group(task.s(2), task.s(3)).delay()
        assert one.get(interval=0.1, callback=lambda *facts: told.append(facts)) == 2
        assert several.get(callback=lambda *facts: told.append(facts)) == []
        assert several.join(timeout=1, interval=0.1) == [4, 6]
    assert told == [(one.id, 2), (several[0].id, 4), (several[1].id, 6)]


def test_a_group_that_was_saved_is_found_by_its_id(app: App) -> None:
    task = app.task(name="double")(double)
    with app.eager():
        sent = (task.s(1) | group(task.s(), task.s() | group(task.s(), task.s()))).delay()
        assert isinstance(sent, GroupResult)
        assert sent.save() is sent
        found = app.GroupResult.restore(sent.id)
        assert found is not None
        assert (found.get(), found.parent, found.as_tuple()) == ([4, [8, 8]], sent.parent, sent.as_tuple())
        found.delete()
        assert GroupResult.restore(sent.id, app=app) is None
        app.backend.save_group("odd", encode_json({"result": [["t", None], None]}))
        with pytest.raises(BadValue, match="is that of one task"):
            app.GroupResult.restore("odd")
        assert app.GroupResult("made", [sent[0]]).get() == [4]


def test_a_task_may_join_if_it_says_so_in_celerys_words(app: App) -> None:
    task = app.task(name="double")(double)
    sent = app.AsyncResult("t")
    with app.eager():
        sent = task.delay(1)
    with RequestScope(Request(id="outer", task="outer")):
        with pytest.raises(JoinWouldBlock):
            sent.get()
        assert sent.get(disable_sync_subtasks=False) == 2
        assert GroupResult("g", [sent], app=app).get(disable_sync_subtasks=False) == [2]
