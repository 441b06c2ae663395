"""What Google Pub/Sub can and cannot do for Umbel, and the operations that it refuses.

Pub/Sub stores messages only: no results, leases, event log or revocations. The reasons are shown to users.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

from umbel.brokers.interface import (
    Capabilities,
    DeadLetter,
    Depth,
    EventLogState,
    Evidence,
    LoggedEvent,
    Pause,
    Permit,
    Refused,
    Resend,
    Resent,
    Spend,
    Tag,
)
from umbel.errors import NotSupported
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.protocol.delivery.trust import ClusterId, Doubt
from umbel.protocol.leadership.coordination import ElectionRecord, ElectionReply, ElectionRequest, LeaseReply
from umbel.wire.control import REPLY_EXCHANGE, REQUEST_EXCHANGE
from umbel.wire.message import Outgoing
from umbel.wire.records import Revoke

# ---- capabilities ----------------------------------------------------------------------------------
#
# What Google Pub/Sub can and cannot do for Umbel; the reasons are shown to users.

_STORE = "set 'coordination_store', for example to a Redis server"

CAPABILITIES = Capabilities(
    transport="gcpubsub",
    atomic_settle=False,
    stores_results=False,
    fanout=True,
    reports_nobody=False,
    leases=False,
    delayed=True,
    event_log=False,
    priorities="0 first",
    events=False,
    revokes=False,
    depths=False,
    pauses=False,
    failures=False,
    signatures=False,
    marks=False,
    reserved={
        "umbel.*": "Umbel's",
        EVENT_EXCHANGE: "the exchange of events",
        REQUEST_EXCHANGE: "the exchange of control requests",
        REPLY_EXCHANGE: "the exchange of their replies",
    },
    reasons={
        "atomic_settle": "Pub/Sub cannot publish and acknowledge in one step: Umbel publishes first, then "
        "acknowledges",
        "atomic_publish": "a request carries up to 1,000 messages for one queue and 10 MB; of a larger "
        "batch a part may be published",
        "stores_results": "Pub/Sub stores no results: set 'backend' to Redis or to an embedded broker's file",
        "leases": f"Pub/Sub has no value that can be compared and changed in one step; {_STORE}",
        "events": f"Pub/Sub has no topic exchanges, so nodes do not receive each other's events; {_STORE}",
        "event_log": f"Pub/Sub has no log that several readers follow; {_STORE}",
        "unique": f"Pub/Sub has no key that can be set atomically and expires; {_STORE} for unique tasks",
        "limits": f"Pub/Sub has no value that can be compared and changed in one step; {_STORE}, or use "
        "rate_limit, which holds for each worker",
        "revokes": "Pub/Sub has no record that workers read: a revoke reaches the workers that are running, "
        f"and those that start later by their hello; {_STORE} to record it for all workers",
        "depths": "Pub/Sub does not report how many messages wait; Cloud Monitoring does "
        "(subscription/num_undelivered_messages)",
        "pauses": f"Pub/Sub has no record that every worker reads; {_STORE}, or use "
        "`umbel control cancel_consumer`, which reaches the workers that are running",
        "failures": "Pub/Sub cannot store a number of messages and drop the oldest: messages of failed "
        f"tasks are not stored; {_STORE} for `umbel task retry`",
        "signatures": "Pub/Sub has no record of the signatures that were used, so that a copied message "
        "could run again; use Redis, RabbitMQ or the embedded broker for signed tasks",
        "marks": "Pub/Sub does not know which nodes are connected",
        "delayed": "a task that is not due is held by its ack deadline: a worker gets it every ten minutes "
        f"and postpones it, for a day at most; {_STORE} for more",
        "ownership": "the ack deadline is the lease: Pub/Sub redelivers the messages of a dead process after "
        "ten seconds or more; workers do not count these",
        "priorities": "Pub/Sub has no priorities: they order the messages that a worker has fetched",
        "starts": "Pub/Sub counts deliveries: a start that a worker counted is forgotten if the whole worker "
        "is killed; after 100 deliveries Pub/Sub moves the message to the dead letters",
        "order": "Pub/Sub delivers in no order",
        "return_order": "a returned message is published again, behind the others",
        "unstarted": "Pub/Sub counts deliveries: a message that a busy worker fetched ahead and gave back is "
        "delivered as one that may have run",
        "claimed": "Pub/Sub does not show what others have claimed",
        "sent_once": "Pub/Sub cannot tell whether it has a message already: an awaited send that was cut off "
        "may have been sent, and sending it again may run it twice",
        "move": "Pub/Sub cannot move a message in one step: Umbel publishes, and acknowledges when that is "
        "confirmed; a move that is killed may leave messages in both queues",
    },
)


# ---- unsupported -----------------------------------------------------------------------------------
#
# Operations that Pub/Sub cannot do without a coordination store; each raises NotSupported with the reason.


def refuse(ability: str) -> NoReturn:
    """Raise NotSupported with the reason why Pub/Sub lacks this ability."""
    raise NotSupported(CAPABILITIES.reasons[ability])


class NoCoordination:
    """The coordination of a broker without a coordination store: no elections and no leases."""

    unproven = 0

    async def open_election(self, key: str, request: ElectionRequest) -> ElectionRecord:
        """Raises NotSupported: Pub/Sub has no compare-and-set, which elections and leases need."""
        refuse("leases")

    async def claim_election(
        self, key: str, holder: str, request: ElectionRequest, *, ttl_s: float
    ) -> ElectionReply:
        """Raises NotSupported: Pub/Sub has no compare-and-set, which elections and leases need."""
        refuse("leases")

    async def start_election(self, key: str, holder: str, term: int) -> bool:
        """Raises NotSupported: Pub/Sub has no compare-and-set, which elections and leases need."""
        refuse("leases")

    async def renew_election(self, key: str, holder: str, term: int) -> bool:
        """Raises NotSupported: Pub/Sub has no compare-and-set, which elections and leases need."""
        refuse("leases")

    async def finish_election(self, key: str, holder: str, term: int, outcome: str) -> bool:
        """Raises NotSupported: Pub/Sub has no compare-and-set, which elections and leases need."""
        refuse("leases")

    async def read_election(self, key: str) -> ElectionRecord | None:
        """Raises NotSupported: Pub/Sub has no compare-and-set, which elections and leases need."""
        refuse("leases")

    async def unfinished_elections(self, limit: int) -> Sequence[tuple[str, ElectionRecord]]:
        """Raises NotSupported: Pub/Sub has no compare-and-set, which elections and leases need."""
        refuse("leases")

    async def acquire_lease(self, name: str, holder: str, *, ttl_s: float) -> LeaseReply:
        """Raises NotSupported: Pub/Sub has no compare-and-set, which elections and leases need."""
        refuse("leases")

    async def renew_lease(self, name: str, holder: str, term: int, *, ttl_s: float) -> bool:
        """Raises NotSupported: Pub/Sub has no compare-and-set, which elections and leases need."""
        refuse("leases")

    async def release_lease(self, name: str, holder: str, term: int) -> bool:
        """Raises NotSupported: Pub/Sub has no compare-and-set, which elections and leases need."""
        refuse("leases")

    async def update_lease(self, name: str, holder: str, term: int, data: bytes) -> bool:
        """Raises NotSupported: Pub/Sub has no compare-and-set, which elections and leases need."""
        refuse("leases")

    async def read_lease(self, name: str) -> LeaseReply:
        """Raises NotSupported: Pub/Sub has no compare-and-set, which elections and leases need."""
        refuse("leases")

    async def fenced_publish(
        self, name: str, holder: str, term: int, batch: Sequence[Outgoing], *, data: bytes | None = None
    ) -> bool:
        """Raises NotSupported: Pub/Sub has no compare-and-set, which elections and leases need."""
        refuse("leases")

    async def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        """Raises NotSupported: Pub/Sub has no keys for unique tasks."""
        refuse("unique")

    async def raise_clock(self, value: int) -> int:
        """The value itself: there is no shared clock, so nodes adjust their clocks by each other's hello."""
        return value


class Unsupported:
    """The operations of the broker that need a coordination store."""

    async def permit(self, asked: Sequence[Permit]) -> Mapping[Tag, str | None]:
        """Raises NotSupported: Pub/Sub cannot count limits for the whole cluster."""
        refuse("limits")

    async def spend(self, signatures: Sequence[Spend]) -> Mapping[Tag, Doubt]:
        """Raises NotSupported: Pub/Sub has no record of used signatures."""
        refuse("signatures")

    async def cluster_id(self) -> ClusterId | None:
        """Raises NotSupported: a cluster on Pub/Sub has no id for signatures."""
        refuse("signatures")

    async def keep_cluster_id(self, made: ClusterId) -> ClusterId:
        """Raises NotSupported: a cluster on Pub/Sub has no id for signatures."""
        refuse("signatures")

    async def revoke(self, revokes: Sequence[Revoke]) -> None:
        """Raises NotSupported: Pub/Sub has no record of revokes that all workers read."""
        refuse("revokes")

    async def queues(self, only: Collection[str] | None = None) -> Mapping[str, Depth]:
        """Raises NotSupported: Pub/Sub does not report how many messages wait."""
        refuse("depths")

    async def pause(self, queue: str, mark: Pause) -> None:
        """Raises NotSupported: Pub/Sub has no record of pauses that all workers read."""
        refuse("pauses")

    async def resume(self, queue: str) -> bool:
        """Raises NotSupported: Pub/Sub has no record of pauses that all workers read."""
        refuse("pauses")

    async def paused(self) -> Mapping[str, Pause]:
        """No queues, because none can be paused."""
        return {}

    async def keep_failed(self, failed: Sequence[Refused]) -> None:
        """Raises NotSupported: Pub/Sub cannot store failures and drop the oldest."""
        refuse("failures")

    async def failed(self, limit: int, *, task_id: str = "") -> Sequence[DeadLetter]:
        """Raises NotSupported: Pub/Sub stores no failures."""
        refuse("failures")

    async def resend(self, letters: Sequence[Resend]) -> Resent:
        """Raises NotSupported: Pub/Sub stores no failures that could be retried."""
        refuse("failures")

    async def mark_alive(self, node: str, incarnation: int, *, ttl_s: float) -> None:
        """Raises NotSupported: Pub/Sub has no record of live nodes."""
        refuse("marks")

    async def probe(self, node: str, incarnation: int = 0) -> Evidence:
        """UNKNOWN: Pub/Sub knows no connections of nodes."""
        return Evidence.UNKNOWN

    async def store_time(self) -> float | None:
        """None: Pub/Sub has no clock to ask."""
        return None

    async def register_recorder(self, name: str) -> int:
        """Raises NotSupported: Pub/Sub has no event log."""
        refuse("event_log")

    async def forget_recorder(self, name: str) -> None:
        """Raises NotSupported: Pub/Sub has no event log."""
        refuse("event_log")

    async def recorders(self) -> Sequence[str]:
        """Raises NotSupported: Pub/Sub has no event log."""
        refuse("event_log")

    async def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        """Raises NotSupported: Pub/Sub has no event log."""
        refuse("event_log")

    async def read_events(self, name: str, limit: int, *, after: int = 0) -> Sequence[LoggedEvent]:
        """Raises NotSupported: Pub/Sub has no event log."""
        refuse("event_log")

    async def acknowledge_events(self, name: str, offset: int) -> None:
        """Raises NotSupported: Pub/Sub has no event log."""
        refuse("event_log")

    async def lost_events(self) -> int:
        """Raises NotSupported: Pub/Sub has no event log."""
        refuse("event_log")

    async def event_log(self) -> EventLogState:
        """Raises NotSupported: Pub/Sub has no event log."""
        refuse("event_log")
