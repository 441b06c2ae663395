"""Steps and signatures: the calls inside a message that are sent later (wire 1.8).

A signature is a call as a map inside a message: a callback or the next step of a chain. A message carries all
later steps of its chain, as in Celery. A worker decodes only the next step; the other steps stay bytes and go
unchanged into that step's message. So a step costs hardly more in a long chain than in a short one. An
invalid step is found when it is the next step. Only JSON bodies are cut like this.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

import msgspec
from msgspec import UNSET, Raw, UnsetType

from umbel.errors import BadMessage
from umbel.wire.message import Limits, broken_rule, is_task_name
from umbel.wire.show import brief
from umbel.wire.values import UNREADABLE, decode_json, encode_json

# ---- signatures ------------------------------------------------------------------------------------


class SignatureMap(TypedDict):
    """A call inside a message, in Celery's form."""

    task: str
    args: list[Any]
    kwargs: dict[str, Any]
    options: dict[str, Any]
    subtask_type: str | None  # "chain", "group", "chord", or None for a plain task
    immutable: bool  # the previous task's result is not added before args


def check_signature(value: object) -> SignatureMap:
    """Return a value from the wire as a signature with all six keys. Raises BadMessage.

    Unknown keys are kept, because the map may be forwarded to a node that knows them.
    """
    if not isinstance(value, dict):
        raise BadMessage(f"a signature must be a map, not {brief(value)}")
    task: Any = value.get("task")
    if not is_task_name(task):
        raise BadMessage(f"a signature must name its task, not {brief(task)}")
    checked = {key: _checked(task, key, value) for key in _EMPTY}
    return {**value, "task": task, **checked}  # type: ignore[typeddict-item]


# its type, a description of the type, the default
_EMPTY: dict[str, tuple[type | tuple[type, ...], str, Any]] = {
    "args": ((list, tuple), "a list", ()),
    "kwargs": (dict, "a map", {}),
    "options": (dict, "a map", {}),
    "subtask_type": (str, "text", None),
    "immutable": (bool, "true or false", False),
}


def _checked(task: str, key: str, signature: dict[Any, Any]) -> Any:
    kinds, wanted, empty = _EMPTY[key]
    found: Any = signature.get(key)
    if found is None:
        found = empty
    elif not isinstance(found, kinds):
        raise BadMessage(f"the signature of {task!r}: {key} is {brief(found)}; it must be {wanted}")
    if key == "args":
        return list(found)
    if key in ("kwargs", "options"):
        if not all(isinstance(name, str) for name in found):
            raise BadMessage(f"the signature of {task!r}: every key of its {key} must be text")
        if key == "options":
            _check_options(task, found)
        return dict(found)
    return found


def _check_options(task: str, options: dict[str, Any]) -> None:
    for name, value in options.items():
        if (rule := broken_rule(name, value)) is not None:
            problem = f"the option {name!r} of {brief(value)}; it must be {rule.wanted}"
            raise BadMessage(f"the signature of {task!r} has {problem}")


# ---- steps -----------------------------------------------------------------------------------------

Step = SignatureMap | Raw


def cut_steps(body: bytes) -> tuple[bytes, list[Raw]] | None:
    """Return a call's body without its chain's steps, and the steps; None if there are no steps."""
    if not _may_have_steps(body):
        return None
    try:
        args, kwargs, embed = _parts(body)
    except UNREADABLE:
        return None
    if not embed.chain:
        return None
    rest = _encode(_Follows(embed.callbacks, embed.errbacks, None, embed.chord))
    return b"".join((b"[", args, b",", kwargs, b",", rest, b"]")), embed.chain


def _may_have_steps(body: bytes) -> bool:
    """Check only the end of the body, where the last key `chain` is, so that a large body is not scanned."""
    at = body.rfind(_CHAIN)
    while at >= 0:
        behind = at + len(_CHAIN)
        value = body[behind : behind + 9].lstrip(b" :")
        if value.startswith((b"[", b"null")):  # otherwise it may be text inside a step
            return value.startswith(b"[")
        at = body.rfind(_CHAIN, 0, at)
    return False


def encode_steps(steps: Sequence[Step], limits: Limits) -> bytes:
    """Encode the steps as one list; steps that are bytes are copied unchanged."""
    texts = [
        step if isinstance(step, Raw) else encode_json(step, root="chain", limits=limits) for step in steps
    ]
    return b"".join((b"[", b",".join(texts), b"]"))


def step_map(step: Step) -> SignatureMap:
    """Decode a step. Raises BadMessage if it is not a signature."""
    return check_signature(decode_json(bytes(step)) if isinstance(step, Raw) else step)


def readable_steps(steps: Iterable[Step]) -> list[Any]:
    """Return the steps as values, without unreadable ones."""
    values: list[Any] = []
    for step in steps:
        try:
            values.append(decode_json(bytes(step)) if isinstance(step, Raw) else step)
        except BadMessage:
            continue
    return values


def answering(step: Step, reply_to: str) -> Step:
    """Return the step with the address for its result, without which the chain's result would be lost."""
    if _has_reply_to(step):
        return step
    found = step_map(step)
    return {**found, "options": {**found["options"], "reply_to": reply_to}}


def _has_reply_to(step: Step) -> bool:
    if not isinstance(step, Raw):
        return "reply_to" in step["options"]
    try:
        return _answered(step).options.reply_to is not UNSET
    except UNREADABLE:
        return False


class _Follows(msgspec.Struct, frozen=True, gc=False):
    """`Embed` of `call.py`, with only the list of steps decoded."""

    callbacks: Raw = Raw(b"null")
    errbacks: Raw = Raw(b"null")
    chain: list[Raw] | None = None
    chord: Raw = Raw(b"null")


class _Options(msgspec.Struct, frozen=True, gc=False):
    reply_to: Raw | UnsetType = UNSET


class _Answered(msgspec.Struct, frozen=True, gc=False):
    options: _Options = _Options()


_CHAIN = b'"chain"'
_encode = msgspec.json.Encoder().encode
_parts = msgspec.json.Decoder(tuple[Raw, Raw, _Follows]).decode
_answered = msgspec.json.Decoder(_Answered).decode
