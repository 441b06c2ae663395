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
from umbel.wire.call import TaskHeaders, body_bytes, check_names, read_body_map, read_header_map
from umbel.wire.limits import DEFAULT_LIMITS
from umbel.wire.message import JSON_CONTENT, UNREADABLE_CONTENT, Message
from umbel.wire.show import brief
from umbel.wire.task import completed, encode_body, encode_headers
from umbel.wire.values import decode_json


def to_v2(message: Message) -> Message:
    """Return the message as v2: the same object when it is that already.

    Bodies that are not plain JSON are left alone when the headers are v2; the
    reader that may decode the body finds out whether it fits.
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


_FROM_BODY = ("task", "id", "group", "group_index", "retries", "eta", "expires", "timelimit")


def _headers_from(body: dict[str, Any]) -> TaskHeaders:
    stated = {name: body[name] for name in _FROM_BODY if body.get(name) is not None}
    if body.get("taskset") is not None:
        stated["group"] = body["taskset"]
    try:
        headers = msgspec.convert(stated, TaskHeaders)
    except msgspec.ValidationError as error:
        raise BadMessage(
            f"not a task message of protocol v1 or v2: {error}; the fields of its body are {brief(stated)}"
        ) from error
    if not headers.task or not headers.id:
        raise BadMessage(
            f"the v1 body has an empty task name or id: task {headers.task!r}, id {headers.id!r}"
        )
    check_names(headers)
    return headers
