"""Tasks for green pools: they wait, many at once. Each run leaves a line in a journal."""

import asyncio
import os
from pathlib import Path
from threading import Event

from umbel import App
from umbel.app.request import current_request

app = App("green")


def _note(directory: str) -> str:
    request = current_request()
    assert request is not None
    with (Path(directory) / "journal.txt").open("a", encoding="utf-8") as journal:
        journal.write(f"{request.id} {os.getpid()}\n")
    return request.id


@app.task
async def nap(directory: str, seconds: float) -> str:
    """Its request is still its own when it has waited among many others."""
    await asyncio.sleep(seconds)
    return _note(directory)


@app.task
async def loop_module() -> str:
    return type(asyncio.get_running_loop()).__module__


@app.task
async def stay(directory: str, gate: str) -> str:
    task_id = _note(directory)
    await _comes(gate)
    return task_id


@app.task
async def hold_up(directory: str, gate: str) -> str:
    """Keeps its loop for itself."""
    task_id = _note(directory)
    _wait_for(gate)
    return task_id


@app.task
def plain(directory: str) -> str:
    return _note(directory)


def _comes(path: str) -> asyncio.Future[None]:
    loop = asyncio.get_running_loop()
    come: asyncio.Future[None] = loop.create_future()

    def look() -> None:
        if come.done():
            return
        if _is_there(path):
            come.set_result(None)
        else:
            loop.call_later(0.01, look)

    look()
    return come


def _wait_for(path: str) -> None:
    while not _is_there(path):
        Event().wait(0.01)


def _is_there(path: str) -> bool:
    return Path(path).exists()
