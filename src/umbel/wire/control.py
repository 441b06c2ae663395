"""Control: requests to workers and their replies, as bytes (wire 5.1, 5.2).

The form is Celery's. What we add to a reply is a header that Celery does not read: the members
that the answering node knows, so that a caller can tell who is missing.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from umbel.errors import BadMessage, TooLarge
from umbel.protocol.pidbox import Known, Reply, ReplyTo, Request
from umbel.wire.limits import Limits, Name
from umbel.wire.show import brief
from umbel.wire.signing import Keyring
from umbel.wire.values import SERIALIZERS, decode_json, decode_json_as, encode_json

REQUEST_EXCHANGE, REPLY_EXCHANGE = "celery.pidbox", "reply.celery.pidbox"
REQUEST_LIMITS = Limits(size_max_bytes=1024 * 1024, depth_max=32)
REPLY_LIMITS = Limits(size_max_bytes=64 * 1024 * 1024, depth_max=64)  # that are taken, from whomever
OWN_REPLY_LIMITS = Limits(size_max_bytes=8 * 1024 * 1024, depth_max=64)
MEMBERS_MAX = 20_000
PICKLE_MARK = b"\x80"  # with which a pickle of protocol 2 or later begins, and no JSON
NAME_MAX_BYTES = 255  # of an exchange or a routing key: AMQP has no room for more


def patterns_on(exchange: str, patterns: Sequence[str]) -> Sequence[str]:
    """What a listener hears: on the exchange of requests, everything."""
    return ("#",) if exchange == REQUEST_EXCHANGE else patterns


def encode_request(
    request: Request, clock: int, keyring: Keyring | None = None, now: float = 0.0
) -> tuple[bytes, bytes]:
    """The headers and the body; with keys, signed at this moment."""
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
    return headers if keyring is None else keyring.sign_request(headers, encoded, now), encoded


def decode_request(
    headers: bytes, body: bytes, keyring: Keyring | None = None, accept: Collection[str] = ("json",)
) -> Request:
    """Raises WireError, and nothing else, whatever the bytes are. With keys, its signature is compared.

    Celery's clients write requests as they write tasks, so one may be pickled where that is accepted.
    """
    if body[:1] == PICKLE_MARK and "pickle" in accept:
        body_map = SERIALIZERS["pickle"].decode(body, REQUEST_LIMITS)
        plain = encode_json(body_map, root="request", limits=REQUEST_LIMITS)
    else:
        plain = body
    found = decode_json_as(_REQUEST, plain, what="the control request", limits=REQUEST_LIMITS)
    said = decode_json_as(_REQUEST_HEADERS, headers, what="the request's headers", limits=REQUEST_LIMITS)
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
        said.expires or 0.0,
        None if keyring is None else keyring.check_request(headers, body),
    )


def is_for_replies(exchange: str) -> bool:
    """Whether it is a mailbox's: an answer goes nowhere else, whatever the request asks for."""
    return exchange.startswith("reply.") and exchange.endswith(".pidbox")


def encode_reply(
    node: str, value: Any, ticket: str, clock: int, members: Sequence[Known] = ()
) -> tuple[bytes, bytes]:
    """The headers and the body. Of a list that is too large the first part is sent, and it is said so."""
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
            [one.node, one.state, round(one.silent_s, 1), one.is_umbel] for one in members[:MEMBERS_MAX]
        ]
    return msgspec.json.encode(headers), body


def decode_reply(headers: bytes, body: bytes) -> Reply:
    found = decode_json(body, limits=REPLY_LIMITS)
    if not isinstance(found, dict) or len(found) != 1:
        raise BadMessage(f"a control reply must be {{node: answer}} of one node, not {brief(found)}")
    said = decode_json_as(_REPLY_HEADERS, headers, what="the reply's headers", limits=REPLY_LIMITS)
    ((node, value),) = found.items()
    known = tuple(Known(*one) for one in said.members[:MEMBERS_MAX])
    return Reply(str(node), value, said.ticket or "", known, said.total)


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
    ticket: Name | None = None  # kept, so that a request is carried out once
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
