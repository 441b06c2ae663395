"""Sidecar: a separate process next to a worker, independent of the worker's loop, that ends with it; and what
a worker does about outages of the broker.

If the worker is killed the sidecar ends as well, because the pipe on its standard input closes.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from subprocess import DEVNULL, PIPE, Popen
from typing import NamedTuple

from umbel.backoff import Backoff
from umbel.brokers.links import MAILBOX, MAIN
from umbel.protocol.machine import Tick
from umbel.protocol.shutdown import (
    CallFailed,
    CallWorked,
    Closed,
    LinkChange,
    Outage,
    OutageBegan,
    OutageEnded,
    OutageEvent,
    Reconciling,
)

# ---- sidecar ---------------------------------------------------------------------------------------
#
# A separate process next to a worker, independent of the worker's loop, that ends with it.
#
# If the worker is killed it ends as well, because the pipe on its standard input closes.

log = logging.getLogger("umbel.worker")
STOP_S = 5.0
WELL_S = 60.0  # after a run of this length the pauses between restarts start with the shortest
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
        code = await _run(process, stop_s)
        if not code or loop.time() - began > WELL_S:
            backoff.reset()
        wait_s = backoff.wait_s() if code else NOTHING_TO_DO_S
        if code:
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


# ---- outages ---------------------------------------------------------------------------------------
#
# Logs and counts when the broker or the result store is unavailable, and when it is back.
#
# The shell of `protocol/shutdown.py`. Every part that calls the broker reports here instead of logging
# itself, so that one outage gives two log lines: one when it begins, one when it ends. What follows from it
# (a hello, an adopted message, a lost lease) is a `consequence`: the last line counts it, and its own line
# is logged at DEBUG.

outage_log = logging.getLogger("umbel.worker.connection")
SETTLE_S = 5.0


class Outages:
    """Used on the worker's loop only. `address` is logged, so it holds no password.

    `quiet`: next to a worker that logs the same outages.
    """

    def __init__(self, what: str = "broker", address: str = "", *, quiet: bool = False) -> None:
        self._levels = (logging.DEBUG, logging.DEBUG) if quiet else (logging.WARNING, logging.INFO)
        self._what = what
        self._address = address
        self._machine = Outage(settle_s=SETTLE_S)
        self._timer: asyncio.TimerHandle | None = None
        self._linked = asyncio.Event()
        self._linked.set()
        self._consequences: Counter[str] = Counter()  # of the present outage
        self._on_link: list[Callable[[LinkChange], None]] = []
        self._on_begin: list[Callable[[], None]] = []
        self._on_end: list[Callable[[], None]] = []

    def on_link(self, callback: Callable[[LinkChange], None]) -> None:
        """Register a callback for each change of a link."""
        self._on_link.append(callback)

    def on_begin(self, callback: Callable[[], None]) -> None:
        """Register a callback for the beginning of each outage."""
        self._on_begin.append(callback)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Register a callback for the end of each outage."""
        self._on_end.append(callback)

    def link(self, change: LinkChange) -> None:
        """Take in the change of a link."""
        self._step(change)
        for callback in self._on_link:
            callback(change)

    def failed(self, part: str, error: BaseException) -> None:
        """Note that a call of this part failed."""
        self._step(CallFailed(part, str(error) or "no answer in time"))

    def worked(self, part: str) -> None:
        """Note that a call of this part worked; cheap while nothing fails, so called after every call."""
        if self._machine.is_failing(part):
            self._step(CallWorked(part))

    def report(self, part: str, error: BaseException | None) -> None:
        """Note that a call of this part worked (None) or failed."""
        self.worked(part) if error is None else self.failed(part, error)

    def closed(self, part: str) -> None:
        """Note that this part ends, or makes no more calls."""
        self._step(Closed(part))

    def reconciling(self, part: str) -> None:
        """Extend the outage until this part reports `worked`."""
        self._step(Reconciling(part))

    def consequence(
        self,
        logger: logging.Logger,
        level: int,
        text: str,
        *,
        named: str,
        count: int | None = None,
        **fields: object,
    ) -> None:
        """Log what an outage may have caused; during one it is counted for the last line, as `named`."""
        if self._machine.began is not None:
            self._consequences[named] += 1 if count is None else count
            level = logging.DEBUG
        logger.log(level, text, extra=fields if count is None else {"count": count, **fields})

    async def linked(self) -> None:
        """Return when every link is connected."""
        await self._linked.wait()

    def is_down(self, link: str) -> bool:
        """Return whether the link is lost."""
        return self._machine.is_down(link)

    @property
    def is_linked(self) -> bool:
        """Whether every link is connected."""
        return self._machine.is_linked

    @property
    def reconnects(self) -> Mapping[str, int]:
        """How often each link was restored."""
        return {MAIN: 0, MAILBOX: 0} | self._machine.reconnects

    @property
    def problem(self) -> str:
        """The cause of the present outage; "" when there is none."""
        began = self._machine.began
        return "" if began is None else f"{began.part}: {began.why}"

    def _step(self, event: OutageEvent | Tick) -> None:
        loop = asyncio.get_running_loop()
        for effect in self._machine.step(event, loop.time()):
            match effect:
                case OutageBegan(part, why):
                    self._tell_begin(part, why)
                case OutageEnded():
                    self._tell_end(effect)
        if self._machine.is_linked:
            self._linked.set()
        else:
            self._linked.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._machine.deadline is not None:
            self._timer = loop.call_at(self._machine.deadline, self._step, Tick())

    def _tell_begin(self, part: str, why: str) -> None:
        fields = {"address": self._address, "part": part, "why": why}
        outage_log.log(self._levels[0], "%s unavailable; retrying until it answers", self._what, extra=fields)
        _call_all(self._on_begin)

    def _tell_end(self, ended: OutageEnded) -> None:
        consequences, self._consequences = self._consequences, Counter()
        fields = {
            "after_s": round(ended.after_s, 3),
            "reconnected": _counted(ended.reconnects),
            "failures": ended.failures,
            "reconciled": _counted(sorted(consequences.items())),
        }
        outage_log.log(self._levels[1], "%s available again", self._what, extra=fields)
        _call_all(self._on_end)


def _counted(counts: Iterable[tuple[str, int]]) -> str:
    return ",".join(f"{name}:{count}" for name, count in counts)


def _call_all(callbacks: list[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()
