"""Queues: waiting messages, dead letters, retained failures, pauses and moves.

For people, and for monitoring: no claim is made or ended here. A pause is one durable record in the broker
that every claim reads, so it also holds for workers that start later or were cut off when it was set, and no
message has to reach them.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from umbel.brokers.interface.connection import BrokerInfo
from umbel.brokers.interface.messages import Delivery
from umbel.wire.message import Message, Outgoing
from umbel.wire.retried import requeued
from umbel.wire.signing import Signer, split_voucher

# ---- queues ----------------------------------------------------------------------------------------

DEAD_LETTER_PEEK_MAX = 1000


class Depth(msgspec.Struct, frozen=True):
    """How many messages of a queue wait, are parked until due, are claimed, and wait for a cluster limit.

    `paused`: no worker takes from it for now.
    """

    ready: int
    delayed: int
    claimed: int
    limited: int = 0
    paused: bool = False


def ready_for(queues: Collection[str], depths: Mapping[str, Depth]) -> int:
    """Return how many messages a worker of these queues could take now; paused queues count as empty."""
    return sum(depth.ready for name, depth in depths.items() if name in queues and not depth.paused)


class DeadLetter(msgspec.Struct, frozen=True):
    """A dead letter. `stored` is the stored reason, which may end in the voucher of a worker
    (`wire/signing.py`).
    """

    letter_id: int | str
    queue: str
    message: Message
    stored: str
    starts: int
    buried_at: float
    failed: bool = False  # a retained failure (`Failures`)

    @property
    def reason(self) -> str:
        """The reason without the voucher, for people."""
        return split_voucher(self.stored)[0]

    def requeued(self, signer: Signer | None, now: float, *, even_if_used: bool) -> Outgoing:
        """Return the message that goes back to the queue, marked as redelivered (`wire/retried.py`)."""
        return requeued(
            self.queue,
            self.message,
            starts=self.starts,
            stored=self.stored,
            signer=signer,
            now=now,
            even_if_used=even_if_used,
        )


class Queues(BrokerInfo, Protocol):
    """Queues and dead letters as a whole; no claim is made or ended here."""

    async def queues(self, only: Collection[str] | None = None) -> Mapping[str, Depth]:
        """Return how full the queues are. `only`: the caller needs only the ready messages of these."""

    async def peek(self, queue: str, limit: int) -> Sequence[Delivery]:
        """Return the first waiting messages of a queue, in the order of claims, without claiming them."""

    async def purge(self, queue: str) -> int:
        """Remove waiting messages, due or not, and free the keys they hold; return their number."""

    async def dead_letters(self, limit: int = DEAD_LETTER_PEEK_MAX) -> Sequence[DeadLetter]:
        """Return the newest dead letters, newest first."""

    async def count_dead(self, limit: int) -> int:
        """Count the dead letters, up to the limit; without reading them, where possible."""

    async def requeue_dead(self, letter_ids: Sequence[int | str], *, even_if_used: bool = False) -> int:
        """Return dead letters to their queues, marked as redelivered (`wire/retried.py`).

        No starts are counted; their header says how many there were. Letters that a worker vouches for are
        signed again; with `even_if_used` all letters that one of our keys has signed.
        """

    async def drop_dead(self, letter_ids: Sequence[int | str]) -> int:
        """Remove dead letters for good; return their number."""


# ---- failures --------------------------------------------------------------------------------------

RESEND_CHUNK = 200  # letters sent in one transaction: other processes wait while it runs


class Resend(msgspec.Struct, frozen=True):
    """A retained failure or dead letter, and the message sent in its place; None: only remove it."""

    letter: DeadLetter
    outgoing: Outgoing | None


class Resent(msgspec.Struct, frozen=True):
    """Which letters were sent, and which the broker refused and why, by their index in the request.

    The others were gone: another client had sent or removed them.
    """

    sent: frozenset[int] = frozenset()
    refused: Mapping[int, str] = {}


class Failures(BrokerInfo, Protocol):
    """Retained failures: at most `BrokerSettings.failed_keep`, for `failed_keep_s`; the oldest make room.

    `Ack.keep` brings them here, in the same step as the rest of the verdict where
    `Capabilities.atomic_settle` says so, and so does `Messages.keep_failed`.
    """

    async def failed(self, limit: int, *, task_id: str = "") -> Sequence[DeadLetter]:
        """Return retained failures, newest first; only those of one task if its id is given."""

    async def resend(self, letters: Sequence[Resend]) -> Resent:
        """Send the new messages and remove their letters, in this order of letters.

        One message and its letter are one step where `Capabilities.atomic_settle` says so. Elsewhere the
        message is sent first: a client that is killed in between, and asks again, sends the same message
        again.
        """


# ---- queue control ---------------------------------------------------------------------------------

MOVED_AT_ONCE_MAX = 500
PAUSED_MAX = 1000


class Pause(msgspec.Struct, frozen=True):
    """Since when a queue is paused. `told`: nodes that do not read pauses, and were sent a stop command."""

    since: float
    told: tuple[str, ...] = ()


class QueueControl(BrokerInfo, Protocol):
    """Pauses and resumes queues, and moves messages. `BrokerRefused` says which message cannot be moved, and
    why.
    """

    async def pause(self, queue: str, mark: Pause) -> None:
        """Let no claim take from the queue until it is resumed; existing claims are not touched."""

    async def resume(self, queue: str) -> bool:
        """Let claims take from the queue again; return whether it was paused."""

    async def paused(self) -> Mapping[str, Pause]:
        """Return the paused queues, and since when."""

    async def move(self, source: str, target: str, limit: int) -> int:
        """Move up to `limit` waiting messages, due or not, at most MOVED_AT_ONCE_MAX; return their number, 0
        if none wait.

        Each message is in one of the two queues at any moment; on RabbitMQ for a moment in both. Claims stay.
        """
