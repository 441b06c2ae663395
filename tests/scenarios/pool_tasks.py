"""Tasks for the scenarios about the pool. What a child is and does is written to files, for tests to read."""

import os
import resource
import sys
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

from umbel import App, Task

HOME = Path(os.environ.get("POOL_TASKS_HOME", "."))
IMPORTED_IN = os.getpid()
app = App("pool")
if (HOME / "broken").exists() and "umbel.pools.prefork.child" in sys.orig_argv:  # a child that starts afresh
    raise RuntimeError((HOME / "broken").read_text())


@app.signals.worker_process_init.connect
def note_start(node: str, child: int, **_: Any) -> None:
    (HOME / f"init-{os.getpid()}").write_text(f"{node} {child}")
    if (HOME / "stuck").exists():
        Event().wait(600)


@app.task
def pid() -> int:
    return os.getpid()


@app.task
def imported_in() -> int:
    """The process that imported this module; children are copies of it."""
    return IMPORTED_IN


@app.task(bind=True)
def waits(self: Task[..., Any], gate: str) -> str:
    """Runs until the file is there."""
    Path(f"{gate}.{self.request.id}").touch()
    pause = Event()
    while not Path(gate).exists():
        pause.wait(0.01)
    return "released"


@app.task
def notes(journal: str, line: str) -> None:
    with open(journal, "a", encoding="utf-8") as file:
        file.write(line + "\n")


@app.task(time_limit=5)
def endless(started: str) -> None:
    Path(started).write_text(str(os.getpid()))
    Event().wait(600)


@app.task(acks_early=True)
def leaks() -> None:
    """Slowly enough that it is looked at, twice a second, between one limit and the other."""
    held = []
    while True:
        held.append(bytearray(os.urandom(1024) * 1024 * 5))
        Event().wait(0.1)


@app.task
def prints(text: str) -> None:
    print(text)
    print(text, "to stderr", file=sys.stderr)
    sys.stdout.write("without an end")


@app.task
def shouts(characters: int) -> int:
    """One line without an end."""
    sys.stdout.write("x" * characters)
    return os.getpid()


@app.task
def lowers() -> int:
    """Leaves its process with hardly a descriptor more than it has."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
    return os.getpid()


@app.task
def opens(files: int) -> int:
    with ExitStack() as held:
        for _ in range(files):
            held.enter_context(open(os.devnull, encoding="utf-8"))
    return os.getpid()


@app.task
def scribbles() -> None:
    """Writes to the socket of its own process."""
    for fd in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{fd}"
        if os.path.exists(path) and os.readlink(path).startswith("socket:"):
            os.write(int(fd), (100_000_000).to_bytes(8, "big"))
