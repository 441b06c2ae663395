"""Link: calls to Pub/Sub from an event loop, over connections that are kept open.

A call takes a connection that is idle, or opens one. One whose answer was not read to its end is closed.
There is no link that could be lost: each call stands alone, and who gets BrokerUnavailable calls again.
"""

import asyncio
from collections import deque

from umbel.brokers.gcpubsub.address import Address
from umbel.brokers.gcpubsub.api import Call
from umbel.brokers.gcpubsub.http import Answer, AnswerReader, encode_request
from umbel.brokers.gcpubsub.refusals import cut_off, error_of, unreachable
from umbel.brokers.gcpubsub.tokens import Tokens

IDLE_MAX = 16
REPLY_S = 30.0
_READ_BYTES = 256 * 1024
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Link:
    def __init__(self, address: Address, tokens: Tokens, *, connect_timeout_s: float) -> None:
        self.address = address
        self._tokens = tokens
        self._timeout_s = connect_timeout_s
        self._idle: deque[_Streams] = deque()
        self._tls = address.tls_context()

    async def call(self, call: Call, *, timeout_s: float = REPLY_S) -> bytes:
        """The body of the answer; BrokerError for any other answer than yes."""
        token = self._tokens.known
        if token is None:
            token = await asyncio.to_thread(self._tokens.fetch)
        request = encode_request(call.verb, self.address.authority, call.path, call.body, token)
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
        if answer.status >= 300:
            raise error_of(answer, self.address, call.what)
        return answer.body

    def close(self) -> None:
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
            data = await reader.read(_READ_BYTES)
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
