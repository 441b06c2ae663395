"""Tasks for the scenarios of remote control, and a command of the app's own."""

import os
import signal
from pathlib import Path
from threading import Event
from typing import Any

from umbel import App

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
def stubborn(started: str) -> None:
    """Does not end when it is asked to."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(started).touch()
    Event().wait(WAIT_MAX_S)


@app.panel.inspect_command(alias="whoami", args=[("greeting", str)])
def who(state: Any, greeting: str = "I am") -> str:
    """Say who is there."""
    return f"{greeting} {state.node}, {os.getpid() == state.pid}"


@app.panel.control_command(args=[("n", int)])
async def fails(state: Any, n: int) -> None:
    raise LookupError(n)
