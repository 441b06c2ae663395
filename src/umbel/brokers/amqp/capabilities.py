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
        "atomic_settle": "RabbitMQ cannot publish and acknowledge in one step: it is done in that order",
        "atomic_publish": "a batch is sent in one piece and confirmed as a whole; of a batch too large for "
        "the socket's buffer, a publisher that dies midway may leave a part",
        "stores_results": "results are sent to the queue of whoever asked for them (rpc), and kept nowhere",
        "ownership": "the connection is the lease: RabbitMQ returns what a dead process held, and a silent "
        "owner is put out by its own broker; no peer counts either",
        "priorities": "Celery's queues have no x-max-priority, which cannot be added later: priorities "
        "order what a worker has fetched; across the whole queue they need one declared with "
        "x-max-priority",
        "claimed": "AMQP does not tell what other connections hold: only this process's claims are counted",
        "revokes": "a revoke reaches a busy worker with the next news, some milliseconds after it was "
        "recorded; one that asks RabbitMQ for messages has it before them",
        "unique": "RabbitMQ has no register that is taken in one step and freed by the clock, and one queue "
        "per key would outlive it; use Redis or the embedded broker for unique tasks",
        "fenced_publish": "RabbitMQ has no conditional publish: the holder is checked on its own "
        "connection just before",
    },
)
