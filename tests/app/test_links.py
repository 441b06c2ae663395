from typing import Any

import pytest

from umbel import App, Task
from umbel.app.request import Request


class OutOfStock(ValueError):
    pass


class Shop:
    """An app with tasks that note what they are given."""

    def __init__(self, app: App) -> None:
        noted: list[Any] = []
        self.noted = noted

        @app.task
        def add(a: int, b: int = 0) -> int:
            return a + b

        @app.task
        def sell() -> None:
            raise OutOfStock("pears")

        @app.task
        def note(*values: Any) -> None:
            noted.append(list(values))

        @app.task(bind=True)
        def note_id(self: Task[..., Any], task_id: str) -> None:
            noted.append([task_id, self.request.parent_id, self.request.root_id])

        self.add, self.sell, self.note, self.note_id = add, sell, note, note_id


@pytest.fixture
def shop(app: App) -> Shop:
    return Shop(app)


# -- after success ---------------------------------------------------------------------------------


def test_a_callback_is_sent_with_the_result(app: App, shop: Shop) -> None:
    with app.eager():
        shop.add.apply_async((1, 2), link=shop.note.s("sum"))
    assert shop.noted == [[3, "sum"]]


def test_several_callbacks_are_sent_in_order(app: App, shop: Shop) -> None:
    with app.eager():
        shop.add.apply_async((1, 2), link=[shop.note.s("first"), shop.note.s("second")])
    assert shop.noted == [[3, "first"], [3, "second"]]


def test_an_immutable_callback_gets_nothing(app: App, shop: Shop) -> None:
    with app.eager():
        shop.add.apply_async((1, 2), link=shop.note.si("done"))
    assert shop.noted == [["done"]]


def test_a_callback_knows_who_sent_it(app: App, shop: Shop) -> None:
    @app.task(bind=True)
    def look(self: Task[..., Any], value: int) -> None:
        shop.noted.append((self.request.parent_id, self.request.root_id, bool(self.request.group)))

    with app.eager():
        shop.add.apply_async((1,), task_id="t", root_id="r", link=look.s())
    assert shop.noted == [("t", "r", True)]


def test_callbacks_may_have_callbacks(app: App, shop: Shop) -> None:
    call = shop.add.s(1, 2)
    call.link(shop.add.s(10)).link(shop.note.s())  # link() gives the callback, to link on
    with app.eager():
        call.delay()
    assert shop.noted == [[13]]


def test_a_callback_that_does_not_fit_fails_the_task_and_says_so(app: App, shop: Shop) -> None:
    with app.eager():
        result = shop.add.apply_async((1, 2), link=shop.add.s(1, 2))
        with pytest.raises(TypeError, match="cannot send"):
            result.get()


def test_nothing_follows_a_task_that_failed_but_its_errbacks(app: App, shop: Shop) -> None:
    with app.eager():
        shop.sell.apply_async(link=shop.note.s("sold"))
    assert shop.noted == []


def test_a_callback_from_elsewhere_may_have_options_we_do_not_know(app: App, shop: Shop) -> None:
    callback = shop.note.s("sum").to_map()
    callback["options"]["delivery_mode"] = 2
    with app.eager():
        assert shop.add.apply_async((1, 2), link=[callback]).get() == 3
    assert shop.noted == [[3, "sum"]]


# -- after failure ---------------------------------------------------------------------------------


def test_an_errback_is_sent_with_the_id_of_the_task_that_failed(app: App, shop: Shop) -> None:
    with app.eager():
        shop.sell.apply_async(task_id="t", root_id="r", link_error=shop.note_id.s())
    assert shop.noted == [["t", "t", "r"]]


def test_an_errback_of_another_app_is_sent_with_the_id(app: App, shop: Shop) -> None:
    sent: list[tuple[str, Any]] = []
    app.signals.before_task_publish.connect(lambda **c: sent.append((c["task"], c["args"])))
    with app.eager():
        shop.sell.apply_async(task_id="t", link_error=app.signature("elsewhere.alarm", ("red",)))
    assert sent == [(shop.sell.name, ()), ("elsewhere.alarm", ["t", "red"])]


def test_an_immutable_errback_gets_only_its_own_arguments(app: App, shop: Shop) -> None:
    with app.eager():
        shop.sell.apply_async(link_error=shop.note.si("failed"))
    assert shop.noted == [["failed"]]


def test_an_errback_of_three_arguments_is_called_at_once(app: App, shop: Shop) -> None:
    @app.task
    def explain(request: Request, error: Exception, traceback: str) -> None:
        shop.noted.append((request.id, repr(error), "raise OutOfStock" in traceback))

    with app.eager():
        shop.sell.apply_async(task_id="t", link_error=explain.s())
    assert shop.noted == [("t", "OutOfStock('pears')", True)]


def test_such_an_errback_may_be_bound_async_and_have_arguments_of_its_own(app: App, shop: Shop) -> None:
    @app.task(bind=True)
    def bound(self: Task[..., Any], request: Request, error: Exception, traceback: str) -> None:
        shop.noted.append(("bound", self.name == bound.name, request.id))

    @app.task
    async def later(request: Request, error: Exception, traceback: str) -> None:
        shop.noted.append(("later", request.id))

    @app.task
    def with_more(request: Request, error: Exception, traceback: str, to: str, *, loud: bool) -> None:
        shop.noted.append(("more", request.id, to, loud))

    errbacks = [bound.s(), later.s(), with_more.s("ops", loud=True)]
    with app.eager():
        shop.sell.apply_async(task_id="t", link_error=errbacks)
    assert shop.noted == [("bound", True, "t"), ("later", "t"), ("more", "t", "ops", True)]


def test_three_parameters_that_are_already_filled_leave_room_for_the_id_only(app: App, shop: Shop) -> None:
    @app.task
    def alarm(task_id: str, channel: str, colour: str) -> None:
        shop.noted.append((task_id, channel, colour))

    with app.eager():
        shop.sell.apply_async(task_id="t", link_error=alarm.s("ops", colour="red"))
    assert shop.noted == [("t", "ops", "red")]


def test_an_errback_that_raises_hinders_neither_the_others_nor_the_failure(
    app: App, shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    def broken(request: Request, error: Exception, traceback: str) -> None:
        raise RuntimeError("broken errback")

    @app.task
    def unfit() -> None: ...

    with app.eager():
        result = shop.sell.apply_async(task_id="t", link_error=[broken.s(), unfit.s(), shop.note_id.s()])
        assert isinstance(result.result, OutOfStock)
    assert [noted[0] for noted in shop.noted] == ["t"]
    assert [record.message for record in caplog.records] == ["errback raised an exception"] * 2


def test_errbacks_do_not_follow_an_attempt_that_is_tried_again(app: App, shop: Shop) -> None:
    @app.task(autoretry_for=(OutOfStock,), max_retries=2)
    def sell_later() -> None:
        raise OutOfStock

    with app.eager():
        sell_later.apply_async(task_id="t", link_error=shop.note_id.s())
    assert [noted[0] for noted in shop.noted] == ["t"]
