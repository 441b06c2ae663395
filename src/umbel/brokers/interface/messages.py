"""Messages: how they are sent, claimed and settled, and the verdicts and replies of these calls."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from umbel.brokers.interface.cluster import Broadcast
from umbel.brokers.interface.connection import BrokerInfo, Capabilities
from umbel.protocol.delivery.limits import Terms
from umbel.protocol.delivery.trust import ClusterId, Doubt
from umbel.wire.message import Message, Outgoing, StoredResult
from umbel.wire.records import Revoke

# ---- messages --------------------------------------------------------------------------------------

Tag = str | int
"""Names one claim of one message; opaque outside the broker that made it."""


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """A claimed message. `redelivered`: an earlier claimer died with it, so it may have run.

    `unsigned`: the worker has keys, and takes this message without a signature (`accept_unsigned`).
    """

    tag: Tag
    queue: str
    message: Message
    starts: int = 0
    redelivered: bool = False
    unsigned: bool = False


class Ack(msgspec.Struct, frozen=True, gc=False):
    """The message is done: store these results, send those follow-ups, remove it.

    Mostly one result; a failed step of a chain also ends the steps that will never run. `after` belongs to
    the worker: what it does when this has been applied. `keep`: why its task failed; the message is then
    retained among the failures (`queues.py`) instead of being removed.
    """

    tag: Tag
    results: Sequence[StoredResult] = ()
    follow_ups: Sequence[Outgoing] = ()
    after: bytes = b""
    keep: str = ""


class Return(msgspec.Struct, frozen=True, gc=False):
    """The message goes back to its queue, first in line (see `reasons["return_order"]`), or is parked until
    `not_before`.

    `charged` counts a start against it; -1 takes back one that `Started` counted, when the worker stopped and
    the task is not to blame. `ran` marks it redelivered, whether charged or not.
    """

    tag: Tag
    charged: int = 0
    ran: bool = False
    not_before: float = 0.0


class Bury(msgspec.Struct, frozen=True, gc=False):
    """The message becomes a dead letter, with a reason that a person can act on.

    `by_queue`: to where its own queue sends dead letters, if the broker has that (`x-dead-letter-exchange` of
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
    """Count one start now, and hold the claim: sent before a suspect message runs again."""

    tag: Tag


Verdict = Ack | Return | Bury | Started


class Spend(msgspec.Struct, frozen=True, gc=False):
    """The signature of a claimed message, by its fingerprint (`mark`), and until when it is remembered as
    used.

    `born`: when it was made or due, whichever is later. All judges of a message know the same of it.
    """

    tag: Tag
    mark: str
    expires_at: float
    born: float = 0.0


class Permit(msgspec.Struct, frozen=True, gc=False):
    """May this claimed message start, under its task's limit for the whole cluster?

    `ends`: it will not start, whatever the limit says; if it had the next turn, that passes to the next
    message.
    """

    tag: Tag
    task_id: str
    bucket: str
    terms: Terms
    ends: bool = False


class Refused(msgspec.Struct, frozen=True, gc=False):
    """A follow-up or a result that the broker refuses, and why."""

    part: Outgoing | StoredResult
    reason: str


class Settled(msgspec.Struct, frozen=True):
    """How many verdicts were applied. Nothing of the verdicts on these tags is applied:

    `conflicts`: their claims had ended, others have the messages. `unknown`: the broker's data was replaced
    since they were claimed; no other worker has the messages, unless a backup brought them back.
    """

    applied: int
    conflicts: frozenset[Tag] = frozenset()
    refused: Sequence[Refused] = ()
    unknown: frozenset[Tag] = frozenset()


class SetAside(msgspec.Struct, frozen=True):
    """A message over the size limit: a dead letter now, with its bytes unread."""

    queue: str
    size_bytes: int


class Claim(msgspec.Struct, frozen=True):
    """The answer to `claim`: messages, and every revoke recorded since `revoked_after`.

    A revoke that was recorded before the claim is always in this reply or an earlier one, so a worker that
    applies `revokes` before it dispatches never starts a revoked task (S3).
    """

    deliveries: Sequence[Delivery]
    revokes: Sequence[Revoke]
    revoked_cursor: int
    returned: int = 0  # messages of dead owners that this claim also returned to their queues
    lease_ended: bool = (
        False  # the lease of the owner ended since it last renewed or claimed: others have its messages
    )
    set_aside: Sequence[SetAside] = ()


class Messages(BrokerInfo, Protocol):
    """What a worker needs to take and settle messages; nothing here is about a queue as a whole."""

    async def publish(self, batch: Sequence[Outgoing]) -> None:
        """Make all messages of the batch durable, or none; BrokerRefused names the refused one."""

    async def claim(self, owner: str, queues: Sequence[str], limit: int, *, revoked_after: int = 0) -> Claim:
        """Take up to `limit` due messages, by priority, oldest first. Never waits."""

    async def wait_ready(self, queues: Sequence[str], timeout_s: float, *, owner: str = "") -> bool:
        """Return when a message may be ready, or at the time-out; takes nothing.

        False at the time-out where the broker would have reported any change since the last claim: another
        claim would find nothing.

        An `owner` that claims next may have a message reserved for it meanwhile; if it does not claim, other
        workers do not get the message until the owner is forgotten or its lease ends.
        """

    async def leave_queue(self, owner: str, queue: str, *, is_busy: bool = False) -> None:
        """Stop claiming from this queue for now: messages fetched ahead go back, unstarted.

        The owner's claims stay in force until they are settled. `is_busy`: it has no room at the moment, and
        may get messages that no other worker has room for, if the broker's settings ask for that.
        """

    async def settle(self, verdicts: Sequence[Verdict]) -> Settled:
        """Apply verdicts on claims of this process; report which were not applied, and which parts were
        refused.
        """

    async def bury(self, refused: Sequence[Refused]) -> None:
        """Make dead letters of messages that no queue takes; results are skipped."""

    async def keep_failed(self, failed: Sequence[Refused]) -> None:
        """Retain messages that were acknowledged before their tasks failed; results are skipped."""

    async def spend(self, signatures: Sequence[Spend]) -> Mapping[Tag, Doubt]:
        """Use the signatures of these claimed messages; return those that may not be used, and why.

        REPLAYED: a copy, because the signature is in use by another claim, or was used by one that ended its
        message. A message that was returned, or whose claimer died, is no copy. STALE: no record says whether
        it was used. `Ack` and `Bury` leave the signature used, in the same step where
        `Capabilities.atomic_settle` says so. ClusterIdLost: the broker lost its record of signatures.
        """

    async def permit(self, asked: Sequence[Permit]) -> Mapping[Tag, str | None]:
        """Ask whether claimed messages may start; return those that may not, and why.

        "": it waits in the broker now. None: its claim has ended, or the data was replaced; the reply to its
        verdict says which. Any other reason: the limit cannot be enforced, and the message is still claimed.
        A slot is free when its claim ends, by whatever verdict or by the end of its owner.
        """

    async def ended(self, tags: Sequence[Tag]) -> frozenset[Tag]:
        """Return those of these claims that have ended: a verdict on them would not be applied.

        Where the data was replaced, claims are unknown and have not ended (`Settled.unknown`).
        """


# ---- producer --------------------------------------------------------------------------------------


class Producer(Protocol):
    """The synchronous face: for clients, and for tasks that send tasks. Safe for threads and forks."""

    @property
    def capabilities(self) -> Capabilities:
        """What the transport supports."""

    def publish(self, batch: Sequence[Outgoing]) -> None:
        """Make all messages of the batch durable, or none; BrokerRefused names the refused one."""

    def revoke(self, revokes: Sequence[Revoke]) -> None:
        """Record that these tasks must not start; RevokesFull when the record is at its limit."""

    def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> None:
        """Send to all listeners."""

    def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        """Append events for recorders; return how many entries were stored (`EventLog.log_events`)."""

    def hold_unique(self, key: str, task_id: str, *, ttl_s: float) -> str:
        """Take the key of a unique task if it is free; return the id of the task that holds it now."""

    def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        """Free each (key, task id) that the task holds."""

    def cluster_id(self) -> ClusterId | None:
        """Return the id that signatures are bound to; None: none was made, or it is lost."""

    def close(self) -> None:
        """Close the connections of this producer."""


SENT_REMEMBERED_S = 300.0
"""How long a message of an AsyncProducer is remembered as sent, so that the same id is not sent twice."""

BATCH_MAX = 50_000
"""Messages that an AsyncProducer publishes in one step."""


class Attempt:
    """What is known of one send. `is_out`: from now on the messages may reach the broker."""

    __slots__ = ("is_out",)

    def __init__(self) -> None:
        self.is_out = False


class AsyncProducer(Protocol):
    """For clients on one event loop, which it never blocks. It opens its connection at the first call.

    Messages are distinguished by their correlation id, the id of their task. Where `repeats` is true,
    messages that were published within SENT_REMEMBERED_S are left out, so a publish whose outcome is not
    known can be repeated. Elsewhere a repeat could send a message twice, so the caller gets an error that
    says the outcome is unknown.
    """

    @property
    def repeats(self) -> bool:
        """Whether a publish can be repeated without sending a message twice."""

    @property
    def capabilities(self) -> Capabilities:
        """What the transport supports."""

    async def publish(self, batch: Sequence[Outgoing], attempt: Attempt) -> None:
        """Make all messages of the batch durable, or none; set `attempt.is_out` before they may be sent."""

    async def hold_unique(self, key: str, task_id: str, *, ttl_s: float) -> str:
        """Take the key of a unique task if it is free; return the id of the task that holds it now."""

    async def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        """Free each (key, task id) that the task holds."""

    async def close(self) -> None:
        """Release the connection, in its loop."""

    def abandon(self) -> None:
        """Release what can be released after the loop was closed."""
