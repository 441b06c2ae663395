"""What RabbitMQ can and cannot do for Umbel; the reasons are shown to users."""

from umbel.brokers.interface import Capabilities

CAPABILITIES = Capabilities(
    transport="amqp",
    atomic_settle=False,
    stores_results=True,
    fanout=True,
    leases=True,
    delayed=True,
    event_log=True,
    priorities="9 first",
    events_of_others="log",
    reasons={
        "atomic_settle": "RabbitMQ cannot publish and acknowledge in one step: Umbel publishes first, then "
        "acknowledges",
        "atomic_publish": "a batch is sent in one piece and confirmed as a whole; if the publisher dies "
        "while sending a batch larger than the socket's buffer, part of it may be published",
        "stores_results": "results are sent to the client that asked for them (rpc) and are not stored",
        "ownership": "the connection is the lease: RabbitMQ requeues the messages of a dead process and "
        "closes silent connections; workers count neither",
        "priorities": "Celery's queues have no x-max-priority, which cannot be added later: priorities "
        "order the messages that a worker has fetched; to order the whole queue, declare it with "
        "x-max-priority",
        "claimed": "AMQP does not show what other connections have claimed: only claims of this process "
        "are counted",
        "revokes": "a revoke reaches a busy worker some milliseconds after it was recorded; a worker that "
        "fetches messages reads new revokes first",
        "pause": "a pause reaches a busy worker some milliseconds after it was set; what it has fetched goes "
        "back to the queue",
        "move": "RabbitMQ cannot move a message in one step: Umbel publishes, and acknowledges when "
        "that is confirmed; a move that is killed may leave up to 100 messages in both queues",
        "unique": "RabbitMQ has no key that can be set atomically and expires, and a queue per key would "
        "outlive the task; use Redis or the embedded broker for unique tasks",
        "limits": "RabbitMQ has no value that can be compared and changed in one step; use Redis or the "
        "embedded broker for it, or rate_limit, which holds for each worker",
        "sent_once": "RabbitMQ cannot tell whether it has a message already: an awaited send that was cut "
        "off may have been sent, and sending it again may run it twice",
        "return_order": "RabbitMQ may hand out the next message before it has put a returned one back: "
        "a returned message is usually first in its queue, and seldom second",
        "fenced_publish": "RabbitMQ has no conditional publish: Umbel checks the lease just before it "
        "publishes",
    },
)
