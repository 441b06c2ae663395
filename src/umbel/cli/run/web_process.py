"""The dashboard beside a worker: a process of its own, started again when it dies, ended with the worker.

It shares nothing with the worker's loop. A worker that is killed takes it along: it ends when the pipe on its
standard input closes.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from umbel.protocol.retry import reconnect_wait_s

log = logging.getLogger("umbel.worker")
STOP_S = 5.0
WELL_S = 60.0  # a dashboard that ran so long starts with a short wait again
WITH_PARENT = "--with-parent"


def web_command(app_name: str | None, *options: str) -> list[str]:
    return [
        *(sys.executable, "-m", "umbel.cli.main", "web", *(["-A", app_name] if app_name else [])),
        *options,
        WITH_PARENT,
    ]


@asynccontextmanager
async def dashboard_beside(command: Sequence[str] | None) -> AsyncIterator[None]:
    """While the block runs, so does the dashboard; without a command there is none."""
    supervising = None if command is None else asyncio.create_task(_supervise(command))
    try:
        yield
    finally:
        if supervising is not None:
            supervising.cancel()
            await asyncio.wait([supervising])


async def _supervise(command: Sequence[str]) -> None:
    loop, failures = asyncio.get_running_loop(), 0
    while True:
        began = loop.time()
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=DEVNULL, process_group=0)
        try:
            code = await process.wait()
        finally:
            await _end(process)
        failures = 1 if loop.time() - began > WELL_S else failures + 1
        log.warning("dashboard process ended; restarting it", extra={"code": code, "failures": failures})
        await asyncio.sleep(reconnect_wait_s(failures, 0.5))


async def _end(process: Process) -> None:
    if process.returncode is not None:
        return
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            process.send_signal(signum)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await process.wait()
                return


def end_with_parent() -> None:
    """End this process as SIGTERM would when its standard input closes, which it does with the parent."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="umbel-parent", daemon=True).start()
