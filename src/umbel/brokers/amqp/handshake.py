"""Handshake: the address of RabbitMQ, how a connection opens, and what the server's refusals mean.

Pure. An address is `amqp://user:password@host:port/vhost`, as Celery reads it: the path is the virtual host,
percent encoded; none, or `//` at the end, is the host `/`. `amqps://` speaks TLS, with the options of
`brokers/tls.py` after a `?`. Several addresses joined by `;` are tried in turn (`Addresses`).

The handshake takes methods of channel 0 and returns bytes to send. The first bytes sent are PROTOCOL_HEADER.

A refusal has one of four meanings. `ChannelClosed` refuses one request, by its code: not found, locked,
declared differently, not permitted. `AccessRefused` refuses everything, for instance a right without which
nothing works. `BrokerStarting` is temporary: a node opens its port before its queues, streams and quorum
queues first of all, have elected their leaders, and until then answers as if they were lost. It is a kind of
`BrokerUnavailable`, so code that retries after a refused connection retries after it too. `Undecided` leaves
open whether the server has the message.
"""

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from shlex import quote
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from umbel.brokers.amqp.frames import FRAME_MAX, Incoming, Method, encode_method
from umbel.brokers.amqp.topology import CONTROL_EXCHANGE, EVENT_EXCHANGE
from umbel.brokers.tls import TLS_OPTIONS, option_problem, tls_context, tls_refusal
from umbel.errors import AccessRefused, BadURL, BrokerError, BrokerRefused, BrokerSilent, BrokerUnavailable
from umbel.files import ran_out
from umbel.text import SEVERAL_HOSTS, several_hosts
from umbel.version import VERSION

if TYPE_CHECKING:
    import ssl


# ---- location --------------------------------------------------------------------------------------

LinkT = TypeVar("LinkT")
SCHEMES = {"amqp": 5672, "pyamqp": 5672, "amqps": 5671}


@dataclass(frozen=True, slots=True)
class Location:
    """One server, virtual host and user; as text it does not show the password."""

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
        """Return the TLS settings of the address, read from the files it names; None without TLS."""
        return tls_context(dict(self.tls_options), where=f"RabbitMQ at {self}") if self.tls else None


class Addresses:
    """The servers of an address list: each new connection starts with the next server."""

    def __init__(self, url: str) -> None:
        self.locations = locations_from_url(url)
        self._turns = cycle(self.locations)

    def connect(self, opened: Callable[[Location], LinkT]) -> LinkT:
        """Call `opened` for each server in turn until one answers; return its result, or raise the last
        server's error.
        """
        error = _no_address()
        for location in self._in_turn():
            try:
                return opened(location)
            except BrokerUnavailable as refused:
                error = refused
        raise error

    async def connected(self, opened: Callable[[Location], Awaitable[LinkT]]) -> LinkT:
        """Connect like `connect`, for asyncio."""
        error = _no_address()
        for location in self._in_turn():
            try:
                return await opened(location)
            except BrokerUnavailable as refused:
                error = refused
        raise error

    def _in_turn(self) -> Iterator[Location]:
        return (next(self._turns) for _ in self.locations)


def _no_address() -> BrokerUnavailable:
    return BrokerUnavailable("no RabbitMQ address to connect to; set 'broker'")


def locations_from_url(url: str) -> list[Location]:
    """Return the servers of an address list; raise BadURL for an invalid address."""
    return [_location(part.strip()) for part in url.split(";") if part.strip()]


def _location(url: str) -> Location:
    if several_hosts(url):
        raise BadURL(url, SEVERAL_HOSTS)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # the error's text may contain a part of the password
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


# ---- rights ----------------------------------------------------------------------------------------

ACCESS_REFUSED = 403
_REFUSED = re.compile(
    r"(?:(configure|write|read) )?access to (queue|exchange|topic) '(.*?)' in .* refused for user"
)
CONFIGURE, _WRITE, _READ = "configure", "write to", "read from"
_RIGHTS = {"configure": CONFIGURE, "write": _WRITE, "read": _READ}
# Binding a queue needs the right to write to the queue, and to read from the exchange.
_OF_QUEUES: Mapping[int, str] = {
    Method.QUEUE_DECLARE: CONFIGURE,
    Method.QUEUE_BIND: _WRITE,
    Method.QUEUE_UNBIND: _WRITE,
    Method.QUEUE_PURGE: _READ,
    Method.QUEUE_DELETE: CONFIGURE,
    Method.BASIC_CONSUME: _READ,
    Method.BASIC_GET: _READ,
}
_OF_EXCHANGES: Mapping[int, str] = {
    Method.EXCHANGE_DECLARE: CONFIGURE,
    Method.QUEUE_DECLARE: _WRITE,  # the exchange of its dead letters
    Method.QUEUE_BIND: _READ,
    Method.QUEUE_UNBIND: _READ,
    Method.BASIC_PUBLISH: _WRITE,
}
_SHARED = re.compile(
    r"amq\.default|umbel\.(?!delay\.).*"
    rf"|{re.escape(EVENT_EXCHANGE)}(\..*)?|(.*\.)?{re.escape(CONTROL_EXCHANGE)}"
)
_ALL = "'.*' '.*' '.*'"


@dataclass(frozen=True, slots=True)
class MissingRight:
    """The right that a user lacks, and the sentence that says so and how to grant it."""

    right: str
    words: str
    is_shared: bool  # nothing works without this right
    is_named: bool  # a right is missing; RabbitMQ refuses its reserved names with the same code


def missing_right(location: Location, text: str, method: int = 0) -> MissingRight:
    """Return the right that the user lacks and how to grant it, from the text of a refusal with code 403.

    A user may configure, write and read the names that three patterns match. RabbitMQ 3.10 names the queue or
    exchange and not the right; the refused `method` shows which right it was. Some names are needed for
    everything, so that nothing works without them. The others are queues and exchanges of tasks, and their
    refusal affects them alone.
    """
    found = _REFUSED.search(text)
    stated, kind, name = found.groups() if found else ("", "", "")
    right = _RIGHTS.get(stated) or (_OF_QUEUES if kind == "queue" else _OF_EXCHANGES).get(method, "use")
    what = f"{right} the {kind} {name!r}" if found else f"do this ({text})"
    where = f"in the virtual host {location.vhost!r}"
    words = f"the user {location.user!r} may not {what} {where}; {granting(location)}"
    return MissingRight(right, words, is_shared=bool(_SHARED.fullmatch(name)), is_named=bool(found))


def granting(location: Location) -> str:
    """Return the command that grants all rights to the user; it sets the three patterns at once."""
    command = f"rabbitmqctl set_permissions -p {quote(location.vhost)} {quote(location.user)} {_ALL}"
    return f"grant it with {command}, or with the patterns that docs/brokers.md lists"


# ---- refusals --------------------------------------------------------------------------------------

_NOT_ALLOWED = 530
_FORCED, _RESOURCE_ERROR, _INTERNAL_ERROR = 320, 506, 541

# RabbitMQ's texts (3.10 to 4.1). Their codes do not tell: a queue whose node is not up yet is 404, as a
# queue that does not exist; a late ack "timed out" too, with 406, and is a permanent refusal.
_NOT_YET = (
    "is down or inaccessible",
    "replica on the local node",  # a stream that was just created has no replica yet, or none that runs
    "due to timeout",
    "timeout occurred during consume operation",
    "process is stopped by supervisor",
    "coordinator unavailable",
    "coordinator_unavailable",
)
_HOST_NOT_YET = "is down"
FULL = "its queue is full and refuses more (x-overflow: reject-publish); drain it or raise its limit"


class ChannelClosed(BrokerRefused):
    """The server refused a request by closing the channel."""

    NOT_FOUND, LOCKED, PRECONDITION = 404, 405, 406

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"RabbitMQ refused: {text}" + (f" ({code})" if code != ACCESS_REFUSED else ""))
        self.code = code
        self.text = text


class NotPermitted(ChannelClosed):
    """The user lacks a right to this queue or exchange."""

    def __init__(self, missing: MissingRight) -> None:
        super().__init__(ACCESS_REFUSED, missing.words)
        self.may_configure = missing.right != CONFIGURE
        self.is_right = missing.is_named


class Undecided(BrokerUnavailable):
    """One of several batches made the server close their channel; which one, and which messages were
    accepted, is not known.
    """

    def __init__(self, closed: ChannelClosed) -> None:
        super().__init__(f"one of several messages made RabbitMQ close their channel: {closed.text}")
        self.closed = closed


class CannotDeclare(BrokerRefused):
    """A queue or exchange cannot be declared in the requested form."""

    def __init__(self, what: str, refused: ChannelClosed, why: str = "") -> None:
        super().__init__(f"cannot declare {what}: {why or refused.text}")
        self.refused = refused


class QueueRefused(BrokerRefused):
    """One queue cannot be declared or consumed; other queues are not affected."""

    def __init__(self, queue: str, refused: ChannelClosed | CannotDeclare) -> None:
        super().__init__(f"cannot consume the queue {queue!r}: {refused}")
        self.queue = queue
        self.is_missing = isinstance(refused, ChannelClosed) and refused.code == ChannelClosed.NOT_FOUND
        cause = refused.refused if isinstance(refused, CannotDeclare) else refused
        self.is_forbidden = isinstance(cause, NotPermitted) and cause.is_right


class BrokerStarting(BrokerUnavailable):
    """The queue or stream is not available yet: the server is still starting, or is electing a leader."""

    def __init__(self, location: Location, code: int, text: str) -> None:
        super().__init__(f"RabbitMQ at {location} is not ready: {text} ({code}); try again in a moment")


def channel_refusal(location: Location, code: int, text: str, method: int = 0) -> BrokerError:
    """Return the error for a channel that the server closed; `method` is the request that it refused."""
    if code == ACCESS_REFUSED:
        right = missing_right(location, text, method)
        if right.is_shared:
            return AccessRefused(f"RabbitMQ at {location.host}:{location.port} refused: {right.words}")
        return NotPermitted(right)
    if code in (_RESOURCE_ERROR, _INTERNAL_ERROR) or any(words in text for words in _NOT_YET):
        return BrokerStarting(location, code, text)
    return ChannelClosed(code, text)


def connection_refusal(location: Location, code: int, text: str) -> BrokerUnavailable:
    """Return the error for a connection that the server closed."""
    if code in (_FORCED, _INTERNAL_ERROR) or (code == _NOT_ALLOWED and text.endswith(_HOST_NOT_YET)):
        return BrokerStarting(location, code, text)
    refused = AccessRefused if code in (ACCESS_REFUSED, _NOT_ALLOWED) else BrokerUnavailable
    return refused(_remedy(location, code, text))


def blocked_by(location: Location, why: str, *, is_written: bool = False) -> BrokerUnavailable:
    """Return the error for a resource alarm: the server reads nothing from publishers until the alarm is
    over.
    """
    remedy = (
        "let queues drain, free memory or disk there, or change vm_memory_high_watermark or disk_free_limit"
    )
    late = "; what was sent may still arrive then" if is_written else ""
    return BrokerUnavailable(f"RabbitMQ at {location} does not accept messages now ({why}): {remedy}{late}")


def unconfirmed(location: Location) -> BrokerUnavailable:
    """Return the error for a server that answers other requests, but has not confirmed a message in time."""
    return BrokerUnavailable(
        f"RabbitMQ at {location} has not confirmed messages in time; waiting for its answer: look for a "
        "queue or stream there that has lost the majority of its replicas, and for a slow disk"
    )


def unreachable(location: Location, error: BaseException) -> BrokerUnavailable:
    """Return the error for a connection that could not be opened, with what to check."""
    where = f"cannot reach RabbitMQ at {location}"
    if no_files := ran_out(error):
        return BrokerUnavailable(f"{where}: {no_files}")
    if isinstance(error, TimeoutError):
        return BrokerSilent(
            f"{where}: no answer within the connect time-out; is it running, and are host and port right?"
        )
    if location.tls and (refused := tls_refusal(where, error, dict(location.tls_options))) is not None:
        return refused
    if isinstance(error, ConnectionRefusedError):
        why = "connection refused; is it running, and are host and port right?"
    elif isinstance(error, ConnectionResetError):
        why = "the server closed the connection; is this its AMQP port? For a TLS port use amqps://"
    else:
        why = f"{str(error) or type(error).__name__}; is it running, and are host and port right?"
    return BrokerUnavailable(f"{where}: {why}")


def _remedy(location: Location, code: int, text: str) -> str:
    where = f"RabbitMQ at {location.host}:{location.port}"
    if code == ACCESS_REFUSED and "ACCESS_REFUSED - Login" in text:
        return (
            f"{where} refused the login of the user {location.user!r}: check user and password in the address"
        )
    if code == _NOT_ALLOWED and "not found" in text:
        remedy = (
            f"check the path of the address, or add it with rabbitmqctl add_vhost {quote(location.vhost)}"
        )
        return f"{where} has no virtual host {location.vhost!r}; {remedy}"
    if code == _NOT_ALLOWED and "refused" in text:
        use = f"the user {location.user!r} may not use the virtual host {location.vhost!r}"
        return f"{where} refused: {use}; {granting(location)}"
    return f"RabbitMQ at {location} closed the connection: {text} ({code})"


# ---- handshake -------------------------------------------------------------------------------------

CHANNELS_MAX = 2047
REPLY_TIMEOUT_S = 10.0  # for every answer after the handshake
CONFIRMS_PER_S = 1000  # by a slow server; a large batch gets that much more time


def confirm_timeout_s(messages: int) -> float:
    """Return how long to wait for the confirmation of so many messages."""
    return REPLY_TIMEOUT_S + messages / CONFIRMS_PER_S


# What the server may use: it says why a login failed, and names the queue whose consumer it ended.
_CAPABILITIES = {
    "publisher_confirms": True,
    "consumer_cancel_notify": True,
    "basic.nack": True,
    "connection.blocked": True,
    "authentication_failure_close": True,
}


class Handshake:
    """The steps from the server's first method to an open virtual host, with the agreed heartbeat."""

    def __init__(self, location: Location, *, heartbeat_s: int, name: str) -> None:
        self._location = location
        self._name = name
        self.heartbeat_s = heartbeat_s
        self._done = False

    def is_done(self) -> bool:
        """Whether the connection is open, so that channels can be opened on it."""
        return self._done

    def step(self, incoming: Incoming) -> bytes:
        """Return the bytes that answer this method; raise BrokerUnavailable or AccessRefused if the server
        refuses.
        """
        match incoming.method:
            case Method.CONNECTION_START:
                return self._start_ok()
            case Method.CONNECTION_TUNE:
                return self._tune(*incoming.fields)
            case Method.CONNECTION_OPEN_OK:
                self._done = True
                return b""
            case Method.CONNECTION_CLOSE:
                code, text, _, _ = incoming.fields
                raise connection_refusal(self._location, code, text)
            case _:
                raise BrokerUnavailable(
                    f"RabbitMQ at {self._location} did not start an AMQP handshake; is this its AMQP port?"
                )

    def _start_ok(self) -> bytes:
        properties = {
            "product": "umbel",
            "version": VERSION,
            "platform": "Python",
            "connection_name": self._name,
            "capabilities": _CAPABILITIES,
        }
        login = f"\0{self._location.user}\0{self._location.password}"
        return encode_method(0, Method.CONNECTION_START_OK, properties, "PLAIN", login, "en_US")

    def _tune(self, channels_max: int, frame_max: int, heartbeat_s: int) -> bytes:
        if heartbeat_s:
            self.heartbeat_s = min(self.heartbeat_s, heartbeat_s)
        if 0 < frame_max < FRAME_MAX:
            raise BrokerUnavailable(
                f"RabbitMQ at {self._location} allows frames of {frame_max} bytes: "
                f"set frame_max = {FRAME_MAX} in rabbitmq.conf"
            )
        channels_max = min(channels_max, CHANNELS_MAX) or CHANNELS_MAX
        return encode_method(
            0, Method.CONNECTION_TUNE_OK, channels_max, FRAME_MAX, self.heartbeat_s
        ) + encode_method(0, Method.CONNECTION_OPEN, self._location.vhost, "", False)
