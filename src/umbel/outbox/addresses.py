"""Addresses: which database an outbox is in, and the lease of who publishes it.

Workers that name the same database in the same way compete for one lease. A file, a socket and a loopback
address mean another database on every host, so the host is part of their lease. A database that is
named in two ways (`db`, `db.example.com`) has two, and its rows may be published twice, under the same ids.
"""

import re
import socket
from collections.abc import Mapping
from hashlib import sha256
from ipaddress import ip_address
from itertools import zip_longest
from os import environ
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from umbel.errors import BadURL
from umbel.outbox.dialects import POSTGRESQL, SQLITE, Dialect
from umbel.urls import without_password

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
        return Address(SQLITE, path, f"sqlite:///{path}", f"sqlite {socket.gethostname()} {path}")
    target = f"postgresql://{rest}"
    return Address(POSTGRESQL, target, without_password(target), _place(url, target))


def _place(url: str, target: str) -> str:
    """The same for every spelling of user, password and options."""
    try:
        parts = urlsplit(target)
        _, at, hosts = parts.netloc.rpartition("@")
    except ValueError:  # its text may quote the password
        raise BadURL(url, UNREADABLE) from None
    if _BAD_ESCAPE.search(target) or parts.netloc.count("@") > len(at) or "@" in parts.path:
        raise BadURL(url, UNREADABLE)
    given = dict(parse_qsl(parts.query))
    servers = _servers(hosts, given)
    database = given.get("dbname") or unquote(parts.path.removeprefix("/"))
    service = given.get("service", "")
    named = ",".join(f"{host}:{port}" for host, port in servers)
    # A service without a host: its file names the host.
    addresses = [given.get("hostaddr") or host for host, _ in servers if host or not service]
    here = socket.gethostname() if any(map(_is_local, addresses)) else ""
    return " ".join(filter(None, ("postgresql", here, named, database, service and f"service={service}")))


def _servers(hosts: str, given: Mapping[str, str]) -> list[tuple[str, str]]:
    """Host and port of each. An empty host: the socket of this host's own server."""
    found = [_server(unquote(one)) for one in hosts.split(",")]
    named = given.get("host") or (not hosts and (given.get("hostaddr") or environ.get("PGHOST")))
    if named:
        found = [(_canonical(one), "") for one in named.split(",")]
    ports = given.get("port", "").split(",")
    filled = zip_longest(found, ports[: len(found)], fillvalue=ports[0] if len(ports) == 1 else "")
    return [(one[0], other or one[1] or _POSTGRES_PORT) for one, other in filled]


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
    """A socket (a directory, or an abstract name) or an address of the loopback."""
    if not host or host.startswith(("/", "@")) or host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
