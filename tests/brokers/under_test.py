"""BrokerUnderTest: what the contract suite needs to know about one broker, and words to speak of it.

A broker's own test file gives the suite a `BrokerUnderTest`: the address of an empty store, and
what the transport declares. Everything else is reached through the registries, as users do.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import pytest
from msgspec.structs import replace

from tests.waiting import DEADLINE_S, POLL_S, wait_until
from umbel.backends.interface import Backend
from umbel.backends.registry import open_backend
from umbel.brokers.interface import Broker, BrokerSettings, Capabilities, Claim, Delivery, Producer
from umbel.brokers.registry import open_broker, open_producer
from umbel.errors import NotSupported
from umbel.wire.message import Message, Outgoing, StoredResult

T = TypeVar("T")

QUEUE = "celery"
OWNER = "ada@here.1"
PEER = "bob@here.2"
SHORT_LEASE_S = 0.3
RUN_S = 240.0  # a command of RabbitMQ's may take 20 s on a busy machine
LONG_S = 30.0  # nobody waits that long: what returns before it was woken


@dataclass(frozen=True)
class BrokerUnderTest:
    settings: BrokerSettings
    capabilities: Capabilities
    pace: float = 1.0  # how much longer than elsewhere the shortest times are, where each call takes long
    results_url: str = ""  # of a store for results, where the broker has none
    _opened: list[Producer | Backend] = field(default_factory=list)

    @asynccontextmanager
    async def open(self, **changes: Any) -> AsyncIterator[Broker]:
        broker = open_broker(replace(self.settings, **changes))
        try:
            await broker.open()
            yield broker
        finally:
            await broker.close()

    def producer(self, **changes: Any) -> Producer:
        producer = open_producer(replace(self.settings, **changes))
        self._opened.append(producer)
        return producer

    def backend(self, **changes: Any) -> Backend:
        backend = open_backend(self.results_url or self.settings.url, replace(self.settings, **changes))
        self._opened.append(backend)
        address_of(backend)
        return backend

    def close(self) -> None:
        for opened in self._opened:
            opened.close()


def address_of(backend: Backend) -> str:
    """Where results must be sent to reach the backend; "" where they are looked up."""
    address = getattr(backend, "reply_to", "")
    assert isinstance(address, str)
    return address


def read_results(backend: Backend, task_ids: Sequence[str]) -> Mapping[str, StoredResult]:
    """What was stored before this was called; results that are sent may still be on their way."""
    if address_of(backend):
        wait_until(lambda: len(backend.read(task_ids)) == len(task_ids), what=f"the results of {task_ids}")
    return backend.read(task_ids)


P = ParamSpec("P")


def needs(capability: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Run the test where the broker declares the capability; elsewhere expect its refusal."""

    def decorate(test: Callable[P, None]) -> Callable[P, None]:
        @wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            under_test = kwargs["under_test"]
            assert isinstance(under_test, BrokerUnderTest)
            if getattr(under_test.capabilities, capability):
                test(*args, **kwargs)
                return
            with pytest.raises(NotSupported):
                test(*args, **kwargs)
            assert under_test.capabilities.reasons[capability]

        return run

    return decorate


def run(scenario: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(RUN_S):
            return await scenario

    return asyncio.run(bounded())


async def eventually(
    ask: Callable[[], Awaitable[T | None]], *, what: str, deadline_s: float = DEADLINE_S
) -> T:
    """`tests.waiting.wait_until` for questions that must be awaited."""
    loop = asyncio.get_running_loop()
    ends, pause = loop.time() + deadline_s, asyncio.Event()
    while not (answer := await ask()):
        assert loop.time() < ends, f"waited {deadline_s:g} s in vain for {what}; last seen: {answer!r}"
        try:
            async with asyncio.timeout(POLL_S):
                await pause.wait()
        except TimeoutError:
            continue
    return answer


def message(text: str, *, priority: int = 0, reply_to: str = "") -> Message:
    return Message(
        headers=b'{"task": "t"}',
        body=text.encode(),
        priority=priority,
        correlation_id=text,
        reply_to=reply_to,
    )


def outgoing(
    *texts: str, queue: str = QUEUE, priority: int = 0, not_before: float = 0.0, reply_to: str = ""
) -> list[Outgoing]:
    return [
        Outgoing(queue, message(text, priority=priority, reply_to=reply_to), not_before) for text in texts
    ]


def result(task_id: str, status: str = "SUCCESS", value: str = "") -> StoredResult:
    """A result as workers store it: some stores keep nothing but this map, and read the status in it."""
    payload: dict[str, object] = {
        "status": status,
        "result": value,
        "traceback": None,
        "children": [],
        "task_id": task_id,
    }
    return StoredResult(task_id, status, json.dumps(payload, ensure_ascii=False).encode())


def texts(deliveries: Iterable[Delivery]) -> list[str]:
    return [delivery.message.body.decode() for delivery in deliveries]


async def take(
    broker: Broker, limit: int = 100, *, owner: str = OWNER, queues: Sequence[str] = (QUEUE,)
) -> Claim:
    return await broker.claim(owner, queues, limit)


async def take_in_time(
    broker: Broker, count: int, *, what: str, queues: Sequence[str] = (QUEUE,), owner: str = OWNER
) -> list[Delivery]:
    """So many messages, of which not all may be there at once."""
    taken: list[Delivery] = []

    async def enough() -> bool:
        taken.extend((await take(broker, queues=queues, owner=owner)).deliveries)
        return len(taken) >= count

    await eventually(enough, what=what)
    return taken


async def take_one(broker: Broker, *, owner: str = OWNER) -> Delivery:
    (delivery,) = (await take(broker, 1, owner=owner)).deliveries
    return delivery
