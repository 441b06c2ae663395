"""Holding: the claims, the leases and the slots of task limits that this process has on the server.

Claims. A connection may break after a call was sent and before its reply. A claim in doubt may have taken
messages that this process does not know of: its ticket is given up at the next opportunity, and claims on
older connections are refused. A settle in doubt may have been applied: its claims stay doubtful, and the next
verdict on one of them asks first. When the server's data was replaced, claims that it does not know are
`unknown`: no other worker has their messages. Ended claims are remembered as lost until they are settled,
because an ended claim may be the first sign of replaced data.

Leases. A renewal by script (`owners.lua`) compares everything. Between two close renewals nothing needs
comparing: the owner then counts its renewal and moves the end of its lease in two plain commands. After any
unexpected answer the script runs at once. The end of the lease is computed from the server's clock, as last
read, so a plain renewal that reaches the server late extends the lease only from the time when it was sent.
If the server's clock is set forward, the computed end is too early until the clock is read again. No lease is
lost by that, because such a change gives every owner a grace of one lease, and the clock is read before.

Limits. `limits.lua` decides which claimed messages may start. The end of a claim is reported after its
settle, in a separate call. A worker that dies in between leaves a slot without a claim, which the next sweep
frees.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import urandom
from time import monotonic
from typing import Any, NamedTuple

import hiredis

from umbel.brokers.interface import Delivery, Permit, Return, Started, Tag, Verdict
from umbel.brokers.redis.keys import APART, Keys, tag_of
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.replies import time_of
from umbel.brokers.redis.verdicts import settlement
from umbel.brokers.refusals import ENVELOPE_BYTES
from umbel.errors import BrokerError
from umbel.wire.envelope_redis import due_of, unseal

# ---- large messages --------------------------------------------------------------------------------
#
# Redis takes some 2.4 µs for each kilobyte of a text that a script gets. Where messages are large, the script
# `claim` moves each into a separate list, named by its claim, without reading it, and the claimer reads it
# there. The script that ends the claim removes the list. A user without the right to SORT gets large messages
# in the ordinary way.


def envelope_max_bytes(message_max_bytes: int) -> int:
    """The size of an envelope that is certainly over that limit: bodies are in base64 in Redis."""
    return message_max_bytes * 4 // 3 + ENVELOPE_BYTES


LARGE_BYTES = 8192
"""From this mean size on, separate reads are cheaper, though each takes two commands more."""

_SIGN = APART.encode()


class LargeMessages:
    """Decides whether claims move messages into separate lists, and reads them there."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self.is_wanted = False
        """Whether claims are to move messages into separate lists, because the last messages were large."""
        self._link = link
        self._keys = keys
        self._is_refused = False

    async def read(self, owner: str, epoch: bytes, ticket: str, taken: list[Any], now_s: float) -> list[Any]:
        """The reply of a claim (list, first place, sign, envelopes, ...), with separate envelopes read."""
        if _SIGN in taken[2::4]:
            taken = await self._fetched(owner, epoch, ticket, taken, now_s)
        elif self.is_wanted and taken:
            self._is_refused = True
        sizes = [len(envelope) for envelopes in taken[3::4] for envelope in envelopes]
        if sizes:
            self.is_wanted = sum(sizes) >= LARGE_BYTES * len(sizes) and not self._is_refused
        return taken

    async def _fetched(
        self, owner: str, epoch: bytes, ticket: str, taken: list[Any], now_s: float
    ) -> list[Any]:
        """Read the separate envelopes; messages that are not due are delayed again."""
        groups = [taken[at : at + 4] for at in range(0, len(taken), 4)]
        found = [part for group in groups if group[2] != _SIGN for part in group]
        places = [
            (list_key, place)
            for list_key, first, sign, count in groups
            if sign == _SIGN
            for place in range(first, first + count)
        ]
        tags = [tag_of(ticket, place, list_key.decode(), APART) for list_key, place in places]
        replies = await self._link.call_all([("LINDEX", self._keys.apart(tag), 0) for tag in tags])
        ended = await self._ended(
            owner, [tag for tag, reply in zip(tags, replies, strict=True) if reply is None]
        )
        early: list[Verdict] = []
        for tag, (list_key, place), envelope in zip(tags, places, replies, strict=True):
            if tag in ended:
                continue
            if (due := due_of(envelope or b"")) > now_s:
                early.append(Return(tag, not_before=due))
            else:
                found += (list_key, place, _SIGN, [envelope or b""])
        if early:
            made = settlement(self._keys, early, 0, ())
            await self._link.run(self._keys.script("settle"), owner, epoch, 0, 0, *made.arguments())
        return found

    async def _ended(self, owner: str, tags: Sequence[Tag]) -> set[Tag]:
        """The claims among these that have ended. For the others only the list with the text was removed."""
        inflight = self._keys.inflight(owner)
        stands = await self._link.call_all([("HEXISTS", inflight, tag) for tag in tags]) if tags else []
        return {tag for tag, is_held in zip(tags, stands, strict=True) if not is_held}


# ---- claims ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class ClaimEpoch:
    """One epoch of an owner's in-flight hash; it ends when other workers return its messages.

    There is one object for each epoch, so verdicts are grouped by identity.
    """

    owner: str
    epoch: bytes


@dataclass(slots=True, eq=False)
class VerdictGroup:
    """Verdicts on claims of one epoch; `sure`: none of these claims can have ended before the epoch."""

    hold: ClaimEpoch
    sure: bool
    verdicts: list[Verdict] = field(default_factory=list)


class Holding:
    """The claims of this process by tag, and those that are doubtful, lost or unknown."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._held: dict[Tag, ClaimEpoch] = {}
        self._holds: dict[str, ClaimEpoch] = {}  # the newest of each owner
        self._doubtful: set[Tag] = set()
        self._nonce = urandom(6).hex()
        self._claims = 0
        self._under_way: set[str] = set()  # tickets of claims without a reply
        self.settling: list[VerdictGroup] = []  # sent, without a reply yet
        self._lost: set[Tag] = set()
        self._unknown: set[Tag] = set()
        self.lost_tickets: dict[str, set[str]] = {}
        """Of claims whose reply never came, by owner."""

    def ticket(self) -> str:
        """A new name for a claim, which is unique even if the server loses its data."""
        self._claims += 1
        return f"{self._nonce}.{self._claims:x}"

    @property
    def newest_ticket(self) -> str:
        """The last ticket that was given."""
        return f"{self._nonce}.{self._claims:x}"

    def begin(self) -> str:
        """A ticket for a claim that is sent now."""
        ticket = self.ticket()
        self._under_way.add(ticket)
        return ticket

    def give_up(self, owner: str, ticket: str) -> None:
        """Note that the reply to this claim never came: its ticket must be abandoned."""
        self._under_way.discard(ticket)
        self.lost_tickets.setdefault(owner, set()).add(ticket)

    def has_ended(self, owner: str, epoch: bytes | None) -> bool:
        """Whether the claims that the owner had before have ended, by the epoch in the reply to a claim."""
        hold = self._holds.get(owner)
        return hold is not None and epoch is not None and hold.epoch != epoch

    def take_in(self, owner: str, ticket: str, epoch: bytes, taken: Sequence[Any]) -> list[Delivery]:
        """The messages of a claim's reply: list, first place, sign, envelopes, list, ..."""
        self._under_way.discard(ticket)
        hold, held = self._holds.get(owner), self._held
        if hold is None or hold.epoch != epoch:
            hold = self._holds[owner] = ClaimEpoch(owner, epoch)
        deliveries: list[Delivery] = []
        for at in range(0, len(taken), 4):
            key, first, sign, envelopes = taken[at : at + 4]
            list_key, behind = key.decode(), sign.decode()
            queue = self._keys.queue_of(list_key)
            for place, envelope in enumerate(envelopes, first):
                tag = tag_of(ticket, place, list_key, behind)
                held[tag] = hold
                opened = unseal(envelope)
                deliveries.append(Delivery(tag, queue, opened.message, opened.starts, opened.redelivered))
        return deliveries

    def hand_in(
        self, owner: str, queue: str, list_key: str, envelope: bytes
    ) -> tuple[Delivery, bytes] | None:
        """Note a message that the server handed over, under the epoch of the owner's last claim."""
        hold = self._holds.get(owner)
        if hold is None or owner in self.lost_tickets:
            return None
        tag = tag_of(self.ticket(), 1, list_key)
        self._held[tag] = hold
        opened = unseal(envelope)
        return Delivery(tag, queue, opened.message, opened.starts, opened.redelivered), hold.epoch

    def owner_of(self, tag: Tag) -> str | None:
        """The owner of a claim; None if it is not held here."""
        hold = self._held.get(tag)
        return None if hold is None else hold.owner

    @contextmanager
    def moving(self, tags: Sequence[Tag]) -> Iterator[None]:
        """Mark these claims as doubtful during a call that may end them, and after it if it fails."""
        unsure = [tag for tag in tags if tag not in self._doubtful]
        self._doubtful.update(unsure)
        yield  # after an exception they stay doubtful
        self._doubtful.difference_update(unsure)

    def let_go(self, tags: Iterable[Tag]) -> None:
        """Forget claims with nothing to settle: they wait in the broker, or others have them."""
        for tag in tags:
            self._held.pop(tag, None)
            self._doubtful.discard(tag)

    def lose(self, tag: Tag) -> None:
        """Note that a claim has ended: others have it, or the server has lost it."""
        self._held.pop(tag, None)
        self._doubtful.discard(tag)
        self._lost.add(tag)

    @property
    def unknown(self) -> int:
        """How many claims the replaced data does not know."""
        return len(self._unknown)

    @property
    def has_lost(self) -> bool:
        """Whether claims have ended that were not settled since."""
        return bool(self._lost)

    def known_of(self, owner: str, *, adopting: Tag | None, ever: bool) -> tuple[list[Tag], list[Tag]]:
        """The claims under way (tickets, tags), and the tags that the owner certainly holds.

        `ever`: also those of earlier epochs, which other workers may have ended.
        """
        settling = [verdict.tag for group in self.settling for verdict in group.verdicts]
        under_way = [*self._under_way, *self._doubtful, *settling, *([] if adopting is None else [adopting])]
        unsure, newest = set(under_way), self._holds.get(owner)
        return under_way, [
            tag
            for tag, hold in self._held.items()
            if tag not in unsure and (hold is newest or (ever and hold.owner == owner))
        ]

    def still_held(self, tags: Iterable[Tag]) -> list[Tag]:
        """The claims among these that were not settled meanwhile."""
        return [tag for tag in tags if tag in self._held and tag not in self._doubtful]

    def end_hold(self, owner: str) -> None:
        """Note that other workers have taken the owner's messages, except those it claimed since."""
        self._holds.pop(owner, None)
        self._lost.clear()  # other workers have those, too

    def forget_unknown(self, missing: Iterable[Tag]) -> None:
        """Note that replaced data has neither these claims nor those that were lost before."""
        for tag in missing:
            self.lose(tag)
        self._unknown |= self._lost
        self._lost.clear()

    def take_unknown(self, ended: set[Tag]) -> frozenset[Tag]:
        """Return the ended claims that the replaced data does not have; the others are conflicts."""
        unknown = self._unknown & ended
        self._unknown -= unknown
        self._lost -= ended
        return frozenset(unknown)

    def holds_of(self, tags: Iterable[Tag]) -> tuple[dict[ClaimEpoch, list[Tag]], list[Tag]]:
        """The tags by their epochs, and the tags that are no longer claimed."""
        found: dict[ClaimEpoch, list[Tag]] = {}
        gone: list[Tag] = []
        for tag in tags:
            hold = self._held.get(tag)
            (gone if hold is None else found.setdefault(hold, [])).append(tag)
        return found, gone

    def without_unknown(self, ended: Iterable[Tag]) -> frozenset[Tag]:
        """The ended claims among these that the data still had."""
        return frozenset(ended) - self._unknown

    def judge(self, verdicts: Iterable[Verdict]) -> tuple[list[VerdictGroup], set[Tag]]:
        """Sort verdicts into groups to be settled together, and those on claims not made here.

        A verdict that ends a claim removes it from here; `restore` puts it back.
        """
        sure: dict[ClaimEpoch, VerdictGroup] = {}
        groups: list[VerdictGroup] = []
        refused: set[Tag] = set()
        held, doubtful = self._held, self._doubtful
        for verdict in verdicts:
            tag = verdict.tag
            hold = held.get(tag)
            if hold is None:
                refused.add(tag)
                continue
            if tag in doubtful:
                groups.append(VerdictGroup(hold, False, [verdict]))
            elif (group := sure.get(hold)) is not None:
                group.verdicts.append(verdict)
            else:
                sure[hold] = group = VerdictGroup(hold, True, [verdict])
                groups.append(group)
            if not isinstance(verdict, Started):
                del held[tag]
        return groups, refused

    def restore(self, groups: Iterable[VerdictGroup]) -> None:
        """Put claims back as doubtful: it is unknown whether these groups were settled."""
        for group in groups:
            for verdict in group.verdicts:
                self._held[verdict.tag] = group.hold
                self._doubtful.add(verdict.tag)
                self._lost.discard(verdict.tag)

    def settled(self, group: VerdictGroup) -> None:
        """Note that the outcome of a group is known."""
        if not group.sure:
            self._doubtful.difference_update(verdict.tag for verdict in group.verdicts)

    def forget(self, owner: str) -> list[Tag]:
        """Forget all claims of an owner; returns their tags."""
        gone = [tag for tag, hold in self._held.items() if hold.owner == owner]
        for tag in gone:
            del self._held[tag]
            self._doubtful.discard(tag)
        self._holds.pop(owner, None)
        self.lost_tickets.pop(owner, None)
        self._lost.clear()
        return gone


# ---- leases ----------------------------------------------------------------------------------------

CLOSE_OF_LEASE = 0.35  # renewals this close need no script; from 0.4 on the server may have been unavailable
KNOWN_OF_LEASE = 0.7  # the greatest age of a reading of the server's clock: two intervals, and slack
TURN_OF_LEASE = 0.9  # how long after a sweep by one worker the others skip theirs


class LeaseRenewal(NamedTuple):
    """The reply of a renewal by script."""

    stood: bool
    is_replaced: bool  # the data
    is_lost: bool  # the lease: other workers have the owner's messages


class Leases:
    """The leases of the owners in this process, and the server's clock as last read."""

    def __init__(self, link: Link, keys: Keys, *, lease_s: float) -> None:
        self._link = link
        self._keys = keys
        self._lease_s = lease_s
        self._renewals: dict[str, int] = {}  # by owner: how many the server has confirmed
        self._renewed_at: dict[str, float] = {}  # by owner: when the last confirmed renewal was sent
        self._ahead_s, self._read_at = 0.0, float("-inf")  # the server's clock, and when it was read
        self._turn_asked_at = float("-inf")

    @property
    def owners(self) -> list[str]:
        """The owners in this process that have renewed a lease."""
        return list(self._renewals)

    def age_s(self, owner: str) -> float:
        """How long ago the owner last renewed its lease, so far as the server has confirmed."""
        return monotonic() - self._renewed_at.get(owner, float("-inf"))

    def note_time(self, server_s: float) -> None:
        """Store the server's clock, as read just now."""
        self._read_at = monotonic()
        self._ahead_s = server_s - self._read_at

    async def prolong(self, owner: str) -> bool:
        """Renew in two plain commands; False if a renewal by the script is needed."""
        asked_at, link, lease_s = monotonic(), self._link, self._lease_s
        if (
            self.age_s(owner) > CLOSE_OF_LEASE * lease_s
            or asked_at - self._read_at > KNOWN_OF_LEASE * lease_s
            or not link.is_connected
        ):
            return False
        count = self._renewals[owner] + 1
        ends = f"{asked_at + self._ahead_s + lease_s:.6f}"
        sent = link.send(
            [
                ("HINCRBY", self._keys.renewals, owner, 1),
                ("ZADD", self._keys.owners, "XX", "GT", "CH", ends, owner),
            ]
        )
        replies = await link.reply_to(sent)
        if isinstance(replies[0], int):  # after an unexpected number the script finds out the reason
            self._renewals[owner] = count
        if replies != [count, 1]:
            return False
        self._renewed_at[owner] = asked_at
        return True

    async def renew(self, owner: str) -> LeaseRenewal:
        """Renew by the script, which compares everything."""
        asked_at, known = monotonic(), self._renewals.get(owner, 0)
        stood, self._renewals[owner], is_replaced, is_lost, now_s = await self._run("renew", owner, known)
        self._renewed_at[owner] = asked_at
        self.note_time(float(now_s))
        return LeaseRenewal(bool(stood), bool(is_replaced), bool(is_lost))

    async def is_replaced(self, owner: str) -> bool:
        """Whether the server's data was replaced, judged by the owner's count of renewals."""
        return bool(await self._run("check", owner, self._renewals.get(owner, 0)))

    async def some_ended(self) -> bool:
        """Whether any owner's lease has ended, or the data cannot tell."""
        await self._link.connect()
        commands = [("TIME",), ("ZRANGE", self._keys.owners, 0, 0, "WITHSCORES")]
        now, first = await self._link.reply_to(self._link.send(commands))
        if isinstance(now, hiredis.ReplyError) or isinstance(first, hiredis.ReplyError):
            return True
        now_s = time_of(now)
        self.note_time(now_s)
        return bool(first) and float(first[1]) <= now_s

    async def has_turn(self) -> bool:
        """Whether this process sweeps for all workers, once per lease; True if the server cannot tell."""
        if monotonic() - self._turn_asked_at < TURN_OF_LEASE * self._lease_s:
            return False
        self._turn_asked_at = monotonic()
        await self._link.connect()
        turn_ms = max(1, round(TURN_OF_LEASE * self._lease_s * 1000))
        (taken,) = await self._link.reply_to(
            self._link.send([("SET", self._keys.turn, "taken", "NX", "PX", turn_ms)])
        )
        return taken is not None

    async def return_ended(self) -> int:
        """Return the messages of owners whose lease ended; how many."""
        returned: int = await self._run("reap", "")
        return returned

    async def unhand(self, owner: str) -> None:
        """Return a handed message that its owner did not claim to its queue."""
        await self._run("unhand", owner)

    async def forget(self, owner: str) -> int:
        """End the owner's lease and return its messages; how many."""
        returned: int = await self._run("forget", owner)
        self._renewals.pop(owner, None)
        self._renewed_at.pop(owner, None)
        return returned

    async def unpark(self, owner: str, *, at_most_s: float) -> None:
        """If this was the last Umbel worker, move delayed messages to where Celery sees them, for a limited
        time.

        Messages that are not reached stay delayed. None is lost, because the next Umbel worker makes them
        ready in time, but Celery's workers do not see them.
        """
        until = monotonic() + at_most_s
        while await self._run("unpark", owner) and monotonic() < until:
            pass

    async def _run(self, verb: str, owner: str, known: int = 0) -> Any:
        return await self._link.run(self._keys.script("owners"), verb, self._lease_s, owner, known)


# ---- limits ----------------------------------------------------------------------------------------

log = logging.getLogger("umbel.brokers.redis")
BUCKETS_AT_ONCE = 100  # in one script


class Limits:
    """The slots that claims of this process hold, and the calls of `limits.lua`."""

    def __init__(self, link: Link, keys: Keys, holding: Holding, *, lease_s: float) -> None:
        self._link = link
        self._keys = keys
        self._holding = holding
        self._lease_s = lease_s
        self._slots: dict[Tag, str] = {}  # by claim: the bucket that it holds a slot of

    async def permit(self, asked: Sequence[Permit]) -> Mapping[Tag, str | None]:
        """The messages that may not start, and why (`Messages.permit`)."""
        holds, gone = self._holding.holds_of([question.tag for question in asked])
        refused: dict[Tag, str | None] = dict.fromkeys(gone)
        for hold, tags in holds.items():
            batch = [question for question in asked if question.tag in set(tags)]
            with self._holding.moving(tags):
                args = [part for question in batch for part in _arguments(question)]
                reply = await self._run("take", hold.owner, hold.epoch, *args)
            found = {
                batch[place].tag: None if why is None else why.decode(errors="replace")
                for place, why in zip(reply[::2], reply[1::2], strict=True)
            }
            self._holding.let_go(tag for tag, why in found.items() if why == "")
            self._slots |= {
                question.tag: question.bucket
                for question in batch
                if question.terms.most and not question.ends and question.tag not in found
            }
            refused |= found
        return refused

    async def settled(self, owner: str, verdicts: Iterable[Verdict]) -> None:
        """Free the slots of claims that have ended, now or by the next sweep."""
        if not self._slots:
            return
        args: list[Any] = []
        for verdict in verdicts:
            if (
                not isinstance(verdict, Started)
                and (bucket := self._slots.pop(verdict.tag, None)) is not None
            ):
                args += (verdict.tag, bucket)
        if not args:
            return
        try:
            await self._run("free", owner, *args)
        except BrokerError as error:  # what was settled stays settled
            log.debug(
                "cannot free the slots of task limits now; the next sweep frees them",
                extra={"why": str(error)},
            )

    def forget(self, tags: Iterable[Tag]) -> None:
        """Forget claims that ended without a verdict of this process; a sweep frees their slots."""
        for tag in tags:
            self._slots.pop(tag, None)

    async def sweep(self) -> None:
        """Free the slots of claims that are gone, if there are any limits."""
        if await self._link.call("EXISTS", self._keys.holders, self._keys.limits):
            await self._run("sweep")

    async def purge(self, queue: str) -> int:
        """Remove the waiting messages of a queue, also those that wait for a limit; how many. The keys and
        turns that they hold are freed.
        """
        buckets = await self._link.call("ZRANGE", self._keys.limits, 0, -1)
        removed, more = 0, 1
        while buckets:
            count, done = await self._purge("limited", queue, *buckets[:BUCKETS_AT_ONCE])
            removed += count
            del buckets[:done]
        while more:
            count, more = await self._purge("rest", queue)
            removed += count
        return removed

    async def _purge(self, verb: str, *args: Any) -> Any:
        return await self._link.run(self._keys.script("purge"), verb, self._lease_s, *args)

    async def _run(self, verb: str, *args: Any) -> Any:
        return await self._link.run(self._keys.script("limit"), verb, self._lease_s, *args)


def _arguments(question: Permit) -> tuple[Any, ...]:
    pace = question.terms.pace
    most: int | str = "ends" if question.ends else question.terms.most
    interval_s, slack_s = (0.0, 0.0) if pace is None else (pace.interval_s, pace.slack_s)
    return question.tag, question.task_id, question.bucket, most, f"{interval_s:.9f}", f"{slack_s:.6f}"
