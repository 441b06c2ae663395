"""ControlClient: sends control requests and collects the replies.

The time for replies begins when the request was sent. Sending, which needs a reply address and a broker that
takes the request, has the same time again: on a busy machine it takes a moment, which must not shorten the
time for replies. Each request has a separate reply address, which is removed when the request ends; a reply
with an unknown ticket is dropped. At most ASKED_MAX requests are under way at once; further ones wait for
their turn, within the time for sending.
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from umbel.brokers.interface import Broadcast, FanOut
from umbel.clock import cluster_now
from umbel.errors import BrokerUnavailable, ConfigurationError, NoClusterId, WireError
from umbel.protocol.pidbox import (
    ANSWERS_S,
    Answers,
    Collection,
    ReplyTo,
    Request,
    is_for_member,
    pattern_problem,
)
from umbel.wire.control import REPLY_EXCHANGE, REQUEST_EXCHANGE, decode_reply, encode_request
from umbel.wire.signing import Signer

log = logging.getLogger("umbel.control")

ASKED_MAX = 16
UNANSWERED_TTL_S = 60.0
REPLIES_MAX_BYTES = 256 * 2**20  # of all replies to one request


class ControlClient:
    """Asks the workers of one broker; used by commands, apps, the dashboard and workers."""

    def __init__(self, broker: FanOut) -> None:
        self._broker = broker
        self._clock = 0
        self._turns = asyncio.Semaphore(ASKED_MAX)
        self._ending: set[asyncio.Task[None]] = set()  # at most ASKED_MAX run, and as many clean up

    async def ask(
        self,
        method: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        destination: Sequence[str] | None = None,
        pattern: str | None = None,
        matcher: str | None = None,
        timeout_s: float | None = None,
        limit: int | None = None,
        unless: str = "",
        expires: bool = True,
        signed: bool = True,
    ) -> Answers:
        """Send a request and collect replies until the time is over, or until all expected nodes have
        answered.

        Expected are every node of `destination`, or `limit` nodes, or all members, where the answers name
        them, or as many as received the request, where the broker counts them. Of the members, the node
        `unless` is not waited for: a node that starts knows only itself. Without `timeout_s` the time depends
        on what is known of the expected nodes (`Collection`). A request that does not expire is also answered
        by a node whose clock is behind. `signed`: sign it, where there are keys. Raises BrokerUnavailable if
        it cannot be sent in time.
        """
        address = ReplyTo(REPLY_EXCHANGE, str(uuid4()))
        request = make_request(method, arguments, destination, pattern, matcher, str(uuid4()), address)
        collection = Collection(
            timeout_s=timeout_s,
            expected=request.destination or (),
            limit=limit,
            matches=lambda known: known.node != unless and is_for_member(request, known),
        )
        most_s = ANSWERS_S if timeout_s is None else timeout_s
        limits = _Limits(most_s)
        collecting = self._collect(request, address, collection, limits, expires=expires, signed=signed)
        if not await self._within(limits, collecting) and limits.waits_for:
            raise BrokerUnavailable(
                f"the request {method!r} could not be sent within {most_s:g} s, "
                f"spent on {limits.waits_for}; check the broker, or raise the timeout"
            )
        return collection.answers()

    async def _within(self, limits: "_Limits", collecting: Coroutine[Any, Any, None]) -> bool:
        """Return whether the collecting ended in time. Its clean-up does not keep the caller waiting."""
        task = asyncio.create_task(collecting)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        try:
            await asyncio.wait([task, limits.over], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            limits.end()
        if task.done():
            await task
            return True
        task.cancel()
        task.add_done_callback(_heed)
        return False

    async def _collect(
        self,
        request: Request,
        address: ReplyTo,
        collection: Collection,
        limits: "_Limits",
        *,
        expires: bool,
        signed: bool,
    ) -> None:
        """Open a reply address, send the request, and collect replies until all expected have come."""
        loop = asyncio.get_running_loop()
        async with self._turns:
            limits.waits_for = "opening a reply address"
            async with self._broker.subscribe(REPLY_EXCHANGE, [address.routing_key]) as replies:
                limits.waits_for = "handing it to the broker"
                if expires:
                    request = request.replaced(expires_at=cluster_now() + limits.most_s)
                receivers = await self._send(request, limits.most_s, signed=signed)
                limits.waits_for = ""
                collection.sent(
                    loop.time(),
                    heard=receivers,
                    is_heard=receivers != 0 and self._broker.capabilities.reports_nobody,
                    to_all=request.destination is None and request.pattern is None,
                )
                limits.move(collection.deadline)
                if not collection.is_complete():
                    room_bytes = REPLIES_MAX_BYTES
                    async for broadcast in replies:
                        room_bytes -= len(broadcast.body)
                        if room_bytes < 0:
                            _log_excess(request.method)
                            break
                        self._take(broadcast, request.ticket, collection, loop.time())
                        if collection.is_complete():
                            break
                        limits.move(collection.deadline)

    async def tell(
        self,
        method: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        destination: Sequence[str] | None = None,
        pattern: str | None = None,
        matcher: str | None = None,
    ) -> int | None:
        """Send a request without replies; return how many nodes received it, where the broker knows."""
        request = make_request(method, arguments, destination, pattern, matcher)
        return await self._send(request, UNANSWERED_TTL_S)

    async def _send(self, request: Request, ttl_s: float, *, signed: bool = True) -> int | None:
        self._clock += 1
        headers, body = encode_request(
            request, self._clock, self._signer() if signed else None, cluster_now()
        )
        return await self._broker.broadcast([Broadcast(REQUEST_EXCHANGE, "", body, headers)], ttl_s=ttl_s)

    def _signer(self) -> Signer | None:
        """Return the signer, or None if the cluster's id is lost: read-only requests must still work."""
        with suppress(NoClusterId):
            return self._broker.signer
        return None

    def _take(self, broadcast: Broadcast, ticket: str, collection: Collection, now: float) -> None:
        try:
            reply = decode_reply(broadcast.headers, broadcast.body)
        except WireError as error:
            log.warning("control reply cannot be decoded; ignored", extra={"why": str(error)})
            return
        if reply.ticket in ("", ticket):
            collection.take(reply, now)


class _Limits:
    """The deadline of a request, and what it waits for. The deadline moves when the request was sent."""

    def __init__(self, most_s: float) -> None:
        self.most_s = most_s
        self.waits_for = f"waiting for one of {ASKED_MAX} questions to end"  # "": replies
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self._timer = self._loop.call_later(most_s, self._end)

    def move(self, deadline: float) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_at(deadline, self._end)

    def end(self) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


def _log_excess(method: str) -> None:
    fields = {"command": method, "limit_bytes": REPLIES_MAX_BYTES}
    log.warning("control replies exceed their limit; the rest is ignored", extra=fields)


def _heed(task: asyncio.Task[None]) -> None:
    """Retrieve an error of a request's clean-up, which concerns no caller."""
    if not task.cancelled():
        task.exception()


def make_request(
    method: str,
    arguments: Mapping[str, Any] | None,
    destination: Sequence[str] | None,
    pattern: str | None,
    matcher: str | None,
    ticket: str = "",
    reply_to: ReplyTo | None = None,
    expires_at: float = 0.0,
) -> Request:
    """Build a request; ConfigurationError for a pattern that cannot be matched."""
    if isinstance(destination, str):
        destination = [destination]
    if pattern and not matcher:
        matcher = "glob"
    request = Request(
        method,
        dict(arguments or {}),
        None if destination is None else tuple(destination),
        pattern,
        matcher if pattern else None,
        ticket,
        reply_to,
        expires_at,
    )
    if problem := pattern_problem(request):
        raise ConfigurationError(problem)
    return request
