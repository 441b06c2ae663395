"""Steps: what follows a task in its chain; all but the next step stay the bytes that they came as.

A message carries all later steps of its chain, as Celery's do. A worker looks at the next one only: the
others go into its message as they are, so that a step costs little more in a long chain than in a short one.
What is wrong with a step is found when it is the next. Only JSON is cut like this.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from umbel.errors import BadMessage
from umbel.wire.limits import Limits
from umbel.wire.signature import SignatureMap, check_signature
from umbel.wire.values import UNREADABLE, decode_json, encode_json

Step = SignatureMap | Raw


def cut_steps(body: bytes) -> tuple[bytes, list[Raw]] | None:
    """The body of a call without the steps of its chain, and those; None: it has none that can be cut out."""
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
    """By the last key of that name, at the end of a body: a large one is not looked through."""
    at = body.rfind(_CHAIN)
    while at >= 0:
        behind = at + len(_CHAIN)
        value = body[behind : behind + 9].lstrip(b" :")
        if value.startswith((b"[", b"null")):  # else it may be a word in a step
            return value.startswith(b"[")
        at = body.rfind(_CHAIN, 0, at)
    return False


def encode_steps(steps: Sequence[Step], limits: Limits) -> bytes:
    texts = [one if isinstance(one, Raw) else encode_json(one, root="chain", limits=limits) for one in steps]
    return b"".join((b"[", b",".join(texts), b"]"))


def step_map(step: Step) -> SignatureMap:
    """BadMessage: it is no signature."""
    return check_signature(decode_json(bytes(step)) if isinstance(step, Raw) else step)


def readable_steps(steps: Iterable[Step]) -> list[Any]:
    """The steps as values, whatever they are; one that cannot be read is left out."""
    values: list[Any] = []
    for step in steps:
        try:
            values.append(decode_json(bytes(step)) if isinstance(step, Raw) else step)
        except BadMessage:
            continue
    return values


def answering(step: Step, reply_to: str) -> Step:
    """The step with the address for its result, or the last result of the chain would be lost."""
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
    """`Embed` of `call.py`, of which only the list of steps is looked at."""

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
