"""Waiting: how an idle worker gets its next message without polling.

Notices. A connection with client tracking reads the lengths of the lists, and the server then reports, once,
when one of them changes (made for caches; Redis >= 6, Valkey). One connection serves any number of queues and
priorities, nothing is popped, and Celery's consumers of the same lists notice nothing. Where tracking is not
available (some proxies), the lengths are read every POLL_S.

Many queues. A worker reads again, and claims from, only those queues that the server reported: until it
reports a change, nothing has changed (`IdleQueues`).

Handoff. A worker that consumes one queue waits with `BLMOVE` instead, which saves two round trips: the server
moves the next message into the worker's own list (`umbel.handed.<owner>`) and wakes no other worker. The
worker runs it at once and meanwhile adds it to its claims (the script `adopt`); a settle waits for that. A
message that is still in that list goes back to its queue with the owner's next claim, or when the owner's
lease ends. A claim also brings the revokes. Here the waiting connection tracks their cursor, and the server's
notice comes before the message, in the order of events. After such a notice, and whenever the message may not
simply run (it is not due, or its owner slept for long), the message is claimed in the ordinary way, which
puts it back first.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import hiredis

from umbel.brokers.interface import Delivery, Tag
from umbel.brokers.redis.address import Address
from umbel.brokers.redis.holding import Holding, Leases
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.replies import is_missing_script, is_wrong_type, time_of
from umbel.protocol.shutdown import LinkChange
from umbel.wire.envelope_redis import MARK

# ---- handoff ---------------------------------------------------------------------------------------

ENDING_BYTES = 256  # more than the properties take, which are at the end of a message
FRESH_OF_LEASE = 0.3  # a message may run if it was requested or its owner renewed within this part of a lease

Pending = tuple[Tag, tuple[object, ...]]
"""The tag of a message, and the arguments of its adoption."""


class HandedMessage(NamedTuple):
    """A message in the list of its owner, and what was known when it was requested."""

    owner: str
    queue: str
    list_key: str
    envelope: bytes
    revoked_cursor: int
    asked_at: float  # on the loop's clock
    is_undisturbed: bool  # the server reported nothing between the request and the message


class Adoptions:
    """The handed message whose claim is not confirmed yet; there is at most one."""

    def __init__(self, link: Link, keys: Keys, holding: Holding, leases: Leases, *, lease_s: float) -> None:
        self._link = link
        self._keys = keys
        self._script = keys.script("adopt")
        self._holding = holding
        self._leases = leases
        self._lease_s = lease_s
        self._pending: Pending | None = None
        self._sent: asyncio.Future[list[Any]] | None = None
        self._is_asked = False
        self._left = -1
        self._finishing = asyncio.Lock()  # a claim and a settle may wait for the same reply

    def take_left(self) -> int:
        """Return and reset how many messages waited behind the last handed message; -1 if unknown."""
        left, self._left = self._left, -1
        return left

    @property
    def pending(self) -> Tag | None:
        """The tag of the claim that is not confirmed yet."""
        return None if self._pending is None else self._pending[0]

    def begin(
        self, handed: HandedMessage | None, owner: str, queues: Sequence[str], revoked_after: int
    ) -> Delivery | None:
        """Return the message, to be run now, or None if the caller must claim in the ordinary way."""
        if handed is None or self._pending is not None or not self._link.is_connected:
            return None
        # An owner that slept for long may have lost its lease, and others may have the message.
        age_s = min(asyncio.get_running_loop().time() - handed.asked_at, self._leases.age_s(owner))
        if (
            handed.owner != owner
            or handed.queue not in queues
            or not handed.is_undisturbed
            or handed.revoked_cursor != revoked_after
            or age_s > FRESH_OF_LEASE * self._lease_s
            or handed.envelope.startswith(MARK)
        ):
            return None
        found = self._holding.hand_in(owner, handed.queue, handed.list_key, handed.envelope)
        if found is None:
            return None
        delivery, epoch = found
        known_by = (len(handed.envelope), handed.envelope[-ENDING_BYTES:])
        args = (owner, epoch, delivery.tag, *known_by)
        self._pending = pending = (delivery.tag, args)
        # Send it after the message is on its way to the pool, because sending takes about as long as that.
        asyncio.get_running_loop().call_soon(self._send, pending)
        return delivery

    def _send(self, pending: Pending) -> None:
        if self._pending is pending and not self._is_asked and self._link.is_connected:
            self._is_asked = True
            self._sent = self._link.send_run(self._script, *pending[1])
            self._sent.add_done_callback(lambda sent: self._answered(sent, pending))

    def _answered(self, sent: asyncio.Future[list[Any]], pending: Pending) -> None:
        """Send the script's text if the server does not know it: `finish` may be called much later."""
        if self._sent is not sent or sent.cancelled() or sent.exception() is not None:
            return
        if is_missing_script(sent.result()[0]) and self._link.is_connected:
            self._sent = self._link.send([("EVAL", self._script.text, 0, *pending[1])])

    async def finish(self) -> None:
        """Return when the handed message is claimed or known to be lost; after a BrokerError call again."""
        if self._pending is not None:
            async with self._finishing:
                await self._finish()

    async def _finish(self) -> None:
        pending = self._pending
        if pending is None:
            return
        tag, args = pending
        sent, self._sent, self._is_asked = self._sent, None, True
        if sent is not None:
            is_held, left = await self._link.finish_run(sent, self._script, *args)
        else:
            is_held, left = await self._link.run(self._script, *args)
        if self._pending is pending:
            self._pending, self._is_asked, self._left = None, False, left
        if not is_held:
            self._holding.lose(tag)


# ---- idle queues -----------------------------------------------------------------------------------


class IdleQueues:
    """When each queue that was read has its next message, as far as the server has reported."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._due_at: dict[str, float] = {}  # of each queue: when its first delayed message is due
        self._queue_of: dict[bytes, str] = {}  # by each key of a queue
        self._reported: set[str] = set()  # since `ask`
        self._until = 0.0

    def ask(self, queues: Sequence[str], now: float, lasts_s: float) -> Sequence[str]:
        """The queues to read now; all of them after `lasts_s`, in case a report was lost."""
        if now >= self._until:
            self.forget(None)
            self._until = now + lasts_s
        asked = self.others(queues, now)
        for queue in asked:
            for key in (*self._keys.lists_of(queue), self._keys.delayed(queue)):
                self._queue_of[key.encode()] = queue
        self._reported.clear()
        return asked

    def keep(self, due_at: Mapping[str, float]) -> float:
        """Store the replies, except for queues that were reported meanwhile; returns until when they are
        valid.
        """
        self._due_at.update((queue, at) for queue, at in due_at.items() if queue not in self._reported)
        return self._until

    def forget(self, keys: Iterable[bytes] | None) -> None:
        """Forget the queues of these changed keys; None: any may have changed."""
        if keys is None:
            self._reported.update(self._queue_of.values())
            self._due_at.clear()
            self._queue_of.clear()
            self._until = 0.0
            return
        for key in keys:
            if (queue := self._queue_of.get(key)) is not None:
                self._reported.add(queue)
                self._due_at.pop(queue, None)

    def others(self, queues: Sequence[str], now: float) -> Sequence[str]:
        """The queues whose state is unknown, or that have a message due.

        All of them when it is time to read again: a worker that always has work does not wait, and would not
        notice that the reports have stopped.
        """
        due_at = self._due_at
        if not due_at or now >= self._until:
            return queues
        return [queue for queue in queues if due_at.get(queue, 0.0) <= now]

    def first_due(self, queues: Iterable[str]) -> float:
        """When the first known message of these queues is due."""
        due_at = self._due_at
        return min((due_at.get(queue, math.inf) for queue in queues), default=math.inf)


# ---- waiting ---------------------------------------------------------------------------------------

POLL_S = 0.25
UNBLOCK_AGAIN_S = 0.005
BLOCK_MAX_S = 10.0  # well below the time for which owners.lua still watches an owner that was given up
NOTED_S = 2.0  # how long a recorded owner need not be recorded again
ARMED_S = 30.0  # after this the lengths are read again, in case a proxy dropped a notice
REFUSED_S = 5.0  # without handoffs, after the server refused one because it is full or too old


class _Armed(NamedTuple):
    """The queues that the server watches for a change, and when their first delayed message is due."""

    notices: int  # how many notices had come before
    queues: tuple[str, ...]
    hands: bool
    until: float
    due_at: float


class QueueWatch:
    """The waiting connection.

    `unblock` ends its blocking wait, by its client number, from another connection. `claims_at` returns the
    address of the server on which claims are made.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        keys: Keys,
        *,
        timeout_s: float,
        reply_max_bytes: int,
        unblock: Callable[[int], asyncio.Future[list[Any]] | None],
        claims_at: Callable[[], Address],
        on_link: Callable[[LinkChange], None],
    ) -> None:
        self._keys = keys
        self._unblock = unblock
        self._claims_at = claims_at
        self._blocked: asyncio.Future[list[Any]] | None = None  # the reply that ends the blocking wait
        self._refused_until = 0.0
        self._noted: tuple[int, str, str] | None = None  # the connection's generation, the owner, the list
        self._noted_at = 0.0
        self.client_id = 0  # 0: it cannot be unblocked, so it is handed nothing
        self.handed: HandedMessage | None = None
        self.is_given_up = False  # the wait was cancelled, and may have been handed a message
        self._notices = 0
        self._revoked_cursor = 0
        self.claimed_cursor = 0  # claims have read the revokes up to here
        self._paused: frozenset[str] = frozenset()
        self._waiting: set[asyncio.Future[bool]] = set()
        self._armed: _Armed | None = None
        self._recheck_s = math.inf
        self._idle = IdleQueues(keys)
        self._link = Link(
            addresses,
            timeout_s=timeout_s,
            resp3=True,
            reply_max_bytes=reply_max_bytes,
            on_push=self._changed,
            on_connect=self._track,
            on_lost=self._lost,
            name="waiting",
            on_link=on_link,
        )

    async def wait(self, queues: Sequence[str], timeout_s: float, *, owner: str = "") -> bool:
        """Return True when a queue may have a message that is due; False at the time-out."""
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
                is_handed = await self._take_next(queues[0], owner, min(wait_s, BLOCK_MAX_S), armed.notices)
                if is_handed or self._notices != armed.notices:
                    return True
            elif await self._is_notified_within(wait_s):
                return True

    def unless_idle(self, queues: Sequence[str]) -> Sequence[str]:
        """The queues that may have a message to claim; the server has reported no change of the others."""
        if not self._is_same_server():
            return queues
        return self._idle.others(queues, asyncio.get_running_loop().time())

    def knows_of_nothing(self, queues: Sequence[str], revoked_after: int) -> bool:
        """Whether there is nothing to claim, because the server has reported no change. It does not report
        messages that it hands over.
        """
        now = asyncio.get_running_loop().time()
        armed = self._still_armed(queues, now, hands=True)
        return armed is not None and armed.due_at > now and self._revoked_cursor == revoked_after

    def _still_armed(self, queues: Sequence[str], now: float, *, hands: bool) -> _Armed | None:
        """What the server watches, if these are its queues and it has reported no change; else None."""
        armed = self._armed
        if armed is None or now >= armed.until:
            return None
        return armed if armed[:3] == (self._notices, tuple(queues), hands) else None

    async def _arm(self, queues: Sequence[str], *, hands: bool) -> _Armed | None:
        """Have the server report the next change; None if a message may be ready to be claimed now."""
        self._armed, notices, loop = None, self._notices, asyncio.get_running_loop()
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
        if self._notices != notices:
            return None
        due_s = min((due_s for queue, due_s in due.items() if queue not in self._paused), default=math.inf)
        if due_s <= 0.0 or self._revoked_cursor > self.claimed_cursor:
            return None
        open_queues = (queue for queue in queues if queue not in self._paused)
        due_at = min(now + due_s, self._idle.first_due(open_queues))
        self._armed = _Armed(notices, tuple(queues), hands, until, due_at)
        return self._armed

    def _can_hand(self, now: float) -> bool:
        return bool(self.client_id) and self._is_same_server() and now >= self._refused_until

    def _is_same_server(self) -> bool:
        """Whether claims and waits use the same server.

        With several addresses each connection may have found another server. Then a handed message is on one
        server and its claim on the other.
        """
        return self._link.address == self._claims_at()

    async def _take_next(self, queue: str, owner: str, timeout_s: float, seen: int) -> bool:
        """Wait until the server hands over the next message; whether it did. A notice ends the wait."""
        keys, link, asked_at = self._keys, self._link, asyncio.get_running_loop().time()
        list_key = keys.list_of(queue, 0)
        commands = self._note(owner, list_key, asked_at)
        commands.append(("BLMOVE", list_key, keys.handed(owner), "RIGHT", "LEFT", max(0.001, timeout_s)))
        self._blocked = sent = link.send(commands, takes_s=timeout_s)
        try:
            replies = await link.reply_to(sent)
        except asyncio.CancelledError:
            self._interrupt()  # a handed message goes back with the next claim or renewal
            self.is_given_up = True
            raise
        if any(isinstance(reply, hiredis.ReplyError) for reply in replies):
            self._refused_until, self._noted = asked_at + REFUSED_S, None
            return False
        envelope = replies[-1]
        if envelope is None:
            return False
        if self._noted is None:  # the server must know to which list it goes back
            await link.reply_to(link.send(self._note(owner, list_key, asked_at)))
        undisturbed = self._notices == seen
        self.handed = HandedMessage(
            owner, queue, list_key, envelope, self._revoked_cursor, asked_at, undisturbed
        )
        return True

    def _note(self, owner: str, list_key: str, now: float) -> list[tuple[Any, ...]]:
        """The command that records which owner waits, unless it was sent a moment ago."""
        noted = (self._link.generation, owner, list_key)
        if self._noted == noted and now - self._noted_at < NOTED_S:
            return []
        self._noted, self._noted_at = noted, now
        return [("HSET", self._keys.handing, owner, list_key)]

    def leave(self) -> None:
        """End the wait, so that the caller checks its queues again."""
        self._notify()

    async def reconnect(self, *, is_doubtful: bool) -> None:
        """Restore the connection. `is_doubtful`: another one was lost, so this one may be dead, too."""
        if is_doubtful and self._link.is_connected:
            await self._link.replace()
        elif self._link.is_lost:
            await self._link.connect()

    def close(self) -> None:
        """Close the waiting connection."""
        self._link.close()

    async def _due_s(self, queues: Sequence[str], *, hands: bool) -> dict[str, float]:
        """The seconds until each queue has a message, as far as known now; 0.0 if it has one.

        The server reports the next change of the keys that are read here. A list whose messages are handed
        over is not read. A queue with a key of another type is left out: the claim reports what is wrong.
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
        replies = iter(self._link.checked([None if is_wrong_type(reply) else reply for reply in found]))
        now, cursor, paused = next(replies), next(replies), next(replies)
        self._revoked_cursor = _cursor_in(cursor)
        self._paused = frozenset(name.decode() for name in paused or ())
        now_s = time_of(now)
        due: dict[str, float] = {}
        for queue, some in zip(queues, asked, strict=True):
            *counts, first = (next(replies) for _ in some)
            if any(counts):
                due[queue] = 0.0
            elif None not in counts and first is not None:
                due[queue] = first[0][1] - now_s if first else math.inf
        return due

    async def _is_notified_within(self, timeout_s: float) -> bool:
        loop = asyncio.get_running_loop()
        notice: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(timeout_s, _settle, notice, False)
        self._waiting.add(notice)
        try:
            return await notice
        finally:
            timer.cancel()
            self._waiting.discard(notice)

    async def _track(self) -> None:
        # `send`, because `call` would connect, which is under way. Unblocking client 0 changes nothing; the
        # reply shows whether this user has the right to unblock.
        commands = [("CLIENT", "TRACKING", "ON"), ("CLIENT", "ID"), ("CLIENT", "UNBLOCK", 0)]
        tracking, number, unblocked = await self._link.reply_to(self._link.send(commands))
        self._idle.forget(None)
        is_tracked = tracking == b"OK"
        self._recheck_s = math.inf if is_tracked else POLL_S
        self.client_id = number if is_tracked and isinstance(number, int) and unblocked == 0 else 0

    def _changed(self, pushed: list[Any]) -> None:
        keys = pushed[1] if len(pushed) > 1 else None
        if keys is None:  # the server was emptied, so all keys have changed
            self._noted = None
        self._idle.forget(keys)
        self._notify()

    def _lost(self) -> None:
        self._idle.forget(None)
        self.client_id = 0  # after a restart of the server the number may be another client's
        self._notify()

    def _interrupt(self) -> None:
        if self._blocked is None or not self._link.awaits(self._blocked):
            return
        if (sent := self._unblock(self.client_id)) is not None:
            sent.add_done_callback(self._check_unblocked)

    def _check_unblocked(self, sent: asyncio.Future[list[Any]]) -> None:
        """Repeat the unblock if it had no effect: commands of two connections are not ordered, so the
        blocking call may have started after it.
        """
        if not sent.cancelled() and sent.exception() is None and sent.result() == [0]:
            asyncio.get_running_loop().call_later(UNBLOCK_AGAIN_S, self._interrupt)

    def _notify(self) -> None:
        self._notices += 1
        self._interrupt()
        for notice in self._waiting:
            _settle(notice, True)


def _cursor_in(found: bytes | None) -> int:
    """The cursor, or -1 if it is unreadable: no claim has that, so the worker claims to learn the revokes."""
    try:
        return int(found or 0)
    except ValueError:
        return -1


def _settle(notice: asyncio.Future[bool], value: bool) -> None:
    if not notice.done():
        notice.set_result(value)
