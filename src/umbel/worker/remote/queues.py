"""What is consumed, how much of it is held, and the dead letters (`control.state.QueuesSection`)."""

from collections.abc import Collection, Sequence
from typing import Any

from umbel.worker.remote.parts import WorkerNode


class WorkerQueues(WorkerNode):
    @property
    def queues(self) -> Sequence[str]:
        return tuple(self._context.queues)

    async def paused_queues(self) -> Collection[str]:
        return (await self._context.broker.paused()).keys()

    def add_queue(self, name: str) -> None:
        if name not in self._context.queues:
            self._context.queues.append(name)
            self._parts.tasks.look_again()

    async def cancel_queue(self, name: str) -> None:
        if name in self._context.queues:
            self._context.queues.remove(name)
            await self._context.broker.leave_queue(self._context.identity.owner, name)

    @property
    def prefetch_max(self) -> int:
        return self._parts.tasks.prefetch_max

    def set_prefetch_max(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"the prefetch limit must be at least 1, not {most}")
        self._parts.tasks.hold_at_most(most)

    async def dead_letters(self, limit: int) -> list[dict[str, Any]]:
        return [
            {
                "id": letter.letter_id,
                "queue": letter.queue,
                "reason": letter.reason,
                "starts": letter.starts,
                "buried_at": letter.buried_at,
            }
            for letter in await self._context.broker.dead_letters(limit)
        ]
