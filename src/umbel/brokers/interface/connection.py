"""Connection: what a broker is opened with, what it can do, and the lease of the process that opens it.

A broker is opened with `BrokerSettings` and `DeclaredQueue`. `Capabilities` says what its transport supports,
and why something is missing; those reasons are shown to users. `BrokerConnection` opens, closes and restores
the connection, and renews the owner's lease.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from umbel.errors import BrokerRefused
from umbel.protocol.shutdown import LinkChange
from umbel.wire.signing import Keyring, Signer

# ---- declared queue --------------------------------------------------------------------------------


class DeclaredExchange(msgspec.Struct, frozen=True):
    """An exchange. `kind`: direct, topic, fanout or headers. With `no_declare` it must exist already."""

    name: str
    kind: str = "direct"
    durable: bool = True
    auto_delete: bool = False
    arguments: Mapping[str, Any] = {}
    no_declare: bool = False


class DeclaredBinding(msgspec.Struct, frozen=True):
    """A binding of a queue to an exchange."""

    exchange: DeclaredExchange
    routing_key: str = ""
    arguments: Mapping[str, Any] = {}


class DeclaredQueue(msgspec.Struct, frozen=True):
    """A queue as a project declares it. `arguments`: in RabbitMQ's form (x-max-priority, x-queue-type, ...).

    Other programs declare the same queues, and RabbitMQ closes the channel of a program that declares one
    differently. So a broker that gets such a record declares exactly that queue.
    """

    name: str
    durable: bool = True
    auto_delete: bool = False
    exclusive: bool = False
    arguments: Mapping[str, Any] = {}
    bindings: tuple[DeclaredBinding, ...] = ()
    no_declare: bool = False

    @property
    def is_quorum(self) -> bool:
        """Whether RabbitMQ replicates it as a quorum queue."""
        return self.arguments.get("x-queue-type") == "quorum"


# ---- broker settings -------------------------------------------------------------------------------

DEFAULT_LEASE_S = 10.0
DEFAULT_PRIORITY_STEPS = (0, 3, 6, 9)
DEFAULT_SEP = "\x06\x16"


class BrokerSettings(msgspec.Struct, frozen=True):
    """The settings of any broker. `lease_s`: an owner silent for that long loses its messages."""

    url: str
    lease_s: float = DEFAULT_LEASE_S
    connect_timeout_s: float = 4.0
    result_expires_s: float = 86_400.0
    event_log_max: int = 1_000_000
    event_log_retention_s: float = 7 * 86_400.0
    revokes_max: int = 1_000_000
    revoke_retention_s: float = 7 * 86_400.0
    failed_keep: int = 10_000  # messages of failed tasks; the oldest make room
    failed_keep_s: float = 7 * 86_400.0
    storage_max_bytes: int | None = None
    message_max_bytes: int = 16 * 1024 * 1024  # larger ones are set aside unread, where the broker can
    key_prefix: str = ""  # before every key and channel in Redis but those of results
    result_key_prefix: str | None = None  # before those; None: the same
    priority_steps: tuple[int, ...] = DEFAULT_PRIORITY_STEPS  # a list in Redis for each, from 0 up
    sep: str = DEFAULT_SEP  # between the name of a queue and its step, and the parts of a binding
    fanout_prefix: str = "/{db}."  # of the channels in Redis
    queue_name_prefix: str = "kombu-"  # of subscriptions of Pub/Sub
    subscription_expires_s: float = 86_400.0  # likewise: an unused one is removed, with its messages
    exactly_once: bool = False  # likewise, of those that are made here
    coordination_store: str = ""  # the address of a broker that does what Pub/Sub cannot
    declared: tuple[DeclaredQueue, ...] = ()  # queues that are declared in another way than Umbel's plain one
    delayed_delivery: str = "quorum"  # the kind of the queues in which RabbitMQ delays Celery's messages
    prefetch_floor: int = 0  # on RabbitMQ: prefetch at least so many messages of a queue
    connection_name: str = "umbel"  # under which the server lists the connections
    keyring: Keyring | None = None  # messages sent over this broker are signed with it
    signing_cluster: str = ""  # what signatures are bound to; "": the id that the broker has
    remembers_signatures: bool = False  # true in workers, which call `spend`

    def __repr__(self) -> str:
        hidden = ("url", "coordination_store")  # they may hold passwords
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name not in hidden)
        return f"BrokerSettings({', '.join(shown)})"


# ---- capabilities ----------------------------------------------------------------------------------

_MISSING = {"fanout": "no fan-out"}
Reserved = Mapping[str, str]
"""Names that no task queue may have, and to whom they belong. `x*` are all that begin with `x`."""


def why_reserved(reserved: Reserved, queue: str) -> str:
    """Return why this cannot be the name of a task queue, and what to do; "" if it can."""
    for name, owner in reserved.items():
        if name.endswith("*") and queue.startswith(name[:-1]):
            which = f"names that begin with {name[:-1]!r} are"
        elif queue == name:
            which = "this name is"
        else:
            continue
        return f"the queue {queue!r} is reserved ({which} {owner}): use a queue with another name"
    return ""


class Capabilities(msgspec.Struct, frozen=True):
    """What this transport supports; `reasons` says why something is missing."""

    transport: str
    atomic_settle: bool
    stores_results: bool  # results may ride in settle(), next to their acks
    fanout: bool
    leases: bool
    delayed: bool
    event_log: bool
    priorities: str  # "0 first" or "9 first"
    # How events of workers without an event log (Celery's) get into it. "log": the broker puts them there;
    # "fan-out": a recorder has to listen and write them; "none": there are no such events.
    events_of_others: str = "none"
    unique: bool = False  # it can hold the keys of unique tasks
    limits: bool = False  # it can enforce limits for the whole cluster
    idle_wait_s: float = 1.0  # an idle worker claims so often, whatever changes the broker reports
    events: bool = True  # nodes and monitors receive one another's events
    revokes: bool = True  # it has a record of revoked tasks, which every claim reads
    depths: bool = True  # it knows how many messages wait
    pauses: bool = True  # queues can be paused
    failures: bool = True  # it retains the messages of failed tasks
    signatures: bool = True  # it knows which signatures were used
    marks: bool = True  # it knows which nodes are alive
    reports_nobody: bool = True  # it reports that no node listens for control requests
    reserved: Reserved = {}
    reasons: Mapping[str, str] = {}

    def refuse_reserved(self, queue: str) -> None:
        """Raise BrokerRefused if this cannot be the name of a task queue."""
        if why := why_reserved(self.reserved, queue):
            raise BrokerRefused(why)

    def why_not(self, ability: str) -> str:
        """Return why a feature is off that needs this ability, in the transport's own words if it has any."""
        missing = _MISSING.get(ability, f"no {ability.replace('_', ' ')}")
        return self.reasons.get(ability) or f"transport {self.transport} has {missing}"

    def why_no_events(self) -> str:
        """Return why nodes do not receive one another's events; empty where they do."""
        missing = [ability for ability in ("fanout", "events") if not getattr(self, ability)]
        return self.why_not(missing[0]) if missing else ""


# ---- broker connection -----------------------------------------------------------------------------


class Replaced(msgspec.Struct, frozen=True):
    """The broker's data was replaced: emptied, deleted, or restored from a backup.

    `unknown`: how many messages claimed by this process the broker no longer knows as claimed.
    """

    what: str
    unknown: int


class BrokerInfo(Protocol):
    """What every part of a broker knows of the whole."""

    @property
    def url(self) -> str:
        """The address of the broker."""

    @property
    def capabilities(self) -> Capabilities:
        """What its transport supports."""

    @property
    def keyring(self) -> Keyring | None:
        """The keys that messages are signed with, if any."""

    @property
    def revoke_retention_s(self) -> float:
        """How long a revoke that is recorded now holds."""

    @property
    def signer(self) -> Signer | None:
        """The keys and the cluster they sign for, as found when the broker was opened; None: there are no
        keys.

        Raises NoClusterId if there are keys and the broker has no id of its cluster.
        """


class BrokerConnection(BrokerInfo, Protocol):
    """Opens, closes and restores the connection; renews the owner's lease; removes expired data.

    It has one listener for its links and one for its data; both are called on the loop.
    """

    def on_link(self, callback: Callable[[LinkChange], None]) -> None:
        """Call the listener for each link that is lost, restored, or lost and given up."""

    def on_replaced(self, callback: Callable[[Replaced], None]) -> None:
        """Call the listener when the broker notices that its data was replaced.

        It has then restored what it needs itself; queues, the owner's lease and subscriptions follow within
        seconds.
        """

    async def open(self) -> None:
        """Connect; raise BrokerUnavailable or AccessRefused if that fails."""

    async def close(self) -> None:
        """Close all connections; claims stay in force until they are settled or their lease ends."""

    async def reconnect(self) -> None:
        """Try once to restore the lost links; subscriptions restore themselves."""

    async def renew(self, owner: str) -> bool:
        """Prolong the owner's lease, or begin one. False: there was no lease any more.

        A lease ends when another process returns the messages of an owner whose time is over. An owner that
        renews late but before that has lost nothing. An owner that claims first learns of it from
        `Claim.lease_ended`.
        """

    async def return_lost(self, *, by_turn: bool = False) -> int:
        """Return the messages of owners whose lease ended, marked redelivered; return their number.

        `by_turn`: for the periodic call of every worker. Cleaning that all workers would do alike is then
        left to one of them.
        """

    async def forget_owner(self, owner: str) -> int:
        """Return at once the messages of an owner that stops, marked redelivered; return their number.

        Messages that certainly did not run are better settled with `Return` before.
        """

    async def sweep(self) -> None:
        """Remove results, broadcasts, events and revokes that are past their retention."""
