"""The view of a worker that control commands get: what they may read and change of it."""

import asyncio
import platform
import resource
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from signal import Signals
from time import time
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from umbel.brokers.links import MAILBOX
from umbel.clock import cluster_now
from umbel.control.panel import NO_ANSWER
from umbel.errors import BrokerError, NotSupported
from umbel.events.stamp import SOFTWARE
from umbel.pools.prefork.kernel import stacks_of
from umbel.protocol.clock import LamportClock
from umbel.protocol.delivery.delivery import TaskRules
from umbel.protocol.delivery.revoked import RevokedTasks
from umbel.protocol.delivery.sensitive import MASK
from umbel.protocol.membership.observers import OBSERVER_LEASES
from umbel.protocol.pidbox import MemberReport
from umbel.text import each_url, without_password
from umbel.version import VERSION
from umbel.wire.coordination import describe
from umbel.wire.records import Revoke
from umbel.worker.context import WorkerContext
from umbel.worker.delivery.claimed import Claimed
from umbel.worker.delivery.take import Tasks
from umbel.worker.events import Events
from umbel.worker.foreign_scheduler import FOREIGN_LEASE
from umbel.worker.remote.mailbox import MailboxFigures
from umbel.worker.steps.gossip import Gossip
from umbel.worker.steps.heart import Heart
from umbel.worker.steps.mingle import Mingle
from umbel.worker.steps.pool import Autoscaler

SHOWN_MAX = 10_000  # requests in one reply
SCHEDULE_PRIORITY = 6  # of Celery's timer; part of the form of replies
SAMPLES_MAX = 100
SETTLED_BEATS = 4
CLUSTER_LEASES = ("scheduler", FOREIGN_LEASE, "recorder", "coord-sweeper", *OBSERVER_LEASES)
READ_LEASES_S = 5.0
GENTLE_SIGNAL = "SIGTERM"  # the default of callers: the task is interrupted first
CANCEL_AGAIN_S = (0.1, 0.5)  # interrupt again, in case the task could not be interrupted yet
CANCEL_GRACE_S, TERMINATE_GRACE_S = 2.0, 5.0


class WorkerParts(msgspec.Struct, frozen=True):
    """What the view is built on. `steps`: in starting order, each with the steps that it requires."""

    context: WorkerContext
    events: Events
    heart: Heart
    tasks: Tasks
    gossip: Gossip
    mingle: Mingle
    autoscaler: Autoscaler
    mailbox: MailboxFigures
    elect: Callable[[Mapping[str, Any]], str]
    stop: Callable[[], None]
    steps: Callable[[], Mapping[str, Sequence[str]]]


class WorkerView:
    """What a control command may read and change of its worker; commands know nothing else of it.

    Commands of Umbel and of users get it as their first parameter. Users' commands run in separate threads.
    """

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._context = parts.context
        self._tasks = parts.tasks
        self._samples: deque[float] = deque(maxlen=SAMPLES_MAX)

    # -- the node --------------------------------------------------------------------------------

    @property
    def app(self) -> Any:
        """The app that the worker runs for; None if it has none."""
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
        """The Lamport clock of the node; it was moved forward for this command already (P4)."""
        return self._parts.events.clock

    @property
    def uptime_s(self) -> float:
        """Seconds since the worker started."""
        return time() - self._context.identity.incarnation / 1e6

    # -- reports ---------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return counters, pool and broker in the form of Celery's `stats`, with Umbel's under `umbel`."""
        context, autoscaler, figures = self._context, self._parts.autoscaler, self._parts.mailbox
        links, mailbox = context.outages.reconnects, figures.mailbox
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "total": dict(self._tasks.totals),
            "pid": self.pid,
            "clock": str(self.clock.value),  # a text, as Celery has it
            "uptime": int(self.uptime_s),
            "prefetch_count": self._tasks.claimed + context.pool.room(),
            "pool": self._pool_map(),
            "broker": broker_map(context.broker.url),
            "rusage": {name.removeprefix("ru_"): getattr(usage, name) for name in _USAGE},
            **({"autoscaler": autoscaler.describe()} if autoscaler.is_on else {}),
            "umbel": {
                "incarnation": context.identity.incarnation,
                "counters": context.counters.as_dict(),
                "links": {**links, MAILBOX: links[MAILBOX] + figures.resets},
                "outage": context.outages.problem,
                "replies_dropped": figures.replies_dropped,
                "unreadable": {
                    "events": self._parts.gossip.undecodable,
                    "requests": mailbox.malformed if mailbox else 0,
                },
                "requests_distrusted": mailbox.distrusted if mailbox else 0,
                "grants_unproven": context.broker.coordination.unproven,
                "stopping": context.shutdown.describe(asyncio.get_running_loop().time()),
                "steps": dict(self._parts.steps()),
            },
        }

    def health(self) -> dict[str, Any]:
        """Return whether the worker can fetch and settle messages, and how far a shutdown is."""
        return {
            "problem": self._tasks.problem,
            "claimed": self._tasks.claimed,
            "stopping": self._context.shutdown.describe(asyncio.get_running_loop().time()),
            "queues": list(self._context.queues),
            "uptime_s": round(self.uptime_s, 1),
            "counters": self._context.counters.as_dict(),
        }

    def conf(self, *, with_defaults: bool) -> dict[str, Any]:
        """Return the settings, with passwords masked; without defaults only the changed settings."""
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

    # -- single tasks ----------------------------------------------------------------------------
    #
    # In the form of Celery's `inspect` (wire 5.5). Arguments are decoded only where the body is JSON: the
    # main process runs nothing that a message brings. For other and for large bodies the texts that the
    # sender put into the headers are shown.

    def active(self, *, safe: bool) -> list[dict[str, Any]]:
        """Return the requests whose tasks run. `safe`: arguments as text."""
        running = self._running()
        return [
            self._request_map(claimed, safe=safe, pid=running[claimed.headers.id])
            for claimed in self._tasks.holding()[:SHOWN_MAX]
            if claimed.headers.id in running
        ]

    def reserved(self) -> list[dict[str, Any]]:
        """Return the requests that were claimed and have not started."""
        running = self._running()
        return [
            self._request_map(claimed)
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
                "request": self._request_map(claimed),
            }
            for due, claimed in self._tasks.scheduled
        ]

    def find(self, task_ids: Sequence[str]) -> Mapping[str, tuple[str, dict[str, Any]]]:
        """Return state (active, reserved, scheduled) and request of those tasks that are here."""
        wanted, running = frozenset(task_ids), self._running()
        self._tasks.scheduled.expire(cluster_now())
        found = {
            claimed.headers.id: ("scheduled", self._request_map(claimed))
            for _, claimed in self._tasks.scheduled
            if claimed.headers.id in wanted
        }
        for claimed in self._tasks.holding():
            task_id = claimed.headers.id
            if task_id in wanted:
                pid = running.get(task_id)
                state = "reserved" if pid is None else "active"
                found[task_id] = (state, self._request_map(claimed, pid=pid))
        return found

    def running_with(self, headers: Iterable[str]) -> Sequence[str]:
        """Return the ids of running tasks with one of these stamped headers, each `key=value`."""
        wanted, running = RevokedTasks(), self._running()
        for header in headers:
            wanted.add_header(header, inf)
        return [
            claimed.headers.id
            for claimed in self._tasks.holding()
            if claimed.headers.id in running and wanted.covers(claimed.headers.id, claimed.headers.stamps)
        ]

    def _running(self) -> dict[str, int]:
        running: dict[str, int] = self._context.pool.describe()["running"]
        return running

    def _request_map(self, claimed: Claimed, *, safe: bool = False, pid: int | None = None) -> dict[str, Any]:
        headers = claimed.headers
        args, kwargs = shown_arguments(claimed, safe=safe)
        return {
            "id": headers.id,
            "name": headers.shadow or headers.task,
            "args": args,
            "kwargs": kwargs,
            "type": headers.task,
            "hostname": self.node,
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

    def revoked_ids(self) -> Sequence[str]:
        """Return the ids of tasks that must not start, newest last."""
        return [task_id for task_id, _ in self._tasks.revoked.told(cluster_now())]

    async def revoke(
        self, task_ids: Sequence[str], *, headers: Sequence[str] = (), is_recorded: bool
    ) -> None:
        """Refuse these tasks here at once, and in the cluster through the broker's record.

        `headers`: tasks with such stamps, each `key=value`. `is_recorded`: the record has the revoke already.
        """
        now = cluster_now()
        expires_at = now + self._context.broker.revoke_retention_s
        for task_id in task_ids:  # here at once, although the record may take a moment
            self._tasks.revoked.add(task_id, expires_at, now)
        for header in headers:
            self._tasks.revoked.add_header(header, expires_at)
        self._tasks.drop_revoked()
        await self._record(_revokes(task_ids, headers, now, expires_at), is_recorded)

    async def unrevoke(
        self, task_ids: Sequence[str], *, headers: Sequence[str] = (), is_recorded: bool
    ) -> None:
        """Allow these tasks here at once, and in the cluster through the broker's record."""
        now = cluster_now()
        revokes = _revokes(task_ids, headers, now, now)
        for revoke in revokes:
            self._tasks.revokes.take_back(revoke)
        await self._record(revokes, is_recorded)

    async def _record(self, revokes: Sequence[Revoke], is_recorded: bool) -> None:
        broker = self._context.broker
        if revokes and not is_recorded and broker.capabilities.revokes:
            await broker.revoke(revokes)

    def terminate(self, task_ids: Sequence[str], signal: str) -> Sequence[str]:
        """Begin to end those of these tasks that run here; return their ids.

        SIGTERM interrupts the task first, and signals its process only if the task does not end. Every other
        signal goes to the process at once.
        """
        wanted, running, ended = frozenset(task_ids), self._running(), list[str]()
        for claimed in self._tasks.holding():
            if claimed.headers.id not in wanted or claimed.headers.id not in running:
                continue
            claimed.terminated_by = signal
            if (signal == GENTLE_SIGNAL and self._cancel(claimed)) or self._signal(claimed, signal):
                ended.append(claimed.headers.id)
            else:
                claimed.terminated_by = ""
        return ended

    # A claimed message has a new number for each attempt, and the pool knows jobs by that number. So a late
    # call finds no job.

    def _cancel(self, claimed: Claimed) -> bool:
        """Interrupt the task; its process is signalled only if the task does not end."""
        cancel, loop = self._context.pool.cancel_job, asyncio.get_running_loop()
        if not cancel(claimed.number):
            return False
        for after_s in CANCEL_AGAIN_S:
            loop.call_later(after_s, self._if_running, claimed, cancel, claimed.number)
        loop.call_later(CANCEL_GRACE_S, self._if_running, claimed, self._signal, claimed, GENTLE_SIGNAL)
        return True

    def _signal(self, claimed: Claimed, signal: str) -> bool:
        """Signal its process. A task may catch that signal; SIGKILL follows, which it cannot catch."""
        terminate, loop = self._context.pool.terminate_job, asyncio.get_running_loop()
        if not terminate(claimed.number, Signals[signal]):
            return False
        loop.call_later(
            TERMINATE_GRACE_S, self._if_running, claimed, terminate, claimed.number, Signals.SIGKILL
        )
        return True

    def _if_running(self, claimed: Claimed, do: Callable[..., object], *arguments: object) -> None:
        if self._tasks.is_holding(claimed):
            do(*arguments)

    # -- limits ----------------------------------------------------------------------------------

    @property
    def task_rules(self) -> Mapping[str, TaskRules]:
        """Every registered task, with its present limits."""
        return self._tasks.policy.rules

    def unenforceable(self, task: str, *, soft: bool, hard: bool) -> str:
        """Return why the pool cannot enforce such time limits; "" when it can."""
        is_async = self.task_rules[task].is_async
        return self._context.pool.abilities.unenforceable(is_async=is_async, soft=soft, hard=hard)

    def change_rules(self, task: str, rules: TaskRules) -> None:
        """Set a task's limits from its next start on."""
        self._tasks.policy.change(task, rules)

    # -- queues ----------------------------------------------------------------------------------

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
            self._tasks.wake()

    async def cancel_queue(self, name: str) -> None:
        """Stop consuming a queue; its prefetched messages are returned."""
        if name in self._context.queues:
            self._context.queues.remove(name)
            await self._context.broker.leave_queue(self._context.identity.owner, name)

    @property
    def prefetch_max(self) -> int:
        """How many messages the worker claims at most, running and waiting."""
        return self._tasks.prefetch_max

    def set_prefetch_max(self, most: int) -> None:
        """Claim at most this many from now on; existing claims stay. ValueError below 1. Thread-safe."""
        if most < 1:
            raise ValueError(f"the prefetch limit must be at least 1, not {most}")
        self._tasks.limit_prefetch(most)

    async def dead_letters(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest dead letters as rows."""
        names = ("queue", "reason", "starts", "buried_at")
        return [
            {"id": letter.letter_id, **{name: getattr(letter, name) for name in names}}
            for letter in await self._context.broker.dead_letters(limit)
        ]

    # -- the process -----------------------------------------------------------------------------

    def resize_pool(self, by: int) -> int:
        """Add or remove children; return how many there will be. NotSupported where the size is fixed."""
        return self._context.pool.resize(by)

    @property
    def is_autoscaled(self) -> bool:
        """Whether the autoscaler sets the size of the pool."""
        return self._parts.autoscaler.is_on

    def autoscale(self, most: int | None, least: int | None) -> tuple[int, int]:
        """Set the bounds of the pool's size; return both. ValueError where it is not autoscaled."""
        return self._parts.autoscaler.limit(most, least)

    def restart_pool(self, *, reload: bool) -> None:
        """Replace the children one by one, as they become idle; `reload`: load the app again first.

        ValueError unless the setting `worker_pool_restarts` allows it.
        """
        pool = self._context.pool
        if not self._context.settings.pool_restarts:
            raise ValueError("Pool restarts not enabled")
        restart = getattr(pool, "restart", None)
        if restart is None:
            raise NotSupported(f"the {pool.describe()['implementation']} pool has no children to replace")
        restart(reload=reload)

    async def stacks(self) -> dict[str, dict[str, str]]:
        """Return, by child, the task it runs and the stacks of its threads."""
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

    # -- the cluster -----------------------------------------------------------------------------

    async def hello(self, greeting: Mapping[str, Any]) -> Any:
        """Take in the hello of a node; return the reply, or NO_ANSWER if other nodes answer."""
        asker = str(greeting.get("from_node"))
        if asker == self.node:
            return None  # as Celery's nodes do, on receiving their own hello
        if not self._parts.gossip.should_answer(asker):
            return NO_ANSWER
        return await self._parts.mingle.answer(greeting)

    def members(self) -> Sequence[Mapping[str, Any]]:
        """Return all known nodes as rows, this node first."""
        return [describe(member, time()) for member in self._parts.gossip.members()]

    def known_members(self) -> Sequence[MemberReport]:
        """Return the members for callers of remote control; none while this node is too new.

        A node that has just started, or has no gossip, does not know all nodes, and callers would not wait
        for those that are missing.
        """
        now, gossip = cluster_now(), self._parts.gossip
        settled_s = SETTLED_BEATS * self._context.settings.heartbeat_interval_s
        if not gossip.is_on or self.uptime_s < settled_s:
            return ()
        return [
            MemberReport(
                member.node,
                member.state.value,
                max(0.0, now - member.last_heard),
                member.software == SOFTWARE,
            )
            for member in gossip.members()
        ]

    def elect(self, request: Mapping[str, Any]) -> str:
        """Take part in an election; return why this worker cannot, or ""."""
        return self._parts.elect(request)

    async def leases(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the named leases as rows, or those of the cluster and the outboxes that are held.

        Leases of apps are found by name only: the store has no list of them.
        """
        outbox, owner, broker = (
            self._context.settings.outbox,
            self._context.identity.owner,
            self._context.broker,
        )
        if not broker.capabilities.leases:
            return []
        rows = []
        async with asyncio.timeout(READ_LEASES_S):
            for name in names or (*CLUSTER_LEASES, *(outbox.leases if outbox else ())):
                found = await broker.coordination.read_lease(name)
                if found.holder or names:
                    is_mine = found.holder == owner or found.holder.startswith(f"{owner}.")
                    left_s = round(max(0.0, found.left_s), 1)
                    row = {"name": name, "holder": found.holder, "term": found.term}
                    rows.append({**row, "left_s": left_s, "mine": is_mine})
        return rows

    def enable_task_events(self) -> bool:
        """Send task events from now on; false if they were enabled already."""
        return self._parts.events.enable_task_events()

    def disable_task_events(self) -> bool:
        """Withdraw that request; false if there was none."""
        return self._parts.events.disable_task_events()

    async def look_for_recorders(self) -> None:
        """Check at once whether a recorder runs; log events if so."""
        with suppress(BrokerError):  # the events step retries by itself
            await self._parts.events.look_for_recorders()

    def beat(self) -> None:
        """Send a heartbeat now."""
        self._parts.heart.beat()


# ---- forms of replies ------------------------------------------------------------------------------


def shown_arguments(claimed: Claimed, *, safe: bool) -> tuple[Any, Any]:
    """Return arguments and keywords as a reply shows them, sensitive ones masked. `safe`: as text."""
    if safe and any(claimed.shown):
        return claimed.shown
    found = claimed.arguments(MASK)
    if found is None:
        return claimed.shown
    return (repr(found[0]), repr(found[1])) if safe else found


def _revokes(task_ids: Iterable[str], headers: Iterable[str], now: float, expires_at: float) -> list[Revoke]:
    return [
        *(Revoke(task_id, now, expires_at) for task_id in task_ids),
        *(Revoke("", now, expires_at, header) for header in headers),
    ]


def broker_map(urls: str) -> dict[str, Any]:
    """Return the broker in the form of Celery's `stats`, without passwords."""
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
