"""Large messages: claimed without passing through a script, and read afterwards.

Redis takes some 2.4 µs for each kilobyte of a text that a script gets. Where messages are large, it is asked
to move each into a separate list, named by its claim (`claim.lua`), and the claimer reads it there. The
script that ends the claim removes the list. A user who may not SORT gets them in the ordinary way.
"""

from collections.abc import Sequence
from typing import Any

from umbel.brokers.interface import Return, Tag, Verdict
from umbel.brokers.redis.keys import APART, Keys, tag_of
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.verdicts import settlement
from umbel.wire.envelope_redis import due_of

LARGE_BYTES = 8192
"""From this mean size on it pays to read messages apart: that takes two commands more for each."""

_SIGN = APART.encode()


class LargeMessages:
    def __init__(self, link: Link, keys: Keys) -> None:
        self.is_wanted = False
        """Whether the next messages are to lie apart: the last ones were large."""
        self._link = link
        self._keys = keys
        self._is_refused = False

    async def read(self, owner: str, epoch: bytes, ticket: str, taken: list[Any], now_s: float) -> list[Any]:
        """What a claim took (list, first place, sign, envelopes, ...), with the envelopes that lie apart."""
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
        """Those that are not due go on waiting."""
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
            await self._link.run(
                self._keys.script("settle"), self._keys.prefix, owner, epoch, 0, *made.arguments
            )
        return found

    async def _ended(self, owner: str, tags: Sequence[Tag]) -> set[Tag]:
        """Those whose claims have ended since: others have the messages. The text of the rest was removed."""
        inflight = self._keys.inflight(owner)
        stands = await self._link.call_all([("HEXISTS", inflight, tag) for tag in tags]) if tags else []
        return {tag for tag, is_held in zip(tags, stands, strict=True) if not is_held}
