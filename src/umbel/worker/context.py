"""What the steps of one worker share: its identity, counters and settings."""

from typing import Any

import msgspec

from umbel.backends.interface import Backend
from umbel.brokers.interface import Broker
from umbel.pools.interface import Pool
from umbel.protocol.shutdown import Shutdown
from umbel.worker.process.outages import Outages
from umbel.worker.settings import WorkerSettings
from umbel.worker.user_code.notices import Notices


class Identity(msgspec.Struct, frozen=True):
    """One run of one node: a restart has another incarnation."""

    node: str
    pid: int
    incarnation: int  # microseconds at the start of the process

    @property
    def owner(self) -> str:
        """The name under which this run holds messages."""
        return f"{self.node}.{self.pid}.{self.incarnation}"


class Counters(msgspec.Struct):
    """What happened to messages here since the worker started."""

    received: int = 0
    succeeded: int = 0
    failed: int = 0
    retried: int = 0
    ignored: int = 0
    rejected: int = 0
    requeued: int = 0
    revoked: int = 0
    parked: int = 0
    buried: int = 0
    adopted: int = 0  # messages redelivered to the worker that ran them still, or had: not run again
    repeated: int = 0  # runs of messages that may have run before
    lost: int = 0  # runs that ended with their process
    cut: int = 0  # runs that were cut off because the worker had to stop
    conflicts: int = 0  # settled after the claim had ended: not applied
    refused: int = 0  # results and messages that the broker or the store refused
    unsigned: int = 0  # messages without a signature where one is needed: buried, as the next three
    forged: int = 0  # whose signature does not fit
    stale: int = 0  # signed too long ago
    replayed: int = 0  # copies of a signed message
    faults: int = 0  # messages that met a fault of our own, and were buried with its traceback
    store_replaced: int = 0  # how often the broker's data was found to be other data
    unknown: int = 0  # ended after that: their results are stored, what they sent is sent
    children_died: int = 0
    events_dropped: int = 0
    periodic_sent: int = 0  # slots of periodic tasks that this node sent while it led
    periodic_missed: int = 0  # slots that it passed over, or cannot tell about
    outbox_published: int = 0  # messages of outboxes that this node published while it led
    outbox_set_aside: int = 0  # rows that could not be published
    elections_run: int = 0  # handlers that this node was elected to run
    elections_repeated: int = 0  # of these, runs that may not be the first
    elections_done: int = 0
    elections_failed: int = 0
    elections_expired: int = 0
    elections_shed: int = 0  # not taken because the table was full; the sweep brings them back
    elections_unfenced: int = 0  # a Celery worker may have run them too
    election_handlers_failed: int = 0
    election_calls: int = 0  # of the store
    election_errors: int = 0

    @property
    def processed(self) -> int:
        return self.succeeded + self.failed + self.retried + self.ignored + self.rejected + self.requeued

    def as_dict(self) -> dict[str, int]:
        return msgspec.structs.asdict(self) | {"processed": self.processed}


class WorkerContext(msgspec.Struct, frozen=True):
    settings: WorkerSettings
    identity: Identity
    broker: Broker
    backend: Backend
    pool: Pool
    counters: Counters = msgspec.field(default_factory=Counters)
    outages: Outages = msgspec.field(default_factory=Outages)  # of the broker
    store_outages: Outages = msgspec.field(default_factory=lambda: Outages("result store"))
    queues: list[str] = []  # those consumed now; remote control changes them
    notices: Notices = msgspec.field(default_factory=Notices)
    shutdown: Shutdown = msgspec.field(default_factory=lambda: Shutdown(grace_s=30.0, soft_s=5.0))

    def log_fields(self, **fields: Any) -> dict[str, Any]:
        return {"node": self.identity.node, **fields}
