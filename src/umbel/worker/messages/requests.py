"""Requests: what this worker runs, holds and has parked, as Celery's `inspect` shows it (wire 5.5).

Arguments are decoded only where the body is JSON: the main process runs nothing that a message
brings. Otherwise, and for large bodies, the texts that the sender put into the headers are shown.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from math import inf
from typing import Any

from umbel.clock import cluster_now
from umbel.protocol.delivery.revoked import RevokedTasks
from umbel.protocol.delivery.sensitive import MASK
from umbel.worker.context import WorkerContext
from umbel.worker.messages.claimed import Claimed
from umbel.worker.steps.tasks import Tasks

SHOWN_MAX = 10_000
SCHEDULE_PRIORITY = 6  # of Celery's timer; part of the reply's form


class Requests:
    def __init__(self, context: WorkerContext, tasks: Tasks) -> None:
        self._node = context.identity.node
        self._pool = context.pool
        self._tasks = tasks

    def active(self, *, safe: bool = False) -> list[dict[str, Any]]:
        running = self._running()
        return [
            self._map(claimed, safe=safe, pid=running[claimed.headers.id])
            for claimed in self._tasks.holding()[:SHOWN_MAX]
            if claimed.headers.id in running
        ]

    def reserved(self) -> list[dict[str, Any]]:
        running = self._running()
        return [
            self._map(claimed)
            for claimed in self._tasks.holding()[:SHOWN_MAX]
            if claimed.headers.id not in running
        ]

    def scheduled(self) -> list[dict[str, Any]]:
        self._tasks.scheduled.expire(cluster_now())
        return [
            {
                "eta": datetime.fromtimestamp(due, UTC).isoformat(),
                "priority": SCHEDULE_PRIORITY,
                "request": self._map(claimed),
            }
            for due, claimed in self._tasks.scheduled
        ]

    def find(self, task_ids: Sequence[str]) -> dict[str, tuple[str, dict[str, Any]]]:
        wanted, running = frozenset(task_ids), self._running()
        self._tasks.scheduled.expire(cluster_now())
        found = {
            claimed.headers.id: ("scheduled", self._map(claimed))
            for _, claimed in self._tasks.scheduled
            if claimed.headers.id in wanted
        }
        for claimed in self._tasks.holding():
            task_id = claimed.headers.id
            if task_id in running and task_id in wanted:
                found[task_id] = ("active", self._map(claimed, pid=running[task_id]))
            elif task_id in wanted:
                found[task_id] = ("reserved", self._map(claimed))
        return found

    def running(self, task_ids: Sequence[str]) -> list[Claimed]:
        wanted, running = frozenset(task_ids), self._running()
        return [
            claimed
            for claimed in self._tasks.holding()
            if claimed.headers.id in wanted and claimed.headers.id in running
        ]

    def running_with(self, headers: Sequence[str]) -> list[str]:
        wanted, running = RevokedTasks(), self._running()
        for header in headers:
            wanted.add_header(header, inf)
        return [
            claimed.headers.id
            for claimed in self._tasks.holding()
            if claimed.headers.id in running and wanted.covers(claimed.headers.id, claimed.headers.stamps)
        ]

    def _running(self) -> dict[str, int]:
        running: dict[str, int] = self._pool.describe()["running"]
        return running

    def _map(self, claimed: Claimed, *, safe: bool = False, pid: int | None = None) -> dict[str, Any]:
        headers = claimed.headers
        args, kwargs = _arguments(claimed, safe=safe)
        return {
            "id": headers.id,
            "name": headers.shadow or headers.task,
            "args": args,
            "kwargs": kwargs,
            "type": headers.task,
            "hostname": self._node,
            "time_start": claimed.started_at if pid is not None else None,
            "acknowledged": claimed.acked,
            "delivery_info": {
                "exchange": "",
                "routing_key": claimed.delivery.queue,
                "priority": claimed.message.priority,
                "redelivered": claimed.delivery.redelivered,
            },
            "worker_pid": pid,
        }


def _arguments(claimed: Claimed, *, safe: bool) -> tuple[Any, Any]:
    if safe and any(claimed.shown):
        return claimed.shown
    found = claimed.arguments(MASK)
    if found is None:
        return claimed.shown
    return (repr(found[0]), repr(found[1])) if safe else found
