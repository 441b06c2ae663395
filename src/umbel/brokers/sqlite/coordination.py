"""Coordination: elections, leases and liveness marks of nodes as rows, and the clocks that judge them.

Each operation reads one row, asks the rules of `protocol/leadership/coordination.py`, and writes the row
back, inside one transaction that began with the write lock. That makes it the atomic register of the
protocol.

Leases use a clock that never jumps; everything with a date uses the cluster's time. All processes on the file
share one kernel, so they share CLOCK_BOOTTIME, which counts suspended time, too. It restarts at every boot.
So the store keeps the kernel's boot id with its leases: leases of another boot have ended, as have all their
holders.
"""

import sqlite3
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from umbel import clock
from umbel.brokers.sqlite import rows
from umbel.protocol.leadership.coordination import (
    ElectionRecord,
    ElectionRequest,
    ElectionState,
    Instant,
    LeaseRecord,
    StoreFacts,
    is_unfinished,
)

# ---- clocks ----------------------------------------------------------------------------------------

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_WALL = "wall clock"


class Clock:
    """The clocks of one store. Where the kernel has no boot id, leases run on the wall clock."""

    def __init__(self) -> None:
        self.boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else _WALL

    def wall_s(self) -> float:
        """The cluster's time, in Unix seconds."""
        return clock.cluster_now()

    def now(self) -> Instant:
        """Both clocks at once, for the rules of leases and elections."""
        wall_s = self.wall_s()
        return Instant(wall_s if self.boot_id == _WALL else time.clock_gettime(time.CLOCK_BOOTTIME), wall_s)

    def ticket(self) -> int:
        """A number that no later call gives again, to name a claim.

        Claims are made one at a time under the database's write lock, and each takes longer than the clock's
        nanosecond.
        """
        return time.time_ns() if self.boot_id == _WALL else time.clock_gettime_ns(time.CLOCK_BOOTTIME)


# ---- elections and leases --------------------------------------------------------------------------

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ElectionRequest).decode


class ElectionRow(NamedTuple):
    """A row of `elections`: the key, and the fields of an `ElectionRecord` in their order."""

    key: str
    state: ElectionState
    request: bytes
    changed_at: float
    holder: str
    term: int
    attempt: int
    started: int
    expires_at: float
    ttl_s: float
    outcome: str

    def read(self) -> ElectionRecord:
        """The record; Malformed if its request cannot be decoded."""
        if not is_request(self.request):
            raise rows.Malformed(f"the request of election {self.key!r} cannot be read")
        fields: tuple[Any, ...] = self._replace(started=bool(self.started))[3:]
        return ElectionRecord(self.state, _decode(self.request), *fields)


_COLUMNS = ", ".join(ElectionRow._fields)
_PLACES = ", ".join("?" * len(ElectionRow._fields))


def facts(db: sqlite3.Connection) -> StoreFacts:
    """When the store was made, and the last term it has granted."""
    return StoreFacts(rows.meta_number(db, rows.BORN), rows.meta_count(db, rows.LAST_TERM))


def note_term(db: sqlite3.Connection, term: int) -> None:
    """Store a granted term if it is the highest."""
    if term > rows.meta_count(db, rows.LAST_TERM):
        rows.put_meta(db, rows.LAST_TERM, term)


def election(db: sqlite3.Connection, key: str) -> ElectionRecord | None:
    """The record of one election, if any."""
    found = db.execute(f"SELECT {_COLUMNS} FROM elections WHERE key = ?", (key,))
    row = rows.read_one(found, ElectionRow)
    return None if row is None else row.read()


def is_request(data: object) -> bool:
    """Whether the stored request of an election can be decoded."""
    try:
        _decode(data)  # type: ignore[arg-type]
    except (msgspec.MsgspecError, TypeError, ValueError):
        return False
    return True


def put_election(db: sqlite3.Connection, key: str, record: ElectionRecord) -> None:
    """Store the record of an election."""
    fields = (getattr(record, name) for name in ElectionRow._fields[3:])
    row = (key, record.state.value, _encode(record.request), *fields)
    db.execute(f"INSERT OR REPLACE INTO elections ({_COLUMNS}) VALUES ({_PLACES})", row)


def unfinished(db: sqlite3.Connection, limit: int, now: Instant) -> list[tuple[str, ElectionRecord]]:
    """Elections that a node should claim, the longest waiting first."""
    found = db.execute(
        f"""SELECT {_COLUMNS} FROM elections
            WHERE state IN ('open', 'held') AND (state = 'open' OR expires_at <= ?)
            ORDER BY changed_at LIMIT ?""",
        (now.boot_s, limit),
    )
    page = rows.read(found, ElectionRow)
    return [(row.key, record) for row in page if is_unfinished(record := row.read(), now)]


def lease(db: sqlite3.Connection, name: str) -> LeaseRecord | None:
    """The record of one lease, if any."""
    found = db.execute("SELECT holder, term, expires_at, data FROM leases WHERE name = ?", (name,))
    row = rows.read_one(found, tuple[str, int, float, bytes])
    return None if row is None else LeaseRecord(*row)


def put_lease(db: sqlite3.Connection, name: str, record: LeaseRecord) -> None:
    """Store the record of a lease."""
    row = (name, record.holder, record.term, record.expires_at, record.data)
    db.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?)", row)
