"""What Google Pub/Sub can and cannot do for Umbel; the reasons are shown to users."""

from umbel.brokers.interface import Capabilities

_STORE = "set 'coordination_store', for example to a Redis server"

CAPABILITIES = Capabilities(
    transport="gcpubsub",
    atomic_settle=False,
    stores_results=False,
    fanout=True,
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
    reasons={
        "atomic_settle": "Pub/Sub cannot publish and acknowledge in one step: Umbel publishes first, then "
        "acknowledges",
        "atomic_publish": "a request carries up to 1,000 messages for one queue and 10 MB; of a larger "
        "batch a part may be published",
        "stores_results": "Pub/Sub stores no results: set 'backend' to Redis or to an embedded broker's file",
        "leases": f"Pub/Sub has no value that can be compared and changed in one step; {_STORE}",
        "events": f"Pub/Sub has no topic exchanges, so that nodes do not hear one another's events; {_STORE}",
        "event_log": f"Pub/Sub has no log that several readers follow; {_STORE}",
        "unique": f"Pub/Sub has no key that can be set atomically and expires; {_STORE} for unique tasks",
        "limits": f"Pub/Sub has no value that can be compared and changed in one step; {_STORE}, or use "
        "rate_limit, which holds for each worker",
        "revokes": "Pub/Sub has no record that workers read: a revoke reaches the workers that are running, "
        f"and those that start later by their hello; {_STORE} to keep it where all find it",
        "depths": "Pub/Sub does not tell how many messages wait; Cloud Monitoring does "
        "(subscription/num_undelivered_messages)",
        "pauses": f"Pub/Sub has no mark that every worker reads; {_STORE}, or use "
        "`umbel control cancel_consumer`, which reaches the workers that are running",
        "failures": "Pub/Sub cannot keep a number of messages and drop the oldest: messages of failed "
        f"tasks are not kept; {_STORE} for `umbel task retry`",
        "signatures": "Pub/Sub has no record of the signatures that were used, so that a copied message "
        "could run again; use Redis, RabbitMQ or the embedded broker for signed tasks",
        "marks": "Pub/Sub knows of no connection and no node",
        "delayed": "a task that is not due is held by its ack deadline: a worker gets it every ten minutes "
        f"and puts it off, for a day at most; {_STORE} for more",
        "ownership": "the ack deadline is the lease: Pub/Sub redelivers the messages of a dead process after "
        "ten seconds or more; workers count neither",
        "priorities": "Pub/Sub has no priorities: they order the messages that a worker has fetched",
        "starts": "Pub/Sub counts deliveries: a start that a worker counted is forgotten if the whole worker "
        "is killed; after 100 deliveries Pub/Sub moves the message to the dead letters",
        "order": "Pub/Sub delivers in no order",
        "return_order": "a returned message is published again, behind the others",
        "claimed": "Pub/Sub does not show what others have claimed",
        "sent_once": "Pub/Sub cannot tell whether it has a message already: an awaited send that was cut off "
        "may have been sent, and sending it again may run it twice",
        "move": "Pub/Sub cannot move a message in one step: Umbel publishes, and acknowledges when that is "
        "confirmed; a move that is killed may leave messages in both queues",
    },
)
