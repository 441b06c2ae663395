"""Publishing: from messages to commands, for both faces of the broker.

A batch is one command, one transaction or one script, so that it is there as a whole or not at all. A
message that is not yet due goes into the list like any other, with a mark: a Celery worker can
take it and waits for its `eta`, and a claim of ours moves it aside.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from os import urandom
from typing import Any

from umbel.brokers.interface import Broadcast
from umbel.brokers.redis.keys import Keys
from umbel.errors import BrokerRefused
from umbel.wire.envelope_redis import seal, seal_broadcast, seal_result
from umbel.wire.message import Outgoing, StoredResult

Command = Sequence[Any]
ARGUMENTS_MAX = 50_000  # of one command; the server's own limit is about a million
# The server closes a connection that sends it a gigabyte at once; envelopes are a third larger than bodies.
BATCH_BYTES_MAX = 384 * 1024 * 1024
CALL_BYTES_MAX = 64 * 1024 * 1024  # of what need not go together: others wait for the server meanwhile


def weight_of(part: Outgoing | StoredResult) -> int:
    """The bytes that count."""
    if isinstance(part, StoredResult):
        return len(part.payload)
    return len(part.message.body) + len(part.message.headers)


def portions(parts: Sequence[Outgoing | StoredResult], count_max: int) -> Iterator[range]:
    """The places of those that go in one call each."""
    first = weight = 0
    for place, part in enumerate(parts):
        if place > first and (place - first == count_max or weight + weight_of(part) > CALL_BYTES_MAX):
            yield range(first, place)
            first, weight = place, 0
        weight += weight_of(part)
    if parts:
        yield range(first, len(parts))


def check_weight(batch: Sequence[Outgoing]) -> None:
    weight = sum([len(one.message.body) + len(one.message.headers) for one in batch])
    if weight > BATCH_BYTES_MAX:
        queues = ", ".join(sorted({repr(one.queue) for one in batch})[:3])
        raise BrokerRefused(
            f"a batch of {weight:,} bytes for {queues} exceeds the limit of {BATCH_BYTES_MAX:,}: send fewer "
            "messages at once, or store large data elsewhere and send its address"
        )


def publication(
    keys: Keys, batch: Sequence[Outgoing], here: Container[str] = ()
) -> tuple[list[Any], list[Command]]:
    """The arguments of the script `publish` after the prefix, if it is needed, and commands that follow it.

    One list takes a batch wholly or not at all, so that nothing need be asked before. Several lists are
    asked first, in the same script, and parked messages belong into it. A batch too large for a script
    is pushed in a transaction after one that only asks.
    """
    if len(batch) == 1 and weight_of(batch[0]) <= BATCH_BYTES_MAX:  # as most are
        (one,) = batch
        if not one.not_before or one.queue not in here:
            key = keys.list_of(one.queue, one.message.priority)
            return [], [("LPUSH", key, sealed(one, urandom(16).hex(), one.not_before))]
    check_weight(batch)
    places = {(one.queue, one.message.priority) for one in batch}
    is_plain = len({keys.list_of(queue, priority) for queue, priority in places}) == 1
    if is_plain and not any(one.not_before and one.queue in here for one in batch):
        return [], push(keys, batch)
    if len(batch) <= ARGUMENTS_MAX:
        return parkable(keys, batch, here), []
    return questions(keys, batch), push(keys, batch)


def questions(keys: Keys, batch: Iterable[Outgoing]) -> list[Any]:
    """The same arguments, to ask only whether the lists take messages: if not, the answer says why."""
    lists = dict.fromkeys(keys.list_of(one.queue, one.message.priority) for one in batch)
    return [part for key in lists for part in (key, 0, "", "")]


def push(keys: Keys, batch: Sequence[Outgoing]) -> list[Command]:
    """As Celery does: everything into the lists."""
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
    """For the scripts: list, due, field, envelope of each message; they park what is not due.

    What is for a queue that is not consumed `here` goes into its list as clients send it: maybe
    only Celery consumes it, and who parks for others wakes up for them too late.
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
    return [
        (
            "PUBLISH",
            keys.channel(one.exchange, one.routing_key),
            seal_broadcast(one.exchange, one.routing_key, one.body, one.headers, tag),
        )
        for one, tag in zip(batch, delivery_tags(len(batch)), strict=True)
    ]


def delivery_tags(count: int) -> list[str]:
    """Unique ones, also in processes that were forked from each other."""
    digits = urandom(16 * count).hex()
    return [digits[first : first + 32] for first in range(0, 32 * count, 32)]
