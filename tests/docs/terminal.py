"""Terminal: types what a page prints into a real shell's place, and compares what comes back.

A command that runs until it is stopped (`umbel dev`, `umbel worker`) is started, waited for until it is
ready, and stopped when the next one is typed, or at the end. One that fills the screen (`umbel top`) gets a
screen, and is ended by its key.
"""

import contextlib
import fcntl
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.docs.blocks import Block, Command
from tests.waiting import wait_until

LASTING = {"dev", "worker"}
SCREENS = {"top": "q"}  # by the key that ends it
ASKING = {"members"}  # answers that come after a second are too late for it, which a busy machine may need
BIN = Path(sys.executable).parent


class Terminal:
    def __init__(self, home: Path, **variables: str) -> None:
        self._home = home
        self._environment = {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "UMBEL_RUN_DIR": str(home / "run"),
            "TERM": "xterm-256color",
            **variables,
        }
        self._ends = contextlib.ExitStack()
        self._typed = self._ends.enter_context(contextlib.ExitStack())

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.close()

    def type(self, block: Block) -> None:
        for command in block.commands:
            name = command.line.split()[1]
            if name in LASTING:
                self._typed.close()
                self._typed.callback(self._start(command.line))
            elif name in SCREENS:
                self._look(command.line, SCREENS[name])
            elif name in ASKING:
                wait_until(lambda: not self._problem(command, block), deadline_s=90, what=command.line)  # noqa: B023
            else:
                problem = self._problem(command, block)
                assert not problem, problem

    def start(self, line: str) -> None:
        """Start a worker that stays while other lines are typed."""
        self._ends.callback(self._start(line))

    def _start(self, line: str) -> Callable[[], None]:
        """Start it, and wait until it takes tasks; how to stop it."""
        log = self._home / f"{len(list(self._home.glob('*.log')))}.log"
        with log.open("wb") as stderr:
            worker = subprocess.Popen(shlex.split(line), cwd=self._home, env=self._environment, stderr=stderr)
        with contextlib.ExitStack() as failing:
            failing.callback(worker.kill)
            wait_until(
                lambda: b"worker ready" in log.read_bytes() or worker.poll() is not None,
                deadline_s=90,
                what=f"{line} to be ready",
            )
            assert worker.poll() is None, f"{line}: {log.read_text()}"
            failing.pop_all()
        return partial(_stop, worker, log)

    def _problem(self, command: Command, block: Block) -> str:
        """What is wrong with what the command prints, or nothing."""
        done = subprocess.run(
            shlex.split(command.line),
            cwd=self._home,
            env={**self._environment, "COLUMNS": "120"},
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        if done.returncode != 0:
            return f"{block.place}: {command.line}: {done.stderr}"
        shown = [line.rstrip() for line in done.stdout.splitlines()]
        if block.numbers_vary:
            as_printed = set(map(_shape, command.printed)) <= set(map(_shape, shown))
        else:
            as_printed = not command.printed or shown == list(command.printed)
        return "" if as_printed else f"{block.place}: {command.line} printed\n{done.stdout}"

    def _look(self, line: str, key: str) -> None:
        """Give it a screen until something is on it, then the key that ends it."""
        here, there = pty.openpty()
        fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        screen = subprocess.Popen(
            shlex.split(line), cwd=self._home, env=self._environment, stdin=there, stdout=there, stderr=there
        )
        os.close(there)
        seen = bytearray()
        try:
            wait_until(lambda: b"alive" in _read(here, seen), deadline_s=90, what=f"{line} on a screen")
            os.write(here, key.encode())
            wait_until(
                lambda: _read(here, seen) and screen.poll() is not None,
                what=f"the end of {line}",
            )
            assert screen.returncode == 0, seen.decode(errors="replace")
        finally:
            if screen.poll() is None:
                screen.kill()
                screen.wait()
            os.close(here)


def _read(here: int, seen: bytearray) -> bytearray:
    """What is on the screen by now; a screen that nobody writes to any more is no error."""
    with contextlib.suppress(OSError):
        while select.select([here], [], [], 0)[0]:
            seen += os.read(here, 65536)
    return seen


def _shape(line: str) -> str:
    """Without its numbers, and without how far its columns are apart."""
    return re.sub(r"\d+(\.\d+)?", "0", " ".join(line.split()))


def _stop(worker: subprocess.Popen[bytes], log: Path) -> None:
    worker.send_signal(signal.SIGINT)
    try:
        assert worker.wait(timeout=60) in {0, 130}, log.read_text()
    finally:
        if worker.poll() is None:
            worker.kill()
            worker.wait()
