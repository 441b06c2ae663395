"""Stack dump: SIGUSR1 to the main process writes what it and its children are at to the log.

The main process is looked at by a thread, which does not need its event loop: a loop that is held up
is what somebody wants to see. The children are asked on the loop (`pools/stacks.py`).
"""

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from umbel.pools.interface import Pool
from umbel.pools.stacks import stacks_of

if TYPE_CHECKING:
    from asyncio import Task

log = logging.getLogger("umbel.worker.stacks")
ASKING = signal.SIGUSR1


def hears_signals() -> bool:
    """Python calls handlers in the main thread alone; who started a worker in another one stops it."""
    return threading.current_thread() is threading.main_thread()


def log_own_stacks_on_signal() -> None:
    """From now on SIGUSR1 logs this process's stacks, instead of ending it."""
    signal.signal(ASKING, lambda _signum, _frame: _log_own_stacks_soon())


@contextmanager
def stacks_on_signal(pool: Pool) -> Iterator[None]:
    """Inside, SIGUSR1 logs the children's stacks too. Only one dump runs at a time."""
    if not hears_signals():
        yield
        return
    import asyncio  # who has a loop asks here; who forks children has none yet

    loop = asyncio.get_running_loop()
    asked: set[Task[None]] = set()

    def ask_children() -> None:
        if not asked:
            task = loop.create_task(_log_children(pool), name="umbel-stacks")
            asked.add(task)
            task.add_done_callback(asked.discard)

    def heard(_signum: int, _frame: object) -> None:
        _log_own_stacks_soon()
        loop.call_soon_threadsafe(ask_children)

    before = signal.signal(ASKING, heard)
    try:
        yield
    finally:
        signal.signal(ASKING, before)
        for task in asked:
            task.cancel()


def _log_own_stacks_soon() -> None:
    # Not in the handler: what it interrupted may hold the log's stream.
    threading.Thread(target=_log_own_stacks, name="umbel-stacks", daemon=True).start()


def _log_own_stacks() -> None:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        f"thread {names.get(number, number)} (innermost call last)\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
        if number != threading.get_ident()
    ]
    log.warning(
        "SIGUSR1: stack traces of the main process",
        extra={"pid": os.getpid(), "traceback": "\n".join(stacks)},
    )


async def _log_children(pool: Pool) -> None:
    import asyncio

    described = pool.describe()
    running = {pid: task_id for task_id, pid in described["running"].items()}
    children = described["processes"]
    for pid, stack in zip(children, await asyncio.gather(*map(stacks_of, children)), strict=True):
        if pid != os.getpid():  # a pool without child processes names the main process
            fields = {
                "pid": pid,
                "task_id": running.get(pid, ""),
                "traceback": stack or "no answer from the child process",
            }
            log.warning("SIGUSR1: stack traces of a child process", extra=fields)
