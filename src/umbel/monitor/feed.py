"""Feed: keeps a ClusterModel up to date from the broker, and sends commands to nodes.

Events are received as they are sent; queues, leases and the nodes' views of one another are polled. While the
broker is unavailable the feed reconnects, and `problem` says why nothing is received.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, time
from typing import Any, NamedTuple

from umbel.brokers.interface import Broker, Depth
from umbel.control.client import ControlClient
from umbel.coordination.driver import fairly
from umbel.errors import BrokerError
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.monitor.coordination import MembershipWatch, known_members
from umbel.monitor.model import ClusterModel
from umbel.monitor.rates import oldest_waiting
from umbel.monitor.records import Happening
from umbel.protocol.membership.members import Member
from umbel.protocol.pidbox import EVERY_UMBEL_NODE, Answers
from umbel.wire.control import LeaseRow, QueueRow, ViewRow, rows
from umbel.wire.records import Revoke

# ---- pace ------------------------------------------------------------------------------------------

MEASURE_EVERY_S = 0.1
WAITED_MAX = 0.05  # a larger share of waiting means that other processes need the CPU
SHARE = 0.1  # of a CPU, which is enough for some 6,000 events a second
REST_MAX_S = 0.5
SCHEDULED = Path("/proc/thread-self/schedstat")


class CpuUse(NamedTuple):
    """How long a thread ran on a CPU, and how long it waited for one."""

    ran_s: float
    waited_s: float


def cpu_use() -> CpuUse:
    """Return the CPU use of this thread; zeros where the system does not report it."""
    try:
        ran_ns, waited_ns, _ = SCHEDULED.read_bytes().split()
    except (OSError, ValueError):
        return CpuUse(0.0, 0.0)
    return CpuUse(int(ran_ns) / 1e9, int(waited_ns) / 1e9)


class Pace:
    """Decides how long a monitor pauses between turns, so that workers on the same machine get the CPU.

    A low priority is not enough: where Linux groups processes by session, it has no effect between sessions.
    So the monitor measures how long it waited for a CPU, and pauses while that share is high.
    """

    def __init__(self, use: Callable[[], CpuUse] = cpu_use, clock: Callable[[], float] = monotonic) -> None:
        self._use = use
        self._clock = clock
        self._measured_at = clock()
        self._before = use()
        self._is_crowded = False

    def rest_s(self, used_s: float) -> float:
        """Return how long to pause now, after a turn that used the CPU for so long."""
        now = self._clock()
        if now >= self._measured_at + MEASURE_EVERY_S:
            use, before = self._use(), self._before
            ran_s, waited_s = use.ran_s - before.ran_s, use.waited_s - before.waited_s
            self._is_crowded = waited_s > WAITED_MAX * (ran_s + waited_s)
            self._measured_at, self._before = now, use
        return min(REST_MAX_S, used_s / SHARE - used_s) if self._is_crowded else 0.0


# ---- feed ------------------------------------------------------------------------------------------

QUEUES_EVERY_S = 2.0
LEASES_EVERY_S = 5.0
LETTERS_MAX = 1000  # dead letters are counted up to this number
VIEWS_EVERY_S = 15.0
ENABLE_EVERY_S = 30.0  # for workers whose start was missed
RECONNECT_S = 1.0
POLL_S = 2.0  # how long polls wait for replies of nodes


class Feed:
    """Keeps the model up to date, and sends commands to nodes.

    `received` is called with each message of events before the model takes it, so that the dashboard can
    store it. `queues` to `views` are the newest results of the polls.
    """

    def __init__(self, broker: Broker, *, enable: bool, model: ClusterModel | None = None) -> None:
        self.model = ClusterModel() if model is None else model
        self.queues: Mapping[str, Depth] = {}
        self.letters: int | None = None  # dead letters, up to LETTERS_MAX; None until they are counted
        self.oldest: Mapping[str, float] = {}  # when the oldest waiting task was sent, by queue
        self.consumers: Mapping[str, Sequence[str]] = {}  # the queues of each node that answered
        self.views: Mapping[str, Mapping[str, str]] = {}  # the states of all nodes, by the node that reports
        self.received: Callable[[bytes, float], None] = lambda _body, _now: None
        self._problems: dict[str, str] = {"events": "connecting"}
        self._broker = broker
        self._asker = ControlClient(broker)
        self._enable = enable
        self._newcomers = asyncio.Event()
        self._letters_at = 0.0
        self.membership = MembershipWatch(broker, self._asker, self._member_changed)

    @property
    def problem(self) -> str:
        """Why the monitor receives nothing; "" if it does."""
        return next(reversed(self._problems.values()), "")

    def report(self, name: str, problem: str) -> None:
        """Note what is wrong with a part of the feed; "" when the part works again."""
        if problem:
            self._problems[name] = problem
        else:
            self._problems.pop(name, None)
        self.model.changes.note("health", "")

    async def run(self) -> None:
        """Run until cancelled; reconnect when the broker becomes unavailable."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.membership.run())
            group.create_task(self._listen())
            if self._broker.capabilities.depths:
                group.create_task(self._every(QUEUES_EVERY_S, self._poll_queues))
            group.create_task(self._every(VIEWS_EVERY_S, self._poll_views))
            if self._broker.capabilities.leases:
                group.create_task(self._every(LEASES_EVERY_S, self._poll_leases))
            if self._enable:
                group.create_task(self._every(0.0, self._enable_events))

    # -- commands --------------------------------------------------------------------------------

    async def ask(
        self,
        command: str,
        arguments: Mapping[str, Any],
        nodes: Sequence[str] = (),
        *,
        timeout_s: float | None = None,
    ) -> Answers:
        """Send a command to nodes, to all by default, and return their replies."""
        return await self._asker.ask(command, arguments, destination=list(nodes) or None, timeout_s=timeout_s)

    async def tell(self, command: str, arguments: Mapping[str, Any], nodes: Sequence[str] = ()) -> None:
        """Send a command to nodes, to all by default, without waiting for replies."""
        await self._asker.tell(command, arguments, destination=list(nodes) or None)

    async def revoke(self, ids: Sequence[str], *, terminate: bool, signal: str = "SIGTERM") -> Answers:
        """Revoke tasks, so that they never start; with `terminate` also end the tasks that run."""
        now = time()
        if self._broker.capabilities.revokes:
            expires_at = now + self._broker.revoke_retention_s
            await self._broker.revoke([Revoke(task_id, now, expires_at) for task_id in ids])
        arguments: dict[str, Any] = {"task_id": list(ids), "recorded": True}
        if terminate:
            arguments |= {"terminate": True, "signal": signal}
        return await self.ask("revoke", arguments)

    # -- dead letters ----------------------------------------------------------------------------

    async def count_letters(self, max_age_s: float) -> int:
        """Return how many dead letters there are, up to LETTERS_MAX, counted at most `max_age_s` ago."""
        if self.letters is None or monotonic() - self._letters_at > max_age_s:
            self.note_letters(await self._broker.count_dead(LETTERS_MAX))
        assert self.letters is not None
        return self.letters

    def note_letters(self, count: int) -> None:
        """Store the number of dead letters that was just read; if it is new, pages refresh their lists.

        Events do not suffice: a task is rejected before its dead letter is stored, and no event reports that
        a dead letter was dropped.
        """
        self._letters_at = monotonic()
        if count != self.letters:
            self.letters = count
            self.model.changes.note("letters", "")

    # -- events ----------------------------------------------------------------------------------

    async def _listen(self) -> None:
        while True:
            try:
                stored_clock = await self._broker.coordination.raise_clock(0)
                self.model.receiver.clock.begin_above(stored_clock)
                await self._receive()
            except BrokerError as error:
                self.report("events", str(error))
            await asyncio.sleep(RECONNECT_S)

    async def _receive(self) -> None:
        async with self._broker.subscribe(EVENT_EXCHANGE, ["#"]) as broadcasts:
            self.report("events", "")
            async for broadcast in fairly(broadcasts, rest_s=Pace().rest_s):
                now = time()
                self.received(broadcast.body, now)
                for event in self.model.take(broadcast.body, now):
                    await self.membership.take(event)

    def _member_changed(self, kind: str, member: Member, by: str) -> None:
        found = f"found by {by}" if by else ""
        happening = Happening(
            at=time(),
            kind=kind,  # type: ignore[arg-type]  # the watch uses these names
            subject=member.node,
            text=member.reason or found,
            node=member.node,
        )
        self.model.happened(happening)
        if kind in ("joined", "returned"):
            self._newcomers.set()
        self.model.changes.note("nodes", member.node)
        self.model.changes.note("health", "")

    # -- polls -----------------------------------------------------------------------------------

    async def _poll_queues(self) -> None:
        before, self.queues = self.queues, await self._broker.queues()
        await self.count_letters(0.0)
        now = time()
        waiting = oldest_waiting(self.model.state, now)
        self.oldest = {
            name: at for name, at in waiting.items() if name in self.queues and self.queues[name].ready
        }
        for name in self.queues.keys() | before.keys():
            if self.queues.get(name) != before.get(name):
                self.model.changes.note("queues", name)
        self.model.book.measured(
            now,
            ready={name: depth.ready for name, depth in self.queues.items()},
            oldest_s=max(0.0, now - min(self.oldest.values())) if self.oldest else None,
            alive=sum(member.state == "alive" for member in self.membership.members),
        )

    async def _poll_views(self) -> None:
        """Ask which node consumes which queue, and how each node sees the others."""
        queues, views, members = await asyncio.gather(
            self._asker.ask("active_queues", timeout_s=POLL_S),
            self._asker.ask("members", destination=[EVERY_UMBEL_NODE], timeout_s=POLL_S),
            known_members(self._asker, POLL_S),
        )
        before, self.consumers = (
            self.consumers,
            {node: _names(reply) for node, reply in queues.replies.items()},
        )
        for node in before.keys() | self.consumers.keys():
            for name in set(before.get(node, ())) ^ set(self.consumers.get(node, ())):
                self.model.changes.note("queues", name)
        self.views = {node: _states(reply) for node, reply in views.replies.items()}
        await self.membership.introduce(members)

    async def _poll_leases(self) -> None:
        """Ask a node for its leases; read the others at the broker, because their holders may be dead."""
        answers = await self._asker.ask("leases", destination=[EVERY_UMBEL_NODE], timeout_s=POLL_S, limit=1)
        found = [row for reply in answers.replies.values() for row in rows(reply, LeaseRow)]
        for name in sorted(self.model.leases.held() - {row.name for row in found}):
            stored = await self._broker.coordination.read_lease(name)
            found.append(LeaseRow(name, stored.holder, stored.term, stored.left_s))
        now = time()
        for lease in self.model.leases.answered(found, now):
            self.model.lease_changed(lease.name, lease.holder, lease.term, now)

    async def _enable_events(self) -> None:
        """Enable task events at once, soon after a node joins, and every ENABLE_EVERY_S."""
        self._newcomers.clear()
        await self._asker.tell("enable_events")
        await asyncio.sleep(RECONNECT_S)  # nodes that join together get one request
        with suppress(TimeoutError):
            async with asyncio.timeout(ENABLE_EVERY_S):
                await self._newcomers.wait()

    async def _every(self, seconds: float, poll: Callable[[], Awaitable[None]]) -> None:
        name = poll.__name__
        while True:
            wait_s = max(seconds, 0.1)
            try:
                await poll()
                if name in self._problems:
                    self.report(name, "")
            except BrokerError as error:
                self.report(name, str(error))
                with suppress(BrokerError):  # the next poll reports the problem
                    await self._broker.reconnect()
                wait_s = RECONNECT_S
            await asyncio.sleep(wait_s)


def _names(reply: Any) -> list[str]:
    return sorted(row.name for row in rows(reply, QueueRow) if row.name is not None)


def _states(reply: Any) -> dict[str, str]:
    found = rows(reply, ViewRow)
    return {row.node: row.state for row in found if row.node is not None and row.state is not None}
