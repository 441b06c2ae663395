"""Journal: the dashboard's SQLite file: the audit, the last hour, saved views and tokens; bounded.

The events of the last hour are stored as they arrive, and after a restart they are merged with new ones.
Charts and changes of membership are stored as they were computed. While the disk is slow or full, events wait
in memory, and at the limit the oldest are dropped.

Limits: an hour and EVENTS_BYTES_MAX of events, an hour of steps, the rooms of the audit (`audit.room_of`),
VIEWS_MAX saved views, TOKENS_MAX tokens.
"""

import sqlite3
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from umbel.errors import ConfigurationError
from umbel.files import PRIVATE_FILE, make_own, refuse_planted_beside
from umbel.monitor.rates import Step
from umbel.monitor.records import Happening, Mark
from umbel.web.actions import VIEWS_MAX, AuditEntry, SavedView
from umbel.web.audit import room_of
from umbel.web.credentials import Token

HOUR_S = 3600.0
EVENTS_BYTES_MAX = 256 * 1024 * 1024
EVENTS_AT_ONCE = 200  # messages in one row
TOKENS_MAX = 1000
BUSY_S = 5.0
Received = tuple[float, bytes]  # when a message of events was received, and its body
SCHEMA = """
CREATE TABLE IF NOT EXISTS audit (
    id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, body BLOB NOT NULL,
    room TEXT NOT NULL DEFAULT 'action');
CREATE TABLE IF NOT EXISTS steps (at INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS happened (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS heard (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, size INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS tokens (name TEXT PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS views (name TEXT PRIMARY KEY, body BLOB NOT NULL);
"""
# Files of version 0.3 and before have refused actions in a separate table.
ROOMS_ADDED = """
ALTER TABLE audit ADD COLUMN room TEXT NOT NULL DEFAULT 'action';
CREATE TABLE IF NOT EXISTS refused (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
INSERT OR IGNORE INTO audit (id, at, body, room) SELECT id, 0, body, 'refused' FROM refused;
DROP TABLE refused;
"""
ROOMS_INDEXED = "CREATE INDEX IF NOT EXISTS audit_rooms ON audit (room, id)"
DELETE_OLD = (
    "DELETE FROM steps WHERE at < ?",
    "DELETE FROM happened WHERE at < ?",
    "DELETE FROM heard WHERE at < ?",
)
DROP_OLDEST_AUDIT = """
DELETE FROM audit WHERE room = ?1 AND id <= (
    SELECT id FROM audit WHERE room = ?1 ORDER BY id DESC LIMIT 1 OFFSET ?2)"""


class Journal:
    """The dashboard's SQLite file. Of several threads one at a time writes, and one at a time reads.

    Reads have a separate connection, so they do not wait for a write: the tokens are read for each
    request, and a write takes as long as the disk takes to store it.
    """

    def __init__(self, path: Path) -> None:
        self._lock, self._reading = threading.Lock(), threading.Lock()
        try:
            make_own(path)
            refuse_planted_beside(path)
            _make_private(path)
            self._file, self._reader = _connect(path), _connect(path)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("PRAGMA synchronous=FULL")  # the audit survives a power failure
            self._make_tables()
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(
                f"the dashboard cannot use its file {path}: {error}; name another with --state"
            ) from None

    def _make_tables(self) -> None:
        self._file.executescript(SCHEMA)
        with self._transaction() as run:
            columns = run("PRAGMA table_info(audit)").fetchall()
            if "room" not in {column[1] for column in columns}:
                for statement in filter(str.strip, ROOMS_ADDED.split(";")):
                    run(statement)
            run(ROOMS_INDEXED)

    def close(self) -> None:
        """Close the file."""
        with self._lock, self._reading:
            self._reader.close()
            self._file.close()

    # -- audit -----------------------------------------------------------------------------------

    def note(self, entry: AuditEntry) -> int:
        """Write an entry, return its number, and delete the oldest entries of its room beyond the limit."""
        room, most = room_of(entry)
        with self._transaction() as run:
            added = run(
                "INSERT INTO audit (at, body, room) VALUES (?, ?, ?)", (entry.at, _packed(entry), room)
            )
            run(DROP_OLDEST_AUDIT, (room, most))
        return int(added.lastrowid or 0)

    def finish(self, entry: AuditEntry) -> None:
        """Replace an entry by the same entry with its result."""
        with self._transaction() as run:
            run("UPDATE audit SET body = ? WHERE id = ?", (_packed(entry), entry.id))

    def audit(self, *, limit: int, before: int = 0) -> list[AuditEntry]:
        """Return entries of the audit, the newest first, older than `before`."""
        below = before or 2**62
        rows = self._rows("SELECT id, body FROM audit WHERE id < ? ORDER BY id DESC LIMIT ?", (below, limit))
        return [msgspec.structs.replace(_read(body, AuditEntry), id=number) for number, body in rows]

    # -- the last hour ---------------------------------------------------------------------------

    def write_hour(
        self,
        events: Sequence[Received],
        steps: Sequence[Step],
        happened: Sequence[Happening | Mark],
        now: float,
    ) -> None:
        """Store new messages of events, steps and changes; delete those that are too old or beyond the
        limit.
        """
        parts = [
            _part(events[start : start + EVENTS_AT_ONCE]) for start in range(0, len(events), EVENTS_AT_ONCE)
        ]
        with self._transaction() as run:
            for part in parts:
                run("INSERT INTO heard (at, size, body) VALUES (?, ?, ?)", part)
            for step in steps:
                run("INSERT OR REPLACE INTO steps (at, body) VALUES (?, ?)", (step.at, _packed(step)))
            for item in happened:
                row = (item.at, type(item).__name__, _packed(item))
                run("INSERT INTO happened (at, kind, body) VALUES (?, ?, ?)", row)
            for statement in DELETE_OLD:
                run(statement, (now - HOUR_S,))
            (size,) = run("SELECT COALESCE(SUM(size), 0) FROM heard").fetchone()
            while size > EVENTS_BYTES_MAX:
                number, dropped = run("SELECT id, size FROM heard ORDER BY id LIMIT 1").fetchone()
                run("DELETE FROM heard WHERE id = ?", (number,))
                size -= dropped

    def steps(self, since: float) -> list[Step]:
        """Return the steps of the charts since a time, oldest first."""
        rows = self._rows("SELECT at, body FROM steps WHERE at >= ? ORDER BY at", (since,))
        return [step for _, body in rows if (step := _readable(body, Step)) is not None]

    def happened(self, since: float) -> list[Happening | Mark]:
        """Return the changes and marks since a time, oldest first."""
        rows = self._rows("SELECT kind, body FROM happened WHERE at >= ? ORDER BY id", (since,))
        found = [_readable(body, Mark if kind == "Mark" else Happening) for kind, body in rows]
        return [item for item in found if item is not None]

    def events(self, since: float) -> Iterator[tuple[float, list[bytes]]]:
        """Yield the stored messages of events since a time, in parts, the newest first."""
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
        """Save a view, or replace the view of its name; return False if there are too many to add one."""
        with self._transaction() as run:
            (others,) = run("SELECT COUNT(*) FROM views WHERE name <> ?", (view.name,)).fetchone()
            if others < VIEWS_MAX:
                run("INSERT OR REPLACE INTO views VALUES (?, ?)", (view.name, _packed(view)))
        return bool(others < VIEWS_MAX)

    def delete_view(self, name: str) -> bool:
        """Delete a view; return whether it existed."""
        with self._transaction() as run:
            return run("DELETE FROM views WHERE name = ?", (name,)).rowcount > 0

    def views(self) -> list[SavedView]:
        """Return the saved views, by name."""
        found = [_readable(body, SavedView) for (body,) in self._rows("SELECT body FROM views", ())]
        return sorted((view for view in found if view is not None), key=lambda view: view.name.casefold())

    # -- tokens ----------------------------------------------------------------------------------

    def add_token(self, token: Token) -> None:
        """Store a token; ConfigurationError if the name is taken or there are too many."""
        if len(self.tokens()) >= TOKENS_MAX:
            raise ConfigurationError(f"there are {TOKENS_MAX} tokens already; remove some first")
        try:
            with self._transaction() as run:
                run("INSERT INTO tokens VALUES (?, ?)", (token.name, _packed(token)))
        except sqlite3.IntegrityError:
            raise ConfigurationError(
                f"there is a token {token.name!r} already; remove it first, or choose another name"
            ) from None

    def remove_token(self, name: str) -> bool:
        """Delete a token; return whether it existed."""
        with self._transaction() as run:
            return run("DELETE FROM tokens WHERE name = ?", (name,)).rowcount > 0

    def tokens(self) -> list[Token]:
        """Return all tokens, by name, including expired tokens."""
        return [_read(body, Token) for (body,) in self._rows("SELECT body FROM tokens ORDER BY name", ())]

    @contextmanager
    def _transaction(self) -> Iterator[Callable[..., sqlite3.Cursor]]:
        """Yield the function that executes a statement; roll back if the block raises."""
        with self._lock, self._file:
            self._file.execute("BEGIN IMMEDIATE")
            yield self._file.execute

    def _rows(self, query: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with self._reading:
            return self._reader.execute(query, values).fetchall()


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False, isolation_level=None)


def _make_private(path: Path) -> None:
    """Restrict the file's mode, because it has the audit and the hashes of tokens.

    SQLite creates its side files with the same mode.
    """
    for file in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        if file.exists():
            file.chmod(PRIVATE_FILE)


def _part(messages: Sequence[Received]) -> tuple[float, int, bytes]:
    """Return a row: when the last message was received, the size, and the messages, compressed."""
    body = zlib.compress(msgspec.msgpack.encode([message for _, message in messages]), 1)
    return messages[-1][0], len(body), body


def _packed(value: object) -> bytes:
    return msgspec.json.encode(value, enc_hook=str)


def _read(body: bytes, kind: Any) -> Any:
    return msgspec.json.decode(body, type=kind)


def _readable(body: bytes, kind: Any) -> Any:
    """Return None for a row of another version or a damaged row: the last hour is restored without it."""
    try:
        return _read(body, kind)
    except msgspec.MsgspecError:
        return None


# ---- buffer ----------------------------------------------------------------------------------------

MESSAGES_MAX = 50_000
BYTES_MAX = 64 * 1024 * 1024
T = TypeVar("T")


class JournalBuffer:
    """Messages of events that are not on disk yet; at the limits the oldest are dropped."""

    def __init__(self) -> None:
        self._messages: deque[Received] = deque()
        self._size = 0

    def add(self, at: float, body: bytes) -> None:
        """Add a message that was received at this time."""
        self._messages.append((at, body))
        self._size += len(body)
        self._drop()

    def take(self) -> list[Received]:
        """Return all messages, to be written."""
        taken, self._messages, self._size = list(self._messages), deque(), 0
        return taken

    def give_back(self, taken: Sequence[Received]) -> None:
        """Put messages back that could not be written, before newer ones."""
        self._messages.extendleft(reversed(taken))
        self._size += sum(len(body) for _, body in taken)
        self._drop()

    def _drop(self) -> None:
        while len(self._messages) > MESSAGES_MAX or self._size > BYTES_MAX:
            _, body = self._messages.popleft()
            self._size -= len(body)


def give_back(queue: deque[T], taken: Sequence[T]) -> None:
    """Put items back before newer ones; as many of the newest as there is room for."""
    room = len(taken) if queue.maxlen is None else queue.maxlen - len(queue)
    queue.extendleft(reversed(taken[max(0, len(taken) - room) :]))
