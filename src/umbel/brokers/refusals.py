"""Refusals: texts, errors and log lines for what a broker refuses, shared by all brokers."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from umbel.brokers.interface import Refused
from umbel.errors import BrokerRefused, NotSupported
from umbel.wire.message import Outgoing

log = logging.getLogger("umbel.brokers")
ENVELOPE_BYTES = 64 * 1024  # of a stored message, without its body and headers


def unbound(exchange: str, routing_key: str) -> str:
    """Return why a message for an exchange reaches no queue."""
    return (
        f"no queue is bound to the exchange {exchange!r} for the routing key {routing_key!r}: "
        "start a worker that consumes such a queue, or bind one"
    )


def too_large(size_bytes: int, most_bytes: int) -> str:
    """Return why an unread message is among the dead letters."""
    return (
        f"message refused: it has {size_bytes} bytes, over the limit of {most_bytes} ('message_max_bytes'); "
        "it was not read"
    )


def still_too_large(letter_id: object, size_bytes: int, most_bytes: int) -> str:
    """Return why an unread dead letter is not requeued."""
    return (
        f"dead letter {letter_id} has {size_bytes} bytes, over the limit of {most_bytes}; "
        "raise 'message_max_bytes' here and on the workers, then requeue it"
    )


def signed_for(queue: str) -> BrokerRefused:
    """Return the error for moving a signed message: its signature names the queue, and signing it for another
    queue would make a second valid signature.
    """
    return BrokerRefused(
        f"the next message in {queue!r} is signed for that queue and cannot be moved: "
        "let workers consume it where it is (`umbel control add_consumer`)"
    )


def unsupported(why: str) -> Callable[..., Any]:
    """Return an asynchronous method that raises NotSupported with this reason."""

    async def refuse(*_: object, **__: object) -> Any:
        raise NotSupported(why)

    return refuse


def unsupported_blocking(why: str) -> Callable[..., Any]:
    """Return a blocking method that raises NotSupported with this reason."""

    def refuse(*_: object, **__: object) -> Any:
        raise NotSupported(why)

    return refuse


def partly_requeued(requeued: int, refused: Mapping[int, str]) -> BrokerRefused:
    """Return the error for dead letters that were refused, by their places, while the others were
    requeued.
    """
    return BrokerRefused(
        f"{requeued} dead letters requeued, {len(refused)} refused: {next(iter(refused.values()))}",
        places=[*refused],
    )


def log_refused(refused: Iterable[Refused]) -> None:
    """Log each refused message; results are not logged."""
    for refusal in refused:
        if isinstance(refusal.part, Outgoing):
            fields = {
                "queue": refusal.part.target,
                "task_id": refusal.part.message.correlation_id,
                "why": refusal.reason,
            }
            log.error("broker refused a message; moved to dead letters", extra=fields)
