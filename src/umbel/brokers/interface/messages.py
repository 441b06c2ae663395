"""Messages: how they are sent, claimed and settled, and what is said of one on the way."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from umbel.brokers.interface.connection import BrokerInfo
from umbel.protocol.delivery.limits import Terms
from umbel.wire.message import Message, Outgoing, StoredResult
from umbel.wire.revoke import Revoke

Tag = str | int
"""Names one claim of one message; opaque outside the broker that made it."""


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """A claimed message. `redelivered`: an earlier claimer died with it, so it may have run."""

    tag: Tag
    queue: str
    message: Message
    starts: int = 0
    redelivered: bool = False


class Ack(msgspec.Struct, frozen=True, gc=False):
    """The message is done: store these, send those, forget it.

    Mostly one result; a failed step of a chain also ends the steps that will never run.
    `after` is the worker's own: what it does when this has been applied. `keep`: why its task failed; the
    message is then kept among the failures (`failures.py`) instead of being forgotten.
    """

    tag: Tag
    results: Sequence[StoredResult] = ()
    follow_ups: Sequence[Outgoing] = ()
    after: bytes = b""
    keep: str = ""


class Return(msgspec.Struct, frozen=True, gc=False):
    """Back to its queue, first in line (see `reasons["return_order"]`), or parked until `not_before`.

    `charged` counts a start against it; -1 takes back one that `Started` counted, when the worker
    stopped and the task is not to blame. `ran` marks it redelivered, whether charged or not.
    """

    tag: Tag
    charged: int = 0
    ran: bool = False
    not_before: float = 0.0


class Bury(msgspec.Struct, frozen=True, gc=False):
    """To the dead letters, with the reason, in words a person can act on.

    `by_queue`: where its own queue sends dead letters, if the broker has that (`x-dead-letter-exchange` of
    RabbitMQ, which drops it if the queue names none); else to ours.
    """

    tag: Tag
    reason: str
    charged: bool = False
    results: Sequence[StoredResult] = ()
    follow_ups: Sequence[Outgoing] = ()
    by_queue: bool = False
    after: bytes = b""  # as for Ack


class Started(msgspec.Struct, frozen=True, gc=False):
    """Count one start now, and keep the claim: sent before a suspect message runs again."""

    tag: Tag


Verdict = Ack | Return | Bury | Started


class Spend(msgspec.Struct, frozen=True, gc=False):
    """The signature of a claimed message, by its mark, and until when a copy of it could pass as fresh."""

    tag: Tag
    mark: str
    expires_at: float


class Permit(msgspec.Struct, frozen=True, gc=False):
    """May this claimed message start, under its task's limit for the whole cluster?

    `ends`: it will not start, whatever the limit says; if it was its turn, it is that of the next.
    """

    tag: Tag
    task_id: str
    bucket: str
    terms: Terms
    ends: bool = False


class Refused(msgspec.Struct, frozen=True, gc=False):
    """A follow-up or a result that the broker does not take, and why."""

    part: Outgoing | StoredResult
    reason: str


class Settled(msgspec.Struct, frozen=True):
    """Nothing of the verdicts on these tags is applied.

    `conflicts`: their claims had ended, others have the messages. `unknown`: the broker's data was
    replaced since they were claimed; nobody else has the messages, unless a backup brought them back.
    """

    applied: int
    conflicts: frozenset[Tag] = frozenset()
    refused: Sequence[Refused] = ()
    unknown: frozenset[Tag] = frozenset()


class Claim(msgspec.Struct, frozen=True):
    """The answer to `claim`: messages, and every revoke recorded since `revoked_after`.

    A revoke that was recorded before the claim is always in this reply or an earlier one, so a
    worker that applies `revokes` before it dispatches never starts a revoked task (S3).
    """

    deliveries: Sequence[Delivery]
    revokes: Sequence[Revoke]
    revoked_cursor: int
    returned: int = 0  # messages of dead owners that this claim gave back on the way
    lease_ended: bool = False  # the owner's, since it last renewed or claimed: others have its messages


class Messages(BrokerInfo, Protocol):
    """What the worker asks for on a message's way: nothing here looks at a queue as a whole."""

    async def publish(self, batch: Sequence[Outgoing]) -> None: ...
    async def claim(self, owner: str, queues: Sequence[str], limit: int, *, revoked_after: int = 0) -> Claim:
        """Take up to `limit` due messages, by priority, oldest first. Never waits."""
        ...

    async def wait_ready(self, queues: Sequence[str], timeout_s: float, *, owner: str = "") -> bool:
        """Return when a message may be ready, or at the time-out; takes nothing.

        False at the time-out where the broker would have told of any change since the last claim: another
        claim would find nothing.

        An `owner` that claims next may have a message set aside for it meanwhile; if it does not
        claim, the message is lost to others until the owner is forgotten or its lease ends.
        """
        ...

    async def leave_queue(self, owner: str, queue: str) -> None:
        """The owner claims no more from this queue for now: what was fetched ahead goes back to it.

        What it has claimed stays its own until it is settled.
        """
        ...

    async def settle(self, verdicts: Sequence[Verdict]) -> Settled: ...
    async def bury(self, refused: Sequence[Refused]) -> None:
        """Put messages among the dead letters that no queue takes; results are passed over."""
        ...

    async def keep_failed(self, failed: Sequence[Refused]) -> None:
        """Keep messages that were acknowledged before their tasks failed; results are passed over."""
        ...

    async def spend(self, signatures: Sequence[Spend]) -> frozenset[Tag]:
        """Use the signatures of these claimed messages; the tags of those that are copies.

        A message that was returned, or whose claimer died, is no copy. `Ack` and `Bury` leave the signature
        used, in the same step where `Capabilities.atomic_settle` says so.
        """
        ...

    async def permit(self, asked: Sequence[Permit]) -> Mapping[Tag, str | None]:
        """Ask whether claimed messages may start; those that may not, and why.

        "": it waits in the broker now. None: its claim has ended, or the data was replaced; which of them
        the answer to its verdict says. Any other reason: the limit cannot be kept, and the message is
        still claimed. A slot is free when its claim ends, by whatever verdict or by the end of its owner.
        """
        ...

    async def ended(self, tags: Sequence[Tag]) -> frozenset[Tag]:
        """Those of these claims that have ended: a verdict on them would not be applied.

        Where the data was replaced, claims are unknown and have not ended (`Settled.unknown`).
        """
        ...
