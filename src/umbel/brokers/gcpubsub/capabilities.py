"""What Google Pub/Sub can and cannot do for Umbel, and the operations that it refuses.

Pub/Sub stores messages only: no results, leases, event log or revokes. The reasons are shown to users.
"""

from collections.abc import Mapping

from umbel.brokers.interface import Capabilities, Evidence, Pause
from umbel.brokers.refusals import unsupported
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.wire.control import REPLY_EXCHANGE, REQUEST_EXCHANGE

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


_WHY = CAPABILITIES.reasons


class NoCoordination:
    """The coordination of a broker without a coordination store: neither elections nor leases."""

    unproven = 0
    open_election = claim_election = start_election = unsupported(_WHY["leases"])
    renew_election = finish_election = read_election = unsupported(_WHY["leases"])
    unfinished_elections = fenced_publish = unsupported(_WHY["leases"])
    acquire_lease = renew_lease = release_lease = unsupported(_WHY["leases"])
    update_lease = read_lease = unsupported(_WHY["leases"])
    release_unique = unsupported(_WHY["unique"])

    async def raise_clock(self, value: int) -> int:
        """Return the value: without a shared clock, nodes adjust their clocks by each other's hello."""
        return value


class Unsupported:
    """The operations of the broker that need a coordination store."""

    permit = unsupported(_WHY["limits"])
    spend = cluster_id = keep_cluster_id = unsupported(_WHY["signatures"])
    revoke = unsupported(_WHY["revokes"])
    queues = unsupported(_WHY["depths"])
    pause = resume = unsupported(_WHY["pauses"])
    keep_failed = failed = resend = unsupported(_WHY["failures"])
    mark_alive = unsupported(_WHY["marks"])
    register_recorder = forget_recorder = recorders = unsupported(_WHY["event_log"])
    log_events = read_events = acknowledge_events = unsupported(_WHY["event_log"])
    lost_events = event_log = unsupported(_WHY["event_log"])

    async def paused(self) -> Mapping[str, Pause]:
        """Return no queues, because none can be paused."""
        return {}

    async def probe(self, node: str, incarnation: int = 0) -> Evidence:
        """Return UNKNOWN: Pub/Sub does not know the connections of nodes."""
        return Evidence.UNKNOWN

    async def store_time(self) -> float | None:
        """Return None: Pub/Sub has no clock to ask."""
        return None
