"""Single tasks: what runs, what waits, what must not run (`control.state.TasksSection`)."""

from collections.abc import Mapping, Sequence
from typing import Any

from umbel.clock import cluster_now
from umbel.control.state import REVOKE_RETENTION_S
from umbel.wire.revoke import Revoke
from umbel.worker.messages.requests import Requests
from umbel.worker.messages.terminating import Terminator
from umbel.worker.remote.parts import WorkerNode, WorkerParts


class WorkerTasks(WorkerNode):
    def __init__(self, parts: WorkerParts) -> None:
        super().__init__(parts)
        self._requests = Requests(parts.context, parts.tasks)
        self._terminator = Terminator(parts.context, parts.tasks, self._requests)

    def active(self, *, safe: bool) -> list[dict[str, Any]]:
        return self._requests.active(safe=safe)

    def reserved(self) -> list[dict[str, Any]]:
        return self._requests.reserved()

    def scheduled(self) -> list[dict[str, Any]]:
        return self._requests.scheduled()

    def find(self, task_ids: Sequence[str]) -> Mapping[str, tuple[str, dict[str, Any]]]:
        return self._requests.find(task_ids)

    def revoked_ids(self) -> Sequence[str]:
        return [task_id for task_id, _ in self._parts.tasks.revoked.told(cluster_now())]

    async def revoke(
        self, task_ids: Sequence[str], *, headers: Sequence[str] = (), is_recorded: bool
    ) -> None:
        now = cluster_now()
        expires_at = now + REVOKE_RETENTION_S
        for task_id in task_ids:  # here at once, although the record may take a moment
            self._parts.tasks.revoked.add(task_id, expires_at, now)
        for header in headers:
            self._parts.tasks.revoked.add_header(header, expires_at)
        self._parts.tasks.drop_revoked()
        record = [Revoke(one, now, expires_at) for one in task_ids]
        record += [Revoke("", now, expires_at, header) for header in headers]
        await self._record(record, is_recorded)

    async def unrevoke(
        self, task_ids: Sequence[str], *, headers: Sequence[str] = (), is_recorded: bool
    ) -> None:
        now = cluster_now()
        record = [Revoke(one, now, now) for one in task_ids]
        record += [Revoke("", now, now, header) for header in headers]
        for one in record:
            self._parts.tasks.revokes.take_back(one)
        await self._record(record, is_recorded)

    async def _record(self, revokes: Sequence[Revoke], is_recorded: bool) -> None:
        broker = self._context.broker
        if revokes and not is_recorded and broker.capabilities.revokes:
            await broker.revoke(revokes)

    def running_with(self, headers: Sequence[str]) -> Sequence[str]:
        return self._requests.running_with(headers)

    def terminate(self, task_ids: Sequence[str], signal: str) -> Sequence[str]:
        return self._terminator.terminate(task_ids, signal)
