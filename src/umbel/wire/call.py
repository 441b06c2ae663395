"""Calls: the content of a task message as typed values, and how it is read.

`TaskHeaders` lists the headers of protocol v2 in the order in which Celery writes them. The worker's main
process reads only these (`read_headers`); the child that runs the task reads the body (`decode_task`).
Whatever a peer sent, they raise only WireError, and the error names the wrong value.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from umbel.errors import BadMessage
from umbel.wire.message import (
    DEFAULT_LIMITS,
    HEADER_LIMITS,
    JSON_CONTENT,
    NAME_MAX_BYTES,
    Count,
    Limits,
    Message,
    Moment,
    Name,
    TaskName,
    TimeLimit,
    is_name,
    too_large,
)
from umbel.wire.show import brief
from umbel.wire.steps import SignatureMap, Step, check_signature, cut_steps, step_map
from umbel.wire.values import Serializer, accepted_serializer, decode_json, decode_json_as


class TaskHeaders(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """The known headers (wire 1.3). `root_id` None, `argsrepr` "" and so on mean that the sender omitted
    them.

    The types define which values are valid; `read_headers` checks what types cannot express. A time limit of
    0 means no limit, as in Celery.

    `compression`, `redelivered`, `umbel_signature`, `umbel_bound` and `umbel_unsigned` describe one copy of a
    message, not the call, so `encode_task` does not copy them.
    """

    lang: str = "py"
    task: TaskName
    id: Name
    shadow: TaskName | None = None
    eta: Moment | None = None
    expires: Moment | None = None
    group: Name | None = None
    group_index: Count | None = None
    retries: Count = 0
    timelimit: tuple[TimeLimit | None, TimeLimit | None] = (None, None)  # hard, soft
    root_id: Name | None = None
    parent_id: Name | None = None
    argsrepr: str = ""
    kwargsrepr: str = ""
    origin: str = ""
    ignore_result: bool | None = False  # None: as the receiver's task is configured
    replaced_task_nesting: Count = 0
    stamped_headers: list[str] | None = None
    stamps: dict[str, Any] = {}
    compression: str | msgspec.UnsetType | None = msgspec.UNSET
    redelivered: bool | msgspec.UnsetType | None = msgspec.UNSET
    umbel_unique: Name | msgspec.UnsetType | None = msgspec.UNSET  # Umbel only: the key of a unique task
    umbel_limit: Name | msgspec.UnsetType | None = (
        msgspec.UNSET
    )  # Umbel only: the key of the task's cluster limit
    umbel_starts: Count | msgspec.UnsetType | None = msgspec.UNSET  # Umbel only: see `retried.py`
    umbel_signature: str | msgspec.UnsetType | None = (
        msgspec.UNSET
    )  # Umbel only, like the next two: see `signing.py`
    umbel_bound: str | msgspec.UnsetType | None = msgspec.UNSET
    umbel_unsigned: str | msgspec.UnsetType | None = msgspec.UNSET


class Embed(msgspec.Struct):
    """The calls that follow the task (wire 1.4).

    `chain` is in reverse: the next step is the last item, and the only one that is always a map (`steps.py`).
    """

    callbacks: list[SignatureMap] | None = None
    errbacks: list[SignatureMap] | None = None
    chain: Sequence[Step] | None = None
    chord: SignatureMap | None = None


class TaskCall(msgspec.Struct):
    """A complete call. `extra` contains the caller's custom headers."""

    headers: TaskHeaders
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    embed: Embed = msgspec.field(default_factory=Embed)
    extra: dict[str, Any] = {}
    reply_to: str = ""
    priority: int = 0


HEADER_NAMES = frozenset(TaskHeaders.__struct_fields__)
OF_ONE_COPY: dict[str, Any] = dict.fromkeys(
    ("redelivered", "umbel_signature", "umbel_bound", "umbel_unsigned"), msgspec.UNSET
)
"""Headers that are not copied to a message made from another one, in addition to the compression."""


def read_headers(message: Message) -> TaskHeaders:
    """Decode only the headers, as the worker does with every message. Raises WireError."""
    data = message.headers
    if len(data) > HEADER_LIMITS.size_max_bytes:
        raise too_large(
            "the header block of the message",
            len(data),
            HEADER_LIMITS,
            "; put less data into headers and stamps",
        )
    try:
        headers = _HEADERS.decode(data)
        if headers.stamps:  # the only header with values of any type and depth
            headers = decode_json_as(_HEADERS, data, what="the headers")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        headers = _read_leniently(data)
    task_id = headers.id
    if not headers.task or not task_id:
        raise BadMessage(f"the headers have an empty task name or id: task {headers.task!r}, id {task_id!r}")
    # Most headers have a single id and plain text; the types have checked everything else.
    if not (
        task_id.isascii()
        and task_id.isprintable()
        and headers.task.isprintable()
        and headers.root_id == task_id
        and headers.parent_id is headers.group is None
        and headers.umbel_unique is msgspec.UNSET
        and headers.umbel_limit is msgspec.UNSET
    ):
        check_names(headers)
    return headers


class Holding(msgspec.Struct, frozen=True, gc=False):
    """Resources that a message occupies in the broker, by its headers: a unique task's key, a slot of a
    limit.
    """

    task: str = ""
    id: str = ""
    umbel_unique: str | None = None
    umbel_limit: str | None = None


def holding_of(message: Message) -> Holding | None:
    """Return what to release when a message ends without being opened; None if nothing, or unreadable."""
    data = message.headers
    if b'"umbel_unique"' not in data and b'"umbel_limit"' not in data:
        return None
    try:
        return _HOLDING.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


_HOLDING = msgspec.json.Decoder(Holding)


def check_names(headers: TaskHeaders) -> None:
    """Raise BadMessage for a name or id that some broker or store cannot store: too long, or with a NUL."""
    ours = (headers.umbel_unique, headers.umbel_limit)
    for name in (headers.id, headers.root_id, headers.parent_id, headers.group, *ours):
        if isinstance(name, str) and not is_name(name):
            raise BadMessage(
                f"{brief(name)} is not a valid id: an id has at most {NAME_MAX_BYTES} bytes and no NUL"
            )
    if "\0" in headers.task:
        raise BadMessage(f"header 'task' is {brief(headers.task)}: a task name must not contain NUL")


def read_header_map(data: bytes, limits: Limits = HEADER_LIMITS) -> dict[str, Any]:
    """Decode all headers as a map. Raises WireError."""
    found = decode_json(data, limits=limits)
    if not isinstance(found, dict):
        raise BadMessage(f"the headers of the message must be a map, not {data[:100]!r}")
    return found


def decode_task(
    message: Message, *, accept: Collection[str] = ("json",), limits: Limits = DEFAULT_LIMITS
) -> TaskCall:
    """Decode the whole message, for the child that runs it. Raises WireError."""
    form = accepted_serializer(message.content_type, accept)
    headers = read_headers(message)
    args, kwargs, embed = _read_body(form, body_bytes(message, headers.compression, limits), limits)
    return TaskCall(headers, args, kwargs, embed, _extra(message.headers), message.reply_to, message.priority)


_Body = tuple[list[Any], dict[str, Any], dict[str, Any] | None] | dict[str, Any]
_BODY: msgspec.json.Decoder[_Body] = msgspec.json.Decoder(_Body)


def _read_body(form: Serializer, data: bytes, limits: Limits) -> tuple[list[Any], dict[str, Any], Embed]:
    steps: Sequence[Step] | None = None
    if form.content_type == JSON_CONTENT:
        if len(data) <= limits.size_max_bytes and (cut := cut_steps(data)) is not None:
            data, (*later, following) = cut
            steps = [*later, step_map(following)]
        found: Any = decode_json_as(_BODY, data, what="the body", limits=limits)
    else:
        found = form.decode(data, limits)
    if isinstance(found, dict):
        return read_body_map(found)
    if not isinstance(found, (list, tuple)) or len(found) != 3:
        raise BadMessage(f"the body must be [args, kwargs, embed], not {brief(found)}")
    args, kwargs, embed = found
    if not isinstance(args, (list, tuple)):
        raise BadMessage(f"the args of the call must be a list, not {brief(args)}")
    follows = read_embed(embed)
    if steps is not None:
        follows.chain = steps
    return list(args), _check_kwargs(kwargs), follows


class _KnownOnly(TaskHeaders, frozen=True, gc=False, kw_only=True, forbid_unknown_fields=True):
    pass


_KNOWN_ONLY = msgspec.json.Decoder(_KnownOnly)


def _extra(data: bytes) -> dict[str, Any]:
    try:
        # Usually there are none; this check costs a tenth of decoding all headers to a map.
        _KNOWN_ONLY.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = read_header_map(data)
        return {name: value for name, value in found.items() if name not in HEADER_NAMES}
    return {}


def body_bytes(message: Message, compression: object, limits: Limits) -> bytes:
    """Return the decompressed body, as its serializer wrote it. Raises WireError."""
    if len(message.body) > limits.size_max_bytes:
        raise too_large(
            "the body of the message", len(message.body), limits, "; send a reference to the data instead"
        )
    if not compression:
        return message.body
    if not isinstance(compression, str):
        raise BadMessage(f"header 'compression' must be text, not {brief(compression)}")
    from umbel.wire.compression import decompress  # imports three libraries that few messages need

    return decompress(message.body, compression, limits=limits)


def _check_kwargs(kwargs: object) -> dict[str, Any]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict) or not all(isinstance(name, str) for name in kwargs):
        raise BadMessage(f"the kwargs of the call must be a map of names, not {brief(kwargs)}")
    return kwargs


def read_body_map(body: dict[str, Any]) -> tuple[list[Any], dict[str, Any], Embed]:
    """Read the parts of a call from a v1 or hybrid body."""
    args, kwargs = body.get("args"), body.get("kwargs")
    if not (args is None or isinstance(args, (list, tuple))):
        raise BadMessage(f"the args of the call must be a list, not {brief(args)}")
    return list(args or ()), _check_kwargs(kwargs), read_embed(body)


def read_embed(found: object) -> Embed:
    """Check the follow-up calls of a call; `{}` and null mean that there are none."""
    if not found or found == _EMPTY:
        return Embed()
    if not isinstance(found, dict):
        raise BadMessage(
            "the third part of the body (embed: callbacks, errbacks, chain, chord) must be a map, "
            f"not {brief(found)}"
        )
    chord = found.get("chord")
    return Embed(
        callbacks=_signatures("callbacks", found),
        errbacks=_signatures("errbacks", found),
        chain=_signatures("chain", found),
        chord=None if chord is None else check_signature(chord),
    )


def _signatures(name: str, found: dict[str, Any]) -> Any:
    signatures = found.get(name)
    if signatures is None:
        return None
    if not isinstance(signatures, (list, tuple)):
        raise BadMessage(f"{name} of the call must be a list, not {brief(signatures)}")
    return [check_signature(signature) for signature in signatures]


_HEADERS = msgspec.json.Decoder(TaskHeaders)
_EMPTY = msgspec.structs.asdict(Embed())


def _read_leniently(data: bytes) -> TaskHeaders:
    """Read headers in which a peer wrote null for missing values, or raise an error that names the wrong
    value.
    """
    found = read_header_map(data)
    if "task" not in found:
        raise BadMessage(
            f"the headers have no 'task', so this is not a message of protocol v2: {data[:100]!r}"
        )
    stated = {name: value for name, value in found.items() if value is not None or name == "ignore_result"}
    try:
        return msgspec.convert(stated, TaskHeaders)
    except msgspec.ValidationError as error:
        where = re.search(r"`\$\.(\w+)", str(error))
        offending = f"header {where[1]!r} is {brief(stated.get(where[1]))}: " if where else ""
        raise BadMessage(f"{offending}{error}") from error
