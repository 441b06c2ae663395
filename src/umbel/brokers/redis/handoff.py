"""Handing over: an idle worker is given the next message by the server itself.

Who waits for news and then claims has its message two trips later. So an idle worker that consumes
one queue waits with `BLMOVE`: the server moves the next message into the worker's own list
(`umbel.handed.<owner>`) and wakes nobody else. The worker runs it at once and, meanwhile, adopts it
(`adopt.lua`) among those that it holds, which a settle waits for. A message that is still in that
list goes back to its queue with the owner's next claim, or when the owner is given up.

A claim also brings the revokes. Here the server tells of them: the waiting connection tracks their
cursor, and what it is told comes before the message, in the order in which it happened. Then, and
whenever else the message may not simply run (it is not due, or its owner slept for long), it is
claimed in the ordinary way, which puts it back first.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from umbel.brokers.interface import Delivery, Tag
from umbel.brokers.redis.holding import Holding
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.leases import Leases
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.replies import is_missing_script
from umbel.wire.envelope_redis import MARK

ENDING_BYTES = 256  # more than the properties of a message take, which end it
FRESH_OF_LEASE = (
    0.3  # a message may be run that was asked for, or whose owner renewed, within this part of it
)

Pending = tuple[Tag, tuple[object, ...]]
"""The tag of a message, and the arguments of its adoption."""


class Handed(NamedTuple):
    """A message in the list of its owner, and what was known when it was asked for."""

    owner: str
    queue: str
    list_key: str
    envelope: bytes
    revoked_cursor: int
    asked_at: float  # on the loop's clock
    is_undisturbed: bool  # nothing was told between the asking and the answer


class Adoptions:
    """The message that was handed over and is not yet known to be claimed; one at a time."""

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
        self._finishing = asyncio.Lock()  # a claim and a settle may wait for the same answer

    def take_left(self) -> int:
        """How many waited behind the last one, to be asked once; -1 if nobody knows."""
        left, self._left = self._left, -1
        return left

    @property
    def pending(self) -> Tag | None:
        """The claim that is not confirmed yet."""
        return None if self._pending is None else self._pending[0]

    def begin(
        self, handed: Handed | None, owner: str, queues: Sequence[str], revoked_after: int
    ) -> Delivery | None:
        """The message, to be run now; None: claim in the ordinary way."""
        if handed is None or self._pending is not None or not self._link.is_connected:
            return None
        # Whoever slept for long may have lost its lease, and others may have the message.
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
        args = (self._keys.prefix, owner, epoch, delivery.tag, *known_by)
        self._pending = pending = (delivery.tag, args)
        # Sent after the message is on its way to the pool: sending takes about as long as that.
        asyncio.get_running_loop().call_soon(self._send, pending)
        return delivery

    def _send(self, pending: Pending) -> None:
        if self._pending is pending and not self._is_asked and self._link.is_connected:
            self._is_asked = True
            self._sent = self._link.send_run(self._script, *pending[1])
            self._sent.add_done_callback(lambda sent: self._answered(sent, pending))

    def _answered(self, sent: asyncio.Future[list[Any]], pending: Pending) -> None:
        """It may be long until somebody asks for the end of it, so a script that is not there is sent."""
        if self._sent is not sent or sent.cancelled() or sent.exception() is not None:
            return
        if is_missing_script(sent.result()[0]) and self._link.is_connected:
            self._sent = self._link.send([("EVAL", self._script.text, 0, *pending[1])])

    async def finish(self) -> None:
        """Return when what was handed over is held, or known not to be; BrokerError: ask again."""
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
