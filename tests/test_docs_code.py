"""The code in the documents runs as printed, against a real worker.

The guide is a story: names that one piece of code defines are there in the next. What belongs to the
reader (`download`, `ship`) is defined here. Definitions go into a module that a worker loads; all else
is run by a client of that worker, top to bottom.
"""

import ast
import asyncio
import inspect
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent
PAGES = [path for path in sorted((ROOT / "docs").glob("*.md")) if "```python" in path.read_text()]
GUIDE = ("tasks.md", "canvas.md", "periodic.md", "cluster.md", "control.md")
# What the reader has already.
READERS_OWN = """
import asyncio
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
def tick(): pass
@app.task
def ship(order): return "shipped"
@app.task(name="shop.tasks.pack")
def pack(): pass
"""


def blocks_of(page: Path) -> list[str]:
    found = re.findall(r"^( *)```python\n(.*?)```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [dedent(text) for _, text in found]


def is_definition(node: ast.stmt) -> bool:
    """What a worker has to know: tasks, handlers, hooks. Apps and calls are the client's business."""
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Import | ast.ImportFrom)


def parsed(block: str) -> list[ast.stmt]:
    tree = compile(block, "a document", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(tree, ast.Module)
    return tree.body


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_of_a_page_can_be_read(page: Path) -> None:
    for block in blocks_of(page):
        parsed(block)


@pytest.mark.timeout(180)
def test_the_guides_code_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [block for page in GUIDE for block in blocks_of(ROOT / "docs" / page)]
    definitions = [node for block in blocks for node in parsed(block) if is_definition(node)]
    module = READERS_OWN + "\n".join(ast.unparse(node) for node in definitions)
    (tmp_path / "shop.py").write_text(module)
    environment = {**os.environ, "UMBEL_RUN_DIR": str(tmp_path / "run")}
    with (tmp_path / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "umbel.cli.main", "worker", "-A", "shop", "-n", "w1", "-c", "2"],
            cwd=tmp_path,
            env=environment,
            stderr=log,
        )
    try:
        ready = tmp_path / "worker.log"
        wait_until(lambda: b"worker ready" in ready.read_bytes(), deadline_s=60, what="the worker")
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        names = _client(blocks)
        assert names["ran"] >= 10
    finally:
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(timeout=60) == 0, (tmp_path / "worker.log").read_text()


def _client(blocks: list[str]) -> dict[str, Any]:
    """Run every statement of the blocks that is no definition, in order."""
    names: dict[str, Any] = {}
    exec("from shop import *", names)
    names["ran"] = 0
    app = names["app"]
    try:
        for block in blocks:
            for node in parsed(block):
                if not is_definition(node) and not _is_not_for_here(node):
                    _run(node, names)
                    names["app"], names["ran"] = app, names["ran"] + 1
    finally:
        app.close()
    return names


def _is_not_for_here(node: ast.stmt) -> bool:
    """Apps with addresses of the reader's, and a loop that leads for ever."""
    text = ast.unparse(node)
    return "App(" in text or "app.lease(" in text or "group(...)" in text or "w1@host" in text


def _run(node: ast.stmt, names: dict[str, Any]) -> None:
    module = ast.Module([node], [])
    code = compile(module, "a document", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, names))
    else:
        exec(code, names)
