"""Database: one connection to the file, its transactions, its errors, and how it survives a fork.

A write is one transaction from BEGIN IMMEDIATE to COMMIT. After an error in between it is rolled back, and
the connection can be used again. Each error of SQLite becomes one clear error of ours.

`synchronous=NORMAL`: a commit reaches the kernel at once and the disk at the next checkpoint. The death of a
process cannot undo it; a power cut may undo the last commits, each as a whole. That is right for claims and
verdicts: acknowledgement, result and follow-up messages are one transaction, so a verdict that is undone
repeats work and never loses it. What must survive a power cut when the call returns (a published message) is
committed `durable`: the write-ahead log is flushed after the commit, when other processes may write again, so
no lock is held while the disk works. A single statement, as most sends are, is a transaction by itself
(`append`).

Forks. SQLite keeps one record per process and file of the locks that it holds, and POSIX gives none of these
locks to a child. A connection that the child opens next to an inherited one would rely on locks that no
process holds, and its commits could vanish with the log. So every connection is closed for the moment of a
fork and opened again by its next user, in parent and child. A fork that bypasses Python's hooks while a
connection is open is detected by the process id, and the child is refused.

A file that was deleted, moved away or replaced is noticed before the next transaction (`files.py`). The
connection then continues with the file that the path names now, which is created if there is none.
"""

import logging
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from umbel.brokers.sqlite import files, rows, schema
from umbel.brokers.sqlite.files import Log, Presence, WriteGate
from umbel.brokers.sqlite.rows import Malformed
from umbel.errors import (
    AccessRefused,
    BrokerError,
    BrokerRefused,
    BrokerUnavailable,
    RowsSetAside,
    StorageFull,
)
from umbel.files import none_left

log = logging.getLogger("umbel.brokers.sqlite")

# A larger log makes each flush slower: with 4,000 pages the rate of sends fell by a quarter.
CHECKPOINT_PAGES = 1000
LOG_BYTES_MAX = 64 * 2**20  # a log that a burst made longer is cut to this size; shorter ones are overwritten
CACHE_KIB = 16_384
RESERVE_BYTES = 2**20  # beyond the limit of the file, for operations that make room: claims, returns, purges
STATEMENTS_CACHED = 256
FORK_WAIT_S = 5.0
RETRY_S = 0.005
CHECK_AGAIN_S = 10.0

_FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOLFS}
_LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_FORBIDDEN = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_AUTH}
_DAMAGED = {sqlite3.SQLITE_ERROR, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_FORMAT}
_DAMAGED_READING = {  # the file, or its log, is shorter than it was, or the disk cannot read it
    sqlite3.SQLITE_IOERR_SHORT_READ,
    sqlite3.SQLITE_IOERR_READ,
    sqlite3.SQLITE_IOERR_CORRUPTFS,
    sqlite3.SQLITE_IOERR_DATA,
}
_OF_A_ROW = {0, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CONSTRAINT}
FAULTS = (sqlite3.Error, UnicodeDecodeError, Malformed)


class Database:
    """The database of one path. Threads may share it and take turns."""

    def __init__(
        self,
        path: Path,
        *,
        timeout_s: float,
        max_bytes: int | None = None,
        on_open: Callable[[sqlite3.Connection], None] | None = None,
        on_malformed: Callable[[bool], bool] | None = None,
    ) -> None:
        """`on_open` gets every new connection, inside a transaction, before any other use.

        `on_malformed` is called when a row could not be read; it returns whether it has set rows aside. Its
        argument says whether to check all rows, or only the few that others depend on.
        """
        self._connection: sqlite3.Connection | None = None
        self.path = path
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._on_open = on_open
        self._on_malformed = on_malformed
        self._checking = threading.Lock()
        self._checked_at = -CHECK_AGAIN_S
        self._turn = threading.Lock()
        self._gate = WriteGate(path)
        self._log: Log | None = None  # of that connection
        self._pid = 0  # of the process that opened the connection
        self._presence: Presence | None = None  # of the files of that connection
        self.replaced = ""
        """The path of a file that was replaced, until `on_open` has got the next connection."""
        with _forking:
            _databases.add(self)

    @contextmanager
    def write(self, *, durable: bool = False, makes_room: bool = False) -> Iterator[sqlite3.Connection]:
        """One transaction: all of the block is applied, or nothing of it.

        With `makes_room` it may exceed the limit of the file a little, or a full file would stay full.

        This is one flat generator because every message pays for it: composed of smaller context managers it
        cost twice as much as BEGIN, COMMIT and the gate together.
        """
        self._take_turn()
        problem: Exception | None = None
        log: Log | None = None
        try:
            db = self._open()
            try:
                self._gate.enter(self._timeout_s)
                if makes_room:
                    self._limit(db, beyond_bytes=RESERVE_BYTES)
                db.execute("BEGIN IMMEDIATE")
                yield db
                db.execute("COMMIT")
                log = self._log
            except BaseException:
                self._roll_back()
                raise
            finally:
                if makes_room:
                    self._limit(db)
                self._gate.leave()
        except FAULTS as error:
            problem = error
        finally:
            self._turn.release()
        if problem is not None:
            raise self._judged(problem) from problem
        if durable:
            assert log is not None, "a database that is open has a log"
            log.flush()

    def append(
        self, statement: str, values: Sequence[Any], question: str, about: Sequence[Any]
    ) -> tuple[int, list[Any]]:
        """Insert one row, durable on return; returns its rowid, and the rows that `question` then finds.

        This is the most frequent write. It saves the statements that begin and end a transaction.
        """
        self._take_turn()
        problem: Exception | None = None
        number: int | None = None
        found: list[Any] = []
        log: Log | None = None
        try:
            db = self._open()
            try:
                self._gate.enter(self._timeout_s)
                number = db.execute(statement, values).lastrowid
            finally:
                self._gate.leave()
            found = db.execute(question, about).fetchall()
            log = self._log
        except FAULTS as error:
            problem = error
        finally:
            self._turn.release()
        if problem is not None:
            raise self._judged(problem) from problem
        assert log is not None, "a database that is open has a log"
        log.flush()
        assert number is not None, "the statement is an INSERT"
        return number, found

    @contextmanager
    def read(self, timeout_s: float | None = None) -> Iterator[sqlite3.Connection]:
        """A transaction that reads: all statements of the block see the same snapshot.

        It waits at most `timeout_s` for other threads, and as long for another process that opens the file.
        """
        self._take_turn(timeout_s)
        problem: Exception | None = None
        try:
            db = self._open(timeout_s)
            try:
                db.execute("BEGIN")
                yield db
                db.execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise
        except FAULTS as error:
            problem = error
        finally:
            self._turn.release()
        if problem is not None:
            raise self._judged(problem) from problem

    def _judged(self, problem: Exception) -> Exception:
        """The error for the caller. If a malformed row may be the cause, malformed rows are set aside
        first.
        """
        if self._on_malformed is None or not _may_be_a_row(problem):
            return explain(problem, self.path, self._timeout_s)
        if not self._checking.acquire(blocking=False):  # the check itself failed, or another thread checks
            return explain(problem, self.path, self._timeout_s)
        try:
            # Errors other than Malformed may be the caller's fault, and may recur at every call.
            is_due = isinstance(problem, Malformed) or time.monotonic() - self._checked_at >= CHECK_AGAIN_S
            if is_due and self._on_malformed(not _is_full(problem)):
                return RowsSetAside(
                    f"{self.path} had malformed rows ({problem}); they were set aside, and nothing else was "
                    "changed: repeat the call"
                )
            if is_due:
                self._checked_at = time.monotonic()
        finally:
            self._checking.release()
        return explain(problem, self.path, self._timeout_s)

    def close(self) -> None:
        """Close the connection; the next operation opens another."""
        with self._turn:
            self._shut()

    def __del__(
        self, getpid: Callable[[], int] = os.getpid, fault: type[sqlite3.Error] = sqlite3.Error
    ) -> None:
        # Python warns of a connection that was not closed. This may be called anywhere, so it must not wait
        # at the gate.
        try:
            if self._connection is not None and self._pid == getpid():
                self._connection.close()
        except fault:
            return

    def _take_turn(self, timeout_s: float | None = None) -> None:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        if not self._turn.acquire(timeout=timeout_s):
            raise BrokerUnavailable(
                f"{self.path}: other threads used the database for {timeout_s:g} s; is the disk overloaded?"
            )

    def _open(self, timeout_s: float | None = None) -> sqlite3.Connection:
        if self._connection is not None:
            if self._pid != os.getpid():
                _refused.add(self.path)
            else:
                assert self._presence is not None, "a database that is open has its files"
                if not (missing := self._presence.missing()):
                    return self._connection
                self._let_go(missing)
        if self.path in _refused:
            raise AccessRefused(
                f"{self.path} was in use while this process was forked, so it cannot be used here; "
                "create the App, or send the first message, after the fork"
            )
        with ExitStack() as undo, _descriptors_explained(self.path):
            files.prepare(self.path)
            presence = Presence(self.path)
            db = sqlite3.connect(
                self.path,
                timeout=self._timeout_s,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=STATEMENTS_CACHED,
            )
            undo.callback(self._gate.close)
            undo.callback(db.close)
            undo.callback(db.rollback)  # closing alone would leave the file locked while a statement exists
            self._gate.enter(self._timeout_s if timeout_s is None else timeout_s)
            self._set_up(db)
            self._log = Log(f"{self.path}-wal")
            presence.note_opened()
            self._gate.leave()
            undo.pop_all()
        self._connection, self._pid = db, os.getpid()
        self._presence, self.replaced = presence, ""
        return db

    def _let_go(self, missing: str) -> None:
        """Close the connection, because the path names other files now.

        The open log may have commits that its file lacks, wherever that file is now. They are written to the
        file, unless another process has begun another log. An old log must not be taken for that of a new
        file, so it is removed.
        """
        assert self._connection is not None
        assert self._presence is not None
        log.warning("database file was deleted or replaced; reopening", extra={"file": missing})
        self.replaced = missing
        wal, shm = f"{self.path}-wal", f"{self.path}-shm"
        with suppress(sqlite3.Error, BrokerError, OSError):
            if self._presence.is_there(wal) or not os.path.exists(wal):
                self._gate.enter(self._timeout_s)
                self._connection.execute("PRAGMA wal_checkpoint(FULL)")
            if missing == str(self.path):
                for name in (wal, shm):
                    if self._presence.is_there(name):
                        os.unlink(name)
        self._shut()

    def _set_up(self, db: sqlite3.Connection) -> None:
        _switch_to_wal(db, self.path, self._timeout_s)
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        db.execute(f"PRAGMA journal_size_limit = {LOG_BYTES_MAX}")
        db.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        db.execute("PRAGMA temp_store = MEMORY")
        db.execute("BEGIN IMMEDIATE")
        schema.migrate(db, self.path, schema.MIGRATIONS)
        schema.extend(db)
        if self._on_open is not None:
            self._on_open(db)
        db.execute("COMMIT")
        self._limit(db)

    def _limit(self, db: sqlite3.Connection, *, beyond_bytes: int = 0) -> None:
        if self._max_bytes is not None:
            page_bytes = db.execute("PRAGMA page_size").fetchone()[0]
            pages = max(1, (self._max_bytes + beyond_bytes) // page_bytes)
            db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite never goes below the present count

    def _roll_back(self) -> None:
        """Undo what was not committed; if the disk was full, SQLite may have done so itself."""
        if self._connection is not None and self._pid == os.getpid() and self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def _shut(self) -> None:
        if self._connection is not None and self._pid == os.getpid():
            # The last connection to close writes the log into the file. If the gate does not open in time,
            # this connection is not the last one.
            with suppress(BrokerUnavailable):
                self._gate.enter(self._timeout_s)
            self._connection.close()
            self._connection = self._log = None
            self._gate.close()

    def pause_for_fork(self, deadline: float) -> bool:
        """Close, and let no thread use the database until `resume`. False: a thread was still using it."""
        if not self._turn.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return False
        self._shut()
        return True

    def resume(self) -> None:
        """Let threads use the database again after a fork."""
        self._turn.release()

    def renounce(self) -> None:
        """Give up the database in a child that was forked while a thread of its parent was using it."""
        if self._connection is None and not self._turn.locked():
            return
        _inherited.append(self._connection)  # never closed, because closing it would do harm
        _refused.add(self.path)
        self._turn = threading.Lock()


def _may_be_a_row(problem: Exception) -> bool:
    """Whether the cause may be a row that another program wrote. A row with too high an id makes its table
    refuse new rows.
    """
    code = getattr(problem, "sqlite_errorcode", 0) & 0xFF
    return isinstance(problem, Malformed) or (isinstance(problem, sqlite3.Error) and code in _OF_A_ROW)


def _is_full(problem: Exception) -> bool:
    return bool(getattr(problem, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL)


def _damage(error: Exception, path: Path) -> str:
    """What is wrong with the file itself; "" if the error is about something else."""
    code = getattr(error, "sqlite_errorcode", 0)
    if code in _DAMAGED_READING:
        return f"its log {path.name}-wal, or the file, is cut off, or the disk cannot read it ({error})"
    is_damage = (
        code & 0xFF in _DAMAGED
        or isinstance(error, Malformed | UnicodeDecodeError)
        or str(error).startswith("Could not decode")
        # The system allows writing, so it is the header of the file that forbids it.
        or (code == sqlite3.SQLITE_READONLY and os.access(path, os.W_OK))
    )
    return str(error) if is_damage else ""


def explain(error: Exception, path: Path, timeout_s: float) -> Exception:
    """The error of SQLite as an error of ours, in one line that names the file and the remedy.

    An error that is returned unchanged is a mistake of this code.
    """
    if damage := _damage(error, path):
        return AccessRefused(
            f"{path} is not a usable database: {damage}; stop its workers and clients, and recover what can "
            f"be read (sqlite3 {path} .recover | sqlite3 NEW), restore a backup, or move it away, with its "
            "-wal and -shm, to start with an empty one"
        )
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in _FULL:
        size_bytes = path.stat().st_size if path.exists() else 0
        return StorageFull(
            f"no room to write to {path} ({size_bytes:,} bytes): {error}; nothing was changed: "
            "free some space on the disk, or raise storage_max_bytes"
        )
    if code in _LOCKED:
        return BrokerUnavailable(
            f"{path} stayed locked by another process for {timeout_s:g} s; "
            "find the process with fuser, or raise `connect_timeout_s`"
        )
    if code in _FORBIDDEN:
        return AccessRefused(
            f"cannot write to {path}: {error}; make the file and its directory writable for this user, "
            "or choose another path"
        )
    if code in rows.REFUSED_CODES:
        return BrokerRefused(
            f"SQLite refuses to store a message or result in {path}: {error}; others are not affected"
        )
    return error


@contextmanager
def _descriptors_explained(path: Path) -> Iterator[None]:
    """Report that there are no file descriptors left; SQLite's own error would name another cause."""
    try:
        yield
    except (OSError, sqlite3.Error, BrokerError) as error:
        if no_files := none_left():
            raise BrokerUnavailable(f"cannot open {path}: {no_files}") from error
        raise


def _switch_to_wal(db: sqlite3.Connection, path: Path, timeout_s: float) -> None:
    # Two processes that create the file at the same time may both get "busy" at once, whatever the time-out
    # is, because waiting for each other would be a deadlock.
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if db.execute("PRAGMA journal_mode = WAL").fetchone()[0] == "wal":
                return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in _LOCKED or time.monotonic() > deadline:
                raise
        if time.monotonic() > deadline:
            raise AccessRefused(f"SQLite cannot use write-ahead logging for {path}; choose another path")
        time.sleep(RETRY_S)


_databases: weakref.WeakSet[Database] = weakref.WeakSet()
_forking = threading.RLock()  # held during a fork, so that no database is added meanwhile
_paused: list[Database] = []
_refused: set[Path] = set()
_inherited: list[sqlite3.Connection | None] = []


def _before_fork() -> None:
    _forking.acquire()
    deadline = time.monotonic() + FORK_WAIT_S
    _paused.extend(database for database in _databases if database.pause_for_fork(deadline))


def _after_fork_in_parent() -> None:
    while _paused:
        _paused.pop().resume()
    _forking.release()


def _after_fork_in_child() -> None:
    for database in set(_databases).difference(_paused):
        database.renounce()
    _after_fork_in_parent()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
