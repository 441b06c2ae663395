"""HTTP: the address of the service, one request and its answer as bytes, what an answer means, and access
tokens.

Pure but for the token, which google-auth fetches; that library is imported when a token is first needed. The
asynchronous link and the blocking one both use it.
"""

import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import msgspec

from umbel.brokers.tls import tls_context, tls_refusal
from umbel.errors import AccessRefused, BadURL, BrokerError, BrokerRefused, BrokerSilent, BrokerUnavailable

if TYPE_CHECKING:
    import ssl


# ---- address ---------------------------------------------------------------------------------------

SCHEME = "gcpubsub"
EMULATOR_VARIABLE = "PUBSUB_EMULATOR_HOST"
GOOGLE = "pubsub.googleapis.com"
OPTIONS = ("exactly_once", "endpoint")
_FORM = "write gcpubsub://projects/NAME"
_PROJECT = re.compile(r"[a-z0-9][a-z0-9.:-]{0,62}")


@dataclass(frozen=True, slots=True)
class Address:
    """A project, and the server to reach it: Google's, a regional endpoint, or an emulator.

    `gcpubsub://projects/NAME`, as Celery writes it. `PUBSUB_EMULATOR_HOST` leads to an emulator, as for
    Google's own libraries. Options after a `?`: `exactly_once=true`, and `endpoint=https://HOST` for a
    regional endpoint.
    """

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
        """Host and port for the HTTP header, without the default port."""
        return self.host if self.tls and self.port == 443 else f"{self.host}:{self.port}"

    def tls_context(self) -> "ssl.SSLContext | None":
        """Return the TLS settings with the system's certificates; None without TLS."""
        return tls_context({}, where=f"Pub/Sub at {self}") if self.tls else None


def address_from_url(url: str) -> Address:
    """Return the address in a URL; raise BadURL with what to write instead."""
    parts = urlsplit(url)
    if parts.scheme != SCHEME or parts.netloc != "projects":
        raise BadURL(url, f"a Pub/Sub address names a project: {_FORM}")
    project = parts.path.strip("/")
    if not _PROJECT.fullmatch(project):
        raise BadURL(url, f"{project!r} is not a project id; {_FORM}")
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


# ---- http ------------------------------------------------------------------------------------------

REPLY_S = 30.0
READ_BYTES = 256 * 1024  # at once
HEAD_MAX_BYTES = 64 * 1024
ANSWER_MAX_BYTES = 64 * 2**20  # a pull of 10 MB, in base64, is 14 MB
_END = b"\r\n\r\n"


class Call(msgspec.Struct, frozen=True, gc=False):
    """One request. `what` describes it in error texts."""

    verb: str
    path: str
    body: bytes
    what: str
    within_s: int | None = None  # how long the emulator may take to answer


class Answer(msgspec.Struct, frozen=True, gc=False):
    """One answer of the server, complete."""

    status: int
    body: bytes
    keeps_open: bool  # the connection can be used again


def encode_request(call: Call, address: Address, token: str) -> bytes:
    """Encode a request; the token may be empty."""
    lines = [
        f"{call.verb} {call.path} HTTP/1.1",
        f"host: {address.authority}",
        "accept: application/json",
        "content-type: application/json",
        f"content-length: {len(call.body)}",
    ]
    if call.within_s is not None:
        lines.append(f"grpc-timeout: {call.within_s}S")
    if token:
        lines.append(f"authorization: Bearer {token}")
    return "\r\n".join(lines).encode() + _END + call.body


class AnswerReader:
    """Reads one answer from the bytes that arrive.

    An answer has a length or comes in chunks; one with neither ends with the connection. An answer larger
    than ANSWER_MAX_BYTES is an error.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self._head: tuple[int, dict[str, str]] | None = None
        self._chunks: list[bytes] = []

    def feed(self, data: bytes) -> Answer | None:
        """Return the answer if these bytes complete it; raise BrokerUnavailable for bytes that are not such
        an answer.
        """
        self._data += data
        if self._head is None:
            place = self._data.find(_END)
            if place < 0:
                if len(self._data) > HEAD_MAX_BYTES:
                    raise _not_http("a head without an end")
                return None
            self._head = _read_head(bytes(self._data[:place]))
            del self._data[: place + len(_END)]
        if len(self._data) > ANSWER_MAX_BYTES:
            raise _not_http(f"more than {ANSWER_MAX_BYTES} bytes")
        headers = self._head[1]
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return self._done(b"".join(self._chunks)) if self._read_chunks() else None
        length = headers.get("content-length")
        if length is not None:
            wanted = _number(length, 10)
            return self._done(bytes(self._data[:wanted])) if len(self._data) >= wanted else None
        return None

    def end(self) -> Answer | None:
        """Return the answer when the connection has ended, if it has no length; None if the answer is cut
        off.
        """
        if self._head is None or {"content-length", "transfer-encoding"} & self._head[1].keys():
            return None
        return Answer(self._head[0], bytes(self._data), keeps_open=False)

    def _read_chunks(self) -> bool:
        while (place := self._data.find(b"\r\n")) >= 0:
            size = _number(bytes(self._data[:place]).split(b";")[0].decode("latin-1"), 16)
            ends = place + 2 + size + 2
            if len(self._data) < ends:
                return False
            if not size:
                return True
            self._chunks.append(bytes(self._data[place + 2 : ends - 2]))
            if sum(map(len, self._chunks)) > ANSWER_MAX_BYTES:
                raise _not_http(f"more than {ANSWER_MAX_BYTES} bytes")
            del self._data[:ends]
        return False

    def _done(self, body: bytes) -> Answer:
        assert self._head is not None
        status, headers = self._head
        return Answer(status, body, keeps_open=headers.get("connection", "").lower() != "close")


def _read_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1."):
        raise _not_http(first[:80])
    pairs = (line.partition(":") for line in lines)
    return _number(rest[:3], 10), {name.strip().lower(): value.strip() for name, _, value in pairs}


def _number(text: str, base: int) -> int:
    try:
        number = int(text.strip(), base)
    except ValueError:
        number = -1
    if number < 0:
        raise _not_http(text[:80])
    return number


def _not_http(what: str) -> BrokerUnavailable:
    return BrokerUnavailable(f"the server does not answer as Pub/Sub does ({what!r}); check the address")


# ---- refusals --------------------------------------------------------------------------------------

_PERMANENT = "PERMANENT_FAILURE"


class NotFound(BrokerRefused):
    """The topic or subscription does not exist."""


class AlreadyExists(BrokerRefused):
    """The topic or subscription exists already."""


class AcksRefused(BrokerRefused):
    """An exactly-once subscription reports which acknowledgements were too late; the others counted."""

    def __init__(self, message: str, late: frozenset[str], again: frozenset[str]) -> None:
        super().__init__(message)
        self.late = late
        self.again = again


class _Detail(msgspec.Struct, frozen=True):
    metadata: Mapping[str, str] = {}


class _Error(msgspec.Struct, frozen=True):
    message: str = ""
    status: str = ""
    details: list[Any] = []


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error = _Error()


_decode = msgspec.json.Decoder(_ErrorBody).decode


def body_of(answer: Answer, call: Call, address: Address) -> bytes:
    """Return the body of a successful answer; any other answer raises a BrokerError."""
    if answer.status >= 300:
        raise error_of(answer, address, call.what)
    return answer.body


def error_of(answer: Answer, address: Address, what: str) -> BrokerError:
    """Return the error for an answer that is not a success; `what` names the request."""
    try:
        error = _decode(answer.body).error
    except msgspec.DecodeError:
        error = _Error(answer.body[:200].decode(errors="replace"))
    where, text = f"Pub/Sub at {address}", error.message or f"status {answer.status}"
    match answer.status:
        case 401:
            return AccessRefused(f"{where} does not accept these credentials: {text}")
        case 403:
            return AccessRefused(
                f"{where} does not permit {what}: {text}; grant roles/pubsub.editor to this account"
            )
        case 404:
            return NotFound(f"{where} does not have {what}: {text}")
        case 409:
            return AlreadyExists(f"{where} has {what} already")
        case 429:
            return BrokerUnavailable(f"{where} is at its quota ({what}): {text}; raise the quota")
        case status if 400 <= status < 499 and status != 408:
            failures = _ack_failures(error)
            if failures:
                late = frozenset(ack_id for ack_id, why in failures.items() if why.startswith(_PERMANENT))
                return AcksRefused(f"{where} refused: {text}", late, frozenset(failures) - late)
            return BrokerRefused(f"{where} refused {what}: {text}")
    return BrokerUnavailable(f"{where} cannot do {what} now: {text} ({answer.status})")


def unreachable(address: Address, problem: BaseException, timeout_s: float) -> BrokerUnavailable:
    """Return the error for a connection that cannot be opened or does not answer, with what to check."""
    where = f"cannot reach Pub/Sub at {address}"
    check = f"check {EMULATOR_VARIABLE}" if address.is_emulator else "check network and endpoint"
    if isinstance(problem, TimeoutError):
        return BrokerSilent(f"{where}: no answer within {timeout_s:g} s; {check}")
    if isinstance(problem, ConnectionRefusedError):
        return BrokerUnavailable(f"{where}: connection refused; {check}")
    if address.tls and (refused := tls_refusal(where, problem, {})) is not None:
        return refused
    return BrokerUnavailable(f"{where}: {str(problem) or type(problem).__name__}; {check}")


def cut_off(address: Address) -> BrokerUnavailable:
    """Return the error for a connection that ended before its answer was complete."""
    return BrokerUnavailable(f"Pub/Sub at {address} closed the connection before it answered")


def _ack_failures(error: _Error) -> dict[str, str]:
    """Return why acknowledgements failed, by their ids; only an exactly-once subscription tells."""
    failures: dict[str, str] = {}
    for detail in error.details:
        try:
            found = msgspec.convert(detail, _Detail).metadata
        except msgspec.ValidationError:
            continue
        failures |= {name: why for name, why in found.items() if "_FAILURE_" in why}
    return failures


# ---- tokens ----------------------------------------------------------------------------------------

SCOPE = "https://www.googleapis.com/auth/pubsub"


class Tokens:
    """The access token for one address, fetched again when it expires.

    Google's own library finds the credentials as everywhere: GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth
    application-default login`, or the account of the machine. Fetching a token blocks, so an event loop
    fetches it in a thread. The lock is re-entrant, because a signal handler may interrupt a fetch and send.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._credentials: Any = None
        self._lock = threading.RLock()

    @property
    def known(self) -> str | None:
        """A token that is still valid; "" if none is needed; None if `fetch` must be called."""
        if self._address.is_emulator or not self._address.tls:
            return ""
        credentials = self._credentials
        return str(credentials.token) if credentials is not None and credentials.valid else None

    def after_fork(self) -> None:
        """Replace the lock in a forked child: another thread of the parent may have held it."""
        self._lock = threading.RLock()

    def fetch(self) -> str:
        """Return a valid token; this blocks. Raise AccessRefused without usable credentials."""
        from google.auth import default
        from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError, TransportError
        from google.auth.transport.requests import Request

        with self._lock:
            try:
                if self._credentials is None:
                    self._credentials, _ = default(scopes=[SCOPE])
                if not self._credentials.valid:
                    self._credentials.refresh(Request())
            except DefaultCredentialsError as error:
                raise AccessRefused(f"no credentials for Pub/Sub: {error}") from None
            except TransportError as error:
                raise BrokerUnavailable(f"cannot get a token for Pub/Sub: {error}") from None
            except GoogleAuthError as error:
                raise AccessRefused(f"Google does not accept the credentials for Pub/Sub: {error}") from None
            return str(self._credentials.token)
