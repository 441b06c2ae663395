"""The pages for a cluster of Celery workers alone, in the real browser: what they show, and what they do."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import sync_playwright

from tests.interop.mixed_cluster import CeleryWorker
from tests.servers.redis import RedisServer
from tests.waiting import wait_until
from tests.web.pages.shop import CHROMIUM, Looker
from tests.web.serving import serving
from umbel.app.app import App

ADD = "shared_tasks.add"
NAMES = ("ash", "beech")


@pytest.fixture(scope="module")
def looker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Looker]:
    home = tmp_path_factory.mktemp("celery-pages")
    server = RedisServer(home)
    server.start()
    variables = {"CELERY_BROKER_URL": server.url, "CELERY_RESULT_BACKEND": server.url}
    first, second = (
        CeleryWorker("celery", home, queues=["celery"], name=name, **variables) for name in NAMES
    )
    app = App("elsewhere", broker=server.url)
    try:
        with first, second, serving(app, home / "web.db") as served, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            wait_until(
                lambda: len([one for one in served.dashboard.cluster.nodes() if one.state == "alive"]) == 2,
                deadline_s=120.0,
                what="the dashboard to see both workers",
            )
            yield Looker(app, served, browser)
            browser.close()
    finally:
        server.stop()


@pytest.fixture(autouse=True)
def no_errors(looker: Looker) -> Iterator[None]:
    looker.errors.clear()
    yield
    assert looker.errors == []


def node(looker: Looker, name: str) -> str:
    return next(
        one.node for one in looker.served.dashboard.cluster.nodes() if one.node.startswith(f"{name}@")
    )


def test_members_tasks_and_queues_are_those_of_the_cluster(looker: Looker) -> None:
    sent = {looker.send(ADD, number, 1): number + 1 for number in range(8)}
    looker.wait_for(*sent, state="SUCCESS")
    page = looker.open("/cluster")
    for name in NAMES:
        assert page.locator(f".ring a[aria-label^='{node(looker, name)}: alive']").count() == 1
        assert "celery" in page.locator(f"tr[data-node='{node(looker, name)}']").inner_text()
    page = looker.open(f"/tasks?name={ADD}")
    rows = {one.get_attribute("data-task"): one.inner_text() for one in page.locator("tr[data-task]").all()}
    assert rows.keys() == sent.keys()
    assert all("succeeded" in text for text in rows.values())
    for task_id, result in list(sent.items())[:2]:
        page = looker.open(f"/tasks/{task_id}")
        assert str(result) in page.locator("main").inner_text()
        assert page.locator("#badge .state:has-text('succeeded')").count() == 1
    page = looker.open("/queues")
    looker.until(page.locator("tr[data-queue=celery]:has-text('beech@')"), "who consumes the queue")
    assert "ash@" in page.locator("tr[data-queue=celery]").inner_text()


def test_what_celery_supports_is_done_and_answered(looker: Looker) -> None:
    name = node(looker, "ash")
    page = looker.open(f"/workers/{name}")
    assert page.locator(".cell[data-pid]").count() == 1
    assert "pool will grow" in looker.do("grow", n="1")
    looker.until(page.locator(".cell[data-pid]"), "another child process", count=2)
    assert name in looker.do("rate_limit", task=ADD, rate="100/s")
    assert name in looker.do("time_limit", task=ADD, soft="20", hard="30")
    failed = looker.send(ADD, 1, "x")
    looker.wait_for(failed, state="FAILURE")
    page = looker.open(f"/tasks/{failed}")
    looker.confirm(page.get_by_role("button", name="Retry"))
    again = page.locator("#replies a.mono").inner_text()
    looker.wait_for(again, state="FAILURE")


def test_a_queue_is_paused_for_celerys_workers_and_resumed(looker: Looker) -> None:
    page = looker.open_queue("celery")
    looker.confirm(page.get_by_role("button", name="Pause"))
    told = looker.replies()
    assert all(node(looker, name) in told for name in NAMES)
    looker.until(page.locator("#acts .state:has-text('paused')"), "the pause to be shown")
    run, revoked = looker.send(ADD, 5, 5), looker.send(ADD, 6, 6)
    looker.until(page.locator("[data-figure=ready]:text-is('2')"), "two messages that wait")
    looker.served.dashboard.app.control.revoke(revoked)
    page = looker.open_queue("celery")
    looker.do("resume_queue")
    looker.wait_for(run, state="SUCCESS")
    looker.wait_for(revoked, state="REVOKED")


def test_a_node_is_stopped_and_leaves(looker: Looker) -> None:
    name = node(looker, "beech")
    page = looker.open(f"/workers/{name}")
    assert looker.confirm(page.get_by_role("button", name="Stop node")) == f"Stop {name}?"
    page = looker.open("/cluster")
    looker.until(page.locator(f"tr[data-node='{name}']:has-text('left')"), "the node that left")
    looker.until(page.locator("#sentence:has-text('The only worker answers.')"), "one worker to be left")
