"""Hub: changes, pushed to browsers.

Changes are collected ten times a second into numbered pushes, of which the last PUSHES_MAX are retained. A
client that reconnects names the last number it received, and gets all later changes merged into one push; a
client that missed more than is retained reloads. So a client costs no memory, and a slow one gets fewer and
larger pushes. A client that does not take a push for SLOW_S is dropped. Beyond `clients_max` no client is
accepted, nor one visitor beyond STREAMS_MAX. Every JUDGE_S the visitor is authenticated again.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from time import time

import msgspec
from starlette.types import Receive, Scope, Send

from umbel.monitor.cluster import KnownCluster
from umbel.monitor.model import Change

log = logging.getLogger("umbel.web")
PUSH_S = 0.1
FIGURES_S = 1.0
KEEP_ALIVE_S = 15.0
SLOW_S = 10.0
JUDGE_S = 15.0
PUSHES_MAX = 300
STREAMS_MAX = 50  # of one visitor
TOPICS = ("nodes", "tasks", "queues", "letters", "elections", "rates", "audit", "health")
Topics = Mapping[str, Change]


class Push(msgspec.Struct, frozen=True):
    """The changes of one interval, by topic."""

    number: int
    topics: Topics


class Hub:
    """The numbered pushes. Numbers begin with the time, so that a client of an earlier process reloads."""

    def __init__(self, cluster: KnownCluster, *, clients_max: int) -> None:
        self.dropped = 0
        self._streams: Counter[str] = Counter()  # by visitor
        self._clients_max = clients_max
        self._cluster = cluster
        self._number = int(time() * 1000)
        self._pushes: deque[Push] = deque(maxlen=PUSHES_MAX)
        self._forgotten = self._number  # pushes up to this number are no longer retained
        self._new = asyncio.Event()

    @property
    def number(self) -> int:
        """The number of the newest push."""
        return self._number

    @property
    def clients(self) -> int:
        """How many streams are open."""
        return self._streams.total()

    @property
    def is_full(self) -> bool:
        """Whether no more streams are accepted."""
        return self.clients >= self._clients_max

    def has_many_of(self, visitor: str) -> bool:
        """Return whether the visitor has as many streams open as are allowed."""
        return self._streams[visitor] >= STREAMS_MAX

    @contextmanager
    def counted(self, visitor: str) -> Iterator[None]:
        """Count a stream of the visitor while it is open."""
        self._streams[visitor] += 1
        try:
            yield
        finally:
            self._streams[visitor] -= 1
            self._streams += Counter()  # removes visitors without streams

    async def run(self) -> None:
        """Collect changes into pushes until cancelled."""
        loop = asyncio.get_running_loop()
        figures_at = loop.time()
        while True:
            await asyncio.sleep(PUSH_S)
            changes = self._cluster.model.changes
            if self.clients and loop.time() >= figures_at:
                changes.note("rates", "")
                figures_at = loop.time() + FIGURES_S
            found = changes.drain()
            if found:
                self._add(found)

    def _add(self, topics: Topics) -> None:
        if len(self._pushes) == PUSHES_MAX:
            self._forgotten = self._pushes[0].number
        self._number += 1
        self._pushes.append(Push(self._number, topics))
        self._new.set()
        self._new = asyncio.Event()

    def since(self, number: int) -> Topics | None:
        """Return what changed after that push, merged; None if it is no longer retained."""
        if number < self._forgotten or number > self._number:
            return None
        merged: dict[str, Change] = {}
        for push in reversed(self._pushes):
            if push.number <= number:
                break
            for topic, change in push.topics.items():
                later = merged.get(topic)
                merged[topic] = change if later is None else change.joined(later)
        return merged

    async def follow(self, last: int | None, topics: Collection[str]) -> AsyncIterator[bytes]:
        """Yield pushes as server-sent events, forever; a comment keeps an idle connection open."""
        seen = self._number if last is None else last
        yield b"retry: 2000\nid: %d\n\n" % (self._number if last is None else seen)
        while True:
            new = self._new
            found = self.since(seen)
            now = self._number
            if found is None:
                yield _event("reset", now, b"{}")
            else:
                yield b"".join(self._written(found, topics, now))
            seen = now
            await asyncio.sleep(PUSH_S)
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await new.wait()
            except TimeoutError:
                yield b": still here\n\n"

    def _written(self, found: Topics, topics: Collection[str], number: int) -> list[bytes]:
        return [
            _event(topic, number, self._data(topic, found[topic]))
            for topic in TOPICS
            if topic in found and (not topics or topic in topics)
        ]

    def _data(self, topic: str, change: Change) -> bytes:
        made: dict[str, Callable[[], object]] = {
            "tasks": lambda: {"count": change.count, "ids": change.names},
            "audit": lambda: {"ids": change.names},
            "rates": self._cluster.figures,
            "health": self._cluster.health,
        }
        return msgspec.json.encode(made.get(topic, lambda: {"names": change.names})())


class EventStream:
    """The response of a stream: an ASGI application, as it watches how fast the client reads.

    `still_known`: whether its visitor is still authenticated; a token may have ended since the stream was
    opened.
    """

    def __init__(
        self,
        hub: Hub,
        last: int | None,
        topics: Collection[str],
        *,
        visitor: str,
        still_known: Callable[[], Awaitable[bool]],
    ) -> None:
        self._hub, self._last, self._topics = hub, last, topics
        self._visitor, self._still_known = visitor, still_known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._hub.counted(self._visitor):
            writing = asyncio.create_task(self._write(send))
            leaving = asyncio.create_task(_gone(receive))
            judging = asyncio.create_task(self._judge())
            try:
                await asyncio.wait([writing, leaving, judging], return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _end(writing, leaving, judging)
            if not judging.cancelled():
                with suppress(TimeoutError, OSError):
                    async with asyncio.timeout(SLOW_S):
                        await send({"type": "http.response.body", "body": b""})

    async def _judge(self) -> None:
        """Return when the visitor is no longer authenticated."""
        while True:
            await asyncio.sleep(JUDGE_S)
            if not await self._still_known():
                return

    async def _write(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for part in self._hub.follow(self._last, self._topics):
            if part:
                try:
                    async with asyncio.timeout(SLOW_S):
                        await send({"type": "http.response.body", "body": part, "more_body": True})
                except TimeoutError:
                    self._hub.dropped += 1
                    return


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(ended, Exception) and not isinstance(ended, OSError):
            log.error(
                "event stream from the dashboard to a browser failed; the browser reconnects by itself",
                exc_info=ended,
            )


def _event(name: str, number: int, data: bytes) -> bytes:
    return b"event: %b\nid: %d\ndata: %b\n\n" % (name.encode(), number, data)
