"""Feed: keeps a ClusterModel up to date from the broker, and carries out what the user asks for.

Events are heard; queues, leases and what nodes think of one another are asked for now and then. A broker that
goes away is waited for: `problem` says what is the matter meanwhile.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from time import time
from typing import Any, Protocol

from umbel.brokers.interface import BrokerConnection, ClusterRecord, Depth, FanOut, Queues
from umbel.control.client import Asker
from umbel.coordination.driver import fairly
from umbel.errors import BrokerError
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.monitor.membership import MembershipWatch, known_members
from umbel.monitor.model import ClusterModel
from umbel.monitor.pace import Pace
from umbel.monitor.shapes import Happening
from umbel.monitor.waiting import oldest_waiting
from umbel.protocol.membership.events import Member
from umbel.protocol.pidbox import EVERY_UMBEL_NODE, Answers
from umbel.wire.revoke import Revoke

QUEUES_EVERY_S = 2.0
LEASES_EVERY_S = 5.0
VIEWS_EVERY_S = 15.0
ENABLE_EVERY_S = 30.0  # workers that came meanwhile are asked too
RECONNECT_S = 1.0
ASK_S = 2.0
REVOKE_S = 86_400.0


class FeedBroker(FanOut, ClusterRecord, Queues, BrokerConnection, Protocol):
    """What a monitor hears, reads and changes."""


class Feed:
    """`problem` says what keeps the monitor from hearing anything; empty when it hears.

    `heard` is called with each message of events, before it is taken: for who writes them down.
    """

    def __init__(self, broker: FeedBroker, *, enable: bool, model: ClusterModel | None = None) -> None:
        self.model = ClusterModel() if model is None else model
        self.queues: Mapping[str, Depth] = {}
        self.oldest: Mapping[str, float] = {}  # when the oldest known task was sent that waits, by queue
        self.consumers: Mapping[str, Sequence[str]] = {}  # the queues of each node that answered
        self.views: Mapping[str, Mapping[str, str]] = {}  # by who looks: the state of each node
        self.heard: Callable[[bytes, float], None] = lambda _body, _now: None
        self._problems: dict[str, str] = {"events": "connecting"}
        self._broker = broker
        self._asker = Asker(broker)
        self._enable = enable
        self._newcomers = asyncio.Event()
        self.membership = MembershipWatch(broker, self._asker, self._member_changed)

    @property
    def problem(self) -> str:
        return next(reversed(self._problems.values()), "")

    def report(self, name: str, problem: str) -> None:
        """What is wrong with a part of it; "": nothing any more."""
        if problem:
            self._problems[name] = problem
        else:
            self._problems.pop(name, None)
        self.model.changes.note("health", "")

    async def run(self) -> None:
        """Until cancelled; a broker that goes away is waited for."""
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
        timeout_s: float = ASK_S,
    ) -> Answers:
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
        destination = [node] if node is not None else list(nodes) or None
        await self._asker.tell(command, arguments, destination=destination)

    async def revoke(
        self,
        uuid: str | Sequence[str],
        *,
        terminate: bool,
        signal: str = "SIGTERM",
        timeout_s: float = ASK_S,
    ) -> Answers:
        """The tasks never start, and with `terminate` end if they run."""
        now = time()
        ids = [uuid] if isinstance(uuid, str) else list(uuid)
        if self._broker.capabilities.revokes:
            await self._broker.revoke([Revoke(one, now, now + REVOKE_S) for one in ids])
        arguments: dict[str, Any] = {"task_id": ids, "recorded": True}
        if terminate:
            arguments |= {"terminate": True, "signal": signal}
        return await self.ask("revoke", arguments, timeout_s=timeout_s)

    async def _listen_on(self) -> None:
        while True:
            try:
                mark = await self._broker.coordination.raise_clock(0)
                self.model.receiver.clock.adjust(mark)
                await self._listen()
            except BrokerError as error:
                self.report("events", str(error))
            await asyncio.sleep(RECONNECT_S)

    async def _listen(self) -> None:
        async with self._broker.subscribe(EVENT_EXCHANGE, ["#"]) as heard:
            self.report("events", "")
            async for broadcast in fairly(heard, rest_s=Pace().rest_s):
                now = time()
                self.heard(broadcast.body, now)
                for event in self.model.take(broadcast.body, now):
                    await self.membership.take(event)

    def _member_changed(self, what: str, member: Member, by: str) -> None:
        said = f"found by {by}" if by else ""
        happening = Happening(
            at=time(),
            kind=what,  # type: ignore[arg-type]  # the watch names its changes so
            subject=member.node,
            text=member.reason or said,
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
            alive=sum(one.state == "alive" for one in self.membership.members),
        )

    async def _look_at_views(self) -> None:
        """Who consumes which queue, and what each node thinks of the others."""
        asked = (
            self._asker.ask("active_queues", timeout_s=ASK_S),
            self._asker.ask("members", destination=[EVERY_UMBEL_NODE], timeout_s=ASK_S),
            known_members(self._asker, ASK_S),
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
        """A node lists those that are held. Others are looked up: their holders may have died."""
        answers = await self._asker.ask("leases", destination=[EVERY_UMBEL_NODE], timeout_s=ASK_S, limit=1)
        replies = [one for one in answers.replies.values() if isinstance(one, list)]
        rows = [row for reply in replies for row in reply if isinstance(row, dict)]
        for name in sorted(self.model.leases.held() - {row.get("name") for row in rows}):
            found = await self._broker.coordination.read_lease(name)
            rows.append({"name": name, "holder": found.holder, "term": found.term, "left_s": found.left_s})
        now = time()
        for lease in self.model.leases.answered(rows, now):
            self.model.lease_changed(lease.name, lease.holder, lease.term, now)

    async def _enable_events(self) -> None:
        """Now, soon after a node has come, and every ENABLE_EVERY_S."""
        self._newcomers.clear()
        await self._asker.tell("enable_events")
        await asyncio.sleep(RECONNECT_S)  # nodes that come together are asked together
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
            return  # the next question says what is wrong


def _names(reply: Any) -> list[str]:
    found = reply if isinstance(reply, list) else []
    return sorted(str(one["name"]) for one in found if isinstance(one, dict) and "name" in one)


def _states(reply: Any) -> dict[str, str]:
    rows = reply if isinstance(reply, list) else []
    return {str(row.get("node")): str(row.get("state")) for row in rows if isinstance(row, dict)}
