"""Tasks for the scenarios of remote control, and a command of the app's own."""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from operator import methodcaller
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

from umbel import App
from umbel.errors import TaskCancelled

app = App("control")
WAIT_MAX_S = 60.0


@app.task
def add(x: int, y: int) -> int:
    return x + y


@app.task
def waits_for(gate: str, started: str = "") -> str:
    """Blocks its child until a file is there."""
    if started:
        Path(started).touch()
    pause = Event()
    for _ in range(int(WAIT_MAX_S / 0.02)):
        if Path(gate).exists():
            return "went on"
        pause.wait(0.02)
    return "gave up"


@app.task
async def waits_in_loop(gate: str) -> str:
    """Waits without holding anything up."""
    for _ in range(int(WAIT_MAX_S / 0.25)):
        if os.path.exists(gate):  # noqa: ASYNC240 (it is the loop's own business here)
            return "went on"
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.25)
    return "gave up"


@app.task
async def holds_its_loop(seconds: float, started: str) -> None:
    """Does what a coroutine must not."""
    os.close(os.open(started, os.O_CREAT))
    Event().wait(seconds)


@app.task
def stubborn(started: str) -> None:
    """Does not end when it is asked to, in whatever way."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(started).touch()
    pause = Event()
    for _ in range(3):
        with suppress(TaskCancelled):
            pause.wait(WAIT_MAX_S / 3)


@app.task
def tidies_up(started: str, tidied: str) -> None:
    """Ends in good order when it is cancelled."""
    try:
        Path(started).touch()
        Event().wait(WAIT_MAX_S)
    except TaskCancelled:
        Path(tidied).touch()
        raise


@app.task
async def awaits(started: str, tidied: str) -> None:
    """The same as a coroutine."""
    touch = methodcaller("touch")
    try:
        touch(Path(started))
        await asyncio.Event().wait()
    finally:
        touch(Path(tidied))


@app.panel.inspect_command(alias="whoami", args=[("greeting", str)])
def who(state: Any, greeting: str = "I am") -> str:
    """Say who is there."""
    return f"{greeting} {state.node}, {os.getpid() == state.pid}"


@app.panel.control_command(args=[("n", int)])
async def fails(state: Any, n: int) -> None:
    raise LookupError(n)


@app.panel.control_command(args=[("n", int)])
def hold_at_most(state: Any, n: int) -> list[Any]:
    """Reaches the app, and changes how many messages the worker holds."""
    before = state.prefetch_max
    state.set_prefetch_max(n)
    return [state.app is app, state.app.name, before, state.prefetch_max]


@app.steps.add
class Cache:
    """A bootstep of the user's own."""

    name = "cache"
    requires = ("connection", "control")
    seen: ClassVar[list[str]] = []

    def start(self, worker: Any) -> None:
        self.seen.append(f"started beside {worker.node}")

    def stop(self, worker: Any) -> None:
        print(f"the cache of {worker.node} is closed", file=sys.stderr)


@app.steps.add
class Broken:
    name = "broken"
    requires = ("cache",)

    def start(self, worker: Any) -> None:
        raise LookupError("no such cache")

    def stop(self, worker: Any) -> None:
        raise AssertionError("what did not start is not stopped")


@app.panel.inspect_command
def cached(state: Any) -> list[str]:
    return Cache.seen
