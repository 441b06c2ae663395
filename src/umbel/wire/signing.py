"""Signing: the signature of task and control messages, and the keys it is made with.

The signature is one more header, which Celery ignores: `1:<key id>:<microseconds>:<HMAC-SHA-256>`. For a
task it covers the queue, all headers, content type and encoding, correlation id, reply address, and the
body as it is sent; for a control request its headers and its body, which holds method, arguments,
destination and ticket. Priority and the broker's own expiration are left out: brokers change them.

Headers are signed in a canonical form (JSON with sorted names), because some brokers and Celery's workers
rewrite them when they give a message back. `redelivered` is left out, because it is theirs to add.
What is read after a check are those canonical headers, so nothing can be read that was not signed.

The first key signs, every key verifies: a key is rotated by adding the new one behind the old on
all machines, then putting it first, and removing the old one when its last message has ended.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
from msgspec.structs import replace

from umbel.errors import BadMessage
from umbel.protocol.delivery.trust import Doubt, Doubted, Proof, Signed, is_replayed
from umbel.wire.message import Message, Outgoing
from umbel.wire.values import UNREADABLE

HEADER = "umbel_signature"
SECRET_MIN_CHARS = 16
KEY_ID_MAX_CHARS = 32
_VERSION = "1"
_MARK_CHARS = 32  # of the 64 that the signature has: 128 bits name it well enough
_ID = re.compile(rf"[A-Za-z0-9_.-]{{1,{KEY_ID_MAX_CHARS}}}")
_SIGNATURE = re.compile(rf"{_VERSION}:({_ID.pattern}):(\d{{1,17}}):([0-9a-f]{{64}})", re.ASCII)
_NOT_SIGNED = (HEADER, "redelivered")
_decode: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])
_sorted_json = msgspec.json.Encoder(order="sorted").encode


class Keyring:
    """The keys of one app, by id; the first one signs. Its text names no secret."""

    def __init__(self, keys: Sequence[tuple[str, bytes]]) -> None:
        assert keys, "an app without keys has no keyring"
        self._keys = dict(keys)
        self._first = keys[0][0]

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self._keys)

    def __repr__(self) -> str:
        return f"<Keyring {', '.join(self.ids)}>"

    # -- tasks -----------------------------------------------------------------------------------

    def sign_task(self, outgoing: Outgoing, now: float) -> Outgoing:
        """The message with a signature of this moment, whatever it had before."""
        message = outgoing.message
        headers = _canonical(message.headers)
        signature = self._sign(now, *_task_parts(message, outgoing.queue, headers))
        signed = replace(message, headers=_with_signature(headers, signature))
        return replace(outgoing, message=signed)

    def check_task(self, message: Message, queue: str) -> tuple[Proof, Message]:
        """What is to be thought of it, and the message with nothing in its headers but what was signed."""
        try:
            found = _decode.decode(message.headers)
        except UNREADABLE:
            return Doubted(Doubt.UNSIGNED, "its headers cannot be read"), message
        claimed = found.get(HEADER)
        if claimed is None:
            return Doubted(Doubt.UNSIGNED, "it has no signature"), message
        headers = _without_own(found)
        proof = self._check(claimed, *_task_parts(message, queue, headers))
        if isinstance(proof, Doubted):
            return proof, message
        return proof, replace(message, headers=_with_signature(headers, str(claimed)))

    def requeued(self, outgoing: Outgoing, reason: str, now: float) -> Outgoing:
        """A dead letter as it is requeued: signed again, unless it was a copy."""
        return outgoing if is_replayed(reason) else self.renewed(outgoing, now)

    def renewed(self, outgoing: Outgoing, now: float) -> Outgoing:
        """The message signed again if its old signature is valid, however old it is."""
        proof, _ = self.check_task(outgoing.message, outgoing.queue)
        return outgoing if isinstance(proof, Doubted) else self.sign_task(outgoing, now)

    def resigned(self, old: Outgoing, new: Outgoing, now: float) -> Outgoing:
        """A message that was made from an old one: signed if that was, by one of our keys."""
        proof, _ = self.check_task(old.message, old.queue)
        return new if isinstance(proof, Doubted) else self.sign_task(new, now)

    # -- control ---------------------------------------------------------------------------------

    def sign_request(self, headers: bytes, body: bytes, now: float) -> bytes:
        """The headers, with the signature."""
        canonical = _canonical(headers)
        return _with_signature(canonical, self._sign(now, b"control", canonical, body))

    def check_request(self, headers: bytes, body: bytes) -> Proof:
        try:
            found = _decode.decode(headers)
        except UNREADABLE:
            return Doubted(Doubt.UNSIGNED, "its headers cannot be read")
        claimed = found.get(HEADER)
        if claimed is None:
            return Doubted(Doubt.UNSIGNED, "it has no signature")
        return self._check(claimed, b"control", _without_own(found), body)

    # -- the parts of it -------------------------------------------------------------------------

    def _sign(self, now: float, *parts: bytes) -> str:
        opening = f"{_VERSION}:{self._first}:{max(0, round(now * 1e6))}"
        return f"{opening}:{_mac(self._keys[self._first], opening, parts)}"

    def _check(self, claimed: object, *parts: bytes) -> Proof:
        match = _SIGNATURE.fullmatch(claimed) if isinstance(claimed, str) else None
        if match is None or not isinstance(claimed, str):
            return Doubted(Doubt.FORGED, "its signature has an unknown format")
        key_id, at_us, mac = match.groups()
        secret = self._keys.get(key_id)
        if secret is None:
            return Doubted(Doubt.FORGED, f"signed with the key {key_id!r}, which is not among 'signing_keys'")
        from hmac import compare_digest  # with it comes OpenSSL, which processes without keys need not load

        if not compare_digest(_mac(secret, claimed[: match.end(2)], parts), mac):
            return Doubted(Doubt.FORGED, f"the signature of key {key_id!r} does not match the message")
        return Signed(key_id, int(at_us) / 1e6, mac[:_MARK_CHARS])


@lru_cache(maxsize=16)
def keyring_of(keys: tuple[str, ...]) -> Keyring | None:
    """The keys as the settings have them, `id:secret`; None where there are none."""
    return Keyring([_key(one) for one in keys]) if keys else None


def key_problem(keys: Sequence[str]) -> str:
    """What is wrong with keys as the settings have them, without a word of their secrets; "": nothing."""
    seen: set[str] = set()
    for place, one in enumerate(keys, 1):
        key_id, colon, secret = one.partition(":")
        if not colon:
            return f"key {place} must be written as ID:SECRET"
        if not _ID.fullmatch(key_id):
            return f"the id of key {place} must be 1 to {KEY_ID_MAX_CHARS} letters, digits, '_', '.' or '-'"
        if key_id in seen:
            return f"the key id {key_id!r} is used twice"
        if len(secret) < SECRET_MIN_CHARS:
            return f"the secret of key {key_id!r} must have at least {SECRET_MIN_CHARS} characters"
        seen.add(key_id)
    return ""


def shown_keys(keys: Sequence[str]) -> list[str]:
    """The ids, for people."""
    return [f"{one.partition(':')[0]}:***" for one in keys]


def _key(text: str) -> tuple[str, bytes]:
    key_id, _, secret = text.partition(":")
    return key_id, secret.encode()


def _task_parts(message: Message, queue: str, headers: bytes) -> tuple[bytes, ...]:
    names = (queue, message.content_type, message.content_encoding, message.correlation_id, message.reply_to)
    return (b"task", *(name.encode("utf-8", "surrogatepass") for name in names), headers, message.body)


def _mac(secret: bytes, opening: str, parts: Sequence[bytes]) -> str:
    """Each part after its length, so that no two lists of parts give the same bytes."""
    lengths = " ".join([opening, *(str(len(part)) for part in parts), ""])
    from hmac import digest  # likewise

    return digest(secret, b"".join((lengths.encode(), *parts)), "sha256").hex()


def _canonical(headers: bytes) -> bytes:
    try:
        return _without_own(_decode.decode(headers))
    except UNREADABLE as error:
        raise BadMessage(f"the headers must be a JSON object to be signed: {error}") from None


def _without_own(headers: dict[str, Any]) -> bytes:
    for name in _NOT_SIGNED:
        headers.pop(name, None)
    return _sorted_json(headers)


def _with_signature(headers: bytes, signature: str) -> bytes:
    comma = b"," if len(headers) > 2 else b""
    return b'%b%b"%b":"%b"}' % (headers[:-1], comma, HEADER.encode(), signature.encode())
