"""Journal: the dashboard's file: the audit, the last hour, saved views and tokens; bounded.

An action is in the audit, on disk, before it is sent. An audit entry says who did what and what came of it,
redacted and cut; it names at most LISTED_MAX tasks, letters and nodes, with their number. The events of the
last hour are stored as they arrived; after a restart they are merged with the new ones. Events wait in memory
while the disk is slow or full, and the oldest are dropped at the limit.
"""

import sqlite3
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import time
from typing import Any, Literal, TypeVar

import msgspec

from umbel.errors import ConfigurationError
from umbel.files import PRIVATE_FILE, make_own, refuse_planted_beside
from umbel.monitor.rates import Step
from umbel.monitor.records import Happening, Mark
from umbel.web.actions import VIEWS_MAX, ActionResult, AnyAction, AuditEntry, SavedView
from umbel.web.credentials import Token
from umbel.web.redaction import CUT, redact_data, shown
from umbel.web.site import Visitor

# ---- auditing --------------------------------------------------------------------------------------
#
# What is written down of an action, a query or a login, and of what came of it; redacted and cut.
#
# An entry names at most LISTED_MAX of the tasks, letters and nodes that an action concerned, with their
# number beside them. Of an action that was refused for its role only the target is stored: a visitor who
# may not act must not fill the file. For the same reason logins, queries, failed logins and refusals have
# separate limits in the file (`room_of`): many of one kind push out older ones of that kind and role alone.

LOGIN, LOGOUT, QUERY = "login", "logout", "query"
FAILED_LOGIN, LOCKED_OUT, REFUSED_REQUEST = "failed_login", "locked_out", "refused_request"
ROOMS = {LOGIN: 3000, LOGOUT: 3000, QUERY: 10_000, "failure": 1000, "refused": 1000, "action": 100_000}
LISTED_MAX = 20
TEXT_MAX = 2000
TARGET_MAX = 200


def entry_of(visitor: Visitor, action: AnyAction, status: Literal["sent", "refused"]) -> AuditEntry:
    """Return the audit entry of an action; one that was refused is stored without its arguments."""
    arguments = msgspec.to_builtins(action)
    return AuditEntry(
        id=0,
        at=time(),
        who=visitor.name,
        role=visitor.role.value,
        address=visitor.address,
        action=name_of(action),
        target=_target(arguments)[:TARGET_MAX],
        arguments={} if status == "refused" else _cut(redact_data(arguments, TEXT_MAX)),
        status=status,
    )


def note_of(
    action: str,
    who: str,
    role: str,
    address: str,
    *,
    target: str = "",
    arguments: dict[str, Any] | None = None,
    status: Literal["sent", "done", "refused"] = "done",
) -> AuditEntry:
    """Return the audit entry of something else than an action: a login, a query, a refused request."""
    return AuditEntry(
        id=0,
        at=time(),
        who=who[:TARGET_MAX],
        role=role,
        address=address,
        action=action,
        target=shown(target, TARGET_MAX),
        arguments=_cut(redact_data(arguments or {}, TEXT_MAX)),
        status=status,
    )


def room_of(entry: AuditEntry) -> tuple[str, int]:
    """Return which entries share a limit with this one, and how many of them are retained.

    Many entries of one kind push out older ones of that kind and role alone, so a visitor without rights
    cannot remove the record of actions.
    """
    if entry.action in {LOGIN, LOGOUT, QUERY}:
        return f"{entry.action} {entry.role}", ROOMS[entry.action]
    is_failure = entry.action in {FAILED_LOGIN, LOCKED_OUT, REFUSED_REQUEST}
    kind = "failure" if is_failure else "refused" if entry.status == "refused" else "action"
    return kind, ROOMS[kind]


def ended(entry: AuditEntry, result: ActionResult) -> AuditEntry:
    """Return the entry of an action with its result."""
    result_fields = redact_data(msgspec.to_builtins(result, enc_hook=str), TEXT_MAX)
    replies = {"replies": result_fields.pop("replies", {})}  # not cut: at most one for each node
    status: Literal["done", "failed"] = "done" if result.done else "failed"
    return msgspec.structs.replace(entry, status=status, result=_cut(result_fields) | replies)


def answered(entry: AuditEntry, rows: int, problem: str = "") -> AuditEntry:
    """Return the entry of a query with the number of its rows, or with its problem."""
    result = {"rows": rows} | ({"problem": shown(problem, TEXT_MAX)} if problem else {})
    return msgspec.structs.replace(entry, status="failed" if problem else "done", result=result)


def result_of(audit_id: int, outcome: dict[str, Any]) -> ActionResult:
    """Return the result of an action from the fields of its outcome, redacted."""
    is_done = not (outcome.get("problem") or outcome.get("silent") or outcome.get("refused"))
    clean = outcome | {"replies": redact_data(outcome.get("replies", {}), TEXT_MAX)}
    return ActionResult(audit_id=audit_id, done=is_done, **clean)


def name_of(action: AnyAction) -> str:
    """Return the name of an action, as JSON has it."""
    return str(type(action).__struct_config__.tag)


def _target(arguments: dict[str, Any]) -> str:
    for name in ("ids", "letters", "queue", "name", "task", "id", "text", "view"):
        found = arguments.get(name)
        if found:
            many = found if isinstance(found, list) else [found]
            more = f" and {len(many) - 1} more" if len(many) > 1 else ""
            return f"{str(many[0])[: TARGET_MAX - len(more)]}{more}"
    return ", ".join(arguments.get("nodes", ())) or "all nodes"


def _cut(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with long lists cut, and how many items those had."""
    cut: dict[str, Any] = {}
    for name, value in fields.items():
        cut[name] = _beginning(value)
        if isinstance(value, list | dict) and len(value) > LISTED_MAX:
            cut[f"{name}_count"] = len(value)
    return cut


def _beginning(value: Any) -> Any:
    if isinstance(value, list):
        value = value[:LISTED_MAX]
    elif isinstance(value, dict):
        value = dict(list(value.items())[:LISTED_MAX])
    written = msgspec.json.encode(value, enc_hook=str)
    most = TEXT_MAX * LISTED_MAX
    return value if len(written) <= most else written[:TEXT_MAX].decode(errors="replace") + CUT


# ---- journal ---------------------------------------------------------------------------------------
#
# The dashboard's own file: the audit, the last hour, saved views, and tokens; bounded.
#
# An action is in the audit, on disk, before it is sent. Events of the last hour are stored as they came: a
# restart joins them with those that arrive then and shows the same; charts and changes of membership are
# stored as they were drawn. Limits: an hour and HEARD_BYTES_MAX of events (beyond that the oldest go), an
# hour of steps. The audit has limits for each kind of entry (`auditing.room_of`), so that who may do
# nothing cannot push out what was done. Saved views have their limits in `saved_views`.

HOUR_S = 3600.0
HEARD_BYTES_MAX = 256 * 1024 * 1024
HEARD_AT_ONCE = 200  # messages in one row
TOKENS_MAX = 1000
BUSY_MS = 5000
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
# Files of 0.3 and before had refused actions in a separate table.
ROOMS_ADDED = """
ALTER TABLE audit ADD COLUMN room TEXT NOT NULL DEFAULT 'action';
CREATE TABLE IF NOT EXISTS refused (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
INSERT OR IGNORE INTO audit (id, at, body, room) SELECT id, 0, body, 'refused' FROM refused;
DROP TABLE refused;
"""
ROOMS_INDEXED = "CREATE INDEX IF NOT EXISTS audit_rooms ON audit (room, id)"
DROP_OLDEST_AUDIT = """
DELETE FROM audit WHERE room = ?1 AND id <= (
    SELECT id FROM audit WHERE room = ?1 ORDER BY id DESC LIMIT 1 OFFSET ?2)"""


class Journal:
    """The dashboard's SQLite file. It is used from several threads, under a lock."""

    def __init__(self, path: Path) -> None:
        self._one_at_a_time = threading.Lock()
        try:
            make_own(path)
            refuse_planted_beside(path)
            _make_private(path)
            self._file = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._file.execute(f"PRAGMA busy_timeout={BUSY_MS}")
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("PRAGMA synchronous=FULL")  # the audit outlives a power cut
            self._make_tables()
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(
                f"the dashboard cannot use its file {path}: {error}; name another with --state"
            ) from None

    def _make_tables(self) -> None:
        self._file.executescript(SCHEMA)
        with self._file:
            self._file.execute("BEGIN IMMEDIATE")
            columns = self._file.execute("PRAGMA table_info(audit)").fetchall()
            if "room" not in {column[1] for column in columns}:
                for statement in filter(str.strip, ROOMS_ADDED.split(";")):
                    self._file.execute(statement)
            self._file.execute(ROOMS_INDEXED)

    def close(self) -> None:
        """Close the file."""
        with self._one_at_a_time:
            self._file.close()

    # -- audit -----------------------------------------------------------------------------------

    def note(self, entry: AuditEntry) -> int:
        """Write an entry, return its number, and delete the oldest of its kind beyond the limit."""
        room, most = room_of(entry)
        with self._one_at_a_time, self._file:
            self._file.execute("BEGIN")
            row = self._file.execute(
                "INSERT INTO audit (at, body, room) VALUES (?, ?, ?)", (entry.at, _packed(entry), room)
            )
            self._file.execute(DROP_OLDEST_AUDIT, (room, most))
        return int(row.lastrowid or 0)

    def finish(self, entry: AuditEntry) -> None:
        """Replace an entry by the same one with its result."""
        with self._one_at_a_time, self._file:
            self._file.execute("UPDATE audit SET body = ? WHERE id = ?", (_packed(entry), entry.id))

    def audit(self, *, limit: int, before: int = 0) -> list[AuditEntry]:
        """Return entries of the audit, the newest first, older than `before`."""
        below = before or 2**62
        rows = self._rows("SELECT id, body FROM audit WHERE id < ? ORDER BY id DESC LIMIT ?", (below, limit))
        return [msgspec.structs.replace(_read(body, AuditEntry), id=number) for number, body in rows]

    # -- the last hour ---------------------------------------------------------------------------

    def write_hour(
        self,
        heard: Sequence[tuple[float, bytes]],
        steps: Sequence[Step],
        happened: Sequence[Happening | Mark],
        now: float,
    ) -> None:
        """Store new events, steps and changes; delete those that are too old or beyond the limit."""
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
                [(item.at, type(item).__name__, _packed(item)) for item in happened],
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
        """Return the steps of the charts since a time, oldest first."""
        rows = self._rows("SELECT at, body FROM steps WHERE at >= ? ORDER BY at", (since,))
        return [step for _, body in rows if (step := _readable(body, Step)) is not None]

    def happened(self, since: float) -> list[Happening | Mark]:
        """Return the changes and marks since a time, oldest first."""
        rows = self._rows("SELECT kind, body FROM happened WHERE at >= ? ORDER BY id", (since,))
        found = [_readable(body, Mark if kind == "Mark" else Happening) for kind, body in rows]
        return [item for item in found if item is not None]

    def heard(self, since: float) -> Iterator[tuple[float, list[bytes]]]:
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
        """Save a view, in place of one of its name; return False if there are too many to add one."""
        with self._one_at_a_time, self._file:
            self._file.execute("BEGIN IMMEDIATE")
            counted = self._file.execute("SELECT COUNT(*) FROM views WHERE name <> ?", (view.name,))
            (others,) = counted.fetchone()
            if others < VIEWS_MAX:
                self._file.execute("INSERT OR REPLACE INTO views VALUES (?, ?)", (view.name, _packed(view)))
        return bool(others < VIEWS_MAX)

    def delete_view(self, name: str) -> bool:
        """Delete a view; return whether it existed."""
        with self._one_at_a_time, self._file:
            return self._file.execute("DELETE FROM views WHERE name = ?", (name,)).rowcount > 0

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
            with self._one_at_a_time, self._file:
                self._file.execute("INSERT INTO tokens VALUES (?, ?)", (token.name, _packed(token)))
        except sqlite3.IntegrityError:
            raise ConfigurationError(
                f"there is a token {token.name!r} already; remove it first, or choose another name"
            ) from None

    def remove_token(self, name: str) -> bool:
        """Delete a token; return whether it existed."""
        with self._one_at_a_time, self._file:
            return self._file.execute("DELETE FROM tokens WHERE name = ?", (name,)).rowcount > 0

    def tokens(self) -> list[Token]:
        """Return all tokens, by name, also those that have expired."""
        return [_read(body, Token) for (body,) in self._rows("SELECT body FROM tokens ORDER BY name", ())]

    def _rows(self, query: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with self._one_at_a_time:
            return self._file.execute(query, values).fetchall()


def _make_private(path: Path) -> None:
    """Restrict the file's mode: it has the audit and hashes of tokens.

    SQLite creates its side files with the same mode.
    """
    for file in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        if file.exists():
            file.chmod(PRIVATE_FILE)


def _part(messages: Sequence[tuple[float, bytes]]) -> tuple[float, int, bytes]:
    """Return a row: when the last message was received, the size, and the messages, compressed."""
    body = zlib.compress(msgspec.msgpack.encode([message for _, message in messages]), 1)
    return messages[-1][0], len(body), body


def _packed(value: object) -> bytes:
    return msgspec.json.encode(value, enc_hook=str)


def _read(body: bytes, kind: Any) -> Any:
    return msgspec.json.decode(body, type=kind)


def _readable(body: bytes, kind: Any) -> Any:
    """Return None for a row of another version or a damaged one: the last hour is restored without it."""
    try:
        return _read(body, kind)
    except msgspec.MsgspecError:
        return None


# ---- unwritten -------------------------------------------------------------------------------------
#
# Events that are not on disk yet; beyond the limit the oldest go.
#
# That happens when the disk is slow, or full: then what was taken to be written is given back.

MESSAGES_MAX = 50_000
BYTES_MAX = 64 * 1024 * 1024
Heard = tuple[float, bytes]
T = TypeVar("T")


class JournalBuffer:
    """Messages of events that are not on disk yet; at the limits the oldest are dropped."""

    def __init__(self) -> None:
        self._heard: deque[Heard] = deque()
        self._size = 0

    def add(self, at: float, body: bytes) -> None:
        """Add a message that was received at this time."""
        self._heard.append((at, body))
        self._size += len(body)
        self._drop()

    def take(self) -> list[Heard]:
        """Return all messages, to be written."""
        taken, self._heard, self._size = list(self._heard), deque(), 0
        return taken

    def give_back(self, taken: Sequence[Heard]) -> None:
        """Put messages back that could not be written, before newer ones."""
        self._heard.extendleft(reversed(taken))
        self._size += sum(len(body) for _, body in taken)
        self._drop()

    def _drop(self) -> None:
        while len(self._heard) > MESSAGES_MAX or self._size > BYTES_MAX:
            _, body = self._heard.popleft()
            self._size -= len(body)


def give_back(where: deque[T], taken: Sequence[T]) -> None:
    """Put items back before newer ones; as many of the newest as there is room for."""
    room = len(taken) if where.maxlen is None else where.maxlen - len(where)
    where.extendleft(reversed(taken[max(0, len(taken) - room) :]))
