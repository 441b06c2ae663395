"""WorkerState: what control commands see and change of this worker (`control.state.ControlState`)."""

import resource
from collections.abc import Mapping, Sequence
from time import time
from typing import Any
from urllib.parse import unquote, urlsplit

from umbel.brokers.interface import Revoke
from umbel.control.panel import NO_ANSWER
from umbel.control.state import ELECTION_REFUSED, Elect
from umbel.protocol.clock import LamportClock
from umbel.protocol.delivery import TaskRules
from umbel.wire.gossip import describe
from umbel.worker.context import WorkerContext
from umbel.worker.steps.events import Events
from umbel.worker.steps.gossip import Gossip
from umbel.worker.steps.heart import Heart
from umbel.worker.steps.mingle import Mingle
from umbel.worker.steps.tasks import Tasks

REVOKE_RETENTION_S = 7 * 86_400.0


class WorkerState:
    def __init__(self, context: WorkerContext, events: Events, heart: Heart, tasks: Tasks) -> None:
        self._context = context
        self._events = events
        self._heart = heart
        self._tasks = tasks
        self.elections: Elect | None = None  # set by the step that holds elections
        self.mingle: Mingle | None = None  # likewise
        self.gossip: Gossip | None = None

    @property
    def node(self) -> str:
        return self._context.identity.node

    @property
    def pid(self) -> int:
        return self._context.identity.pid

    @property
    def clock(self) -> LamportClock:
        return self._events.clock

    @property
    def uptime_s(self) -> float:
        return time() - self._context.identity.incarnation / 1e6

    @property
    def task_rules(self) -> Mapping[str, TaskRules]:
        return self._context.settings.tasks

    # -- the cluster -----------------------------------------------------------------------------

    def revoked_ids(self) -> Sequence[str]:
        return [task_id for task_id, _ in self._tasks.revoked.told(time())]

    async def revoke(self, task_ids: Sequence[str], *, is_recorded: bool) -> None:
        now = time()
        expires_at = now + REVOKE_RETENTION_S
        for task_id in task_ids:  # here at once, although the record may take a moment
            self._tasks.revoked.add(task_id, expires_at, now)
        if task_ids and not is_recorded:
            await self._context.broker.revoke([Revoke(one, now, expires_at) for one in task_ids])

    async def hello(self, said: Mapping[str, Any]) -> Any:
        assert self.mingle is not None, "a worker has its steps before it answers"
        asker = str(said.get("from_node"))
        if asker == self.node or (self.gossip is not None and not self.gossip.should_answer(asker)):
            return NO_ANSWER
        return await self.mingle.answer(said)

    def members(self) -> Sequence[Mapping[str, Any]]:
        return [] if self.gossip is None else [describe(one, time()) for one in self.gossip.members()]

    def elect(self, request: Mapping[str, Any]) -> str:
        return ELECTION_REFUSED if self.elections is None else self.elections(request)

    # -- events ----------------------------------------------------------------------------------

    def enable_task_events(self) -> bool:
        return self._events.enable_task_events()

    def disable_task_events(self) -> bool:
        return self._events.disable_task_events()

    def beat(self) -> None:
        self._heart.beat()

    # -- looking ---------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "total": dict(self._tasks.totals),
            "pid": self.pid,
            "clock": str(self.clock.value),  # a text, as Celery has it
            "uptime": int(self.uptime_s),
            "prefetch_count": self._tasks.held + self._context.pool.room(),
            "pool": self._pool(),
            "broker": broker_map(self._context.broker.url),
            "rusage": {name.removeprefix("ru_"): getattr(usage, name) for name in _USAGE},
            "umbel": {
                "incarnation": self._context.identity.incarnation,
                "counters": self._context.counters.as_dict(),
            },
        }

    def _pool(self) -> dict[str, Any]:
        found = self._context.pool.describe()
        processes = found["processes"] or [self.pid]
        per_child = [f"{1 / len(processes):.2f}"] * len(processes)
        started = sum(self._tasks.totals.values())
        return {
            **found,
            "implementation": f"umbel.pools.{found['implementation']}",
            "processes": processes,
            "running": {str(pid): task_id for pid, task_id in found["running"].items()},
            "max-tasks-per-child": "N/A",
            "put-guarded-by-semaphore": False,
            "timeouts": [0, 0],
            "writes": {
                "total": started,
                "avg": per_child[0],
                "all": ", ".join(per_child),
                "raw": ", ".join([str(started // len(processes))] * len(processes)),
                "strategy": "fair",
                "inqueues": {"total": len(processes), "active": len(found["running"])},
            },
        }


def broker_map(url: str) -> dict[str, Any]:
    """The broker as Celery's stats describe it; the password stays out."""
    parts = urlsplit(url)
    transport, _, _ = parts.scheme.partition("+")
    is_file = transport in ("sqlite", "unix")
    return {
        "hostname": None if is_file else parts.hostname,
        "userid": unquote(parts.username) if parts.username else None,
        "virtual_host": unquote(parts.path).removeprefix("/") or ("/" if transport == "amqp" else "0"),
        "port": None if is_file else parts.port,
        "insist": False,
        "ssl": transport in ("rediss", "amqps"),
        "transport": {"rediss": "redis", "unix": "redis", "amqps": "amqp"}.get(transport, transport),
        "connect_timeout": 4,
        "transport_options": {},
        "login_method": "PLAIN" if transport.startswith("amqp") else None,
        "uri_prefix": None,
        "heartbeat": 120.0,
        "failover_strategy": "round-robin",
        "alternates": [],
        "credential_provider": None,
    }


_USAGE = [name for name in dir(resource.struct_rusage) if name.startswith("ru_")]
