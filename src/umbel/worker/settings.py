"""WorkerSettings: what a worker is handed; `launch/workers.py` fills it from the app's settings."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from umbel.brokers.interface import AsyncProducer, Broker
from umbel.control.panel import EVERYTHING, Panel
from umbel.protocol.delivery.delivery import TaskRules
from umbel.protocol.leadership.schedule import Entry
from umbel.protocol.membership.mode import GossipMode
from umbel.protocol.pool.autoscale import COOL_DOWN_S
from umbel.wire.message import Message, Outgoing, StoredResult
from umbel.worker.elections.handlers import Handler
from umbel.worker.messages.after_settling import AfterSettle
from umbel.worker.process.beside import Beside
from umbel.worker.user_code.foreign_scheduler import FOREIGN_LEASE, MakeScheduler
from umbel.worker.user_code.hooks import LifeHooks
from umbel.worker.user_code.notices import NoticeHooks

if TYPE_CHECKING:
    from umbel.outbox.addresses import Address
    from umbel.outbox.relay import TellSent


class Ending(msgspec.Struct, frozen=True):
    """What is stored and sent when a message ends without having run to its end.

    `before`: work that blocks, and gives what follows from it: counts the task in the chord that waits for
    it, or stores through a library that knows no loop. It is done off the loop and before the message is
    settled; asked again after an error it goes on. It is asked again while it raises BrokerUnavailable or
    does not return; with `attempts_max`, after any error, so often at most. Then the message is settled
    without it.
    What it gives is stored and sent first; if it `joins`, together with the settle, in one step where the
    broker has that.
    `after`: for `WorkerSettings.after_settle`, once all the rest is settled.
    """

    results: Sequence[StoredResult] = ()
    follow_ups: Sequence[Outgoing] = ()
    before: "Callable[[], Ending] | None" = None
    attempts_max: int = 0  # 0: no limit
    after: bytes = b""
    joins: bool = False


class EndWithoutRunning(Protocol):
    """Provided by the app: the failure's result, that of chain steps after it, the errbacks.

    It is called on the loop and must not block: what does is its `before`. `status` is FAILURE or REVOKED.
    The error tells why, as an object of `umbel.errors` that an app may replace by a class of its own:

    - `TimeLimitExceeded`: `limit_s` is the hard limit that the task ran into;
    - `WorkerLost(text)`: what happened to the process (`process 4711 was killed by SIGKILL while ...`);
    - `TaskRevoked(reason)`: "revoked", "expired" or "terminated" (it was running);
    - `NotRegistered(text)`: there is no such task here; `NotSupported(text)`: this pool cannot run it;
      `PoolError(text)`: it broke the pool; `BrokerRefused(text)`: its queue refused it; `UmbelError(text)`: a
      fault of the worker.
    """

    def __call__(self, message: Message, queue: str, error: Exception, status: str) -> Ending: ...


class PeriodicTask(msgspec.Struct, frozen=True):
    """An entry, and the messages that one slot of it (microseconds since 1970) takes."""

    entry: Entry
    messages: Callable[[int], Sequence[Outgoing]]


class OutboxSettings(msgspec.Struct, frozen=True):
    """The outboxes that a worker publishes. `tell_sent` blocks; None: nobody wants to know."""

    addresses: "tuple[Address, ...]"
    table: str
    poll_s: float
    open_producer: Callable[[], AsyncProducer]
    tell_sent: "TellSent | None" = None

    @property
    def leases(self) -> list[str]:
        return [one.lease(self.table) for one in self.addresses]


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    node: str  # name@host
    queues: tuple[str, ...]
    tasks: Mapping[str, TaskRules]
    end_without_running: EndWithoutRunning
    run_directory: Path
    after_settle: AfterSettle | None = (
        None  # does the work that outcomes and endings left for it, off the loop
    )
    log_successes: bool = False  # at INFO
    children_log_endings: bool = False  # how tasks end is in their log, and need not be in ours
    app: Any = None  # for users' control commands; the worker itself asks nothing of it
    lease_s: float = 10.0
    broker_connection_wait_s: float = 60.0
    prefetch_max: int = 1000
    max_deliveries: int = 3
    message_max_bytes: int = 16 * 1024 * 1024
    failed_keep_max_bytes: int = 64 * 1024  # of a failed task's message that is kept
    accept_content: tuple[str, ...] = ("json",)  # how control requests may be written, too
    signing_window_s: float = 86_400.0
    accept_unsigned: tuple[str, ...] = ()  # queues; "*": all
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
    metrics_address: tuple[str, int] | None = None  # where Prometheus finds what this node counts
    recorder: Beside | None = None  # records the history, when nothing else does
    control_mailbox: str = "auto"
    open_broker: Callable[[], Broker] | None = None  # one more connection, for a separate mailbox
    autoscale: tuple[int, int] | None = None  # the most children and the least
    autoscale_cool_down_s: float = COOL_DOWN_S
    pool_restarts: bool = False
    control_allow: tuple[str, ...] = (EVERYTHING,)
    shown_settings: Mapping[str, Any] = {}  # as they may be shown to others
    changed_settings: frozenset[str] = frozenset()  # those that are not at their defaults
    control_commands: Panel = msgspec.field(default_factory=Panel)  # those that users wrote
    election_handlers: Mapping[str, Handler] = {}  # by topic
    periodic: Mapping[str, PeriodicTask] = {}  # by name
    outbox: OutboxSettings | None = None
    scheduler_lease_s: float = 10.0
    scheduler: MakeScheduler | None = None  # of somebody else's making, beside our own
    scheduler_lease: str = FOREIGN_LEASE  # under which it runs
    election_protocol: str = "v2"
    election_v1_compat: str = "auto"
    steps: tuple[type[Any], ...] = ()  # bootsteps that users wrote
    hooks: LifeHooks = msgspec.field(default_factory=LifeHooks)
    notices: NoticeHooks = msgspec.field(default_factory=NoticeHooks)
    node_hooks: Mapping[str, Callable[..., None]] = {}  # on_node_join and so on
