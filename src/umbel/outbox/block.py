"""Block: `with app.outbox(connection):`, inside which tasks are written into a table instead of sent.

A block belongs to one app and to the context in which it was opened (contextvars): a thread, or an asyncio
task and the tasks started inside it. Other threads and other apps send as usual. After its end a block has no
effect, also in contexts that inherited it.

The module of a connection's class tells which library made it, so a library that the caller does not use is
never imported. Database errors pass through unchanged, because they concern the caller's transaction; only a
missing table and a connection without a transaction raise OutboxError, which says what to do.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from contextvars import Token
from sys import modules
from typing import Any, Self

from umbel.errors import OutboxError
from umbel.outbox import OPEN, open_block
from umbel.outbox.table import POSTGRESQL, SQLITE, Dialect, Statements, encode_rows
from umbel.wire.message import Outgoing

# ---- connections of the caller ---------------------------------------------------------------------

Rows = Sequence[tuple[str, bytes]]
_IDLE = 0  # PQTRANS_IDLE: no transaction has begun
_UNDEFINED_TABLE = "42P01"
ACCEPTED = (
    "pass a connection of sqlite3, psycopg, psycopg2 or Django, or a connection or session of SQLAlchemy"
)


class Target:
    """A caller's connection. `write` is for blocking connections, `awrite` for async ones."""

    is_async = False

    def check(self) -> None:
        """Raise OutboxError if the connection is closed."""

    def write(self, rows: Rows) -> None:
        """Insert rows; OutboxError if no transaction is open or the table is missing."""
        raise NotImplementedError

    async def awrite(self, rows: Rows) -> None:
        """The same as `write`, for async connections."""
        raise NotImplementedError


def target_of(connection: Any, table: str) -> Target:
    """How to write through this connection; OutboxError for a kind that is not supported."""
    roots = _roots(connection)
    if "sqlalchemy" in roots and hasattr(connection, "execute"):
        return AlchemyTarget(connection, table)
    if "django" in roots and hasattr(connection, "vendor"):
        return DjangoTarget(connection, table)
    if hasattr(connection, "cursor") and hasattr(connection, "commit"):
        for root, dialect in _DRIVERS.items():
            if root in roots:
                return DriverTarget(connection, dialect, table)
    raise OutboxError(f"app.outbox() cannot write through {_kind(connection)}: {ACCEPTED}")


_DRIVERS = {"sqlite3": SQLITE, "psycopg": POSTGRESQL, "psycopg2": POSTGRESQL}


class DriverTarget(Target):
    """A DB-API connection of sqlite3, psycopg or psycopg2; also psycopg's AsyncConnection."""

    def __init__(self, connection: Any, dialect: Dialect, table: str) -> None:
        self.is_async = any(kind.__name__ == "AsyncConnection" for kind in type(connection).__mro__)
        self._connection = connection
        self._table = table
        self._insert = Statements(dialect, table).insert()

    def check(self) -> None:
        """Raise OutboxError if the driver's connection is closed."""
        if _is_closed(self._connection):
            raise OutboxError(f"app.outbox() was given a closed connection ({_kind(self._connection)})")

    def write(self, rows: Rows) -> None:
        """Insert rows with a cursor of the driver."""
        check_transaction(self._connection)
        with closing(self._connection.cursor()) as cursor, _table_check(self._connection.Error, self._table):
            if len(rows) == 1:  # executemany of sqlite3 takes twice as long for a single row
                cursor.execute(self._insert, rows[0])
            else:
                cursor.executemany(self._insert, rows)

    async def awrite(self, rows: Rows) -> None:
        """Insert rows with an async cursor."""
        check_transaction(self._connection)
        with _table_check(self._connection.Error, self._table):
            async with self._connection.cursor() as cursor:
                await cursor.executemany(self._insert, rows)


class DjangoTarget(Target):
    """`django.db.connection`, or one of `django.db.connections`, which opens itself when it is used."""

    def __init__(self, connection: Any, table: str) -> None:
        dialect = {"postgresql": POSTGRESQL, "sqlite": SQLITE}.get(connection.vendor)
        if dialect is None:
            raise _wrong_database(connection.vendor)
        self._connection = connection
        self._table = table
        self._insert = Statements(dialect, table, placeholder="%s").insert()

    def write(self, rows: Rows) -> None:
        """Insert rows with a cursor of Django, inside `transaction.atomic()`."""
        if self._connection.get_autocommit() and not self._connection.in_atomic_block:
            raise _no_transaction("open one with transaction.atomic()")
        with _table_check(modules["django.db"].Error, self._table), self._connection.cursor() as cursor:
            cursor.executemany(self._insert, rows)


class AlchemyTarget(Target):
    """A Connection or Session of SQLAlchemy (also scoped), or its async counterpart."""

    def __init__(self, given: Any, table: str) -> None:
        # A scoped session is a proxy; the class of the session behind it decides whether writing is
        # asynchronous.
        session = given() if type(given).__name__.endswith("scoped_session") else given
        kinds = type(session).__mro__
        self.is_async = any(kind.__module__.startswith("sqlalchemy.ext.asyncio") for kind in kinds)
        self._given = session
        self._is_session = hasattr(session, "get_bind")
        self._table = table

    def check(self) -> None:
        """Raise OutboxError if the connection is closed; a session opens one itself."""
        if not self._is_session and self._given.closed:
            raise OutboxError(f"app.outbox() was given a closed connection ({_kind(self._given)})")

    def write(self, rows: Rows) -> None:
        """Insert rows with SQLAlchemy's `text()`."""
        from sqlalchemy.exc import DBAPIError

        connection = self._given.connection() if self._is_session else self._given
        _check_alchemy(connection)
        with _table_check(DBAPIError, self._table):
            connection.execute(*self._statement(connection.dialect.name, rows))

    async def awrite(self, rows: Rows) -> None:
        """Insert rows through the async connection."""
        from sqlalchemy.exc import DBAPIError

        connection = await self._given.connection() if self._is_session else self._given
        _check_alchemy(connection.sync_connection)
        with _table_check(DBAPIError, self._table):
            await connection.execute(*self._statement(connection.dialect.name, rows))

    def _statement(self, dialect_name: str, rows: Rows) -> tuple[Any, list[dict[str, object]]]:
        from sqlalchemy import text

        dialect = {"postgresql": POSTGRESQL, "sqlite": SQLITE}.get(dialect_name)
        if dialect is None:
            raise _wrong_database(dialect_name)
        insert = Statements(dialect, self._table).insert(":task_id", ":message")
        return text(insert), [{"task_id": task_id, "message": message} for task_id, message in rows]


def check_transaction(driver: Any) -> bool:
    """Raise OutboxError if the row would be committed at once, even if the caller's work is rolled back.

    Returns False for an unknown driver.
    """
    roots = _roots(driver)
    if "sqlite3" in roots:
        mode = getattr(driver, "autocommit", None)  # True, False, or the legacy mode
        commits_itself = mode is True or (mode is not False and driver.isolation_level is None)
        if commits_itself and not driver.in_transaction:
            raise _no_transaction("begin one with BEGIN")
        return True
    if roots.isdisjoint(_DRIVERS):
        return False
    if driver.autocommit and driver.info.transaction_status == _IDLE:
        raise _no_transaction("begin one with connection.transaction(), or turn autocommit off")
    return True


def _check_alchemy(connection: Any) -> None:
    if check_transaction(connection.connection.driver_connection):
        return
    level = connection.get_execution_options().get("isolation_level")
    # A level that was given to create_engine is stored in the dialect only.
    level = level or getattr(connection.dialect, "_on_connect_isolation_level", None)
    if level == "AUTOCOMMIT":
        raise _no_transaction("use another isolation level than AUTOCOMMIT")


def missing_table(error: BaseException, table: str) -> OutboxError | None:
    """The error to raise if the database reports that the table is missing; None for any other error."""
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if state != _UNDEFINED_TABLE and not str(error).startswith("no such table"):
        return None
    return OutboxError(
        f"the table {table} is missing in this database: create it with `umbel outbox create`, or in a "
        "migration with the statements that `umbel outbox sql` prints"
    )


@contextmanager
def _table_check(errors: type[Exception], table: str) -> Iterator[None]:
    """A block that raises OutboxError if the database reports that the table is missing."""
    try:
        yield
    except errors as error:
        # Django and SQLAlchemy wrap the error of the driver.
        reported = getattr(error, "orig", None) or error.__cause__ or error
        if (missing := missing_table(reported, table)) is not None:
            raise missing from reported
        raise


def _roots(connection: Any) -> set[str]:
    """The libraries that the connection's class and its bases come from."""
    return {kind.__module__.partition(".")[0] for kind in type(connection).__mro__}


def _is_closed(connection: Any) -> bool:
    closed = getattr(connection, "closed", None)
    if closed is not None:
        return bool(closed)
    try:
        connection.total_changes  # noqa: B018 (sqlite3 reports a closed connection only on use)
    except connection.ProgrammingError:
        return True
    return False


def _no_transaction(remedy: str) -> OutboxError:
    return OutboxError(
        "the connection of app.outbox() is in autocommit mode and no transaction is open, so the task would "
        f"be sent even if your work is rolled back: {remedy}"
    )


def _wrong_database(name: str) -> OutboxError:
    return OutboxError(f"app.outbox() cannot write to {name}: an outbox is in PostgreSQL or SQLite")


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


# ---- block -----------------------------------------------------------------------------------------


class Block:
    """One outbox block of an app, with the connection that it writes through."""

    def __init__(self, app: object, connection: Any, table: str) -> None:
        self.app = app
        self.outer: Block | None = None  # of another app, around this block
        self.is_open = False
        self._target = target_of(connection, table)
        self._token: Token[Block | None] | None = None

    def write(self, batch: Sequence[Outgoing]) -> None:
        """Insert the messages in the caller's transaction; OutboxError for an async connection."""
        if self._target.is_async:
            raise OutboxError(
                "the connection of this outbox block is asynchronous: use await task.adelay(...), "
                "aapply_async, asend_task or asend_many in it"
            )
        if batch:
            self._target.write(encode_rows(batch))

    async def awrite(self, batch: Sequence[Outgoing]) -> None:
        """Insert the messages in the caller's transaction, awaited where the connection is async."""
        if not batch:
            return
        if self._target.is_async:
            await self._target.awrite(encode_rows(batch))
        else:
            self.write(batch)

    def __enter__(self) -> Self:
        if self._target.is_async:
            raise OutboxError("this connection is asynchronous: write `async with app.outbox(connection):`")
        self._begin()
        return self

    def __exit__(self, *_error: object) -> None:
        self._end()

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._end()

    def _begin(self) -> None:
        if self.is_open or open_block(self.app) is not None:
            raise OutboxError("an outbox block of this app is already open here: send tasks in that one")
        self._target.check()
        self.outer, self.is_open = OPEN.get(), True
        self._token = OPEN.set(self)

    def _end(self) -> None:
        self.is_open = False
        token, self._token = self._token, None
        if token is not None:
            with suppress(ValueError):  # a generator may leave the block in another context
                OPEN.reset(token)
