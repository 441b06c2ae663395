"""Publishing: from messages to commands, for both faces of the broker.

A batch is one command, or one transaction, so that it is there as a whole or not at all. A
message that is not yet due goes into the list like any other, with a mark: a Celery worker can
take it and waits for its `eta`, and a claim of ours moves it aside.
"""

from collections.abc import Iterable, Sequence
from os import urandom
from typing import Any

from umbel.brokers.interface import Broadcast
from umbel.brokers.redis.keys import SEP, Keys
from umbel.wire.envelope_redis import seal, seal_broadcast
from umbel.wire.message import Outgoing

Command = Sequence[Any]
ARGUMENTS_MAX = 50_000  # of one command; the server's own limit is about a million


def push(keys: Keys, batch: Sequence[Outgoing]) -> list[Command]:
    """As Celery does: everything into the lists."""
    lists: dict[str, list[bytes]] = {}
    for outgoing, tag in zip(batch, delivery_tags(len(batch)), strict=True):
        queue, message = outgoing.queue, outgoing.message
        envelope = seal(message, queue, tag, outgoing.not_before)
        lists.setdefault(keys.list_of(queue, message.priority), []).append(envelope)
    commands: list[Command] = [
        ("LPUSH", key, *envelopes[first : first + ARGUMENTS_MAX])
        for key, envelopes in lists.items()
        for first in range(0, len(envelopes), ARGUMENTS_MAX)
    ]
    return commands if len(commands) == 1 else [("MULTI",), *commands, ("EXEC",)]


def parkable(keys: Keys, batch: Iterable[Outgoing]) -> list[Any]:
    """For the scripts: list, due, field, envelope of each message; they park what is not due."""
    sent = list(batch)
    args: list[Any] = []
    for outgoing, tag in zip(sent, delivery_tags(len(sent)), strict=True):
        key = keys.list_of(outgoing.queue, outgoing.message.priority)
        envelope = seal(outgoing.message, outgoing.queue, tag)
        args += (key, f"{outgoing.not_before:.6f}", f"{tag}:p:{key}", envelope)
    return args


def declare(keys: Keys, queues: Iterable[str]) -> list[Command]:
    """Make queues known: to us, and to Celery as bound to the exchange of the same name, for good."""
    commands: list[Command] = []
    for queue in queues:
        binding = f"{queue}{SEP}{SEP}{queue}"
        commands += (
            ("SADD", keys.queues, queue),
            ("SADD", keys.binding(queue), binding),
            ("SADD", keys.permanent_binding(queue), binding),
        )
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
