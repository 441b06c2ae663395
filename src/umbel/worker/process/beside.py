"""Beside: a process beside a worker, which shares nothing with the worker's loop and ends with it.

A worker that is killed takes it along: it ends when the pipe on its standard input closes.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired

from umbel.protocol.retry import reconnect_wait_s

log = logging.getLogger("umbel.worker")
STOP_S = 5.0
WELL_S = 60.0  # a process that ran so long starts with a short wait again
WAIT_MAX_S = 60.0  # before one is started that has failed again and again
WITH_PARENT = "--with-parent"


def command_beside(name: str, app_name: str | None, *options: str) -> list[str]:
    """One of umbel's own commands, which ends with the process that starts it."""
    of_app = ["-A", app_name] if app_name else []
    return [sys.executable, "-m", "umbel.cli.main", name, *of_app, *options, WITH_PARENT]


async def keep_beside(
    command: Sequence[str],
    what: str,
    *,
    until_due: Callable[[], Awaitable[None]] | None = None,
    stop_s: float = STOP_S,
) -> None:
    """Run it until this is cancelled, again whenever it ends; one that ends with 0 had nothing to do.

    `until_due` returns when it is to start. `stop_s`: how long it may take to end when it is asked to.
    """
    loop, failures = asyncio.get_running_loop(), 0
    while True:
        if until_due is not None:
            await until_due()
        began = loop.time()
        code = await _run(command, stop_s)
        failures = 1 if code == 0 or loop.time() - began > WELL_S else failures + 1
        if code:
            log.warning("%s process ended; restarting it", what, extra={"code": code, "failures": failures})
        await asyncio.sleep(reconnect_wait_s(failures, 0.5, most_s=WAIT_MAX_S))


async def _run(command: Sequence[str], stop_s: float) -> int | str:
    """Its exit code, or why it could not start. By a thread: loops differ in what they can start."""
    try:
        process = Popen(command, stdin=PIPE, stdout=DEVNULL, process_group=0)  # noqa: ASYNC220 (takes a moment)
    except OSError as error:
        return str(error)
    try:
        return await asyncio.to_thread(process.wait)
    finally:
        await asyncio.to_thread(_end, process, stop_s)


def _end(process: Popen[bytes], stop_s: float) -> None:
    for signum in (signal.SIGTERM, signal.SIGKILL):
        process.send_signal(signum)  # does nothing where it has ended
        with suppress(TimeoutExpired):
            process.wait(stop_s)
            break
    assert process.stdin is not None
    process.stdin.close()


def end_with_parent() -> None:
    """End this process as SIGTERM would when its standard input closes, which it does with the parent."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="umbel-parent", daemon=True).start()
