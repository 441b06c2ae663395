"""Feed: keeps a ClusterModel up to date from the broker, and carries out what the user asks for."""

import asyncio
from collections.abc import Mapping
from time import time
from typing import Any, Protocol

from umbel.brokers.interface import ClusterRecord, Depth, FanOut, Queues
from umbel.control.client import Asker
from umbel.errors import BrokerError
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.monitor.model import ClusterModel
from umbel.protocol.pidbox import Answers
from umbel.wire.revoke import Revoke

QUEUES_EVERY_S = 2.0
ENABLE_EVERY_S = 30.0  # workers that came meanwhile are asked too
RECONNECT_S = 1.0
ASK_S = 2.0
TURN_S = 0.02  # the screen gets its turn at least so often, however many events come
REVOKE_S = 86_400.0


class FeedBroker(FanOut, ClusterRecord, Queues, Protocol):
    """What a monitor hears, reads and changes."""


class Feed:
    """`problem` says what keeps the monitor from hearing anything; empty when it hears."""

    def __init__(self, broker: FeedBroker, *, enable: bool) -> None:
        self.model = ClusterModel()
        self.queues: Mapping[str, Depth] = {}
        self.problem = "connecting"
        self._broker = broker
        self._asker = Asker(broker)
        self._enable = enable

    async def run(self) -> None:
        """Until cancelled; a broker that goes away is waited for."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen_on())
            group.create_task(self._every(QUEUES_EVERY_S, self._look_at_queues))
            if self._enable:
                group.create_task(self._every(ENABLE_EVERY_S, self._enable_events))

    async def ask(self, command: str, arguments: Mapping[str, Any], node: str | None = None) -> Answers:
        destination = None if node is None else [node]
        return await self._asker.ask(command, arguments, destination=destination, timeout_s=ASK_S)

    async def tell(self, command: str, arguments: Mapping[str, Any], node: str | None = None) -> None:
        await self._asker.tell(command, arguments, destination=None if node is None else [node])

    async def revoke(self, uuid: str, *, terminate: bool) -> Answers:
        """The task never starts, and with `terminate` ends if it runs."""
        now = time()
        await self._broker.revoke([Revoke(uuid, now, now + REVOKE_S)])
        arguments: dict[str, Any] = {"task_id": [uuid], "recorded": True}
        if terminate:
            arguments |= {"terminate": True, "signal": "SIGTERM"}
        return await self.ask("revoke", arguments)

    async def _listen_on(self) -> None:
        while True:
            try:
                mark = await self._broker.coordination.raise_clock(0)
                self.model.receiver.clock.adjust(mark)
                await self._listen()
            except BrokerError as error:
                self.problem = str(error)
            await asyncio.sleep(RECONNECT_S)

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        turn_ends = loop.time() + TURN_S
        async with self._broker.subscribe(EVENT_EXCHANGE, ["#"]) as heard:
            self.problem = ""
            async for broadcast in heard:
                self.model.take(broadcast.body, time())
                if loop.time() > turn_ends:
                    await asyncio.sleep(0)
                    turn_ends = loop.time() + TURN_S

    async def _look_at_queues(self) -> None:
        self.queues = await self._broker.queues()

    async def _enable_events(self) -> None:
        await self._asker.tell("enable_events")

    async def _every(self, seconds: float, work: Any) -> None:
        while True:
            try:
                await work()
            except BrokerError as error:
                self.problem = str(error)
            await asyncio.sleep(seconds)
