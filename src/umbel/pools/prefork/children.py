"""Children of a prefork pool and their fork servers, seen from the main process.

There is usually one fork server, and two while the app is reloaded. A child belongs to the server that forked
it: only that server can signal it and learns how it ended. A replaced server stays until its last child has
ended. A server that could not load the app is dropped if another server has loaded it.

A child's death is reported to the slots machine when the fork server has reported its exit status and
everything the child wrote has been read. If the fork server itself dies, the kernel kills its children. Each
is reported when its socket ends, and a new server is started.

Umbel's code in the child writes its messages, unless a task writes to the wrong descriptor. So a message can
affect only the child that sent it: at worst that child is replaced.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, assert_never

from umbel.errors import PoolError
from umbel.files import ran_out
from umbel.pools.interface import PoolSettings, UserEvent
from umbel.pools.prefork.kernel import Exit, OomKills, exit_of
from umbel.pools.prefork.links import ChildLink, ServerLink
from umbel.pools.prefork.messages import (
    AboutChild,
    Exited,
    Fork,
    Forked,
    FromServer,
    Loaded,
    NotForked,
    Signal,
    Spoiled,
    setup_of,
)
from umbel.pools.prefork.server_process import StartedServer, spawn_server
from umbel.protocol.pool.events import ChildDied, ChildReady, Replace, Retire
from umbel.wire.frames import Armed, Problem, Ready

if TYPE_CHECKING:
    from umbel.pools.prefork.parent import PreforkPool

# ---- fork servers ----------------------------------------------------------------------------------

log = logging.getLogger(__name__)


class ServersListener(Protocol):
    """Receives events of the fork servers."""

    def on_loaded(self, spawn_because: str, *, reloaded: bool) -> None:
        """Children can be created now; `reloaded`: by a server that replaces another."""
        ...

    def on_not_loaded(self, reason: str) -> None:
        """The app could not be reloaded; the current server stays."""
        ...

    def on_exited(self, link: ChildLink, status: int) -> None:
        """The server has reaped this child; `status` is that of waitpid."""

    def on_not_forked(self, link: ChildLink, problem: str) -> None:
        """The server could not create this child."""

    def on_server_lost(
        self, server: ServerLink, reason: str, orphans: Sequence[ChildLink], *, current: bool
    ) -> None:
        """The server ended unexpectedly, and its children die with it; `current`: it was the server for new
        children.
        """
        ...


class ForkServers:
    """The fork servers of a pool: usually one, two while the app is reloaded."""

    def __init__(
        self, settings: PoolSettings, listener: ServersListener, first: StartedServer | None = None
    ) -> None:
        """Store a `first` server that was started before the pool existed, or None."""
        self._settings = settings
        self._first = first
        self._listener = listener
        self._current: ServerLink | None = None
        self._next: ServerLink | None = None  # loads the app, then takes over
        self._old: list[ServerLink] = []  # replaced servers whose children still work
        self._dismissed: set[ServerLink] = set()  # about to end
        self._links: dict[int, tuple[ChildLink, ServerLink]] = {}  # by the child's key

    @property
    def pid(self) -> int | None:
        """Return the pid of the current server; None if there is none."""
        return self._current.pid if self._current else None

    def is_loaded(self) -> bool:
        """Return whether a child can be created now; start a server if there is none."""
        if self._current is None:
            self._current = self._open()
        return self._current.loaded

    def reload(self) -> None:
        """Start a server that loads the app again."""
        if self._next is None and self._current is not None:
            self._next = self._open()

    def make_child(self, link: ChildLink) -> None:
        """Ask the current server for a child that gets this link's descriptors."""
        assert self._current is not None, "is_loaded() must be called first"
        self._links[link.key] = (link, self._current)
        self._current.send(Fork(link.key, link.child), link.child_fds(), link.handed_over)

    def is_known(self, link: ChildLink) -> bool:
        """Return whether this link's child has not been forgotten yet."""
        return link.key in self._links

    def signal(self, link: ChildLink, signum: int) -> None:
        """Make the child's server send it a signal; do nothing if the child has ended."""
        if link.key in self._links:
            self._links[link.key][1].send(Signal(link.key, signum))

    def forget(self, link: ChildLink) -> None:
        """Forget a child that has ended. A replaced server ends with its last child."""
        del self._links[link.key]
        self._close_old()

    async def close(self) -> None:
        """End all servers, and with them every descendant."""
        servers = (self._current, self._next, *self._old, *self._dismissed)
        everyone = [server for server in servers if server is not None]
        self._current = self._next = None
        self._old.clear()
        for server in everyone:
            server.close()
        if self._first is not None:  # it was never used
            self._first.discard()
        await asyncio.gather(*(server.ended() for server in everyone))

    # ---- from the servers --------------------------------------------------------------------------

    def _open(self) -> ServerLink:
        first, self._first = self._first, None
        setup = setup_of(self._settings)
        # the settings have changed since the server was started
        if first is not None and first.setup != setup:
            first.discard()
            first = None
        server = first or spawn_server(setup)
        return ServerLink(server, on_messages=self._on_messages, on_lost=self._on_lost)

    def _on_messages(self, server: ServerLink, messages: Sequence[FromServer]) -> None:
        for message in messages:
            match message:
                case Exited(key, status) if key in self._links:
                    self._listener.on_exited(self._links[key][0], status)
                case Forked(key, pid) if key in self._links:
                    self._links[key][0].pid = pid
                case NotForked(key, problem) if key in self._links:
                    self._listener.on_not_forked(self._links[key][0], problem)
                case Exited() | Forked() | NotForked():
                    pass  # from a child that was forgotten meanwhile
                case Loaded(spawn_because, pid):
                    server.pid = pid
                    self._on_loaded(server, spawn_because)
                case Problem(text):
                    server.problem = text
                case _:
                    assert_never(message)

    def _on_loaded(self, server: ServerLink, spawn_because: str) -> None:
        server.loaded = True
        reloaded = server is self._next
        if reloaded:
            assert self._current is not None, "a reload starts from a working server"
            self._old.append(self._current)
            self._current, self._next = server, None
            self._close_old()
        if spawn_because and self._settings.child_start == "auto":
            log.warning(
                "app is not fork-safe; each child process imports it itself",
                extra={"because": spawn_because},
            )
        self._listener.on_loaded(spawn_because, reloaded=reloaded)

    def _close_old(self) -> None:
        in_use = {id(server) for _, server in self._links.values()}
        for server in [old for old in self._old if id(old) not in in_use]:
            self._old.remove(server)
            self._dismissed.add(server)
            server.dismiss(self._dismissed.discard)

    def _on_lost(self, server: ServerLink) -> None:
        reason = server.reason()
        if server.problem:
            reason = f"the app {self._settings.host.target!r} cannot be loaded: {server.problem}"
        if server is self._next:
            self._next = None
            self._listener.on_not_loaded(reason)
            return
        current = server is self._current
        if current:  # a server that is loading for a reload replaces it at once
            self._current, self._next = self._next, None
        elif server in self._old:
            self._old.remove(server)
        orphans = [link for link, of in self._links.values() if of is server]
        for link in orphans:
            link.orphan = True
            if link.pid:  # pid 0 would be our own process group
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(link.pid, signal.SIGKILL)
        self._listener.on_server_lost(server, reason, orphans, current=current)


# ---- children --------------------------------------------------------------------------------------

_PROBLEM_MAX_CHARS = 4000
_END_S = 2.0  # time for a child to exit after its connection has ended


def note_refused(error: OSError, *, was_refused: bool) -> str:
    """Return why the kernel creates no child process; log the first failure, but not each retry."""
    why = ran_out(error) or str(error)
    if not was_refused:
        log.error("cannot start a child process; retrying", extra={"why": why})
    return why


ChildEvent = ChildReady | Retire | ChildDied | Replace


class Children:
    """The child processes by slot: starts, signals and ends them, and reports their events to the pool."""

    def __init__(
        self, settings: PoolSettings, listener: "PreforkPool", first_server: StartedServer | None
    ) -> None:
        self.links: dict[int, ChildLink] = {}  # by slot
        self.ready: set[int] = set()  # slots with a child that can take jobs
        self._settings = settings
        self._listener = listener
        self._servers = ForkServers(settings, self, first_server)
        self._oom_kills = OomKills()
        self._keys = 0
        self._is_refused = False  # whether the last child process could not be created
        self._unstarted: list[int] = []  # slots that wait for a fork server with the app loaded

    @property
    def server_pid(self) -> int | None:
        """Return the pid of the current fork server; None before the first one."""
        return self._servers.pid

    def reload(self) -> None:
        """Start a fork server that loads the app again; it takes over when it has loaded it."""
        self._servers.reload()

    async def close(self) -> None:
        """End the fork servers and, with them, all children."""
        await self._servers.close()

    def start(self, child: int) -> None:
        """Start a child for this slot, or queue the slot until a fork server has loaded the app."""
        try:
            if not self._servers.is_loaded():
                self._unstarted.append(child)
                return
            self._keys += 1
            link = ChildLink(
                self._keys, child, on_messages=self._listener.on_messages, on_broken=self._on_broken
            )
        except OSError as error:  # no descriptors, processes or memory available now
            why = note_refused(error, was_refused=self._is_refused)
            self._is_refused = True
            self._listener.on_event(ChildDied(child, b"", f"cannot start a child process: {why}"))
            return
        self._is_refused = False
        self.links[child] = link
        self._servers.make_child(link)

    def kill(self, child: int, reason: str) -> None:
        """Kill the child of this slot, or remove the slot from those that wait for a fork server."""
        link = self.links.get(child)
        if link is None:  # it has no process yet
            self._unstarted.remove(child)
            self._listener.on_event(ChildDied(child, b"", reason))
        else:
            link.doom = reason
            self._servers.signal(link, signal.SIGKILL)

    def signal(self, link: ChildLink, signum: int) -> None:
        """Make the fork server send a signal to this child."""
        self._servers.signal(link, signum)

    def kill_broken(self, link: ChildLink, why: str) -> None:
        """Kill a child whose link is broken, unless it has been reported dead."""
        if self._servers.is_known(link):
            link.doom = link.doom or why
            self._servers.signal(link, signal.SIGKILL)

    # ---- from a child ------------------------------------------------------------------------------

    def note(self, link: ChildLink, message: AboutChild) -> None:
        """Handle a message about the child itself, not about a job."""
        match message:
            case Ready(pid):
                self._on_ready(link, pid)
            case UserEvent():
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
            return  # a child sends this once; a task wrote the second message, so its pid is not trusted
        link.pid = pid
        self.ready.add(link.child)
        self._listener.on_child("started", {"child": link.child, "pid": pid})
        self._listener.on_event(ChildReady(link.child))

    def _on_broken(self, link: ChildLink, why: str) -> None:
        if link.orphan:
            self._bury(link, Exit("killed", link.doom))
        elif why:
            self.kill_broken(link, why)
        else:  # usually it is exiting, and the fork server reports its exit status soon
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
        # Notify the machine first: a listener may submit jobs, and nothing may be sent to a dead child.
        self._listener.on_event(ChildDied(link.child, tokens, reason))
        what = "ended" if exited.kind == "asked" else "died"
        fields = {"child": link.child, "pid": link.pid, "how": exited.kind, "reason": reason}
        self._listener.on_child(what, fields)

    # ---- from the fork servers ---------------------------------------------------------------------

    def on_exited(self, link: ChildLink, status: int) -> None:
        """Find out how a reaped child ended, and report it."""
        out_of_memory = self._oom_kills.happened() if status == signal.SIGKILL and not link.doom else False
        self._bury(
            link,
            exit_of(
                link.pid, status, dismissed=link.dismissed, killed=link.doom, out_of_memory=out_of_memory
            ),
        )

    def on_not_forked(self, link: ChildLink, problem: str) -> None:
        """Treat a child that the fork server could not create like a child that exited."""
        self._bury(link, Exit("exit", problem))

    def on_loaded(self, spawn_because: str, *, reloaded: bool) -> None:
        """Start the waiting slots, and replace children after a reload, because a fork server has loaded the
        app.
        """
        if spawn_because and self._settings.child_start == "auto":
            self._listener.on_child("spawning", {"because": spawn_because})
        unstarted, self._unstarted = self._unstarted, []
        for child in unstarted:
            self.start(child)
        if reloaded:
            self._listener.on_child("reloaded", {"server": self._servers.pid})
            self._listener.on_event(Replace())

    def on_not_loaded(self, reason: str) -> None:
        """Keep the current children, because the app could not be reloaded."""
        self._listener.on_child("not-reloaded", {"reason": reason})

    def on_server_lost(
        self, server: ServerLink, reason: str, orphans: Sequence[ChildLink], *, current: bool
    ) -> None:
        """Report that a fork server died. Its children are reported dead when their sockets end."""
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
