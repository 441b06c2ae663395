"""Pauses: which queues are not claimed from; moving what waits in one. In a transaction of the caller."""

import sqlite3
from collections.abc import Iterable, Sequence
from itertools import takewhile

import msgspec

from umbel.brokers.interface import Pause
from umbel.brokers.sqlite import messages, rows
from umbel.brokers.sqlite.publishing import file
from umbel.wire.signing import HEADER

Row = tuple[float, int, bytes]
"""The priority of a message, or when it is due; its number; the message."""

_told = msgspec.json.Decoder(tuple[str, ...]).decode


def pause(db: sqlite3.Connection, queue: str, mark: Pause) -> None:
    db.execute("INSERT OR REPLACE INTO pauses VALUES (?, ?, ?)", (queue, mark.since, rows.pack(mark.told)))


def resume(db: sqlite3.Connection, queue: str) -> bool:
    return bool(db.execute("DELETE FROM pauses WHERE queue = ?", (queue,)).rowcount)


def read(db: sqlite3.Connection) -> dict[str, Pause]:
    found = db.execute("SELECT queue, since, told FROM pauses ORDER BY queue")
    return {queue: Pause(since, _told(told)) for queue, since, told in found}


def not_paused(db: sqlite3.Connection, queues: Iterable[str]) -> list[str]:
    """Those that may be claimed from, in their order. Mostly none is paused, and that is quickly seen."""
    paused = {queue for (queue,) in db.execute("SELECT queue FROM pauses")}
    return [queue for queue in queues if queue not in paused]


def move(db: sqlite3.Connection, source: str, target: str, limit: int) -> tuple[int, bool]:
    """How many were moved, first in line first, then those not due; whether a signed one comes next.

    A message keeps its number, and so its place by age.
    """
    file(db)
    for table, first in (("ready", "priority"), ("delayed", "not_before")):
        found = db.execute(
            f"""SELECT first, id, message FROM messages JOIN (
                  SELECT id AS number, {first} AS first FROM {table}
                  WHERE queue = ? ORDER BY {first}, id LIMIT ?) ON id = number ORDER BY first, id""",
            (source, limit),
        ).fetchall()
        if found:
            chosen = list(takewhile(_is_unsigned, found))
            if chosen:
                _rename(db, table, chosen, source, target)
            return len(chosen), len(chosen) < len(found)
    return 0, False


def _is_unsigned(row: Row) -> bool:
    return HEADER.encode() not in messages.decode(row[2]).headers


def _rename(db: sqlite3.Connection, table: str, chosen: Sequence[Row], source: str, target: str) -> None:
    packed, (first, number, _) = rows.pack(row[1] for row in chosen), chosen[-1]
    db.execute("UPDATE messages SET queue = ? WHERE id IN (SELECT value FROM json_each(?))", (target, packed))
    if table == "delayed":
        db.execute(
            "UPDATE delayed SET queue = ? WHERE queue = ? AND (not_before, id) <= (?, ?)",
            (target, source, first, number),
        )
        return
    db.execute("DELETE FROM ready WHERE queue = ? AND (priority, id) <= (?, ?)", (source, first, number))
    db.execute(
        """INSERT INTO ready SELECT queue, priority, id FROM messages
           WHERE id IN (SELECT value FROM json_each(?))""",
        (packed,),
    )
