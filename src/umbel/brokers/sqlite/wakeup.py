"""Wake-ups between processes: which process waits for what, and a datagram that wakes it.

A waiter registers its address for a channel and then checks again before it sleeps. A writer reads the
waiters inside the transaction that makes the change, or after it. Whichever comes first, the change or the
registration, the other side sees it, so no wake-up is lost between the two.

The sockets have names in Linux's abstract namespace, so nothing stays on the disk when a process dies, and
sending to a dead process fails at once. A wake-up only says "check again": one too many costs a check. One
that was lost (another network namespace, a full buffer) costs at most RECHECK_S, because every waiter checks
again that often. On systems without the namespace, every waiter checks again each POLL_S instead.

A wake-up names the results that have arrived, so that a waiter for very many need not check all of them. The
kernel queues only so many datagrams at a socket; a waiter that finds that many may have missed one.

Every user of the machine can see these names and send there. The kernel says which user sent a datagram, and
only wake-ups of users who may write to the database count. After STRANGERS_MAX datagrams of others a process
ignores its socket and checks again each POLL_S, so that no user can keep a process of another user busy.
"""

import logging
import os
import secrets
import select
import socket
import sqlite3
import stat
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from umbel.brokers.sqlite import rows

log = logging.getLogger("umbel.brokers.sqlite")
RECHECK_S = 1.0
POLL_S = 0.05

_SUPPORTED = sys.platform == "linux"
_DRAIN_BYTES = 65_536
_DRAINED_AT_ONCE = 64
_QUEUED_MAX = 10  # datagrams at one socket, on the kernel that allows the fewest
_NAMED_MAX = 400  # results that one datagram names
_RESULT = "result:"
STRANGERS_MAX = 1000  # datagrams of other users
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_CREDENTIALS_SPACE = socket.CMSG_SPACE(_CREDENTIALS.size) if _SUPPORTED else 0

WAITING_ON = "SELECT address FROM waiters WHERE channel = ?"

Awake = Mapping[bytes, Sequence[str]]
"""The addresses to wake, each with the results that it waits for and that have arrived."""


# ---- sockets ---------------------------------------------------------------------------------------


class Poked(NamedTuple):
    """The results that wake-ups have named. `is_all`: some may not be named, so the waiter checks all."""

    names: list[str]
    is_all: bool


class Bell:
    """A socket that receives wake-ups. Without an address it receives none, and its waits are short."""

    def __init__(self, database: Path) -> None:
        self.address: bytes | None = None
        self.recheck_s = POLL_S
        self._writers = writers_of(database)
        self._strangers = 0
        self._socket: socket.socket | None = None
        if _SUPPORTED:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self.address = f"\0umbel-{os.getpid():x}-{secrets.token_hex(8)}".encode()
            self.recheck_s = RECHECK_S
            self._socket.bind(self.address)

    @property
    def is_flooded(self) -> bool:
        """Whether another user sent so much that wake-ups are ignored."""
        return self._strangers > STRANGERS_MAX

    def wait(self, timeout_s: float) -> Poked | None:
        """Block until a wake-up or the time-out; returns the wake-ups that have come."""
        until = monotonic() + min(timeout_s, self.recheck_s)
        while (poked := self._wait(max(0.0, until - monotonic()))) is None and monotonic() < until:
            pass  # only a process of another user sent a datagram
        return poked

    def _wait(self, timeout_s: float) -> Poked | None:
        if self._socket is None or self.is_flooded:
            select.select([], [], [], min(timeout_s, POLL_S))
            return Poked([], is_all=True)
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll(timeout_s * 1000)
        return self.drain()

    def drain(self) -> Poked | None:
        """Read the wake-ups of users who may write to the database; None if there are none."""
        if self._socket is None:
            return None
        names: list[str] = []
        received, poked, is_all = 0, 0, False
        with suppress(BlockingIOError):
            for _ in range(_DRAINED_AT_ONCE):
                data, sent, _, _ = self._socket.recvmsg(_DRAIN_BYTES, _CREDENTIALS_SPACE)
                received += 1
                if self._writers is not None and _sender(sent) not in self._writers:
                    self._note_stranger(_sender(sent))
                    continue
                poked += 1
                try:
                    names += rows.strings(data)
                except rows.Malformed:  # it only says "check again", as wake-ups of version 0.3 do
                    is_all = True
        return Poked(names, is_all or received >= _QUEUED_MAX) if poked else None

    def _note_stranger(self, user: int) -> None:
        self._strangers += 1
        if self._strangers == STRANGERS_MAX + 1:
            self.recheck_s = POLL_S
            fields = {"uid": user, "recheck_s": POLL_S}
            log.warning(
                "another user floods the wake-up socket of this process; polling instead", extra=fields
            )

    def fileno(self) -> int | None:
        """The descriptor to wait on; None if there is no socket."""
        return None if self._socket is None else self._socket.fileno()

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()


def poke(awake: Awake) -> set[bytes]:
    """Wake the waiters at these addresses; returns the addresses where no process listens any more."""
    gone: set[bytes] = set()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
        for address, names in awake.items():
            try:
                sender.sendto(b"", address) if not names else None
                for first in range(0, len(names), _NAMED_MAX):
                    sender.sendto(rows.pack(names[first : first + _NAMED_MAX]).encode(), address)
            except BlockingIOError:
                continue  # its buffer is full of wake-ups: it will check again
            except OSError:
                gone.add(address)
    return gone


def writers_of(database: Path) -> frozenset[int] | None:
    """The users whose wake-ups count: this one, root, and those who may write to the file; None: all
    users.
    """
    try:
        found = database.stat()
    except OSError:
        return _writers(0, os.geteuid(), 0) | {os.getuid()}
    if found.st_mode & stat.S_IWOTH:
        return None
    return _writers(found.st_mode & stat.S_IWGRP, found.st_uid, found.st_gid) | {os.getuid(), os.geteuid()}


@lru_cache(maxsize=16)
def _writers(is_shared: int, user: int, group: int) -> frozenset[int]:
    return frozenset({0, user, *(_members(group) if is_shared else ())})


def _members(group: int) -> Iterator[int]:
    import grp  # few databases are shared, and not every system has these
    import pwd

    with suppress(KeyError):  # a group without a name
        for name in grp.getgrgid(group).gr_mem:
            with suppress(KeyError):  # a member without an account
                yield pwd.getpwnam(name).pw_uid


def _sender(sent: list[tuple[int, int, bytes]]) -> int:
    """The user who sent a datagram; -1 where the kernel does not say."""
    for level, kind, value in sent:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(value) == _CREDENTIALS.size:
            return int(_CREDENTIALS.unpack(value)[1])
    return -1


# ---- channels and waiters --------------------------------------------------------------------------


def queue(name: str) -> str:
    """The channel for new messages of a queue."""
    return f"queue:{name}"


def topic(exchange: str) -> str:
    """The channel for broadcasts of an exchange."""
    return f"topic:{exchange}"


def result(task_id: str) -> str:
    """The channel for the result of a task."""
    return f"{_RESULT}{task_id}"


def register(db: sqlite3.Connection, channels: Iterable[str], address: bytes) -> None:
    """Register an address for wake-ups of these channels."""
    new = [(channel, address) for channel in channels]
    rows.insert(db, "waiters", new, otherwise="ON CONFLICT DO NOTHING")


def is_registered(db: sqlite3.Connection, channels: Iterable[str], address: bytes) -> bool:
    """Whether the address is registered for all of these channels."""
    return all(
        db.execute("SELECT 1 FROM waiters WHERE channel = ? AND address = ?", (channel, address)).fetchone()
        for channel in channels
    )


def unregister(db: sqlite3.Connection, addresses: Iterable[bytes]) -> None:
    """Remove all registrations of these addresses."""
    db.executemany("DELETE FROM waiters WHERE address = ?", [(address,) for address in addresses])


def everybody(db: sqlite3.Connection) -> Awake:
    """All registered addresses, without results."""
    found = db.execute("SELECT DISTINCT address FROM waiters")
    return {address: () for (address,) in rows.read(found, tuple[bytes])}


def addresses(db: sqlite3.Connection, channels: Iterable[str]) -> Awake:
    """The waiters on these channels. Mostly there are none at all, which reading one row shows."""
    if db.execute("SELECT 1 FROM waiters LIMIT 1").fetchone() is None:
        return {}
    found = db.execute(
        "SELECT address, channel FROM waiters WHERE channel IN (SELECT value FROM json_each(?))",
        (rows.pack(channels),),
    )
    awake: dict[bytes, list[str]] = {}
    for address, channel in rows.read(found, tuple[bytes, str]):
        names = awake.setdefault(address, [])
        if channel.startswith(_RESULT):
            names.append(channel.removeprefix(_RESULT))
    return awake
