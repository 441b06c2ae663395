"""Publishing: from messages, broadcasts and revokes to commands, for all producers of the broker.

A batch is one command, one transaction or one script, so it is published as a whole or not at all. A message
that is not due yet goes into the list like any other, with a mark that says when it is due: a Celery worker
can take it and waits for its `eta`, and a claim of Umbel delays it.

Redis has no exchanges (wire 2.3). A consumer records in a set that it has bound a queue; a publisher reads
that set and pushes to the lists of all queues that match. The set is read just before the message is sent, in
a separate call, so a queue that is bound in between is not reached, as with Celery.

The types of exchanges are not stored, but a binding of a topic exchange has a pattern and one of a direct
exchange has none. The pattern is the binding key as a regular expression. Anyone who can write to Redis can
write another pattern, so the binding key is matched instead, with the same result as Celery's pattern. A
fanout exchange is a pub/sub channel in Celery, whose messages are lost while no client listens, so no queue
of tasks can be bound to one here.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from os import urandom
from typing import Any

import msgspec
from msgspec.structs import replace

from umbel.brokers.interface import Ack, Broadcast, Bury, DeclaredBinding, DeclaredQueue, Refused, Verdict
from umbel.brokers.interface.connection import why_reserved
from umbel.brokers.redis.keys import RESERVED, Keys
from umbel.brokers.refusals import unbound
from umbel.errors import BrokerRefused, RevokesFull
from umbel.wire.envelope_redis import seal, seal_broadcast, seal_result
from umbel.wire.message import Outgoing, StoredResult, matches
from umbel.wire.records import Revoke

# ---- messages --------------------------------------------------------------------------------------

Command = Sequence[Any]
ARGUMENTS_MAX = 50_000  # of one command; the server's limit is about a million
# The server closes a connection that sends a gigabyte at once; envelopes are a third larger than bodies.
BATCH_BYTES_MAX = 384 * 1024 * 1024
DECLARE_AGAIN_S = 10.0  # the server may have been emptied
CALL_BYTES_MAX = 64 * 1024 * 1024  # of parts that need not go together: other clients wait meanwhile


def weight_of(part: Outgoing | StoredResult) -> int:
    """The size in bytes that counts towards the limits."""
    if isinstance(part, StoredResult):
        return len(part.payload)
    return len(part.message.body) + len(part.message.headers)


def portions(parts: Sequence[Outgoing | StoredResult], count_max: int) -> Iterator[range]:
    """The ranges of parts that go in one call each."""
    first = weight = 0
    for place, part in enumerate(parts):
        if place > first and (place - first == count_max or weight + weight_of(part) > CALL_BYTES_MAX):
            yield range(first, place)
            first, weight = place, 0
        weight += weight_of(part)
    if parts:
        yield range(first, len(parts))


def check_weight(batch: Sequence[Outgoing]) -> None:
    """Raise BrokerRefused for a batch that is too large for one call."""
    weight = sum([len(outgoing.message.body) + len(outgoing.message.headers) for outgoing in batch])
    if weight > BATCH_BYTES_MAX:
        queues = ", ".join(sorted({repr(outgoing.queue) for outgoing in batch})[:3])
        raise BrokerRefused(
            f"a batch of {weight:,} bytes for {queues} exceeds the limit of {BATCH_BYTES_MAX:,}: send fewer "
            "messages at once, or store large data elsewhere and send its address"
        )


def publication(
    keys: Keys, batch: Sequence[Outgoing], here: Container[str] = ()
) -> tuple[list[Any], list[Command]]:
    """The arguments of the script `publish`, if it is needed, and the commands that follow it.

    One list takes a batch as a whole or not at all, so no check is needed before. Several lists are checked
    first, in the same script, which also delays messages. A batch that is too large for a script is pushed in
    a transaction, after a script that only checks.
    """
    if len(batch) == 1 and weight_of(batch[0]) <= BATCH_BYTES_MAX:  # as most are
        (outgoing,) = batch
        if not outgoing.not_before or outgoing.queue not in here:
            key = keys.list_of(outgoing.queue, outgoing.message.priority)
            return [], [("LPUSH", key, sealed(outgoing, urandom(16).hex(), outgoing.not_before))]
    check_weight(batch)
    places = {(outgoing.queue, outgoing.message.priority) for outgoing in batch}
    is_plain = len({keys.list_of(queue, priority) for queue, priority in places}) == 1
    if is_plain and not any(outgoing.not_before and outgoing.queue in here for outgoing in batch):
        return [], push(keys, batch)
    if len(batch) <= ARGUMENTS_MAX:
        return parkable(keys, batch, here), []
    return questions(keys, batch), push(keys, batch)


def questions(keys: Keys, batch: Iterable[Outgoing]) -> list[Any]:
    """Arguments with which the script only checks whether the lists take messages; its error says why not."""
    lists = dict.fromkeys(keys.list_of(outgoing.queue, outgoing.message.priority) for outgoing in batch)
    return [part for key in lists for part in (key, 0, "", "")]


def push(keys: Keys, batch: Sequence[Outgoing]) -> list[Command]:
    """The commands that push everything into the lists, as Celery does."""
    lists: dict[str, list[bytes]] = {}
    places: dict[tuple[str, int], list[bytes]] = {}  # the same lists; some priorities share one
    for outgoing, tag in zip(batch, delivery_tags(len(batch)), strict=True):
        queue, message = outgoing.queue, outgoing.message
        place = places.get((queue, message.priority))
        if place is None:
            place = lists.setdefault(keys.list_of(queue, message.priority), [])
            places[queue, message.priority] = place
        place.append(sealed(outgoing, tag, outgoing.not_before))
    commands: list[Command] = [
        ("LPUSH", key, *envelopes[first : first + ARGUMENTS_MAX])
        for key, envelopes in lists.items()
        for first in range(0, len(envelopes), ARGUMENTS_MAX)
    ]
    return commands if len(commands) == 1 else [("MULTI",), *commands, ("EXEC",)]


def sealed(outgoing: Outgoing, tag: str, not_before: float) -> bytes:
    """The envelope of a message whose queue is known."""
    return seal(
        outgoing.message,
        outgoing.queue,
        tag,
        not_before,
        redelivered=outgoing.redelivered,
        exchange=outgoing.exchange,
        routing_key=outgoing.routing_key,
    )


def parkable(keys: Keys, batch: Iterable[Outgoing], here: Container[str]) -> list[Any]:
    """For the scripts: list, due, field, envelope of each message; they delay what is not due.

    A message for a queue that is not consumed `here` goes into its list as clients send it: perhaps only
    Celery consumes the queue, and a delayed message would come to Celery's workers too late.
    """
    sent = list(batch)
    args: list[Any] = []
    for outgoing, tag in zip(sent, delivery_tags(len(sent)), strict=True):
        queue, due = outgoing.queue, outgoing.not_before
        key = keys.list_of(queue, outgoing.message.priority)
        is_parked = due and queue in here
        not_before = 0.0 if is_parked else due
        envelope = sealed(outgoing, tag, not_before)
        args += (key, f"{due if is_parked else 0.0:.6f}", f"{tag}:p:{key}", envelope)
    return args


def push_results(keys: Keys, results: Sequence[StoredResult], ttl_ms: int) -> list[Command]:
    """Push each result to the list of the client that asked. Unread results expire after the TTL."""
    commands: list[Command] = []
    for result, tag in zip(results, delivery_tags(len(results)), strict=True):
        key = keys.list_of(result.reply_to, 0)
        commands.append(("LPUSH", key, seal_result(result, tag)))
        if ttl_ms:
            commands.append(("PEXPIRE", key, ttl_ms))
    return commands


def fan_out(keys: Keys, batch: Sequence[Broadcast]) -> list[Command]:
    """The commands that publish broadcasts on Celery's channels."""
    return [
        (
            "PUBLISH",
            keys.channel(message.exchange, message.routing_key),
            seal_broadcast(message.exchange, message.routing_key, message.body, message.headers, tag),
        )
        for message, tag in zip(batch, delivery_tags(len(batch)), strict=True)
    ]


def delivery_tags(count: int) -> list[str]:
    """Unique tags, also in processes that were forked from each other."""
    digits = urandom(16 * count).hex()
    return [digits[first : first + 32] for first in range(0, 32 * count, 32)]


REPLY_QUEUE_TTL_MS = 30_000


def reply_commands(keys: Keys, reply: Broadcast, bound: Sequence[bytes]) -> list[Sequence[Any]]:
    """The commands that push a reply to every queue bound with its routing key; `bound` is the binding set of
    the exchange.
    """
    commands: list[Sequence[Any]] = []
    member_start = reply.routing_key.encode(errors="replace") + keys.sep.encode()
    for member in bound:
        if not member.startswith(member_start):
            continue
        _, _, queue = [*member.decode(errors="replace").split(keys.sep), "", ""][:3]
        if queue:
            (tag,) = delivery_tags(1)
            envelope = seal_broadcast(reply.exchange, reply.routing_key, reply.body, reply.headers, tag)
            name = keys.list_of(queue, 0)
            commands += (("LPUSH", name, envelope), ("PEXPIRE", name, REPLY_QUEUE_TTL_MS))
    return commands


def append_arguments(
    entries: Sequence[tuple[str, bytes]], counts: Sequence[int], most: int
) -> list[str | bytes | int]:
    """The arguments of the script `event_log` that append these entries."""
    arguments: list[str | bytes | int] = ["append", most]
    for (key, body), count in zip(entries, counts or [1] * len(entries), strict=True):
        arguments += (key, count, body)
    return arguments


def hold_arguments(key: str, task_id: str, ttl_s: float) -> tuple[str, str, str, int]:
    """The arguments of the script `unique` that take a key."""
    return "hold", key, task_id, max(1, round(ttl_s * 1000))


# ---- bindings --------------------------------------------------------------------------------------

_RESERVED = tuple(name.removesuffix("*") for name in RESERVED)  # how such names begin
_Tables = Mapping[str, Sequence[bytes]]  # the binding sets of exchanges


@dataclass(slots=True)
class Routed:
    """Messages with the queues they go to; by their index, why others go nowhere."""

    batch: list[Outgoing] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)


class Bindings:
    """The declared queues of a project, and the routing of messages by the bindings in Redis."""

    def __init__(self, keys: Keys, declared: Sequence[DeclaredQueue] = ()) -> None:
        self._keys = keys
        self._declared = {queue.name: queue for queue in declared}
        bindings = [binding for queue in declared for binding in queue.bindings]
        self._fanouts = {binding.exchange.name for binding in bindings if binding.exchange.kind == "fanout"}

    def problem(self, queue: str) -> str:
        """Why a queue cannot be consumed as it is declared; "" if it can."""
        declared = self._declared.get(queue)
        for binding in declared.bindings if declared is not None else ():
            exchange = binding.exchange.name
            if binding.exchange.kind not in ("direct", "topic"):
                kind = binding.exchange.kind
                return (
                    f"the queue {queue!r} is bound to the {kind} exchange {exchange!r}, which Umbel does not "
                    "support on Redis: use a direct or topic exchange, or RabbitMQ"
                )
            if self._keys.sep in binding.routing_key or self._keys.sep in queue:
                return (
                    f"the binding of the queue {queue!r} to the exchange {exchange!r} for "
                    f"{binding.routing_key!r} contains the separator {self._keys.sep!r} "
                    "(transport option 'sep')"
                )
        return ""

    def declare(self, queues: Iterable[str]) -> list[Command]:
        """The commands that make queues known to Umbel, and by permanent bindings to Celery."""
        commands: list[Command] = []
        for queue in queues:
            commands.append(("SADD", self._keys.queues, queue))
            for exchange, member in self._members(queue):
                commands.append(("SADD", self._keys.binding(exchange), member))
                commands.append(("SADD", self._keys.permanent_binding(exchange), member))
        return commands

    def are_plain(self, batch: Iterable[Outgoing]) -> bool:
        """Whether all messages go to the queues that they name, as most do: then `route` changes nothing."""
        return all(not outgoing.exchange and not outgoing.queue.startswith(_RESERVED) for outgoing in batch)

    def read(self, batch: Iterable[Outgoing]) -> list[Command]:
        """The commands that read the binding sets which `route` needs for this batch."""
        return [("SMEMBERS", self._keys.binding(exchange)) for exchange in _exchanges(batch)]

    def route_all(self, batch: Sequence[Outgoing], found: Sequence[Sequence[bytes]]) -> list[Outgoing]:
        """As `route`; BrokerRefused if a message reaches no queue, and then nothing may be sent."""
        routed = self.route(batch, found)
        if routed.refused:
            first = min(routed.refused)
            more = f" (and {len(routed.refused) - 1} more messages)" if len(routed.refused) > 1 else ""
            raise BrokerRefused(f"cannot send a message{more}: {routed.refused[first]}")
        return routed.batch

    def route(self, batch: Sequence[Outgoing], found: Sequence[Sequence[bytes]]) -> Routed:
        """Each message once for each queue that it reaches; refused for a queue whose name is reserved.

        `found`: the replies to `read`.
        """
        return self._route(batch, dict(zip(_exchanges(batch), found, strict=True)))

    def _route(self, batch: Sequence[Outgoing], tables: _Tables) -> Routed:
        routed = Routed()
        for place, outgoing in enumerate(batch):
            if not outgoing.exchange:
                if why := why_reserved(RESERVED, outgoing.queue):
                    routed.refused[place] = why
                else:
                    routed.batch.append(outgoing)
                continue
            queues = self._matching(tables[outgoing.exchange], outgoing.routing_key)
            routed.batch += [replace(outgoing, queue=queue) for queue in queues]
            if outgoing.exchange in self._fanouts:
                routed.refused[place] = (
                    f"Umbel sends no tasks to a fanout exchange on Redis ({outgoing.exchange!r})"
                )
            elif not queues:
                routed.refused[place] = unbound(outgoing.exchange, outgoing.routing_key)
        return routed

    def route_verdicts(
        self, verdicts: Sequence[Verdict], follow_ups: Sequence[Outgoing], found: Sequence[Sequence[bytes]]
    ) -> tuple[list[Verdict], list[Refused]]:
        """The verdicts with follow-ups that name their queues, and the follow-ups that reach no queue.

        `found`: the replies to `read` for all these follow-ups.
        """
        tables = dict(zip(_exchanges(follow_ups), found, strict=True))
        judged: list[Verdict] = []
        refused: list[Refused] = []
        for verdict in verdicts:
            if isinstance(verdict, Ack | Bury) and verdict.follow_ups:
                routed = self._route(verdict.follow_ups, tables)
                refused += [Refused(verdict.follow_ups[place], why) for place, why in routed.refused.items()]
                judged.append(replace(verdict, follow_ups=routed.batch))
            else:
                judged.append(verdict)
        return judged, refused

    def _members(self, queue: str) -> list[tuple[str, str]]:
        """The exchanges that the queue is bound to, and the bindings as the sets store them."""
        declared = self._declared.get(queue)
        if declared is not None:
            return [
                (
                    binding.exchange.name,
                    self._keys.binding_member(binding.routing_key, _pattern(binding), queue),
                )
                for binding in declared.bindings
                if binding.exchange.name
            ]
        if self._keys.sep in queue:  # no publisher could read such a binding
            return []
        return [(queue, self._keys.binding_member(queue, "", queue))]

    def _matching(self, members: Iterable[bytes], routing_key: str) -> list[str]:
        found = set()
        for member in members:
            parts = member.decode(errors="replace").split(self._keys.sep)
            if len(parts) == 3 and parts[2]:
                key, pattern, queue = parts
                if _fits(key, routing_key) if pattern else key == routing_key:
                    found.add(queue)
        return sorted(found)


def _exchanges(batch: Iterable[Outgoing]) -> list[str]:
    return list(dict.fromkeys(outgoing.exchange for outgoing in batch if outgoing.exchange))


def pattern_of(binding_key: str) -> str:
    """A topic exchange's binding key as a regular expression, in the form of Celery 5.7."""
    words = [_WILDCARDS.get(word) or _escaped(word) for word in binding_key.split(".")]
    return "^" + r"\.".join(words) + "$"


_WILDCARDS = {"*": r"[^\.]+", "#": r".*?"}


def _escaped(word: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "#*" else "\\" + letter for letter in word)


def _pattern(binding: DeclaredBinding) -> str:
    return pattern_of(binding.routing_key) if binding.exchange.kind == "topic" else ""


@lru_cache(maxsize=1024)
def _fits(binding_key: str, routing_key: str) -> bool:
    """Whether a binding of a topic exchange matches; in Celery's form `#` stands for one word or more."""
    words = [part for word in binding_key.split(".") for part in (("*", "#") if word == "#" else (word,))]
    return matches(words, routing_key.split("."))


# ---- revokes ---------------------------------------------------------------------------------------

REVOKES_AT_ONCE = 2000
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class RevokeBatch:
    """One call of the script `revoke`, which records revokes."""

    arguments: Sequence[Any]
    limit: int
    left: int  # revokes in this batch and later ones

    def check(self, recorded: int) -> None:
        """Raise RevokesFull if the script's reply says that the record is full."""
        if recorded < 0:
            raise RevokesFull(
                f"the revoke record is at its limit of {self.limit:,} entries: {self.left} more were not "
                "recorded; raise `revokes_max`, shorten `revoke_retention_s`, or purge the queue instead"
            )


def revokes_to_record(revokes: Sequence[Revoke], limit: int) -> Iterator[RevokeBatch]:
    """The batches for these revokes, to be sent in order and checked one after another."""
    for first in range(0, len(revokes), REVOKES_AT_ONCE):
        entries: list[str | bytes] = []
        for revoke in revokes[first : first + REVOKES_AT_ONCE]:
            entries += (f"{revoke.task_id}\0{revoke.header}", f"{revoke.expires_at:.6f}", _encode(revoke))
        yield RevokeBatch(("record", limit, *entries), limit, len(revokes) - first)
