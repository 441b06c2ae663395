"""Marks: which run of a node lives, for as long as it said when it last renewed its mark."""

import sqlite3


def put(db: sqlite3.Connection, node: str, incarnation: int, expires_at: float) -> None:
    db.execute("INSERT OR REPLACE INTO marks VALUES (?, ?, ?)", (node, incarnation, expires_at))


def read(db: sqlite3.Connection, node: str, now_boot_s: float) -> int:
    """The incarnation that is marked; 0: none."""
    row = db.execute(
        "SELECT incarnation FROM marks WHERE node = ? AND expires_at > ?", (node, now_boot_s)
    ).fetchone()
    return 0 if row is None else int(row[0])


def sweep(db: sqlite3.Connection, now_boot_s: float) -> None:
    db.execute("DELETE FROM marks WHERE expires_at <= ?", (now_boot_s,))
