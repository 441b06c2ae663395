"""Waiting for results on an event loop: one connection for all waiters, while there are any."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from random import random
from typing import Any

import msgspec

from umbel.brokers.redis.address import Address
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.replies import checked
from umbel.errors import AccessRefused, BrokerSilent, BrokerUnavailable
from umbel.protocol.delivery.states import PENDING, READY_STATES
from umbel.protocol.retry import reconnect_wait_s
from umbel.wire.message import StoredResult
from umbel.wire.values import UNREADABLE

LIVELY_S = 5.0  # a wait looks again so often, which also shows whether the server is still there


class _Status(msgspec.Struct):
    status: str = PENDING


_status = msgspec.json.Decoder(_Status).decode


def decode_results(task_ids: Sequence[str], payloads: Sequence[bytes | None]) -> dict[str, StoredResult]:
    """The results that are there; what is no result map counts as not there."""
    found: dict[str, StoredResult] = {}
    for task_id, payload in zip(task_ids, payloads, strict=True):
        if payload is None:
            continue
        try:
            found[task_id] = StoredResult(task_id, _status(payload).status, payload)
        except UNREADABLE:
            continue
    return found


class Listener:
    def __init__(self, addresses: Sequence[Address], keys: Keys, *, timeout_s: float) -> None:
        self._keys = keys
        self._timeout_s = timeout_s
        self._bells: dict[asyncio.Event, frozenset[str]] = {}
        self._wanted = Counter[str]()
        self._link = Link(
            addresses,
            connect_timeout_s=timeout_s,
            reply_timeout_s=timeout_s,
            resp3=True,
            on_push=self._heard,
            on_lost=self._ring_all,
        )

    async def wait(self, task_ids: Sequence[str], timeout_s: float | None) -> dict[str, StoredResult]:
        keys = [self._keys.result(task_id) for task_id in task_ids]
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        bell = asyncio.Event()
        self._bells[bell] = frozenset(keys)
        self._wanted.update(keys)
        answered = False
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    bell.clear()
                    found = await self._look(task_ids, keys, deadline)
                    answered = True
                    left_s = deadline - time.monotonic()
                    if found or left_s <= 0:
                        return found
                    await _ring(bell, min(left_s, LIVELY_S))
        except TimeoutError:
            if not answered:
                raise BrokerUnavailable(
                    f"Redis at {self._link.address.shown} did not answer within {timeout_s:g} s"
                ) from None
            return {}
        finally:
            del self._bells[bell]
            self._leave(keys)

    async def _look(
        self, task_ids: Sequence[str], keys: Sequence[str], deadline: float
    ) -> dict[str, StoredResult]:
        """Subscribe, then read; for a bounded time again while the server cannot be reached.

        A server that is silent is tried until the deadline, if there is one.
        """
        ends, failures = time.monotonic() + self._timeout_s, 0
        while True:
            try:
                await self._link.connect()
                sent = self._link.send_after([("SUBSCRIBE", *keys)], ("MGET", *keys))
                (payloads,) = checked(await self._link.reply_to(sent), self._link.address)
            except AccessRefused:
                raise
            except BrokerUnavailable as problem:
                failures += 1
                is_silent = isinstance(problem, BrokerSilent)
                if time.monotonic() >= (deadline if is_silent and deadline < math.inf else ends):
                    raise
                await asyncio.sleep(reconnect_wait_s(failures, random()))
            else:
                found = decode_results(task_ids, payloads)
                return {task_id: one for task_id, one in found.items() if one.status in READY_STATES}

    def _leave(self, keys: Sequence[str]) -> None:
        self._wanted.subtract(keys)
        unwanted = [key for key in keys if not self._wanted[key]]
        for key in unwanted:
            del self._wanted[key]
        if not self._bells:
            self._link.close()
        elif unwanted and self._link.is_connected:
            self._link.send_after([("UNSUBSCRIBE", *unwanted)], ("PING",))

    def _heard(self, pushed: list[Any]) -> None:
        if pushed[0] == b"message":
            key = pushed[1].decode()
            for bell, keys in self._bells.items():
                if key in keys:
                    bell.set()

    def _ring_all(self) -> None:
        for bell in self._bells:
            bell.set()


async def _ring(bell: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await bell.wait()
    except TimeoutError:
        return
