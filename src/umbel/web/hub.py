"""Hub: pushes changes to browsers as server-sent events.

Changes are collected ten times a second into numbered pushes, and the newest PUSHES_MAX pushes are retained.
A client that reconnects names the last number that it received, and gets all later changes merged into one
push; a client that missed more than is retained gets the event `reset` and reloads its page. So a client
costs no memory, and a slow client gets fewer and larger pushes.

The name of an event is its topic, its data are JSON. `tasks`: {"count": n, "ids": [the newest, at most 100]};
`nodes`, `queues`, `letters`, `elections`: {"names": […]}; `rates`: the newest `Figures`; `health`: `Health`;
`audit`: {"ids": […]}.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from time import time

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from umbel.monitor.cluster import KnownCluster
from umbel.monitor.model import Change
from umbel.web.http import Refused, dashboard_of, visitor_of

PUSH_S = 0.1
FIGURES_S = 1.0
KEEP_ALIVE_S = 15.0
SLOW_S = 10.0  # a client that does not accept a push for so long is dropped
JUDGE_S = 15.0  # how often the visitor of a stream is authenticated again
PUSHES_MAX = 300
STREAMS_MAX = 50  # of one visitor
TOPICS = ("nodes", "tasks", "queues", "letters", "elections", "rates", "audit", "health")
Topics = Mapping[str, Change]


class Push(msgspec.Struct, frozen=True):
    """The changes of one interval, by topic."""

    number: int
    topics: Topics


class Hub:
    """The numbered pushes.

    Numbers begin with the time, so that the number of a client of an earlier process is never retained, and
    the client reloads.
    """

    def __init__(self, cluster: KnownCluster, *, clients_max: int) -> None:
        self.dropped = 0
        self.number = int(time() * 1000)  # of the newest push
        self._streams: Counter[str] = Counter()  # by visitor
        self._clients_max = clients_max
        self._cluster = cluster
        self._pushes: deque[Push] = deque(maxlen=PUSHES_MAX)
        self._forgotten = self.number  # pushes up to this number are not retained
        self._new = asyncio.Event()

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
            if found := changes.drain():
                self._add(found)

    def _add(self, topics: Topics) -> None:
        if len(self._pushes) == PUSHES_MAX:
            self._forgotten = self._pushes[0].number
        self.number += 1
        self._pushes.append(Push(self.number, topics))
        self._new.set()
        self._new = asyncio.Event()

    def since(self, number: int) -> Topics | None:
        """Return what changed after that push, merged; None if it is not retained."""
        if number < self._forgotten or number > self.number:
            return None
        merged: dict[str, Change] = {}
        for push in reversed(self._pushes):
            if push.number <= number:
                break
            for topic, change in push.topics.items():
                later = merged.get(topic)
                merged[topic] = change if later is None else change.joined(later)
        return merged

    async def follow(
        self, last: int | None, topics: Collection[str], still_known: Callable[[], Awaitable[bool]]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the pushes after `last` as server-sent events, until the visitor is no longer authenticated.

        Every JUDGE_S `still_known` is asked, because a session or token may have ended since the stream was
        opened. A comment keeps an idle connection open.
        """
        loop = asyncio.get_running_loop()
        judge_at = loop.time() + JUDGE_S
        sent = self.number if last is None else last
        yield b"retry: 2000\nid: %d\n\n" % sent
        while True:
            new, changed = self._new, self.since(sent)
            sent = self.number
            yield _event("reset", sent, b"{}") if changed is None else self._events(changed, topics)
            await asyncio.sleep(PUSH_S)
            try:
                async with asyncio.timeout_at(min(loop.time() + KEEP_ALIVE_S, judge_at)):
                    await new.wait()
            except TimeoutError:
                yield b": still here\n\n"
            if loop.time() >= judge_at:
                if not await still_known():
                    return
                judge_at = loop.time() + JUDGE_S

    def _events(self, changed: Topics, topics: Collection[str]) -> bytes:
        return b"".join(
            _event(topic, self.number, self._data(topic, changed[topic]))
            for topic in TOPICS
            if topic in changed and (not topics or topic in topics)
        )

    def _data(self, topic: str, change: Change) -> bytes:
        data: Mapping[str, Callable[[], object]] = {
            "tasks": lambda: {"count": change.count, "ids": change.names},
            "audit": lambda: {"ids": change.names},
            "rates": self._cluster.figures,
            "health": self._cluster.health,
        }
        return msgspec.json.encode(data.get(topic, lambda: {"names": change.names})())


class EventStream(StreamingResponse):
    """The response of a stream; it counts the stream, and drops a client that reads too slowly."""

    def __init__(
        self,
        hub: Hub,
        last: int | None,
        topics: Collection[str],
        *,
        visitor: str,
        still_known: Callable[[], Awaitable[bool]],
    ) -> None:
        self._hub, self._visitor = hub, visitor
        self._pushes = hub.follow(last, topics, still_known)
        headers = {"X-Accel-Buffering": "no"}  # or nginx holds pushes back
        super().__init__(self._pushes, media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            if message.get("more_body") and not message["body"]:
                return  # nothing has changed in the selected topics
            try:
                async with asyncio.timeout(SLOW_S):
                    await send(message)
            except TimeoutError:
                self._hub.dropped += 1
                raise ClientDisconnect from None

        # With a later version Starlette relies on errors of `send` alone, and not every server raises them.
        scope = {**scope, "asgi": {**scope.get("asgi", {}), "spec_version": "2.3"}}
        with self._hub.counted(self._visitor), suppress(OSError):  # the client closed the connection
            async with aclosing(self._pushes):
                await super().__call__(scope, receive, send_in_time)


async def stream(request: Request) -> Response:
    """Answer with changes as server-sent events; Refused if there are too many streams.

    `?topics=tasks,rates` selects topics. The header `Last-Event-ID`, which a browser sends when it
    reconnects, resumes a stream; so does `?since=` for the first connection of a page, with the number of the
    newest push when the page was rendered.
    """
    hub, visitor = dashboard_of(request).hub, visitor_of(request)
    if hub.is_full:
        detail = "too many pages are open; close some, and try again"
        raise Refused(503, "Too many streams", detail, retry_after="10")
    if hub.has_many_of(visitor.name):
        detail = f"{visitor.name} has {STREAMS_MAX} pages open; close some"
        raise Refused(429, "Too many streams", detail, retry_after="10")
    topics = [topic for topic in request.query_params.get("topics", "").split(",") if topic]
    unknown = [topic for topic in topics if topic not in TOPICS]
    if unknown:
        known = ", ".join(TOPICS)
        raise Refused(400, "Bad Request", f"unknown topic {unknown[0][:100]!r}; known: {known}")
    last = request.headers.get("last-event-id") or request.query_params.get("since", "")
    number = int(last) if last.isdecimal() and len(last) < 20 else None
    still_known = request.scope["umbel.still_known"]
    return EventStream(hub, number, frozenset(topics), visitor=visitor.name, still_known=still_known)


def _event(name: str, number: int, data: bytes) -> bytes:
    return b"event: %b\nid: %d\ndata: %b\n\n" % (name.encode(), number, data)
