"""Service: what the asynchronous broker and producer ask of Pub/Sub, over connections that stay open.

A call takes an idle connection or opens one; a connection whose answer was not read to its end is closed. No
link can be lost: each call stands alone, and a caller that gets BrokerUnavailable calls again. Pub/Sub cannot
tell whether it has a message already, so after a connection was cut the producer sends nothing again by
itself.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from umbel.brokers.gcpubsub import api, posts
from umbel.brokers.gcpubsub.api import Calls, Received, Topology, next_of
from umbel.brokers.gcpubsub.capabilities import CAPABILITIES
from umbel.brokers.gcpubsub.http import (
    READ_BYTES,
    REPLY_S,
    AcksRefused,
    Address,
    Answer,
    AnswerReader,
    Call,
    NotFound,
    Tokens,
    address_from_url,
    body_of,
    cut_off,
    encode_request,
    unreachable,
)
from umbel.brokers.gcpubsub.posts import DEAD, Names, Post
from umbel.brokers.interface import Attempt, BrokerSettings
from umbel.brokers.refusals import unsupported
from umbel.clock import cluster_now
from umbel.errors import BrokerRefused, BrokerSilent
from umbel.wire.message import Outgoing

# ---- link ------------------------------------------------------------------------------------------

IDLE_MAX = 16
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Link:
    """A pool of connections to Pub/Sub for asynchronous calls.

    HTTP/1.1 answers one request at a time, and a waiting pull has its connection for up to PULL_S. So each
    call in flight has a connection, and up to IDLE_MAX of them stay open afterwards.
    """

    def __init__(self, address: Address, tokens: Tokens, *, connect_timeout_s: float) -> None:
        self.address = address
        self._tokens = tokens
        self._timeout_s = connect_timeout_s
        self._idle: deque[_Streams] = deque()
        self._tls = address.tls_context()

    async def call(self, call: Call, *, timeout_s: float = REPLY_S) -> bytes:
        """Return the body of a successful answer; any other answer raises a BrokerError."""
        token = self._tokens.known
        if token is None:
            token = await asyncio.to_thread(self._tokens.fetch)
        request = encode_request(call, self.address, token)
        streams = await self._connection()
        answer: Answer | None = None
        try:
            async with asyncio.timeout(timeout_s):
                streams[1].write(request)
                await streams[1].drain()
                answer = await self._read(streams[0])
        except (OSError, TimeoutError) as error:
            raise unreachable(self.address, error, timeout_s) from None
        finally:
            self._put_back(streams, answer)
        return body_of(answer, call, self.address)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop()[1].close()

    async def _connection(self) -> _Streams:
        while self._idle:
            streams = self._idle.pop()
            if not streams[0].at_eof() and not streams[1].is_closing():
                return streams
            streams[1].close()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.open_connection(self.address.host, self.address.port, ssl=self._tls)
        except (OSError, TimeoutError) as error:
            raise unreachable(self.address, error, self._timeout_s) from None

    async def _read(self, reader: asyncio.StreamReader) -> Answer:
        answers = AnswerReader()
        while True:
            data = await reader.read(READ_BYTES)
            answer = answers.feed(data) if data else answers.end()
            if answer is not None:
                return answer
            if not data:
                raise cut_off(self.address)

    def _put_back(self, streams: _Streams, answer: Answer | None) -> None:
        if answer is not None and answer.keeps_open and len(self._idle) < IDLE_MAX:
            self._idle.append(streams)
        else:
            streams[1].close()


# ---- service ---------------------------------------------------------------------------------------

PULL_S = 120.0  # Pub/Sub ends an idle pull earlier
EMULATOR_PULL_S = 3  # it does not notice that a waiting client has gone, and would still deliver to it
ACK_ATTEMPTS = 3
_AT_ONCE = 8


class Service:
    """Creating, sending and receiving, over one pool of connections.

    Topics and subscriptions are created by one task at a time, so that concurrent senders to a new queue make
    each call once.
    """

    def __init__(self, settings: BrokerSettings) -> None:
        self.address = address_from_url(settings.url)
        self.project = self.address.project
        self.link = Link(self.address, Tokens(self.address), connect_timeout_s=settings.connect_timeout_s)
        self.topology = Topology(settings, self.address)
        self._making = asyncio.Lock()

    @property
    def names(self) -> Names:
        """The topics and subscriptions of queues."""
        return self.topology.names

    @property
    def cut_off_s(self) -> float:
        """How long to wait for pulls before they are cancelled. Pub/Sub itself notices a closed connection at
        once.
        """
        return EMULATOR_PULL_S if self.address.is_emulator else 0.0

    def close(self) -> None:
        """Close the idle connections."""
        self.link.close()

    # -- making ----------------------------------------------------------------------------------

    async def make_queue(self, queue: str) -> int:
        """Create the queue's topic and subscription if needed; return the ack deadline of the
        subscription.
        """
        if queue not in self.topology.made:
            await self._make(self.topology.make_queue(queue))
        return self.topology.made[queue]

    async def make_dead(self) -> None:
        """Create topic and subscription of the dead letters if needed."""
        if DEAD not in self.topology.topics:
            await self._make(self.topology.make_dead())

    async def make_topic(self, topic: str) -> None:
        """Create the topic if needed."""
        if topic not in self.topology.topics:
            await self._make(self.topology.make_topic(topic))

    async def make_again(self, topic: str) -> None:
        """Create a deleted topic and the subscriptions of its queues again."""
        await self._make(self.topology.make_again(topic))

    async def _make(self, calls: Calls) -> None:
        async with self._making:
            answer: bytes | BrokerRefused | None = None
            while (call := next_of(calls, answer)) is not None:
                try:
                    answer = await self.link.call(call)
                except BrokerRefused as refused:
                    answer = refused

    # -- sending ---------------------------------------------------------------------------------

    async def make_for(self, batch: Sequence[Outgoing]) -> dict[int, str]:
        """Create the queues of these messages if needed; return why some cannot be created, by their
        places.
        """
        refused: dict[int, str] = {}
        problems: dict[str, str] = {}
        for place, outgoing in enumerate(batch):
            if outgoing.exchange or outgoing.queue in self.topology.made:
                continue
            if outgoing.queue not in problems:
                try:
                    await self.make_queue(outgoing.queue)
                    continue
                except BrokerRefused as error:
                    problems[outgoing.queue] = str(error)
            refused[place] = problems[outgoing.queue]
        return refused

    async def try_send(self, sent: Sequence[Post]) -> dict[int, str]:
        """Publish; return which posts were refused, by their places, and why.

        The requests are sent concurrently. An error of one cancels the others, whose messages may have
        arrived.
        """
        refused: dict[int, str] = {}
        turns = asyncio.Semaphore(_AT_ONCE)

        async def send(places: list[int]) -> None:
            async with turns:
                why = await self._send([sent[place] for place in places])
            refused.update({places[nth]: text for nth, text in why.items()})

        await run_together([send(places) for places in posts.requests(sent)])
        return refused

    async def _send(self, sent: list[Post]) -> Mapping[int, str]:
        topic = sent[0].topic
        was_made = topic in self.topology.topics
        try:
            await self.link.call(api.publish(self.project, sent))
        except NotFound:
            if not was_made:
                return {place: posts.unbound_post(post) for place, post in enumerate(sent)}
            await self.make_again(topic)  # it was deleted
            await self.link.call(api.publish(self.project, sent))
        except BrokerRefused as refused:
            if len(sent) == 1:
                return {0: str(refused)}
            found: dict[int, str] = {}
            for place, post in enumerate(sent):  # one by one, to find out which is refused
                if why := await self._send([post]):
                    found[place] = why[0]
            return found
        return {}

    # -- receiving -------------------------------------------------------------------------------

    async def pull(self, subscription: str, count: int, *, waits: bool) -> list[Received]:
        """Take up to `count` messages; with `waits`, wait for the first until the pull times out."""
        within_s = EMULATOR_PULL_S if waits and self.address.is_emulator else None
        call = api.pull(self.project, subscription, count, waits=waits, within_s=within_s)
        try:
            return api.read_pulled(await self.link.call(call, timeout_s=PULL_S if waits else REPLY_S))
        except BrokerSilent:
            if waits:
                return []
            raise

    async def acknowledge(self, subscription: str, ack_ids: Sequence[str]) -> frozenset[str]:
        """Acknowledge deliveries; return those that were too late, which only exactly-once subscriptions
        report.

        Such a subscription may also ask to repeat some of them. Those that it has not accepted after
        ACK_ATTEMPTS count as too late: the message may be delivered again.
        """
        late: set[str] = set()
        for first in range(0, len(ack_ids), api.ACK_IDS_MAX):
            portion = ack_ids[first : first + api.ACK_IDS_MAX]
            for attempt in range(ACK_ATTEMPTS):
                try:
                    await self.link.call(api.acknowledge(self.project, subscription, portion))
                    break
                except AcksRefused as refused:
                    late |= refused.late
                    portion = [ack_id for ack_id in portion if ack_id in refused.again]
                    if not portion or attempt == ACK_ATTEMPTS - 1:
                        late.update(portion)
                        break
        return frozenset(late)

    async def set_deadline(
        self, subscription: str, ack_ids: Sequence[str], deadline_s: int
    ) -> frozenset[str]:
        """Set the deadlines; return those that were lost already, which only exactly-once subscriptions
        report.
        """
        late: set[str] = set()
        for first in range(0, len(ack_ids), api.ACK_IDS_MAX):
            portion = ack_ids[first : first + api.ACK_IDS_MAX]
            try:
                await self.link.call(api.set_deadline(self.project, subscription, portion, deadline_s))
            except AcksRefused as refused:
                late |= refused.late
        return frozenset(late)


async def run_together(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all concurrently; the first error cancels the others and is raised."""
    if len(work) == 1:
        await work[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in work:
                group.create_task(coroutine)
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None


# ---- pubsub async producer -------------------------------------------------------------------------


class PubsubAsyncProducer:
    """The producer for asyncio applications.

    Pub/Sub cannot tell whether it has a message already. After a connection was cut before the answer nothing
    is sent again by itself: the message may have arrived, and would run twice.
    """

    repeats = False
    capabilities = CAPABILITIES
    hold_unique = release_unique = unsupported(CAPABILITIES.reasons["unique"])

    def __init__(self, settings: BrokerSettings) -> None:
        self._service = Service(settings)

    async def publish(self, batch: Sequence[Outgoing], attempt: Attempt) -> None:
        """Send task messages, confirmed on return. After an error, `attempt.is_out` tells whether some may
        have arrived.
        """
        if refused := await self._service.make_for(batch):
            raise BrokerRefused(f"cannot send a message: {refused[min(refused)]}")
        now = cluster_now()
        sent = [posts.task(outgoing, self._service.names, now) for outgoing in batch]
        attempt.is_out = True
        if refused := await self._service.try_send(sent):
            why = refused[min(refused)]
            raise BrokerRefused(f"cannot send a message: {why}", places=sorted(refused))

    async def close(self) -> None:
        """Close the idle connections."""
        self._service.close()

    def abandon(self) -> None:
        """Do nothing: the event loop is closed, and its connections are too."""
