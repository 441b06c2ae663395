"""Leases: keeps the lease of an owner, and notices those of others that have ended, at little cost.

A renewal by script (`owners.lua`) compares everything. Between two that follow each other closely nothing
needs comparing: then the owner counts its renewal and moves the end of its lease in two plain commands.
Any answer that is not the expected one has the script run at once.

The end of the lease is by the server's clock, as of its last answer. A plain renewal that reaches the
server late, after an outage, says so itself: it moves the end only to what was right when it was sent.
It stops being right when the server's clock is set forward, until the next look at it; that comes before the
grace of a lease, which such a change gives everybody, is over.
"""

from time import monotonic
from typing import Any, NamedTuple

import hiredis

from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link

CLOSE_OF_LEASE = 0.35  # after the last one, of the lease; from 0.4 on the server may have been away
KNOWN_OF_LEASE = 0.7  # so old may be what is known of the server's clock: two looks, and a moment
TURN_OF_LEASE = 0.9  # how long one who tidies up for all keeps the others from it


class Renewal(NamedTuple):
    stood: bool
    is_replaced: bool  # the data
    is_lost: bool  # the lease: others have what the owner held


class Leases:
    def __init__(self, link: Link, keys: Keys, *, lease_s: float) -> None:
        self._link = link
        self._keys = keys
        self._lease_s = lease_s
        self._renewals: dict[str, int] = {}  # by owner: as many as the server has confirmed
        self._renewed_at: dict[str, float] = {}  # when the last one that was confirmed was sent
        self._ahead_s, self._read_at = 0.0, float("-inf")  # the server's clock, and when it was read
        self._turn_asked_at = float("-inf")

    @property
    def owners(self) -> list[str]:
        return list(self._renewals)

    def age_s(self, owner: str) -> float:
        """How long ago the owner surely had its lease."""
        return monotonic() - self._renewed_at.get(owner, float("-inf"))

    def note_time(self, server_s: float) -> None:
        """The server's clock, as of now."""
        self._read_at = monotonic()
        self._ahead_s = server_s - self._read_at

    async def prolong(self, owner: str) -> bool:
        """Renew in the quick way; False: a renewal by the script is due."""
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
        if isinstance(replies[0], int):  # also another number: the script says what that means
            self._renewals[owner] = count
        if replies != [count, 1]:
            return False
        self._renewed_at[owner] = asked_at
        return True

    async def renew(self, owner: str) -> Renewal:
        asked_at, known = monotonic(), self._renewals.get(owner, 0)
        stood, self._renewals[owner], is_replaced, is_lost, now_s = await self._run("renew", owner, known)
        self._renewed_at[owner] = asked_at
        self.note_time(float(now_s))
        return Renewal(bool(stood), bool(is_replaced), bool(is_lost))

    async def is_replaced(self, owner: str) -> bool:
        return bool(await self._run("check", owner, self._renewals.get(owner, 0)))

    async def some_ended(self) -> bool:
        """Whether the lease of any owner has ended, or the data cannot say so."""
        await self._link.connect()
        commands = [("TIME",), ("ZRANGE", self._keys.owners, 0, 0, "WITHSCORES")]
        now, first = await self._link.reply_to(self._link.send(commands))
        if isinstance(now, hiredis.ReplyError) or isinstance(first, hiredis.ReplyError):
            return True
        now_s = int(now[0]) + int(now[1]) / 1e6
        self.note_time(now_s)
        return bool(first) and float(first[1]) <= now_s

    async def has_turn(self) -> bool:
        """Whether this process tidies up for all, once per lease; a server that cannot say so lets it."""
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
        returned: int = await self._run("reap", "")
        return returned

    async def unhand(self, owner: str) -> None:
        await self._run("unhand", owner)

    async def forget(self, owner: str) -> int:
        returned: int = await self._run("forget", owner)
        self._renewals.pop(owner, None)
        self._renewed_at.pop(owner, None)
        return returned

    async def unpark(self, owner: str, *, at_most_s: float) -> None:
        """Give Celery what the last worker of ours leaves parked, for as long as stopping may take.

        What is not reached stays parked; that loses nothing, since the next worker of ours has it due
        in time, but Celery's workers do not see it.
        """
        until = monotonic() + at_most_s
        while await self._run("unpark", owner) and monotonic() < until:
            pass

    async def _run(self, verb: str, owner: str, known: int = 0) -> Any:
        script = self._keys.script("owners")
        return await self._link.run(script, verb, self._keys.prefix, self._lease_s, owner, known)
