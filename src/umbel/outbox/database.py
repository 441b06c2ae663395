"""Database: the address of an outbox, the name of its relay's lease, and the relay's connection.

Workers that name the same database in the same way compete for one lease. A file, a socket and a loopback
address mean another database on every host, so the host is part of their lease. A database that is named in
two ways (`db`, `db.example.com`) has two leases, and its rows may be published twice, under the same ids.

Every call of `OutboxDatabase` blocks, and is one statement or one short transaction. No transaction is open
while the relay waits for the broker, so rows of users are locked no longer than a delete takes. A connection
is closed after an error, and the next call opens another.
"""

import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from ipaddress import ip_address
from itertools import zip_longest
from os import environ
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from umbel.errors import BadURL, ConfigurationError, OutboxUnavailable
from umbel.outbox.block import missing_table
from umbel.outbox.table import POSTGRESQL, SQLITE, Dialect, Problem, Statements, StoredRow
from umbel.text import without_password

# ---- addresses -------------------------------------------------------------------------------------

LEASE_PREFIX = "outbox."
UNREADABLE = (
    "PostgreSQL cannot read it: it is postgresql://user:password@host:port/database?parameter=value, with "
    "parameters of libpq, and in the password % is written as %25, @ as %40, / as %2F, & as %26"
)
_POSTGRES_PORT = "5432"
_SCHEMES = {"postgresql": POSTGRESQL, "postgres": POSTGRESQL, "sqlite": SQLITE}
_BAD_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})|%00")
_HOST = re.compile(r"\[(?P<v6>[^\]]*)\](?::(?P<v6_port>.*))?|(?P<name>[^:]*)(?::(?P<port>.*))?")


class Address(msgspec.Struct, frozen=True):
    """The address of an outbox. `target` is for the driver: a file, or a URL with its password."""

    dialect: Dialect
    target: str
    shown: str
    identity: str

    def lease(self, table: str) -> str:
        """The name of the lease for which workers with this outbox compete."""
        return LEASE_PREFIX + sha256(f"{self.identity} {table}".encode()).hexdigest()[:12]

    def __repr__(self) -> str:
        return f"Address({self.shown!r})"


def parse_address(url: str) -> Address:
    """Parse `postgresql://…` (a driver after a plus is ignored) or `sqlite:////path/to/file`; BadURL
    otherwise.
    """
    scheme, slashes, rest = url.partition("://")
    dialect = _SCHEMES.get(scheme.partition("+")[0])
    if not slashes or dialect is None:
        raise BadURL(url, "an outbox is in PostgreSQL (postgresql://...) or SQLite (sqlite:///file)")
    if dialect is SQLITE:
        path = unquote(rest.partition("?")[0]).removeprefix("/")
        if not path or path == ":memory:":
            raise BadURL(url, "name the file: sqlite:///relative.db or sqlite:////absolute.db")
        return Address(SQLITE, path, f"sqlite:///{path}", f"sqlite {socket.gethostname()} {path}")
    target = f"postgresql://{rest}"
    return Address(POSTGRESQL, target, without_password(target), _place(url, target))


def _place(url: str, target: str) -> str:
    """The identity of a PostgreSQL database: the same for every spelling of user, password and options."""
    try:
        parts = urlsplit(target)
        _, at, hosts = parts.netloc.rpartition("@")
    except ValueError:  # its text may contain the password
        raise BadURL(url, UNREADABLE) from None
    if _BAD_ESCAPE.search(target) or parts.netloc.count("@") > len(at) or "@" in parts.path:
        raise BadURL(url, UNREADABLE)
    given = dict(parse_qsl(parts.query))
    servers = _servers(hosts, given)
    database = given.get("dbname") or unquote(parts.path.removeprefix("/"))
    service = given.get("service", "")
    named = ",".join(f"{host}:{port}" for host, port in servers)
    # With a service and no host, libpq reads the host from the service file.
    addresses = [given.get("hostaddr") or host for host, _ in servers if host or not service]
    here = socket.gethostname() if any(map(_is_local, addresses)) else ""
    return " ".join(filter(None, ("postgresql", here, named, database, service and f"service={service}")))


def _servers(hosts: str, given: Mapping[str, str]) -> list[tuple[str, str]]:
    """Host and port of each server. An empty host means the local server, by its socket."""
    found = [_server(unquote(server)) for server in hosts.split(",")]
    named = given.get("host") or (not hosts and (given.get("hostaddr") or environ.get("PGHOST")))
    if named:
        found = [(_canonical(server), "") for server in named.split(",")]
    ports = given.get("port", "").split(",")
    filled = zip_longest(found, ports[: len(found)], fillvalue=ports[0] if len(ports) == 1 else "")
    return [(server[0], other or server[1] or _POSTGRES_PORT) for server, other in filled]


def _server(text: str) -> tuple[str, str]:
    if text.startswith("/"):
        return text, ""
    found = _HOST.fullmatch(text)
    if found is None:
        return text, ""
    host, port = found["v6"] or found["name"], found["v6_port"] or found["port"]
    return _canonical(host or ""), port or ""


def _canonical(host: str) -> str:
    return host if host.startswith(("/", "@")) else host.lower()


def _is_local(host: str) -> bool:
    """Whether it is a socket (a directory, or an abstract name) or a loopback address."""
    if not host or host.startswith(("/", "@")) or host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


# ---- the relay's connection ------------------------------------------------------------------------

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
    """A row that cannot be published, with the reason."""

    row_id: int
    task_id: str
    problem: str


class OutboxDatabase:
    """The relay's connection. Calls come from several threads, and run one after another."""

    def __init__(self, address: Address, table: str) -> None:
        self.address = address
        self._table = table
        self._sql = Statements(address.dialect, table)
        self._connection: Any = None
        self._turn = Lock()

    def create(self) -> bool:
        """Create the table and a missing file; returns whether the file is new."""
        is_new = self.address.dialect is SQLITE and _is_missing(self.address.target)
        with self._session(may_create=True) as execute:
            for statement in self._sql.create():
                execute(statement)
        return is_new

    def fetch(self, rows_max: int = ROWS_MAX, bytes_max: int = BYTES_MAX) -> list[StoredRow]:
        """The next committed rows by id, as many as fit; a row above the limit comes alone."""
        with self._session() as execute:
            found = execute(self._sql.fetch(), (rows_max, bytes_max)).fetchall()
        return [StoredRow(row_id, message or b"") for row_id, message in found]

    def settle(self, published: Sequence[int], problems: Sequence[Problem] = ()) -> None:
        """Delete the published rows and set the unpublishable ones aside, in one transaction."""
        with self._session() as execute:
            execute("BEGIN")
            if published:
                execute(self._sql.remove(), (self._ids(published),))
            for problem in problems:
                execute(self._sql.set_aside(), (problem.why, problem.row_id))
            execute("COMMIT")

    def retry(self) -> int:
        """Let rows that were set aside be published again; returns how many."""
        with self._session() as execute:
            count: int = execute(self._sql.retry()).rowcount
        return count

    def counts(self) -> OutboxCounts:
        """How many rows wait and are set aside, and the age of the oldest."""
        with self._session() as execute:
            waiting, oldest_s, set_aside = execute(self._sql.counts()).fetchone()
        return OutboxCounts(waiting, None if oldest_s is None else max(0.0, oldest_s), set_aside)

    def problems(self) -> list[SetAside]:
        """The first rows that were set aside, at most PROBLEMS_SHOWN."""
        with self._session() as execute:
            return [SetAside(*row) for row in execute(self._sql.problems(), (PROBLEMS_SHOWN,)).fetchall()]

    def close(self) -> None:
        """Close the connection; the next call opens another."""
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
    """Raise ConfigurationError if PostgreSQL lacks psycopg, and BadURL if psycopg cannot read the address."""
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
    except psycopg.Error:  # its text may contain the password
        raise BadURL(address.target, UNREADABLE) from None


def _is_missing(path: str) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        return True
    except OSError:  # no permission, which SQLite reports better
        return False
    return False


def _connect_file(address: Address, *, may_create: bool) -> Any:
    import sqlite3

    path = Path(address.target).absolute()
    lacking = "folder" if may_create else "file"
    if _is_missing(str(path.parent if may_create else path)):
        remedy = "create it" if may_create else "create it with `umbel outbox create`"
        raise OutboxUnavailable(
            f"outbox {address.shown}: the {lacking} does not exist: {remedy}, or correct `outbox`"
        )
    # A new, empty file would hide a wrong address. Calls of the relay come from several threads.
    uri = f"{path.as_uri()}?mode={'rwc' if may_create else 'rw'}"
    made = sqlite3.connect(uri, uri=True, timeout=CONNECT_S, isolation_level=None, check_same_thread=False)
    made.text_factory = partial(str, encoding="utf-8", errors="replace")  # the task's id is only shown
    return made


def _connect(address: Address, *, may_create: bool) -> Any:
    if address.dialect is SQLITE:
        return _connect_file(address, may_create=may_create)
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    given = conninfo_to_dict(address.target)
    limits = " ".join(f"-c {name}={STATEMENT_S * 1000}" for name in _LIMITS)
    options = f"{limits} {given.pop('options', '')}".strip()
    # Connection poolers may not support prepared statements.
    return psycopg.connect(
        autocommit=True, prepare_threshold=None, options=options, **{**_CONNECTING, **given}
    )


def _errors_of(address: Address) -> type[Exception]:
    if address.dialect is SQLITE:
        import sqlite3

        return sqlite3.Error
    import psycopg

    return psycopg.Error
