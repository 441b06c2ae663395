"""A shop for the pages: real workers, the dashboard, and the real browser that looks at it."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, sync_playwright

from tests.cluster import Cluster
from tests.waiting import wait_until
from tests.web.serving import Served, serving
from umbel.app.app import App
from umbel.web.settings import Role

HERE = Path(__file__).parent
CHROMIUM = "/usr/bin/chromium"
DEADLINE_S = 60.0
ResultT = TypeVar("ResultT")
READY = {"SUCCESS", "FAILURE", "REVOKED"}


class Looker:
    """Somebody who looks at the dashboard of an app with the real browser."""

    def __init__(self, app: App, served: Served, browser: Browser) -> None:
        self.app, self.served, self.browser = app, served, browser
        self.errors: list[str] = []
        self.context = self.visit(Role.ADMIN)
        self.page = self.look(self.context)

    def visit(self, role: Role, **options: Any) -> BrowserContext:
        """A browser of its own, logged in."""
        context = self.browser.new_context(**options)
        context.set_default_timeout(DEADLINE_S * 1000)
        context.request.post(f"{self.served.url}/session", form={"token": self.served.token(role)})
        return context

    def look(self, context: BrowserContext) -> Page:
        """A page whose errors are collected."""
        page = context.new_page()
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        return page

    def open(self, path: str) -> Page:
        self.page.goto(self.served.url + path)
        return self.page

    def open_queue(self, name: str) -> Page:
        """When the dashboard has heard of it: queues and who consumes them are asked for now and then."""

        def is_known() -> bool:
            return any(one.queue == name for one in self.served.dashboard.cluster.queues())

        wait_until(is_known, deadline_s=DEADLINE_S, what=f"the queue {name} to be known")
        return self.open(f"/queues/{name}")

    def send(self, name: str, *arguments: Any, **options: Any) -> str:
        return str(self._aside(lambda: self.app.send_task(name, arguments, **options)).id)

    def wait_for(self, *ids: str, state: str = "") -> None:
        """Until the dashboard has heard that these ended, or are in that state."""

        def heard() -> bool:
            found = [self.served.dashboard.task(one) for one in ids]
            wanted = {state} if state else READY
            return all(one is not None and one.task.state in wanted for one in found)

        wait_until(heard, deadline_s=DEADLINE_S, what=f"{len(ids)} tasks to be {state or 'ended'}")

    def args_of(self, task_id: str) -> str:
        found = self.served.dashboard.task(task_id)
        assert found is not None
        return str(found.task.args)

    def confirm(self, button: Locator) -> str:
        """Click, read the question, say yes, and read what came of it."""
        button.click()
        question = self.page.locator("dialog[open] h2").inner_text()
        self.page.locator("dialog[open] #yes").click()
        self.page.locator("dialog[open]").wait_for(state="hidden")
        assert self.page.locator("#replies .reply[data-done=True]").count() == 1, self.replies()
        return question

    def do(self, form: str, *, done: bool = True, **fields: str) -> str:
        """Fill the form of an action and send it; `done` is what is expected of it."""
        page = self.page
        for name, value in fields.items():
            page.locator(f"form[data-action={form}] [name={name}]").fill(value)
        page.locator("#replies").evaluate("one => one.replaceChildren()")
        page.locator(f"form[data-action={form}] button").first.click()
        page.locator("#replies .reply").wait_for()
        assert page.locator(f"#replies .reply[data-done={done}]").count() == 1, self.replies()
        return self.replies()

    def replies(self) -> str:
        return self.page.locator("#replies").inner_text()

    def until(self, locator: Locator, what: str, count: int = 1) -> None:
        """Until the open page shows it, without being loaded again."""
        wait_until(lambda: locator.count() >= count, deadline_s=DEADLINE_S, what=what)

    def _aside(self, work: Callable[[], ResultT]) -> ResultT:
        """In a thread of its own, because the browser's loop runs in this one."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(work).result(DEADLINE_S)

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.errors.append(f"{message.text} {message.location}")


class Shop(Looker):
    def __init__(self, cluster: Cluster, served: Served, browser: Browser) -> None:
        super().__init__(cluster.app, served, browser)
        self.cluster = cluster

    def run(self, *arguments: str) -> str:
        """What a command prints."""
        return self._aside(lambda: self.cluster.umbel(*arguments).stdout)

    def command(self, *arguments: str) -> Any:
        """What a command answers as JSON."""
        return self._aside(lambda: self.cluster.umbel_json(*arguments))


@contextmanager
def open_shop(home: Path, *workers: str, **settings: object) -> Iterator[Shop]:
    events = {"task_send_events": True, "task_send_sent_event": True}  # from the first task on
    tuned = {**events, "heartbeat_interval_s": 0.5, "lease_s": 2.0, **settings}
    with (
        Cluster(home, HERE / "shop_tasks.py", history_lake=home / "lake", **tuned) as cluster,
        serving(cluster.app, home / "web.db", badge="staging") as served,
        sync_playwright() as playwright,
    ):
        for name in workers:
            cluster.start_worker(name, "-c", "2", wait=False)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        shop = Shop(cluster, served, browser)

        def all_alive() -> bool:
            nodes = [one for one in served.dashboard.cluster.nodes() if one.state == "alive"]
            return len(nodes) == len(workers)

        wait_until(all_alive, deadline_s=120.0, what="the dashboard to see all workers")
        try:
            yield shop
        finally:
            browser.close()
