"""Feed: updates a ClusterModel from the broker, and sends the user's commands.

Events are received as they are sent; queues, leases and the nodes' views of one another are polled. When the
broker is away, the feed reconnects, and `problem` says why nothing is received. A monitor that shares its
machine with workers reads events slowly while they need the CPU (`Pace`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, time
from typing import Any, NamedTuple, Protocol

from umbel.brokers.interface import BrokerConnection, ClusterRecord, Depth, FanOut, Queues
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
#
# A monitor that shares its machine with workers reads events slowly while they need the CPU.
#
# Niceness is not enough: where Linux groups processes by session, it has no effect between sessions. So the
# monitor measures how long it waited for a CPU, and pauses between turns while that is long.

LOOK_EVERY_S = 0.1
WAITED_MAX = 0.05  # of the time in which it wanted a CPU
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
    """Decides how long a monitor pauses between turns, from how crowded the CPU is.

    Niceness is not enough: where Linux groups processes by session, it has no effect between sessions.
    """

    def __init__(self, use: Callable[[], CpuUse] = cpu_use, clock: Callable[[], float] = monotonic) -> None:
        self._use = use
        self._clock = clock
        self._looked_at = clock()
        self._before = use()
        self._is_crowded = False

    def rest_s(self, used_s: float) -> float:
        """Return how long to pause now, after a turn that used the CPU for so long."""
        now = self._clock()
        if now >= self._looked_at + LOOK_EVERY_S:
            use, before = self._use(), self._before
            ran_s, waited_s = use.ran_s - before.ran_s, use.waited_s - before.waited_s
            self._is_crowded = waited_s > WAITED_MAX * (ran_s + waited_s)
            self._looked_at, self._before = now, use
        return min(REST_MAX_S, used_s / SHARE - used_s) if self._is_crowded else 0.0


# ---- feed ------------------------------------------------------------------------------------------
#
# Updates a ClusterModel from the broker, and sends the user's commands.
#
# Events are received as they are sent; queues, leases and the nodes' views of one another are polled. When
# the broker is away, the feed reconnects, and `problem` says why nothing is received.

QUEUES_EVERY_S = 2.0
LEASES_EVERY_S = 5.0
LETTERS_MAX = 1000  # dead letters are counted up to here
VIEWS_EVERY_S = 15.0
ENABLE_EVERY_S = 30.0  # for workers that joined since
RECONNECT_S = 1.0
LOOK_S = 2.0  # how long periodic questions wait for answers


class FeedBroker(FanOut, ClusterRecord, Queues, BrokerConnection, Protocol):
    """What a monitor receives from, reads from and changes at a broker."""


class Feed:
    """Updates the model, and sends commands to nodes.

    `heard` is called with each message of events before the model takes it, so that the dashboard can store
    it.
    """

    def __init__(self, broker: FeedBroker, *, enable: bool, model: ClusterModel | None = None) -> None:
        self.model = ClusterModel() if model is None else model
        self.queues: Mapping[str, Depth] = {}
        self.letters: int | None = None  # dead letters, counted up to LETTERS_MAX; None until counted
        self.oldest: Mapping[str, float] = {}  # when the oldest waiting task was sent, by queue
        self.consumers: Mapping[str, Sequence[str]] = {}  # the queues of each node that answered
        self.views: Mapping[str, Mapping[str, str]] = {}  # by observing node: the state of each node
        self.heard: Callable[[bytes, float], None] = lambda _body, _now: None
        self._problems: dict[str, str] = {"events": "connecting"}
        self._broker = broker
        self._asker = ControlClient(broker)
        self._enable = enable
        self._newcomers = asyncio.Event()
        self.membership = MembershipWatch(broker, self._asker, self._member_changed)

    @property
    def problem(self) -> str:
        """Why the monitor receives nothing; "" if it does."""
        return next(reversed(self._problems.values()), "")

    def report(self, name: str, problem: str) -> None:
        """Note what is wrong with a part of the feed; "": it works again."""
        if problem:
            self._problems[name] = problem
        else:
            self._problems.pop(name, None)
        self.model.changes.note("health", "")

    async def run(self) -> None:
        """Run until cancelled, reconnecting to a broker that goes away."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.membership.run())
            group.create_task(self._listen_on())
            group.create_task(self._every(QUEUES_EVERY_S, self._look_at_queues))
            group.create_task(self._every(VIEWS_EVERY_S, self._look_at_views))
            if self._broker.capabilities.leases:
                group.create_task(self._every(LEASES_EVERY_S, self._look_at_leases))
            if self._enable:
                group.create_task(self._every(0.0, self._enable_events))

    async def ask(
        self,
        command: str,
        arguments: Mapping[str, Any],
        node: str | None = None,
        *,
        nodes: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> Answers:
        """Send a command to nodes, to all by default, and return their replies."""
        destination = [node] if node is not None else list(nodes) or None
        return await self._asker.ask(command, arguments, destination=destination, timeout_s=timeout_s)

    async def tell(
        self,
        command: str,
        arguments: Mapping[str, Any],
        node: str | None = None,
        *,
        nodes: Sequence[str] = (),
    ) -> None:
        """Send a command to nodes, to all by default, without waiting for replies."""
        destination = [node] if node is not None else list(nodes) or None
        await self._asker.tell(command, arguments, destination=destination)

    async def revoke(
        self,
        uuid: str | Sequence[str],
        *,
        terminate: bool,
        signal: str = "SIGTERM",
        timeout_s: float | None = None,
    ) -> Answers:
        """Revoke tasks, so that they never start; with `terminate` those that run are ended."""
        now = time()
        ids = [uuid] if isinstance(uuid, str) else list(uuid)
        if self._broker.capabilities.revokes:
            expires_at = now + self._broker.revoke_retention_s
            await self._broker.revoke([Revoke(task_id, now, expires_at) for task_id in ids])
        arguments: dict[str, Any] = {"task_id": ids, "recorded": True}
        if terminate:
            arguments |= {"terminate": True, "signal": signal}
        return await self.ask("revoke", arguments, timeout_s=timeout_s)

    async def _listen_on(self) -> None:
        while True:
            try:
                stored_clock = await self._broker.coordination.raise_clock(0)
                self.model.receiver.clock.begin_above(stored_clock)
                await self._listen()
            except BrokerError as error:
                self.report("events", str(error))
            await asyncio.sleep(RECONNECT_S)

    async def _listen(self) -> None:
        async with self._broker.subscribe(EVENT_EXCHANGE, ["#"]) as broadcasts:
            self.report("events", "")
            async for broadcast in fairly(broadcasts, rest_s=Pace().rest_s):
                now = time()
                self.heard(broadcast.body, now)
                for event in self.model.take(broadcast.body, now):
                    await self.membership.take(event)

    def _member_changed(self, what: str, member: Member, by: str) -> None:
        found = f"found by {by}" if by else ""
        happening = Happening(
            at=time(),
            kind=what,  # type: ignore[arg-type]  # the watch uses these names
            subject=member.node,
            text=member.reason or found,
            node=member.node,
        )
        self.model.happened(happening)
        if what in ("joined", "returned"):
            self._newcomers.set()
        self.model.changes.note("nodes", member.node)
        self.model.changes.note("health", "")

    async def _look_at_queues(self) -> None:
        if not self._broker.capabilities.depths:
            return
        before, self.queues = self.queues, await self._broker.queues()
        self.note_letters(await self._broker.count_dead(LETTERS_MAX))
        now = time()
        waiting = oldest_waiting(self.model.state, now)
        self.oldest = {
            name: at for name, at in waiting.items() if name in self.queues and self.queues[name].ready
        }
        for name in self.queues.keys() | before.keys():
            if self.queues.get(name) != before.get(name):
                self.model.changes.note("queues", name)
        self.model.book.looked(
            now,
            ready={name: depth.ready for name, depth in self.queues.items()},
            oldest_s=max(0.0, now - min(self.oldest.values())) if self.oldest else None,
            alive=sum(member.state == "alive" for member in self.membership.members),
        )

    def note_letters(self, count: int) -> None:
        """Take the number of dead letters that was just read; if it is new, lists of them are refreshed.

        Events announce a rejected task before its letter is stored, and no event says that one was dropped.
        """
        if count != self.letters:
            self.letters = count
            self.model.changes.note("letters", "")

    async def _look_at_views(self) -> None:
        """Ask which node consumes which queue, and how each node sees the others."""
        asked = (
            self._asker.ask("active_queues", timeout_s=LOOK_S),
            self._asker.ask("members", destination=[EVERY_UMBEL_NODE], timeout_s=LOOK_S),
            known_members(self._asker, LOOK_S),
        )
        queues, views, members = await asyncio.gather(*asked)
        before, self.consumers = (
            self.consumers,
            {node: _names(reply) for node, reply in queues.replies.items()},
        )
        for node in before.keys() | self.consumers.keys():
            for name in set(before.get(node, ())) ^ set(self.consumers.get(node, ())):
                self.model.changes.note("queues", name)
        self.views = {node: _states(reply) for node, reply in views.replies.items()}
        await self.membership.introduce(members)

    async def _look_at_leases(self) -> None:
        """Ask a node for the held leases; look up the others at the broker: their holders may have died."""
        answers = await self._asker.ask("leases", destination=[EVERY_UMBEL_NODE], timeout_s=LOOK_S, limit=1)
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
        await asyncio.sleep(RECONNECT_S)  # nodes that join together are asked together
        with suppress(TimeoutError):
            async with asyncio.timeout(ENABLE_EVERY_S):
                await self._newcomers.wait()

    async def _every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        name = work.__name__
        while True:
            wait_s = max(seconds, 0.1)
            try:
                await work()
                if name in self._problems:
                    self.report(name, "")
            except BrokerError as error:
                self.report(name, str(error))
                await self._reconnect()
                wait_s = RECONNECT_S
            await asyncio.sleep(wait_s)

    async def _reconnect(self) -> None:
        try:
            await self._broker.reconnect()
        except BrokerError:
            return  # the next poll reports the problem


def _names(reply: Any) -> list[str]:
    return sorted(row.name for row in rows(reply, QueueRow) if row.name is not None)


def _states(reply: Any) -> dict[str, str]:
    found = rows(reply, ViewRow)
    return {row.node: row.state for row in found if row.node is not None and row.state is not None}
