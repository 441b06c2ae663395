"""WorkerState: what control commands see and change of this worker (`control.state.ControlState`)."""

import asyncio
import platform
import resource
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any
from urllib.parse import unquote, urlsplit

from umbel.brokers.links import MAILBOX
from umbel.clock import cluster_now
from umbel.control.panel import NO_ANSWER
from umbel.control.state import ELECTION_REFUSED, REVOKE_RETENTION_S, Elect
from umbel.errors import BrokerError, NotSupported
from umbel.events.stamp import SOFTWARE
from umbel.pools.interface import Restartable
from umbel.pools.stacks import stacks_of
from umbel.protocol.clock import LamportClock
from umbel.protocol.delivery.delivery import TaskRules
from umbel.protocol.pidbox import Known
from umbel.urls import each_url, without_password
from umbel.version import VERSION
from umbel.wire.gossip import describe
from umbel.wire.revoke import Revoke
from umbel.worker.context import WorkerContext
from umbel.worker.leases.listing import look_at_leases
from umbel.worker.messages.requests import Requests
from umbel.worker.messages.terminating import Terminator
from umbel.worker.steps.autoscaler import Autoscaler
from umbel.worker.steps.events import Events
from umbel.worker.steps.gossip import Gossip
from umbel.worker.steps.heart import Heart
from umbel.worker.steps.mingle import Mingle
from umbel.worker.steps.tasks import Tasks

SAMPLES_MAX = 100
SETTLED_BEATS = 4


class WorkerState:
    def __init__(
        self,
        context: WorkerContext,
        events: Events,
        heart: Heart,
        tasks: Tasks,
        stop: Callable[[], None],
    ) -> None:
        self._context = context
        self._events = events
        self._heart = heart
        self._tasks = tasks
        self._stop = stop
        self._requests = Requests(context, tasks)
        self._terminator = Terminator(context, tasks, self._requests)
        self._samples: deque[float] = deque(maxlen=SAMPLES_MAX)
        self.elections: Elect | None = None  # set by the step that holds elections
        self.mingle: Mingle | None = None  # likewise
        self.replies_dropped: Callable[[], int] = lambda: 0
        self.mailbox_resets: Callable[[], int] = lambda: 0
        self.requests_unreadable: Callable[[], int] = lambda: 0
        self.requests_distrusted: Callable[[], int] = lambda: 0
        self.gossip: Gossip | None = None
        self.autoscaler: Autoscaler | None = None
        self.steps: Mapping[str, Sequence[str]] = {}  # in starting order, each with what it requires

    @property
    def app(self) -> Any:
        return self._context.settings.app

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
        return self._tasks.policy.rules

    # -- the cluster -----------------------------------------------------------------------------

    def revoked_ids(self) -> Sequence[str]:
        return [task_id for task_id, _ in self._tasks.revoked.told(cluster_now())]

    async def revoke(
        self, task_ids: Sequence[str], *, headers: Sequence[str] = (), is_recorded: bool
    ) -> None:
        now = cluster_now()
        expires_at = now + REVOKE_RETENTION_S
        for task_id in task_ids:  # here at once, although the record may take a moment
            self._tasks.revoked.add(task_id, expires_at, now)
        for header in headers:
            self._tasks.revoked.add_header(header, expires_at)
        self._tasks.drop_revoked()
        record = [Revoke(one, now, expires_at) for one in task_ids]
        record += [Revoke("", now, expires_at, header) for header in headers]
        if record and not is_recorded:
            await self._context.broker.revoke(record)

    async def unrevoke(
        self, task_ids: Sequence[str], *, headers: Sequence[str] = (), is_recorded: bool
    ) -> None:
        now = cluster_now()
        record = [Revoke(one, now, now) for one in task_ids]
        record += [Revoke("", now, now, header) for header in headers]
        for one in record:
            self._tasks.revokes.take_back(one)
        if record and not is_recorded:
            await self._context.broker.revoke(record)

    def running_with(self, headers: Sequence[str]) -> Sequence[str]:
        return self._requests.running_with(headers)

    async def hello(self, said: Mapping[str, Any]) -> Any:
        assert self.mingle is not None, "a worker has its steps before it answers"
        asker = str(said.get("from_node"))
        if asker == self.node:
            return None  # as Celery's nodes do: who has heard itself knows that its mailbox works
        if self.gossip is not None and not self.gossip.should_answer(asker):
            return NO_ANSWER
        return await self.mingle.answer(said)

    def members(self) -> Sequence[Mapping[str, Any]]:
        return [] if self.gossip is None else [describe(one, time()) for one in self.gossip.members()]

    def elect(self, request: Mapping[str, Any]) -> str:
        return ELECTION_REFUSED if self.elections is None else self.elections(request)

    async def leases(self, names: Sequence[str]) -> list[dict[str, Any]]:
        return await look_at_leases(self._context.broker, self._context.identity.owner, names)

    def terminate(self, task_ids: Sequence[str], signal: str) -> Sequence[str]:
        return self._terminator.terminate(task_ids, signal)

    def known(self) -> Sequence[Known]:
        """The members as a caller of remote control wants them; none while this node is too new.

        A node that has just started has not heard from everyone, and callers would not wait for
        those that it leaves out.
        """
        now = cluster_now()
        if self.gossip is None or self.uptime_s < SETTLED_BEATS * self._context.settings.heartbeat_interval_s:
            return ()
        return [
            Known(one.node, one.state.value, max(0.0, now - one.last_heard), one.software == SOFTWARE)
            for one in self.gossip.members()
        ]

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

    # -- events ----------------------------------------------------------------------------------

    def enable_task_events(self) -> bool:
        return self._events.enable_task_events()

    def disable_task_events(self) -> bool:
        return self._events.disable_task_events()

    async def look_for_recorders(self) -> None:
        with suppress(BrokerError):  # the step looks again by itself
            await self._events.look_for_recorders()

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
            "prefetch_count": self._tasks.claimed + self._context.pool.room(),
            "pool": self._pool(),
            "broker": broker_map(self._context.broker.url),
            "rusage": {name.removeprefix("ru_"): getattr(usage, name) for name in _USAGE},
            **({"autoscaler": self.autoscaler.describe()} if self.autoscaler and self.is_autoscaled else {}),
            "umbel": {
                "incarnation": self._context.identity.incarnation,
                "counters": self._context.counters.as_dict(),
                "links": {**self._context.outages.reconnects, MAILBOX: self.mailbox_resets()},
                "outage": self._context.outages.problem,
                "replies_dropped": self.replies_dropped(),
                "unreadable": {
                    "events": self.gossip.undecodable if self.gossip else 0,
                    "requests": self.requests_unreadable(),
                },
                "requests_distrusted": self.requests_distrusted(),
                "grants_unproven": self._context.broker.coordination.unproven,
                "stopping": self._context.shutdown.describe(asyncio.get_running_loop().time()),
                "steps": dict(self.steps),
            },
        }

    def health(self) -> dict[str, Any]:
        return {
            "problem": self._tasks.problem,
            "claimed": self._tasks.claimed,
            "stopping": self._context.shutdown.describe(asyncio.get_running_loop().time()),
            "queues": list(self._context.queues),
            "uptime_s": round(self.uptime_s, 1),
            "counters": self._context.counters.as_dict(),
        }

    def conf(self, *, with_defaults: bool) -> dict[str, Any]:
        shown, changed = self._context.settings.shown_settings, self._context.settings.changed_settings
        return {name: value for name, value in shown.items() if with_defaults or name in changed}

    def report(self) -> str:
        settings = "\n".join(f"{name}: {value!r}" for name, value in self.conf(with_defaults=False).items())
        return (
            f"\nsoftware -> umbel:{VERSION} py:{platform.python_version()}\n"
            f"platform -> system:{platform.system()} arch:{platform.machine()} "
            f"kernel version:{platform.release()}\n"
            f"broker -> {without_password(self._context.broker.url)}\n"
            f"pool -> {self._context.pool.describe()['implementation']}\n\n{settings}\n"
        )

    def memory_samples(self, count: int) -> Sequence[float]:
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except OSError:  # not Linux
            return ()
        self._samples.append(pages * resource.getpagesize() / 2**20)
        return list(self._samples)[-count:]

    async def stacks(self) -> dict[str, dict[str, str]]:
        pool = self._context.pool.describe()
        running = {pid: task_id for task_id, pid in pool["running"].items()}
        found = await asyncio.gather(*map(stacks_of, pool["processes"]))
        return {
            str(pid): {"task_id": running.get(pid, ""), "stack": stack}
            for pid, stack in zip(pool["processes"], found, strict=True)
        }

    def active(self, *, safe: bool) -> list[dict[str, Any]]:
        return self._requests.active(safe=safe)

    def reserved(self) -> list[dict[str, Any]]:
        return self._requests.reserved()

    def scheduled(self) -> list[dict[str, Any]]:
        return self._requests.scheduled()

    def find(self, task_ids: Sequence[str]) -> Mapping[str, tuple[str, dict[str, Any]]]:
        return self._requests.find(task_ids)

    # -- changing --------------------------------------------------------------------------------

    def unenforceable(self, task: str, *, soft: bool, hard: bool) -> str:
        is_async = self.task_rules[task].is_async
        return self._context.pool.abilities.unenforceable(is_async=is_async, soft=soft, hard=hard)

    def change_rules(self, task: str, rules: TaskRules) -> None:
        self._tasks.policy.change(task, rules)

    @property
    def queues(self) -> Sequence[str]:
        return tuple(self._context.queues)

    @property
    def prefetch_max(self) -> int:
        return self._tasks.prefetch_max

    def set_prefetch_max(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"a worker holds at least 1 message, not {most}")
        self._tasks.prefetch_max = most

    def add_queue(self, name: str) -> None:
        if name not in self._context.queues:
            self._context.queues.append(name)

    async def cancel_queue(self, name: str) -> None:
        if name in self._context.queues:
            self._context.queues.remove(name)
            await self._context.broker.leave_queue(self._context.identity.owner, name)

    def resize_pool(self, by: int) -> int:
        return self._context.pool.resize(by)

    @property
    def is_autoscaled(self) -> bool:
        return self.autoscaler is not None and self.autoscaler.is_on

    def autoscale(self, most: int | None, least: int | None) -> tuple[int, int]:
        assert self.autoscaler is not None, "a worker has its steps before it answers"
        return self.autoscaler.limit(most, least)

    def restart_pool(self, *, reload: bool) -> None:
        pool = self._context.pool
        if not self._context.settings.pool_restarts:
            raise ValueError("Pool restarts not enabled")
        if not isinstance(pool, Restartable):
            raise NotSupported(f"the {pool.describe()['implementation']} pool has no children to replace")
        pool.restart(reload=reload)

    def stop(self) -> None:
        self._stop()

    def _pool(self) -> dict[str, Any]:
        found = self._context.pool.describe()
        processes = found["processes"] or [self.pid]
        per_child = [f"{1 / len(processes):.2f}"] * len(processes)
        started = sum(self._tasks.totals.values())
        return {
            **found,
            "implementation": f"umbel.pools.{found['implementation']}",
            "processes": processes,
            "max-tasks-per-child": found.get("max-tasks-per-child") or "N/A",
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


def broker_map(urls: str) -> dict[str, Any]:
    """The broker as Celery's stats describe it; passwords stay out."""
    first, *others = each_url(urls)
    parts = urlsplit(first)
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
        "alternates": [without_password(url) for url in others],
        "credential_provider": None,
    }


_USAGE = [name for name in dir(resource.struct_rusage) if name.startswith("ru_")]
