"""BrokerSettings: what any broker is handed."""

from dataclasses import dataclass, field

from umbel.wire.signing import Keyring

DEFAULT_LEASE_S = 10.0


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """What any broker is handed. `lease_s`: an owner silent for that long loses its messages."""

    url: str = field(repr=False)  # it may hold a password
    lease_s: float = DEFAULT_LEASE_S
    connect_timeout_s: float = 4.0
    result_expires_s: float = 86_400.0
    event_log_max: int = 1_000_000
    event_log_retention_s: float = 7 * 86_400.0
    revokes_max: int = 1_000_000
    revoke_retention_s: float = 7 * 86_400.0
    storage_max_bytes: int | None = None
    key_prefix: str = ""
    connection_name: str = "umbel"  # by which the server lists its connections
    keyring: Keyring | None = None  # who speaks over this broker signs with it
    remembers_signatures: bool = False  # a worker's: it asks `spend`
