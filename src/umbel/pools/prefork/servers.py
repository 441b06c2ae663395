"""ForkServers: where children come from. Usually one server, two while the app is reloaded.

Children belong to the server that made them: it alone can signal them and learns how they ended. A
server that was followed by another stays until its last child is gone. One that could not load the
app is forgotten, if there is another that could.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Sequence
from typing import Protocol, assert_never

from umbel.pools.interface import PoolSettings
from umbel.pools.prefork.child_link import ChildLink
from umbel.pools.prefork.messages import (
    Exited,
    Fork,
    Forked,
    FromServer,
    Loaded,
    NotForked,
    Signal,
    setup_of,
)
from umbel.pools.prefork.server_link import ServerLink
from umbel.pools.prefork.server_process import StartedServer, spawn_server
from umbel.wire.frames import Problem

log = logging.getLogger(__name__)


class ServersListener(Protocol):
    def on_loaded(self, spawn_because: str, *, reloaded: bool) -> None:
        """Children can be made now; `reloaded`: by a server that replaces another."""
        ...

    def on_not_loaded(self, reason: str) -> None:
        """The app could not be reloaded; the current server stays."""
        ...

    def on_exited(self, link: ChildLink, status: int) -> None: ...
    def on_not_forked(self, link: ChildLink, problem: str) -> None: ...
    def on_server_lost(
        self, server: ServerLink, reason: str, orphans: Sequence[ChildLink], *, current: bool
    ) -> None:
        """It is gone, and its children die with it."""
        ...


class ForkServers:
    def __init__(
        self, settings: PoolSettings, listener: ServersListener, first: StartedServer | None = None
    ) -> None:
        """`first`: a server that was started before there was a pool."""
        self._settings = settings
        self._first = first
        self._listener = listener
        self._current: ServerLink | None = None
        self._next: ServerLink | None = None  # it loads the app, and then takes over
        self._old: list[ServerLink] = []  # as many as there were reloads while old children work
        self._dismissed: set[ServerLink] = set()  # they are about to end
        self._links: dict[int, tuple[ChildLink, ServerLink]] = {}  # by the child's key

    @property
    def pid(self) -> int | None:
        return self._current.pid if self._current else None

    def is_loaded(self) -> bool:
        """Whether a child can be made now; starts a server when there is none."""
        if self._current is None:
            self._current = self._open()
        return self._current.loaded

    def reload(self) -> None:
        """Start a server that loads the app again."""
        if self._next is None and self._current is not None:
            self._next = self._open()

    def make_child(self, link: ChildLink) -> None:
        assert self._current is not None, "asked before by is_loaded()"
        self._links[link.key] = (link, self._current)
        self._current.send(Fork(link.key, link.child), link.child_fds(), link.handed_over)

    def is_known(self, link: ChildLink) -> bool:
        return link.key in self._links

    def signal(self, link: ChildLink, signum: int) -> None:
        if link.key in self._links:
            self._links[link.key][1].send(Signal(link.key, signum))

    def forget(self, link: ChildLink) -> None:
        """The child is gone; so is a server of which it was the last and that has a successor."""
        del self._links[link.key]
        self._close_old()

    async def close(self) -> None:
        """End them all, and every descendant with them."""
        servers = (self._current, self._next, *self._old, *self._dismissed)
        everyone = [server for server in servers if server is not None]
        self._current = self._next = None
        self._old.clear()
        for server in everyone:
            server.close()
        if self._first is not None:  # it was never asked for a child
            self._first.discard()
        await asyncio.gather(*(server.ended() for server in everyone))

    # ---- from the servers --------------------------------------------------------------------------

    def _open(self) -> ServerLink:
        first, self._first = self._first, None
        setup = setup_of(self._settings)
        if first is not None and first.setup != setup:  # the settings have changed since it was started
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
                    pass  # of a child that was given up meanwhile
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
            assert self._current is not None, "only a server that works is followed"
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
        for server in [one for one in self._old if id(one) not in in_use]:
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
        if current:  # one that was about to follow takes its place at once
            self._current, self._next = self._next, None
        elif server in self._old:
            self._old.remove(server)
        orphans = [link for link, of in self._links.values() if of is server]
        for link in orphans:
            link.orphan = True
            if link.pid:  # 0 would be our own group
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(link.pid, signal.SIGKILL)
        self._listener.on_server_lost(server, reason, orphans, current=current)
