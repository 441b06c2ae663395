"""Databases with an outbox, for tests: a SQLite file, or a database of the shared PostgreSQL server."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from umbel.outbox.database import OutboxDatabase, parse_address
from umbel.outbox.table import DEFAULT_TABLE, decode_row
from umbel.wire.message import Outgoing


@dataclass(frozen=True)
class Place:
    url: str

    @property
    def is_sqlite(self) -> bool:
        return self.url.startswith("sqlite")

    @contextmanager
    def connection(self) -> Iterator[Any]:
        """As an application has it: a transaction begins with the first statement."""
        path = self.url.removeprefix("sqlite:///")
        made: Any = sqlite3.connect(path) if self.is_sqlite else psycopg.connect(self.url)
        try:
            yield made
        finally:
            made.close()

    def database(self) -> OutboxDatabase:
        return OutboxDatabase(parse_address(self.url), DEFAULT_TABLE)

    def create(self) -> None:
        database = self.database()
        database.create()
        database.close()

    def written(self) -> list[Outgoing]:
        """What is committed, in order."""
        with self.connection() as connection:
            rows = connection.execute(f"SELECT message FROM {DEFAULT_TABLE} ORDER BY id").fetchall()
        return [decode_row(bytes(message)) for (message,) in rows]

    def ids(self) -> list[str]:
        return [one.message.correlation_id for one in self.written()]

    def run(self, statement: str, *values: object) -> None:
        """A statement with `?` for its values, committed."""
        with self.connection() as connection:
            mark = statement if self.is_sqlite else statement.replace("?", "%s")
            connection.execute(mark, values)
            connection.commit()
