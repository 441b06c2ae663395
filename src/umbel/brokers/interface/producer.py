"""Producer: the synchronous face of a broker; AsyncProducer: the same for clients on an event loop."""

from collections.abc import Sequence
from typing import Protocol

from umbel.brokers.interface.fan_out import Broadcast
from umbel.brokers.transport import Capabilities
from umbel.wire.message import Outgoing
from umbel.wire.revoke import Revoke


class Producer(Protocol):
    """The synchronous face: for clients, and for tasks that send tasks. Thread- and fork-safe."""

    @property
    def capabilities(self) -> Capabilities: ...
    def publish(self, batch: Sequence[Outgoing]) -> None: ...
    def revoke(self, revokes: Sequence[Revoke]) -> None: ...
    def broadcast(self, batch: Sequence[Broadcast], *, ttl_s: float) -> None: ...
    def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int: ...
    def hold_unique(self, key: str, task_id: str, *, ttl_s: float) -> str: ...  # who holds it now
    def release_unique(self, held: Sequence[tuple[str, str]]) -> None: ...
    def close(self) -> None: ...


SENT_REMEMBERED_S = 300.0
"""How long what an AsyncProducer published is remembered, so that the same id again is not sent twice."""

BATCH_MAX = 50_000
"""Messages that an AsyncProducer publishes in one step."""


class Attempt:
    """What is known of one send. `is_out`: from now on the messages may reach the broker."""

    __slots__ = ("is_out",)

    def __init__(self) -> None:
        self.is_out = False


class AsyncProducer(Protocol):
    """For clients on one event loop, which it never blocks. It opens its connection at the first call.

    Messages are told apart by their correlation id, the id of their task. Where `repeats` is true, messages
    that were published within SENT_REMEMBERED_S are left out, so a publish whose outcome is not known can be
    repeated; elsewhere that could make two of one, so who does not know the outcome says so.
    """

    @property
    def repeats(self) -> bool: ...
    @property
    def capabilities(self) -> Capabilities: ...
    async def publish(self, batch: Sequence[Outgoing], attempt: Attempt) -> None: ...
    async def hold_unique(self, key: str, task_id: str, *, ttl_s: float) -> str: ...  # who holds it now
    async def release_unique(self, held: Sequence[tuple[str, str]]) -> None: ...
    async def close(self) -> None: ...
    def abandon(self) -> None:
        """Its loop is closed: let go of what can be let go of without it."""
        ...
