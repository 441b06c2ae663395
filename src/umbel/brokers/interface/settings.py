"""BrokerSettings: what any broker is handed."""

import msgspec

from umbel.brokers.interface.declared import DeclaredQueue
from umbel.wire.signing import Keyring

DEFAULT_LEASE_S = 10.0
DEFAULT_PRIORITY_STEPS = (0, 3, 6, 9)
DEFAULT_SEP = "\x06\x16"


class BrokerSettings(msgspec.Struct, frozen=True):
    """What any broker is handed. `lease_s`: an owner silent for that long loses its messages."""

    url: str
    lease_s: float = DEFAULT_LEASE_S
    connect_timeout_s: float = 4.0
    result_expires_s: float = 86_400.0
    event_log_max: int = 1_000_000
    event_log_retention_s: float = 7 * 86_400.0
    revokes_max: int = 1_000_000
    revoke_retention_s: float = 7 * 86_400.0
    failed_keep: int = 10_000  # messages of failed tasks, of which the oldest make room
    failed_keep_s: float = 7 * 86_400.0
    storage_max_bytes: int | None = None
    key_prefix: str = ""  # before every key and channel in Redis but those of results
    result_key_prefix: str | None = None  # before those; None: the same
    priority_steps: tuple[int, ...] = DEFAULT_PRIORITY_STEPS  # a list in Redis for each, from 0 up
    sep: str = DEFAULT_SEP  # between the name of a queue and its step, and the parts of a binding
    fanout_prefix: str = "/{db}."  # of the channels in Redis
    queue_name_prefix: str = "kombu-"  # of subscriptions of Pub/Sub
    subscription_expires_s: float = 86_400.0  # likewise: an unused one is removed, with its messages
    exactly_once: bool = False  # likewise, of those that are made here
    coordination_store: str = ""  # a broker that does what Pub/Sub cannot
    declared: tuple[DeclaredQueue, ...] = ()  # queues that are not declared in our plain way
    delayed_delivery: str = "quorum"  # the kind of the queues in which RabbitMQ delays Celery's messages
    prefetch_floor: int = 0  # on RabbitMQ, so many messages of a queue are held even if fewer are wanted
    connection_name: str = "umbel"  # by which the server lists its connections
    keyring: Keyring | None = None  # who speaks over this broker signs with it
    remembers_signatures: bool = False  # a worker's: it asks `spend`

    def __repr__(self) -> str:
        hidden = ("url", "coordination_store")  # they may hold passwords
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name not in hidden)
        return f"BrokerSettings({', '.join(shown)})"
