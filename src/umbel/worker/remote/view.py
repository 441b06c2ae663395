"""The worker's view for remote control: what commands read and change (`control.state.ControlState`).

One class for each section of the state, all on the same parts of the worker.
"""

import asyncio
import platform
import resource
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from umbel.brokers.links import MAILBOX
from umbel.clock import cluster_now
from umbel.control.panel import NO_ANSWER
from umbel.control.state import Elect
from umbel.errors import BrokerError, NotSupported
from umbel.events.stamp import SOFTWARE
from umbel.pools.interface import Restartable
from umbel.pools.prefork.kernel import stacks_of
from umbel.protocol.clock import LamportClock
from umbel.protocol.delivery.delivery import TaskRules
from umbel.protocol.pidbox import MemberReport
from umbel.text import each_url, without_password
from umbel.version import VERSION
from umbel.wire.coordination import describe
from umbel.wire.records import Revoke
from umbel.worker.context import WorkerContext
from umbel.worker.delivery.take import Tasks
from umbel.worker.events import Events
from umbel.worker.remote.mailbox import MailboxFigures
from umbel.worker.remote.requests import Requests, Terminator
from umbel.worker.steps.gossip import Gossip, list_leases
from umbel.worker.steps.heart import Heart
from umbel.worker.steps.mingle import Mingle
from umbel.worker.steps.pool import Autoscaler

# ---- worker parts ----------------------------------------------------------------------------------
#
# The parts of a worker that remote control reads and changes.


class WorkerParts(msgspec.Struct, frozen=True):
    """`steps`: in starting order, each with what it requires."""

    context: WorkerContext
    events: Events
    heart: Heart
    tasks: Tasks
    gossip: Gossip
    mingle: Mingle
    autoscaler: Autoscaler
    mailbox: MailboxFigures
    elect: Elect
    stop: Callable[[], None]
    steps: Callable[[], Mapping[str, Sequence[str]]]


class WorkerNode:
    """The base of each section of the state (`control.state.NodeSection`)."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._context = parts.context

    @property
    def app(self) -> Any:
        """The app that the worker runs for, for users' commands."""
        return self._context.settings.app

    @property
    def node(self) -> str:
        """The node's name."""
        return self._context.identity.node

    @property
    def pid(self) -> int:
        """The id of the main process."""
        return self._context.identity.pid

    @property
    def clock(self) -> LamportClock:
        """The Lamport clock of the node."""
        return self._parts.events.clock

    @property
    def uptime_s(self) -> float:
        """Seconds since the worker started."""
        return time() - self._context.identity.incarnation / 1e6


# ---- inspection ------------------------------------------------------------------------------------
#
# What the worker reports of itself (`control.state.InspectionSection`).


class WorkerInspection(WorkerNode):
    """Builds the replies of `stats`, `health`, `conf` and `report`."""

    def stats(self) -> dict[str, Any]:
        """Return counters, pool and broker in the form of Celery's `stats`, with Umbel's under `umbel`."""
        autoscaler, mailbox = self._parts.autoscaler, self._parts.mailbox
        links = self._context.outages.reconnects
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "total": dict(self._parts.tasks.totals),
            "pid": self.pid,
            "clock": str(self.clock.value),  # a text, as Celery has it
            "uptime": int(self.uptime_s),
            "prefetch_count": self._parts.tasks.claimed + self._context.pool.room(),
            "pool": self._pool_map(),
            "broker": broker_map(self._context.broker.url),
            "rusage": {name.removeprefix("ru_"): getattr(usage, name) for name in _USAGE},
            **({"autoscaler": autoscaler.describe()} if autoscaler.is_on else {}),
            "umbel": {
                "incarnation": self._context.identity.incarnation,
                "counters": self._context.counters.as_dict(),
                "links": {**links, MAILBOX: links[MAILBOX] + mailbox.resets},
                "outage": self._context.outages.problem,
                "replies_dropped": mailbox.replies_dropped,
                "unreadable": {
                    "events": self._parts.gossip.undecodable,
                    "requests": mailbox.malformed,
                },
                "requests_distrusted": mailbox.distrusted,
                "grants_unproven": self._context.broker.coordination.unproven,
                "stopping": self._context.shutdown.describe(asyncio.get_running_loop().time()),
                "steps": dict(self._parts.steps()),
            },
        }

    def health(self) -> dict[str, Any]:
        """Return whether the worker can fetch and settle messages, and how far a shutdown is."""
        return {
            "problem": self._parts.tasks.problem,
            "claimed": self._parts.tasks.claimed,
            "stopping": self._context.shutdown.describe(asyncio.get_running_loop().time()),
            "queues": list(self._context.queues),
            "uptime_s": round(self.uptime_s, 1),
            "counters": self._context.counters.as_dict(),
        }

    def conf(self, *, with_defaults: bool) -> dict[str, Any]:
        """Return the settings as they may be shown; without defaults only the changed ones."""
        shown, changed = self._context.settings.shown_settings, self._context.settings.changed_settings
        return {name: value for name, value in shown.items() if with_defaults or name in changed}

    def report(self) -> str:
        """Return a text for bug reports: versions, platform, broker, changed settings."""
        settings = "\n".join(f"{name}: {value!r}" for name, value in self.conf(with_defaults=False).items())
        return (
            f"\nsoftware -> umbel:{VERSION} py:{platform.python_version()}\n"
            f"platform -> system:{platform.system()} arch:{platform.machine()} "
            f"kernel version:{platform.release()}\n"
            f"broker -> {without_password(self._context.broker.url)}\n"
            f"pool -> {self._context.pool.describe()['implementation']}\n\n{settings}\n"
        )

    def _pool_map(self) -> dict[str, Any]:
        found = self._context.pool.describe()
        processes = found["processes"] or [self.pid]
        per_child = [f"{1 / len(processes):.2f}"] * len(processes)
        started = sum(self._parts.tasks.totals.values())
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
    """Return the broker as Celery's stats describe it, without passwords."""
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
        "ssl": transport in ("rediss", "sentinels", "amqps"),
        "transport": _TRANSPORTS.get(transport, transport),
        "connect_timeout": 4,
        "transport_options": {},
        "login_method": "PLAIN" if transport.startswith("amqp") else None,
        "uri_prefix": None,
        "heartbeat": 120.0,
        "failover_strategy": "round-robin",
        "alternates": [without_password(url) for url in others],
        "credential_provider": None,
    }


_TRANSPORTS = {"rediss": "redis", "unix": "redis", "sentinels": "sentinel", "amqps": "amqp"}
_USAGE = [name for name in dir(resource.struct_rusage) if name.startswith("ru_")]


# ---- limits ----------------------------------------------------------------------------------------
#
# The registered tasks and their limits (`control.state.LimitsSection`).


class WorkerLimits(WorkerNode):
    """Reads and changes the rules of the admission policy."""

    @property
    def task_rules(self) -> Mapping[str, TaskRules]:
        """Every registered task, with its present limits."""
        return self._parts.tasks.policy.rules

    def unenforceable(self, task: str, *, soft: bool, hard: bool) -> str:
        """Return why the pool cannot enforce such time limits; "" when it can."""
        is_async = self.task_rules[task].is_async
        return self._context.pool.abilities.unenforceable(is_async=is_async, soft=soft, hard=hard)

    def change_rules(self, task: str, rules: TaskRules) -> None:
        """Set a task's limits from its next start on."""
        self._parts.tasks.policy.change(task, rules)


# ---- the process itself ----------------------------------------------------------------------------
#
# Its children, its memory, its end (`control.state.PoolSection`).

SAMPLES_MAX = 100


class WorkerPool(WorkerNode):
    """Resizes, restarts and examines the pool."""

    def __init__(self, parts: WorkerParts) -> None:
        super().__init__(parts)
        self._samples: deque[float] = deque(maxlen=SAMPLES_MAX)

    def resize_pool(self, by: int) -> int:
        """Add or remove children; return how many there will be."""
        return self._context.pool.resize(by)

    @property
    def is_autoscaled(self) -> bool:
        """Whether the autoscaler sets the size."""
        return self._parts.autoscaler.is_on

    def autoscale(self, most: int | None, least: int | None) -> tuple[int, int]:
        """Change the autoscaler's bounds; return both."""
        return self._parts.autoscaler.limit(most, least)

    def restart_pool(self, *, reload: bool) -> None:
        """Replace the children; ValueError unless the setting `worker_pool_restarts` allows it."""
        pool = self._context.pool
        if not self._context.settings.pool_restarts:
            raise ValueError("Pool restarts not enabled")
        if not isinstance(pool, Restartable):
            raise NotSupported(f"the {pool.describe()['implementation']} pool has no children to replace")
        pool.restart(reload=reload)

    async def stacks(self) -> dict[str, dict[str, str]]:
        """Return each child's task and stack trace."""
        pool = self._context.pool.describe()
        running = {pid: task_id for task_id, pid in pool["running"].items()}
        found = await asyncio.gather(*map(stacks_of, pool["processes"]))
        return {
            str(pid): {"task_id": running.get(pid, ""), "stack": stack}
            for pid, stack in zip(pool["processes"], found, strict=True)
        }

    def memory_samples(self, count: int) -> Sequence[float]:
        """Take a sample of resident memory; return the last `count` in MiB, none outside Linux."""
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except OSError:  # not Linux
            return ()
        self._samples.append(pages * resource.getpagesize() / 2**20)
        return list(self._samples)[-count:]

    def stop(self) -> None:
        """Request a shutdown, as SIGTERM does."""
        self._parts.stop()


# ---- queues ----------------------------------------------------------------------------------------
#
# What is consumed, the prefetch limit, and the dead letters (`control.state.QueuesSection`).


class WorkerQueues(WorkerNode):
    """Changes what the worker consumes."""

    @property
    def queues(self) -> Sequence[str]:
        """The queues that are consumed now."""
        return tuple(self._context.queues)

    async def paused_queues(self) -> Collection[str]:
        """Return every paused queue of the cluster."""
        return (await self._context.broker.paused()).keys()

    def add_queue(self, name: str) -> None:
        """Consume one more queue."""
        if name not in self._context.queues:
            self._context.broker.capabilities.refuse_reserved(name)
            self._context.queues.append(name)
            self._parts.tasks.look_again()

    async def cancel_queue(self, name: str) -> None:
        """Consume a queue no longer; its prefetched messages are returned."""
        if name in self._context.queues:
            self._context.queues.remove(name)
            await self._context.broker.leave_queue(self._context.identity.owner, name)

    @property
    def prefetch_max(self) -> int:
        """How many messages the worker holds at most, running and waiting."""
        return self._parts.tasks.prefetch_max

    def set_prefetch_max(self, most: int) -> None:
        """Set that limit; ValueError below 1."""
        if most < 1:
            raise ValueError(f"the prefetch limit must be at least 1, not {most}")
        self._parts.tasks.hold_at_most(most)

    async def dead_letters(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest dead letters as rows."""
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


# ---- single tasks ----------------------------------------------------------------------------------
#
# Running, waiting, revoked (`control.state.TasksSection`).


class WorkerTasks(WorkerNode):
    """Lists, revokes and terminates tasks."""

    def __init__(self, parts: WorkerParts) -> None:
        super().__init__(parts)
        self._requests = Requests(parts.context, parts.tasks)
        self._terminator = Terminator(parts.context, parts.tasks, self._requests)

    def active(self, *, safe: bool) -> list[dict[str, Any]]:
        """Return the requests that run. `safe`: arguments as text."""
        return self._requests.active(safe=safe)

    def reserved(self) -> list[dict[str, Any]]:
        """Return the requests that were claimed and have not started."""
        return self._requests.reserved()

    def scheduled(self) -> list[dict[str, Any]]:
        """Return the requests that this worker parked until they are due."""
        return self._requests.scheduled()

    def find(self, task_ids: Sequence[str]) -> Mapping[str, tuple[str, dict[str, Any]]]:
        """Return state and request of the given tasks that this worker has."""
        return self._requests.find(task_ids)

    def revoked_ids(self) -> Sequence[str]:
        """Return the ids of revoked tasks, newest last."""
        return [task_id for task_id, _ in self._parts.tasks.revoked.told(cluster_now())]

    async def revoke(
        self, task_ids: Sequence[str], *, headers: Sequence[str] = (), is_recorded: bool
    ) -> None:
        """Refuse these tasks here at once, and in the cluster through the broker's record."""
        now = cluster_now()
        expires_at = now + self._context.broker.revoke_retention_s
        for task_id in task_ids:  # here at once, although the record may take a moment
            self._parts.tasks.revoked.add(task_id, expires_at, now)
        for header in headers:
            self._parts.tasks.revoked.add_header(header, expires_at)
        self._parts.tasks.drop_revoked()
        record = [Revoke(task_id, now, expires_at) for task_id in task_ids]
        record += [Revoke("", now, expires_at, header) for header in headers]
        await self._record(record, is_recorded)

    async def unrevoke(
        self, task_ids: Sequence[str], *, headers: Sequence[str] = (), is_recorded: bool
    ) -> None:
        """Allow these tasks here at once, and in the cluster through the broker's record."""
        now = cluster_now()
        record = [Revoke(task_id, now, now) for task_id in task_ids]
        record += [Revoke("", now, now, header) for header in headers]
        for revoke in record:
            self._parts.tasks.revokes.take_back(revoke)
        await self._record(record, is_recorded)

    async def _record(self, revokes: Sequence[Revoke], is_recorded: bool) -> None:
        broker = self._context.broker
        if revokes and not is_recorded and broker.capabilities.revokes:
            await broker.revoke(revokes)

    def running_with(self, headers: Sequence[str]) -> Sequence[str]:
        """Return the ids of running tasks with one of these stamped headers."""
        return self._requests.running_with(headers)

    def terminate(self, task_ids: Sequence[str], signal: str) -> Sequence[str]:
        """Begin to end those of these tasks that run here; return their ids."""
        return self._terminator.terminate(task_ids, signal)


# ---- cluster ---------------------------------------------------------------------------------------
#
# What this node and the others know of one another (`control.state.ClusterSection`).

SETTLED_BEATS = 4


class WorkerCluster(WorkerNode):
    """Answers for gossip, mingle, elections, leases and events."""

    async def hello(self, greeting: Mapping[str, Any]) -> Any:
        """Return the answer to another node's hello; NO_ANSWER if other nodes answer."""
        asker = str(greeting.get("from_node"))
        if asker == self.node:
            return None  # as Celery's nodes do, on receiving their own hello
        if not self._parts.gossip.should_answer(asker):
            return NO_ANSWER
        return await self._parts.mingle.answer(greeting)

    def members(self) -> Sequence[Mapping[str, Any]]:
        """Return all known nodes as rows, this one first."""
        return [describe(member, time()) for member in self._parts.gossip.members()]

    def known(self) -> Sequence[MemberReport]:
        """Return the members in the form for callers of remote control; none while this node is too new.

        A node that has just started, or has no gossip, does not know all nodes, and callers would not wait
        for those that are missing.
        """
        now = cluster_now()
        if not self._parts.gossip.is_on:
            return ()
        if self.uptime_s < SETTLED_BEATS * self._context.settings.heartbeat_interval_s:
            return ()
        return [
            MemberReport(
                member.node,
                member.state.value,
                max(0.0, now - member.last_heard),
                member.software == SOFTWARE,
            )
            for member in self._parts.gossip.members()
        ]

    def elect(self, request: Mapping[str, Any]) -> str:
        """Take part in an election; return why this worker cannot, or ""."""
        return self._parts.elect(request)

    async def leases(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the named leases as rows, or those of the cluster and the outboxes that are held."""
        outbox, owner = self._context.settings.outbox, self._context.identity.owner
        return await list_leases(
            self._context.broker, owner, names, also=outbox.leases if outbox is not None else ()
        )

    def enable_task_events(self) -> bool:
        """Send task events from now on; false if they were enabled already."""
        return self._parts.events.enable_task_events()

    def disable_task_events(self) -> bool:
        """Withdraw that request; false if there was none."""
        return self._parts.events.disable_task_events()

    async def look_for_recorders(self) -> None:
        """Check at once whether a recorder runs."""
        with suppress(BrokerError):  # the events step retries by itself
            await self._parts.events.look_for_recorders()

    def beat(self) -> None:
        """Send a heartbeat now."""
        self._parts.heart.beat()


# ---- worker state ----------------------------------------------------------------------------------
#
# What control commands read and change of this worker (`control.state.ControlState`).


class WorkerState(WorkerInspection, WorkerTasks, WorkerLimits, WorkerQueues, WorkerPool, WorkerCluster):
    """All sections, on the same parts of the worker."""
