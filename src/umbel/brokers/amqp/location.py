"""Location: which broker an address means.

`amqp://user:password@host:port/vhost`, as Celery reads it: the path is the virtual host, percent
encoded; none, or `//` at the end, is the host `/`. `amqps://` speaks TLS, with the options of
`brokers/tls.py` after a `?`. Several addresses joined by `;` are tried in turn.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

from umbel.brokers.tls import TLS_OPTIONS, option_problem, tls_context
from umbel.errors import BadURL
from umbel.urls import SEVERAL_HOSTS, several_hosts

if TYPE_CHECKING:
    import ssl

SCHEMES = {"amqp": 5672, "pyamqp": 5672, "amqps": 5671}


@dataclass(frozen=True, slots=True)
class Location:
    host: str
    port: int
    vhost: str
    user: str
    password: str
    tls: bool
    tls_options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        scheme = "amqps" if self.tls else "amqp"
        return f"{scheme}://{self.user}@{self.host}:{self.port}, virtual host {self.vhost!r}"

    def tls_context(self) -> "ssl.SSLContext | None":
        return tls_context(dict(self.tls_options), where=f"RabbitMQ at {self}") if self.tls else None


def locations_from_url(url: str) -> list[Location]:
    return [_location(part.strip()) for part in url.split(";") if part.strip()]


def _location(url: str) -> Location:
    if several_hosts(url):
        raise BadURL(url, SEVERAL_HOSTS)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its text may hold a part of the password
        problem = (
            "the port is not a number up to 65535, or the password has a '/', '?' or '@', which must be "
            "written as %2F, %3F or %40"
        )
        raise BadURL(url, f"{problem}; write amqp://user:password@host:port/vhost") from None
    if parts.scheme not in SCHEMES:
        raise BadURL(url, "a RabbitMQ address starts with amqp:// or amqps://")
    if not parts.netloc:
        raise BadURL(url, "two slashes and a host must follow the scheme, as in amqp://localhost")
    if parts.fragment:
        raise BadURL(url, "it contains a '#'; in a password, write it as %23")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    _check_options(url, options, tls=parts.scheme == "amqps")
    if port == 0:
        raise BadURL(url, "port 0 cannot be connected to")
    return Location(
        host=parts.hostname or "localhost",
        port=port or SCHEMES[parts.scheme],
        vhost=unquote(parts.path[1:]) or "/",
        user=unquote(parts.username or "guest"),
        password=unquote(parts.password or "guest"),
        tls=parts.scheme == "amqps",
        tls_options=tuple(sorted(options.items())),
    )


def _check_options(url: str, options: dict[str, str], *, tls: bool) -> None:
    known = TLS_OPTIONS if tls else ()
    for name in options:
        if name not in known:
            remedy = f"known here: {', '.join(known)}" if known else "amqp:// has none"
            raise BadURL(url, f"unknown option {name!r}; {remedy}")
    if problem := option_problem(options):
        raise BadURL(url, problem)
