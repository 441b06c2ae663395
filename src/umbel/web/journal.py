"""Journal: the dashboard's own file: the audit, the last hour, saved views, and tokens; bounded.

An action is in the audit, on disk, before it is sent. What was heard in the last hour is kept as it came: a
restart joins it with what is heard then and shows the same; charts and changes of membership are kept as
they were drawn. Limits: an hour and HEARD_BYTES_MAX of events (beyond that the oldest go), an hour of steps,
AUDIT_MAX entries of the audit. What was refused has a table and a limit of its own, REFUSED_MAX, so that who
may do nothing cannot push out what was done. Saved views have their limits in `saved_views`.
"""

import sqlite3
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from umbel.errors import ConfigurationError
from umbel.monitor.rates import Step
from umbel.monitor.shapes import Happening, Mark
from umbel.web.actions import AuditEntry
from umbel.web.saved_views import VIEWS_MAX, SavedView
from umbel.web.tokens import Token

HOUR_S = 3600.0
HEARD_BYTES_MAX = 256 * 1024 * 1024
HEARD_AT_ONCE = 200  # messages in a row
AUDIT_MAX = 100_000
REFUSED_MAX = 1000
TOKENS_MAX = 1000
BUSY_MS = 5000
SCHEMA = """
CREATE TABLE IF NOT EXISTS audit (
    id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS refused (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS steps (at INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS happened (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS heard (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, size INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS tokens (name TEXT PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS views (name TEXT PRIMARY KEY, body BLOB NOT NULL);
"""
DROP_OLDEST_AUDIT = """
DELETE FROM audit WHERE id <= (SELECT id FROM audit ORDER BY id DESC LIMIT 1 OFFSET ?)"""
DROP_OLDEST_REFUSED = """
DELETE FROM refused WHERE id <= (SELECT id FROM refused ORDER BY id DESC LIMIT 1 OFFSET ?)"""


class Journal:
    """Used from several threads; one at a time is in the file."""

    def __init__(self, path: Path) -> None:
        self._one_at_a_time = threading.Lock()
        try:
            _make_private(path)
            self._file = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._file.execute(f"PRAGMA busy_timeout={BUSY_MS}")
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("PRAGMA synchronous=FULL")  # the audit outlives a power cut
            self._file.executescript(SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(
                f"the dashboard cannot use its file {path}: {error}; name another with --state"
            ) from None

    def close(self) -> None:
        with self._one_at_a_time:
            self._file.close()

    # -- audit -----------------------------------------------------------------------------------

    def begin(self, entry: AuditEntry) -> int:
        """Write the entry of an action that is about to be sent; its number."""
        with self._one_at_a_time, self._file:
            self._file.execute("BEGIN")
            number = self._insert(entry)
            self._file.execute(DROP_OLDEST_AUDIT, (AUDIT_MAX,))
        return number

    def refuse(self, entry: AuditEntry) -> int:
        """Write the entry of an action that is not done; numbered like the others, kept beside them."""
        with self._one_at_a_time, self._file:
            self._file.execute("BEGIN")
            number = self._insert(entry)
            self._file.execute("DELETE FROM audit WHERE id = ?", (number,))  # the number is not given again
            self._file.execute("INSERT INTO refused (id, body) VALUES (?, ?)", (number, _packed(entry)))
            self._file.execute(DROP_OLDEST_REFUSED, (REFUSED_MAX,))
        return number

    def _insert(self, entry: AuditEntry) -> int:
        row = self._file.execute("INSERT INTO audit (at, body) VALUES (?, ?)", (entry.at, _packed(entry)))
        return int(row.lastrowid or 0)

    def finish(self, entry: AuditEntry) -> None:
        with self._one_at_a_time, self._file:
            self._file.execute("UPDATE audit SET body = ? WHERE id = ?", (_packed(entry), entry.id))

    def audit(self, *, limit: int, before: int = 0) -> list[AuditEntry]:
        below = before or 2**62
        rows = self._rows(
            "SELECT id, body FROM audit WHERE id < ? UNION ALL SELECT id, body FROM refused WHERE id < ?"
            " ORDER BY id DESC LIMIT ?",
            (below, below, limit),
        )
        return [msgspec.structs.replace(_read(body, AuditEntry), id=number) for number, body in rows]

    # -- the last hour ---------------------------------------------------------------------------

    def write_hour(
        self,
        heard: Sequence[tuple[float, bytes]],
        steps: Sequence[Step],
        happened: Sequence[Happening | Mark],
        now: float,
    ) -> None:
        """What came since the last time; and drop what is too old, or too much."""
        parts = [_part(heard[start : start + HEARD_AT_ONCE]) for start in range(0, len(heard), HEARD_AT_ONCE)]
        with self._one_at_a_time, self._file:
            self._file.execute("BEGIN")
            self._file.executemany("INSERT INTO heard (at, size, body) VALUES (?, ?, ?)", parts)
            self._file.executemany(
                "INSERT OR REPLACE INTO steps (at, body) VALUES (?, ?)",
                [(step.at, _packed(step)) for step in steps],
            )
            self._file.executemany(
                "INSERT INTO happened (at, kind, body) VALUES (?, ?, ?)",
                [(one.at, type(one).__name__, _packed(one)) for one in happened],
            )
            self._file.execute("DELETE FROM steps WHERE at < ?", (now - HOUR_S,))
            self._file.execute("DELETE FROM happened WHERE at < ?", (now - HOUR_S,))
            self._file.execute("DELETE FROM heard WHERE at < ?", (now - HOUR_S,))
            self._drop_beyond_limit()

    def _drop_beyond_limit(self) -> None:
        (size,) = self._file.execute("SELECT COALESCE(SUM(size), 0) FROM heard").fetchone()
        while size > HEARD_BYTES_MAX:
            number, dropped = self._file.execute("SELECT id, size FROM heard ORDER BY id LIMIT 1").fetchone()
            self._file.execute("DELETE FROM heard WHERE id = ?", (number,))
            size -= dropped

    def steps(self, since: float) -> list[Step]:
        rows = self._rows("SELECT at, body FROM steps WHERE at >= ? ORDER BY at", (since,))
        return [step for _, body in rows if (step := _readable(body, Step)) is not None]

    def happened(self, since: float) -> list[Happening | Mark]:
        rows = self._rows("SELECT kind, body FROM happened WHERE at >= ? ORDER BY id", (since,))
        found = [_readable(body, Mark if kind == "Mark" else Happening) for kind, body in rows]
        return [one for one in found if one is not None]

    def heard(self, since: float) -> Iterator[tuple[float, list[bytes]]]:
        """Newest first, a part at a time."""
        last = 2**62
        while True:
            rows = self._rows(
                "SELECT id, at, body FROM heard WHERE at >= ? AND id < ? ORDER BY id DESC LIMIT 1",
                (since, last),
            )
            if not rows:
                return
            ((last, at, body),) = rows
            try:
                yield at, msgspec.msgpack.decode(zlib.decompress(body), type=list[bytes])
            except (zlib.error, msgspec.MsgspecError):
                continue  # written by another version, or damaged

    # -- saved views -----------------------------------------------------------------------------

    def save_view(self, view: SavedView) -> bool:
        """In place of one that has its name; False where there are too many to add one."""
        with self._one_at_a_time, self._file:
            self._file.execute("BEGIN IMMEDIATE")
            counted = self._file.execute("SELECT COUNT(*) FROM views WHERE name <> ?", (view.name,))
            (others,) = counted.fetchone()
            if others < VIEWS_MAX:
                self._file.execute("INSERT OR REPLACE INTO views VALUES (?, ?)", (view.name, _packed(view)))
        return bool(others < VIEWS_MAX)

    def delete_view(self, name: str) -> bool:
        with self._one_at_a_time, self._file:
            return self._file.execute("DELETE FROM views WHERE name = ?", (name,)).rowcount > 0

    def views(self) -> list[SavedView]:
        found = [_readable(body, SavedView) for (body,) in self._rows("SELECT body FROM views", ())]
        return sorted((one for one in found if one is not None), key=lambda one: one.name.casefold())

    # -- tokens ----------------------------------------------------------------------------------

    def add_token(self, token: Token) -> None:
        if len(self.tokens()) >= TOKENS_MAX:
            raise ConfigurationError(f"there are {TOKENS_MAX} tokens already; remove some first")
        try:
            with self._one_at_a_time, self._file:
                self._file.execute("INSERT INTO tokens VALUES (?, ?)", (token.name, _packed(token)))
        except sqlite3.IntegrityError:
            raise ConfigurationError(
                f"there is a token {token.name!r} already; remove it first, or choose another name"
            ) from None

    def remove_token(self, name: str) -> bool:
        with self._one_at_a_time, self._file:
            return self._file.execute("DELETE FROM tokens WHERE name = ?", (name,)).rowcount > 0

    def tokens(self) -> list[Token]:
        return [_read(body, Token) for (body,) in self._rows("SELECT body FROM tokens ORDER BY name", ())]

    def _rows(self, query: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with self._one_at_a_time:
            return self._file.execute(query, values).fetchall()


def _make_private(path: Path) -> None:
    """It has the audit, and hashes of tokens. SQLite makes the files beside it with the mode of this one."""
    path.touch(mode=0o600)
    for one in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        if one.exists():
            one.chmod(0o600)


def _part(heard: Sequence[tuple[float, bytes]]) -> tuple[float, int, bytes]:
    """A row: when the last of them was heard, the size, and the messages, compressed."""
    body = zlib.compress(msgspec.msgpack.encode([one for _, one in heard]), 1)
    return heard[-1][0], len(body), body


def _packed(value: object) -> bytes:
    return msgspec.json.encode(value, enc_hook=str)


def _read(body: bytes, kind: Any) -> Any:
    return msgspec.json.decode(body, type=kind)


def _readable(body: bytes, kind: Any) -> Any:
    """None for what another version wrote, or what is damaged: the last hour goes on without it."""
    try:
        return _read(body, kind)
    except msgspec.MsgspecError:
        return None
