"""Control: requests to workers and their replies, as bytes and as typed values (wire 5.1, 5.2).

The format is Celery's. Umbel's replies have an additional header, which Celery ignores: the members that the
replying node knows, so that a caller can find out which nodes are missing.

Anyone who can write to the broker can reply, and Celery's workers reply with fewer fields. So code that
computes with a reply reads it as one of the typed values here, in which missing or wrong fields get defaults.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from umbel.errors import BadMessage, TooLarge
from umbel.protocol.pidbox import MemberReport, Reply, ReplyTo, Request
from umbel.wire.message import Limits, Name
from umbel.wire.show import brief
from umbel.wire.signing import Signer
from umbel.wire.values import SERIALIZERS, decode_json, decode_json_as, encode_json

# ---- control ---------------------------------------------------------------------------------------

REQUEST_EXCHANGE, REPLY_EXCHANGE = "celery.pidbox", "reply.celery.pidbox"
REQUEST_LIMITS = Limits(size_max_bytes=1024 * 1024, depth_max=32)
REPLY_LIMITS = Limits(size_max_bytes=64 * 1024 * 1024, depth_max=64)  # for received replies, from any sender
OWN_REPLY_LIMITS = Limits(size_max_bytes=8 * 1024 * 1024, depth_max=64)
MEMBERS_MAX = 20_000
PICKLE_MARK = b"\x80"  # the first byte of a pickle of protocol 2 or later; no JSON text begins with it
NAME_MAX_BYTES = 255  # of an exchange or a routing key: the limit of AMQP


def patterns_on(exchange: str, patterns: Sequence[str]) -> Sequence[str]:
    """Return the routing keys that a listener subscribes to; on the exchange of requests, all of them."""
    return ("#",) if exchange == REQUEST_EXCHANGE else patterns


def encode_request(
    request: Request, clock: int, signer: Signer | None = None, now: float = 0.0
) -> tuple[bytes, bytes]:
    """Return the headers and the body; if there are keys, signed at `now`."""
    body: dict[str, Any] = {
        "method": request.method,
        "arguments": dict(request.arguments),
        "destination": None if request.destination is None else list(request.destination),
        "pattern": request.pattern,
        "matcher": request.matcher,
    }
    if request.reply_to is not None:
        to = request.reply_to
        body |= {
            "ticket": request.ticket,
            "reply_to": {"exchange": to.exchange, "routing_key": to.routing_key},
        }
    headers = encode_json({"clock": clock, "expires": request.expires_at}, root="headers")
    encoded = encode_json(body, root="request", limits=REQUEST_LIMITS)
    return headers if signer is None else signer.sign_request(headers, encoded, now), encoded


def decode_request(
    headers: bytes, body: bytes, signer: Signer | None = None, accept: Collection[str] = ("json",)
) -> Request:
    """Read a request; raise only WireError, whatever the bytes are. If there are keys, the signature is
    checked.

    Celery's clients encode requests like tasks, so a request may be pickled if pickle is accepted. With keys
    pickle is refused: Celery's clients have no keys, and reading a pickle runs the sender's code.
    """
    if body[:1] == PICKLE_MARK and "pickle" in accept and signer is None:
        body_map = SERIALIZERS["pickle"].decode(body, REQUEST_LIMITS)
        plain = encode_json(body_map, root="request", limits=REQUEST_LIMITS)
    else:
        plain = body
    found = decode_json_as(_REQUEST, plain, what="the control request", limits=REQUEST_LIMITS)
    stated = decode_json_as(_REQUEST_HEADERS, headers, what="the request's headers", limits=REQUEST_LIMITS)
    destination = found.destination
    reply_to = found.reply_to
    return Request(
        found.method,
        found.arguments or {},
        (destination,) if isinstance(destination, str) else None if destination is None else destination,
        found.pattern,
        found.matcher,
        found.ticket or "",
        None if reply_to is None else _address(reply_to),
        stated.expires or 0.0,
        None if signer is None else signer.check_request(headers, body),
    )


def is_for_replies(exchange: str) -> bool:
    """Return whether this exchange is a mailbox's: replies go nowhere else, whatever a request asks for."""
    return exchange.startswith("reply.") and exchange.endswith(".pidbox")


def encode_reply(
    node: str, value: Any, ticket: str, clock: int, members: Sequence[MemberReport] = ()
) -> tuple[bytes, bytes]:
    """Return the headers and the body. A list that is too large is truncated and sent with its total."""
    headers: dict[str, Any] = {"ticket": ticket, "clock": clock}
    shown, body = value, None
    while body is None:
        try:
            body = encode_json({node: shown}, root="reply", limits=OWN_REPLY_LIMITS)
        except TooLarge:
            if not isinstance(shown, list) or len(shown) < 2:
                raise
            shown = shown[: len(shown) // 2]
            headers["total"] = len(value)
    if members:
        headers["members"] = [
            [member.node, member.state, round(member.silent_s, 1), member.is_umbel]
            for member in members[:MEMBERS_MAX]
        ]
    return msgspec.json.encode(headers), body


def decode_reply(headers: bytes, body: bytes) -> Reply:
    """Read a reply. Raises WireError."""
    found = decode_json(body, limits=REPLY_LIMITS)
    if not isinstance(found, dict) or len(found) != 1:
        raise BadMessage(
            f"a worker's reply to a control command must be {{node: answer}}, not {brief(found)}; find the "
            "program that sent it"
        )
    stated = decode_json_as(_REPLY_HEADERS, headers, what="the reply's headers", limits=REPLY_LIMITS)
    ((node, value),) = found.items()
    known = tuple(MemberReport(*row) for row in stated.members[:MEMBERS_MAX])
    return Reply(str(node), value, stated.ticket or "", known, stated.total)


def _address(asked: "_ReplyTo") -> ReplyTo:
    names = (asked.exchange, asked.routing_key)
    if not is_for_replies(asked.exchange) or max(len(name.encode()) for name in names) > NAME_MAX_BYTES:
        raise BadMessage(f"a control command has the invalid reply address {brief(names)}")
    return ReplyTo(*names)


class _ReplyTo(msgspec.Struct, frozen=True):
    exchange: Name
    routing_key: Name


class _Request(msgspec.Struct, frozen=True):
    method: str
    arguments: Mapping[str, Any] | None = None
    destination: tuple[str, ...] | str | None = None
    pattern: str | None = None
    matcher: str | None = None
    ticket: Name | None = None  # the node remembers it, so that a request runs only once
    reply_to: _ReplyTo | None = None


class _RequestHeaders(msgspec.Struct, frozen=True):
    expires: float | None = None


class _ReplyHeaders(msgspec.Struct, frozen=True):
    ticket: str | None = None
    members: list[tuple[str, str, float, bool]] = []
    total: int | None = None


_REQUEST = msgspec.json.Decoder(_Request)
_REQUEST_HEADERS = msgspec.json.Decoder(_RequestHeaders)
_REPLY_HEADERS = msgspec.json.Decoder(_ReplyHeaders)


# ---- replies ---------------------------------------------------------------------------------------
#
# As with events (`events/view.py`), reading does not fail: a field that is missing or of the wrong type is
# None, and an item of a list that has another type is omitted. Replies that are only displayed stay data, and
# are shown as text.

ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=253_402_300_799)]  # also a Unix time, until the year 9999
Text = Annotated[str, msgspec.Meta(max_length=1000)]


class PoolStats(msgspec.Struct, frozen=True, rename="kebab"):
    """The part `pool` of `stats`."""

    implementation: Text | None = None
    processes: list[Count] | None = None
    max_concurrency: Count | None = None
    running: dict[str, Any] | None = None


class Usage(msgspec.Struct, frozen=True):
    """The `rusage` part of `stats`."""

    maxrss: Count | None = None  # in KiB


class Stopping(msgspec.Struct, frozen=True):
    """The progress of a worker's shutdown."""

    phase: Text | None = None
    left_s: Seconds | None = None
    running: Count | None = None


class OwnStats(msgspec.Struct, frozen=True):
    """The part `umbel` of `stats`, which only Umbel's workers send."""

    counters: dict[str, Count] | None = None
    links: dict[str, Count] | None = None
    stopping: Stopping = Stopping()


class Stats(msgspec.Struct, frozen=True):
    """The reply to `stats`."""

    pool: PoolStats = PoolStats()
    rusage: Usage = Usage()
    total: dict[str, Count] | None = None
    uptime: Seconds | None = None
    clock: Text | Count | None = None
    umbel: OwnStats | None = None


class TaskRow(msgspec.Struct, frozen=True):
    """A row of `active` and `reserved`."""

    id: Text | None = None
    name: Text | None = None
    type: Text | None = None
    time_start: Seconds | None = None
    worker_pid: Count | None = None


class ScheduledRow(msgspec.Struct, frozen=True):
    """A row of `scheduled`."""

    eta: Text | None = None
    request: TaskRow = TaskRow()


class Exchange(msgspec.Struct, frozen=True):
    """The exchange of a queue."""

    name: Text | None = None


class QueueRow(msgspec.Struct, frozen=True):
    """A row of `active_queues`. Only Umbel's workers report `paused`."""

    name: Text | None = None
    routing_key: Text | None = None
    paused: bool | None = None
    exchange: Exchange = Exchange()


class LeaseRow(msgspec.Struct, frozen=True):
    """A lease and its holder."""

    name: Text | None = None
    holder: Text | None = None
    term: Count | None = None
    left_s: float | None = None


class MemberRow(msgspec.Struct, frozen=True):
    """A complete row of `members`: all fields that must be valid for the row to count."""

    node: Text
    state: Literal["alive", "suspect", "lost", "left"]
    software: Text
    pid: Count
    incarnation: Count
    clock: Count
    freq_s: Seconds
    silent_s: Seconds


class ViewRow(msgspec.Struct, frozen=True):
    """A row of `members` with the fields that another node's view needs."""

    node: Text | None = None
    state: Text | None = None


class LetterRow(msgspec.Struct, frozen=True):
    """A row of `dlq`."""

    id: Text | Count | None = None
    queue: Text | None = None
    buried_at: Seconds | None = None
    starts: Count | None = None
    reason: str | None = None


class ClockReply(msgspec.Struct, frozen=True):
    """The reply with a node's logical clock."""

    clock: Count | None = None


def typed(reply: Any, kind: type[ReplyT]) -> ReplyT:
    """Return the reply as a value of this type; every field is None if the reply is not a map."""
    if not isinstance(reply, Mapping):
        return kind()
    right = {
        field.encode_name: read
        for field, hint in _fields(kind)
        if (read := _read(reply.get(field.encode_name), hint)) is not None
    }
    return msgspec.convert(right, kind)


def rows(reply: Any, kind: type[ReplyT]) -> list[ReplyT]:
    """Return the maps of a list as values of this type; an empty list if the reply is not a list."""
    return [typed(row, kind) for row in reply if isinstance(row, Mapping)] if isinstance(reply, list) else []


def is_member(row: Any) -> bool:
    """Return whether a row of `members` has all fields of MemberRow."""
    try:
        msgspec.convert(row, MemberRow)
    except msgspec.ValidationError:
        return False
    return True


def texts(reply: Any) -> list[str]:
    """Return the texts of a list; an empty list if the reply is not a list."""
    return [text for text in reply if isinstance(text, str)] if isinstance(reply, list) else []


def _read(value: Any, hint: Any) -> Any:
    """Return the value as its type, or the valid part of it; None if there is none."""
    if value is None:
        return None
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return typed(value, hint) if isinstance(value, Mapping) else None
    inner = get_args(hint)
    if get_origin(hint) is list and isinstance(value, list):
        return [read for item in value if (read := _read(item, inner[0])) is not None]
    if get_origin(hint) is dict and isinstance(value, Mapping):
        return {str(key): read for key, item in value.items() if (read := _read(item, inner[1])) is not None}
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return None


@cache
def _fields(kind: type[msgspec.Struct]) -> list[tuple[Any, Any]]:
    hints = get_type_hints(kind, include_extras=True)
    return [(field, _without_none(hints[field.name])) for field in msgspec.structs.fields(kind)]


def _without_none(hint: Any) -> Any:
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return kinds[0] if len(kinds) == 1 and NoneType in get_args(hint) else hint
