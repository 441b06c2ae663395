"""Holding: which claims this process has, and which calls it does not know the end of.

A connection may break after a call was sent and before its reply. A claim in doubt may have taken
messages that nobody here knows of: its ticket is given up at the next opportunity, and claims on
connections made before that are refused. A settle in doubt may have been applied: its claims are
kept as doubtful, and the next verdict on one of them asks first.

When the server's data was replaced, claims that it does not know are `unknown`: nobody else has those
messages. Claims that have ended are remembered as lost until they are settled, because an ended
claim may be the first sign of that.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import urandom
from typing import Any

from umbel.brokers.interface import Delivery, Started, Tag, Verdict
from umbel.brokers.redis.keys import Keys, tag_of
from umbel.wire.envelope_redis import unseal


@dataclass(frozen=True, slots=True, eq=False)
class Hold:
    """One life of an owner's in-flight hash; it ends when others take the messages back.

    There is one object for each, so that verdicts are sorted by identity.
    """

    owner: str
    epoch: bytes


@dataclass(slots=True, eq=False)
class Group:
    """Verdicts on claims of one hold; `sure`: they stand if the hold does."""

    hold: Hold
    sure: bool
    verdicts: list[Verdict] = field(default_factory=list)


class Holding:
    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._held: dict[Tag, Hold] = {}
        self._holds: dict[str, Hold] = {}  # the newest of each owner
        self._doubtful: set[Tag] = set()
        self._nonce = urandom(6).hex()
        self._claims = 0
        self._under_way: set[str] = set()  # tickets of claims that are not answered
        self.settling: list[Group] = []  # sent, and not answered
        self._lost: set[Tag] = set()
        self._unknown: set[Tag] = set()
        self.lost_tickets: dict[str, set[str]] = {}
        """Of claims whose reply never came, by owner."""

    def ticket(self) -> str:
        """Names one claim; never given twice, whatever the server forgets."""
        self._claims += 1
        return f"{self._nonce}.{self._claims:x}"

    @property
    def newest_ticket(self) -> str:
        return f"{self._nonce}.{self._claims:x}"

    def begin(self) -> str:
        """A ticket for a claim that is sent now."""
        ticket = self.ticket()
        self._under_way.add(ticket)
        return ticket

    def give_up(self, owner: str, ticket: str) -> None:
        self._under_way.discard(ticket)
        self.lost_tickets.setdefault(owner, set()).add(ticket)

    def has_ended(self, owner: str, epoch: bytes | None) -> bool:
        """Whether what the owner held before a claim is held no more, by the epoch that it was told."""
        hold = self._holds.get(owner)
        return hold is not None and epoch is not None and hold.epoch != epoch

    def take_in(self, owner: str, ticket: str, epoch: bytes, taken: Sequence[Any]) -> list[Delivery]:
        """The messages of a claim's reply: list, first place, sign, envelopes, list, ..."""
        self._under_way.discard(ticket)
        hold, held = self._holds.get(owner), self._held
        if hold is None or hold.epoch != epoch:
            hold = self._holds[owner] = Hold(owner, epoch)
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
        """A message that the server handed over, under the epoch of the owner's last claim."""
        hold = self._holds.get(owner)
        if hold is None or owner in self.lost_tickets:
            return None
        tag = tag_of(self.ticket(), 1, list_key)
        self._held[tag] = hold
        opened = unseal(envelope)
        return Delivery(tag, queue, opened.message, opened.starts, opened.redelivered), hold.epoch

    def owner_of(self, tag: Tag) -> str | None:
        hold = self._held.get(tag)
        return None if hold is None else hold.owner

    @contextmanager
    def moving(self, tags: Sequence[Tag]) -> Iterator[None]:
        """Nobody knows meanwhile whether these are still claimed."""
        unsure = [tag for tag in tags if tag not in self._doubtful]
        self._doubtful.update(unsure)
        yield  # whoever fails on the way leaves them doubtful
        self._doubtful.difference_update(unsure)

    def let_go(self, tags: Iterable[Tag]) -> None:
        """They wait in the broker, or others have them: nothing is to be settled."""
        for tag in tags:
            self._held.pop(tag, None)
            self._doubtful.discard(tag)

    def lose(self, tag: Tag) -> None:
        """Others have it, or the server has forgotten it."""
        self._held.pop(tag, None)
        self._doubtful.discard(tag)
        self._lost.add(tag)

    @property
    def unknown(self) -> int:
        return len(self._unknown)

    @property
    def has_lost(self) -> bool:
        """Whether claims have ended, and nobody has settled them since."""
        return bool(self._lost)

    def known_of(self, owner: str, *, adopting: Tag | None, ever: bool) -> tuple[list[Tag], list[Tag]]:
        """What is under way (tickets of claims, tags), and what the owner surely holds.

        `ever`: also under a hold that ended, which others may have ended.
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
        """Those that nobody has settled meanwhile."""
        return [tag for tag in tags if tag in self._held and tag not in self._doubtful]

    def end_hold(self, owner: str) -> None:
        """Others have taken what the owner held, but for what it claimed since."""
        self._holds.pop(owner, None)
        self._lost.clear()  # others have those too

    def forget_unknown(self, missing: Iterable[Tag]) -> None:
        """The data was replaced: it has neither these, nor any that were lost before it was noticed."""
        for tag in missing:
            self.lose(tag)
        self._unknown |= self._lost
        self._lost.clear()

    def take_unknown(self, ended: set[Tag]) -> frozenset[Tag]:
        """Those of these ended claims that are unknown; the others are conflicts."""
        unknown = self._unknown & ended
        self._unknown -= unknown
        self._lost -= ended
        return frozenset(unknown)

    def holds_of(self, tags: Iterable[Tag]) -> tuple[dict[Hold, list[Tag]], list[Tag]]:
        """The tags by their holds, and those that are no longer claimed."""
        found: dict[Hold, list[Tag]] = {}
        gone: list[Tag] = []
        for tag in tags:
            hold = self._held.get(tag)
            (gone if hold is None else found.setdefault(hold, [])).append(tag)
        return found, gone

    def without_unknown(self, ended: Iterable[Tag]) -> frozenset[Tag]:
        return frozenset(ended) - self._unknown

    def judge(self, verdicts: Iterable[Verdict]) -> tuple[list[Group], set[Tag]]:
        """Sort verdicts into groups to be settled together, and those on claims not made here.

        A verdict that ends a claim takes it from here; `restore` gives it back.
        """
        sure: dict[Hold, Group] = {}
        groups: list[Group] = []
        refused: set[Tag] = set()
        held, doubtful = self._held, self._doubtful
        for verdict in verdicts:
            tag = verdict.tag
            hold = held.get(tag)
            if hold is None:
                refused.add(tag)
                continue
            if tag in doubtful:
                groups.append(Group(hold, False, [verdict]))
            elif (group := sure.get(hold)) is not None:
                group.verdicts.append(verdict)
            else:
                sure[hold] = group = Group(hold, True, [verdict])
                groups.append(group)
            if not isinstance(verdict, Started):
                del held[tag]
        return groups, refused

    def restore(self, groups: Iterable[Group]) -> None:
        """Nobody knows whether these were settled."""
        for group in groups:
            for verdict in group.verdicts:
                self._held[verdict.tag] = group.hold
                self._doubtful.add(verdict.tag)
                self._lost.discard(verdict.tag)

    def settled(self, group: Group) -> None:
        if not group.sure:
            self._doubtful.difference_update(verdict.tag for verdict in group.verdicts)

    def forget(self, owner: str) -> list[Tag]:
        """The owner holds nothing any more: what it held."""
        gone = [tag for tag, hold in self._held.items() if hold.owner == owner]
        for tag in gone:
            del self._held[tag]
            self._doubtful.discard(tag)
        self._holds.pop(owner, None)
        self.lost_tickets.pop(owner, None)
        self._lost.clear()
        return gone
