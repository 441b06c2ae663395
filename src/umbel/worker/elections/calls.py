"""The store calls of elections: made beside the machine, each with a time-out, answered as events.

The machine asks again by its own timer when an answer is late. A call that is still under way is
not made twice: its answer, late as it is, serves as well, and a store that is merely slow is not
buried. Failed calls are counted; that the broker is away is said by `worker/process/outages.py`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from umbel.brokers.coordination import CoordinationStore
from umbel.errors import BrokerError
from umbel.protocol.election.events import (
    CallClaim,
    CallFinish,
    CallRenew,
    CallStart,
    ClaimReplied,
    Event,
    FinishReplied,
    RenewReplied,
    StartReplied,
)

log = logging.getLogger("umbel.worker.elections")

AT_ONCE_MAX = 16
UNDER_WAY_MAX = 1000
Call = CallClaim | CallStart | CallRenew | CallFinish
T = TypeVar("T")


class StoreCalls:
    """At most AT_ONCE_MAX calls run; beyond UNDER_WAY_MAX a new one is left to its timer.

    `timeout_s` is when a call is given up, well after the machine has asked again.
    """

    def __init__(self, store: CoordinationStore, timeout_s: float, answer: Callable[[Event], None]) -> None:
        self.failed = 0
        self._store = store
        self._timeout_s = timeout_s
        self._answer = answer
        self._turns = asyncio.Semaphore(AT_ONCE_MAX)
        self._under_way: dict[tuple[type[Call], str, int], asyncio.Task[None]] = {}

    def make(self, call: Call, group: asyncio.TaskGroup) -> None:
        same = (type(call), call.election_id, 0 if isinstance(call, CallClaim) else call.term)
        if same in self._under_way:
            return
        if len(self._under_way) >= UNDER_WAY_MAX:
            self.failed += 1
            return
        task = group.create_task(self._make(call), name="umbel-election-call")
        self._under_way[same] = task
        task.add_done_callback(lambda _: self._under_way.pop(same))

    async def attempt(self, call: Awaitable[T]) -> T | None:
        """What the store answers, or None where it did not in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except (BrokerError, TimeoutError) as error:
            self.failed += 1
            why = str(error) or f"no answer within {self._timeout_s:g} s"
            log.debug("cannot read or write an election in the broker; retrying", extra={"why": why})
            return None

    async def close(self) -> None:
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _make(self, call: Call) -> None:
        async with self._turns:
            answer = await self.attempt(self._ask(call))
        if answer is not None:
            self._answer(answer)

    async def _ask(self, call: Call) -> Event:
        store = self._store
        match call:
            case CallClaim(election_id, key, holder, request, ttl_s, sent_s):
                reply = await store.claim_election(key, holder, request, ttl_s=ttl_s)
                return ClaimReplied(election_id, sent_s, reply)
            case CallStart(election_id, key, holder, term, sent_s):
                ok = await store.start_election(key, holder, term)
                return StartReplied(election_id, term, sent_s, ok)
            case CallRenew(election_id, key, holder, term, sent_s):
                ok = await store.renew_election(key, holder, term)
                return RenewReplied(election_id, term, sent_s, ok)
            case CallFinish(election_id, key, holder, term, outcome):
                ok = await store.finish_election(key, holder, term, outcome)
                return FinishReplied(election_id, term, ok)
