"""What the pages show is what the ledger knows: real workers, the real browser."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, Response

from tests.history import published
from tests.waiting import wait_until
from tests.web.pages.shop import Shop, open_shop
from tests.web.pages.shop_tasks import HOSTILE_NAME
from umbel.web.pages import MENU
from umbel.web.settings import Role

DARK = {"/", "/cluster", "/failures"}  # between them they have all colours
SERIOUS = {"serious", "critical"}
FIRST_PAGE_MAX = 150_000
ADDED, PAID = 40, 6
LAKE_HOUR = "/cluster?since=2026-11-15T09:00&until=2026-11-15T10:00"
FULLER = {"/tasks": "/tasks?name=shop.pay", "/cluster": LAKE_HOUR}  # with all that these pages can have
VIEW = "<script>document.title=1</script> late"
HOSTILE = (
    "<img src=x onerror=\"document.title='taken'\"> \x1b[31mred \u202egnp.exe \u05d0\u05d1\u05d2 "
    + "x" * 10_000
)


class Ledger:
    """What was sent, by the test's own book."""

    def __init__(self, shop: Shop) -> None:
        self.added = {shop.send("shop.add", number, 1): number + 1 for number in range(ADDED)}
        self.paid = [shop.send("shop.pay", f"order-{number}") for number in range(PAID)]
        self.hostile = shop.send(HOSTILE_NAME, HOSTILE)
        gate = shop.cluster.home / "the other parts of the order ended"
        self.order = shop.send("shop.order", kwargs={"gate": str(gate)})
        self.again = shop.send("shop.again", "order-7")
        shop.send("shop.refuse", "order-8")
        shop.wait_for(*self.added, *self.paid, self.hostile, self.order, self.again)
        wait_until(lambda: len(_flow(shop, self.order)) == 5, what="all but the slow part of the chord")
        gate.touch()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with open_shop(tmp_path_factory.mktemp("pages"), "apple", "birch") as found:
        yield found


@pytest.fixture(scope="module")
def ledger(shop: Shop) -> Ledger:
    return Ledger(shop)


@pytest.fixture(autouse=True)
def no_errors(shop: Shop) -> Iterator[None]:
    shop.errors.clear()
    yield
    assert shop.errors == []


def test_the_first_page_is_small_and_says_that_all_is_well(shop: Shop, ledger: Ledger) -> None:
    bodies: list[Response] = []
    page = shop.look(context := shop.visit(Role.ADMIN))
    page.on("response", lambda one: bodies.append(one) if "stream" not in one.url else None)
    page.goto(f"{shop.served.url}/")
    page.locator(".chart canvas").first.wait_for()
    sizes = {one.url: one.request.sizes()["responseBodySize"] for one in bodies}
    assert sum(sizes.values()) < FIRST_PAGE_MAX, sizes
    assert len(sizes) >= 7, "page, style sheets, scripts, rates"
    shop.until(page.locator("#sentence:text-is('All 2 workers answer.')"), "all to be well")
    assert page.locator(".badge").inner_text() == "staging"
    shop.until(page.locator(f"#failing:has-text('{PAID} of {PAID}')"), "what fails most")
    context.close()


def test_the_list_of_tasks_is_what_was_sent(shop: Shop, ledger: Ledger) -> None:
    page = shop.open("/tasks?state=FAILURE&name=shop.pay")
    shown = [one.get_attribute("data-task") for one in page.locator("#tasks tbody tr").all()]
    assert sorted(map(str, shown)) == sorted(ledger.paid)
    assert page.locator("[data-total]").get_attribute("data-total") == str(PAID)
    page = shop.open(f"/tasks?{urlencode({'name': 'shop.add', 'state': 'SUCCESS', 'text': '(39, 1)'})}")
    [found] = page.locator("#tasks tbody tr").all()
    assert ledger.added[str(found.get_attribute("data-task"))] == ADDED


def test_older_tasks_are_on_the_next_page(shop: Shop, ledger: Ledger) -> None:
    page = shop.open("/tasks")
    seen: list[str] = []
    while True:
        seen += [str(one.get_attribute("data-task")) for one in page.locator("#tasks tbody tr").all()]
        older = page.get_by_role("link", name="Older")
        if not older.count():
            break
        older.click()
        page.wait_for_url("**cursor=**")
    assert len(seen) == len(set(seen)) >= ADDED + PAID
    assert {*ledger.added, *ledger.paid} <= set(seen)


def test_a_list_that_is_open_grows_by_itself_and_keeps_what_is_selected(shop: Shop, ledger: Ledger) -> None:
    page = shop.open("/tasks?name=shop.weekly")
    assert "No task matches" in page.locator("#list").inner_text()
    shop.send("shop.weekly")
    shop.until(page.locator("#tasks tbody tr"), "the task that was sent meanwhile")
    page.locator("input[data-pick]").check()
    total = page.locator("[data-total]")
    shop.send("shop.weekly")
    wait_until(lambda: total.get_attribute("data-total") == "2", what="the count to follow")
    assert page.locator("input[data-pick]:checked").count() == 1


def test_hostile_names_and_arguments_are_shown_as_text(shop: Shop, ledger: Ledger) -> None:
    page = shop.open(f"/tasks/{ledger.hostile}")
    assert page.locator("h1").inner_text() == HOSTILE_NAME
    arguments = page.locator("#args").inner_text()
    assert "<img src=x onerror=" in arguments and "\\x1b[31mred" in arguments
    assert "\u05d0\u05d1\u05d2" in arguments and "\u202e" not in arguments
    for path in (f"/tasks/{ledger.hostile}", "/tasks", f"/tasks?{urlencode({'text': '<script>'})}", "/"):
        page = shop.open(path)
        assert page.title() != "taken"
        assert page.locator("main script, main img").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    missing = shop.context.request.get(f"{shop.served.url}/tasks/%3Cscript%3E")
    assert missing.status == 404 and "<script>" not in missing.text().partition("<main")[2]


def test_the_critical_path_of_a_chord_of_chains_is_the_slow_chain(shop: Shop, ledger: Ledger) -> None:
    wait_until(lambda: len(_flow(shop, ledger.order)) == 7, what="all seven tasks of the chord")
    page = shop.open(f"/tasks/{ledger.order}")
    critical = page.locator(".workflow a:has(.critical)").all()
    ids = [str(one.get_attribute("href")).rpartition("/")[2] for one in critical]
    assert [shop.args_of(one) for one in ids] == ["()", "(4, 5)", "(9, 6)", "([6, 15, 15],)"]
    assert page.locator(".workflow .edge.critical").count() == 3
    assert page.locator(".workflow rect").count() == 7


def test_a_retried_task_shows_both_attempts(shop: Shop, ledger: Ledger) -> None:
    page = shop.open(f"/tasks/{ledger.again}")
    states = page.locator("#attempts tbody .state").all_inner_texts()
    assert [one.strip() for one in states] == ["will retry", "succeeded"]
    assert "gateway away" in page.locator("#attempts").inner_text()
    lanes = page.locator(".spacetime g > title").all_text_contents()
    assert any(one.startswith("client ") for one in lanes) and any(one.startswith("child ") for one in lanes)


def test_history_is_what_the_lake_has(shop: Shop) -> None:
    for path in ("/history", "/cluster?period=day"):
        assert "no tables in the lake" in shop.open(path).locator("main").inner_text()
    story = published.Story()
    published.publish(Path(shop.served.dashboard.app.settings.history_lake), story.rows)
    ended = [row for row in story.rows["attempts"] if row["ended_at"] is not None]
    failed = [row for row in ended if row["outcome"] == "FAILURE"]
    page = shop.open("/history?by=worker&mark=2026-11-15T09:30")
    page.locator(".chart canvas").first.wait_for()
    assert page.locator("[data-figure=n]").inner_text() == str(len(ended))
    assert page.locator("[data-figure=failed]").inner_text() == str(len(failed))
    assert page.locator("#groups tbody tr").count() == len({row["worker"] for row in ended})
    before = [row for row in ended if row["ended_at"].minute < 30 and row["ended_at"].hour == 9]
    assert page.locator("[data-half=before] td").nth(1).inner_text() == str(len(before))


def test_the_slider_goes_back_through_what_the_lake_has(shop: Shop) -> None:
    """w2 was lost at 09:25 and came back at 09:26; at 09:55 w3 left."""
    published.publish(
        Path(shop.served.dashboard.app.settings.history_lake), published.Story(tasks=5).rows, number=2
    )
    page = shop.open(LAKE_HOUR)
    rows = page.locator("#happened tbody tr")
    assert [one.get_attribute("data-happened") for one in rows.all()] == [
        *("left", "returned", "lost", "elected", "elected", "joined", "joined", "joined")
    ]
    page.locator("#ago").fill("2100")  # of the hour: 09:25
    shop.until(page.locator("#ring:has-text('Replayed: 2026-11-15 09:25:00')"), "the replay of the loss")
    assert page.locator("#ago-said").inner_text() == "2026-11-15 09:25:00 UTC"
    assert page.locator(".ring g:has(> title:text-is('w2@shop: lost'))").count() == 1
    assert rows.count() == 6 and "2 of 3" in str(page.locator(".ring").text_content())
    page.get_by_role("link", name="Later change").click()
    page.locator("#ring:has-text('Replayed: 2026-11-15 09:26:00')").wait_for()
    assert page.locator(".ring g:has(> title:text-is('w2@shop: alive'))").count() == 1
    assert "elected for reindex" in page.locator("#happened").inner_text()
    page = shop.open("/cluster?since=2026-01-01T00:00&until=2026-01-02T00:00")
    assert "Nothing was recorded then" in page.locator(".replay").inner_text()
    shop.until(page.locator("#sentence:has-text('All 2 workers')"), "all to be well")
    assert page.locator(".ring").count() == 1
    page = shop.open("/cluster?since=2026-01-02T00:00&until=2026-01-01T00:00")
    assert "exchange its two times" in page.locator(".replay").inner_text()


def test_a_view_is_saved_opened_by_others_and_deleted(shop: Shop, ledger: Ledger) -> None:
    page = shop.open("/tasks?state=FAILURE&name=shop.pay")
    page.get_by_text("Columns", exact=True).click()
    page.locator("fieldset input[value=error]").check()
    page.locator("fieldset input[value=clock]").uncheck()
    page.get_by_role("button", name="Show columns").click()
    page.wait_for_url("**columns=error**")
    shown = page.locator("#tasks th").all_inner_texts()
    assert "Error" in shown and "Clock" not in shown
    page.get_by_text("Save this view").click()
    shop.do("save_view", view=VIEW)
    link = page.locator(f".saved a[title='{VIEW}'][aria-current]")
    shop.until(link, "the view that was saved, as the current one")
    other = shop.look(context := shop.visit(Role.VIEWER))
    other.goto(f"{shop.served.url}/tasks")
    other.locator(".saved a").click()
    other.locator(".saved a[aria-current]").wait_for()
    assert other.locator("#tasks th").all_inner_texts() == shown
    assert other.locator("[data-total]").get_attribute("data-total") == str(PAID)
    assert other.locator("main script").count() == 0 and other.locator("form[data-action]").count() == 0
    context.close()
    assert shop.confirm(page.get_by_role("button", name="Delete view")) == f"Delete the view {VIEW}?"
    wait_until(lambda: page.locator(".saved").count() == 0, what="no view any more")


def test_sql_is_read_only_and_can_be_downloaded(shop: Shop) -> None:
    query = "select name, count(*) as n from attempts group by name order by name"
    page = shop.open("/history")
    page.locator("textarea[name=sql]").fill(query)
    page.get_by_role("button", name="Run").click()
    page.locator("#answer").wait_for()
    rows = [one.locator("td").all_inner_texts() for one in page.locator("#answer tbody tr").all()]
    with page.expect_download() as download:
        page.get_by_role("link", name="CSV").click()
    written = list(csv.reader(io.StringIO(download.value.path().read_text())))
    assert written == [["name", "n"], *rows]
    secret = "select 'password=hunter2' as told"
    assert (
        "hunter2" not in shop.open(f"/history?{urlencode({'sql': secret})}").locator("#answer").inner_text()
    )
    page = shop.open(f"/history?{urlencode({'sql': 'drop table attempts'})}")
    assert "read-only" in page.locator("[role=alert]").inner_text()


def test_a_viewer_sees_no_actions_and_may_take_none(shop: Shop, ledger: Ledger) -> None:
    page = shop.look(context := shop.visit(Role.VIEWER))
    for path in ("/", "/tasks", f"/tasks/{ledger.paid[0]}", "/failures", "/schedule", "/elections"):
        page.goto(shop.served.url + path)
        assert page.locator("form[data-action], [data-needs-picked]").count() == 0, path
    asked = context.request.get(f"{shop.served.url}/history/download?sql=select+1&as=csv")
    assert asked.status == 403 and "operator" in asked.text()
    csrf = page.evaluate("JSON.parse(document.body.getAttribute('hx-headers'))['X-CSRF-Token']")
    headers = {"X-CSRF-Token": csrf, "Origin": shop.served.url}
    form: dict[str, str | float | bool] = {"action": "retry", "ids": ledger.paid[0]}
    refused = context.request.post(f"{shop.served.url}/do", form=form, headers=headers)
    assert "Not done" in refused.text() and "operator" in refused.text()
    context.close()


def test_no_page_has_a_serious_fault_for_people_who_cannot_see_it(shop: Shop, ledger: Ledger) -> None:
    """All rules in light; in the dark what differs there, which is contrast."""
    context = shop.visit(Role.ADMIN, bypass_csp=True)
    page, faults = shop.look(context), list[str]()
    node = shop.served.dashboard.cluster.nodes()[0].node
    for path in [*(page.path for page in MENU), f"/workers/{node}", f"/tasks/{ledger.order}", "/login"]:
        page.emulate_media(color_scheme="light")
        page.goto(shop.served.url + FULLER.get(path, path))
        for closed in page.locator(".below summary, .replay summary").all():
            closed.click()
        faults += [f"{path} {one}" for one in _serious(page)]
        if path in DARK:
            page.emulate_media(color_scheme="dark")
            faults += [f"{path} dark {one}" for one in _serious(page, runOnly=["color-contrast"])]
    assert faults == []
    context.close()


def test_every_page_fits_a_phone(shop: Shop, ledger: Ledger) -> None:
    page = shop.look(context := shop.visit(Role.ADMIN, viewport={"width": 390, "height": 800}))
    for path in [*(page.path for page in MENU), f"/tasks/{ledger.order}", f"/tasks/{ledger.hostile}"]:
        page.goto(shop.served.url + FULLER.get(path, path))
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
    context.close()


def _serious(page: Page, **options: object) -> list[str]:
    found = Axe().run(page, options={"resultTypes": ["violations"], **options}).response["violations"]
    return [f"{one['id']} {one['nodes'][0]['html'][:200]}" for one in found if one["impact"] in SERIOUS]


def _flow(shop: Shop, order: str) -> list[str]:
    """Its tasks that ended."""
    found = shop.served.dashboard.cluster.workflow(order)
    return [] if found is None else [one.uuid for one in found.tasks if one.ended_at is not None]
