"""Signatures that were used, as entries of the stream `umbel.signatures`, which every worker reads.

RabbitMQ has no "set if it is not there". But all readers of a stream see one order: who wants to use a
signature writes so, reads on to its own entry, and has it if no entry came before. So two workers never
both use one.

A message that RabbitMQ itself marks as redelivered may use its signature again, unless it has ended: its
claimer lost its connection, or gave it back. What the message says of itself does not count. A parked
message is sent anew, so its signature is given back first.

The end is written when all that the message brought is confirmed, and before it is acknowledged. A worker
that dies in between leaves a message behind that has ended; it is then refused as a copy.
"""

from collections.abc import Collection, Sequence
from uuid import uuid4

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.claims import Claimed
from umbel.brokers.amqp.outbox import Post, entry
from umbel.brokers.amqp.records import ENDED, FREE, Use, encode_record
from umbel.brokers.amqp.session import Session
from umbel.brokers.interface import Ack, Bury, Spend, Tag, Verdict


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
        claimed.mark = one.mark
        if user is None:
            tried[one.mark] = one.tag
    expiries = {one.mark: one.expires_at for one in signatures}
    await session.publisher.send([_post(Use(mark, attempt, expiries[mark])) for mark in tried])
    if tried:
        await session.catch_up()
    return frozenset(copies | {tag for mark, tag in tried.items() if view.user(mark) != attempt})


async def end(session: Session, verdicts: Sequence[Verdict], finished: Collection[Tag]) -> None:
    """All that these messages brought is confirmed."""
    standing = session.claims.standing
    tags = [one.tag for one in verdicts if isinstance(one, Ack | Bury) and one.tag in finished]
    marks = [standing[tag].mark for tag in tags if tag in standing]
    if posts := [_post(Use(mark, ENDED)) for mark in marks if mark]:
        await session.publisher.send(posts)


def freed(claimed: Claimed) -> list[Post]:
    """Its message is sent anew."""
    return [_post(Use(claimed.mark, FREE))] if claimed.mark else []


def _post(use: Use) -> Post:
    return entry(topology.SIGNATURES, encode_record(use))
