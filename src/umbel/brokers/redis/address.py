"""Where a Redis server is: from a URL to an address.

    redis://[user][:password@]host[:port][/database]      rediss:// is the same over TLS
    unix://[user][:password@]/path/of/the/socket?db=0
    sentinel://[user][:password@]host[:port][/database]?master_name=NAME     sentinels:// is the same over TLS

Several URLs with `;` between them are tried in turn, the next one when the last one fails. Options after `?`
are db; with TLS those of `brokers/tls.py`; for a sentinel also `sentinel_username` and `sentinel_password`.
These are its own login, while user and password are for the server that it names. A `master_name` in one of
the URLs is enough for all.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

from umbel.brokers.tls import TLS_OPTIONS, option_problem, tls_context
from umbel.errors import BadURL
from umbel.text import SEVERAL_HOSTS, several_hosts

if TYPE_CHECKING:
    import ssl

SENTINELS = ("sentinel", "sentinels")
SCHEMES = ("redis", "rediss", "unix", *SENTINELS)
DEFAULT_PORT = 6379
SENTINEL_PORT = 26379

_DATABASE_OPTIONS = ("db", "virtual_host")  # the second is Celery's name for the first
_SENTINEL_OPTIONS = ("master_name", "sentinel_username", "sentinel_password")
_NO_MASTER = "it does not name its master; write sentinel://host:26379/0?master_name=NAME"


@dataclass(frozen=True, slots=True)
class Address:
    """One server or sentinel, and how to log in there."""

    host: str = "localhost"
    port: int = DEFAULT_PORT
    path: str = ""  # of a Unix socket, and then host and port are ignored
    database: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    tls: bool = False
    tls_options: tuple[tuple[str, str], ...] = ()
    client_name: str = "umbel"
    master: str = ""  # the name of this server, whose place the sentinel at host and port knows
    sentinel_login: tuple[str, str] = field(default=("", ""), repr=False)
    is_sentinel: bool = False

    @property
    def shown(self) -> str:
        """The address for log lines and errors, never with the password."""
        place = self.path or f"{self.host}:{self.port}"
        if self.master:
            return f"{self.master} (by the sentinel at {place})"
        return f"{place} (named by a sentinel)" if self.is_sentinel else place

    @property
    def schemes(self) -> tuple[str, str]:
        """The schemes of such an address without TLS and with it."""
        return ("sentinel://", "sentinels://") if self.is_sentinel else ("redis://", "rediss://")

    @property
    def place(self) -> tuple[str, int, str, int]:
        """Equal for two addresses of the same database, as far as their text shows."""
        host = "localhost" if self.host in ("127.0.0.1", "::1") else self.host
        if self.master:
            return (self.master, 0, "sentinel", self.database)
        return ("", 0, self.path, self.database) if self.path else (host, self.port, "", self.database)

    def tls_context(self) -> "ssl.SSLContext | None":
        """The TLS context for this server, or None without TLS; AccessRefused if a file cannot be used."""
        return tls_context(dict(self.tls_options), where=f"Redis at {self.shown}") if self.tls else None


def parse_addresses(urls: str, client_name: str = "umbel") -> tuple[Address, ...]:
    """The servers that the text names, in the order in which they are tried."""
    each = [parse_address(url.strip()) for url in urls.split(";") if url.strip()]
    found = tuple(replace(address, client_name=client_name) for address in each)
    if not found:
        raise BadURL(urls, "it contains no server")
    if len({address.database for address in found}) > 1:
        raise BadURL(urls, "all servers of a fail-over must have the same database number")
    return _with_masters(urls, found)


def _with_masters(urls: str, found: tuple[Address, ...]) -> tuple[Address, ...]:
    masters = {address.master for address in found if address.master}
    if not any(address.is_sentinel for address in found):
        return found
    if not all(address.is_sentinel for address in found):
        raise BadURL(urls, "sentinels and servers cannot be mixed; name the sentinels only")
    if len(masters) != 1:
        raise BadURL(urls, "the sentinels name different masters; name one" if masters else _NO_MASTER)
    (master,) = masters
    return tuple(replace(address, master=master) for address in found)


def parse_address(url: str) -> Address:
    """The server of one URL; BadURL says what is wrong with it."""
    if "#" in url:
        raise BadURL(url, "it contains a '#'; in a password, write it as %23")
    if several_hosts(url):
        raise BadURL(url, SEVERAL_HOSTS)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its text may contain a part of the password
        problem = (
            "the port is not a number up to 65535, or the password has a '/', '?' or '@', which must be "
            "written as %2F, %3F or %40"
        )
        raise BadURL(url, f"{problem}; write redis://host:port/database") from None
    if parts.scheme not in SCHEMES or not url.startswith(f"{parts.scheme}://"):
        raise BadURL(url, "write redis://host:port/database, rediss://…, sentinel://… or unix:///path?db=0")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    tls = parts.scheme in ("rediss", "sentinels")
    is_sentinel = parts.scheme in SENTINELS
    _check_options(url, options, tls=tls, is_sentinel=is_sentinel)
    is_socket = parts.scheme == "unix"
    if is_socket and (parts.hostname or not parts.path):
        raise BadURL(url, "the address of a socket has three slashes: unix:///path/of/the/socket?db=0")
    return Address(
        host=parts.hostname or "localhost",
        port=port if port is not None else SENTINEL_PORT if is_sentinel else DEFAULT_PORT,
        path=unquote(parts.path) if is_socket else "",
        database=_database(url, "" if is_socket else parts.path, options),
        username=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        tls=tls,
        tls_options=tuple(sorted((name, value) for name, value in options.items() if name in TLS_OPTIONS)),
        master=options.get("master_name", ""),
        sentinel_login=(options.get("sentinel_username", ""), options.get("sentinel_password", "")),
        is_sentinel=is_sentinel,
    )


def _check_options(url: str, options: dict[str, str], *, tls: bool, is_sentinel: bool) -> None:
    own = _SENTINEL_OPTIONS if is_sentinel else ()
    known = (*_DATABASE_OPTIONS, *own, *(TLS_OPTIONS if tls else ()))
    for name in options:
        if name not in known:
            raise BadURL(url, f"unknown option {name!r}; known here: {', '.join(known)}")
    if problem := option_problem(options):
        raise BadURL(url, problem)


def _database(url: str, path: str, options: dict[str, str]) -> int:
    given = path.strip("/")
    for name in _DATABASE_OPTIONS:
        given = options.get(name, given)
    if not given:
        return 0
    if not given.isascii() or not given.isdigit():
        raise BadURL(url, f"the database {given!r} is not a number; use 0, 1, 2, …")
    return int(given)
