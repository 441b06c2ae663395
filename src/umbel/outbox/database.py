"""OutboxDatabase: the relay's own connection to the database of an outbox. Every call blocks.

Each call is one statement or one short transaction; none is open while the relay waits for the broker, so
nothing of the caller's is ever locked for longer than a delete takes. A connection that failed is dropped,
and the next call opens another one.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from umbel.errors import BadURL, ConfigurationError, OutboxUnavailable
from umbel.outbox.addresses import UNREADABLE, Address
from umbel.outbox.connections import missing_table
from umbel.outbox.dialects import SQLITE, Statements
from umbel.outbox.rows import Problem, StoredRow

CONNECT_S = 5
STATEMENT_S = 10
ROWS_MAX = 500
BYTES_MAX = 4 * 1024 * 1024
PROBLEMS_SHOWN = 20
_CONNECTING: Mapping[str, Any] = {
    "connect_timeout": CONNECT_S,
    "application_name": "umbel outbox",
    "keepalives_idle": STATEMENT_S,
    "tcp_user_timeout": STATEMENT_S * 1000,
}
_LIMITS = ("statement_timeout", "idle_in_transaction_session_timeout")


class OutboxCounts(NamedTuple):
    """`waiting` and `set_aside` go up to COUNT_MAX + 1, which means more than COUNT_MAX."""

    waiting: int
    oldest_s: float | None
    set_aside: int


class SetAside(NamedTuple):
    row_id: int
    task_id: str
    problem: str


class OutboxDatabase:
    """Its calls come from changing threads, and wait for one another."""

    def __init__(self, address: Address, table: str) -> None:
        self.address = address
        self._table = table
        self._sql = Statements(address.dialect, table)
        self._connection: Any = None
        self._turn = Lock()

    def create(self) -> bool:
        """Make what is missing; whether a new file was among it."""
        is_new = self.address.dialect is SQLITE and _is_missing(self.address.target)
        with self._session(may_create=True) as execute:
            for statement in self._sql.create():
                execute(statement)
        return is_new

    def fetch(self, rows_max: int = ROWS_MAX, bytes_max: int = BYTES_MAX) -> list[StoredRow]:
        """The next committed rows by their ids, as many as fit; one that is larger than that comes alone."""
        with self._session() as execute:
            found = execute(self._sql.fetch(), (rows_max, bytes_max)).fetchall()
        return [StoredRow(row_id, message or b"") for row_id, message in found]

    def settle(self, published: Sequence[int], problems: Sequence[Problem] = ()) -> None:
        """Delete what was published and keep, with the reason, what never will be: together."""
        with self._session() as execute:
            execute("BEGIN")
            if published:
                execute(self._sql.remove(), (self._ids(published),))
            for one in problems:
                execute(self._sql.set_aside(), (one.why, one.row_id))
            execute("COMMIT")

    def retry(self) -> int:
        """Let what was set aside be published again; how many."""
        with self._session() as execute:
            count: int = execute(self._sql.retry()).rowcount
        return count

    def counts(self) -> OutboxCounts:
        with self._session() as execute:
            waiting, oldest_s, set_aside = execute(self._sql.counts()).fetchone()
        return OutboxCounts(waiting, None if oldest_s is None else max(0.0, oldest_s), set_aside)

    def problems(self) -> list[SetAside]:
        with self._session() as execute:
            return [SetAside(*row) for row in execute(self._sql.problems(), (PROBLEMS_SHOWN,)).fetchall()]

    def close(self) -> None:
        with self._turn:
            self._drop()

    def _ids(self, ids: Sequence[int]) -> object:
        return json.dumps(list(ids)) if self.address.dialect is SQLITE else list(ids)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @contextmanager
    def _session(self, *, may_create: bool = False) -> Iterator[Callable[..., Any]]:
        errors = _errors_of(self.address)
        with self._turn:
            try:
                if self._connection is None:
                    self._connection = _connect(self.address, may_create=may_create)
                yield self._connection.execute
            except errors as error:
                self._drop()
                why = str(missing_table(error, self._table) or error).strip()
                raise OutboxUnavailable(f"outbox {self.address.shown} cannot be used: {why}") from error


def need_driver(address: Address) -> None:
    """PostgreSQL takes an extra; say so instead of failing at some import. And it must know the address."""
    if address.dialect is SQLITE:
        return
    if find_spec("psycopg") is None:
        raise ConfigurationError(
            f"the outbox {address.shown} needs psycopg 3 in the worker: pip install 'umbel[outbox]'"
        )
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        conninfo_to_dict(address.target)
    except psycopg.Error:  # its text may quote the password
        raise BadURL(address.target, UNREADABLE) from None


def _is_missing(path: str) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        return True
    except OSError:  # it is somebody else's: SQLite will say what it may not
        return False
    return False


def _connect_file(address: Address, *, may_create: bool) -> Any:
    import sqlite3

    path = Path(address.target).absolute()
    lacking = "folder" if may_create else "file"
    if _is_missing(str(path.parent if may_create else path)):
        remedy = "make it" if may_create else "make it with `umbel outbox create`"
        raise OutboxUnavailable(
            f"outbox {address.shown}: the {lacking} does not exist: {remedy}, or correct `outbox`"
        )
    # An empty file would hide that the address is wrong. The relay's calls come from changing threads.
    uri = f"{path.as_uri()}?mode={'rwc' if may_create else 'rw'}"
    made = sqlite3.connect(uri, uri=True, timeout=CONNECT_S, isolation_level=None, check_same_thread=False)
    made.text_factory = partial(str, encoding="utf-8", errors="replace")  # a task's id, for people
    return made


def _connect(address: Address, *, may_create: bool) -> Any:
    if address.dialect is SQLITE:
        return _connect_file(address, may_create=may_create)
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    given = conninfo_to_dict(address.target)
    limits = " ".join(f"-c {name}={STATEMENT_S * 1000}" for name in _LIMITS)
    options = f"{limits} {given.pop('options', '')}".strip()
    # Poolers between us and the server may not know prepared statements.
    return psycopg.connect(
        autocommit=True, prepare_threshold=None, options=options, **{**_CONNECTING, **given}
    )


def _errors_of(address: Address) -> type[Exception]:
    if address.dialect is SQLITE:
        import sqlite3

        return sqlite3.Error
    import psycopg

    return psycopg.Error
