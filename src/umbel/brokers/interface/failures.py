"""Failures: messages of tasks that failed, kept so that the tasks can be retried."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from umbel.brokers.interface.connection import BrokerInfo
from umbel.brokers.interface.queues import DeadLetter
from umbel.wire.message import Outgoing

RESEND_CHUNK = 200  # letters that one transaction sends: others wait while it runs


class Resend(msgspec.Struct, frozen=True):
    """A kept failure or a dead letter, and the message that is sent in its place; None: it only goes."""

    letter: DeadLetter
    outgoing: Outgoing | None


class Resent(msgspec.Struct, frozen=True):
    """By their places in what was asked for: what was sent, and what the broker refused, and why.

    The rest was gone: somebody else has sent or removed it.
    """

    sent: frozenset[int] = frozenset()
    refused: Mapping[int, str] = {}


class Failures(BrokerInfo, Protocol):
    """Kept failures: at most `BrokerSettings.failed_keep`, for `failed_keep_s`; the oldest make room.

    `Ack.keep` brings them here, in the same step as the rest of the verdict where
    `Capabilities.atomic_settle` says so, and `Messages.keep_failed`.
    """

    async def failed(self, limit: int, *, task_id: str = "") -> Sequence[DeadLetter]:
        """Kept failures, newest first; of one task where its id is given."""
        ...

    async def resend(self, letters: Sequence[Resend]) -> Resent:
        """Send the new messages and remove their letters, in this order of letters.

        One message and its letter are one step where `Capabilities.atomic_settle` says so. Elsewhere the
        message is sent first: who is killed in between, and asks again, sends the very same message again.
        """
        ...
