"""What the steps of one worker share: its identity, counters and settings."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from umbel.backends.interface import Backend
from umbel.brokers.interface import AsyncProducer, Broker, Delivery, ready_for
from umbel.control.panel import EVERYTHING, Panel
from umbel.errors import BrokerError
from umbel.pools.interface import Pool
from umbel.protocol.delivery.delivery import TaskRules
from umbel.protocol.delivery.trust import UNSIGNED
from umbel.protocol.leadership.schedule import Entry
from umbel.protocol.membership.observers import GossipMode
from umbel.protocol.pool.autoscale import COOL_DOWN_S
from umbel.protocol.shutdown import Shutdown
from umbel.wire.message import Outgoing, StoredResult
from umbel.worker.foreign_scheduler import FOREIGN_LEASE, MakeScheduler
from umbel.worker.outages import Outages
from umbel.worker.sidecar import Sidecar
from umbel.worker.user_code import Handler, LifeHooks, NoticeHooks, Notices

if TYPE_CHECKING:
    from umbel.outbox.database import Address
    from umbel.outbox.relay import TellSent

log = logging.getLogger("umbel.worker")

# ---- worker settings -------------------------------------------------------------------------------

AfterSettle = Callable[[Sequence[bytes]], None]


class Ending(msgspec.Struct, frozen=True):
    """What is stored and sent when a message ends without having run to its end.

    `before`: blocking work that returns more to store and send, such as counting the task in its chord, or
    storing through a library without asyncio. It runs off the loop and before the message is settled. It is
    retried while it raises BrokerUnavailable or does not return; with `attempts_max`, after any error, at
    most so many times. Then the message is settled without it. What it returns is stored and sent first; if
    it `joins`, it goes with the settle, in one step where the broker has that.

    `after`: for `WorkerSettings.after_settle`, once everything else is settled.
    """

    results: Sequence[StoredResult] = ()
    follow_ups: Sequence[Outgoing] = ()
    before: "Callable[[], Ending] | None" = None
    attempts_max: int = 0  # 0: no limit
    after: bytes = b""
    joins: bool = False


# Provided by the app, for a task that does not run to its end: (message, queue, error, status, *, signs_for).
# It returns the failure's result, that of chain steps after it, and the errbacks. It is called on the loop
# and must not block: what blocks is its `before`. `status` is FAILURE or REVOKED. `signs_for`: what
# follow-ups are signed for, as for a `Job`. The error says why, as an object of `umbel.errors`; an app
# may store an error of another class:
#
# - `TimeLimitExceeded`: `limit_s` is the hard limit that the task exceeded;
# - `WorkerLost(text)`: what happened to the process (`process 4711 was killed by SIGKILL while ...`);
# - `TaskRevoked(reason)`: "revoked", "expired" or "terminated" (it was running);
# - `NotRegistered(text)`: there is no such task here; `NotSupported(text)`: this pool cannot run it;
#   `PoolError(text)`: it broke the pool; `BrokerRefused(text)`: its queue refused it; `UmbelError(text)`: an
#   internal error of the worker.
EndWithoutRunning = Callable[..., Ending]


class PeriodicTask(msgspec.Struct, frozen=True):
    """An entry of the schedule, and the messages for one slot of it (microseconds since 1970)."""

    entry: Entry
    messages: Callable[[int], Sequence[Outgoing]]


class OutboxSettings(msgspec.Struct, frozen=True):
    """The outboxes that a worker publishes. `tell_sent` blocks; None: not wanted."""

    addresses: "tuple[Address, ...]"
    table: str
    poll_s: float
    open_producer: Callable[[], AsyncProducer]
    tell_sent: "TellSent | None" = None

    @property
    def leases(self) -> list[str]:
        """The leases of the outboxes, one for each address."""
        return [address.lease(self.table) for address in self.addresses]


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker needs to know besides its broker, result backend and pool."""

    node: str  # name@host
    queues: tuple[str, ...]
    tasks: Mapping[str, TaskRules]
    end_without_running: EndWithoutRunning
    run_directory: Path
    after_settle: AfterSettle | None = None  # called off the loop with the `after` of settled messages
    log_successes: bool = False  # at INFO
    children_log_endings: bool = False  # the children log how tasks end, so the worker does not
    app: Any = None  # for users' control commands; the worker itself does not use it
    lease_s: float = 10.0
    broker_connection_wait_s: float = 60.0
    prefetch_max: int = 1000
    max_deliveries: int = 3
    message_max_bytes: int = 16 * 1024 * 1024
    failed_keep_max_bytes: int = 64 * 1024  # of a failed task's message that is stored for a retry
    accept_content: tuple[str, ...] = ("json",)  # content types of control requests, too
    signing_window_s: float = 86_400.0
    unbound_s: float = 86_400.0  # how long after the cluster got its id signatures of Umbel 0.3 are valid
    accept_unsigned: tuple[str, ...] = ()  # queues; "*": all
    # Called with the cluster id that signatures are bound to.
    learn_cluster: Callable[[str], None] = lambda _: None
    heartbeat_interval_s: float = 2.0
    without_heartbeat: bool = False
    without_mingle: bool = False
    mingle_wait_s: float = 1.0
    without_gossip: bool = False
    gossip_interval_s: float | None = None
    gossip_mode: GossipMode = GossipMode.AUTO
    grace_s: float = 30.0
    soft_grace_s: float = 5.0
    send_task_events: bool = False
    metrics_address: tuple[str, int] | None = None  # host and port where Prometheus scrapes this node
    recorder: Sidecar | None = None  # the process that records the history when there is no recorder
    control_mailbox: str = "auto"
    open_broker: Callable[[], Broker] | None = None  # one more connection, for a separate mailbox
    autoscale: tuple[int, int] | None = None  # the most children and the least
    autoscale_cool_down_s: float = COOL_DOWN_S
    pool_restarts: bool = False
    control_allow: tuple[str, ...] = (EVERYTHING,)
    shown_settings: Mapping[str, Any] = {}  # with passwords masked
    changed_settings: frozenset[str] = frozenset()  # those that are not at their defaults
    control_commands: Panel = msgspec.field(default_factory=Panel)  # those that users wrote
    election_handlers: Mapping[str, Handler] = {}  # by topic
    periodic: Mapping[str, PeriodicTask] = {}  # by name
    outbox: OutboxSettings | None = None
    scheduler_lease_s: float = 10.0
    scheduler: MakeScheduler | None = None  # from another library, in addition to Umbel's scheduler
    scheduler_lease: str = FOREIGN_LEASE  # the lease of that scheduler
    election_protocol: str = "v2"
    election_v1_compat: str = "auto"
    steps: tuple[type[Any], ...] = ()  # bootsteps that users wrote
    hooks: LifeHooks = msgspec.field(default_factory=LifeHooks)
    notices: NoticeHooks = msgspec.field(default_factory=NoticeHooks)
    node_hooks: Mapping[str, Callable[..., None]] = {}  # on_node_join and so on


# ---- identity, counters, context -------------------------------------------------------------------


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
    returned_unstarted: int = 0  # waited behind long tasks, and returned for other workers
    buried: int = 0
    adopted: int = 0  # redelivered while their task ran here, or had run: not run again
    repeated: int = 0  # runs of messages that may have run before
    lost: int = 0  # runs that ended with their process
    cut: int = 0  # runs that were cut off because the worker had to stop
    conflicts: int = 0  # settled after the claim had ended: not applied
    refused: int = 0  # results and messages that the broker or the store refused
    unsigned: int = 0  # messages without a signature where one is needed: buried, as the next three
    forged: int = 0  # with an invalid signature
    stale: int = 0  # signed too long ago
    replayed: int = 0  # copies of a signed message
    unbound: int = 0  # signed by Umbel 0.3, for no cluster; they ran
    faults: int = 0  # messages that met an internal error, and were buried with its traceback
    store_replaced: int = 0  # how often the broker's data was found replaced
    unknown: int = 0  # ended after that: their results are stored, their messages sent
    children_died: int = 0
    events_dropped: int = 0
    periodic_sent: int = 0  # slots of periodic tasks that this node sent while it led
    periodic_missed: int = 0  # slots that were due too long ago
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
        """How many runs ended, however they ended."""
        return self.succeeded + self.failed + self.retried + self.ignored + self.rejected + self.requeued

    def as_dict(self) -> dict[str, int]:
        """Return all counters by name, with `processed`."""
        return msgspec.structs.asdict(self) | {"processed": self.processed}


class WorkerContext(msgspec.Struct, frozen=True):
    """Handed to every step. Settings and identity are fixed; queues and counters change."""

    settings: WorkerSettings
    identity: Identity
    broker: Broker
    backend: Backend
    pool: Pool
    counters: Counters = msgspec.field(default_factory=Counters)
    outages: Outages = msgspec.field(default_factory=Outages)  # of the broker
    store_outages: Outages = msgspec.field(default_factory=lambda: Outages("result store"))
    queues: list[str] = []  # consumed now; remote control changes them
    notices: Notices = msgspec.field(default_factory=Notices)
    shutdown: Shutdown = msgspec.field(default_factory=lambda: Shutdown(grace_s=30.0, soft_s=5.0))

    def signs_for(self, delivery: Delivery) -> str | None:
        """Return what follow-ups of this message are signed for: the cluster, nothing; None: no keys."""
        if self.broker.keyring is None:
            return None
        signer = self.broker.signer
        return UNSIGNED if delivery.unsigned or signer is None else signer.cluster.id

    async def ready_messages(self) -> int | None:
        """Return how many messages are ready in this worker's queues; None if the broker cannot be asked."""
        try:
            return ready_for(self.queues, await self.broker.queues(self.queues))
        except BrokerError:
            return None

    def log_leadership(self, logger: logging.Logger, what: str, phase: str, term: int, **fields: str) -> None:
        """Log that this node acquired, lost or released a lease; during an outage that is counted instead."""
        text, known = f"{what} {phase}", self.log_fields(**fields, term=term)
        self.outages.consequence(logger, logging.INFO, text, named=text, **known)

    def note_election_fault(self, error: Exception) -> None:
        """Count and log an internal error in a machine of elections, which another node's event may cause."""
        self.counters.election_errors += 1
        log.error("internal error; please report it", exc_info=error)

    def log_fields(self, **fields: Any) -> dict[str, Any]:
        """Return log fields with the node's name."""
        return {"node": self.identity.node, **fields}
