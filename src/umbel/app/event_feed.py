"""EventFeed: the events of tasks as they happen, for the clients of one event loop.

All listeners share one subscription, on a separate connection: it opens with the first listener and closes
with the last. Each listener has a queue of EVENTS_MAX events; a queue that is not read loses its oldest
events.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from umbel.brokers.interface import Broker, BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.errors import ResultTimeout, WireError
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.protocol.delivery.states import FAILURE, REVOKED, SUCCESS
from umbel.wire.event import decode_events

if TYPE_CHECKING:
    from umbel.app.app import App

EVENTS_MAX = 1000
FINAL_EVENT_S = 0.5  # how long the final event of a task is waited for after its end
_ENDINGS = {SUCCESS: "task-succeeded", FAILURE: "task-failed", REVOKED: "task-revoked"}
_FINAL = frozenset({*_ENDINGS.values(), "task-rejected"})

Event = dict[str, Any]


class EventSubscription:
    """The events of one task that were received and not read yet."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self._arrived = asyncio.Event()

    def put(self, event: Event) -> None:
        """Add an event; the oldest is dropped at EVENTS_MAX."""
        self._events.append(event)
        self._arrived.set()

    async def next(self) -> Event:
        """Wait for the next event and remove it."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()


class EventFeed:
    """The shared subscription of one loop. `broker_settings` are those of the app's broker."""

    def __init__(self, broker_settings: Callable[[], BrokerSettings]) -> None:
        self._broker_settings = broker_settings
        self._listening: dict[str, set[EventSubscription]] = {}
        self._opening = asyncio.Lock()
        self._receiving: asyncio.Task[None] | None = None
        self._began: asyncio.Future[None] | None = None  # done when the subscription is there

    @asynccontextmanager
    async def listen(self, task_id: str) -> AsyncIterator[EventSubscription]:
        """Collect the events of a task inside this block, from the moment the subscription is open."""
        events = EventSubscription()
        async with self._opening:
            self._listening.setdefault(task_id, set()).add(events)
            try:
                await self._subscribed()
            except BaseException:
                self._leave(task_id, events)
                if not self._listening:
                    await self.close()
                raise
        try:
            yield events
        finally:
            self._leave(task_id, events)
            if not self._listening:
                await self.close()

    async def close(self) -> None:
        """Stop receiving and close the connection."""
        receiving, self._receiving = self._receiving, None
        if receiving is not None:
            receiving.cancel()
            await asyncio.wait([receiving])

    def _leave(self, task_id: str, events: EventSubscription) -> None:
        listening = self._listening[task_id]
        listening.discard(events)
        if not listening:
            del self._listening[task_id]

    async def _subscribed(self) -> None:
        """Subscribe, if no listener has, or the listener that began it has left before it was done."""
        if self._receiving is None or self._began is None or self._receiving.done():
            broker = await asyncio.to_thread(open_broker, self._broker_settings())
            self._began = asyncio.get_running_loop().create_future()
            self._receiving = asyncio.create_task(self._receive(broker, self._began))
        receiving = self._receiving
        await asyncio.wait([receiving, self._began], return_when=asyncio.FIRST_COMPLETED)
        if receiving.done():
            receiving.result()

    async def _receive(self, broker: Broker, began: asyncio.Future[None]) -> None:
        try:
            await broker.open()
            async with broker.subscribe(EVENT_EXCHANGE, ["task.#"]) as subscription:
                began.set_result(None)
                async for broadcast in subscription:
                    self._take(broadcast.body)
        finally:
            await broker.close()

    def _take(self, body: bytes) -> None:
        with suppress(WireError):  # not an event, whatever program sent it
            for event in decode_events(body):
                for events in self._listening.get(str(event.get("uuid")), ()):
                    events.put(event)


async def events_of(
    app: "App", task_id: str, wait_for_end: Callable[[], Awaitable[str]], timeout_s: float | None
) -> AsyncIterator[Event]:
    """The events of the task until it has ended. If the final event is missing, one is made from the result.

    ResultTimeout: the task did not end in time.
    """
    loop = asyncio.get_running_loop()
    deadline = None if timeout_s is None else loop.time() + timeout_s
    async with app.clients.here().events.listen(task_id) as events:
        ended = asyncio.ensure_future(wait_for_end())
        try:
            while True:
                event = await _next(events, ended, deadline, f"{task_id} did not end within {timeout_s} s")
                if event is None:
                    status = ended.result()
                    yield {"type": _ENDINGS.get(status, "task-failed"), "uuid": task_id, "state": status}
                    return
                yield event
                if event["type"] in _FINAL:
                    return
        finally:
            ended.cancel()
            await asyncio.wait([ended])


async def _next(
    events: EventSubscription, ended: asyncio.Future[str], deadline: float | None, too_late: str
) -> Event | None:
    """The next event; None when the task has ended and no event arrived within FINAL_EVENT_S."""
    coming = asyncio.ensure_future(events.next())
    try:
        async with asyncio.timeout_at(deadline):
            both: set[asyncio.Future[Any]] = {coming, ended}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                await asyncio.wait([coming], timeout=FINAL_EVENT_S)
    except TimeoutError:
        raise ResultTimeout(f"task {too_late}") from None
    finally:
        if not coming.done():
            coming.cancel()
    return coming.result() if coming.done() and not coming.cancelled() else None
