"""The code of the guide runs as printed, against real workers.

The guide is a story: names that one piece of code defines are there in the next. What belongs to the reader
(`download`, `ship`) is defined here. Definitions go into a module that a worker loads; all else is run by a
client of that worker, top to bottom. Commands are run in the reader's folder; first steps have their own.
"""

import ast
import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from scripts import navigation
from tests.docs.blocks import DOCS, Block, blocks_of, pages
from tests.docs.terminal import Terminal
from tests.waiting import wait_until

GUIDE = next(section.pages for section in navigation.sections() if section.title == "Guide")
RUN = {"python", "console", "toml"}
PICTURE = {"text"}  # what is neither code nor typed
NOT_RUN = {"docs/first-steps.md:4", "docs/async.md:25"}  # in the guide; each says why

# What the reader has already.
READERS_OWN = """
import asyncio
from pathlib import Path
from umbel import App, chain, chord, group

app = App("shop")
cache = {}

def download(url): return "text"
def read(path): return [1, 2, 3]
def store(row): pass
def rotate_one(key, fence): pass

@app.task
def notify(result): pass
@app.task
def complain(task_id): pass
@app.task
def total(numbers): return sum(numbers)
@app.task(name="shop.report")
def report(month): pass
@app.task
def tick(): Path("ticked").touch()
@app.task
def ship(order): return "shipped"
@app.task(name="shop.tasks.pack")
def pack(): pass
"""


def guide() -> list[Block]:
    return [block for page in GUIDE for block in blocks_of(DOCS / page)]


def test_every_block_says_what_it_is() -> None:
    nameless = [block.place for page in pages() for block in blocks_of(page) if not block.language]
    assert not nameless, "name the language behind ```; a picture is text"


def test_every_block_of_the_guide_is_run_or_says_why_not() -> None:
    kinds = {block.language for block in guide()}
    assert kinds <= RUN | PICTURE, f"no test runs {kinds - RUN - PICTURE}"
    hidden = [
        block.place for block in guide() if block.language in PICTURE and re.match(r"\$ |umbel ", block.text)
    ]
    assert not hidden, "what is typed is console, with '$ '"
    marked = {block.place for block in guide() if block.why_not_run}
    assert marked == NOT_RUN, "each block that is not run is one less that is known to be true"


@pytest.mark.parametrize(
    "page", [page for page in pages() if "```python" in page.read_text()], ids=lambda page: page.stem
)
def test_code_of_a_page_can_be_read(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "python":
            _parsed(block)


@pytest.mark.timeout(180)
def test_first_steps_work_as_printed(tmp_path: Path) -> None:
    with Terminal(tmp_path) as terminal:
        for block in blocks_of(DOCS / "first-steps.md"):
            if block.language == "python":
                (tmp_path / "tasks.py").write_text(block.text)
            elif block.language == "console" and not block.why_not_run:
                terminal.type(block)


@pytest.mark.timeout(300)
def test_the_guides_code_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story = [
        block
        for block in guide()
        if not block.place.startswith("docs/first-steps.md") and not block.why_not_run
    ]
    code = [block for block in story if block.language == "python"]
    definitions = [node for block in code for node in _parsed(block) if _is_definition(node)]
    (tmp_path / "shop.py").write_text(READERS_OWN + "\n".join(ast.unparse(node) for node in definitions))
    (tmp_path / "pyproject.toml").write_text("[tool.umbel]\n")  # here is where the reader's project begins
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with Terminal(tmp_path, UMBEL_APP="shop") as terminal, Reader() as reader:
        terminal.start("umbel worker -n w1@host -c 2")
        for block in story:
            if block.language == "python":
                reader.run(block)
            elif block.language == "console":
                terminal.type(block)
        assert reader.ran >= 30


class Reader:
    """A process of the reader's that imports the app and runs what the pages print."""

    def __init__(self) -> None:
        self.ran = 0
        self._names: dict[str, Any] = {}

    def __enter__(self) -> "Reader":
        exec("from shop import *", self._names)
        self._app = self._names["app"]
        return self

    def __exit__(self, *_: object) -> None:
        self._app.close()

    def run(self, block: Block) -> None:
        """Every statement that is no definition, in order."""
        for node in _parsed(block):
            if not _is_definition(node):
                self._names["app"] = self._app  # a page may show how another one is made
                self._run(node, block)
                self.ran += 1

    def _run(self, node: ast.stmt, block: Block) -> None:
        code = compile(ast.Module([node], []), block.place, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if not code.co_flags & inspect.CO_COROUTINE:
            exec(code, self._names)
        elif block.runs_until:
            asyncio.run(_run_until(eval(code, self._names), Path(block.runs_until)))
        else:
            asyncio.run(eval(code, self._names))


async def _run_until(endless: Any, done: Path) -> None:
    running = asyncio.ensure_future(endless)
    await asyncio.to_thread(wait_until, done.exists, what=f"{done} by {endless}")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def _is_definition(node: ast.stmt) -> bool:
    """What a worker has to know: tasks, handlers, hooks, steps. Apps and calls are the client's business."""
    return isinstance(
        node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
    )


def _parsed(block: Block) -> list[ast.stmt]:
    tree = compile(block.text, block.place, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(tree, ast.Module)
    return tree.body
