"""Sidecar: a separate process next to a worker, independent of the worker's loop, that ends with it.

If the worker is killed the sidecar ends as well, because the pipe on its standard input closes.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from subprocess import DEVNULL, PIPE, Popen
from typing import NamedTuple

from umbel.backoff import Backoff

log = logging.getLogger("umbel.worker")
STOP_S = 5.0
LONG_RUN_S = 60.0  # after such a run the pauses between restarts start with the shortest again
PAUSE_MAX_S = 60.0
NOTHING_TO_DO_S = 1.0  # pause after exit code 0
WITH_PARENT = "--with-parent"


class Sidecar(NamedTuple):
    """What to call the process in the log, its command, and where its stderr goes."""

    what: str
    command: Sequence[str]
    log_file: str | None = None  # for its stderr; None: the worker's stderr


def sidecar_command(name: str, app_name: str | None, *options: str) -> list[str]:
    """Return the command line of an Umbel command that ends with the process that starts it."""
    of_app = ["-A", app_name] if app_name else []
    return [sys.executable, "-m", "umbel.cli.main", name, *of_app, *options, WITH_PARENT]


async def run_sidecar(
    process: Sidecar, *, until_due: Callable[[], Awaitable[None]] | None = None, stop_s: float = STOP_S
) -> None:
    """Run the process until cancelled, and restart it whenever it ends.

    Exit code 0 means that there was nothing to do, and is no failure. `until_due` returns when the process
    may start. `stop_s`: how long it may take to end after SIGTERM.
    """
    loop, backoff = asyncio.get_running_loop(), Backoff(most_s=PAUSE_MAX_S)
    while True:
        began = loop.time()
        if until_due is not None:
            await until_due()
        code, wait_s = await _run(process, stop_s), NOTHING_TO_DO_S
        if not code or loop.time() - began > LONG_RUN_S:
            backoff.reset()
        if code:
            wait_s = backoff.wait_s()
            fields = {"code": code, "failures": backoff.failures}
            log.warning("%s process ended; restarting it", process.what, extra=fields)
        await asyncio.sleep(wait_s)


async def _run(sidecar: Sidecar, stop_s: float) -> int | str:
    """Run the process; return its exit code, or why it could not start. A thread waits for it."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()
    try:
        process = _start(sidecar)
    except OSError as error:
        return str(error)
    threading.Thread(target=_wait, args=(process, loop, ended), name="umbel-beside", daemon=True).start()
    try:
        return await asyncio.shield(ended)
    finally:
        process.terminate()  # no effect on a process that has ended
        try:
            async with asyncio.timeout(stop_s):
                await asyncio.shield(ended)
        except TimeoutError:
            pass
        finally:
            process.kill()


def _start(sidecar: Sidecar) -> Popen[bytes]:
    with open(sidecar.log_file, "ab") if sidecar.log_file else nullcontext() as stderr:
        return Popen(sidecar.command, stdin=PIPE, stdout=DEVNULL, stderr=stderr, process_group=0)


def _wait(process: Popen[bytes], loop: asyncio.AbstractEventLoop, ended: "asyncio.Future[int]") -> None:
    code = process.wait()
    if process.stdin is not None:
        process.stdin.close()
    with suppress(RuntimeError):  # the loop is closed already
        loop.call_soon_threadsafe(ended.set_result, code)


def end_with_parent() -> None:
    """End this process with SIGTERM when its standard input closes, as it does when the parent ends."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="umbel-parent", daemon=True).start()
