"""Retries of failed tasks and requeued dead letters, as messages.

The retry of a failed task is a new task with the same arguments. It has a new id, no attempts, no eta and no
expiry. `retry_of` names the task that it retries, and the root id stays. Follow-up calls are changed if they
have already ended:

- the later steps of its chain, which are stored as failed, and its errbacks, which ran, get new ids;
- its chord and its group are omitted, because they have ended without it;
- the key of a unique task is omitted too, because it was released when the task failed.

Arguments are not decoded: the bytes of a JSON body stay unchanged around the parts that are replaced.

A requeued dead letter is not a new task, but the same message sent again, with its id, arguments and attempt.
Its starts are counted from 0 again; otherwise it would become a dead letter again at once. Its history is not
lost: it is sent as redelivered, because it may have run, and the header `umbel_starts` contains its earlier
starts. So it runs alone, with its start counted first, and dead letters show the total.
"""

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import msgspec
from msgspec.structs import replace

from umbel.errors import BadMessage
from umbel.protocol.delivery.trust import Doubted
from umbel.wire.call import Embed, body_bytes, read_embed, read_header_map
from umbel.wire.message import COUNT_MAX, DEFAULT_LIMITS, JSON_CONTENT, Message, Outgoing
from umbel.wire.signing import BOUND, CAUSE, Signer, nonce_after
from umbel.wire.signing import HEADER as SIGNATURE
from umbel.wire.steps import SignatureMap, step_map
from umbel.wire.task import to_v2
from umbel.wire.values import UNREADABLE, accepted_serializer, decode_json, encode_json

RETRY_OF = "retry_of"
EARLIER_STARTS = "umbel_starts"
DeriveId = Callable[[str], str]
_LEFT_OUT = frozenset({SIGNATURE, BOUND, CAUSE, "redelivered", "umbel_unique", EARLIER_STARTS})
_OF_A_CHORD = frozenset({"chord", "group_id", "group_index"})
_PARTS = ("tasks", "header", "body")  # kwargs of chains, groups and chords that contain signatures
_OPTIONS = ("chain", "chord", "link", "link_error")
_body_parts = msgspec.json.Decoder(tuple[msgspec.Raw, msgspec.Raw, msgspec.Raw]).decode
_encode_body = msgspec.json.encode
_headers_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_count_of = msgspec.json.Decoder(int).decode


def retried(
    message: Message, derive: DeriveId, *, accept: Collection[str], reply_to: str | None = None
) -> Message:
    """Return the retry of a failed task's message.

    `derive` returns a new id for an old one, always the same. `reply_to`: None leaves it unchanged. Raises
    WireError if it is not a task's message, or if its body may not be read (`accept`).
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
    """Return the id of the task that a message with these headers retries; None if it retries none."""
    if b'"retry_of"' not in headers:
        return None
    try:
        found = read_header_map(headers).get(RETRY_OF)
    except BadMessage:
        return None
    return found if isinstance(found, str) and found else None


def requeued(
    queue: str,
    message: Message,
    *,
    starts: int,
    stored: str,
    signer: Signer | None,
    now: float,
    even_if_used: bool = False,
) -> Outgoing:
    """Return the dead letter's message, for its queue or, if it has none, for its exchange. `stored` is its
    reason.

    A message for which a worker vouches is signed again; with `even_if_used`, any message that one of this
    app's keys signed. Other signed messages stay unchanged, with their age, because they may be copies of a
    message that ran.
    """
    if queue or not message.exchange:
        outgoing = Outgoing(queue, message, redelivered=True)
    else:
        at = (message.exchange, message.routing_key)
        outgoing = Outgoing("", message, redelivered=True, exchange=at[0], routing_key=at[1])
    counted = replace(outgoing, message=_with_earlier_starts(message, starts))
    if signer is None:
        return outgoing if SIGNATURE.encode() in message.headers else counted
    letter = signer.letter(message, queue, stored)
    if isinstance(letter.proof, Doubted):
        return counted
    if letter.nonce or even_if_used:
        return signer.sign_task(counted, now, nonce=nonce_after(letter.nonce, _retries_of(message)))
    return outgoing


def _body(
    message: Message, compression: object, derive: DeriveId, accept: Collection[str]
) -> tuple[bytes, bool]:
    """Return the new body, and whether it is compressed like the old one."""
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
    """Return the follow-up calls of the retry; None if they are unchanged."""
    if embed.chain is None and embed.chord is None and embed.errbacks is None:
        return None
    chain, errbacks = embed.chain, embed.errbacks
    return {
        "callbacks": embed.callbacks,
        "errbacks": None if errbacks is None else [_fresh(signature, derive) for signature in errbacks],
        "chain": None
        if chain is None
        else [_out_of_chord(_fresh(step_map(signature), derive)) for signature in chain],
        "chord": None,
    }


def _out_of_chord(step: Any) -> Any:
    options = {name: value for name, value in step["options"].items() if name not in _OF_A_CHORD}
    return {**step, "options": options}


def _fresh(signature: SignatureMap | dict[str, Any], derive: DeriveId) -> dict[str, Any]:
    """Return the signature with new ids, also in its parts."""
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
        return [_fresh_parts(part, derive) for part in value]
    return _fresh(value, derive) if isinstance(value, dict) and "task" in value else value


def _retries_of(message: Message) -> object:
    try:
        return read_header_map(message.headers).get("retries")
    except BadMessage:
        return None


def _with_earlier_starts(message: Message, starts: int) -> Message:
    """Return the message with its starts added to the earlier ones."""
    if starts <= 0:
        return message
    try:
        headers = _headers_of(message.headers)
    except UNREADABLE:
        return message
    earlier = 0
    if EARLIER_STARTS in headers:
        with suppress(*UNREADABLE):
            earlier = max(0, _count_of(headers[EARLIER_STARTS]))
    headers[EARLIER_STARTS] = msgspec.Raw(b"%d" % min(earlier + starts, COUNT_MAX))
    return replace(message, headers=msgspec.json.encode(headers))
