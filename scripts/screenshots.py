"""Pictures of every page of the dashboard: a real cluster at work, the real browser.

    .venv/bin/python -m scripts.screenshots FOLDER [PAGE ...]

A cluster of four workers on the embedded broker serves the shop of the tests; one worker is killed while it
runs a task, so that its redelivery can be seen. Each page is taken at 1280 and at 390 pixels, light
and dark. With `--readme` only those of the documents are made, small (`docs/_static`).
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
SHOP = ROOT / "tests" / "web" / "pages" / "shop_tasks.py"
SIZES = ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark"))
README = ("cluster", "task")
README_SIZE = (1280, 800)
HEIGHT = 800
DEADLINE_S = 60.0


class Shop:
    """A cluster and its dashboard, in a folder of their own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        settings = {
            "broker": f"sqlite:///{home / 'queue.db'}",
            "run_dir": home / "run",
            "history_lake": home / "lake",
            "task_send_sent_event": "true",
            "task_send_events": "true",
            "lease_s": "3",
        }
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "UMBEL_APP": f"{SHOP}:app",
            **{f"UMBEL_{name.upper()}": str(value) for name, value in settings.items()},
        }

    def start(self, name: str, *arguments: str) -> None:
        log = (self.home / f"{name}.log").open("wb")
        command = [sys.executable, "-m", "umbel", *arguments]
        self.running[name] = subprocess.Popen(
            command, cwd=self.home, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )

    def umbel(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "umbel", *arguments]
        done = subprocess.run(
            command, cwd=self.home, env=self.environment, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def address(self) -> str:
        def found() -> str:
            log = (self.home / "web.log").read_text()
            return next((word for word in log.split() if word.startswith("http")), "")

        return wait_for(found, "the dashboard")

    def stop(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for(condition: Callable[[], str], what: str) -> str:
    ends = time.monotonic() + DEADLINE_S
    while time.monotonic() < ends:
        if value := condition():
            return value
        time.sleep(0.1)
    raise SystemExit(f"waited {DEADLINE_S:g} s in vain for {what}")


@contextmanager
def shop() -> Iterator[Shop]:
    with tempfile.TemporaryDirectory(prefix="umbel-shop-") as home:
        made = Shop(Path(home))
        try:
            made.start(
                "web", "web", "--port", "0", "--badge", "staging", "--state", str(Path(home) / "web.db")
            )
            for name in ("apple", "birch", "cedar", "dogwood"):
                made.start(name, "worker", "-n", name, "-c", "2")
            yield made
        finally:
            made.stop()


WORK = """
import sys, time
sys.path.insert(0, sys.argv[1])
from shop_tasks import add, again, order, pack, pay, refuse
gate = sys.argv[2]
held = pack.delay(gate)
sent = order.delay()
for number in range(2400):
    add.delay(number, 1, pause_s=0.01 * (number % 7))
    if number % 12 == 0:
        pay.delay(f"order-{number}")
    if number % 90 == 0:
        refuse.delay(f"order-{number}")
        again.delay(f"order-{number}")
    time.sleep(0.025)
print(held.id, sent.id)
"""


def fill(made: Shop, page: Page, address: str) -> dict[str, str]:
    """Work for half a minute, and the ids of what is worth a page of its own."""
    page.goto(address)
    base = page.url.rstrip("/")
    wait_for(
        lambda: "ok" if "All 4 workers" in page.locator("#sentence").inner_text() else "", "four workers"
    )
    gate = made.home / "gate"
    working = [sys.executable, "-c", WORK, str(SHOP.parent), str(gate)]
    done = subprocess.run(working, env=made.environment, capture_output=True, text=True, check=True)
    held, flow = done.stdout.split()
    made.umbel("mark", "v1.4 deployed")
    page.goto(f"{base}/tasks/{held}")
    node = page.locator("#attempts td.name").first.inner_text().partition("@")[0]
    made.running[node].kill()
    wait_for(lambda: "again" if page.locator("#story .cause").count() else "", "the redelivery")
    gate.touch()
    return {
        "overview": "/",
        "cluster": "/cluster",
        "worker": f"/workers/{next(one for one in ('apple', 'birch') if one != node)}@{os.uname().nodename}",
        "tasks": "/tasks",
        "task": f"/tasks/{held}",
        "workflow": f"/tasks/{flow}",
        "queues": "/queues",
        "queue": "/queues/default",
        "failures": "/failures",
        "schedule": "/schedule",
        "elections": "/elections",
        "history": "/history",
        "audit": "/audit",
    }


def take(
    browser: Browser, base: str, cookies: list[object], pages: dict[str, str], folder: Path, cut: bool
) -> None:
    for width, colours in SIZES[: 2 if cut else 4]:
        wide, tall = README_SIZE if cut else (width, HEIGHT)
        context = browser.new_context(
            viewport={"width": wide, "height": tall},
            color_scheme=colours,  # type: ignore[arg-type]
        )
        context.add_cookies(cookies)  # type: ignore[arg-type]
        page = context.new_page()
        for name, path in pages.items():
            page.goto(base + path)
            if page.locator("[data-chart]").count():
                page.locator("[data-chart] canvas").first.wait_for()
            page.wait_for_function("document.getElementById('link')?.textContent === 'live'")
            file = f"{name}-{colours}.png" if cut else f"{name}-{width}-{colours}.png"
            page.screenshot(path=folder / file, full_page=not cut)
        context.close()


def main(arguments: list[str]) -> None:
    cut = "--readme" in arguments
    folder, *wanted = [one for one in arguments if not one.startswith("--")]
    Path(folder).mkdir(parents=True, exist_ok=True)
    with shop() as made, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        context = browser.new_context()
        page = context.new_page()
        pages = fill(made, page, made.address())
        base = page.url.partition("/tasks")[0]
        chosen = {
            name: path for name, path in pages.items() if name in (wanted or (README if cut else pages))
        }
        take(browser, base, list(context.cookies()), chosen, Path(folder), cut)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
