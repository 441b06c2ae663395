from typing import Any

import pytest

from umbel import App, Signature, Task, chain, group
from umbel.errors import NotRegistered


class OutOfStock(ValueError):
    pass


class Shop:
    def __init__(self, app: App) -> None:
        noted: list[Any] = []
        self.noted = noted

        @app.task
        def add(a: int, b: int = 0) -> int:
            noted.append((a, b))
            return a + b

        @app.task
        def sell(*args: Any) -> None:
            raise OutOfStock(*args)

        @app.task
        def note(*values: Any) -> None:
            noted.append(values)

        @app.task(bind=True)
        def where(self: Task[..., Any], *args: Any) -> str:
            noted.append(self.request.delivery_info["routing_key"])
            return self.request.id

        self.add, self.sell, self.note, self.where = add, sell, note, where


@pytest.fixture
def shop(app: App) -> Shop:
    return Shop(app)


def test_each_step_gets_the_result_of_the_one_before_first(app: App, shop: Shop) -> None:
    with app.eager():
        assert (shop.add.s(1, 2) | shop.add.s(10) | shop.add.s(100)).delay().get() == 113
    assert shop.noted == [(1, 2), (3, 10), (13, 100)]


def test_chain_and_bar_are_the_same(app: App, shop: Shop) -> None:
    a, b, c = shop.add.s(1), shop.add.s(2), shop.add.s(3)
    assert chain(a, b, c) == a | b | c == a | (b | c) == chain(chain(a, b), c)
    assert repr(a | b) == f"{shop.add.name}(1) | {shop.add.name}(2)"


@pytest.mark.parametrize("other", [5, None, "add", len])
def test_what_is_no_signature_is_refused_where_it_is_written(shop: Shop, other: Any) -> None:
    for signature in (shop.add.s(1), shop.add.s(1) | shop.add.s(2)):
        with pytest.raises(TypeError, match="unsupported operand"):
            signature | other


def test_an_empty_chain_sends_nothing(app: App, shop: Shop) -> None:
    with app.eager():
        assert chain().apply_async() is None
        assert chain()() is None
        assert group(chain(), shop.add.s(1, 2)).delay().get() == [3]
        assert (chain() | shop.add.s(1, 2) | chain()).delay().get() == 3


def test_a_chain_may_be_given_as_one_list_or_generator(app: App, shop: Shop) -> None:
    steps = [shop.add.s(1, 2), shop.add.s(10)]
    with app.eager():
        assert chain(steps).delay().get() == 13
        assert chain(step for step in steps).delay().get() == 13


def test_an_immutable_step_takes_no_result(app: App, shop: Shop) -> None:
    with app.eager():
        assert (shop.add.s(1, 2) | shop.add.si(5, 5) | shop.add.s(1)).delay().get() == 11


def test_arguments_given_when_sending_go_to_the_first_step(app: App, shop: Shop) -> None:
    steps = shop.add.s(1) | shop.add.s(10)
    with app.eager():
        assert steps.delay(5).get() == 16
        assert steps.apply_async((7,)).get() == 18
    assert steps == shop.add.s(1) | shop.add.s(10)


def test_a_chain_can_be_sent_again_and_again_under_new_ids(app: App, shop: Shop) -> None:
    steps = shop.add.s(1, 1) | shop.add.s(1)
    with app.eager():
        first, second = steps.delay(), steps.delay()
    assert first.id != second.id
    assert (first.get(), second.get()) == (3, 3)


def test_the_result_is_that_of_the_last_step_and_knows_those_before(app: App, shop: Shop) -> None:
    with app.eager():
        last = chain(shop.add.s(1, 1), shop.add.s(1), shop.add.s(1)).apply_async(task_id="last")
    assert last.id == "last"
    assert last.parent is not None and last.parent.parent is not None
    assert (last.parent.parent.get(), last.parent.get(), last.get()) == (2, 3, 4)
    assert last.parent.parent.parent is None


def test_all_steps_have_the_first_as_root_and_the_one_before_as_parent(app: App) -> None:
    seen: list[tuple[str, str | None, str | None]] = []

    @app.task(bind=True)
    def look(self: Task[..., Any], *args: Any) -> None:
        seen.append((self.request.id, self.request.root_id, self.request.parent_id))

    steps = [look.s().set(task_id=name) for name in ("a", "b", "c")]
    with app.eager():
        chain(*steps).delay()
    assert seen == [("a", "a", None), ("b", "a", "a"), ("c", "a", "b")]


def test_a_step_that_fails_fails_the_results_of_the_later_steps(app: App, shop: Shop) -> None:
    with app.eager():
        last = (shop.add.s(1, 2) | shop.sell.s() | shop.add.s(1) | shop.add.s(2)).delay()
        assert last.parent is not None and last.parent.parent is not None
        for result in (last, last.parent, last.parent.parent):
            with pytest.raises(OutOfStock, match="3"):
                result.get()
    assert shop.noted == [(1, 2)]


def test_a_step_that_nobody_knows_fails_the_later_steps_too(app: App, shop: Shop) -> None:
    with app.eager(), pytest.raises(NotRegistered, match=r"no\.such"):
        (shop.add.s(1) | app.signature("no.such") | shop.add.s(1)).delay().get()


def test_a_step_may_be_tried_again_and_the_chain_goes_on(app: App, shop: Shop) -> None:
    @app.task(bind=True)
    def flaky(self: Task[..., Any], value: int) -> int:
        if self.request.retries < 2:
            self.retry()
        return value

    with app.eager():
        assert (shop.add.s(1, 2) | flaky.s() | shop.add.s(10)).delay().get() == 13


def test_a_callback_of_a_chain_follows_its_last_step(app: App, shop: Shop) -> None:
    steps = shop.add.s(1, 2) | shop.add.s(10)
    steps.link(shop.note.s("end"))
    with app.eager():
        steps.delay()
    assert shop.noted == [(1, 2), (3, 10), (13, "end")]


def test_an_errback_of_a_chain_follows_whichever_step_fails(app: App, shop: Shop) -> None:
    @app.task
    def alarm(task_id: str) -> None:
        shop.noted.append(task_id)

    for failing in (0, 1, 2):
        steps: list[Signature[Any]] = [
            shop.add.si(1, 1).set(task_id=f"{failing}-{place}") for place in range(3)
        ]
        steps[failing] = shop.sell.si().set(task_id=f"{failing}-bad")
        whole = chain(*steps)
        whole.link_error(alarm.s())
        with app.eager():
            whole.delay()
    assert [one for one in shop.noted if isinstance(one, str)] == ["0-bad", "1-bad", "2-bad"]


def test_what_was_linked_to_a_chain_stays_when_it_becomes_part_of_another(app: App, shop: Shop) -> None:
    inner = shop.add.s(1) | shop.add.s(2)
    inner.link(shop.note.s("inner end"))
    with app.eager():
        assert (shop.add.s(0, 10) | inner | shop.add.s(100)).delay().get() == 113
    assert (13, "inner end") in shop.noted


def test_callbacks_of_a_step_follow_that_step(app: App, shop: Shop) -> None:
    first = shop.add.s(1, 2)
    first.link(shop.note.s("first"))
    with app.eager():
        (first | shop.add.s(10)).delay()
    assert (3, "first") in shop.noted


def test_options_of_a_step_are_for_that_step(app: App, shop: Shop) -> None:
    with app.eager():
        (shop.where.s().set(queue="one") | shop.where.s().set(queue="two") | shop.where.s()).delay()
    assert shop.noted == ["one", "two", "celery"]


def test_options_of_the_chain_are_for_its_first_step_as_celery_has_it(app: App, shop: Shop) -> None:
    with app.eager():
        (shop.where.s() | shop.where.s()).apply_async(queue="fast")
    assert shop.noted == ["fast", "celery"]


def test_a_chain_may_be_a_callback(app: App, shop: Shop) -> None:
    with app.eager():
        shop.add.apply_async((1, 2), link=shop.add.s(10) | shop.note.s("end"))
    assert shop.noted == [(1, 2), (3, 10), (13, "end")]


def test_a_chain_that_came_as_one_step_of_a_chain_goes_on_behind_it(app: App, shop: Shop) -> None:
    # Ours are always flat; one that came over the wire need not be.
    inner = (shop.add.s(10) | shop.add.s(100)).to_map()
    with app.eager():
        app.send(shop.add.name, (1, 2), {}, {"chain": [shop.note.s("end").to_map(), inner]})
    assert shop.noted == [(1, 2), (3, 10), (13, 100), (113, "end")]


def test_the_first_step_is_checked_before_anything_is_sent(app: App, shop: Shop) -> None:
    with app.eager(), pytest.raises(TypeError, match="cannot send"):
        (shop.add.s() | shop.add.s(1)).delay()
    assert shop.noted == []


def test_a_chain_that_is_called_is_sent(app: App, shop: Shop) -> None:
    with app.eager():
        result = (shop.add.s(1) | shop.add.s(10) | shop.add.si(5, 5))(2)
        assert (result.get(), result.parent.get()) == (10, 13)
    assert shop.noted == [(2, 1), (3, 10), (5, 5)]


def test_a_chain_survives_the_trip_as_a_map(app: App, shop: Shop) -> None:
    steps = shop.add.s(1, 2) | shop.add.si(3, 4)
    steps.link(shop.note.s("end"))
    again = app.signature(steps.to_map())
    assert again == steps
    assert again.to_map()["subtask_type"] == "chain"
    with app.eager():
        assert again.delay().get() == 7
    assert shop.noted[-1] == (7, "end")


def test_many_calls_are_sent_at_once(app: App, shop: Shop) -> None:
    with app.eager():
        results = app.send_many([shop.add.s(1, 2), shop.add.s(3) | shop.add.s(4), shop.add.si(5, 6)])
    assert [result.get() for result in results] == [3, 7, 11]


def test_many_calls_are_sent_under_the_ids_they_name_and_stay_as_they_were(app: App, shop: Shop) -> None:
    call, steps = (
        shop.add.s(1, 2).set(task_id="call"),
        (shop.add.s(3, 3) | shop.add.s(4)).set(task_id="steps"),
    )
    unnamed = shop.add.s(5, 6)
    with app.eager():
        results = app.send_many([call, steps, unnamed, unnamed])
        assert [result.get() for result in results] == [3, 10, 11, 11]
    assert [result.id for result in results[:2]] == ["call", "steps"]
    assert len({result.id for result in results}) == 4
    assert "task_id" not in unnamed.options
