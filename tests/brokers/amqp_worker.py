"""Claims with the least server that a consumer can talk to; RabbitMQ itself is in `test_amqp.py`."""

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any, cast

from umbel.brokers.amqp.claims import Claims
from umbel.brokers.amqp.consumer import Consumer
from umbel.brokers.amqp.envelope import NO_STATE, MessageState, encode
from umbel.brokers.amqp.frames import Incoming, Method
from umbel.brokers.amqp.link import Link
from umbel.brokers.amqp.streams import StartsView
from umbel.errors import BrokerError
from umbel.wire.message import Message

ADA, BOB = "ada", "bob"
LEASE_S = 1000.0


class Channel:
    """Hands over what waits in its queue, up to the limit, whenever it is asked for something."""

    def __init__(self, server: "Server") -> None:
        self.number = 1
        self.error: BrokerError | None = None
        self.on_delivery: Any = None
        self.on_end: Any = None
        self.methods: list[Method] = []
        self._server = server
        self._queue = ""
        self._limit = self._handed = 0

    async def call(self, method: Method, *fields: Any) -> Incoming:
        return await self.ask(method, *fields)

    def ask(self, method: Method, *fields: Any) -> asyncio.Future[Incoming]:
        self.methods.append(method)
        answer: asyncio.Future[Incoming] = asyncio.get_running_loop().create_future()
        if (refused := self._server.refused.get(fields[1] if len(fields) > 1 else "")) is not None:
            answer.set_exception(refused)
            return answer
        answer.set_result(Incoming(1, method, self._do(method, fields)))
        return answer

    async def answer(self, future: asyncio.Future[Incoming]) -> Incoming:
        return await future

    def send(self, data: bytes) -> None:
        pass

    def end(self, error: BrokerError) -> None:
        self.error = error
        self.on_end(error)

    def _do(self, method: Method, fields: tuple[Any, ...]) -> tuple[Any, ...]:
        if method is Method.BASIC_QOS:
            self._limit = fields[1]
        elif method is Method.BASIC_CONSUME:
            self._queue = fields[1]
            self._server.consumed[self._queue] = self
        elif method is Method.QUEUE_DECLARE:
            if self._server.silent_questions:
                self._server.silent_questions -= 1
            else:
                self.hand_over()
            return fields[1], len(self._server.queues[fields[1]]), 1
        return ()

    def hand_over(self) -> None:
        waiting = self._server.queues[self._queue]
        while waiting and self._handed < self._limit:
            self._handed += 1
            text, priority, redelivered, mark = waiting.popleft()
            properties = encode(Message(b"{}", b"", priority=priority, correlation_id=text), mark)
            fields = ("", self._handed, redelivered, "", "")
            self.on_delivery(Incoming(1, Method.BASIC_DELIVER, fields, properties, text.encode()))


class Server:
    def __init__(self) -> None:
        self.error: BrokerError | None = None
        self.channels: list[Channel] = []
        self.consumed: dict[str, Channel] = {}
        self.refused: dict[object, BrokerError] = {}
        self.silent_questions = 0  # so many are answered before anything is handed over
        self.queues: dict[str, deque[tuple[str, int, bool, MessageState]]] = {}

    async def channel(self) -> Channel:
        self.channels.append(Channel(self))
        return self.channels[-1]

    def put(self, queue: str, *texts: str, priority: int = 0, mark: MessageState = NO_STATE) -> None:
        waiting = self.queues.setdefault(queue, deque())
        waiting.extend((text, priority, False, mark) for text in texts)

    def questions(self) -> int:
        return sum(channel.methods.count(Method.QUEUE_DECLARE) for channel in self.channels)


class Worker:
    """Claims with a server, and what they told."""

    def __init__(self) -> None:
        self.server = Server()
        self.deleted: list[tuple[str, set[object]]] = []
        self.starts = StartsView()
        self.claims = Claims(
            cast(Link, self.server),
            LEASE_S,
            starts=self.starts,
            needs_own_limit=lambda queue: False,
            on_deleted=lambda queue, tags: self.deleted.append((queue, set(tags))),
        )

    async def take(self, queues: str, limit: int, *, owner: str = ADA) -> list[str]:
        for queue in queues:
            self.server.put(queue)
        taken = await self.claims.claim(owner, list(queues), limit)
        return [one.message.body.decode() for one in self.claims.deliver(owner, taken)]

    def consumer(self, queue: str) -> Consumer:
        (found,) = (one for one in self.claims.consumers() if one.queue == queue)
        return found


class Loop(asyncio.SelectorEventLoop):
    """Its time can be moved on."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


def run(scenario: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(scenario)


async def skip(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    loop.skipped_s += seconds
    for _ in range(3):  # what is due now has its turn, and what that wakes
        turn = asyncio.Event()
        loop.call_soon(turn.set)
        await turn.wait()
