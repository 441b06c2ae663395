"""Outages: logs and counts when the broker or the result store is unavailable, and when it is back.

The shell of `Outage` in `protocol/shutdown.py`. Every part that calls the broker reports here instead of
logging itself, so that one outage gives two log lines: one when it begins, one when it ends. What follows
from it (a hello, an adopted message, a lost lease) is a `consequence`: the last line counts it, and its own
line is logged at DEBUG.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

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

log = logging.getLogger("umbel.worker.connection")
SETTLE_S = 5.0


class Outages:
    """The outages of one server. Used on the worker's loop only.

    `address` is logged, so it must not contain a password. `quiet`: this process runs next to a worker that
    logs the same outages.
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
        """Note that a link was lost, restored or closed."""
        self._step(change)
        for callback in self._on_link:
            callback(change)

    def failed(self, part: str, error: BaseException) -> None:
        """Note that a call of this part failed."""
        self._step(CallFailed(part, str(error) or "no answer in time"))

    def worked(self, part: str) -> None:
        """Note that a call of this part worked. It costs little while nothing fails."""
        if self._machine.is_failing(part):
            self._step(CallWorked(part))

    def report(self, part: str, error: BaseException | None) -> None:
        """Note that a call of this part worked (None) or failed."""
        self.worked(part) if error is None else self.failed(part, error)

    def closed(self, part: str) -> None:
        """Note that this part makes no more calls."""
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
        """Feed the machine, log what it reports, and set the timer for its next deadline."""
        loop = asyncio.get_running_loop()
        for effect in self._machine.step(event, loop.time()):
            match effect:
                case OutageBegan(part, why):
                    fields = {"address": self._address, "part": part, "why": why}
                    text = "%s unavailable; retrying until it answers"
                    log.log(self._levels[0], text, self._what, extra=fields)
                    _call_all(self._on_begin)
                case OutageEnded():
                    self._log_end(effect)
                    _call_all(self._on_end)
        if self._machine.is_linked:
            self._linked.set()
        else:
            self._linked.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._machine.deadline is not None:
            self._timer = loop.call_at(self._machine.deadline, self._step, Tick())

    def _log_end(self, ended: OutageEnded) -> None:
        consequences, self._consequences = self._consequences, Counter()
        fields = {
            "after_s": round(ended.after_s, 3),
            "reconnected": _counted(ended.reconnects),
            "failures": ended.failures,
            "reconciled": _counted(sorted(consequences.items())),
        }
        log.log(self._levels[1], "%s available again", self._what, extra=fields)


def _counted(counts: Iterable[tuple[str, int]]) -> str:
    return ",".join(f"{name}:{count}" for name, count in counts)


def _call_all(callbacks: list[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()
