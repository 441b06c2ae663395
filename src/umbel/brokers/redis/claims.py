"""Claims: how a worker takes messages from a Redis server and settles them.

What must happen together is one script (`*.lua`), which reads the server's clock; this file sends it and
reads its reply. `holding.py` records what is claimed and what is in doubt. `waiting.py` finds out when there
may be a message to take, and which one the server handed over without a claim.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from umbel.brokers.interface import (
    Ack,
    BrokerSettings,
    Bury,
    Claim,
    Permit,
    Refused,
    Replaced,
    SetAside,
    Settled,
    Spend,
    Started,
    Tag,
    Verdict,
)
from umbel.brokers.redis.address import Address
from umbel.brokers.redis.broadcasts import ASKER_LIFE_S, sweep_askers
from umbel.brokers.redis.holding import (
    Holding,
    LargeMessages,
    Leases,
    Limits,
    VerdictGroup,
    envelope_max_bytes,
)
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.queues import keep_limits
from umbel.brokers.redis.verdicts import in_calls, settlement, ttl_ms_of
from umbel.brokers.redis.waiting import Adoptions, QueueWatch
from umbel.errors import BrokerError, ClusterIdLost
from umbel.protocol.delivery.trust import Doubt
from umbel.protocol.shutdown import LinkChange
from umbel.wire.records import Revoke
from umbel.wire.values import UNREADABLE

LOST_CHECKS_PER_LEASE = 3
REPLY_SLACK_BYTES = 2**20
ASIDE = b"!"  # in the reply of a claim: a message over the size limit, which is a dead letter now
REVOKES_PAGE = 5000
UNPARK_MAX_S = 5.0

log = logging.getLogger("umbel.brokers.redis")
_revoke = msgspec.json.Decoder(Revoke).decode


class Claims:
    """`declare` makes queues known before anything is taken from them.

    `on_replaced` is called when the server's data was replaced, after the claims are compared with it.
    """

    def __init__(
        self,
        link: Link,
        keys: Keys,
        settings: BrokerSettings,
        addresses: Sequence[Address],
        *,
        declare: Callable[[Sequence[str]], Awaitable[None]],
        on_replaced: Callable[[Replaced], None],
        on_link: Callable[[LinkChange], None],
    ) -> None:
        self.consumed: frozenset[str] = frozenset()  # the queues of the last claim
        self._link = link
        self._keys = keys
        self._lease_s = settings.lease_s
        self._message_max_bytes = settings.message_max_bytes
        self._envelope_max_bytes = envelope_max_bytes(settings.message_max_bytes)
        self._ttl_ms = ttl_ms_of(settings.result_expires_s)
        self._keep_limits = keep_limits(settings)
        self._declare = declare
        self._on_replaced = on_replaced
        self._watch = QueueWatch(
            addresses,
            keys,
            timeout_s=settings.connect_timeout_s,
            reply_max_bytes=self._envelope_max_bytes + REPLY_SLACK_BYTES,
            unblock=self._unblock,
            claims_at=lambda: link.address,
            on_link=on_link,
        )
        self._holding = Holding(keys)
        self._limits = Limits(link, keys, self._holding, lease_s=settings.lease_s)
        self._large = LargeMessages(link, keys)
        self._leases = Leases(link, keys, lease_s=settings.lease_s)
        self._adoptions = Adoptions(link, keys, self._holding, self._leases, lease_s=settings.lease_s)
        self._compared_on = 1  # the generation of connections on which claims were compared with the data
        self._renewing = asyncio.Lock()
        self._last_queue = ""  # had the last turn in the last claim
        self._lost_checked_at = float("-inf")
        self._sweep_askers_at = 0.0
        self._marks: dict[Tag, str] = {}  # of the signatures that claimed messages have used
        self._passed_over: dict[str, str] = {}  # queues that cannot be claimed from, and why

    async def reconnect(self, *, is_doubtful: bool) -> None:
        """Restore the waiting connection; `is_doubtful`: replace it, because another connection was lost."""
        await self._watch.reconnect(is_doubtful=is_doubtful)

    def close(self) -> None:
        """Close the waiting connection."""
        self._watch.close()

    async def claim(self, owner: str, queues: Sequence[str], limit: int, *, revoked_after: int) -> Claim:
        """Take up to `limit` messages: the one that the server handed over, or those that a script takes."""
        handed, self._watch.handed = self._watch.handed, None
        if limit > 0 and (given := self._adoptions.begin(handed, owner, queues, revoked_after)) is not None:
            return Claim([given], (), revoked_after)
        await self._declare(queues)
        await self._adoptions.finish()
        if self._adoptions.take_left() == 0 and self._may_wait_on(queues, revoked_after):
            return Claim((), (), revoked_after)
        self.consumed = frozenset(queues)
        await self._give_back_lost_claims()
        returned = await self.return_lost(by_turn=True) if self._time_for_lost() else 0
        ticket = self._holding.begin()
        args = (
            owner,
            self._lease_s,
            ticket,
            self._link.generation,
            limit,
            revoked_after,
            REVOKES_PAGE,
            int(self._large.is_wanted),
            self._envelope_max_bytes,
            self._message_max_bytes,
            *self._watch.unless_idle(self._in_turn(queues)),
        )
        try:
            epoch, now_s, cursor, revokes, _, broken, *taken = await self._link.run(
                self._keys.script("claim"), *args
            )
            aside, taken = self._without_aside(taken)
            taken = await self._large.read(owner, epoch, ticket, taken, float(now_s))
        except BaseException:
            # The server may have run the claim, and no worker would ever settle its messages.
            self._holding.give_up(owner, ticket)
            self._send_back_lost_claims()
            raise
        self._leases.note_time(float(now_s))
        self._note_passed_over(broken)
        self._watch.is_given_up = False
        self._watch.claimed_cursor = int(float(cursor))
        lease_ended = self._holding.has_ended(owner, epoch)
        deliveries = self._holding.take_in(owner, ticket, epoch, taken)
        if deliveries:
            self._last_queue = deliveries[-1].queue
        news = _standing(revokes, float(now_s))
        return Claim(
            deliveries, news, self._watch.claimed_cursor, returned, lease_ended=lease_ended, set_aside=aside
        )

    async def wait_ready(self, queues: Sequence[str], timeout_s: float, *, owner: str = "") -> bool:
        """Wait until a queue may have a message, or until the time-out: False."""
        return await self._watch.wait(queues, timeout_s, owner=owner)

    async def renew(self, owner: str) -> bool:
        """Renew the owner's lease; after a reconnect or loss of data compare its claims with the server's."""
        if self._watch.handed is not None or self._watch.is_given_up:
            # The owner has not claimed since, and may not claim for a long time.
            self._watch.handed, self._watch.is_given_up = None, False
            await self._adoptions.finish()
            await self._leases.unhand(owner)
        async with self._renewing:
            if self._compared_on == self._link.generation and await self._leases.prolong(owner):
                return True
            renewal = await self._leases.renew(owner)
            generation = self._link.generation
            if renewal.is_lost:  # the owner has no claims left to compare
                self._holding.end_hold(owner)
            elif renewal.is_replaced or self._compared_on != generation:
                self._compared_on = -1
                await self._compare(owner, is_replaced=renewal.is_replaced)
            self._compared_on = generation
        return renewal.is_replaced or (renewal.stood and not renewal.is_lost)

    async def _compare(self, owner: str, *, is_replaced: bool) -> None:
        """Compare claims: a restarted server may have lost the last writes, or have been given a backup."""
        await self._adoptions.finish()
        await self._give_back_lost_claims()
        adopting = self._adoptions.pending
        under_way, held = self._holding.known_of(owner, adopting=adopting, ever=is_replaced)
        newest = self._holding.newest_ticket
        args = (owner, newest, len(under_way), *under_way, *held)
        returned, *gone = await self._link.run(self._keys.script("reconcile"), *args)
        missing = self._holding.still_held(field.decode() for field in gone)
        # A claim has ended although the lease has not: the data does not have its message.
        if is_replaced or returned or missing or self._holding.has_lost:
            self._holding.forget_unknown(missing)
            what = f"Redis at {self._link.address.shown} has other or older data"
            self._on_replaced(Replaced(what, self._holding.unknown))

    async def _notice_replaced(self) -> None:
        """Check after ended claims whether the data was replaced, before the next renewal would notice."""
        for owner in self._leases.owners:
            if await self._leases.is_replaced(owner):
                await self.renew(owner)

    async def return_lost(self, *, by_turn: bool = False) -> int:
        """Return the messages of owners whose lease ended, and sweep dead clients and task limits."""
        self._lost_checked_at = time.monotonic()
        if by_turn and not (await self._leases.has_turn() or await self._leases.some_ended()):
            return 0
        if time.monotonic() > self._sweep_askers_at:
            self._sweep_askers_at = time.monotonic() + ASKER_LIFE_S
            await sweep_askers(self._link, self._keys)
        returned = await self._leases.return_ended()
        await self._limits.sweep()
        return returned

    def leave(self) -> None:
        """Stop waiting, so that the server hands over no message; nothing is fetched ahead of a claim."""
        self._watch.leave()

    async def forget_owner(self, owner: str) -> int:
        """Return all messages of an owner that stops; after the last worker also delayed ones, for Celery."""
        await self._link.connect()
        await self._adoptions.finish()
        self._unblock(self._watch.client_id)  # else the server might hand it a message afterwards
        count = await self._leases.forget(owner)
        self._drop(self._holding.forget(owner))
        await self._limits.sweep()
        await self._leases.unpark(owner, at_most_s=UNPARK_MAX_S)
        return count

    async def ended(self, tags: Sequence[Tag]) -> frozenset[Tag]:
        """Return the claims among these that have ended."""
        await self._adoptions.finish()
        holds, gone = self._holding.holds_of(tags)
        for hold in holds:
            epoch = await self._link.call("HGET", self._keys.inflight(hold.owner), "epoch")
            if epoch != hold.epoch:
                gone += holds[hold]
        if gone:
            await self._notice_replaced()
        return self._holding.without_unknown(gone)

    async def settle(self, verdicts: Sequence[Verdict]) -> Settled:
        """Apply verdicts, one call for each hold; claims of unfinished calls become doubtful."""
        await self._adoptions.finish()
        groups, conflicts = self._holding.judge(verdicts)
        applied, waiting, ended = 0, list(groups), list[VerdictGroup]()
        refused: list[Refused] = []
        self._holding.settling += groups
        try:
            while waiting:
                group = waiting[0]
                if await self._settle_group(group, refused):
                    applied += len(group.verdicts)
                else:
                    ended.append(group)
                self._holding.settled(waiting.pop(0))
            for verdict in (verdict for group in ended for verdict in group.verdicts):
                self._holding.lose(verdict.tag)
                conflicts.add(verdict.tag)
            if conflicts:
                await self._notice_replaced()
        except (asyncio.CancelledError, BrokerError):
            self._holding.restore([*ended, *waiting])
            raise
        finally:
            self._holding.settling = [sent for sent in self._holding.settling if sent not in groups]
        self._drop(conflicts)
        unknown = self._holding.take_unknown(conflicts)
        return Settled(applied, frozenset[Tag](conflicts - unknown), tuple(refused), unknown=unknown)

    async def spend(self, signatures: Sequence[Spend], cluster: str) -> Mapping[Tag, Doubt]:
        """Use the signatures of claimed messages; returns the copies. ClusterIdLost if the id changed."""
        await self._adoptions.finish()
        now, args, asked = time.time(), list[Any](), list[Spend]()
        for use in signatures:
            if (
                owner := self._holding.owner_of(use.tag)
            ) is not None:  # otherwise its verdict will be a conflict
                args += (use.mark, owner, use.tag, max(1, round((use.expires_at - now) * 1000)))
                asked.append(use)
        reply = await self._link.run(self._keys.script("spend"), cluster, *args)
        if isinstance(reply, bytes):
            raise ClusterIdLost.of(cluster, reply.decode(errors="replace"))
        copies = dict.fromkeys((asked[place].tag for place in reply), Doubt.REPLAYED)
        self._marks |= {use.tag: use.mark for use in asked if use.tag not in copies}
        return copies

    async def permit(self, asked: Sequence[Permit]) -> Mapping[Tag, str | None]:
        """Ask which claimed messages may start under their cluster limits."""
        await self._adoptions.finish()
        refused = await self._limits.permit(asked)
        self._drop_marks(tag for tag, why in refused.items() if why == "")
        if None in refused.values():
            await self._notice_replaced()
        return refused

    async def purge(self, queue: str) -> int:
        """Remove the waiting messages of a queue; how many there were."""
        return await self._limits.purge(queue)

    # -- private ---------------------------------------------------------------------------------

    def _ending_marks(self, verdicts: Sequence[Verdict]) -> list[str]:
        return [
            self._keys.signature(self._marks[verdict.tag])
            for verdict in verdicts
            if isinstance(verdict, Ack | Bury) and verdict.tag in self._marks
        ]

    def _drop_marks(self, tags: Iterable[Tag]) -> None:
        """Forget the signatures of claims that this process no longer has."""
        for tag in tags:
            self._marks.pop(tag, None)

    def _drop(self, tags: Iterable[Tag]) -> None:
        ended = list(tags)
        self._drop_marks(ended)
        self._limits.forget(ended)

    async def _settle_group(self, group: VerdictGroup, refused: list[Refused]) -> bool:
        hold, check = group.hold, 0 if group.sure else 1
        calls, too_large = in_calls(group.verdicts)
        for verdicts in calls:
            made = settlement(
                self._keys,
                verdicts,
                self._ttl_ms,
                self.consumed,
                keep_limits=self._keep_limits,
                marks=self._ending_marks(verdicts) if self._marks else (),
            )
            args = (hold.owner, hold.epoch, check, self._ttl_ms, *made.arguments())
            reply = await self._link.run(self._keys.script("settle"), *args)
            if not reply:
                return False
            if self._marks:
                self._drop_marks(verdict.tag for verdict in verdicts if not isinstance(verdict, Started))
            if isinstance(reply, list):
                refused += made.refused(self._keys, reply)
            await self._limits.settled(hold.owner, verdicts)
        refused += too_large
        return True

    def _without_aside(self, taken: Sequence[Any]) -> tuple[list[SetAside], list[Any]]:
        """The messages that became dead letters because of their size, and those that were claimed."""
        if ASIDE not in taken[2::4]:
            return [], list(taken)
        aside: list[SetAside] = []
        claimed: list[Any] = []
        for at in range(0, len(taken), 4):
            list_key, size, sign, _ = group = taken[at : at + 4]
            if sign == ASIDE:
                aside.append(SetAside(self._keys.queue_of(list_key.decode(errors="replace")), size))
            else:
                claimed += group
        return aside, claimed

    def _note_passed_over(self, broken: Sequence[bytes]) -> None:
        """Log when a queue cannot be claimed from, and when it can be again, once each."""
        if not broken and not self._passed_over:
            return
        now = {
            queue.decode(): why.decode(errors="replace")
            for queue, why in zip(broken[::2], broken[1::2], strict=True)
        }
        for queue in now.keys() - self._passed_over.keys():
            log.error(
                "cannot fetch messages from a queue; retrying, other queues continue",
                extra={"queue": queue, "why": now[queue]},
            )
        for queue in self._passed_over.keys() - now.keys():
            log.info("queue can be used again; fetching its messages", extra={"queue": queue})
        self._passed_over = now

    def _unblock(self, client_id: int) -> asyncio.Future[list[Any]] | None:
        """End the blocking wait of the waiting connection; otherwise it ends by itself, a little later."""
        if not client_id or not self._link.is_connected:
            return None
        return self._link.send([("CLIENT", "UNBLOCK", client_id)])

    async def _give_back_lost_claims(self) -> None:
        lost = self._holding.lost_tickets
        for owner in list(lost):
            tickets = lost[owner]
            await self._link.run(self._keys.script("abandon"), owner, self._link.generation, *tickets)
            lost.pop(owner, None)

    def _send_back_lost_claims(self) -> None:
        """Give up lost claims without waiting for replies: the server runs a connection's calls in order."""
        lost = self._holding.lost_tickets
        for owner in list(lost):
            if not self._link.is_connected:
                return
            args = (owner, self._link.generation, *lost.pop(owner))
            self._link.send([("EVAL", self._keys.script("abandon").text, 0, *args)])

    def _in_turn(self, queues: Sequence[str]) -> list[str]:
        names = list(dict.fromkeys(queues))
        if self._last_queue in names:
            turn = names.index(self._last_queue) + 1
            names = names[turn:] + names[:turn]
        return names

    def _may_wait_on(self, queues: Sequence[str], revoked_after: int) -> bool:
        """Whether a claim would find no message, as far as the server has reported, and has no other work."""
        return (
            self._watch.knows_of_nothing(queues, revoked_after)
            and not self._holding.lost_tickets
            and not self._time_for_lost()
        )

    def _time_for_lost(self) -> bool:
        return time.monotonic() - self._lost_checked_at >= self._lease_s / LOST_CHECKS_PER_LEASE


def _standing(revokes: Sequence[bytes], now_s: float) -> list[Revoke]:
    """The revokes that still matter; an unreadable entry revokes nothing."""
    found: list[Revoke] = []
    for entry in revokes:
        with suppress(*UNREADABLE):
            revoke = _revoke(entry)
            if revoke.is_news(now_s):
                found.append(revoke)
    return found
