"""Requests: the messages that run, wait or are parked here, in the form of Celery's `inspect`, and their end.

Terminating a task interrupts it first, then its process.
"""

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from math import inf
from signal import Signals
from typing import Any

from umbel.clock import cluster_now
from umbel.protocol.delivery.revoked import RevokedTasks
from umbel.protocol.delivery.sensitive import MASK
from umbel.worker.context import WorkerContext
from umbel.worker.delivery.claimed import Claimed
from umbel.worker.delivery.take import Tasks

# ---- requests --------------------------------------------------------------------------------------
#
# The messages that run, wait or are parked here, in the form of Celery's `inspect` (wire 5.5).
#
# Arguments are decoded only where the body is JSON: the main process runs nothing that a message brings.
# For other and for large bodies the texts that the sender put into the headers are shown.

SHOWN_MAX = 10_000
SCHEDULE_PRIORITY = 6  # of Celery's timer; part of the reply's form


class Requests:
    """Answers questions about messages of this worker for control commands."""

    def __init__(self, context: WorkerContext, tasks: Tasks) -> None:
        self._node = context.identity.node
        self._pool = context.pool
        self._tasks = tasks

    def active(self, *, safe: bool = False) -> list[dict[str, Any]]:
        """Return the requests whose tasks run. `safe`: arguments as text."""
        running = self._running()
        return [
            self._map(claimed, safe=safe, pid=running[claimed.headers.id])
            for claimed in self._tasks.holding()[:SHOWN_MAX]
            if claimed.headers.id in running
        ]

    def reserved(self) -> list[dict[str, Any]]:
        """Return the requests that were claimed and have not started."""
        running = self._running()
        return [
            self._map(claimed)
            for claimed in self._tasks.holding()[:SHOWN_MAX]
            if claimed.headers.id not in running
        ]

    def scheduled(self) -> list[dict[str, Any]]:
        """Return the requests that this worker parked until they are due, earliest first."""
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
        """Return state (active, reserved, scheduled) and request of those tasks that are here."""
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
        """Return the given tasks that run here."""
        wanted, running = frozenset(task_ids), self._running()
        return [
            claimed
            for claimed in self._tasks.holding()
            if claimed.headers.id in wanted and claimed.headers.id in running
        ]

    def running_with(self, headers: Sequence[str]) -> list[str]:
        """Return the ids of running tasks with one of these stamped headers (`key=value`)."""
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


# ---- terminator ------------------------------------------------------------------------------------
#
# Ends running tasks, and only those: the task is interrupted first, then its process is ended.
#
# A claimed message has a new number for each attempt, and the pool knows jobs by that number. A late
# request finds no job.

GENTLE_SIGNAL = "SIGTERM"  # the default of callers: the task is interrupted first
AGAIN_S = (0.1, 0.5)  # interrupt again, in case the task could not be interrupted yet
CANCEL_GRACE_S, TERMINATE_GRACE_S = 2.0, 5.0


class Terminator:
    """Interrupts tasks, repeats that, and escalates to signals on timers."""

    def __init__(self, context: WorkerContext, tasks: Tasks, requests: Requests) -> None:
        self._pool = context.pool
        self._tasks = tasks
        self._requests = requests

    def terminate(self, task_ids: Sequence[str], signal: str) -> list[str]:
        """Begin to end those of these tasks that run here; return their ids."""
        ended: list[str] = []
        for claimed in self._requests.running(task_ids):
            claimed.terminated_by = signal
            if (signal == GENTLE_SIGNAL and self._cancel(claimed)) or self._signal(claimed, signal):
                ended.append(claimed.headers.id)
            else:
                claimed.terminated_by = ""
        return ended

    def _cancel(self, claimed: Claimed) -> bool:
        """Interrupt the task; its process is signalled only if the task does not end."""
        if not self._pool.cancel_job(claimed.number):
            return False
        loop = asyncio.get_running_loop()
        for after_s in AGAIN_S:
            loop.call_later(after_s, self._if_running, claimed, self._pool.cancel_job, claimed.number)
        loop.call_later(CANCEL_GRACE_S, self._if_running, claimed, self._signal, claimed, GENTLE_SIGNAL)
        return True

    def _signal(self, claimed: Claimed, signal: str) -> bool:
        """Signal its process. A task may catch that signal; SIGKILL follows, which it cannot."""
        terminate, loop = self._pool.terminate_job, asyncio.get_running_loop()
        if not terminate(claimed.number, Signals[signal]):
            return False
        loop.call_later(
            TERMINATE_GRACE_S, self._if_running, claimed, terminate, claimed.number, Signals.SIGKILL
        )
        return True

    def _if_running(self, claimed: Claimed, do: Callable[..., object], *arguments: object) -> None:
        if self._tasks.is_holding(claimed):
            do(*arguments)
