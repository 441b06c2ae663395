"""Children: the processes of a prefork pool, by slot: how each is made, what it says of itself, how it ends.

A child's death is reported to the machine when the fork server has reported its exit status and
everything it wrote has been read. Should the fork server itself die, its children are killed by
the kernel; each is reported when its socket ends, and a new server is started.

What a child writes is what our own code in it wrote, unless its task wrote to the wrong descriptor.
So nothing in it is trusted further than the child itself: at worst that one is replaced.
"""

import asyncio
import logging
import signal
from collections.abc import Sequence
from typing import Any, Protocol, assert_never

from umbel.errors import PoolError
from umbel.pools.interface import PoolSettings, Told
from umbel.pools.prefork.child_link import ChildLink
from umbel.pools.prefork.exits import Exit, exit_of
from umbel.pools.prefork.memory import OomKills
from umbel.pools.prefork.messages import AboutChild, FromChild, Spoiled
from umbel.pools.prefork.server_link import ServerLink
from umbel.pools.prefork.server_process import StartedServer
from umbel.pools.prefork.servers import ForkServers
from umbel.protocol.pool.events import ChildDied, ChildReady, Replace, Retire
from umbel.wire.frames import Armed, Problem, Ready

log = logging.getLogger(__name__)

_PROBLEM_MAX_CHARS = 4000
_END_S = 2.0  # how long a child whose connection has ended may take to be gone


ChildEvent = ChildReady | Retire | ChildDied | Replace


class ChildrenListener(Protocol):
    def on_event(self, event: ChildEvent) -> None:
        """For the slots machine."""
        ...

    def on_messages(self, link: ChildLink, messages: Sequence[FromChild]) -> None:
        """What a child has written: how jobs ended, and what comes back to `Children.note`."""
        ...

    def on_told(self, told: Told) -> None: ...
    def on_child(self, what: str, fields: dict[str, Any]) -> None: ...

    def on_no_start(self, error: PoolError) -> bool:
        """The app cannot be loaded; whether the pool had not started yet, and so fails."""
        ...


class Children:
    def __init__(
        self, settings: PoolSettings, listener: ChildrenListener, first_server: StartedServer | None
    ) -> None:
        self.links: dict[int, ChildLink] = {}  # by slot
        self.ready: set[int] = set()  # slots with a child that can take jobs
        self._settings = settings
        self._listener = listener
        self._servers = ForkServers(settings, self, first_server)
        self._oom_kills = OomKills()
        self._keys = 0
        self._unstarted: list[int] = []  # slots that wait for a fork server with the app loaded

    @property
    def server_pid(self) -> int | None:
        return self._servers.pid

    def reload(self) -> None:
        self._servers.reload()

    async def close(self) -> None:
        await self._servers.close()

    def start(self, child: int) -> None:
        try:
            if not self._servers.is_loaded():
                self._unstarted.append(child)
                return
            self._keys += 1
            link = ChildLink(
                self._keys, child, on_messages=self._listener.on_messages, on_broken=self._on_broken
            )
        except OSError as error:  # no more descriptors, processes or memory for now
            self._listener.on_event(ChildDied(child, b"", f"cannot start a child process: {error}"))
            return
        self.links[child] = link
        self._servers.make_child(link)

    def kill(self, child: int, reason: str) -> None:
        link = self.links.get(child)
        if link is None:  # it never got as far as a process
            self._unstarted.remove(child)
            self._listener.on_event(ChildDied(child, b"", reason))
        else:
            link.doom = reason
            self._servers.signal(link, signal.SIGKILL)

    def signal(self, link: ChildLink, signum: int) -> None:
        self._servers.signal(link, signum)

    def kill_broken(self, link: ChildLink, why: str) -> None:
        if self._servers.is_known(link):
            link.doom = link.doom or why
            self._servers.signal(link, signal.SIGKILL)

    # ---- from a child ------------------------------------------------------------------------------

    def note(self, link: ChildLink, message: AboutChild) -> None:
        match message:
            case Ready(pid):
                self._on_ready(link, pid)
            case Told():
                self._listener.on_told(message)
            case Armed():
                link.armed = True
            case Spoiled(reason):
                self._listener.on_event(Retire(link.child, reason))
            case Problem(text):
                link.problem = text[:_PROBLEM_MAX_CHARS]
            case _:
                assert_never(message)

    def _on_ready(self, link: ChildLink, pid: int) -> None:
        if link.child in self.ready:
            return  # it says so once; what comes later is not ours, nor is the number in it
        link.pid = pid
        self.ready.add(link.child)
        self._listener.on_child("started", {"child": link.child, "pid": pid})
        self._listener.on_event(ChildReady(link.child))

    def _on_broken(self, link: ChildLink, why: str) -> None:
        if link.orphan:
            self._bury(link, Exit("killed", link.doom))
        elif why:
            self.kill_broken(link, why)
        else:  # as a rule it is dying, and the server is about to say how
            asyncio.get_running_loop().call_later(
                _END_S, self.kill_broken, link, "it closed its connection to the worker"
            )

    def _bury(self, link: ChildLink, exited: Exit) -> None:
        if not self._servers.is_known(link):
            return
        self._servers.forget(link)
        link.drain()
        reason = f"{exited.reason}: {link.problem}" if link.problem else exited.reason
        tokens = link.take_tokens()
        link.close()
        del self.links[link.child]
        self.ready.discard(link.child)
        # The machine first: a listener may submit, and nothing may be sent to the dead.
        self._listener.on_event(ChildDied(link.child, tokens, reason))
        what = "ended" if exited.kind == "asked" else "died"
        fields = {"child": link.child, "pid": link.pid, "how": exited.kind, "reason": reason}
        self._listener.on_child(what, fields)

    # ---- from the fork servers ---------------------------------------------------------------------

    def on_exited(self, link: ChildLink, status: int) -> None:
        out_of_memory = self._oom_kills.happened() if status == signal.SIGKILL and not link.doom else False
        self._bury(
            link,
            exit_of(
                link.pid, status, dismissed=link.dismissed, killed=link.doom, out_of_memory=out_of_memory
            ),
        )

    def on_not_forked(self, link: ChildLink, problem: str) -> None:
        self._bury(link, Exit("exit", problem))

    def on_loaded(self, spawn_because: str, *, reloaded: bool) -> None:
        if spawn_because and self._settings.child_start == "auto":
            self._listener.on_child("spawning", {"because": spawn_because})
        unstarted, self._unstarted = self._unstarted, []
        for child in unstarted:
            self.start(child)
        if reloaded:
            self._listener.on_child("reloaded", {"server": self._servers.pid})
            self._listener.on_event(Replace())

    def on_not_loaded(self, reason: str) -> None:
        self._listener.on_child("not-reloaded", {"reason": reason})

    def on_server_lost(
        self, server: ServerLink, reason: str, orphans: Sequence[ChildLink], *, current: bool
    ) -> None:
        """Children are buried as their sockets end, then others take their slots."""
        if not (server.problem and self._listener.on_no_start(PoolError(reason))):
            log.error(
                "fork server died; replacing it and its child processes",
                extra={"server": server.pid, "reason": reason},
            )
        self._listener.on_child("server-died", {"pid": server.pid, "reason": reason})
        for link in orphans:
            link.doom = reason
            asyncio.get_running_loop().call_later(_END_S, self._bury, link, Exit("killed", reason))
            if link.broken:
                self._bury(link, Exit("killed", reason))
        if current:
            unstarted, self._unstarted = self._unstarted, []
            for child in unstarted:
                self._listener.on_event(ChildDied(child, b"", reason))
