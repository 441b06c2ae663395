"""Publishing without blocking: the decisions of `sending/sending.py`, awaited.

A send has `publish_timeout_s` for all of it: the result backend, its turn, the connection, the answer. What
fails before anything was written to the broker is tried again until then. After that the outcome is
unknown: a broker that knows what it was sent gets it again, elsewhere the sender is told at once
(`SendUnknown`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import TypeVar

from umbel.app.aio.clients import LoopClient
from umbel.app.configuration.settings import Settings
from umbel.app.running.request import Request
from umbel.app.sending.patience import Patience
from umbel.app.sending.sending import Publication
from umbel.brokers.interface import BATCH_MAX, Attempt
from umbel.errors import BrokerUnavailable, SendUnknown, TooLarge
from umbel.wire.message import Outgoing

T = TypeVar("T")


async def publish(
    client: LoopClient, batch: Sequence[Outgoing], settings: Settings, request: Request | None, ends: float
) -> bool:
    """Whether it was sent; False: it is kept until the running task ends."""
    if len(batch) > BATCH_MAX:
        raise TooLarge(
            f"{len(batch)} messages in one batch, over the limit of {BATCH_MAX}; send smaller batches"
        )
    publication = Publication(batch, settings, request)
    if publication.must_wait():
        return False
    try:
        left_s = _left_s(ends)
        await _send(client, publication.messages, left_s, patience_s=min(publication.timeout_s, left_s))
    except BrokerUnavailable as error:
        return publication.failed(error)
    return publication.succeeded()


async def patiently(work: Callable[[], Awaitable[T]], ends: float, what: str) -> T:
    """Retry while the broker is unavailable and time is left; it ends in time."""
    timeout_s = _left_s(ends)
    patience = Patience(timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return await work()
                except BrokerUnavailable as error:
                    pause_s = patience.pause_s(error)
                await asyncio.sleep(pause_s)
    except TimeoutError:
        raise BrokerUnavailable(f"{what}: no answer within {timeout_s:.3g} s") from None


def _left_s(ends: float) -> float:
    left_s = ends - monotonic()
    if left_s <= 0:
        raise BrokerUnavailable(
            "nothing was sent: 'publish_timeout_s' ran out first; check the broker, or raise it"
        )
    return left_s


async def _send(
    client: LoopClient, batch: Sequence[Outgoing], timeout_s: float, *, patience_s: float
) -> None:
    attempt, patience = Attempt(), Patience(patience_s, client.may_tell_of_outage)
    try:
        async with asyncio.timeout(timeout_s), client.gate.room(batch), client.producer() as producer:
            while True:
                try:
                    return await producer.publish(batch, attempt)
                except BrokerUnavailable as error:
                    if attempt.is_out and not producer.repeats:
                        raise
                    pause_s = patience.pause_s(error)
                await asyncio.sleep(pause_s)
                client.check_open()
    except TimeoutError:
        if not attempt.is_out:
            raise BrokerUnavailable(f"the broker could not be reached within {timeout_s:.3g} s") from None
        raise _unknown(batch, f"the broker did not answer within {timeout_s:.3g} s") from None
    except BrokerUnavailable as error:
        if not attempt.is_out:
            raise
        raise _unknown(batch, str(error)) from error


def _unknown(batch: Sequence[Outgoing], why: str) -> SendUnknown:
    return SendUnknown([one.message.correlation_id for one in batch], why)
