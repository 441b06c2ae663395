"""Waiting: how an idle worker learns of a message without taking it and without asking again.

The server itself tells: a connection with client tracking reads the lengths of the lists, and is
then told, once, when one of them changes (made for caches; Redis >= 6, Valkey). One connection
serves any number of queues and priorities, nothing is popped, and Celery's consumers of the same
lists notice nothing. A blocked `BLMOVE list list RIGHT RIGHT` takes nothing either, but needs one
connection for each list.

A worker with one queue goes further and is handed its next message (`handoff.py`). One with several
asks again only after those that the server told of (`idle_queues.py`).

Where tracking is not to be had (some proxies), the lengths are asked for every POLL_S.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import hiredis

from umbel.brokers.redis.address import Address
from umbel.brokers.redis.handoff import Handed
from umbel.brokers.redis.idle_queues import IdleQueues
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.replies import is_wrong_type
from umbel.protocol.outage import LinkChange

POLL_S = 0.25
UNBLOCK_AGAIN_S = 0.005
BLOCK_MAX_S = 10.0  # well below the time for which owners.lua looks after an owner that was given up
NOTED_S = 2.0  # so long the server surely knows who is handed messages
ARMED_S = 30.0  # then it is asked again, in case a proxy has swallowed what the server told
REFUSED_S = 5.0  # a server that cannot hand over (it is full, it does not know how) is not asked for so long


class _Armed(NamedTuple):
    """What the server was asked, and when the first delayed message is due."""

    rings: int
    queues: tuple[str, ...]
    hands: bool
    until: float
    due_at: float


class Watch:
    """`unblock` ends, by the server's number of it, the wait of a connection at the address `claims_at`."""

    def __init__(
        self,
        addresses: Sequence[Address],
        keys: Keys,
        *,
        timeout_s: float,
        unblock: Callable[[int], asyncio.Future[list[Any]] | None],
        claims_at: Callable[[], Address],
        on_link: Callable[[LinkChange], None],
    ) -> None:
        self._keys = keys
        self._unblock = unblock
        self._claims_at = claims_at
        self._blocked: asyncio.Future[list[Any]] | None = None  # the reply that ends the wait
        self._refused_until = 0.0
        self._noted: tuple[int, str, str] | None = None  # on which connection, which owner, which list
        self._noted_at = 0.0
        self.client_id = 0  # 0: not to be unblocked, so not to be handed anything
        self.handed: Handed | None = None
        self.is_given_up = False  # a wait that may have been handed something all the same
        self._rings = 0
        self._revoked_cursor = 0
        self.claimed_cursor = 0  # up to here a claim has read what was revoked
        self._paused: frozenset[str] = frozenset()
        self._waiting: set[asyncio.Future[bool]] = set()
        self._armed: _Armed | None = None
        self._recheck_s = math.inf
        self._idle = IdleQueues(keys)
        self._link = Link(
            addresses,
            connect_timeout_s=timeout_s,
            reply_timeout_s=timeout_s,
            resp3=True,
            on_push=self._changed,
            on_connect=self._track,
            on_lost=self._lost,
            name="waiting",
            on_link=on_link,
        )

    async def wait(self, queues: Sequence[str], timeout_s: float, *, owner: str = "") -> bool:
        """Return when one of the queues may have a message that is due, or at the time-out: False."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        self.handed = None
        while True:
            await self._link.connect()
            hands = bool(owner) and len(queues) == 1 and self._can_hand(loop.time())
            armed = self._still_armed(queues, loop.time(), hands=hands) or await self._arm(
                queues, hands=hands
            )
            if armed is None:
                return True
            left_s, due_s = deadline - loop.time(), armed.due_at - loop.time()
            if due_s <= 0.0:
                self._armed = None
                return True
            if left_s <= 0.0:
                return False
            wait_s = min(left_s, due_s, self._recheck_s, max(0.001, armed.until - loop.time()))
            if hands and queues[0] not in self._paused:
                is_handed = await self._take_next(queues[0], owner, min(wait_s, BLOCK_MAX_S), armed.rings)
                if is_handed or self._rings != armed.rings:
                    return True
            elif await self._is_rung_within(wait_s):
                return True

    def unless_idle(self, queues: Sequence[str]) -> Sequence[str]:
        """Without those that have nothing to claim: the server would have told of it."""
        if not self._is_same_server():
            return queues
        return self._idle.others(queues, asyncio.get_running_loop().time())

    def knows_of_nothing(self, queues: Sequence[str], revoked_after: int) -> bool:
        """Whether the server would have told of anything but messages that it hands over."""
        now = asyncio.get_running_loop().time()
        armed = self._still_armed(queues, now, hands=True)
        return armed is not None and armed.due_at > now and self._revoked_cursor == revoked_after

    def _still_armed(self, queues: Sequence[str], now: float, *, hands: bool) -> _Armed | None:
        """Not None: the server tells of the next change; it was asked, and has not told of any since."""
        armed = self._armed
        if armed is None or now >= armed.until:
            return None
        return armed if armed[:3] == (self._rings, tuple(queues), hands) else None

    async def _arm(self, queues: Sequence[str], *, hands: bool) -> _Armed | None:
        """None: there is nothing to wait for; who was rung for meanwhile claims at once."""
        self._armed, rings, loop = None, self._rings, asyncio.get_running_loop()
        lasts_s = min(ARMED_S, self._recheck_s)
        is_kept = len(queues) > 1 and self._recheck_s == math.inf
        asked = self._idle.ask(queues, loop.time(), lasts_s) if is_kept else queues
        due = await self._due_s(asked, hands=hands)
        now = loop.time()
        until = now + lasts_s
        if is_kept:
            until = self._idle.keep({queue: now + due_s for queue, due_s in due.items() if due_s > 0.0})
        else:
            self._idle.forget(None)
        if self._rings != rings:
            return None
        due_s = min((due_s for queue, due_s in due.items() if queue not in self._paused), default=math.inf)
        if due_s <= 0.0 or self._revoked_cursor > self.claimed_cursor:
            return None
        open_queues = (queue for queue in queues if queue not in self._paused)
        due_at = min(now + due_s, self._idle.first_due(open_queues))
        self._armed = _Armed(rings, tuple(queues), hands, until, due_at)
        return self._armed

    def _can_hand(self, now: float) -> bool:
        return bool(self.client_id) and self._is_same_server() and now >= self._refused_until

    def _is_same_server(self) -> bool:
        """Of several servers each connection may have found another, and what one of them hands over
        the other cannot keep; nor does one know what the other has."""
        return self._link.address == self._claims_at()

    async def _take_next(self, queue: str, owner: str, timeout_s: float, seen: int) -> bool:
        """Have the server hand over the next message: whether it did. A ring ends the wait for it."""
        keys, link, asked_at = self._keys, self._link, asyncio.get_running_loop().time()
        list_key = keys.list_of(queue, 0)
        commands = self._note(owner, list_key, asked_at)
        commands.append(("BLMOVE", list_key, keys.handed(owner), "RIGHT", "LEFT", max(0.001, timeout_s)))
        self._blocked = sent = link.send(commands, takes_s=timeout_s)
        try:
            replies = await link.reply_to(sent)
        except asyncio.CancelledError:
            self._interrupt()  # what it was handed goes back with its next claim, or renewal
            self.is_given_up = True
            raise
        if any(isinstance(one, hiredis.ReplyError) for one in replies):
            self._refused_until, self._noted = asked_at + REFUSED_S, None
            return False
        envelope = replies[-1]
        if envelope is None:
            return False
        if self._noted is None:  # else nobody could say to which list it goes back
            await link.reply_to(link.send(self._note(owner, list_key, asked_at)))
        undisturbed = self._rings == seen
        self.handed = Handed(owner, queue, list_key, envelope, self._revoked_cursor, asked_at, undisturbed)
        return True

    def _note(self, owner: str, list_key: str, now: float) -> list[tuple[Any, ...]]:
        """Say for whom this waits, unless the server was told a moment ago (not before a sleep)."""
        noted = (self._link.generation, owner, list_key)
        if self._noted == noted and now - self._noted_at < NOTED_S:
            return []
        self._noted, self._noted_at = noted, now
        return [("HSET", self._keys.handing, owner, list_key)]

    def leave(self) -> None:
        """End the wait: the waiting caller looks again at what it waits for."""
        self._ring()

    async def reconnect(self, *, is_doubtful: bool) -> None:
        """`is_doubtful`: another connection was lost, and a wait may be long."""
        if is_doubtful and self._link.is_connected:
            await self._link.replace()
        elif self._link.is_lost:
            await self._link.connect()

    def close(self) -> None:
        self._link.close()

    async def _due_s(self, queues: Sequence[str], *, hands: bool) -> dict[str, float]:
        """For each queue the seconds until it has a message, as far as one can know now; 0.0: it has one.

        Asking is also what arms the server to tell of the next change. What is handed over is not asked for.
        A queue with a key of another type is left out: the claim says what is wrong with it.
        """
        asked = [
            [
                *(("LLEN", key) for key in self._keys.lists_of(queue)[hands:]),
                ("ZRANGE", self._keys.delayed(queue), 0, 0, "WITHSCORES"),
            ]
            for queue in queues
        ]
        cursor_and_pauses = (("GET", self._keys.revokes_cursor), ("HKEYS", self._keys.paused))
        commands = [("TIME",), *cursor_and_pauses, *(command for some in asked for command in some)]
        found = await self._link.reply_to(self._link.send(commands))
        replies = iter(self._link.checked([None if is_wrong_type(one) else one for one in found]))
        now, cursor, paused = next(replies), next(replies), next(replies)
        self._revoked_cursor = _cursor_in(cursor)
        self._paused = frozenset(name.decode() for name in paused or ())
        now_s = int(now[0]) + int(now[1]) / 1e6
        due: dict[str, float] = {}
        for queue, some in zip(queues, asked, strict=True):
            *counts, first = (next(replies) for _ in some)
            if any(counts):
                due[queue] = 0.0
            elif None not in counts and first is not None:
                due[queue] = first[0][1] - now_s if first else math.inf
        return due

    async def _is_rung_within(self, timeout_s: float) -> bool:
        loop = asyncio.get_running_loop()
        ring: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(timeout_s, _settle, ring, False)
        self._waiting.add(ring)
        try:
            return await ring
        finally:
            timer.cancel()
            self._waiting.discard(ring)

    async def _track(self) -> None:
        # Straight to the connection: this is part of making it.
        # To end the wait of nobody changes nothing, and shows whether this user may.
        commands = [("CLIENT", "TRACKING", "ON"), ("CLIENT", "ID"), ("CLIENT", "UNBLOCK", 0)]
        tracking, number, unblocked = await self._link.reply_to(self._link.send(commands))
        self._idle.forget(None)
        is_tracked = tracking == b"OK"
        self._recheck_s = math.inf if is_tracked else POLL_S
        self.client_id = number if is_tracked and isinstance(number, int) and unblocked == 0 else 0

    def _changed(self, pushed: list[Any]) -> None:
        keys = pushed[1] if len(pushed) > 1 else None
        if keys is None:  # not some keys, but all of them: the server was emptied
            self._noted = None
        self._idle.forget(keys)
        self._ring()

    def _lost(self) -> None:
        self._idle.forget(None)
        self.client_id = 0  # the number may be another's after a restart of the server
        self._ring()

    def _interrupt(self) -> None:
        if self._blocked is None or not self._link.awaits(self._blocked):
            return
        if (sent := self._unblock(self.client_id)) is not None:
            sent.add_done_callback(self._check_unblocked)

    def _check_unblocked(self, sent: asyncio.Future[list[Any]]) -> None:
        """The order of two connections is anybody's guess: maybe it was not blocked yet."""
        if not sent.cancelled() and sent.exception() is None and sent.result() == [0]:
            asyncio.get_running_loop().call_later(UNBLOCK_AGAIN_S, self._interrupt)

    def _ring(self) -> None:
        self._rings += 1
        self._interrupt()
        for ring in self._waiting:
            _settle(ring, True)


def _cursor_in(found: bytes | None) -> int:
    """Nobody has seen -1: a worker claims where it cannot know what was revoked."""
    try:
        return int(found or 0)
    except ValueError:
        return -1


def _settle(ring: asyncio.Future[bool], value: bool) -> None:
    if not ring.done():
        ring.set_result(value)
