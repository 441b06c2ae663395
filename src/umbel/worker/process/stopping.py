"""Stopping: the shell of `protocol/shutdown.py`. Signals and requests in; taking, running and returning end.

All other steps go on meanwhile: the worker beats, holds its leases, answers remote control and
acknowledges what ends, until nothing runs any more.

Signals win over everything else: a request cancels a start that is under way (`unless_asked`), and
ends the wait for a hook of the user's (`wait_for`).
"""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import assert_never

from umbel.protocol.machine import Tick
from umbel.protocol.shutdown import Ask, Cut, Drained, Event, Interrupt, Phase, Quit, Running, StopTaking
from umbel.worker.context import WorkerContext
from umbel.worker.process.stack_dump import hears_signals
from umbel.worker.steps.tasks import Tasks
from umbel.worker.user_code.hooks import HookRun

log = logging.getLogger("umbel.worker")
TELL_EVERY_S = 10.0
ASKING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
QUITTING = signal.SIGQUIT
_HOW = {Phase.WARM: "warm", Phase.SOFT: "soft"}


class Stopping:
    def __init__(self, context: WorkerContext, tasks: Tasks) -> None:
        self._machine = context.shutdown
        self._notices = context.notices
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._asked = asyncio.Event()
        self._hurried = False  # asked more than once, or to quit
        self._hook: HookRun | None = None
        self._start: asyncio.Timeout | None = None

    def ask(self) -> None:
        """Once: finish what runs. Twice: tell the tasks. Three times: return what runs."""
        self._hurry(self._machine.is_stopping)
        self._step(Ask())

    def quit(self) -> None:
        """Return what runs, at once."""
        self._hurry(True)
        self._step(Quit())

    def _heard(self, signum: signal.Signals) -> None:
        self.quit() if signum is QUITTING else self.ask()
        self._notices.stopping(signum.name, _HOW.get(self._machine.phase, "cold"))

    async def asked(self) -> None:
        await self._asked.wait()

    @asynccontextmanager
    async def unless_asked(self) -> AsyncIterator[None]:
        """What is inside is cancelled when somebody asks the worker to stop."""
        try:
            async with asyncio.timeout(None) as self._start:
                if self._asked.is_set():
                    self._cancel_start()
                yield
        except TimeoutError:
            if self._start is None or not self._start.expired():
                raise
            log.info("shutdown requested during start-up")
        finally:
            self._start = None

    async def wait_for(self, hook: HookRun) -> None:
        """Wait until it has returned, its time is over, or somebody asks (again) to stop."""
        self._hook = hook
        if self._hurried:
            hook.let_go()
        await hook.ended()
        self._hook = None

    def _hurry(self, hurried: bool) -> None:
        self._hurried = self._hurried or hurried
        if self._hook is not None:
            self._hook.let_go()

    def _cancel_start(self) -> None:
        if self._start is not None:
            self._start.reschedule(self._loop.time())

    async def drain(self) -> None:
        """Wait until nothing runs any more, or cut off what does."""
        machine = self._machine
        self._step(Running(self._tasks.running))
        if machine.running and machine.phase is Phase.WARM:
            left_s = round(machine.left_s(self._loop.time()) or 0.0, 1)
            log.info(
                "waiting for running tasks to finish", extra={"count": machine.running, "grace_s": left_s}
            )
        while machine.phase is not Phase.DONE:
            if machine.phase is Phase.COLD:
                await self._tasks.cut()
            else:
                await self._wait()
            self._step(Running(self._tasks.running))
            self._step(Tick())

    async def _wait(self) -> None:
        tell_at = self._loop.time() + TELL_EVERY_S
        deadline = self._machine.deadline
        try:
            async with asyncio.timeout_at(tell_at if deadline is None else min(deadline, tell_at)):
                await self._tasks.changed()
        except TimeoutError:
            left_s = round(self._machine.left_s(self._loop.time()) or 0.0, 1)
            fields = {"running": self._machine.running, "left_s": left_s}
            log.info(self._machine.phase.value, extra=fields)

    def _step(self, event: Event | Tick) -> None:
        for effect in self._machine.step(event, self._loop.time()):
            match effect:
                case StopTaking():
                    self._tasks.stop_taking()
                    self._asked.set()
                    self._cancel_start()
                case Interrupt():
                    count = self._tasks.interrupt()
                    log.warning("second shutdown request: interrupting running tasks", extra={"count": count})
                case Cut(count):
                    log.warning("running tasks interrupted; returned to their queues", extra={"count": count})
                    self._tasks.note_change()
                case Drained():
                    pass
                case _:
                    assert_never(effect)

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        wanted = [*ASKING, QUITTING] if hears_signals() else []
        if (
            wanted and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        ):  # nohup: who closed the terminal wants it to go on
            wanted.remove(signal.SIGHUP)
        for signum in wanted:
            self._loop.add_signal_handler(signum, self._heard, signum)
        try:
            yield
        finally:
            for signum in wanted:
                self._loop.remove_signal_handler(signum)
