"""Relay: publishes the committed rows of one outbox, in their order, and deletes them. One term of one
leader.

A round reads some rows, publishes them in one step of the broker, and deletes them. A relay that dies between
the last two leaves rows that the next relay publishes again, under the same ids: brokers that remember ids
take them once (`AsyncProducer.repeats`). Right before publishing, a relay checks that it still holds the
lease, so two relays overlap by what is in flight at that moment.

What can never be published is set aside with the reason: a row that cannot be read, a message that the broker
refuses or its client cannot send. While the broker or the database is unavailable, the relay retries.
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
from umbel.outbox.table import Problem, Readable, StoredRow, problem, read_rows
from umbel.pools.event_loop import OffLoop
from umbel.pools.guard import Raised, await_guarded
from umbel.protocol.delivery.states import reconnect_wait_s
from umbel.wire.message import Outgoing

R = TypeVar("R")
log = logging.getLogger("umbel.outbox")
POLL_FIRST_S = 0.02  # after the last row; it doubles up to `poll_s`
RETRY_MAX_S = 5.0
PUBLISH_S = 10.0
CLOSE_S = 2.0
TELL_S = 10.0
CALL_S = 30.0  # of the database: more than its own limits take

TellSent = Callable[[Sequence[tuple[Sequence[Outgoing], float]]], None]


class RelayedDatabase(Protocol):
    """What a relay needs of `OutboxDatabase`."""

    def fetch(self) -> list[StoredRow]:
        """The next committed rows."""

    def settle(self, published: Sequence[int], problems: Sequence[Problem] = ()) -> None:
        """Delete the published rows and set the unpublishable ones aside."""

    def close(self) -> None:
        """Close the connection."""


class Listener(Protocol):
    """Holds the lease, and reports to people. Called on the loop."""

    def still_mine(self) -> bool:
        """Whether the lease is still held."""

    def database_answered(self, error: OutboxUnavailable | None) -> None:
        """The database answered, or failed with this error."""

    def broker_answered(self, error: BrokerError | None) -> None:
        """The broker answered, or failed with this error."""

    def published(self, count: int, set_aside: int) -> None:
        """Rows were published and set aside."""


class Relay:
    """The loop that publishes. `open_database` is called again when a call did not return in time; the old
    connection is left to that call.

    `signed` adds the signature that a message is published with, where there are keys.
    """

    def __init__(
        self,
        open_database: Callable[[], RelayedDatabase],
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
        # Published, but not yet deleted in the database: at most one round.
        self._unsettled: tuple[list[int], list[Problem]] = ([], [])

    async def run(self) -> None:
        """Publish until cancelled; retries with growing pauses."""
        failures, idle_s = 0, POLL_FIRST_S
        while True:
            try:
                count = await self.round()
            except (OutboxUnavailable, BrokerUnavailable, StorageFull):  # reported to the listener already
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
        refused = await self._publish(readable)
        set_aside = [*problems, *refused]
        sent = _without(readable, refused)
        self._unsettled = [row.row_id for row in sent], set_aside
        await self._settle()
        self._report(set_aside)
        self._listener.published(len(sent), len(set_aside))
        if self._tell_sent is not None and sent:
            await self._tell([row.outgoing for row in sent], began, self._tell_sent)
        return len(rows)

    async def _settle(self) -> None:
        published, problems = self._unsettled
        if published or problems:
            await self._call(lambda: self._database.settle(published, problems))
            self._unsettled = [], []

    # -- to the broker ---------------------------------------------------------------------------

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
        return await self._one_by_one(batch, error)  # whatever a row makes the client raise

    async def _one_by_one(self, batch: Sequence[Readable], error: BaseException) -> list[Problem]:
        """Some row of the batch made the broker or its client refuse all: find out which."""
        if len(batch) == 1:
            return [problem(batch[0].row_id, error)]
        refused: list[Problem] = []
        for row in batch:
            refused += await self._publish([row])
        return refused

    async def _attempt(self, batch: Sequence[Readable]) -> None:
        try:
            async with asyncio.timeout(PUBLISH_S):
                await self._producer.publish([self._signed(row.outgoing) for row in batch], Attempt())
        except TimeoutError:
            raise BrokerUnavailable(
                f"the broker did not answer the outbox within {PUBLISH_S:g} s; retrying"
            ) from None

    # -- to the database -------------------------------------------------------------------------

    async def _call(self, function: Callable[[], R]) -> R:
        """Run a database call in a thread that is given up after CALL_S, and at the end of the process."""
        try:
            happened = await OffLoop("umbel-outbox", function).ended(CALL_S)
        except TimeoutError:
            self._database = self._open_database()
            unheard = OutboxUnavailable(f"the outbox's database did not answer within {CALL_S:g} s; retrying")
            self._listener.database_answered(unheard)
            raise unheard from None
        if isinstance(happened, Raised):
            if isinstance(happened.error, OutboxUnavailable):
                self._listener.database_answered(happened.error)
            raise happened.error
        self._listener.database_answered(None)
        return happened.value

    # -- to people -------------------------------------------------------------------------------

    async def _tell(self, sent: Sequence[Outgoing], began: float, tell: TellSent) -> None:
        why = "no answer in time"
        with suppress(TimeoutError):
            happened = await OffLoop("umbel-outbox-events", lambda: tell([(sent, began)])).ended(TELL_S)
            why = str(happened.error) if isinstance(happened, Raised) else ""
        if why:
            log.warning("tasks sent, but their task-sent events could not be sent", extra={"why": why})

    def _report(self, problems: Sequence[Problem]) -> None:
        for refused in problems:
            fields = {"row": refused.row_id, "why": refused.why}
            log.error("outbox row cannot be published; set aside until `umbel outbox retry`", extra=fields)


def _without(batch: Sequence[Readable], refused: Sequence[Problem]) -> list[Readable]:
    out = {row.row_id for row in refused}
    return [row for row in batch if row.row_id not in out]
