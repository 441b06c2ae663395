"""Stranger: somebody on the broker who answers what workers and clients ask, with what the corpus has.

It runs on a thread with a loop and a connection of its own. It answers a `hello` and a `ping` that
names it with every hostile reply that there is, before the one reply that is in order; and it keeps
what workers answer to the address ADDRESS.
"""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import UUID

from tests.corpus.case import Case
from tests.corpus.delivering import REPLIES, REQUESTS, Delivering
from umbel.brokers.interface import Broadcast, BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.errors import WireError
from umbel.wire.control import decode_reply, decode_request, encode_reply

NODE = "stranger@corpus"
ADDRESS = "corpus"  # where the requests of the corpus want their answers
T = TypeVar("T")


class Stranger:
    def __init__(self, broker: str, delivering: Delivering, replies: Sequence[Case]) -> None:
        self.answered: dict[str, Any] = {}  # ticket -> what a worker answered
        self.greeted = threading.Event()
        self._delivering = delivering
        self.replies = replies
        self._loop = asyncio.new_event_loop()
        self._broker = open_broker(BrokerSettings(broker))
        self._thread = threading.Thread(target=self._loop.run_forever, name="stranger")
        self._listening: list[asyncio.Task[None]] = []

    def do(self, what: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(60)

    @property
    def broker(self) -> Any:
        return self._broker

    def __enter__(self) -> Self:
        self._thread.start()
        self.do(self._begin())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _begin(self) -> None:
        await self._broker.open()
        opened = [asyncio.Event(), asyncio.Event()]
        listeners = (self._requests(opened[0]), self._answers(opened[1]))
        self._listening = [asyncio.create_task(listener) for listener in listeners]
        for one in opened:
            await one.wait()

    async def _end(self) -> None:
        for one in self._listening:
            one.cancel()
        await asyncio.wait(self._listening)
        await self._broker.close()

    async def _requests(self, opened: asyncio.Event) -> None:
        async with self._broker.subscribe(REQUESTS, [NODE]) as requests:
            opened.set()
            async for broadcast in requests:
                try:
                    request = decode_request(broadcast.headers, broadcast.body)
                except WireError:
                    continue
                asked = request.reply_to
                if asked is None or not _is_of_an_asker(asked.routing_key):
                    continue
                if request.method not in ("hello", "ping"):
                    continue
                if request.method == "ping" and NODE not in (request.destination or ()):
                    continue
                said = [case for case in self.replies if case.to == request.method]
                await asyncio.to_thread(self._delivering.reply, asked.routing_key, said)
                headers, body = encode_reply(NODE, {"ok": "pong"}, request.ticket, 1)
                await self._broker.broadcast(
                    [Broadcast(REPLIES, asked.routing_key, body, headers)], ttl_s=60.0
                )
                self.greeted.set()

    async def _answers(self, opened: asyncio.Event) -> None:
        async with self._broker.subscribe(REPLIES, [ADDRESS]) as replies:
            opened.set()
            async for broadcast in replies:
                reply = decode_reply(broadcast.headers, broadcast.body)
                self.answered[reply.ticket] = reply.value


def _is_of_an_asker(routing_key: str) -> bool:
    """Requests of the corpus want their answers elsewhere."""
    try:
        return str(UUID(routing_key)) == routing_key
    except ValueError:
        return False
