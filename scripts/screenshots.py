"""Pictures of the dashboard, taken from the demo: `umbel demo --stay`, and the real browser.

    python -m scripts.screenshots                    those of the documents, into docs/_static (make pictures)
    python -m scripts.screenshots FOLDER [PAGE ...]  every page, wide and narrow, light and dark, to look at

The cluster and a task are taken when the demo has killed a worker, the rest when all are back and the charts
show some minutes. Nothing is left running at the end, whatever ends it.
"""

import base64
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "docs" / "_static"
BYTES_MAX = 80_000  # of one picture of the documents
QUALITY = 90
WELL_AFTER_S = 150.0  # since a worker was killed: so much do the charts show, and no other was killed yet
DEADLINE_S = 120.0
STOP_S = 60.0
MARK = "PICTURES_OF"  # a variable of the environment


class Look(NamedTuple):
    width: int
    height: int
    colours: Literal["light", "dark"]


WIDE = (Look(1280, 800, "light"), Look(1280, 800, "dark"))
NARROW = (Look(390, 844, "light"), Look(390, 844, "dark"))
IN_TROUBLE = {"cluster": WIDE, "task": WIDE}
WELL = {"overview": WIDE, "tasks": WIDE, "phone": NARROW}
PICTURES = [f"{name}-{look.colours}.webp" for name, looks in {**IN_TROUBLE, **WELL}.items() for look in looks]


class Demo:
    """All its processes have its folder in their environment, by which they are found."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._log = home / "log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("UMBEL_")}
        environment |= {"PYTHONPATH": str(ROOT / "src"), MARK: str(home)}
        command = [sys.executable, "-m", "umbel", "demo", "--seconds", "5", "--no-history", "--stay"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=home,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches us alone
            )

    def says(self, pattern: str) -> str:
        """What it has written, or will soon; the part in parentheses."""

        def found() -> str:
            if self._process.poll() is not None:
                raise SystemExit(f"the demo ended with {self._process.returncode}:\n{self._log.read_text()}")
            match = re.search(pattern, self._log.read_text(), re.DOTALL)
            return match[1] if match else ""

        return wait_for(found, f"the demo to say {pattern!r}")

    def stop(self) -> None:
        """As Ctrl-C does; and by force what is there a while later."""
        self._process.send_signal(signal.SIGINT)
        ends = time.monotonic() + STOP_S
        while (left := self._left()) and time.monotonic() < ends:
            time.sleep(0.1)
            self._process.poll()
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        self._process.wait()
        if left:
            raise SystemExit(f"the demo did not end; {len(left)} of its processes were killed")

    def _left(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == str(self._home):
                    found.append(process)
        return found


def wait_for(condition: Callable[[], str], what: str) -> str:
    ends = time.monotonic() + DEADLINE_S
    while time.monotonic() < ends:
        if value := condition():
            return value
        time.sleep(0.1)
    raise SystemExit(f"waited {DEADLINE_S:g} s in vain for {what}")


@contextmanager
def demo() -> Iterator[Demo]:
    with tempfile.TemporaryDirectory(prefix="umbel-") as home:
        made = Demo(Path(home))
        try:
            yield made
        finally:
            made.stop()


class Camera:
    """A browser that is logged in, with a page for each look."""

    def __init__(self, browser: Browser, address: str) -> None:
        self.base = address.partition("/session")[0]
        context = browser.new_context()
        context.new_page().goto(address)  # which works once
        self._cookies: Any = context.cookies()
        self._browser = browser
        self._asking = context.request

    def first_task(self, name: str) -> str:
        found = self._asking.get(f"{self.base}/api/v1/tasks", params={"name": name, "limit": 1}).json()
        return str(found["tasks"][0]["uuid"])

    def node(self) -> str:
        return str(self._asking.get(f"{self.base}/api/v1/nodes").json()[0]["node"])

    def open(self, path: str, looks: Sequence[Look]) -> Iterator[tuple[Look, Page]]:
        """All of them first, so that they are taken at one moment."""
        opened = []
        for look in looks:
            context = self._browser.new_context(
                viewport={"width": look.width, "height": look.height}, color_scheme=look.colours
            )
            context.set_default_timeout(DEADLINE_S * 1000)
            context.add_cookies(self._cookies)
            page = context.new_page()
            page.goto(self.base + path)
            opened.append((look, page))
        for look, page in opened:
            settle(page)
            yield look, page
            page.context.close()


def settle(page: Page) -> None:
    if page.locator("[data-chart]").count():
        page.locator("[data-chart] canvas").first.wait_for()
    page.wait_for_function("document.getElementById('link')?.textContent === 'live'")


def take_for_documents(made: Demo, camera: Camera) -> None:
    task = made.says(r"while it ran task \S+(/tasks/\S+)")
    killed = made.says(r"killed (\w+) \(-9\) while it ran task")
    for look, page in camera.open(task, IN_TROUBLE["task"]):
        page.locator("#sentence", has_text="lost").wait_for()
        page.locator("#buttons:not(:has-text('Terminate'))").wait_for()  # when it has ended
        page.reload()
        settle(page)
        page.locator("#story .cause", has_text="lost").wait_for()
        save(page, f"task-{look.colours}")
    for look, page in camera.open("/cluster", IN_TROUBLE["cluster"]):
        page.locator("#happened", has_text="lost").wait_for()
        page.locator(f"#leases:not(:has-text('{killed}'))").wait_for()  # others lead by now
        page.reload()
        settle(page)
        save(page, f"cluster-{look.colours}")
    wait_until_well(made)
    for name, path in {"overview": "/", "tasks": "/tasks", "phone": "/"}.items():
        for look, page in camera.open(path, WELL[name]):
            page.locator("#sentence", has_text="All 4 workers").wait_for()
            save(page, f"{name}-{look.colours}")


def wait_until_well(made: Demo) -> None:
    began = time.monotonic()
    made.says(r"(started \w+ again)")
    time.sleep(max(0.0, began + WELL_AFTER_S - time.monotonic()))


def save(page: Page, name: str) -> None:
    asked = {"format": "webp", "quality": QUALITY}
    taken = page.context.new_cdp_session(page).send("Page.captureScreenshot", asked)
    picture = base64.b64decode(taken["data"])
    (PLACE / f"{name}.webp").write_bytes(picture)
    print(f"{name}: {len(picture):,} bytes", flush=True)
    if len(picture) > BYTES_MAX:
        raise SystemExit(f"{name} has {len(picture):,} bytes; at most {BYTES_MAX:,} are small")


def take_all(made: Demo, camera: Camera, folder: Path, wanted: Sequence[str]) -> None:
    pages = {
        "task": made.says(r"while it ran task \S+(/tasks/\S+)"),
        "cluster": "/cluster",
        "overview": "/",
        "worker": f"/workers/{camera.node()}",
        "tasks": "/tasks",
        "workflow": f"/tasks/{camera.first_task('umbel.demo.tasks.total')}",
        "queues": "/queues",
        "queue": "/queues/demo",
        "failures": "/failures",
        "schedule": "/schedule",
        "elections": "/elections",
        "history": "/history",
        "audit": "/audit",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name in wanted or pages:
        for look, page in camera.open(pages[name], (*WIDE, *NARROW)):
            page.screenshot(path=folder / f"{name}-{look.width}-{look.colours}.png", full_page=True)


def main(arguments: list[str]) -> None:
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda *_: sys.exit("stopped"))
    with demo() as made, sync_playwright() as playwright:
        address = made.says(r"compared: .*dashboard: (http\S+)\s.*press Ctrl-C")
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        camera = Camera(browser, address)
        if arguments:
            take_all(made, camera, Path(arguments[0]), arguments[1:])
        else:
            take_for_documents(made, camera)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
