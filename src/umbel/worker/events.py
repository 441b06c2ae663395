"""Events: publishes what happens on this node to all listeners.

Worker events go out one by one, task events in lists. Task events are sent only on request: by `-E`, by a
monitor's command, or by a recorder registered with the broker. An event is encoded once; the same bytes are
broadcast and logged. Nothing waits for events: they are queued, and when the queue is full the newest is
dropped and counted. Its number is missing then, so a recorder sees the gap. While a recorder runs, every
event goes to the broker's log first and is broadcast after that; only outcomes wait for the log, and not for
long when it cannot be written (`logged`).

Events carry this node's clock. It begins above the broker's high-water mark of the clock, and that mark is
raised ahead of it, by a block, before events leave (`ClockReservation`). If raising it fails, events leave
all the same, because a node whose heartbeats are late is declared lost.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from time import time
from typing import Any

from umbel.brokers.interface import Broadcast
from umbel.errors import AccessRefused, BrokerError, WireError
from umbel.events.stamp import EVENT_EXCHANGE, EVENT_TTL_S, TASK_GROUP, EventStamper
from umbel.events.types import TaskEvent, tag_of
from umbel.protocol.clock import ClockReservation, LamportClock
from umbel.wire.event import (
    LOGGED,
    EncodedEvent,
    EventEncoder,
    by_type,
    encode_event,
    in_lists,
    routing_key,
    routing_key_of_list,
)
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext

log = logging.getLogger("umbel.worker.events")

QUEUE_MAX_BYTES = 16 * 2**20  # of events, some 60,000 of tasks
BEATS_MAX_BYTES = 16 * 1024  # extra room for heartbeats: a node that cannot log its events is alive
BATCH_MAX = 2000
UNSENDABLE_MAX = 20  # types that one log line names
RECORDER_CHECK_S = 10.0
HEARTBEAT = "worker-heartbeat"
BEAT_KEY, TASK_KEYS = routing_key(HEARTBEAT), f"{TASK_GROUP}."
LOG_WAIT_MAX_S = 2.0
SLOW = "event log is slow; task outcomes were acknowledged before they were logged"
BEAT_TTL_MIN_S = 1.0  # a listener may be a moment late
RESERVE_S = 2.0
MARK = "clock mark"  # the name of this part in outage logs


class Events(Step):
    """The step that encodes, queues, logs and broadcasts events."""

    name = "events"
    requires = ("connection",)

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._asked_for = context.settings.send_task_events
        self._enabled = False
        self.recorded = False  # whether a recorder runs
        self._on_wanted: list[Callable[[bool], None]] = []
        self._waiting: list[EncodedEvent] = []
        self._waiting_bytes = 0
        self._unsendable: dict[str, str] = {}  # types that could not be encoded, and why; not reported yet
        self._beat_ttl_s = BEAT_TTL_MIN_S
        self._arrived = asyncio.Event()
        self._failing = self._has_sent = False
        self._queued_count = 0  # how many events were ever queued
        self._logged = 0  # how many of these are in the log, without a gap
        self._log_grew = asyncio.Event()
        self._unlogged = 0  # outcomes settled before the log had them, not reported yet
        self._sending = asyncio.Lock()
        stamper = EventStamper(
            hostname=context.identity.node,
            pid=context.identity.pid,
            incarnation=context.identity.incarnation,
            clock=LamportClock(),
        )
        self._encoder = EventEncoder(stamper)
        self._reservation = ClockReservation(stamper.clock)
        self._headers = encode_event({"hostname": stamper.hostname})
        self._headers_logged = encode_event({"hostname": stamper.hostname, LOGGED: True})

    @property
    def clock(self) -> LamportClock:
        """The Lamport clock of this node."""
        return self._encoder.stamper.clock

    @property
    def clock_reserved(self) -> int:
        """The highest clock value that an event of this node may have carried."""
        return max(self.clock.value, self._reservation.mark)

    def enable_task_events(self) -> bool:
        """Send task events for a monitor from now on; false if they were enabled already."""
        if self._asked_for or self._enabled:
            return False
        self._enabled = True
        self._note_listeners()
        return True

    def disable_task_events(self) -> bool:
        """Withdraw the monitor's request; `-E` and recorders still count. False if there was none."""
        was_on, self._enabled = self._enabled, False
        self._note_listeners()
        return was_on

    def on_wanted(self, callback: Callable[[bool], None]) -> None:
        """Call it, now and at each change, with whether task events are wanted."""
        self._on_wanted.append(callback)
        self._note_listeners()

    def _note_listeners(self) -> None:
        wanted = self._asked_for or self._enabled or self.recorded
        for callback in self._on_wanted:
            callback(wanted)

    async def start(self) -> None:
        """Read the broker's clock, look for recorders, begin to send."""
        self._reservation.begin(await self._context.broker.coordination.raise_clock(0))
        await self.look_for_recorders()
        self.run_in_background(self._send_on())
        self.run_in_background(self._watch())

    async def stop(self) -> None:
        """Send what is queued; after a failure it is dropped."""
        if not self._background:
            return
        # Wait for a batch on its way: cancelled half-way, it would be sent again below.
        async with self._sending:
            await self.end_background()
            try:
                await self._send_waiting()
            except BrokerError as error:
                fields = {"why": str(error), "count": len(self._waiting)}
                log.warning("last events could not be sent before shutdown; dropped", extra=fields)

    def send(self, event_type: str, *, at: float | None = None, **fields: Any) -> None:
        """Queue one event; never blocks."""
        self.send_fields(event_type, fields, at=at)

    def send_fields(
        self, event_type: str, fields: dict[str, Any], *, at: float | None = None, blind: bool = False
    ) -> None:
        """Queue one event with field names from outside. `blind`: without a clock value."""
        is_beat = event_type == HEARTBEAT
        if not self._has_room(BEATS_MAX_BYTES if is_beat else 0):
            return
        if is_beat:
            self._beat_ttl_s = max(BEAT_TTL_MIN_S, fields["freq"])
        when = time() if at is None else at
        try:
            self._queue(self._encoder.tell(event_type, fields, at=when, blind=blind))
        except WireError as error:
            self._drop_unsendable(event_type, error)

    def send_task(self, of: type[TaskEvent], at: float, *values: Any) -> None:
        """Queue an event of a task: `values` are those of `told_fields`."""
        if not self._has_room():
            return
        try:
            self._queue(self._encoder.tell_task(of, at, *values))
        except WireError as error:
            self._drop_unsendable(tag_of(of), error)

    def _has_room(self, more_bytes: int = 0) -> bool:
        if self._waiting_bytes < QUEUE_MAX_BYTES + more_bytes:
            return True
        self._context.counters.events_dropped += 1
        self._encoder.stamper.skip()
        return False

    def _queue(self, event: EncodedEvent) -> None:
        self._waiting.append(event)
        self._waiting_bytes += len(event[1])
        self._queued_count += 1
        self._arrived.set()

    def _drop_unsendable(self, event_type: str, error: WireError) -> None:
        """Count an event that cannot be encoded; its number is missing then."""
        self._context.counters.events_dropped += 1
        if len(self._unsendable) < UNSENDABLE_MAX:
            self._unsendable[event_type] = str(error)
        self._arrived.set()

    async def logged(self) -> None:
        """Return when the log has the events sent so far (D1): at once without a recorder.

        Tasks matter more than their history: after LOG_WAIT_MAX_S, or while sending fails, it returns without
        the log.
        """
        if not self.recorded:
            return
        place = self._queued_count
        try:
            async with asyncio.timeout(LOG_WAIT_MAX_S):
                if all(task.done() for task in self._background):  # after an error the sending task is gone
                    with suppress(BrokerError):
                        await self._send_waiting()
                    return
                while not self._failing and self._logged < place:
                    self._log_grew.clear()
                    await self._log_grew.wait()
        except TimeoutError:
            self._unlogged += 1

    async def _send_on(self) -> None:
        """Send what is queued until cancelled. After a failure the queue stays, except older heartbeats."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            try:
                async with self._sending:
                    await self._send_waiting()
                self._context.outages.worked(self.name)
                self._failing, self._has_sent = False, True
                self._report_unlogged()
            except BrokerError as error:
                if isinstance(error, AccessRefused) and not self._has_sent:
                    raise
                self._context.outages.failed(self.name, error)
                self._failing = True
                self._log_grew.set()
                self._drop_old_beats()
                self._arrived.set()
                await asyncio.sleep(1.0)

    def _report_unlogged(self) -> None:
        """Report outcomes settled before they were logged, once the log works: an outage may be the cause."""
        if self._unlogged:
            self._context.outages.consequence(
                log, logging.WARNING, SLOW, named="settled before logged", count=self._unlogged
            )
            self._unlogged = 0

    def _drop_old_beats(self) -> None:
        """Keep only the latest of the queued heartbeats, and send it first."""
        beats = [event for event in self._waiting if event[0] == BEAT_KEY]
        self._waiting = beats[-1:] + [event for event in self._waiting if event[0] != BEAT_KEY]
        self._waiting_bytes = sum(len(body) for _, body in self._waiting)
        self._context.counters.events_dropped += len(beats[:-1])

    async def _send_waiting(self) -> None:
        """Log and broadcast the queue in batches.

        A batch that cannot be logged is broadcast all the same. It stays queued, and both are repeated.
        """
        if self._unsendable:
            why = "; ".join(f"{event_type}: {why}" for event_type, why in sorted(self._unsendable.items()))
            log.error("events cannot be encoded; dropped", extra={"why": why})
            self._unsendable.clear()
        while self._waiting:
            batch = self._waiting[:BATCH_MAX]
            await self.reserve_clock()
            failed: BrokerError | None = None
            logged = 0
            try:
                logged = await self._log(batch)
            except BrokerError as error:  # listeners must get the events all the same
                failed = error
            else:
                self._note_logged(len(batch))
            await self._broadcast(batch, logged=logged > 0)
            if failed is not None:
                raise failed
            del self._waiting[: len(batch)]
            self._waiting_bytes -= sum(len(body) for _, body in batch)

    async def reserve_clock(self) -> None:
        """Raise the broker's high-water mark if the clock has passed it, before a clock value leaves."""
        if (wanted := self._reservation.wanted) is not None:
            try:
                async with asyncio.timeout(RESERVE_S):
                    self._reservation.raised(await self._context.broker.coordination.raise_clock(wanted))
            except (BrokerError, TimeoutError) as error:
                self._context.outages.failed(MARK, error)
                return
        self._context.outages.worked(MARK)

    def reserve_again(self) -> None:
        """Reserve again: the broker's data was replaced, and the mark may be gone."""
        self._reservation.lost()

    def _note_logged(self, count: int) -> None:
        """Note that the first `count` queued events are in the log, and all before them are gone."""
        self._logged = self._queued_count - len(self._waiting) + count
        self._log_grew.set()

    async def _broadcast(self, batch: list[EncodedEvent], *, logged: bool) -> None:
        """Publish a batch; heartbeats expire when the next is due (S6), because older ones mean nothing."""
        headers = self._headers_logged if logged else self._headers
        of_tasks = [event for event in batch if event[0].startswith(TASK_KEYS)]
        alone = [event for event in batch if not event[0].startswith(TASK_KEYS)]
        messages = [Broadcast(EVENT_EXCHANGE, key, body, headers) for key, body in alone if key != BEAT_KEY]
        key = routing_key_of_list(TASK_GROUP)
        messages += [Broadcast(EVENT_EXCHANGE, key, body, headers) for body, _ in in_lists(of_tasks)]
        if messages:
            await self._context.broker.broadcast(messages, ttl_s=EVENT_TTL_S)
        beats = [Broadcast(EVENT_EXCHANGE, key, body, headers) for key, body in alone if key == BEAT_KEY]
        if beats:
            await self._context.broker.broadcast(beats, ttl_s=self._beat_ttl_s)

    async def _log(self, batch: list[EncodedEvent]) -> int:
        """Write a batch to the event log before it is broadcast, so that the header LOGGED is true."""
        if not self.recorded:
            return 0
        entries, counts = by_type(batch)
        return await self._context.broker.log_events(entries, counts=counts)

    async def _watch(self) -> None:
        """Check periodically for recorders, and whether the broker's clock has passed this node's."""
        while True:
            await asyncio.sleep(RECORDER_CHECK_S)
            try:
                await self.look_for_recorders()
                least = self._reservation.wanted or self._reservation.mark
                self._reservation.catch_up(await self._context.broker.coordination.raise_clock(least))
                self._context.outages.worked(MARK)
            except BrokerError as error:
                log.debug("cannot check whether a recorder is running; retrying", extra={"why": str(error)})

    async def look_for_recorders(self) -> None:
        """Log events from now on if a recorder is registered; a new recorder requests this check."""
        if self._context.broker.capabilities.event_log:
            self.recorded = bool(await self._context.broker.recorders())
            self._note_listeners()
