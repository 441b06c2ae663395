"""Asker: sends control requests and collects the replies, with one deadline for everything.

Each question has its own reply address, which is removed when the question ends; a reply with a
ticket that nobody asked for is dropped. At most ASKED_MAX questions are under way at
once; the next ones wait for their turn, inside their own deadline.
"""

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any
from uuid import uuid4

from umbel.brokers.interface import Broadcast, FanOut
from umbel.clock import cluster_now
from umbel.errors import BrokerUnavailable, ConfigurationError, WireError
from umbel.protocol.pidbox import Answers, Collection, ReplyTo, Request, is_for_member, pattern_problem
from umbel.wire.control import REPLY_EXCHANGE, REQUEST_EXCHANGE, decode_reply, encode_request

log = logging.getLogger("umbel.control")

ASKED_MAX = 16
UNANSWERED_TTL_S = 60.0


class Asker:
    def __init__(self, broker: FanOut) -> None:
        self._broker = broker
        self._clock = 0
        self._turns = asyncio.Semaphore(ASKED_MAX)
        self._ending: set[asyncio.Task[None]] = set()  # at most ASKED_MAX run, and as many tidy up

    async def ask(
        self,
        method: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        destination: Sequence[str] | None = None,
        pattern: str | None = None,
        matcher: str | None = None,
        timeout_s: float = 1.0,
        limit: int | None = None,
        unless: str = "",
        expires: bool = True,
    ) -> Answers:
        """Ask and collect until the deadline, or until everyone who should has answered.

        That is: every node of `destination`, or `limit` nodes, or all members, where the answers
        tell who they are, or as many as heard it, where the broker counts them. Of the
        members, the node `unless` is not waited for: one that starts knows of itself alone. A request
        that does not expire is also answered to a node whose clock is behind.
        """
        loop = asyncio.get_running_loop()
        address = ReplyTo(REPLY_EXCHANGE, str(uuid4()))
        expires_at = cluster_now() + timeout_s if expires else 0.0
        request = make_request(
            method, arguments, destination, pattern, matcher, str(uuid4()), address, expires_at
        )
        collection = Collection(
            deadline=loop.time() + timeout_s,
            expected=request.destination or (),
            limit=limit,
            matches=lambda known: known.node != unless and is_for_member(request, known),
        )
        sent = asyncio.Event()
        collecting = self._collect(request, address, collection, sent, timeout_s)
        if not await self._within(timeout_s, collecting) and not sent.is_set():
            raise BrokerUnavailable(
                f"the request {method!r} could not be sent within {timeout_s:g} s; "
                "check the broker, or raise the timeout"
            )
        return collection.answers()

    async def _within(self, timeout_s: float, collecting: Coroutine[Any, Any, None]) -> bool:
        """Whether it was done in time. What tidies up behind it does not keep the caller waiting."""
        task = asyncio.create_task(collecting)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        try:
            await asyncio.wait([task], timeout=timeout_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
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
        sent: asyncio.Event,
        timeout_s: float,
    ) -> None:
        async with (
            self._turns,
            self._broker.subscribe(REPLY_EXCHANGE, [address.routing_key]) as replies,
        ):
            heard = await self._send(request, timeout_s)
            sent.set()
            if heard is not None and request.destination is None and request.pattern is None:
                collection.heard_by(heard)
            if not collection.is_complete():
                async for broadcast in replies:
                    self._take(broadcast, request.ticket, collection)
                    if collection.is_complete():
                        break

    async def tell(
        self,
        method: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        destination: Sequence[str] | None = None,
        pattern: str | None = None,
        matcher: str | None = None,
    ) -> int | None:
        """Send a request that nobody answers; how many heard it, where the broker knows."""
        request = make_request(method, arguments, destination, pattern, matcher)
        return await self._send(request, UNANSWERED_TTL_S)

    async def _send(self, request: Request, ttl_s: float) -> int | None:
        self._clock += 1
        headers, body = encode_request(request, self._clock, self._broker.keyring, cluster_now())
        return await self._broker.broadcast([Broadcast(REQUEST_EXCHANGE, "", body, headers)], ttl_s=ttl_s)

    def _take(self, broadcast: Broadcast, ticket: str, collection: Collection) -> None:
        try:
            reply = decode_reply(broadcast.headers, broadcast.body)
        except WireError as error:
            log.warning("control reply cannot be decoded; ignored", extra={"why": str(error)})
            return
        if reply.ticket in ("", ticket):
            collection.take(reply)


def _heed(task: asyncio.Task[None]) -> None:
    """What goes wrong while a question that is over tidies up concerns nobody."""
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
    if isinstance(destination, str):
        destination = [destination]
    if pattern and not matcher:
        matcher = "glob"
    problem = "" if destination is not None else pattern_problem(pattern, matcher)
    if problem:
        raise ConfigurationError(problem)
    return Request(
        method,
        dict(arguments or {}),
        None if destination is None else tuple(destination),
        pattern,
        matcher if pattern else None,
        ticket,
        reply_to,
        expires_at,
    )
