"""Retried: the message of a failed task as a new task with the same arguments.

It has a new id, no attempts and no time to wait for or to expire at; `retry_of` names the task that it
retries, and the root stays. What follows the task is changed where its old form has ended for good:

- the later steps of its chain, whose results say that they failed, and its errbacks, which ran, get new ids;
- the chord and the group that it was a part of are left: they have ended without it;
- the key of a unique task is left, too: it was released when the task failed.

Arguments are not looked at: the bytes of a JSON body stay as they are around what is changed.
"""

from collections.abc import Callable, Collection
from typing import Any

import msgspec
from msgspec.structs import replace

from umbel.errors import BadMessage
from umbel.wire.call import Embed, body_bytes, read_embed, read_header_map
from umbel.wire.compat.legacy import to_v2
from umbel.wire.limits import DEFAULT_LIMITS
from umbel.wire.message import JSON_CONTENT, Message
from umbel.wire.signature import SignatureMap
from umbel.wire.signing import HEADER as SIGNATURE
from umbel.wire.steps import step_map
from umbel.wire.values import UNREADABLE, accepted_serializer, decode_json, encode_json

RETRY_OF = "retry_of"
DeriveId = Callable[[str], str]
_LEFT_OUT = frozenset({SIGNATURE, "redelivered", "umbel_unique"})
_OF_A_CHORD = frozenset({"chord", "group_id", "group_index"})
_PARTS = ("tasks", "header", "body")  # of chains, groups and chords, among their kwargs
_OPTIONS = ("chain", "chord", "link", "link_error")
_body_parts = msgspec.json.Decoder(tuple[msgspec.Raw, msgspec.Raw, msgspec.Raw]).decode
_encode_body = msgspec.json.encode


def retried(
    message: Message, derive: DeriveId, *, accept: Collection[str], reply_to: str | None = None
) -> Message:
    """`derive` makes new ids of old ones, the same each time it is asked. `reply_to`: None leaves it.

    WireError: it is no message of a task, or its body may not be read (`accept`).
    """
    message = to_v2(message)
    found = read_header_map(message.headers)
    task_id = found.get("id")
    if not isinstance(task_id, str) or not task_id:
        raise BadMessage("the message has no task name, so it cannot be retried")
    body, compression = _body(message, found.get("compression"), derive, accept)
    headers = {name: value for name, value in found.items() if name not in _LEFT_OUT} | {
        "id": derive(task_id),
        "root_id": found.get("root_id") or task_id,
        "retries": 0,
        "eta": None,
        "expires": None,
        "group": None,
        "group_index": None,
        RETRY_OF: task_id,
    }
    if not compression:
        headers.pop("compression", None)
    return replace(
        message,
        headers=encode_json(headers, root="headers"),
        body=body,
        correlation_id=headers["id"],
        reply_to=message.reply_to if reply_to is None else reply_to,
        expiration_ms=None,
        exchange="",
        routing_key="",
    )


def retry_of(headers: bytes) -> str | None:
    """The task that a message with these headers retries."""
    if b'"retry_of"' not in headers:
        return None
    try:
        found = read_header_map(headers).get(RETRY_OF)
    except BadMessage:
        return None
    return found if isinstance(found, str) and found else None


def _body(
    message: Message, compression: object, derive: DeriveId, accept: Collection[str]
) -> tuple[bytes, bool]:
    """The new body, and whether it is compressed as the old one was."""
    form = accepted_serializer(message.content_type, accept)
    plain = body_bytes(message, compression, DEFAULT_LIMITS)
    if form.content_type != JSON_CONTENT:
        args, kwargs, found = _three(form.decode(plain, DEFAULT_LIMITS))
        changed = _follows(read_embed(found), derive)
        if changed is None:
            return message.body, bool(compression)
        return form.encode((args, kwargs, changed), "the call"), False
    try:
        raw_args, raw_kwargs, raw = _body_parts(plain)
    except UNREADABLE as error:
        raise BadMessage(f"the body must be [args, kwargs, embed]: {error}") from None
    changed = _follows(read_embed(decode_json(bytes(raw))), derive)
    if changed is None:
        return message.body, bool(compression)
    follows = msgspec.Raw(encode_json(changed, root="embed"))
    return _encode_body([raw_args, raw_kwargs, follows]), False


def _three(body: Any) -> tuple[Any, Any, Any]:
    if not isinstance(body, list | tuple) or len(body) != 3:
        raise BadMessage("the body must be [args, kwargs, embed]")
    return body[0], body[1], body[2]


def _follows(embed: Embed, derive: DeriveId) -> dict[str, Any] | None:
    """What follows the retry; None: the same as before."""
    if embed.chain is None and embed.chord is None and embed.errbacks is None:
        return None
    chain, errbacks = embed.chain, embed.errbacks
    return {
        "callbacks": embed.callbacks,
        "errbacks": None if errbacks is None else [_fresh(one, derive) for one in errbacks],
        "chain": None if chain is None else [_out_of_chord(_fresh(step_map(one), derive)) for one in chain],
        "chord": None,
    }


def _out_of_chord(step: Any) -> Any:
    options = {name: value for name, value in step["options"].items() if name not in _OF_A_CHORD}
    return {**step, "options": options}


def _fresh(signature: SignatureMap | dict[str, Any], derive: DeriveId) -> dict[str, Any]:
    """The signature with new ids, its own and those of its parts."""
    found: dict[str, Any] = {**signature}
    options = dict(found.get("options") or {})
    for name in ("task_id", "group_id"):
        if isinstance(options.get(name), str):
            options[name] = derive(options[name])
    options |= {name: _fresh_parts(options[name], derive) for name in _OPTIONS if options.get(name)}
    found["options"] = options
    kwargs = found.get("kwargs")
    if found.get("subtask_type") and isinstance(kwargs, dict):
        parts = {name: _fresh_parts(kwargs[name], derive) for name in _PARTS if kwargs.get(name)}
        found["kwargs"] = {**kwargs, **parts}
    return found


def _fresh_parts(value: Any, derive: DeriveId) -> Any:
    if isinstance(value, list | tuple):
        return [_fresh_parts(one, derive) for one in value]
    return _fresh(value, derive) if isinstance(value, dict) and "task" in value else value
