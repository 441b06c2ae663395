"""Wake-ups between processes: who waits for what, and a datagram without content that wakes them.

A waiter registers its address for a channel and then looks again before it sleeps; a writer looks for
waiters inside the transaction that makes the change, or after it. Whichever comes first, the change or the
registering, the other one sees it, so no wake-up is lost between the two.

The sockets have names in Linux's abstract namespace, so nothing is left on the disk when a
process dies, and poking a dead one fails at once. A poke says only "look again": one too many
costs a look, and one that was lost (another network namespace, a full buffer) costs at most
RECHECK_S, because every wait looks again that often. Where the namespace does not exist, every
wait looks again each POLL_S instead.
"""

import asyncio
import os
import secrets
import select
import socket
import sqlite3
import sys
from collections.abc import Iterable

from umbel.brokers.sqlite import rows

RECHECK_S = 1.0
POLL_S = 0.05

_SUPPORTED = sys.platform == "linux"
_DRAIN_BYTES = 64

WAITING_ON = "SELECT address FROM waiters WHERE channel = ?"
_ANYBODY = "SELECT 1 FROM waiters LIMIT 1"


class Bell:
    """What can be poked. Without an address it cannot, and its waits are short."""

    def __init__(self) -> None:
        self.address: bytes | None = None
        self.recheck_s = POLL_S
        self._socket: socket.socket | None = None
        if _SUPPORTED:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            self.address = f"\0umbel-{os.getpid():x}-{secrets.token_hex(8)}".encode()
            self.recheck_s = RECHECK_S
            self._socket.bind(self.address)

    def wait(self, timeout_s: float) -> None:
        """Block until a poke, or the time-out. Takes the pokes that have come."""
        timeout_s = min(timeout_s, self.recheck_s)
        if self._socket is None:
            select.select([], [], [], timeout_s)
            return
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll(max(0.0, timeout_s) * 1000)
        self.drain()

    def drain(self) -> None:
        if self._socket is None:
            return
        try:
            while True:
                self._socket.recv(_DRAIN_BYTES)
        except BlockingIOError:
            return

    def fileno(self) -> int | None:
        return None if self._socket is None else self._socket.fileno()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


class AsyncBell:
    """A bell on the running event loop. Any number of tasks may wait for it."""

    def __init__(self) -> None:
        self._bell = Bell()
        self.address = self._bell.address
        self.rings = 0
        self._waiting: set[asyncio.Future[None]] = set()
        self._loop = asyncio.get_running_loop()
        descriptor = self._bell.fileno()
        if descriptor is not None:
            self._loop.add_reader(descriptor, self._rung)

    async def wait(self, seen: int, timeout_s: float) -> None:
        """Return at the first ring after `seen`, or at the time-out.

        Read `rings` before you look whether there is something to wait for.
        """
        if self.rings != seen or timeout_s <= 0:
            return
        ring = self._loop.create_future()
        self._waiting.add(ring)
        try:
            await asyncio.wait([ring], timeout=min(timeout_s, self._bell.recheck_s))
        finally:
            self._waiting.discard(ring)

    def close(self) -> None:
        descriptor = self._bell.fileno()
        if descriptor is not None:
            self._loop.remove_reader(descriptor)
        self._rung()
        self._bell.close()

    def _rung(self) -> None:
        self._bell.drain()
        self.ring()

    def ring(self) -> None:
        """Wake those who wait; on the loop."""
        self.rings += 1
        for ring in self._waiting:
            if not ring.done():
                ring.set_result(None)


def poke(addresses: Iterable[bytes]) -> set[bytes]:
    """Wake those who wait there; the addresses behind which nobody is any more."""
    gone: set[bytes] = set()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
        for address in addresses:
            try:
                sender.sendto(b"", address)
            except BlockingIOError:
                continue  # its buffer is full of pokes: it will look
            except OSError:
                gone.add(address)
    return gone


def queue(name: str) -> str:
    return f"queue:{name}"


def topic(exchange: str) -> str:
    return f"topic:{exchange}"


def result(task_id: str) -> str:
    return f"result:{task_id}"


def register(db: sqlite3.Connection, channels: Iterable[str], address: bytes) -> None:
    new = [(channel, address) for channel in channels]
    rows.insert(db, "waiters", new, otherwise="ON CONFLICT DO NOTHING")


def is_registered(db: sqlite3.Connection, channels: Iterable[str], address: bytes) -> bool:
    return all(
        db.execute("SELECT 1 FROM waiters WHERE channel = ? AND address = ?", (channel, address)).fetchone()
        for channel in channels
    )


def unregister(db: sqlite3.Connection, addresses: Iterable[bytes]) -> None:
    db.executemany("DELETE FROM waiters WHERE address = ?", [(address,) for address in addresses])


def addresses(db: sqlite3.Connection, channels: Iterable[str] | None = None) -> set[bytes]:
    """Who waits on one of the channels, or on any. Mostly nobody does, and that is quickly seen."""
    if channels is None:
        return {address for (address,) in db.execute("SELECT DISTINCT address FROM waiters")}
    if db.execute(_ANYBODY).fetchone() is None:
        return set()
    found = db.execute(
        "SELECT DISTINCT address FROM waiters WHERE channel IN (SELECT value FROM json_each(?))",
        (rows.pack(channels),),
    )
    return {address for (address,) in found}
