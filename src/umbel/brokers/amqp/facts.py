"""Facts: writing to the stream that says who holds what, and learning what became of it.

RabbitMQ confirms an entry a moment before its readers get it. So a writer adds a mark
and reads until the mark arrives: then it has read its entry, and all that came before.
"""

import asyncio
from secrets import token_hex

from umbel.brokers.amqp import outbox, topology
from umbel.brokers.amqp.records import Changed, Fact, MarkFact, encode_record
from umbel.brokers.amqp.session import Session
from umbel.errors import BrokerUnavailable

LOOK_AGAIN_S = 0.002


async def change(session: Session, fact: Changed, *, timeout_s: float) -> bool:
    """Whether it counted: nobody changed the same thing since we read it."""
    with session.views.facts.attempt(fact) as counted:
        await tell(session, fact, timeout_s=timeout_s)
        return counted()


async def tell(session: Session, *facts: Fact, timeout_s: float) -> None:
    """When this returns, the facts are confirmed, and the views know them and all that came before."""
    mark, read = MarkFact(token_hex(8)), asyncio.Event()
    awaited = session.views.facts.awaited
    awaited[mark.nonce] = read.set
    try:
        entries = [outbox.entry(topology.FACTS, encode_record(fact)) for fact in (*facts, mark)]
        await session.publisher.send(entries)
        async with asyncio.timeout(timeout_s):
            await session.catch_up()
            while not read.is_set():
                await asyncio.sleep(LOOK_AGAIN_S)
                await session.catch_up()
    except TimeoutError:
        raise BrokerUnavailable(
            f"RabbitMQ confirmed a write to {topology.FACTS} but did not deliver it within "
            f"{timeout_s:g} s; try again"
        ) from None
    finally:
        awaited.pop(mark.nonce, None)
