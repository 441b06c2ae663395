"""SharedRecord: what a composed broker asks of its coordination store alone."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from umbel.brokers.evidence import Evidence
from umbel.brokers.interface import Broker, DeadLetter, EventLogState, LoggedEvent, Pause, Refused
from umbel.wire.revoke import Revoke

if TYPE_CHECKING:
    from umbel.brokers.coordination import CoordinationStore


class SharedRecord:
    def __init__(self, store: Broker) -> None:
        self._store = store

    @property
    def coordination(self) -> "CoordinationStore":
        return self._store.coordination

    async def revoke(self, revokes: Sequence[Revoke]) -> None:
        await self._store.revoke(revokes)

    async def store_time(self) -> float | None:
        return await self._store.store_time()

    async def mark_alive(self, node: str, incarnation: int, *, ttl_s: float) -> None:
        await self._store.mark_alive(node, incarnation, ttl_s=ttl_s)

    async def probe(self, node: str, incarnation: int = 0) -> Evidence:
        return await self._store.probe(node, incarnation)

    async def pause(self, queue: str, mark: Pause) -> None:
        await self._store.pause(queue, mark)

    async def resume(self, queue: str) -> bool:
        return await self._store.resume(queue)

    async def paused(self) -> Mapping[str, Pause]:
        return await self._store.paused()

    async def bury(self, refused: Sequence[Refused]) -> None:
        await self._store.bury(refused)

    async def keep_failed(self, failed: Sequence[Refused]) -> None:
        await self._store.keep_failed(failed)

    async def failed(self, limit: int, *, task_id: str = "") -> Sequence[DeadLetter]:
        return await self._store.failed(limit, task_id=task_id)

    async def register_recorder(self, name: str) -> int:
        return await self._store.register_recorder(name)

    async def forget_recorder(self, name: str) -> None:
        await self._store.forget_recorder(name)

    async def recorders(self) -> Sequence[str]:
        return await self._store.recorders()

    async def log_events(self, entries: Sequence[tuple[str, bytes]], *, counts: Sequence[int] = ()) -> int:
        return await self._store.log_events(entries, counts=counts)

    async def read_events(self, name: str, limit: int, *, after: int = 0) -> Sequence[LoggedEvent]:
        return await self._store.read_events(name, limit, after=after)

    async def acknowledge_events(self, name: str, offset: int) -> None:
        await self._store.acknowledge_events(name, offset)

    async def lost_events(self) -> int:
        return await self._store.lost_events()

    async def event_log(self) -> EventLogState:
        return await self._store.event_log()
