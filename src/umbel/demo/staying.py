"""Staying: the demo's cluster again, with the dashboard, until it is interrupted.

Enough goes on that every page has something to show: load that swells and ebbs, an election every minute,
and every three minutes a worker that is killed at work and comes back. The dashboard shows what the demo
did, too: it finds the last hour in its file. Only the logs grow: results expire, and no ledger is written.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from umbel.demo import tasks
from umbel.demo.load import Sent, elect, send_gently, send_held
from umbel.demo.processes import Processes
from umbel.demo.story import WORKERS, start_workers
from umbel.demo.writing import LEDGER
from umbel.errors import BrokerError, ElectionError

BATCH_EVERY_S = 1.0
ELECTION_EVERY, ELECTION_AT = 60, 10  # batches
KILL_EVERY, KILL_AT, BACK_AT = 180, 30, 65  # batches
LOOK_EVERY_S = 0.2
LOOKS_MAX = 10
ASK_S = 2.0
ELECTION_S = 5.0


async def stay(home: Path, say: Callable[[str], None], *, web: bool, celery: bool) -> None:
    itself = asyncio.current_task()
    assert itself is not None
    for signum in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(signum, itself.cancel)
    os.environ.pop(LEDGER, None)
    try:
        with Processes(home) as processes:
            start_workers(processes, tasks.CELERY_QUEUE if celery else "")
            page = await _show(processes, say) if web else ""
            say(f"the cluster runs on, with logs in {home}; press Ctrl-C to stop it")
            await _Going(home, processes, say, page, celery=celery).on()
    finally:
        await asyncio.to_thread(tasks.app.close)


async def _show(processes: Processes, say: Callable[[str], None]) -> str:
    """Where the dashboard is, when it is there."""
    processes.show()
    while not (address := processes.address()):
        processes.check()
        await asyncio.sleep(LOOK_EVERY_S)
    say(f"dashboard: {address}")
    return address.partition("/session")[0]


class _Going:
    def __init__(
        self, home: Path, processes: Processes, say: Callable[[str], None], page: str, *, celery: bool
    ) -> None:
        self._processes = processes
        self._say = say
        self._page = page
        self._celery = celery
        self._release = home / "released"
        self._away = ""  # the worker that was killed

    async def on(self) -> None:
        for number in count():
            self._processes.check()
            with suppress(BrokerError, ElectionError):  # a server that is away; the next one may arrive
                await self._act(number)
            await asyncio.sleep(BATCH_EVERY_S)

    async def _act(self, number: int) -> None:
        """Processes are started here and not in a thread: none may be started after the end."""
        if number % KILL_EVERY == BACK_AT:
            self._start_again()
        await asyncio.to_thread(send_gently, number, celery=self._celery)
        if number % ELECTION_EVERY == ELECTION_AT:
            await asyncio.to_thread(elect, 1 + number // ELECTION_EVERY, timeout_s=ELECTION_S)
        if number % KILL_EVERY == KILL_AT:
            await self._kill_one(number // KILL_EVERY)

    async def _kill_one(self, turn: int) -> None:
        """While it runs a task, which others then run again."""
        self._release.unlink(missing_ok=True)
        try:
            await asyncio.to_thread(send_held, Sent(), self._release)
            running = await self._held()
            if running:
                name = min(running, key=lambda one: (WORKERS.index(one) - turn) % len(WORKERS))
                self._processes.kill(name)
                self._away = name
                self._say(f"killed {name} (-9) while it ran task {self._link(running[name])}")
        finally:
            self._release.touch()

    async def _held(self) -> dict[str, str]:
        """By worker: a task that it runs until it is released."""
        for _ in range(LOOKS_MAX):
            if found := await asyncio.to_thread(_held_now, len(self._processes.workers)):
                return found
            await asyncio.sleep(LOOK_EVERY_S)
        return {}

    def _link(self, task_id: str) -> str:
        return f"{self._page}/tasks/{task_id}" if self._page else task_id

    def _start_again(self) -> None:
        if self._away:
            self._processes.start(self._away)
            self._say(f"started {self._away} again")
            self._away = ""


def _held_now(workers: int) -> dict[str, str]:
    answers = tasks.app.control.ask("active", timeout=ASK_S, limit=workers)
    return {
        name: one["id"]
        for node, running in answers.replies.items()
        for one in running
        if (name := node.partition("@")[0]) in WORKERS  # others may share the server
        and isinstance(one, dict)
        and one.get("type") == tasks.held.name
    }
