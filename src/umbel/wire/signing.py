"""Signing: signatures of task and control messages, and the keys.

The signature is an additional header, which Celery ignores: `1:<key id>:<microseconds>:<HMAC-SHA-256>`. For a
task it covers the queue, all headers, content type and encoding, correlation id, reply address, and the body
as it is sent. For a control request it covers the headers and the body, which contains method, arguments,
destination and ticket. The broker's expiration is not covered, because brokers change it.

Another header, which the signature covers, binds the message: `umbel_bound:
<cluster>/<priority>/<digest>/<nonce>`. The cluster is the id in its broker. The digest covers everything else
that the task can see: the sender's other properties, and the exchange and routing key of the message. The
nonce, usually empty, identifies the message whose signature this one renews; two renewals of one message have
the same mark, so only one of them runs. Umbel 0.3 neither writes nor reads this header. Its signature is the
same otherwise, so both versions can verify each other's.

Headers are signed in a canonical form (JSON with sorted names), because some brokers and Celery's workers
rewrite them when they return a message. `redelivered` is not covered, because they may add it. After
verification only the canonical headers are read, so nothing can be read that was not signed.

A row of an outbox is signed but not bound, because it is written where no broker may be reachable. The relay
verifies that signature, and binds the message when it publishes it.

A worker that turns a verified message into a dead letter adds a voucher to the letter's reason. A letter
without a voucher is not signed again, because it may be a copy that somebody put there.

The first key signs, every key verifies. To rotate a key, add the new one after the old on all machines, then
put it first, and remove the old one when its last message has ended.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from umbel.errors import BadMessage, WireError
from umbel.protocol.delivery.trust import ClusterId, Doubt, Doubted, Proof, Signed
from umbel.wire.message import Message, Outgoing, parse_instant
from umbel.wire.show import brief
from umbel.wire.values import UNREADABLE

HEADER, BOUND, CAUSE = "umbel_signature", "umbel_bound", "umbel_unsigned"
SECRET_MIN_CHARS = 16
KEY_ID_MAX_CHARS = 32
CLUSTER_MAX_CHARS = 64
_VERSION = "1"
_TRIED = "+"  # in a nonce, before the number of earlier attempts of its message
_MARK_CHARS = 32  # of the signature's 64 characters: 128 bits identify it
_ID = re.compile(rf"[A-Za-z0-9_.-]{{1,{KEY_ID_MAX_CHARS}}}")
_CLUSTER = re.compile(rf"[A-Za-z0-9_.-]{{1,{CLUSTER_MAX_CHARS}}}")
_SIGNATURE = re.compile(rf"{_VERSION}:({_ID.pattern}):(\d{{1,17}}):([0-9a-f]{{64}})", re.ASCII)
_VOUCHER = re.compile(rf" \[verified ({_SIGNATURE.pattern})\]", re.ASCII)
_OWN = (HEADER, BOUND, CAUSE, "redelivered")
_decode: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])
_sorted_json = msgspec.json.Encoder(order="sorted").encode
_to_json = msgspec.json.encode
_CANNOT_BE_READ = Doubted(Doubt.UNSIGNED, "its headers cannot be read")


class Keyring:
    """The keys of one app, by id; the first one signs. Its repr does not show secrets."""

    def __init__(self, keys: Sequence[tuple[str, bytes]]) -> None:
        assert keys, "a keyring needs at least one key"
        from hmac import compare_digest, digest  # loads OpenSSL, which processes without keys do not need

        self._keys = dict(keys)
        self._first, self._secret = keys[0]
        self._digest, self._is_same = digest, compare_digest

    @property
    def ids(self) -> tuple[str, ...]:
        """Return the ids of the keys."""
        return tuple(self._keys)

    def __repr__(self) -> str:
        return f"<Keyring {', '.join(self.ids)}>"

    def sign_row(self, outgoing: Outgoing, now: float) -> Outgoing:
        """Return the message for an outbox: signed, but not yet bound to a cluster."""
        return self.signed_task(outgoing, now, b"")

    def signed_task(
        self, outgoing: Outgoing, now: float, bound: bytes, *, is_canonical: bool = False
    ) -> Outgoing:
        """Return the message with a new signature, which replaces an older one; `bound` is the binding.

        `is_canonical`: its headers are those of a `CallTemplate`, none of which sorts after `umbel_bound`. A
        message that came through an exchange and now goes directly to a queue loses the exchange, because
        Redis does not store it.
        """
        message = outgoing.message
        if is_canonical and bound:
            headers = b'%b,"umbel_bound":"%b"}' % (message.headers[:-1], bound)
        else:
            headers = _canonical(message.headers, bound)
        queue = "" if outgoing.exchange else outgoing.queue
        signature = self.sign(now, *_task_parts(message, queue, headers))
        signed = replace(message, headers=_with_signature(headers, signature), exchange="", routing_key="")
        return replace(outgoing, message=signed)

    def sign(self, now: float, *parts: bytes) -> str:
        """Return the signature of these parts at this time."""
        opening = f"{_VERSION}:{self._first}:{max(0, round(now * 1e6))}"
        return f"{opening}:{self._digest(self._secret, _to_sign(opening, parts), 'sha256').hex()}"

    def check(self, claimed: object, *parts: bytes) -> Proof:
        """Verify the claimed signature of these parts, which may be any value."""
        match = _SIGNATURE.fullmatch(claimed) if isinstance(claimed, str) else None
        if match is None or not isinstance(claimed, str):
            return Doubted(Doubt.FORGED, "its signature has an unknown format")
        key_id, at_us, mac = match.groups()
        secret = self._keys.get(key_id)
        if secret is None:
            return Doubted(Doubt.FORGED, f"signed with the key {key_id!r}, which is not among 'signing_keys'")
        found = self._digest(secret, _to_sign(claimed[: match.end(2)], parts), "sha256").hex()
        if not self._is_same(found, mac):
            return Doubted(Doubt.FORGED, f"the signature of key {key_id!r} does not match the message")
        return Signed(key_id, int(at_us) / 1e6, mac[:_MARK_CHARS])


class Letter(NamedTuple):
    """What is known about a dead letter or a stored failure.

    `nonce` comes from a worker's voucher, for the message that replaces this one; "": there is no voucher.
    """

    proof: Proof
    nonce: str = ""


class Signer:
    """The keys of one app, and the cluster that it signs for."""

    def __init__(self, keyring: Keyring, cluster: ClusterId) -> None:
        self.keyring = keyring
        self.cluster = cluster
        self._prefix = f"{cluster.id}/"

    # -- tasks -----------------------------------------------------------------------------------

    def sign_task(
        self, outgoing: Outgoing, now: float, *, nonce: str = "", is_canonical: bool = False
    ) -> Outgoing:
        """Return the message with a new signature, which replaces an older one.

        `nonce`: of two messages with the same nonce, and the same number of attempts since, only one runs.
        """
        bound = self._bound(outgoing, nonce).encode()
        return self.keyring.signed_task(outgoing, now, bound, is_canonical=is_canonical)

    def check_task(self, message: Message, queue: str) -> tuple[Proof, Message]:
        """Verify a message; return the result, and the message with only the signed headers.

        Usually the headers are the bytes that were signed, followed by the signature. Then they need not be
        encoded again for the comparison. Brokers and Celery's workers may have encoded them differently.
        """
        headers = message.headers
        try:
            seen = _seen.decode(headers)
        except UNREADABLE:
            return _CANNOT_BE_READ, message
        claimed = seen.umbel_signature
        if claimed is None:
            return Doubted(Doubt.UNSIGNED, _unsigned_because(seen.umbel_unsigned)), message
        goes_to = "" if message.exchange else queue
        if isinstance(claimed, str) and headers.endswith(ending := _signature_at_the_end(claimed)):
            plain = headers[: -len(ending)] + b"}"
            proof = self.keyring.check(claimed, *_task_parts(message, goes_to, plain))
            if isinstance(proof, Signed):
                return self._judged(proof, message, queue, seen), message
        try:
            plain = _sorted_json(_without(_decode.decode(headers), HEADER, "redelivered"))
            seen = _seen.decode(plain)  # of duplicate headers, every reader uses the last
        except UNREADABLE:  # text that is not UTF-8 is found only when all of it is read
            return _CANNOT_BE_READ, message
        proof = self.keyring.check(claimed, *_task_parts(message, goes_to, plain))
        if isinstance(proof, Signed):
            proof = self._judged(proof, message, queue, seen)
        if isinstance(proof, Doubted):
            return proof, message
        return proof, replace(message, headers=_with_signature(plain, str(claimed)))

    def renewed(self, outgoing: Outgoing, now: float) -> Outgoing:
        """Return the message signed again if its old signature is valid, however old it is."""
        proof, _ = self.check_task(outgoing.message, outgoing.queue)
        return outgoing if isinstance(proof, Doubted) else self.sign_task(outgoing, now)

    def published_row(self, outgoing: Outgoing, now: float) -> Outgoing:
        """Return the message of an outbox row, bound to the cluster if one of this app's keys signed it."""
        proof, _ = self.check_task(outgoing.message, outgoing.queue)
        if (
            isinstance(proof, Doubted) or proof.is_bound
        ):  # rows are never bound, so this message was taken from a broker
            return outgoing
        return self.sign_task(outgoing, now, nonce=proof.mark)

    # -- dead letters ----------------------------------------------------------------------------

    def vouched(self, reason: str, message: Message, queue: str, now: float) -> str:
        """Return the reason of a dead letter with this worker's voucher that it verified the message."""
        signature = _signature_of(message.headers)
        if not signature:
            return reason
        return f"{reason} [verified {self.keyring.sign(now, *self._letter_parts(signature, queue, reason))}]"

    def letter(self, message: Message, queue: str, stored: str) -> Letter:
        """Verify a dead letter. `stored` is its reason; a voucher counts only for this message and reason."""
        proof, _ = self.check_task(message, queue)
        reason, voucher = split_voucher(stored)
        if isinstance(proof, Doubted) or not voucher:
            return Letter(proof)
        parts = self._letter_parts(_signature_of(message.headers), queue, reason)
        word = self.keyring.check(voucher, *parts)
        return Letter(proof, word.mark if isinstance(word, Signed) else "")

    def _letter_parts(self, signature: str, queue: str, reason: str) -> tuple[bytes, ...]:
        return _encoded("letter", self.cluster.id, queue, signature, reason)

    # -- control and elections -------------------------------------------------------------------

    def sign_request(self, headers: bytes, body: bytes, now: float) -> bytes:
        """Return a control request's headers with the signature."""
        canonical = _canonical(headers, self.cluster.id.encode())
        return _with_signature(canonical, self.keyring.sign(now, b"control", canonical, body))

    def check_request(self, headers: bytes, body: bytes) -> Proof:
        """Verify a control request."""
        try:
            found = _decode.decode(headers)
        except UNREADABLE:
            return _CANNOT_BE_READ
        claimed, bound = found.get(HEADER), found.get(BOUND)
        if claimed is None:
            return Doubted(Doubt.UNSIGNED, "it has no signature")
        parts = b"control", _sorted_json(_without(found, HEADER, "redelivered")), body
        proof = self.keyring.check(claimed, *parts)
        if isinstance(proof, Doubted) or bound == self.cluster.id:
            return proof
        return _elsewhere(bound, self.cluster.id) if bound is not None else proof.replaced(is_bound=False)

    def sign_action(self, election_id: str, action: Mapping[str, Any], now: float) -> dict[str, Any]:
        """Return the signed action of an election that sends a task."""
        plain = {name: value for name, value in action.items() if name != HEADER}
        return {**plain, HEADER: self.keyring.sign(now, *self._action_parts(election_id, plain))}

    def check_action(self, election_id: str, action: Mapping[str, Any]) -> Proof:
        """Verify the action of an election."""
        claimed = action.get(HEADER)
        if claimed is None:
            return Doubted(Doubt.UNSIGNED, "it has no signature")
        plain = {name: value for name, value in action.items() if name != HEADER}
        return self.keyring.check(claimed, *self._action_parts(election_id, plain))

    def _action_parts(self, election_id: str, action: Mapping[str, Any]) -> tuple[bytes, ...]:
        return *_encoded("election", self.cluster.id, election_id), _sorted_json(action)

    # -- binding ---------------------------------------------------------------------------------

    def _bound(self, outgoing: Outgoing, nonce: str = "") -> str:
        digest = _digest(outgoing.message, outgoing.exchange, outgoing.routing_key)
        return f"{self._prefix}{outgoing.message.priority}/{digest}/{nonce}"

    def _judged(self, proof: Signed, message: Message, queue: str, seen: "_Seen") -> Proof:
        """Check that a valid signature is for this cluster, and set the mark that identifies its use."""
        bound, nonce = seen.umbel_bound, ""
        if bound is not None:
            plain = not (message.properties or message.exchange)
            if plain and bound == f"{self._prefix}{message.priority}//" and seen.eta is None:
                return proof
            cluster, _, rest = bound.partition("/") if isinstance(bound, str) else ("", "", "")
            if cluster != self.cluster.id:
                return _elsewhere(bound, self.cluster.id)
            passed, _, nonce = rest.rpartition("/")
            if passed != f"{message.priority}/{_digest(message, message.exchange, message.routing_key)}":
                why = "its priority, properties or exchange are not those that were signed"
                return Doubted(Doubt.FORGED, why)
        mark = proof.mark
        if nonce:  # Umbel 0.3 copies the header to a retry, which is another message
            name, _, tried = nonce.partition(_TRIED)
            mark = _mark_of(name, str(_tries_since(tried, seen.retries)))
        if message.exchange:  # it may route the message to several queues
            mark = _mark_of(mark, queue)
        return proof.replaced(mark=mark, is_bound=bound is not None, due=_due(seen.eta))


class _Seen(msgspec.Struct, frozen=True, gc=False):
    """The headers that the verification reads, of any type."""

    umbel_signature: Any = None
    umbel_bound: Any = None
    umbel_unsigned: Any = None
    retries: Any = None
    eta: Any = None


_seen = msgspec.json.Decoder(_Seen)


def nonce_after(nonce: str, retries: object) -> str:
    """Return the nonce of a message that had this many attempts before it became a dead letter.

    `umbel dlq requeue` continues counting from there, `umbel task retry` from 0; only one of the two messages
    runs.
    """
    return f"{nonce}{_TRIED}{retries}" if nonce and isinstance(retries, int) and retries > 0 else nonce


@lru_cache(maxsize=16)
def keyring_of(keys: tuple[str, ...]) -> Keyring | None:
    """Return the keys from the settings, `id:secret`; None if there are none."""
    return Keyring([_key(key) for key in keys]) if keys else None


@lru_cache(maxsize=16)
def signer_of(keyring: Keyring, cluster: str) -> Signer:
    """Return a signer for code that only signs, and need not know since when the cluster has its id."""
    return Signer(keyring, ClusterId(cluster))


def marked_unsigned(outgoing: Outgoing, cause: str) -> Outgoing:
    """Return the message without a signature, and with the id of the unsigned task that sends it."""
    headers = _canonical(outgoing.message.headers, b"")
    comma = b"," if len(headers) > 2 else b""
    marked = b'%b%b"%b":%b}' % (headers[:-1], comma, CAUSE.encode(), _to_json(cause))
    return replace(outgoing, message=replace(outgoing.message, headers=marked))


def split_voucher(stored: str) -> tuple[str, str]:
    """Return the reason of a dead letter for display, and the worker's voucher; "" if there is none."""
    at = stored.rfind(" [verified ")
    match = _VOUCHER.fullmatch(stored, at) if at >= 0 else None
    return (stored, "") if match is None else (stored[:at], match[1])


def cluster_problem(name: str) -> str:
    """Return what is wrong with a cluster id; "" if it is valid."""
    if _CLUSTER.fullmatch(name):
        return ""
    return f"the id of a cluster must be 1 to {CLUSTER_MAX_CHARS} letters, digits, '_', '.' or '-'"


def key_problem(keys: Sequence[str]) -> str:
    """Return what is wrong with keys from the settings, without showing secrets; "" if they are valid."""
    seen: set[str] = set()
    for place, key in enumerate(keys, 1):
        key_id, colon, secret = key.partition(":")
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
    """Return the ids of the keys, for display."""
    return [f"{key.partition(':')[0]}:***" for key in keys]


def _key(text: str) -> tuple[str, bytes]:
    key_id, _, secret = text.partition(":")
    return key_id, secret.encode()


def _task_parts(message: Message, queue: str, headers: bytes) -> tuple[bytes, ...]:
    return (
        b"task",
        queue.encode("utf-8", "surrogatepass"),
        message.content_type.encode("utf-8", "surrogatepass"),
        message.content_encoding.encode("utf-8", "surrogatepass"),
        message.correlation_id.encode("utf-8", "surrogatepass"),
        message.reply_to.encode("utf-8", "surrogatepass"),
        headers,
        message.body,
    )


def _to_sign(opening: str, parts: Sequence[bytes]) -> bytes:
    """Join the parts, each after its length, so that different lists of parts never give the same bytes."""
    lengths = " ".join([opening, *map(str, map(len, parts)), ""])
    return b"".join((lengths.encode(), *parts))


def _canonical(headers: bytes, bound: bytes) -> bytes:
    """Return the headers in the form that is signed, without those of an older signature."""
    try:
        found = _decode.decode(headers)
    except UNREADABLE as error:
        raise BadMessage(f"the headers must be a JSON object to be signed: {error}") from None
    found = _without(found, *_OWN)
    if bound:
        found[BOUND] = bound.decode()
    return _sorted_json(found)


def _without(headers: dict[str, Any], *names: str) -> dict[str, Any]:
    for name in names:
        headers.pop(name, None)
    return headers


def _with_signature(headers: bytes, signature: str) -> bytes:
    ending = _signature_at_the_end(signature)
    return headers[:-1] + (ending if len(headers) > 2 else ending[1:])


def _signature_at_the_end(signature: str) -> bytes:
    return b',"umbel_signature":"%b"}' % signature.encode("utf-8", "surrogatepass")


def _due(eta: object) -> float:
    """Return when the task is due by its headers; reading all headers reports an invalid time."""
    if not isinstance(eta, str):
        return 0.0
    with suppress(WireError):
        return parse_instant(eta)
    return 0.0


def _tries_since(tried: str, retries: object) -> object:
    return retries - int(tried) if tried and isinstance(retries, int) else retries


def _signature_of(headers: bytes) -> str:
    try:
        found = _decode.decode(headers).get(HEADER)
    except UNREADABLE:
        return ""
    return found if isinstance(found, str) else ""


def _digest(message: Message, exchange: str, routing_key: str) -> str:
    """Return a digest of everything that reaches the task and is not signed directly."""
    if not (message.properties or exchange):
        return ""
    from hashlib import sha256  # loads OpenSSL

    try:
        properties = _sorted_json(_decode.decode(message.properties)) if message.properties else b""
    except UNREADABLE:
        properties = message.properties
    via = (exchange, routing_key if exchange else "")
    return sha256(b"\0".join((*_encoded(*via), properties))).hexdigest()[:_MARK_CHARS]


def _mark_of(*parts: str) -> str:
    from hashlib import sha256  # loads OpenSSL

    return sha256(b"\0".join(_encoded(*parts))).hexdigest()[:_MARK_CHARS]


def _encoded(*texts: str) -> tuple[bytes, ...]:
    return tuple(text.encode("utf-8", "surrogatepass") for text in texts)


def _unsigned_because(cause: object) -> str:
    if isinstance(cause, str) and cause:
        return f"it has no signature: it was sent by the task {brief(cause)}, whose message was unsigned"
    return "it has no signature"


def _elsewhere(bound: object, cluster: str) -> Doubted:
    named = bound.partition("/")[0] if isinstance(bound, str) else bound
    why = f"signed for the cluster {brief(named)}, and this one is {cluster!r}; compare 'signing_cluster'"
    return Doubted(Doubt.FORGED, why)
