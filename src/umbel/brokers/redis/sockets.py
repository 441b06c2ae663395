"""Sockets: connections to a Redis server for synchronous callers, in any thread, across forks.

A connection serves one caller at a time and returns to the idle ones when all its replies are read; one that
failed in between is closed, never reused. A forked child notices that it is another process and does not use
its parent's connections.
"""

import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import hiredis

from umbel.brokers.redis.address import Address
from umbel.brokers.redis.replies import (
    check_greeting,
    checked,
    handshake,
    is_missing_script,
    lost,
    not_redis,
    primary_from,
    sentinel_commands,
    silent,
    unreachable,
)
from umbel.brokers.redis.scripts import Script
from umbel.chance import random
from umbel.errors import AccessRefused, BrokerSilent, BrokerUnavailable
from umbel.protocol.delivery.states import reconnect_wait_s

T = TypeVar("T")
IDLE_MAX = 16
CONNECT_MIN_S = 0.09
_READ_BYTES = 65536
_NOTHING: Any = object()
_pack = hiredis.pack_command


class SocketConnection:
    """One connection. The current operation must end before `deadline`, by the monotonic clock; without it
    each reply may take `timeout_s`.
    """

    def __init__(self, address: Address, *, timeout_s: float, deadline: float = math.inf) -> None:
        self.address = address
        # With less time than this a caller that retries would never get a connection.
        self.deadline = max(deadline, time.monotonic() + CONNECT_MIN_S)
        self._timeout_s = timeout_s
        self._is_greeted = False
        self._reader = hiredis.Reader(notEnoughData=_NOTHING)  # also for a sentinel's reply
        self.declared: set[str] = set()
        """Queues that this connection has made known to the server."""
        self.declare_again_at = 0.0
        self._waits_s = 0.0  # the time-out set on the socket; connecting may have had less
        self._connect(address)
        try:
            if address.master:
                found = primary_from(self.exchange(sentinel_commands(address)), address)
                self.close()
                self._connect(found)
            check_greeting(self.exchange(handshake(address)), self._peer)
        except BrokerUnavailable:
            self.close()
            raise
        self._is_greeted = True
        self.deadline = deadline

    def call(self, *command: Any) -> Any:
        """Send one command; returns its reply, or raises the error that the reply stands for."""
        return self.call_all([command])[0]

    def call_all(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send together and read every reply; the first error reply is raised."""
        return checked(self.exchange(commands), self.address)

    def run(self, script: Script, *args: Any) -> Any:
        """Run a script, sending its text if the server does not know it; returns its reply, or raises the
        error.
        """
        (reply,) = self.exchange([("EVALSHA", script.digest, 0, *args)])
        if is_missing_script(reply):
            return self.call("EVAL", script.text, 0, *args)
        return checked([reply], self.address)[0]

    def exchange(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send together and read every reply; error replies are returned like others."""
        self.send(commands)
        return [self.read() for _ in commands]

    def send(self, commands: Sequence[Sequence[Any]]) -> None:
        """Send without reading; the caller reads one reply for each command."""
        try:
            self._wait_at_most(self._left_s())
            self._socket.sendall(b"".join([_pack(tuple(command)) for command in commands]))
        except OSError as problem:
            raise self._failed(problem) from None

    def read(self, timeout_s: float | None = None) -> Any:
        """The next reply, or pushed message; TimeoutError only if a time-out was given."""
        try:
            reply = self._reader.gets()
            if reply is not _NOTHING:
                return reply
            self._wait_at_most(self._left_s() if timeout_s is None else max(0.001, timeout_s))
            while (reply := self._reader.gets()) is _NOTHING:
                data = self._socket.recv(_READ_BYTES)
                if not data:
                    raise ConnectionResetError("Redis closed the connection")
                self._reader.feed(data)
        except TimeoutError as problem:
            if timeout_s is not None:
                raise
            raise self._failed(problem) from None
        except OSError as problem:
            raise self._failed(problem) from None
        except hiredis.ProtocolError:
            raise not_redis(self.address) from None
        return reply

    def interrupt(self) -> None:
        """End the connection while another thread waits on it; that thread gets an error."""
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _connect(self, address: Address) -> None:
        self._peer = address  # a sentinel, then the server that it named
        try:
            self._socket, self._waits_s = self._dial(address), 0.0
        except OSError as problem:
            raise unreachable(address, problem, self._timeout_s) from None

    def _dial(self, address: Address) -> socket.socket:
        context = address.tls_context()
        if address.path:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            made = socket.create_connection((address.host, address.port), self._left_s())
        try:
            made.settimeout(self._left_s())
            if address.path:
                made.connect(address.path)
                return made
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return made if context is None else context.wrap_socket(made, server_hostname=address.host)
        except OSError:
            made.close()
            raise

    def _left_s(self) -> float:
        if self.deadline == math.inf:
            return self._timeout_s
        return max(0.001, min(self._timeout_s, self.deadline - time.monotonic()))

    def _wait_at_most(self, timeout_s: float) -> None:
        if timeout_s != self._waits_s:  # each change is a system call
            self._socket.settimeout(timeout_s)
            self._waits_s = timeout_s

    def _failed(self, problem: OSError) -> BrokerUnavailable:
        if not self._is_greeted:
            return unreachable(self._peer, problem, self._timeout_s)
        if isinstance(problem, TimeoutError):
            return silent(self.address, self._timeout_s)
        return lost(self.address)


class SocketPool:
    """Connections shared by all callers, without a lock, because a fork could copy a lock that is held."""

    def __init__(self, addresses: Sequence[Address], *, timeout_s: float) -> None:
        self._addresses = addresses
        self._timeout_s = timeout_s
        self._turn = 0
        self._idle: deque[SocketConnection] = deque(maxlen=IDLE_MAX)
        self._process = os.getpid()

    def use(
        self,
        work: Callable[[SocketConnection], T],
        *,
        patience_s: float | None = None,
        deadline: float = math.inf,
    ) -> T:
        """Do the work on a connection, and again on a new one if it fails, for a bounded time.

        Work that failed after it was sent may have been done, and is then done twice. Work that ran for long
        without a failure, such as waiting, has the whole time again when its connection breaks. A connection
        that ended while it was idle says nothing about the server, so the work is repeated at once. With a
        `deadline` a silent server is retried until then, a server that refuses only for the bounded time.
        """
        ends, failures = 0.0, 0
        patience_s = self._timeout_s if patience_s is None else patience_s
        while True:
            began = time.monotonic()
            was_idle = bool(self._idle)
            try:
                return self._once(work, deadline)
            except AccessRefused:
                raise
            except BrokerUnavailable as problem:
                now = time.monotonic()
                if now >= deadline:
                    raise
                if now - began > 2 * self._timeout_s:
                    ends, failures = now + patience_s, 0
                elif was_idle and not failures and now - began < self._timeout_s:
                    self.close()
                    continue
                elif not failures:
                    ends = began + patience_s
                failures += 1
                self._turn += 1
                self.close()  # the idle connections have most likely ended too
                wait_s = reconnect_wait_s(failures, random(), first_s=0.02, most_s=0.5)
                is_silent = isinstance(problem, BrokerSilent) and deadline < math.inf
                is_over = failures >= len(self._addresses) and now + wait_s >= ends
                if is_over and not is_silent:
                    raise
                time.sleep(min(wait_s, deadline - now))

    def run(self, script: Script, *args: Any) -> Any:
        """Run a script on a connection of the pool."""
        return self.use(lambda connection: connection.run(script, *args))

    def _once(self, work: Callable[[SocketConnection], T], deadline: float) -> T:
        """Do the work on a connection that no other caller uses, which is reused only if the work
        succeeds.
        """
        connection = self._take(deadline)
        connection.deadline = deadline
        try:
            done = work(connection)
        except BaseException:
            connection.close()
            raise
        self._give_back(connection)
        return done

    def close(self) -> None:
        """Close idle connections; those in use are closed when they are returned."""
        if self._process == os.getpid():
            while self._idle:
                self._idle.pop().close()

    def _take(self, deadline: float) -> SocketConnection:
        if self._process != os.getpid():
            parents, self._idle, self._process = self._idle, deque(maxlen=IDLE_MAX), os.getpid()
            for connection in parents:
                connection.close()  # only this process's copy of the descriptor
        try:
            return self._idle.pop()
        except IndexError:
            pass
        address = self._addresses[self._turn % len(self._addresses)]
        return SocketConnection(address, timeout_s=self._timeout_s, deadline=deadline)

    def _give_back(self, connection: SocketConnection) -> None:
        connection.deadline = math.inf
        if self._process == os.getpid() and len(self._idle) < IDLE_MAX:
            self._idle.append(connection)
        else:
            connection.close()
