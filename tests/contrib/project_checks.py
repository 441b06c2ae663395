"""Sending on commit, in the store of examples/django_store: test_django.py runs it on each database."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest
from asgiref.sync import async_to_sync
from django.db import IntegrityError, connection, transaction
from django.test import Client, override_settings

from store.models import Item, Order
from store.tasks import pack
from tests.waiting import wait_until
from umbel import chain, group
from umbel.app.sending.preparation import Prepared
from umbel.app.settings import with_others
from umbel.contrib.django import app
from umbel.contrib.django.application import read_settings
from umbel.contrib.django.connections import leave_to_parent
from umbel.errors import BrokerUnavailable, ConfigurationError, OutboxError
from umbel.outbox.table import POSTGRESQL, SQLITE, Statements
from umbel.testing import EmbeddedWorker, Inbox


@app.task
def add(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(unique_for=60)
def tidy(shelf: int) -> int:
    return shelf


class Refused(Exception):
    pass


@contextmanager
def rolled_back() -> Iterator[None]:
    with suppress(Refused), transaction.atomic():
        yield
        raise Refused


@pytest.fixture
def now_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_send_on_commit", None)


def test_what_is_sent_in_a_transaction_waits_for_its_commit(umbel_inbox: Inbox) -> None:
    numbers = [1, 2]
    with transaction.atomic():
        result = add.delay(numbers)
        app.send_task(add.name, [[3]])
        numbers.append(100)  # too late
        umbel_inbox.assert_empty()
    assert [call.args for call in umbel_inbox] == [([1, 2],), ([3],)]
    umbel_inbox.run()
    assert result.get() == 3


def test_what_is_sent_in_a_transaction_that_is_rolled_back_is_not_sent(umbel_inbox: Inbox) -> None:
    with rolled_back():
        add.delay([1])
        add.delay_on_commit([2])
    add.delay([3])
    assert [call.args for call in umbel_inbox] == [([3],)]


def test_a_rollback_to_a_savepoint_drops_what_was_sent_since(umbel_inbox: Inbox) -> None:
    with transaction.atomic():
        add.delay([1])
        with rolled_back():
            add.delay([2])
    assert [call.args for call in umbel_inbox] == [([1],)]


def test_groups_chains_and_batches_wait_too(umbel_inbox: Inbox) -> None:
    with transaction.atomic():
        group(add.s([1]), add.s([2])).delay()
        chain(add.s([3]), pack.s()).delay()
        app.send_many([add.s([4]), add.s([5])])
        async_to_sync(add.adelay)([6])
        with app.send_at_once():
            async_to_sync(add.adelay)([7])
            assert umbel_inbox[0].args == ([7],)
            umbel_inbox.run()
        umbel_inbox.assert_empty()
    assert len(umbel_inbox) == 6


def test_a_block_may_ask_for_the_opposite(umbel_inbox: Inbox) -> None:
    with transaction.atomic():
        with app.send_at_once():
            add.delay([1])
        assert len(umbel_inbox) == 1
        assert add.apply([[2]]).get() == 2, "apply runs it here"
        with app.eager():
            assert add.delay([3]).get() == 3


@pytest.mark.usefixtures("now_off")
def test_where_not_all_sends_wait_some_can(umbel_inbox: Inbox) -> None:
    with transaction.atomic():
        add.delay([1])
        assert len(umbel_inbox) == 1
        add.delay_on_commit([2])
        add.apply_async_on_commit([[3]], queue="slow", using="default")
        with app.send_on_commit():
            add.s([4]).delay()
        assert len(umbel_inbox) == 1
    assert [(call.args[0], call.queue) for call in umbel_inbox] == [
        ([1], "celery"),
        ([2], "celery"),
        ([3], "slow"),
        ([4], "celery"),
    ]


@pytest.mark.usefixtures("umbel_app")
def test_a_unique_task_takes_its_key_when_it_is_sent() -> None:
    with rolled_back():
        tidy.delay(1)
    first = tidy.delay(1)
    with transaction.atomic():
        second = tidy.delay(1)
        third = tidy.delay(2)
        assert second.id != first.id
    assert second.id == first.id, "the call that waits already"
    assert third.id == tidy.delay(2).id


@pytest.mark.usefixtures("umbel_app")
def test_the_signature_of_a_unique_task_takes_its_key_on_commit_too() -> None:
    with rolled_back():
        lost = tidy.s(3).delay()
    assert tidy.s(3).delay().id != lost.id


def test_an_outbox_is_written_in_the_transaction_itself() -> None:
    kind = {"postgresql": POSTGRESQL, "sqlite": SQLITE}[connection.vendor]
    with connection.cursor() as cursor:
        for statement in Statements(kind).create():
            cursor.execute(statement)
        with rolled_back(), app.outbox():
            add.delay([1])
        with transaction.atomic(), app.outbox():
            sent = [add.delay([2]).id, add.delay([3]).id]
            with pytest.raises(OutboxError, match="unique"):
                tidy.delay(1)
        with app.outbox(using="default"), pytest.raises(OutboxError, match=r"transaction\.atomic"):
            add.delay([4])
        cursor.execute("SELECT task_id FROM umbel_outbox ORDER BY id")
        assert [task_id for (task_id,) in cursor.fetchall()] == sent


def test_without_autocommit_a_send_that_should_wait_is_refused(umbel_inbox: Inbox) -> None:
    transaction.set_autocommit(False)
    try:
        with pytest.raises(transaction.TransactionManagementError, match="manual transaction management"):
            add.delay([1])
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    umbel_inbox.assert_empty()


def test_a_broker_that_is_away_at_the_commit_is_told_to_who_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = {"broker": "redis://127.0.0.1:1/0", "publish_timeout_s": 0.0}
    monkeypatch.setattr(app, "settings", with_others(app.settings, nowhere, source="this test"))
    transaction_ends = transaction.atomic()
    transaction_ends.__enter__()
    Item.objects.create(name="shoe", left=1)
    add.delay([1])
    with pytest.raises(BrokerUnavailable):
        transaction_ends.__exit__(None, None, None)
    assert Item.objects.filter(name="shoe").exists()
    app.close()


def test_one_send_that_fails_at_the_commit_takes_no_other_with_it(
    umbel_inbox: Inbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish, done = app.publish, list[str]()

    def refuse_some(prepared: Sequence[Prepared]) -> None:
        if not connection.in_atomic_block and prepared[0].task_id.startswith("bad"):
            raise BrokerUnavailable(f"no broker for {prepared[0].task_id}")
        publish(prepared)

    monkeypatch.setattr(app, "publish", refuse_some)
    ends = transaction.atomic()
    ends.__enter__()
    add.apply_async([[1]], task_id="bad 1")
    with rolled_back():
        add.apply_async([[2]], task_id="bad 2")
    transaction.on_commit(lambda: done.append("another's"))
    add.delay([3])
    with transaction.atomic():
        add.apply_async([[4]], task_id="bad 4")
        add.delay([5])
    with rolled_back():
        add.delay([6])
    transaction.on_commit(lambda: done.append("the last"))
    with pytest.raises(BrokerUnavailable, match="no broker for bad 1"):
        ends.__exit__(None, None, None)
    assert done == ["another's", "the last"]
    assert [call.args for call in umbel_inbox] == [([3],), ([5],)]
    for lost in ("bad 1", "bad 4"):
        assert f"task {add.name} ({lost}) was not sent: no broker for {lost}" in caplog.text
    assert "bad 2" not in caplog.text
    with transaction.atomic():
        add.delay([7])
    assert len(umbel_inbox) == 3, "nothing is left of it"


def test_an_order_that_cannot_be_is_rolled_back_with_its_task(umbel_inbox: Inbox) -> None:
    item = Item.objects.create(name="scarf", left=1)
    orders = [Client().post("/orders/scarf/").status_code for _ in range(2)]
    assert orders == [202, 409]
    (made,) = Order.objects.filter(item=item)
    umbel_inbox.assert_sent_once(pack, made.pk)
    with pytest.raises(IntegrityError), transaction.atomic():
        Item.objects.create(name="scarf", left=1)
    umbel_inbox.run()
    made.refresh_from_db()
    assert made.state == "packed"


def test_a_worker_runs_it_in_threads_whose_connections_are_closed(umbel_worker: EmbeddedWorker) -> None:
    item = Item.objects.create(name="glove", left=1)
    with transaction.atomic():
        made = Order.objects.create(item=item)
        result = pack.delay(made.pk)
    assert result.get(timeout=30) == f"packed order {made.pk}: glove"
    if connection.vendor == "postgresql":
        umbel_worker.wait_idle()
        wait_until(lambda: _connections() == 1, what="ours to be the only connection")


def _connections() -> int:
    """The server ends a session a moment after its client has closed the connection."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND backend_type = 'client backend'"
        )
        return int(cursor.fetchone()[0])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"BROKR": "redis://"},
            r"unknown setting 'BROKR' in UMBEL of Django's settings; did you mean 'BROKER'\?",
        ),
        ({"send_on_comit": 1}, r"unknown setting 'send_on_comit' in .*; did you mean 'send_on_commit'\?"),
        ({"LEASE_S": "long"}, "setting 'lease_s' in UMBEL of Django's settings is 'long': must be a number"),
        ({"SEND_ON_COMMIT": "orders"}, "it must be True, False or one of DATABASES: 'default'"),
        ({"broker": "", "BROKER": ""}, "UMBEL of Django's settings has 'broker' twice"),
        ("redis://:hunter2@host", "^UMBEL of Django's settings is of type str: it must be a dict, such as"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_remedy(given: object, said: str) -> None:
    with override_settings(UMBEL=given), pytest.raises(ConfigurationError, match=said):
        read_settings()


def test_a_forked_process_leaves_its_parents_connection_alone() -> None:
    connection.ensure_connection()
    parents, child = connection.connection, os.fork()
    if child == 0:
        leave_to_parent()
        is_new = not Order.objects.filter(pk=0).exists() and connection.connection is not parents
        os._exit(0 if is_new else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert connection.connection is parents
    assert not Order.objects.filter(pk=0).exists(), "the parent's still works"
