"""GreenChildren: the processes of a green pool, on prefork's fork server. Nothing here waits.

So many children share the jobs; suspicious jobs get extra children ("singles"), one job
at a time, started when needed and stopped when not. A child that dies is replaced; when several die in a
row before they were ready, more and more slowly, and in the end the pool has failed.
"""

import asyncio
import logging
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from umbel.errors import PoolError
from umbel.pools.interface import LostJob, Outcome, PoolSettings, Told
from umbel.pools.prefork.child_link import ChildLink
from umbel.pools.prefork.exits import Exit, exit_of
from umbel.pools.prefork.messages import FromChild, NoOutcome, lost_outcome
from umbel.pools.prefork.server_link import ServerLink
from umbel.pools.prefork.servers import ForkServers
from umbel.protocol.retry import reconnect_wait_s
from umbel.wire.frames import Outcomes, Problem, Ready, Stop, encode_frame

log = logging.getLogger(__name__)

_SINGLES_MAX = 4
_PROBLEM_MAX_CHARS = 4000
_GONE_S = 2.0  # how long a child whose connection has ended may take to be gone


@dataclass(slots=True, eq=False)
class GreenChild:
    link: ChildLink
    single: bool
    ready: bool = False
    sign_at: float = 0.0  # when it was last heard of
    jobs: set[int] = field(default_factory=set)


class GreenListener(Protocol):
    def on_ready(self) -> None: ...
    def on_told(self, told: Told) -> None: ...
    def on_outcomes(self, outcomes: Sequence[Outcome], pid: int) -> None: ...
    def on_no_outcome(self, lost: LostJob) -> None: ...
    def on_gone(self, child: GreenChild, reason: str, *, by_us: bool) -> None: ...
    def on_child(self, what: str, fields: dict[str, Any]) -> None: ...


class GreenChildren:
    def __init__(self, settings: PoolSettings, listener: GreenListener) -> None:
        self.wanted = 0  # children that share jobs
        self._settings = settings
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._servers = ForkServers(settings, self)
        self._children: dict[int, GreenChild] = {}  # by the link's key
        self._keys = 0
        self._unmade: list[bool] = []  # singles or not, that wait for the app to be loaded
        self._failures = 0  # starts in a row that led nowhere
        self._closing = False
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._empty = asyncio.Event()

    async def start(self, count: int) -> None:
        self.wanted = count
        for _ in range(count):
            self._make(single=False)
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self._started
        except TimeoutError:
            limit = f"{self._settings.start_timeout_s:g} s (start_timeout_s)"
            raise PoolError(f"the pool was not ready after {limit}") from None

    async def stop(self, *, grace_s: float) -> None:
        self._closing = True
        for child in self._children.values():
            self._dismiss(child, "pool shutdown")
        try:
            async with asyncio.timeout(grace_s):
                while self._children:
                    self._empty.clear()
                    await self._empty.wait()
        except TimeoutError:
            pass
        await self._servers.close()
        for child in list(self._children.values()):
            child.link.close()
        self._children.clear()

    # ---- for the pool ------------------------------------------------------------------------------

    @property
    def server_pid(self) -> int | None:
        return self._servers.pid

    def pids(self) -> list[int]:
        return [child.link.pid for child in self._children.values() if child.ready]

    def least_busy(self, most: int) -> GreenChild | None:
        """A child that has fewer jobs than this, and none has fewer than it."""
        able = [child for child in self._able(single=False) if len(child.jobs) < most]
        return min(able, key=lambda child: len(child.jobs), default=None)

    def for_one_alone(self) -> GreenChild | None:
        """A child without a job; when there is none, one is made and will say that it is ready."""
        for child in self._able(single=True):
            if not child.jobs:
                return child
        singles = sum(child.single for child in self._children.values()) + sum(self._unmade)
        if singles < _SINGLES_MAX:
            self._make(single=True)
        return None

    def dismiss_idle_singles(self) -> None:
        for child in self._able(single=True):
            if not child.jobs:
                self._dismiss(child, "no longer needed")

    def kill(self, child: GreenChild, why: str) -> None:
        child.link.doom = child.link.doom or why
        self._servers.signal(child.link, signal.SIGKILL)

    # ---- making and losing them --------------------------------------------------------------------

    def _able(self, *, single: bool) -> list[GreenChild]:
        return [
            child
            for child in self._children.values()
            if child.ready and child.single is single and not child.link.dismissed and not child.link.doom
        ]

    def _make(self, *, single: bool) -> None:
        if self._closing:
            return
        try:
            if not self._servers.is_loaded():
                self._unmade.append(single)
                return
            self._keys += 1
            link = ChildLink(
                self._keys, self._keys - 1, on_messages=self._on_messages, on_broken=self._on_broken
            )
        except OSError as error:  # no more descriptors, processes or memory for now
            self._failed(single, f"cannot start a child process: {error}")
            return
        self._children[link.key] = GreenChild(link, single)
        self._servers.make_child(link)

    def _dismiss(self, child: GreenChild, why: str) -> None:
        child.link.dismissed = why
        child.link.send(encode_frame(Stop()))

    def _on_messages(self, link: ChildLink, messages: Sequence[FromChild]) -> None:
        child = self._children[link.key]
        child.sign_at = self._loop.time()
        outcomes: list[Outcome] = []
        for message in messages:
            match message:
                case Outcomes():
                    outcomes += message.outcomes
                case Told():
                    self._listener.on_told(message)
                case NoOutcome():
                    self._listener.on_no_outcome(lost_outcome(message))
                case Problem(text):
                    link.problem = text[:_PROBLEM_MAX_CHARS]
                case Ready(pid) if not child.ready:
                    self._on_first_ready(child, pid)
                case _:
                    pass  # a sign
        if outcomes:
            self._listener.on_outcomes(outcomes, link.pid)

    def _on_first_ready(self, child: GreenChild, pid: int) -> None:
        child.ready, child.link.pid, self._failures = True, pid, 0
        self._listener.on_child("started", {"child": child.link.child, "pid": pid})
        if len(self._able(single=False)) >= self.wanted and not self._started.done():
            self._started.set_result(None)
        self._listener.on_ready()

    def _on_broken(self, link: ChildLink, why: str) -> None:
        child = self._children.get(link.key)
        if child is None:
            return
        if why:
            self.kill(child, why)
        elif not link.orphan:  # as a rule it is dying, and the server is about to say how
            self._loop.call_later(_GONE_S, self._kill_if_there, link)

    def _kill_if_there(self, link: ChildLink) -> None:
        if (child := self._children.get(link.key)) is not None:
            self.kill(child, "it closed its connection to the worker")

    def _bury(self, link: ChildLink, exited: Exit) -> None:
        child = self._children.get(link.key)
        if child is None:
            return
        link.drain()
        del self._children[link.key]
        if self._servers.is_known(link):
            self._servers.forget(link)
        reason = f"{exited.reason}: {link.problem}" if link.problem else exited.reason
        link.close()
        self._empty.set()
        what = "ended" if exited.kind == "asked" else "died"
        fields = {"child": link.child, "pid": link.pid, "how": exited.kind, "reason": reason}
        self._listener.on_child(what, fields)
        self._listener.on_gone(child, reason, by_us=exited.kind == "killed")
        if child.single or self._closing:
            return
        if child.ready:
            self._make(single=False)
        else:
            self._failed(single=False, reason=reason)

    def _failed(self, single: bool, reason: str) -> None:
        """Not even its first job: try again after a while, and give up in the end."""
        self._failures += 1
        if self._failures >= self._settings.start_attempts or not self._started.done():
            error = PoolError(f"no child process survived start-up: {reason}")
            if not self._started.done():
                self._started.set_exception(error)
            self._listener.on_child("failed", {"reason": str(error)})
            return
        wait_s = reconnect_wait_s(self._failures, 0.5)
        self._loop.call_later(wait_s, lambda: self._make(single=single))

    # ---- from the fork servers ---------------------------------------------------------------------

    def on_loaded(self, spawn_because: str, *, reloaded: bool) -> None:
        if spawn_because and self._settings.child_start == "auto":
            self._listener.on_child("spawning", {"because": spawn_because})
        unmade, self._unmade = self._unmade, []
        for single in unmade:
            self._make(single=single)

    def on_not_loaded(self, reason: str) -> None:
        self._listener.on_child("not-reloaded", {"reason": reason})

    def on_exited(self, link: ChildLink, status: int) -> None:
        gone = exit_of(link.pid, status, dismissed=link.dismissed, killed=link.doom, out_of_memory=False)
        self._bury(link, gone)

    def on_not_forked(self, link: ChildLink, problem: str) -> None:
        self._bury(link, Exit("exit", problem))

    def on_server_lost(
        self, server: ServerLink, reason: str, orphans: Sequence[ChildLink], *, current: bool
    ) -> None:
        if server.problem and not self._started.done():
            self._started.set_exception(PoolError(reason))
            return
        log.error(
            "fork server died; replacing it and its child processes",
            extra={"server": server.pid, "reason": reason},
        )
        self._listener.on_child("server-died", {"pid": server.pid, "reason": reason})
        unmade, self._unmade = self._unmade, []
        for link in orphans:
            self._bury(link, Exit("killed", reason))
        for single in unmade:
            self._failed(single, reason)
