"""Address: which project an address means, and where its Pub/Sub is.

`gcpubsub://projects/NAME`, as Celery writes it. `PUBSUB_EMULATOR_HOST` leads to an emulator, as for
Google's own libraries. Options after a `?`: `exactly_once=true`, and `endpoint=https://HOST` for a
regional one.
"""

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from umbel.brokers.tls import tls_context
from umbel.errors import BadURL

if TYPE_CHECKING:
    import ssl

SCHEME = "gcpubsub"
EMULATOR_VARIABLE = "PUBSUB_EMULATOR_HOST"
GOOGLE = "pubsub.googleapis.com"
OPTIONS = ("exactly_once", "endpoint")
_FORM = "write gcpubsub://projects/NAME"
_PROJECT = re.compile(r"[a-z0-9][a-z0-9.:-]{0,62}")


@dataclass(frozen=True, slots=True)
class Address:
    project: str
    host: str
    port: int
    tls: bool
    is_emulator: bool
    exactly_once: bool = False

    def __str__(self) -> str:
        return f"{self.host}:{self.port}, project {self.project!r}"

    @property
    def authority(self) -> str:
        return self.host if self.tls and self.port == 443 else f"{self.host}:{self.port}"

    def tls_context(self) -> "ssl.SSLContext | None":
        return tls_context({}, where=f"Pub/Sub at {self}") if self.tls else None


def address_from_url(url: str) -> Address:
    parts = urlsplit(url)
    if parts.scheme != SCHEME or parts.netloc != "projects":
        raise BadURL(url, f"a Pub/Sub address names a project: {_FORM}")
    project = parts.path.strip("/")
    if not _PROJECT.fullmatch(project):
        raise BadURL(url, f"{project!r} is no project id; {_FORM}")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in options:
        if name not in OPTIONS:
            raise BadURL(url, f"unknown option {name!r}; known here: {', '.join(OPTIONS)}")
    once = options.get("exactly_once", "false").lower()
    if once not in ("true", "false"):
        raise BadURL(url, f"exactly_once is {once!r}: write true or false")
    emulator = os.environ.get(EMULATOR_VARIABLE, "")
    if emulator:
        host, port = _host_and_port(url, emulator.removeprefix("http://"), EMULATOR_VARIABLE, 8085)
        return Address(project, host, port, False, True, once == "true")
    endpoint = options.get("endpoint", f"https://{GOOGLE}")
    scheme, slashes, place = endpoint.partition("://")
    if not slashes or scheme not in ("https", "http"):
        raise BadURL(url, f"the endpoint is {endpoint!r}: write https://HOST")
    tls = scheme == "https"
    host, port = _host_and_port(url, place.rstrip("/"), "endpoint", 443 if tls else 80)
    return Address(project, host, port, tls, False, once == "true")


def _host_and_port(url: str, text: str, what: str, port: int) -> tuple[str, int]:
    host, colon, number = text.rpartition(":")
    if not colon:
        return text, port
    if not host or not number.isdecimal() or not 0 < int(number) < 65536:
        raise BadURL(url, f"{what} is {text!r}: write HOST:PORT")
    return host.strip("[]"), int(number)
