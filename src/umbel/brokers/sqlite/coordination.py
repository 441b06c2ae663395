"""Coordination: elections, leases and marks of live nodes as rows, and the clocks that judge them.

Each operation reads one row, asks the rules of `protocol/leadership/coordination.py`, and writes the row
back, inside one transaction that began with the write lock. That makes it the atomic register of the
protocol.

Leases use a clock that never jumps; everything dated uses the cluster's time. All processes on the file share
one kernel, so they share CLOCK_BOOTTIME, which counts suspended time too. It restarts at every boot: the
store keeps the kernel's boot id with its leases, and leases of another boot have ended, as all their holders
have.
"""

import sqlite3
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from umbel import clock
from umbel.brokers.sqlite import rows
from umbel.protocol.leadership.coordination import (
    RETENTION_S,
    ElectionRecord,
    ElectionRequest,
    ElectionState,
    Instant,
    LeaseRecord,
    StoreFacts,
    is_unfinished,
)

# ---- the store's clocks ----------------------------------------------------------------------------
#
# One for leases that never jumps, the cluster's time for everything dated.
#
# All processes on the file share one kernel, so they share CLOCK_BOOTTIME, which counts suspended time too.
# It restarts at every boot; the store keeps the kernel's boot id with its leases, and leases of another
# boot have ended, as all their holders have.

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


# ---- coordination ----------------------------------------------------------------------------------
#
# Elections and leases as rows; the decisions are made in `protocol`.
#
# Each operation reads one row, asks the rules of `protocol/leadership/coordination.py`, and writes the row
# back, inside one transaction that began with the write lock. That makes it the atomic register of the
# protocol.

_COLUMNS = "key, state, request, changed_at, holder, term, attempt, started, expires_at, ttl_s, outcome"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ElectionRequest).decode


class _Election(NamedTuple):
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
        if not is_request(self.request):
            raise rows.Malformed(f"the request of election {self.key!r} cannot be read")
        return ElectionRecord(
            state=self.state,
            request=_decode(self.request),
            changed_at=self.changed_at,
            holder=self.holder,
            term=self.term,
            attempt=self.attempt,
            started=bool(self.started),
            expires_at=self.expires_at,
            ttl_s=self.ttl_s,
            outcome=self.outcome,
        )


def facts(db: sqlite3.Connection) -> StoreFacts:
    """When the store was made, and the last term it has granted."""
    return StoreFacts(rows.meta_number(db, rows.BORN), rows.meta_count(db, rows.LAST_TERM))


def note_term(db: sqlite3.Connection, term: int) -> None:
    """Store a granted term if it is the highest."""
    if term > rows.meta_count(db, rows.LAST_TERM):
        rows.put_meta(db, rows.LAST_TERM, term)


def election(db: sqlite3.Connection, key: str) -> ElectionRecord | None:
    """The record of one election, if any."""
    row = rows.read_one(db.execute(f"SELECT {_COLUMNS} FROM elections WHERE key = ?", (key,)), _Election)
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
    db.execute(
        f"INSERT OR REPLACE INTO elections ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            key,
            record.state.value,
            _encode(record.request),
            record.changed_at,
            record.holder,
            record.term,
            record.attempt,
            record.started,
            record.expires_at,
            record.ttl_s,
            record.outcome,
        ),
    )


def unfinished(db: sqlite3.Connection, limit: int, now: Instant) -> list[tuple[str, ElectionRecord]]:
    """Elections that a node should claim, those that waited longest first."""
    found = db.execute(
        f"""SELECT {_COLUMNS} FROM elections
            WHERE state IN ('open', 'held') AND (state = 'open' OR expires_at <= ?)
            ORDER BY changed_at LIMIT ?""",
        (now.boot_s, limit),
    )
    page = rows.read(found, _Election)
    return [(row.key, record) for row in page if is_unfinished(record := row.read(), now)]


def sweep_elections(db: sqlite3.Connection, now_s: float, limit: int) -> int:
    """Remove up to `limit` elections past their retention; how many."""
    return db.execute(
        "DELETE FROM elections WHERE key IN (SELECT key FROM elections WHERE changed_at <= ? LIMIT ?)",
        (now_s - RETENTION_S, limit),
    ).rowcount


def lease(db: sqlite3.Connection, name: str) -> LeaseRecord | None:
    """The record of one lease, if any."""
    found = db.execute("SELECT holder, term, expires_at, data FROM leases WHERE name = ?", (name,))
    row = rows.read_one(found, tuple[str, int, float, bytes])
    return None if row is None else LeaseRecord(*row)


def put_lease(db: sqlite3.Connection, name: str, record: LeaseRecord) -> None:
    """Store the record of a lease."""
    row = (name, record.holder, record.term, record.expires_at, record.data)
    db.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?)", row)


def clock_mark(db: sqlite3.Connection) -> int:
    """The cluster's clock mark."""
    return rows.meta_count(db, rows.CLOCK)


def raise_clock(db: sqlite3.Connection, value: int) -> int:
    """Raise the clock mark to at least this value; the mark after that."""
    mark = max(clock_mark(db), value)
    rows.put_meta(db, rows.CLOCK, mark)
    return mark


# ---- marks of live nodes ---------------------------------------------------------------------------
#
# Which run of a node lives, until the time that it announced with its mark.


def put_node_mark(db: sqlite3.Connection, node: str, incarnation: int, expires_at: float) -> None:
    """Set the mark of a node, until this time of the boot clock."""
    db.execute("INSERT OR REPLACE INTO marks VALUES (?, ?, ?)", (node, incarnation, expires_at))


def marked_incarnation(db: sqlite3.Connection, node: str, now_boot_s: float) -> int:
    """The incarnation in the mark of a node; 0: it has none."""
    found = db.execute("SELECT incarnation FROM marks WHERE node = ? AND expires_at > ?", (node, now_boot_s))
    row = rows.read_one(found, tuple[int])
    return 0 if row is None else row[0]


def sweep_node_marks(db: sqlite3.Connection, now_boot_s: float) -> None:
    """Remove expired marks."""
    db.execute("DELETE FROM marks WHERE expires_at <= ?", (now_boot_s,))
