"""Relay: publishes the committed rows of one outbox in order, and deletes them. A relay runs while its node
holds the lease of the outbox.

A round reads some rows, publishes them in one step of the broker, and deletes them. If a relay dies between
publishing and deleting, the next relay publishes those rows again, under the same ids: brokers that remember
ids store them once (`AsyncProducer.repeats`). A relay checks right before publishing that it still holds the
lease, so two relays overlap only by the rows that are in flight at that moment.

A row that can never be published is set aside with the reason: it cannot be read, or the broker or its client
refuses it. While the broker or the database is unavailable, the relay retries.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import time
from typing import Protocol, TypeVar

from umbel.brokers.interface import AsyncProducer, Attempt
from umbel.chance import random
from umbel.errors import (
    BrokerError,
    BrokerRefused,
    BrokerUnavailable,
    OutboxUnavailable,
    StorageFull,
)
from umbel.outbox.database import OutboxDatabase
from umbel.outbox.table import Problem, Readable, problem, read_rows
from umbel.pools.event_loop import OffLoop
from umbel.pools.guard import Raised, await_guarded
from umbel.protocol.delivery.states import reconnect_wait_s
from umbel.wire.message import Outgoing

R = TypeVar("R")
log = logging.getLogger("umbel.outbox")
POLL_FIRST_S = 0.02  # after the last row; doubles up to `poll_s`
RETRY_MAX_S = 5.0
PUBLISH_S = 10.0
CLOSE_S = 2.0
EVENTS_S = 10.0
CALL_S = 30.0  # of the database: longer than CONNECT_S and STATEMENT_S

TellSent = Callable[[Sequence[tuple[Sequence[Outgoing], float]]], None]


class Listener(Protocol):
    """The worker's part of a relay, which knows the lease and logs outages. Called on the loop."""

    def still_mine(self) -> bool:
        """Whether the lease is still held."""

    def database_answered(self, error: OutboxUnavailable | None) -> None:
        """The database answered, or failed with this error."""

    def broker_answered(self, error: BrokerError | None) -> None:
        """The broker answered, or failed with this error."""

    def published(self, count: int, set_aside: int) -> None:
        """Rows were published and set aside."""


class Relay:
    """The loop that publishes.

    After a database call that did not return in time, `open_database` makes another connection, and the call
    keeps the old one. `signed` signs a message if there are keys.
    """

    def __init__(
        self,
        open_database: Callable[[], OutboxDatabase],
        producer: AsyncProducer,
        listener: Listener,
        *,
        poll_s: float,
        tell_sent: TellSent | None = None,
        signed: Callable[[Outgoing], Outgoing] = lambda outgoing: outgoing,
    ) -> None:
        self._open_database = open_database
        self._database = open_database()
        self._producer = producer
        self._listener = listener
        self._poll_s = poll_s
        self._tell_sent = tell_sent
        self._signed = signed
        # Published and not yet deleted in the database: the rows of at most one round.
        self._unsettled: tuple[list[int], list[Problem]] = ([], [])

    async def run(self) -> None:
        """Publish until cancelled; retries with growing pauses."""
        failures, idle_s = 0, POLL_FIRST_S
        while True:
            try:
                count = await self.round()
            except (OutboxUnavailable, BrokerUnavailable, StorageFull):  # the listener has logged it
                failures += 1
                wait_s = reconnect_wait_s(failures, random(), most_s=RETRY_MAX_S)
            else:
                failures = 0
                idle_s = POLL_FIRST_S if count else min(2 * idle_s, self._poll_s)
                wait_s = 0.0 if count else idle_s
            await asyncio.sleep(wait_s)

    async def close(self) -> None:
        """Close the database connection, within CLOSE_S."""
        with suppress(TimeoutError):
            await OffLoop("umbel-outbox-close", self._database.close).ended(CLOSE_S)

    async def round(self) -> int:
        """Publish the next rows; returns how many were handled. 0: there are none, or the lease is lost."""
        await self._settle()
        rows = await self._call(self._database.fetch)
        readable, problems = read_rows(rows)
        if not rows or not self._listener.still_mine():
            return 0
        began = time()
        problems += await self._publish(readable)
        refused = {found.row_id for found in problems}
        sent = [row for row in readable if row.row_id not in refused]
        self._unsettled = [row.row_id for row in sent], problems
        await self._settle()
        for found in problems:
            fields = {"row": found.row_id, "why": found.why}
            log.error("outbox row cannot be published; set aside until `umbel outbox retry`", extra=fields)
        self._listener.published(len(sent), len(problems))
        if self._tell_sent is not None and sent:
            await self._send_events([row.outgoing for row in sent], began, self._tell_sent)
        return len(rows)

    async def _settle(self) -> None:
        published, problems = self._unsettled
        if published or problems:
            await self._call(lambda: self._database.settle(published, problems))
            self._unsettled = [], []

    async def _publish(self, batch: Sequence[Readable]) -> list[Problem]:
        """Publish a batch; returns the problems of the rows that the broker refuses."""
        if not batch:
            return []
        happened = await await_guarded(self._attempt, batch)
        if not isinstance(happened, Raised):
            self._listener.broker_answered(None)
            return []
        error = happened.error
        if isinstance(error, BrokerUnavailable | StorageFull):
            self._listener.broker_answered(error)
            raise error
        if isinstance(error, BrokerRefused) and error.places:
            return [problem(batch[place].row_id, error) for place in error.places]
        if len(batch) == 1:
            return [problem(batch[0].row_id, error)]
        # Some rows made the broker or its client refuse the whole batch: find them.
        return [found for row in batch for found in await self._publish([row])]

    async def _attempt(self, batch: Sequence[Readable]) -> None:
        try:
            async with asyncio.timeout(PUBLISH_S):
                await self._producer.publish([self._signed(row.outgoing) for row in batch], Attempt())
        except TimeoutError:
            raise BrokerUnavailable(
                f"the broker did not answer the outbox within {PUBLISH_S:g} s; retrying"
            ) from None

    async def _call(self, function: Callable[[], R]) -> R:
        """Run a database call in a daemon thread, and wait for it for at most CALL_S."""
        try:
            happened = await OffLoop("umbel-outbox", function).ended(CALL_S)
        except TimeoutError:
            self._database = self._open_database()
            silent = OutboxUnavailable(f"the outbox's database did not answer within {CALL_S:g} s; retrying")
            self._listener.database_answered(silent)
            raise silent from None
        if isinstance(happened, Raised):
            if isinstance(happened.error, OutboxUnavailable):
                self._listener.database_answered(happened.error)
            raise happened.error
        self._listener.database_answered(None)
        return happened.value

    async def _send_events(self, sent: Sequence[Outgoing], began: float, send: TellSent) -> None:
        why = "no answer in time"
        with suppress(TimeoutError):
            happened = await OffLoop("umbel-outbox-events", lambda: send([(sent, began)])).ended(EVENTS_S)
            why = str(happened.error) if isinstance(happened, Raised) else ""
        if why:
            log.warning("tasks sent, but their task-sent events could not be sent", extra={"why": why})
