"""Coordination: elections and leases as rows; what becomes of them is decided in `protocol`.

Each operation reads one row, asks `protocol.coordination`, and writes the row back, inside one
transaction that began with the write lock. That makes it the atomic register of the protocol.
"""

import sqlite3
from collections.abc import Sequence
from typing import Any

import msgspec

from umbel.brokers.sqlite import meta
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

_COLUMNS = "state, request, changed_at, holder, term, attempt, started, expires_at, ttl_s, outcome"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ElectionRequest).decode


def facts(db: sqlite3.Connection) -> StoreFacts:
    return StoreFacts(meta.number(db, meta.BORN), int(meta.number(db, meta.LAST_TERM)))


def note_term(db: sqlite3.Connection, term: int) -> None:
    if term > meta.number(db, meta.LAST_TERM):
        meta.put(db, meta.LAST_TERM, term)


def election(db: sqlite3.Connection, key: str) -> ElectionRecord | None:
    row = db.execute(f"SELECT {_COLUMNS} FROM elections WHERE key = ?", (key,)).fetchone()
    return None if row is None else _record(row)


def put_election(db: sqlite3.Connection, key: str, record: ElectionRecord) -> None:
    db.execute(
        f"INSERT OR REPLACE INTO elections (key, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
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
    """Elections that somebody should claim, those that waited longest first."""
    rows = db.execute(
        f"""SELECT key, {_COLUMNS} FROM elections
            WHERE state IN ('open', 'held') AND (state = 'open' OR expires_at <= ?)
            ORDER BY changed_at LIMIT ?""",
        (now.boot_s, limit),
    )
    return [(key, record) for key, *row in rows if is_unfinished(record := _record(row), now)]


def sweep(db: sqlite3.Connection, now_s: float, limit: int) -> int:
    return db.execute(
        "DELETE FROM elections WHERE key IN (SELECT key FROM elections WHERE changed_at <= ? LIMIT ?)",
        (now_s - RETENTION_S, limit),
    ).rowcount


def lease(db: sqlite3.Connection, name: str) -> LeaseRecord | None:
    row = db.execute("SELECT holder, term, expires_at, data FROM leases WHERE name = ?", (name,)).fetchone()
    return None if row is None else LeaseRecord(*row)


def put_lease(db: sqlite3.Connection, name: str, record: LeaseRecord) -> None:
    row = (name, record.holder, record.term, record.expires_at, record.data)
    db.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?)", row)


def raise_clock(db: sqlite3.Connection, value: int) -> int:
    mark = max(int(meta.number(db, meta.CLOCK)), value)
    meta.put(db, meta.CLOCK, mark)
    return mark


def _record(row: Sequence[Any]) -> ElectionRecord:
    state, request, changed_at, holder, term, attempt, started, expires_at, ttl_s, outcome = row
    return ElectionRecord(
        state=ElectionState(state),
        request=_decode(request),
        changed_at=changed_at,
        holder=holder,
        term=term,
        attempt=attempt,
        started=bool(started),
        expires_at=expires_at,
        ttl_s=ttl_s,
        outcome=outcome,
    )
