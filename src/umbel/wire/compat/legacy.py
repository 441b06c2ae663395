"""Legacy: messages of protocol v1, and of the form between, rewritten as v2.

A v1 message has no header `task`; its body is one map that holds everything. In the hybrid the
headers are those of v2 and the body is still a map. Rewriting happens once, where messages
arrive, and nothing behind that place knows of v1. Only JSON is rewritten, because here nobody
has asked yet which other content types are accepted.

The flag `utc` of v1 is not honoured: times without an offset are UTC, see `instant.py`.
"""

from typing import Any

import msgspec

from umbel.errors import BadMessage
from umbel.wire.call import (
    Embed,
    TaskHeaders,
    check_names,
    completed,
    encode_body,
    encode_headers,
    read_header_map,
)
from umbel.wire.limits import DEFAULT_LIMITS, Limits, check_size
from umbel.wire.message import JSON_CONTENT, UNREADABLE_CONTENT, Message
from umbel.wire.show import brief
from umbel.wire.signature import check_signature
from umbel.wire.values import decode_json


def to_v2(message: Message) -> Message:
    """Return the message as v2: the same object when it is that already.

    Bodies that are not plain JSON are left alone when the headers are v2; whether the body fits
    is found out by whoever may decode it.
    """
    if message.content_type == JSON_CONTENT and message.body[:1] == b"[":
        return message
    if message.content_type == UNREADABLE_CONTENT and not message.headers:
        raise BadMessage(f"not a message that Celery or Umbel sends: it begins {message.body[:100]!r}")
    headers = read_header_map(message.headers)
    if "task" not in headers:
        return _rewrite_v1(message, headers)
    if message.content_type != JSON_CONTENT or headers.get("compression"):
        return message
    if message.body.lstrip()[:1] != b"{":
        return message
    body = decode_json(message.body)
    if not isinstance(body, dict):  # a typed value, such as a date, looks like a map
        raise BadMessage(f"the body must be [args, kwargs, embed], not {brief(body)}")
    args, kwargs, embed = read_body_map(body)
    return msgspec.structs.replace(message, body=encode_body(args, kwargs, embed))


def read_body_map(body: dict[str, Any]) -> tuple[list[Any], dict[str, Any], Embed]:
    """Read the parts of a call from a v1 or hybrid body."""
    args, kwargs = body.get("args"), body.get("kwargs")
    if not (args is None or isinstance(args, (list, tuple))):
        raise BadMessage(f"the args of the call must be a list, not {brief(args)}")
    return list(args or ()), check_kwargs(kwargs), read_embed(body)


def check_kwargs(kwargs: object) -> dict[str, Any]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict) or not all(isinstance(name, str) for name in kwargs):
        raise BadMessage(f"the kwargs of the call must be a map of names, not {brief(kwargs)}")
    return kwargs


def read_embed(found: object) -> Embed:
    """Check the follow-ups of a call; `{}` and null mean that there are none."""
    if not found or found == _NOTHING_FOLLOWS:
        return Embed()
    if not isinstance(found, dict):
        raise BadMessage(f"the embed of the call must be a map, not {brief(found)}")
    chord = found.get("chord")
    return Embed(
        callbacks=_signatures("callbacks", found),
        errbacks=_signatures("errbacks", found),
        chain=_signatures("chain", found),
        chord=None if chord is None else check_signature(chord),
    )


_NOTHING_FOLLOWS = msgspec.structs.asdict(Embed())


def _signatures(name: str, found: dict[str, Any]) -> Any:
    signatures = found.get(name)
    if signatures is None:
        return None
    if not isinstance(signatures, (list, tuple)):
        raise BadMessage(f"{name} of the call must be a list, not {brief(signatures)}")
    return [check_signature(signature) for signature in signatures]


def _rewrite_v1(message: Message, old_headers: dict[str, Any]) -> Message:
    if message.content_type != JSON_CONTENT:
        raise BadMessage(
            f"no header 'task', and a body of {message.content_type!r}: a v1 message is read as JSON only"
        )
    body = decode_json(body_bytes(message, old_headers.get("compression"), DEFAULT_LIMITS))
    if not isinstance(body, dict):
        raise BadMessage(f"neither v1 nor v2: no header 'task', and the body is {message.body[:100]!r}")
    args, kwargs, embed = read_body_map(body)
    headers = completed(_headers_from(body), args, kwargs)
    known = TaskHeaders.__struct_fields__
    extra = {name: value for name, value in old_headers.items() if name not in known}
    return msgspec.structs.replace(
        message,
        headers=encode_headers(headers, extra),
        body=encode_body(args, kwargs, embed),
        correlation_id=message.correlation_id or headers.id,
    )


def body_bytes(message: Message, compression: object, limits: Limits) -> bytes:
    """Return the body as its serializer wrote it."""
    check_size("the body", len(message.body), limits)
    if not compression:
        return message.body
    if not isinstance(compression, str):
        raise BadMessage(f"header 'compression' is {brief(compression)}")
    from umbel.wire.compression import decompress  # three libraries that few messages need

    return decompress(message.body, compression, limits=limits)


_FROM_BODY = ("task", "id", "group", "group_index", "retries", "eta", "expires", "timelimit")


def _headers_from(body: dict[str, Any]) -> TaskHeaders:
    stated = {name: body[name] for name in _FROM_BODY if body.get(name) is not None}
    if body.get("taskset") is not None:
        stated["group"] = body["taskset"]
    try:
        headers = msgspec.convert(stated, TaskHeaders)
    except msgspec.ValidationError as error:
        raise BadMessage(f"neither v1 nor v2: {error} of the body {brief(stated)}") from error
    if not headers.task or not headers.id:
        raise BadMessage(f"v1 body with an empty name or id: task {headers.task!r}, id {headers.id!r}")
    check_names(headers)
    return headers
