"""Broker: what the rest of Umbel asks of the place where messages wait, and what it must promise.

A broker has two faces. `Broker` is asynchronous and belongs to one worker process: it claims,
settles, listens. `Producer` is synchronous, safe to share between threads and to use after a
fork: it is what clients and running tasks publish with.

The promises, each of which `tests/brokers/contract.py` checks for every broker:

* `publish` returns when the messages are durable, all of a batch or none.
* A claimed message belongs to its claimer until it is settled or the claimer's lease ends. A
  claimer that reaches the broker once per lease keeps its messages, however long they take.
* `settle` applies a verdict only while the claim still stands; otherwise nothing of it is
  applied and its tag is in `Settled.conflicts`, or in `Settled.unknown` if the data was replaced.
* A follow-up or result of a verdict that the broker refuses (a full queue, a name it does not
  allow, a key of another type) ends alone: everything else of the batch is applied, the follow-up is
  among the dead letters with the reason, in the same step, and `Settled.refused` names it.
* `publish` of something the broker refuses raises `BrokerRefused`, which says what was refused.
* What one verdict brings (result, follow-up messages, the end of the message) is applied
  together where `Capabilities.atomic_settle` says so; elsewhere in that order, so that a crash
  in between repeats work and never loses it.
* Starts are counted, not claims: `starts` grows by `Started` and by `Return(charged=True)`.
* A message that is not due is not claimed.

Where a broker cannot do something it raises `NotSupported` and says why in `Capabilities`.
Wall-clock instants are Unix seconds, durations are seconds.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from umbel.brokers.evidence import Evidence
from umbel.brokers.links import Linked
from umbel.brokers.transport import Capabilities as Capabilities  # noqa: PLC0414 (others find it here)
from umbel.wire.message import Message, Outgoing, StoredResult
from umbel.wire.revoke import Revoke
from umbel.wire.signing import Keyring

if TYPE_CHECKING:  # clients and running tasks have no use for it
    from umbel.brokers.coordination import CoordinationStore

Tag = str | int
"""Names one claim of one message; opaque outside the broker that made it."""

DEFAULT_LEASE_S = 10.0
DEAD_LETTER_PEEK_MAX = 1000


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """What any broker is handed. `lease_s`: an owner silent for that long loses its messages."""

    url: str = field(repr=False)  # it may hold a password
    lease_s: float = DEFAULT_LEASE_S
    connect_timeout_s: float = 4.0
    result_expires_s: float = 86_400.0
    event_log_max: int = 1_000_000
    event_log_retention_s: float = 7 * 86_400.0
    revokes_max: int = 1_000_000
    revoke_retention_s: float = 7 * 86_400.0
    storage_max_bytes: int | None = None
    key_prefix: str = ""
    connection_name: str = "umbel"  # by which the server lists its connections
    keyring: Keyring | None = None  # who speaks over this broker signs with it
    remembers_signatures: bool = False  # a worker's: it asks `spend`


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
    """

    tag: Tag
    results: Sequence[StoredResult] = ()
    follow_ups: Sequence[Outgoing] = ()


class Return(msgspec.Struct, frozen=True, gc=False):
    """Back to its queue, first in line, or parked until `not_before`.

    `charged` counts a start against it; -1 takes back one that `Started` counted, when the worker
    stopped and the task is not to blame. `ran` marks it redelivered, whether charged or not.
    """

    tag: Tag
    charged: int = 0
    ran: bool = False
    not_before: float = 0.0


class Bury(msgspec.Struct, frozen=True, gc=False):
    """To the dead letters, with the reason, in words a person can act on."""

    tag: Tag
    reason: str
    charged: bool = False
    results: Sequence[StoredResult] = ()
    follow_ups: Sequence[Outgoing] = ()


class Started(msgspec.Struct, frozen=True, gc=False):
    """Count one start now, and keep the claim: sent before a suspect message runs again."""

    tag: Tag


Verdict = Ack | Return | Bury | Started


class Spend(msgspec.Struct, frozen=True, gc=False):
    """The signature of a claimed message, by its mark, and until when a copy of it could pass as fresh."""

    tag: Tag
    mark: str
    expires_at: float


class Refused(msgspec.Struct, frozen=True, gc=False):
    """A follow-up or a result that the broker does not take, and why."""

    part: Outgoing | StoredResult
    reason: str


@dataclass(frozen=True, slots=True)
class Settled:
    """Nothing of the verdicts on these tags is applied.

    `conflicts`: their claims had ended, others have the messages. `unknown`: the broker's data was
    replaced since they were claimed; nobody else has the messages, unless a backup brought them back.
    """

    applied: int
    conflicts: frozenset[Tag] = frozenset()
    refused: Sequence[Refused] = ()
    unknown: frozenset[Tag] = frozenset()


@dataclass(frozen=True, slots=True)
class Replaced:
    """The broker's data is not what it was: emptied, deleted, or restored from a backup.

    `unknown`: how many messages were claimed here that it does not know as claimed any more.
    """

    what: str
    unknown: int


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to `claim`: messages, and every revoke recorded since `revoked_after`.

    A revoke that was recorded before the claim is always in this reply or an earlier one, so a
    worker that applies `revokes` before it dispatches never starts a revoked task (S3).
    """

    deliveries: Sequence[Delivery]
    revokes: Sequence[Revoke]
    revoked_cursor: int
    returned: int = 0  # messages of dead owners that this claim gave back on the way
    lease_ended: bool = False  # the owner's, since it last renewed or claimed: others have its messages


@dataclass(frozen=True, slots=True)
class Depth:
    """How many messages of a queue wait, are parked until due, and are claimed."""

    ready: int
    delayed: int
    claimed: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    letter_id: int | str
    queue: str
    message: Message
    reason: str
    starts: int
    buried_at: float


class Broadcast(msgspec.Struct, frozen=True, gc=False):
    """One message of the fan-out: an event, a control request, a reply."""

    exchange: str
    routing_key: str
    body: bytes
    headers: bytes = b"{}"


class LoggedEvent(msgspec.Struct, frozen=True, gc=False):
    offset: int
    recorded_at: float
    routing_key: str
    body: bytes


@dataclass(frozen=True, slots=True)
class EventLogState:
    """The event log as a whole: its last offset, and how far each recorder has acknowledged it."""

    last_offset: int
    acknowledged: Mapping[str, int]
    lost: int


class Subscription(Protocol):
    """What was broadcast since the subscription was entered, in order. Lossy only by TTL."""

    def __aiter__(self) -> AsyncIterator[Broadcast]: ...


class Broker(Linked, Protocol):
    """The asynchronous face, for one worker process (or one command of the CLI).

    `on_replaced` is called on the loop when the broker notices that its data was replaced. It has then
    made again what it needs itself: queues, the owner's lease, subscriptions follow within seconds.
    """

    on_replaced: Callable[[Replaced], None]

    @property
    def url(self) -> str: ...
    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def keyring(self) -> Keyring | None: ...
    @property
    def coordination(self) -> "CoordinationStore": ...

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    async def publish(self, batch: Sequence[Outgoing]) -> None: ...

    async def claim(self, owner: str, queues: Sequence[str], limit: int, *, revoked_after: int = 0) -> Claim:
        """Take up to `limit` due messages, by priority, oldest first. Never waits."""
        ...

    async def wait_ready(self, queues: Sequence[str], timeout_s: float, *, owner: str = "") -> None:
        """Return when a message may be ready, or at the time-out; takes nothing.

        An `owner` that claims next may have a message set aside for it meanwhile; if it does not
        claim, the message is lost to others until the owner is forgotten or its lease ends.
        """
        ...

    async def renew(self, owner: str) -> bool:
        """Prolong the owner's lease, or begin one. False: there was none any more.

        A lease ends when somebody takes the messages of an owner whose time is over; an owner
        that comes late but before that has lost nothing. An owner that claims first learns of it then.
        """
        ...

    async def return_lost(self) -> int:
        """Return the messages of owners whose lease ended, marked redelivered; how many."""
        ...

    async def leave_queue(self, owner: str, queue: str) -> None:
        """The owner claims no more from this queue for now: what was fetched ahead goes back to it.

        What it has claimed stays its own until it is settled.
        """
        ...

    async def forget_owner(self, owner: str) -> int:
        """The owner stops: return at once what it still holds, marked redelivered; how many.

        What certainly did not run is better settled with `Return` before.
        """
        ...

    async def settle(self, verdicts: Sequence[Verdict]) -> Settled: ...

    async def spend(self, signatures: Sequence[Spend]) -> frozenset[Tag]:
        """Use the signatures of these claimed messages; the tags of those that are copies.

        A message that was returned, or whose claimer died, is no copy. `Ack` and `Bury` leave the signature
        used, in the same step where `Capabilities.atomic_settle` says so.
        """
        ...

    async def queues(self) -> Mapping[str, Depth]: ...
    async def peek(self, queue: str, limit: int) -> Sequence[Delivery]: ...
    async def purge(self, queue: str) -> int: ...
    async def dead_letters(self, limit: int = DEAD_LETTER_PEEK_MAX) -> Sequence[DeadLetter]: ...
    async def bury(self, refused: Sequence[Refused]) -> None:
        """Put messages among the dead letters that no queue takes; results are passed over."""
        ...

    async def requeue_dead(self, letter_ids: Sequence[int | str]) -> int:
        """Return dead letters to their queues with no starts counted; genuine ones are signed again."""
        ...

    async def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> int | None:
        """How many subscriptions heard it, where the broker counts them; else None."""
        ...

    def subscribe(
        self, exchange: str, patterns: Sequence[str], *, unread_ttl_s: float | None = None
    ) -> AbstractAsyncContextManager[Subscription]:
        """Listen on routing keys; `*` is one word, `#` any number, as AMQP has it.

        Two exchanges differ (`wire/control.py`): on that of control requests everybody hears
        everything, and the one pattern is the name of the node that listens; on that of replies
        each pattern is a routing key, taken as it is, and what was sent to it before the listener
        came for it waits for it.

        `unread_ttl_s`: events that this listener has not read for so long are dropped, where the broker
        keeps a queue for each listener; elsewhere who sends them says so (`broadcast`).
        """
        ...

    async def revoke(self, revokes: Sequence[Revoke]) -> None:
        """Record that these tasks must not start; RevokesFull when the record is at its limit."""
        ...

    async def store_time(self) -> float | None:
        """Unix time by the store's own clock; None where it has none that all nodes share."""
        ...

    async def mark_alive(self, node: str, incarnation: int, *, ttl_s: float) -> None:
        """Let `probe` find this run of the node for as long; on RabbitMQ its mailbox does that."""
        ...

    async def probe(self, node: str, incarnation: int = 0) -> Evidence:
        """What is known of a node that is silent; with an incarnation, of that run of it.

        RabbitMQ knows whose connection has ended, but not which run of a node is connected, and
        takes a node for gone that never subscribed to its mailbox.
        """
        ...

    async def register_recorder(self, name: str) -> int:
        """From now on events are logged for this reader; the offset it has acknowledged."""
        ...

    async def forget_recorder(self, name: str) -> None: ...
    async def recorders(self) -> Sequence[str]: ...
    async def log_events(self, events: Sequence[tuple[str, bytes]]) -> int:
        """Append (routing key, body) while a recorder is registered; how many were kept."""
        ...

    async def read_events(self, name: str, limit: int, *, after: int = 0) -> Sequence[LoggedEvent]:
        """The next events that this recorder has not acknowledged, and after that offset.

        An entry without a routing key has nothing to read, but moves the reader's place.
        """
        ...

    async def acknowledge_events(self, name: str, offset: int) -> None: ...
    async def lost_events(self) -> int:
        """How many events the log dropped at its limit since it was made."""
        ...

    async def event_log(self) -> EventLogState: ...

    async def sweep(self) -> None:
        """Remove what is past its retention: results, broadcasts, events, revokes."""
        ...


class Producer(Protocol):
    """The synchronous face: for clients, and for tasks that send tasks. Thread- and fork-safe."""

    @property
    def capabilities(self) -> Capabilities: ...
    def publish(self, batch: Sequence[Outgoing]) -> None: ...
    def revoke(self, revokes: Sequence[Revoke]) -> None: ...
    def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> None: ...
    def log_events(self, events: Sequence[tuple[str, bytes]]) -> int: ...
    def hold_unique(self, key: str, task_id: str, *, ttl_s: float) -> str: ...  # who holds it now
    def release_unique(self, held: Sequence[tuple[str, str]]) -> None: ...
    def close(self) -> None: ...
