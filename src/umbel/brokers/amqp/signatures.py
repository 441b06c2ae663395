"""Signatures that were used, as entries of the stream `umbel.signatures`, which every worker reads.

RabbitMQ has no "set if it is not there". But all readers of a stream see one order: who wants to use a
signature writes so, reads on to its own entry, and has it if no entry came before. So two workers never
both use one.

A message that RabbitMQ itself marks as redelivered may use its signature again, unless it has ended: its
claimer lost its connection, or gave it back. What the message says of itself does not count. A parked
message is sent again, so its signature is freed first.

The end is written when all that the message brought is confirmed, and before it is acknowledged. A worker
that dies in between leaves a message behind that has ended; it is then refused as a copy.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from uuid import uuid4

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.claims import Claimed
from umbel.brokers.amqp.handshake import REPLY_TIMEOUT_S
from umbel.brokers.amqp.outbox import Post, entry
from umbel.brokers.amqp.records import ENDED, FREE, Use, encode_record
from umbel.brokers.amqp.session import Session
from umbel.brokers.interface import Ack, Bury, Spend, Tag, Verdict
from umbel.errors import BrokerUnavailable

LOOK_AGAIN_S = 0.005


async def spend(session: Session, signatures: Sequence[Spend]) -> frozenset[Tag]:
    view, standing = session.views.signatures, session.claims.standing
    await session.catch_up()
    attempt, copies, tried = str(uuid4()), set[Tag](), dict[str, Tag]()
    for one in signatures:
        claimed = standing.get(one.tag)
        if claimed is None:  # the connection went with it: its verdict will be a conflict
            continue
        user = view.user(one.mark)
        if one.mark in tried or user == ENDED or (user is not None and not claimed.is_again):
            copies.add(one.tag)
            continue
        if user is None:
            tried[one.mark] = one.tag
    expiries = {one.mark: one.expires_at for one in signatures}
    first = await _try(session, [Use(mark, attempt, expiries[mark]) for mark in tried]) if tried else {}
    copies |= {tag for mark, tag in tried.items() if not first[mark]}
    for one in signatures:
        if one.tag not in copies and (claimed := standing.get(one.tag)) is not None:
            claimed.mark = one.mark  # the end of a copy ends nothing else
    return frozenset(copies)


async def _try(session: Session, uses: Sequence[Use]) -> Mapping[str, bool]:
    """Write that these are used, and read on until it is known of each whether that came first."""
    attempts = session.views.signatures.attempts
    first = attempts[uses[0].user] = dict[str, bool]()
    try:
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            await session.publisher.send([_post(use) for use in uses])
            await session.catch_up()
            while len(first) < len(uses):  # it is confirmed, and on its way
                await asyncio.sleep(LOOK_AGAIN_S)
                await session.catch_up()
    except TimeoutError:
        raise BrokerUnavailable(
            "RabbitMQ did not deliver the records of used signatures in time; retrying"
        ) from None
    finally:
        del attempts[uses[0].user]
    return first


async def end(session: Session, verdicts: Sequence[Verdict], finished: Collection[Tag]) -> None:
    """All that these messages brought is confirmed."""
    standing = session.claims.standing
    tags = [one.tag for one in verdicts if isinstance(one, Ack | Bury) and one.tag in finished]
    marks = [standing[tag].mark for tag in tags if tag in standing]
    if posts := [_post(Use(mark, ENDED)) for mark in marks if mark]:
        await session.publisher.send(posts)


def freed(claimed: Claimed) -> list[Post]:
    """Free the signature of a message that is sent again."""
    return [_post(Use(claimed.mark, FREE))] if claimed.mark else []


def _post(use: Use) -> Post:
    return entry(topology.SIGNATURES, encode_record(use))
