"""The verbs of the tiny app that have a coroutine, for pools with a loop."""

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.pools.hostile import HOSTILE
from tests.waiting import wait_until
from umbel.errors import SoftTimeLimitExceeded


def _mark(path: str) -> None:
    """Say by a file that it runs."""
    Path(f"{path}.waiting").write_text(str(os.getpid()), encoding="utf-8")


def _is_there(path: str) -> bool:
    return Path(path).exists()


async def _return_async(value: Any) -> Any:
    return value


async def _wait_for_async(path: str) -> str:
    _mark(path)
    async with asyncio.timeout(600):
        while not _is_there(path):
            await asyncio.to_thread(threading.Event().wait, 0.005)
    return "released"


async def _await_file(path: str) -> str:
    """Wait for a file together with everybody who waits for it on this loop: one looks for all."""
    if path not in _awaited:
        _awaited[path] = asyncio.ensure_future(_wait_for_async(path))
    return await asyncio.shield(_awaited[path])


_awaited: dict[str, "asyncio.Future[str]"] = {}


async def _catch_soft_limit_async(path: str) -> str:
    try:
        return await _wait_for_async(path)
    except SoftTimeLimitExceeded:
        return "cleaned up"


async def _deaf(path: str) -> str:
    """Goes on although it is cancelled."""
    while True:
        try:
            return await _wait_for_async(path)
        except asyncio.CancelledError:
            continue


async def _spin(path: str) -> None:
    """Keeps the loop for itself, in Python."""
    _mark(path)
    while not _is_there(path):
        pass


async def _block(path: str) -> None:
    """Keeps the loop for itself, in C: between two looks it hears nothing."""
    _mark(path)
    wait_until(lambda: _is_there(path), what=path)


async def _group(path: str) -> str:
    """Waits in a group: what interrupts it has to end its children too."""
    ended: list[str] = []

    async def part() -> None:
        try:
            await _wait_for_async(path)
        finally:
            ended.append("part")

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(part())
    except SoftTimeLimitExceeded:
        return f"{len(ended)} ended"
    return "released"


def _hostile(verb: str) -> Callable[[Any], Any]:
    async def run(argument: Any) -> Any:
        return HOSTILE[verb](argument)

    return run


COROUTINES: dict[str, Callable[[Any], Any]] = {
    "return": _return_async,
    "wait-for": _wait_for_async,
    "catch-soft": _catch_soft_limit_async,
    "await-file": _await_file,
    "deaf": _deaf,
    "spin": _spin,
    "block": _block,
    "group": _group,
    "keyboard-interrupt": _hostile("keyboard-interrupt"),
    "no-ordinary-error": _hostile("no-ordinary-error"),
}
