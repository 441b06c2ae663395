"""Meta: what the store knows about itself, one named value a row."""

import sqlite3

BOOT_ID = "boot_id"
BORN = "born"
LAST_TERM = "last_term"
CLOCK = "clock"
FILED = "filed"


def text(db: sqlite3.Connection, name: str) -> str:
    row = db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return "" if row is None else str(row[0])


def number(db: sqlite3.Connection, name: str) -> float:
    row = db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return 0 if row is None else row[0]


def put(db: sqlite3.Connection, name: str, value: str | float) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))


def add(db: sqlite3.Connection, name: str, count: int) -> None:
    put(db, name, number(db, name) + count)
