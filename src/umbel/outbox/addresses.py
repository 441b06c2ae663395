"""Addresses: which database an outbox is in, and the lease of who publishes it.

Two workers that name the same database in the same way compete for one lease. A database that is named in
two ways (`localhost`, `127.0.0.1`) has two, and its rows may be published twice, under the same ids.
"""

from dataclasses import dataclass
from hashlib import sha256
from urllib.parse import unquote, urlsplit

from umbel.errors import BadURL
from umbel.outbox.dialects import POSTGRESQL, SQLITE, Dialect
from umbel.urls import without_password

LEASE_PREFIX = "outbox."
_POSTGRES_PORT = 5432
_SCHEMES = {"postgresql": POSTGRESQL, "postgres": POSTGRESQL, "sqlite": SQLITE}


@dataclass(frozen=True, slots=True, repr=False)
class Address:
    """`target`: what the database's library is given: a file, or an address with its password."""

    dialect: Dialect
    target: str
    shown: str
    identity: str

    def lease(self, table: str) -> str:
        return LEASE_PREFIX + sha256(f"{self.identity} {table}".encode()).hexdigest()[:12]

    def __repr__(self) -> str:
        return f"Address({self.shown!r})"


def parse_address(url: str) -> Address:
    """`postgresql://…` (a driver after a plus is ignored) or `sqlite:////path/to/file`."""
    scheme, slashes, rest = url.partition("://")
    dialect = _SCHEMES.get(scheme.partition("+")[0])
    if not slashes or dialect is None:
        raise BadURL(url, "an outbox is in PostgreSQL (postgresql://...) or SQLite (sqlite:///file)")
    if dialect is SQLITE:
        path = unquote(rest.partition("?")[0]).removeprefix("/")
        if not path or path == ":memory:":
            raise BadURL(url, "name the file: sqlite:///relative.db or sqlite:////absolute.db")
        return Address(SQLITE, path, f"sqlite:///{path}", f"sqlite {path}")
    target = f"postgresql://{rest}"
    return Address(POSTGRESQL, target, without_password(target), _place(url, target))


def _place(url: str, target: str) -> str:
    """The same for every spelling of user, password and options."""
    try:
        parts = urlsplit(target)
        hosts = parts.netloc.rpartition("@")[2].lower()
    except ValueError as error:
        raise BadURL(url, str(error)) from None
    with_ports = [one if ":" in one else f"{one}:{_POSTGRES_PORT}" for one in hosts.split(",")]
    query = "" if hosts else parts.query  # a socket's directory, a service
    return f"postgresql {','.join(with_ports)}{parts.path} {query}".strip()
