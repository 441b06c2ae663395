"""umbel_app, umbel_eager, umbel_worker and umbel_clock on the shop's own app."""

import asyncio
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from shop import tasks
from shop.tasks import add, app, fail, fetch, greet, limited, mail, nightly, order, pack, rebuild, ship

from umbel import App, chain, group
from umbel.clock import cluster_now
from umbel.errors import ConfigurationError, ResultTimeout, UmbelError
from umbel.testing import Clock, EmbeddedWorker, Inbox, embedded

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _no_mails() -> Iterator[None]:
    yield
    tasks.MAILS.clear()
    tasks.THREADS.clear()


# -- umbel_app -------------------------------------------------------------------------------------


def test_the_projects_own_app_works_on_a_file_of_the_test(umbel_app: App) -> None:
    assert umbel_app is app
    assert app.settings.broker.startswith("sqlite:///")
    add.delay(1, 2)  # Redis is not there
    assert Path(app.settings.broker.removeprefix("sqlite://")).is_file()
    assert HERE not in Path(app.settings.broker).parents


def test_afterwards_it_is_as_it_was() -> None:
    assert app.settings.broker == "redis://127.0.0.1:1/0"
    assert app.settings.result_extended is False
    assert app.eager_backend is None


def test_tasks_of_a_test_are_gone_after_it(tmp_path: Path) -> None:
    with embedded(app, tmp_path):

        @app.task(name="shop.mine")
        def mine() -> None: ...

        @app.task(bind=True)
        def bound(self: object) -> None: ...

        assert "shop.mine" in app.tasks
    assert {task.name.rpartition(".")[0] for task in app.tasks.values()} == {"shop.tasks"}


class TestSettings:
    @pytest.fixture
    def umbel_settings(self) -> dict[str, Any]:
        return {"result_extended": True, "task_routes": {"shop.tasks.add": "sums"}}

    def test_a_project_changes_settings_for_its_tests(self, umbel_inbox: Inbox) -> None:
        assert app.settings.result_extended is True
        add.delay(1)
        pack.delay(1)
        assert [call.queue for call in umbel_inbox] == ["sums", "celery"]


def test_a_wrong_setting_is_named_with_its_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="umbel_settings"), embedded(app, tmp_path, result_expire=1):
        pass
    assert app.settings.broker == "redis://127.0.0.1:1/0"


# -- umbel_eager -----------------------------------------------------------------------------------


def test_tasks_run_where_they_are_sent(umbel_eager: App) -> None:
    assert umbel_eager is app
    assert add.delay(1, 2).get() == 3
    assert greet.delay("you").get() == "hello you"
    assert fail.delay("lost").state == "FAILURE"
    assert fetch.delay("a").get() == "fetched a"
    order.delay(1)
    assert tasks.MAILS == [("you", "order 1")]


def test_eager_holds_in_every_thread_and_loop(umbel_eager: App) -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(add.delay(1, 2).get(timeout=30)))
    thread.start()
    thread.join()

    async def scenario() -> None:
        assert await greet.delay("loop") == "hello loop"

    assert found == [3]
    asyncio.run(scenario())


def test_eager_tasks_wait_for_the_clock(umbel_eager: App, umbel_clock: Clock) -> None:
    began, result = umbel_clock.now, fetch.delay("a")
    mail.apply_async(["you", "at ten"], countdown=10)
    with pytest.raises(ResultTimeout, match="umbel_clock"):
        result.get()
    umbel_clock.advance(timedelta(minutes=1))
    assert tasks.MAILS == [("you", "at ten")]
    assert result.state == "RETRY"
    umbel_clock.advance(60)
    assert result.get() == "fetched a"
    assert umbel_clock.now - began == timedelta(minutes=2)


# -- umbel_worker ----------------------------------------------------------------------------------


def test_a_worker_runs_what_is_sent_from_every_queue_of_the_app(umbel_worker: EmbeddedWorker) -> None:
    assert chain(pack.s(7), ship.s()).delay().get(timeout=30) == "shipped: packed 7"
    assert group(add.s(n, n) for n in range(5)).delay().get(timeout=30) == [0, 2, 4, 6, 8]
    assert greet.delay("you").get(timeout=30) == "hello you"
    assert limited.delay().get(timeout=30) == "in time"
    with pytest.raises(LookupError, match="lost"):
        fail.delay("lost").get(timeout=30)
    assert rebuild.delay("books").get(timeout=30) == "books"
    [thread] = tasks.THREADS
    assert thread.startswith("umbel-threads")


def test_a_test_waits_until_all_is_done(umbel_worker: EmbeddedWorker) -> None:
    order.delay(9)
    mail.apply_async(["you", "much later"], countdown=3600)
    umbel_worker.wait_idle()
    assert tasks.MAILS == [("you", "order 9")]


def test_a_task_that_goes_on_is_named_by_its_number(umbel_worker: EmbeddedWorker) -> None:
    ended = threading.Event()

    @app.task(name="shop.waiting", queue="patience")
    def wait() -> None:  # which the worker does not know yet
        ended.wait(30)

    try:
        wait.delay()
        with pytest.raises(UmbelError, match=r"still has 1 tasks to run after 0\.1 s"):
            umbel_worker.wait_idle(timeout=0.1)
    finally:
        ended.set()
    umbel_worker.wait_idle()


def test_a_worker_runs_what_falls_due_when_the_clock_is_moved(
    umbel_clock: Clock, umbel_worker: EmbeddedWorker
) -> None:
    result = fetch.apply_async(["a"], countdown=3600)
    umbel_clock.advance(3599)
    assert result.state == "PENDING"
    umbel_clock.advance(1 + 60 + 60)
    assert result.get(timeout=30) == "fetched a"


# -- umbel_clock -----------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", ["umbel_eager", "umbel_worker"])
def test_periodic_tasks_run_at_their_times(
    runs: str, umbel_clock: Clock, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(runs)
    umbel_clock.set(datetime(2026, 3, 1, 4, 0, tzinfo=UTC))
    umbel_clock.advance(timedelta(minutes=14))
    assert tasks.MAILS == []
    umbel_clock.advance(60)
    assert tasks.MAILS == [("all", "nightly")]
    umbel_clock.advance_to("2026-03-03T04:15:00+00:00")
    assert tasks.MAILS == [("all", "nightly")] * 3


def test_an_inbox_gets_periodic_tasks_and_runs_none(umbel_inbox: Inbox, umbel_clock: Clock) -> None:
    umbel_clock.set(datetime(2026, 3, 1, 4, 0))  # noqa: DTZ001 (UTC)
    umbel_clock.advance(3600)
    assert umbel_inbox.assert_sent_once(nightly).result.state == "PENDING"
    assert tasks.MAILS == []
    umbel_inbox.run()
    assert tasks.MAILS == [("all", "nightly")]


def test_the_clock_stands_still_and_goes_forwards(
    umbel_clock: Clock, umbel_inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = umbel_clock.now
    call = add.apply_async([1], countdown=90)
    [sent] = umbel_inbox
    assert sent.eta == began + timedelta(seconds=90)
    assert call.id == sent.id
    assert umbel_clock.now == began
    with pytest.raises(ValueError, match="negative"):
        umbel_clock.advance(-1)
    with pytest.raises(ValueError, match="already"):
        umbel_clock.advance_to(began - timedelta(seconds=1))
    monkeypatch.setattr("umbel.testing.bench.MOMENTS_MAX", 10)
    with pytest.raises(RuntimeError, match="more than 10 times"):
        umbel_clock.advance(timedelta(days=12))


def test_afterwards_time_passes_again() -> None:
    assert abs(cluster_now() - datetime.now(UTC).timestamp()) < 60


# -- who does not go with whom ---------------------------------------------------------------------


@pytest.mark.parametrize("other", ["umbel_worker", "umbel_eager"])
def test_one_test_has_one_way_to_run_tasks(
    umbel_inbox: Inbox, other: str, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(ValueError, match=f"both umbel_inbox and {other}"):
        request.getfixturevalue(other)
