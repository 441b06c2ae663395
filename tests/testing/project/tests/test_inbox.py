"""umbel_inbox: what was sent waits until the test runs it."""

import asyncio
import threading
from collections.abc import Iterator
from unittest.mock import ANY

import pytest
from shop import tasks
from shop.tasks import add, app, fail, fetch, greet, limited, mail, order, pack, pay, rebuild, ship

from umbel import chain, chord, group
from umbel.errors import ResultTimeout, TaskError, TaskRevoked
from umbel.testing import Clock, Inbox


@pytest.fixture(autouse=True)
def _no_mails() -> Iterator[None]:
    yield
    tasks.MAILS.clear()


def test_nothing_runs_before_the_test_says_so(umbel_inbox: Inbox) -> None:
    result = mail.delay("you", "hello")
    add_result = add.delay(1, 2)
    assert [call.task for call in umbel_inbox] == ["shop.tasks.mail", "shop.tasks.add"]
    assert tasks.MAILS == []
    assert add_result.state == "PENDING"
    ran = umbel_inbox.run()
    assert [call.ended for call in ran] == ["success", "success"]
    assert tasks.MAILS == [("you", "hello")]
    assert (result.get(), add_result.get()) == (None, 3)
    assert len(umbel_inbox) == 0


def test_every_way_of_sending_ends_here(umbel_inbox: Inbox) -> None:
    add.delay(1)
    add.apply_async((2,), queue="fast", priority=3)
    app.send_task("shop.tasks.add", [3])
    app.send_many([add.s(4), add.s(5)])
    add.s(6).delay()
    group(add.s(7), add.s(8)).delay()
    thread = threading.Thread(target=add.delay, args=(9,))
    thread.start()
    thread.join()
    assert [call.args for call in umbel_inbox.of(add)] == [(n,) for n in range(1, 10)]
    assert (umbel_inbox[1].queue, umbel_inbox[1].priority) == ("fast", 3)


def test_a_chain_runs_to_its_end_step_by_step(umbel_inbox: Inbox) -> None:
    result = chain(pack.s(7), ship.s()).delay()
    [first] = umbel_inbox
    assert (first.then, first.queue) == (["shop.tasks.ship"], "warehouse")
    assert umbel_inbox.run_next().task == "shop.tasks.pack"
    assert [call.args for call in umbel_inbox] == [("packed 7",)]
    umbel_inbox.run()
    assert result.get() == "shipped: packed 7"


def test_a_chord_joins_when_all_parts_have_run(umbel_inbox: Inbox) -> None:
    @app.task(name="shop.total")
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    result = chord([add.s(1, 1), add.s(2, 2)], total.s()).delay()
    umbel_inbox.run_next()
    assert not umbel_inbox.of(total)
    umbel_inbox.run()
    assert result.get() == 6


def test_what_a_task_sends_is_run_too_but_not_by_run_next(umbel_inbox: Inbox) -> None:
    order.delay(5)
    umbel_inbox.run_next()
    assert [call.task for call in umbel_inbox] == ["shop.tasks.pack", "shop.tasks.mail"]
    umbel_inbox.clear()
    order.delay(6)
    assert [call.task for call in umbel_inbox.run()] == [
        "shop.tasks.order",
        "shop.tasks.pack",
        "shop.tasks.mail",
    ]
    assert tasks.MAILS == [("you", "order 6")]


def test_calls_of_one_task_can_be_run_alone(umbel_inbox: Inbox) -> None:
    order.delay(5)
    umbel_inbox.run(order)
    umbel_inbox.run("shop.tasks.mail")
    assert tasks.MAILS == [("you", "order 5")]
    assert [call.task for call in umbel_inbox] == ["shop.tasks.pack"]
    assert pack in umbel_inbox
    assert mail not in umbel_inbox


def test_assertions_pass_by_position_by_name_and_by_default(umbel_inbox: Inbox) -> None:
    add.delay(1, b=2)
    pack.delay(7)
    assert umbel_inbox.assert_sent(add, 1, 2).task == "shop.tasks.add"
    umbel_inbox.assert_sent(add)
    umbel_inbox.assert_sent(add, a=1, b=ANY)
    umbel_inbox.assert_sent_once("shop.tasks.pack", 7)
    umbel_inbox.assert_not_sent(add, 2, 2)
    umbel_inbox.assert_not_sent(mail)
    umbel_inbox.run()
    umbel_inbox.assert_sent(add, 1, 2)
    umbel_inbox.assert_empty()


def test_values_compare_as_they_travel(umbel_inbox: Inbox) -> None:
    pack.delay((1, (2, 3)))
    umbel_inbox.assert_sent(pack, (1, (2, 3)))
    umbel_inbox.assert_sent(pack, [1, [2, 3]])


def test_a_failed_assertion_says_what_was_sent_instead(umbel_inbox: Inbox) -> None:
    with pytest.raises(AssertionError, match=r"shop\.tasks\.add was not sent; nothing was"):
        umbel_inbox.assert_sent(add)
    pack.apply_async([7], countdown=60)
    with pytest.raises(
        AssertionError, match=r"add\(1\) was not sent; other tasks were:\n  shop.tasks.pack\(7\) "
    ):
        umbel_inbox.assert_sent(add, 1)
    with pytest.raises(
        AssertionError, match=r"with other arguments:\n  shop.tasks.pack\(7\) \[queue ware.*due 2"
    ):
        umbel_inbox.assert_sent(pack, 8)
    pack.delay(7)
    with pytest.raises(AssertionError, match="was sent 2 times"):
        umbel_inbox.assert_sent_once(pack, 7)
    with pytest.raises(AssertionError, match=r"pack\(7\) was sent, against"):
        umbel_inbox.assert_not_sent(pack, 7)
    with pytest.raises(AssertionError, match="umbel_inbox is not empty, 2 calls have not run"):
        umbel_inbox.assert_empty()


def test_sensitive_arguments_are_in_no_message(umbel_inbox: Inbox) -> None:
    pay.delay("4111", 5)
    assert umbel_inbox.assert_sent(pay, "4111", 5).args == ("4111", 5)
    assert "4111" not in repr(umbel_inbox)


def test_a_failure_is_raised_when_all_have_run(umbel_inbox: Inbox) -> None:
    result = fail.delay("lost")
    mail.delay("you", "later")
    with pytest.raises(LookupError, match="lost"):
        umbel_inbox.run()
    assert tasks.MAILS == [("you", "later")]
    assert result.state == "FAILURE"
    fail.delay("again")
    [call] = umbel_inbox.run(propagate=False)
    assert call.ended == "failure"
    assert "LookupError" in call.error
    fail.apply_async(["unseen"], ignore_result=True)
    with pytest.raises(TaskError, match="unseen"):
        umbel_inbox.run()


def test_waiting_for_what_has_not_run_says_what_to_do(umbel_inbox: Inbox) -> None:
    result = add.delay(1, 2)
    with pytest.raises(
        ResultTimeout, match=r"add\(1, 2\) was sent but has not run; call umbel_inbox.run\(\) first"
    ):
        result.get(timeout=5)


def test_without_a_clock_nothing_waits(umbel_inbox: Inbox) -> None:
    result = fetch.apply_async(["a"], countdown=3600)
    umbel_inbox.run()
    assert result.get() == "fetched a"
    assert [call.retries for call in umbel_inbox.sent] == [0, 1, 2]
    umbel_inbox.assert_sent_once(fetch, "a")


def test_with_a_clock_calls_wait_for_their_time(umbel_inbox: Inbox, umbel_clock: Clock) -> None:
    umbel_clock.set("2026-05-04T12:00:00")  # when no periodic task is due
    result = fetch.apply_async(["a"], countdown=3600)
    later = add.apply_async([1], countdown=3600.5)
    assert umbel_inbox.run() == []
    umbel_clock.advance(3600)
    assert [call.retries for call in umbel_inbox.run()] == [0]
    umbel_clock.advance(59)
    assert [call.task for call in umbel_inbox.run()] == ["shop.tasks.add"]
    umbel_clock.advance(1)
    assert [call.retries for call in umbel_inbox.run()] == [1]
    umbel_clock.advance(60)
    umbel_inbox.run()
    assert (result.get(), later.get()) == ("fetched a", 2)


def test_revoked_and_expired_calls_do_not_run(umbel_inbox: Inbox, umbel_clock: Clock) -> None:
    revoked, expired = mail.delay("a", "b"), add.apply_async([1], expires=10)
    revoked.revoke()
    umbel_clock.advance(11)
    assert [call.ended for call in umbel_inbox.run()] == ["revoked", "expired"]
    assert tasks.MAILS == []
    assert expired.state == "REVOKED"
    with pytest.raises(TaskRevoked):
        expired.get()


def test_a_unique_task_waits_once(umbel_inbox: Inbox) -> None:
    first, second = rebuild.delay("books"), rebuild.delay("books")
    rebuild.delay("music")
    assert first.id == second.id
    assert [call.args for call in umbel_inbox] == [("books",), ("music",)]
    umbel_inbox.run()
    assert rebuild.delay("books").id != first.id


def test_a_unique_task_is_not_sent_while_it_runs(umbel_inbox: Inbox) -> None:
    @app.task(name="shop.rebuild_again", unique_for=60)
    def rebuild_again() -> str:
        return str(rebuild_again.delay().id)

    result = rebuild_again.delay()
    assert len(umbel_inbox.run()) == 1
    assert result.get() == result.id


def test_async_tasks_run_inside_and_outside_a_loop(umbel_inbox: Inbox) -> None:
    async def scenario() -> list[str]:
        one, two = greet.delay("a"), greet.delay("b")
        umbel_inbox.run_next()
        await umbel_inbox.arun()
        return [await one, await two]

    assert asyncio.run(scenario()) == ["hello a", "hello b"]
    three = greet.delay("c")
    limited.delay()
    umbel_inbox.run()
    assert three.get() == "hello c"


def test_a_task_that_sends_itself_is_stopped(umbel_inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.testing.inbox.RUNS_MAX", 20)

    @app.task(name="shop.again", ignore_result=True)
    def again() -> None:
        again.delay()

    again.delay()
    with pytest.raises(RuntimeError, match=r"20 calls ran.*shop\.again\(\): does it send itself"):
        umbel_inbox.run()
