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
from contextlib import nullcontext, suppress
from subprocess import DEVNULL, PIPE, Popen
from typing import NamedTuple

from umbel.chance import random
from umbel.protocol.retry import reconnect_wait_s

log = logging.getLogger("umbel.worker")
STOP_S = 5.0
WELL_S = 60.0  # a process that ran so long starts with a short wait again
WAIT_MAX_S = 60.0  # before one is started that has failed again and again
WITH_PARENT = "--with-parent"


class Beside(NamedTuple):
    what: str
    command: Sequence[str]
    log_file: str | None = None  # where its stderr goes; None: where the worker's does


def command_beside(name: str, app_name: str | None, *options: str) -> list[str]:
    """One of umbel's own commands, which ends with the process that starts it."""
    of_app = ["-A", app_name] if app_name else []
    return [sys.executable, "-m", "umbel.cli.main", name, *of_app, *options, WITH_PARENT]


async def keep_beside(
    process: Beside, *, until_due: Callable[[], Awaitable[None]] | None = None, stop_s: float = STOP_S
) -> None:
    """Run it until this is cancelled, again whenever it ends; one that ends with 0 had nothing to do.

    `until_due` returns when it is to start. `stop_s`: how long it may take to end when it is asked to.
    """
    loop, failures = asyncio.get_running_loop(), 0
    while True:
        began = loop.time()
        if until_due is not None:
            await until_due()
        code = await _run(process, stop_s)
        failures = 1 if loop.time() - began > WELL_S else failures + 1
        if code:
            fields = {"code": code, "failures": failures}
            log.warning("%s process ended; restarting it", process.what, extra=fields)
        await asyncio.sleep(reconnect_wait_s(failures, random(), most_s=WAIT_MAX_S))


async def _run(beside: Beside, stop_s: float) -> int | str:
    """Its exit code, or why it could not start. By a thread: loops differ in what they can start."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()
    try:
        process = _start(beside)
    except OSError as error:
        return str(error)
    threading.Thread(target=_wait, args=(process, loop, ended), name="umbel-beside", daemon=True).start()
    try:
        return await asyncio.shield(ended)
    finally:
        process.terminate()  # does nothing where it has ended
        try:
            async with asyncio.timeout(stop_s):
                await asyncio.shield(ended)
        except TimeoutError:
            pass
        finally:
            process.kill()


def _start(beside: Beside) -> Popen[bytes]:
    with open(beside.log_file, "ab") if beside.log_file else nullcontext() as stderr:
        return Popen(beside.command, stdin=PIPE, stdout=DEVNULL, stderr=stderr, process_group=0)


def _wait(process: Popen[bytes], loop: asyncio.AbstractEventLoop, ended: "asyncio.Future[int]") -> None:
    code = process.wait()
    if process.stdin is not None:
        process.stdin.close()
    with suppress(RuntimeError):  # the loop has gone before it
        loop.call_soon_threadsafe(ended.set_result, code)


def end_with_parent() -> None:
    """End this process as SIGTERM would when its standard input closes, which it does with the parent."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="umbel-parent", daemon=True).start()
