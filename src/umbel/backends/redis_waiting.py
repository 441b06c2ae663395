"""Waiting for results on an event loop: one connection for all waiters, while there are any.

It is the loop's connection (`loop_links.py`), which those who send on this loop use as well.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from umbel.brokers.redis.address import Address
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link
from umbel.brokers.redis.loop_links import LoopLink, hold, release
from umbel.chance import random
from umbel.errors import AccessRefused, BrokerSilent, BrokerUnavailable
from umbel.protocol.delivery.states import PENDING, READY_STATES
from umbel.protocol.retry import reconnect_wait_s
from umbel.wire.message import StoredResult
from umbel.wire.values import UNREADABLE

LIVELY_S = 5.0  # a wait looks again so often, which also shows whether the server is still there
LOOK_S = 0.25  # who waits for less than this gets one look


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
        self._addresses = addresses
        self._keys = keys
        self._timeout_s = timeout_s
        self._bells: dict[str, set[asyncio.Event]] = {}  # of those who wait for it, by the result's key
        self._held: LoopLink | None = None
        self._holders = 0

    def hold(self) -> None:
        """Keep the connection until `release`, with or without waiters."""
        if self._held is None:
            self._held = hold(self._addresses, timeout_s=self._timeout_s)
            self._held.on_push.append(self._heard)
            self._held.on_lost.append(self._ring_all)
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        if self._held is not None and not self._holders:
            held, self._held = self._held, None
            held.on_push.remove(self._heard)
            held.on_lost.remove(self._ring_all)
            release(held)

    async def read(self, task_ids: Sequence[str], timeout_s: float | None) -> dict[str, StoredResult]:
        """Those that are there, whatever their state."""
        keys = [self._keys.result(task_id) for task_id in task_ids]
        self.hold()
        try:
            async with asyncio.timeout(self._timeout_s if timeout_s is None else timeout_s):
                return decode_results(task_ids, await self._read_keys(keys))
        except TimeoutError:
            raise self._unanswered(timeout_s) from None
        finally:
            self.release()

    async def _read_keys(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """A connection that was lost says nothing about the server: then once more, on a new one."""
        had_connection = self._link.is_connected
        try:
            payloads: Sequence[bytes | None] = await self._link.call("MGET", *keys)
        except AccessRefused:
            raise
        except BrokerUnavailable as problem:
            if not had_connection or isinstance(problem, BrokerSilent):
                raise
            payloads = await self._link.call("MGET", *keys)
        return payloads

    @property
    def _link(self) -> Link:
        assert self._held is not None, "it is held"
        return self._held.link

    def _unanswered(self, timeout_s: float | None) -> BrokerUnavailable:
        waited_s = self._timeout_s if timeout_s is None else timeout_s
        return BrokerUnavailable(f"Redis at {self._link.address.shown} did not answer within {waited_s:g} s")

    async def wait(self, task_ids: Sequence[str], timeout_s: float | None) -> dict[str, StoredResult]:
        keys = [self._keys.result(task_id) for task_id in task_ids]
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        bell = asyncio.Event()
        self.hold()
        for key in keys:
            self._bells.setdefault(key, set()).add(bell)
        answered = False
        try:
            async with asyncio.timeout(None if timeout_s is None else max(timeout_s, LOOK_S)):
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
                raise self._unanswered(timeout_s) from None
            return {}
        finally:
            self._leave(bell, keys)
            self.release()

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
                (payloads,) = self._link.checked(await self._link.reply_to(sent))
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

    def _leave(self, bell: asyncio.Event, keys: Sequence[str]) -> None:
        for key in keys:
            self._bells[key].discard(bell)
        unwanted = [key for key in keys if not self._bells[key]]
        for key in unwanted:
            del self._bells[key]
        if unwanted and self._link.is_connected:
            self._link.send_after([("UNSUBSCRIBE", *unwanted)], ("PING",))

    def _heard(self, pushed: list[Any]) -> None:
        if pushed[0] == b"message":
            for bell in self._bells.get(pushed[1].decode(), ()):
                bell.set()

    def _ring_all(self) -> None:
        for bells in self._bells.values():
            for bell in bells:
                bell.set()


async def _ring(bell: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await bell.wait()
    except TimeoutError:
        return
