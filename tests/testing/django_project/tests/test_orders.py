"""The fixtures behind Django's test client, inside the test's transaction."""

import pytest
from django.test import Client, TestCase
from shop.models import Order
from shop.tasks import pack

from umbel import App
from umbel.testing import EmbeddedWorker, Inbox


class TestOrders(TestCase):
    @pytest.fixture(autouse=True)
    def _sent(self, umbel_inbox: Inbox) -> None:
        self.inbox = umbel_inbox

    def test_an_order_is_packed_by_a_task(self) -> None:
        answer = self.client.post("/orders/7/")
        assert answer.status_code == 202
        call = self.inbox.assert_sent_once(pack, 7)
        assert call.id == answer.json()["task_id"]
        assert Order.objects.get(number=7).state == "new"
        self.inbox.run()
        assert Order.objects.get(number=7).state == "packed"
        assert call.result.get() == "packed 7"

    def test_what_waits_for_the_commit_is_sent_when_django_runs_its_callbacks(self) -> None:
        self.client.post("/paid/7/")
        self.inbox.assert_empty()
        with self.captureOnCommitCallbacks(execute=True) as callbacks:
            answer = self.client.post("/paid/8/")
        assert len(callbacks) == 1
        assert self.inbox.assert_sent_once(pack, 8).id == answer.json()["task_id"]
        self.inbox.run()
        assert Order.objects.count() == 0, "tasks of a test run in its transaction, and leave it open"

    def test_the_next_test_sees_nothing_of_it(self) -> None:
        assert not Order.objects.exists()
        self.inbox.assert_empty()


@pytest.mark.usefixtures("umbel_eager")
class TestEagerOrders(TestCase):
    def test_an_order_is_packed_at_once(self) -> None:
        self.client.post("/orders/8/")
        assert Order.objects.get(number=8).state == "packed"


def test_a_view_gets_its_result_in_eager_mode(umbel_eager: App) -> None:
    assert Client().get("/echo/hello/").json() == {"said": "hello"}


def test_a_view_gets_its_result_from_a_worker(umbel_worker: EmbeddedWorker) -> None:
    assert Client().get("/echo/hello/").json() == {"said": "hello"}
