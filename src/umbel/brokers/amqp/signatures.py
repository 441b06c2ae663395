"""Signatures: how the signature of a message is used once, and the id of the cluster that it is bound to.

RabbitMQ has no "set if absent", but all readers of a stream see one order. A worker that wants to use a
signature writes an entry to `umbel.signatures`, reads on to its own entry, and has the signature if no entry
came before. So two workers never both use it.

Only the delivery that holds the original's claim may use its signature again. A worker that returns a message
frees its signature first. If the worker lost its connection, nothing freed it: RabbitMQ redelivers the
message, which may take the signature over if the session that used it is gone. A copy may be redelivered too;
while the original's session lives, the copy is refused, whatever its headers say.

The end of a signature is written when everything that its message sends is confirmed, and before the message
is acknowledged. If the worker dies in between, the message is delivered again and refused as a copy.

The id of the cluster is the first entry of another stream.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from itertools import count

from umbel.brokers.amqp import topology
from umbel.brokers.amqp.handshake import REPLY_TIMEOUT_S
from umbel.brokers.amqp.locks import is_locked
from umbel.brokers.amqp.publishing import Post, entry
from umbel.brokers.amqp.session import Session, Sessions
from umbel.brokers.amqp.signature_view import (
    ENDED,
    ClusterEntry,
    ClusterView,
    SignatureUse,
    holder_of,
    signatures_lost,
)
from umbel.brokers.amqp.streams import encode_record, read_stream
from umbel.brokers.interface import Ack, Bury, Spend, Tag, Verdict
from umbel.clock import cluster_now
from umbel.errors import BrokerUnavailable
from umbel.protocol.delivery.trust import ClusterId, Doubt

ENTRY_POLL_S = 0.005  # until a confirmed entry is delivered
FREED_POLL_S, FREED_WAIT_S = 0.05, 3.0  # until a session that lost its claims has freed them, or is gone

_numbers = count(1)


class Signatures:
    """The signatures that this broker uses, and its cluster's id."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def spend(self, used: Sequence[Spend]) -> Mapping[Tag, Doubt]:
        """Use these signatures; return the claims whose signatures must not be used, and why."""
        session = await self._sessions.get()
        await session.catch_up()
        active = session.claims.active
        claimed = {spend.tag: active[spend.tag] for spend in used if spend.tag in active}
        refused: dict[Tag, Doubt] = {}
        wanted: dict[str, Spend] = {}
        for spend in used:
            if spend.tag not in claimed:  # its connection ended: its verdict will be a conflict
                continue
            doubt = _doubt(session, spend, is_again=claimed[spend.tag].is_again)
            if doubt is not None or spend.mark in wanted:
                refused[spend.tag] = doubt or Doubt.REPLAYED
            else:
                wanted[spend.mark] = spend
        free = await _freed(session, wanted.values())
        uses = await _try(session, free)
        refused |= {spend.tag: Doubt.REPLAYED for mark, spend in wanted.items() if mark not in uses}
        for spend in used:
            if spend.tag in claimed and spend.tag not in refused:
                claimed[spend.tag].used = uses[spend.mark]
        return refused

    async def cluster_id(self) -> ClusterId | None:
        """Return the id of the cluster; None if it has none."""
        return await _cluster_id(await self._sessions.get())

    async def keep_cluster_id(self, made: ClusterId) -> ClusterId:
        """Store the id unless there is one, and return the stored one.

        A new cluster starts a new record of used signatures.
        """
        session = await self._sessions.get()
        if (found := await _cluster_id(session)) is not None:
            return found
        for stream in (topology.stream_of_cluster(), topology.stream_of_signatures()):
            await session.publisher.declare(stream)
        offsets: list[int] = []
        await read_stream(
            session.link, topology.SIGNATURES, "first", 1, lambda offset, _: offsets.append(offset)
        )
        if not offsets:
            at = 0.0 if made.since else cluster_now()  # an id from a backup was in use before
            await session.publisher.send([_post(signatures_lost(at))])
        record = encode_record(ClusterEntry(made.id, made.since))
        await session.publisher.send([entry(topology.CLUSTER, record)])
        return await _cluster_id(session) or made


async def _cluster_id(session: Session) -> ClusterId | None:
    if topology.CLUSTER not in await session.counts([topology.CLUSTER]):
        return None
    view = ClusterView()
    await read_stream(
        session.link, topology.CLUSTER, "first", 1, lambda offset, incoming: view.apply(offset, incoming.body)
    )
    return view.found


async def begin_signatures(session: Session) -> None:
    """At a worker's start, note whether the record of used signatures was lost: the cluster has an id, and
    the record is empty.
    """
    await session.catch_up()
    await session.note_lost_signatures()
    await session.catch_up()


async def end_signatures(session: Session, verdicts: Sequence[Verdict], finished: Collection[Tag]) -> None:
    """Record that these messages have ended, once everything that they send is confirmed."""
    active = session.claims.active
    tags = [ended.tag for ended in verdicts if isinstance(ended, Ack | Bury) and ended.tag in finished]
    used = [active[tag].used for tag in tags if tag in active]
    posts = [
        _post(SignatureUse(ended.mark, ENDED, ended.expires_at, ended.born))
        for ended in used
        if ended is not None
    ]
    if posts:
        await session.publisher.send(posts)


def _doubt(session: Session, spend: Spend, *, is_again: bool) -> Doubt | None:
    """Return why it may not be used, as far as this is known without asking for its user."""
    view = session.views.signatures
    user = view.user(spend.mark, spend.born)
    if user is None:
        return None if view.reaches(spend.born) else Doubt.STALE
    return None if is_again and user != ENDED else Doubt.REPLAYED


async def _freed(session: Session, wanted: Collection[Spend]) -> dict[str, SignatureUse]:
    """Return the entries that use those signatures that are free, or whose users are gone.

    A server returns the messages of a lost connection a moment before it removes that session's lock, and a
    worker that lost a claim otherwise frees the signature a moment later. So this waits a little.
    """
    view, loop = session.views.signatures, asyncio.get_running_loop()
    deadline = loop.time() + FREED_WAIT_S
    user = f"{session.holder}/{next(_numbers)}"
    found: dict[str, SignatureUse] = {}
    rest = {spend.mark: spend for spend in wanted}
    gone: set[str] = set()
    while rest:
        users = {mark: view.user(mark, spend.born) for mark, spend in rest.items()}
        for holder in {holder_of(name) for name in users.values() if name not in (None, ENDED)} - gone:
            if await _is_gone(session, holder):
                gone.add(holder)
        for mark, known in users.items():
            if known is None or (known != ENDED and _may_take_over(session, mark, known, gone)):
                spend = rest.pop(mark)
                found[mark] = SignatureUse(
                    mark, user, spend.expires_at, spend.born, round(cluster_now()), known or ""
                )
            elif known == ENDED or holder_of(known) == session.holder:
                del rest[mark]
        if not rest or loop.time() > deadline:
            return found
        await asyncio.sleep(FREED_POLL_S)
        await session.catch_up()
    return found


async def _is_gone(session: Session, holder: str) -> bool:
    """Whether the session has ended. Workers of Umbel 0.3 hold no lock; for them RabbitMQ's redelivered flag
    is the only sign.
    """
    if not holder:
        return True
    return holder != session.holder and not await is_locked(session, topology.of_session(holder))


def _may_take_over(session: Session, mark: str, user: str, gone: Collection[str]) -> bool:
    if holder_of(user) != session.holder:
        return holder_of(user) in gone
    return all(
        claimed.used is None or claimed.used.mark != mark for claimed in session.claims.active.values()
    )


async def _try(session: Session, uses: Mapping[str, SignatureUse]) -> Mapping[str, SignatureUse]:
    """Write these entries and read on until it is known which were the first; return those."""
    if not uses:
        return {}
    user = next(iter(uses.values())).user
    attempts = session.views.signatures.attempts
    first = attempts[user] = dict[str, bool]()
    try:
        async with asyncio.timeout(REPLY_TIMEOUT_S):
            await session.publisher.send([_post(use) for use in uses.values()])
            await session.catch_up()
            while len(first) < len(uses):  # the entries are confirmed, and on their way
                await asyncio.sleep(ENTRY_POLL_S)
                await session.catch_up()
    except TimeoutError:
        raise BrokerUnavailable(
            "RabbitMQ did not answer in time whether signed messages were received before (protection "
            "against replay); the messages wait, retrying"
        ) from None
    finally:
        del attempts[user]
    return {mark: use for mark, use in uses.items() if first[mark]}


def _post(use: SignatureUse) -> Post:
    return entry(topology.SIGNATURES, encode_record(use))
