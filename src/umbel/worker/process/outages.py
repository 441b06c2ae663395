"""Outages: what a worker says and does when its broker is away and when it is back.

The shell of `protocol/outage.py`. Every part that calls the broker reports here instead of logging
by itself, so that one outage is two lines: one when it begins, one when it ends. What the parts do
because of it (a hello, a message adopted, a lease lost) is a `consequence`: the last line counts it, and
its own line is for DEBUG.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from umbel.brokers.links import MAILBOX, MAIN
from umbel.protocol.machine import Tick
from umbel.protocol.outage import (
    Began,
    CallFailed,
    CallWorked,
    Closed,
    Ended,
    Event,
    LinkChange,
    Outage,
    Reconciling,
)

log = logging.getLogger("umbel.worker.connection")
SETTLE_S = 5.0


class Outages:
    """Used on the worker's loop only. `address` is shown, so it holds no password.

    `quiet`: beside a worker that tells of them.
    """

    def __init__(self, what: str = "broker", address: str = "", *, quiet: bool = False) -> None:
        self._levels = (logging.DEBUG, logging.DEBUG) if quiet else (logging.WARNING, logging.INFO)
        self._what = what
        self._address = address
        self._machine = Outage(settle_s=SETTLE_S)
        self._timer: asyncio.TimerHandle | None = None
        self._linked = asyncio.Event()
        self._linked.set()
        self._consequences: Counter[str] = Counter()  # of the outage that lasts
        self._on_link: list[Callable[[LinkChange], None]] = []
        self._on_begin: list[Callable[[], None]] = []
        self._on_end: list[Callable[[], None]] = []

    def on_link(self, callback: Callable[[LinkChange], None]) -> None:
        """Call `callback` for each change of a link."""
        self._on_link.append(callback)

    def on_begin(self, callback: Callable[[], None]) -> None:
        self._on_begin.append(callback)

    def on_end(self, callback: Callable[[], None]) -> None:
        self._on_end.append(callback)

    def link(self, change: LinkChange) -> None:
        self._step(change)
        for callback in self._on_link:
            callback(change)

    def failed(self, part: str, error: BaseException) -> None:
        self._step(CallFailed(part, str(error) or "no answer in time"))

    def worked(self, part: str) -> None:
        """Cheap while nothing fails: to be called after every call that went well."""
        if self._machine.is_failing(part):
            self._step(CallWorked(part))

    def report(self, part: str, error: BaseException | None) -> None:
        self.worked(part) if error is None else self.failed(part, error)

    def closed(self, part: str) -> None:
        self._step(Closed(part))

    def reconciling(self, part: str) -> None:
        """The outage is not over before this part says `worked`."""
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
        """Log what an outage may have caused; within one it is counted, under a name, in its last line."""
        if self._machine.began is not None:
            self._consequences[named] += 1 if count is None else count
            level = logging.DEBUG
        logger.log(level, text, extra=fields if count is None else {"count": count, **fields})

    async def linked(self) -> None:
        """Return when every link is there."""
        await self._linked.wait()

    def is_down(self, link: str) -> bool:
        return self._machine.is_down(link)

    @property
    def is_linked(self) -> bool:
        return self._machine.is_linked

    @property
    def reconnects(self) -> Mapping[str, int]:
        """How often each link was restored."""
        return {MAIN: 0, MAILBOX: 0} | self._machine.reconnects

    @property
    def problem(self) -> str:
        began = self._machine.began
        return "" if began is None else f"{began.part}: {began.why}"

    def _step(self, event: Event | Tick) -> None:
        loop = asyncio.get_running_loop()
        for effect in self._machine.step(event, loop.time()):
            match effect:
                case Began(part, why):
                    self._tell_begin(part, why)
                case Ended():
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
        log.log(self._levels[0], "%s unavailable; retrying until it answers", self._what, extra=fields)
        _call_all(self._on_begin)

    def _tell_end(self, ended: Ended) -> None:
        consequences, self._consequences = self._consequences, Counter()
        fields = {
            "after_s": round(ended.after_s, 3),
            "reconnected": _counted(ended.reconnects),
            "failures": ended.failures,
            "reconciled": _counted(sorted(consequences.items())),
        }
        log.log(self._levels[1], "%s available again", self._what, extra=fields)
        _call_all(self._on_end)


def _counted(counts: Iterable[tuple[str, int]]) -> str:
    return ",".join(f"{name}:{count}" for name, count in counts)


def _call_all(callbacks: list[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()
