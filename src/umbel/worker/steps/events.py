"""Events: what happens on this node, sent to all listeners.

Worker events go out one by one, task events in lists. Task events are sent only when somebody
asked for them: by `-E`, or by a recorder registered with the broker. An event is encoded once, when it
is told; the same bytes are broadcast and logged. Nothing waits for events: they are queued, and when the
queue is full the newest is dropped and counted; its number is missing then, so a recorder sees the gap.
While a recorder runs, every event goes to the broker's log first and is broadcast after that; only
outcomes are held back until the log has them, and not for long when it cannot be written (`logged`).
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from time import time
from typing import Any

from umbel.brokers.interface import Broadcast, ClusterRecord, EventLog, FanOut
from umbel.errors import AccessRefused, BrokerError, WireError
from umbel.events.stamp import EVENT_EXCHANGE, EVENT_TTL_S, TASK_GROUP, EventStamper
from umbel.events.types import TaskEvent, tag_of
from umbel.protocol.clock import LamportClock
from umbel.wire.event import LOGGED, encode_event, routing_key, routing_key_of_list
from umbel.wire.told import EventTeller, Told, by_type, in_lists
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext

log = logging.getLogger("umbel.worker.events")

QUEUE_MAX_BYTES = 16 * 2**20  # of events, some 60,000 of tasks
BEATS_MAX_BYTES = 16 * 1024  # heartbeats have so much more: a node that cannot log its events is alive
BATCH_MAX = 2000
UNSENDABLE_MAX = 20  # types that one log line names
RECORDER_CHECK_S = 10.0
HEARTBEAT = "worker-heartbeat"
BEAT_KEY, TASK_KEYS = routing_key(HEARTBEAT), f"{TASK_GROUP}."
LOG_WAIT_MAX_S = 2.0
SLOW = "event log is slow; task outcomes were acknowledged before they were logged"
BEAT_TTL_MIN_S = 1.0  # a listener may be a moment late


class Events(Step):
    name = "events"
    requires = ("connection",)

    def __init__(self, context: WorkerContext) -> None:
        super().__init__()
        self._context = context
        self._fan_out: FanOut = context.broker
        self._event_log: EventLog = context.broker
        self._cluster: ClusterRecord = context.broker
        self._asked_for = context.settings.send_task_events
        self._enabled = False
        self.recorded = False  # whether a recorder runs
        self._on_wanted: list[Callable[[bool], None]] = []
        self._waiting: list[Told] = []
        self._waiting_bytes = 0
        self._unsendable: dict[str, str] = {}  # types that could not be encoded, and why; not reported yet
        self._beat_ttl_s = BEAT_TTL_MIN_S
        self._arrived = asyncio.Event()
        self._failing = self._has_sent = False
        self._told = 0  # how many were ever queued, and the place in that count up to which all are logged
        self._logged = 0
        self._log_grew = asyncio.Event()
        self._unlogged = 0  # outcomes that were settled before the log had them, not reported yet
        self._sending = asyncio.Lock()
        stamper = EventStamper(
            hostname=context.identity.node,
            pid=context.identity.pid,
            incarnation=context.identity.incarnation,
            clock=LamportClock(),
        )
        self._teller = EventTeller(stamper)
        self._headers = encode_event({"hostname": stamper.hostname})
        self._headers_logged = encode_event({"hostname": stamper.hostname, LOGGED: True})

    @property
    def clock(self) -> LamportClock:
        return self._teller.stamper.clock

    def enable_task_events(self) -> bool:
        """A monitor wants them from now on; False when they were on already."""
        if self._asked_for or self._enabled:
            return False
        self._enabled = True
        self._note_listeners()
        return True

    def disable_task_events(self) -> bool:
        """Take back what a monitor wanted; `-E` and recorders still count."""
        was_on, self._enabled = self._enabled, False
        self._note_listeners()
        return was_on

    def on_wanted(self, callback: Callable[[bool], None]) -> None:
        """Call it, now and at each change, with whether anybody wants task events."""
        self._on_wanted.append(callback)
        self._note_listeners()

    def _note_listeners(self) -> None:
        wanted = self._asked_for or self._enabled or self.recorded
        for callback in self._on_wanted:
            callback(wanted)

    async def start(self) -> None:
        coordination = self._cluster.coordination
        # Start past whatever this cluster has seen, or a restarted node's events would sort first.
        self.clock.adjust(await coordination.raise_clock(0))
        await self.look_for_recorders()
        self.run_in_background(self._send_on())
        self.run_in_background(self._watch())

    async def stop(self) -> None:
        if not self._background:
            return
        # What is on its way arrives first: cancelled half-way, it would be sent once more below.
        async with self._sending:
            await self.end_background()
            try:
                await self._send_waiting()
                await self._cluster.coordination.raise_clock(self.clock.value)
            except BrokerError as error:
                fields = {"why": str(error), "count": len(self._waiting)}
                log.warning("last events could not be sent before shutdown; dropped", extra=fields)

    def tell(self, event_type: str, *, at: float | None = None, **fields: Any) -> None:
        """Queue one event; never blocks."""
        self.tell_fields(event_type, fields, at=at)

    def tell_fields(
        self, event_type: str, fields: dict[str, Any], *, at: float | None = None, blind: bool = False
    ) -> None:
        """The same, with names of fields that others chose."""
        is_beat = event_type == HEARTBEAT
        if not self._has_room(BEATS_MAX_BYTES if is_beat else 0):
            return
        if is_beat:
            self._beat_ttl_s = max(BEAT_TTL_MIN_S, fields["freq"])
        when = time() if at is None else at
        try:
            self._queue(self._teller.tell(event_type, fields, at=when, blind=blind))
        except WireError as error:
            self._drop_unsendable(event_type, error)

    def tell_task(self, of: type[TaskEvent], at: float, *values: Any) -> None:
        """Queue an event of a task: `values` are those of `told_fields`."""
        if not self._has_room():
            return
        try:
            self._queue(self._teller.tell_task(of, at, *values))
        except WireError as error:
            self._drop_unsendable(tag_of(of), error)

    def _has_room(self, more_bytes: int = 0) -> bool:
        if self._waiting_bytes < QUEUE_MAX_BYTES + more_bytes:
            return True
        self._context.counters.events_dropped += 1
        self._teller.stamper.skip()
        return False

    def _queue(self, told: Told) -> None:
        self._waiting.append(told)
        self._waiting_bytes += len(told[1])
        self._told += 1
        self._arrived.set()

    def _drop_unsendable(self, event_type: str, error: WireError) -> None:
        """What nobody could read is not sent; its number is missing then."""
        self._context.counters.events_dropped += 1
        if len(self._unsendable) < UNSENDABLE_MAX:
            self._unsendable[event_type] = str(error)
        self._arrived.set()

    async def logged(self) -> None:
        """Return when the log has the events sent so far (D1): at once without a recorder.

        Tasks matter more than their history: a log that cannot be written holds nothing up.
        """
        if not self.recorded:
            return
        place = self._told
        try:
            async with asyncio.timeout(LOG_WAIT_MAX_S):
                if all(task.done() for task in self._background):  # something went wrong: nobody else sends
                    with suppress(BrokerError):
                        await self._send_waiting()
                    return
                while not self._failing and self._logged < place:
                    self._log_grew.clear()
                    await self._log_grew.wait()
        except TimeoutError:
            self._unlogged += 1

    async def _send_on(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            try:
                async with self._sending:
                    await self._send_waiting()
                self._context.outages.worked(self.name)
                self._failing, self._has_sent = False, True
                self._tell_unlogged()
            except BrokerError as error:
                if isinstance(error, AccessRefused) and not self._has_sent:
                    raise
                self._context.outages.failed(self.name, error)
                self._failing = True
                self._log_grew.set()
                self._drop_old_beats()
                self._arrived.set()
                await asyncio.sleep(1.0)

    def _tell_unlogged(self) -> None:
        """Said once the log has them: until then it may be the broker that is away."""
        if self._unlogged:
            self._context.outages.consequence(
                log, logging.WARNING, SLOW, named="settled before logged", count=self._unlogged
            )
            self._unlogged = 0

    def _drop_old_beats(self) -> None:
        """Of the heartbeats that wait only the last says anything; it goes first, or it never would."""
        beats = [told for told in self._waiting if told[0] == BEAT_KEY]
        self._waiting = beats[-1:] + [told for told in self._waiting if told[0] != BEAT_KEY]
        self._waiting_bytes = sum(len(body) for _, body in self._waiting)
        self._context.counters.events_dropped += len(beats[:-1])

    async def _send_waiting(self) -> None:
        if self._unsendable:
            why = "; ".join(f"{event_type}: {why}" for event_type, why in sorted(self._unsendable.items()))
            log.error("events cannot be encoded; dropped", extra={"why": why})
            self._unsendable.clear()
        while self._waiting:
            batch = self._waiting[:BATCH_MAX]
            failed: BrokerError | None = None
            logged = 0
            try:
                logged = await self._log(batch)
            except BrokerError as error:  # who listens must hear us all the same
                failed = error
            else:
                self._note_logged(len(batch))
            await self._broadcast(batch, logged=logged > 0)
            if failed is not None:
                raise failed
            del self._waiting[: len(batch)]
            self._waiting_bytes -= sum(len(body) for _, body in batch)

    def _note_logged(self, count: int) -> None:
        """The first `count` of those that wait are in the log, and all before them are gone."""
        self._logged = self._told - len(self._waiting) + count
        self._log_grew.set()

    async def _broadcast(self, batch: list[Told], *, logged: bool) -> None:
        """Heartbeats live until the next is due (S6): one that is older says nothing of a node any more."""
        headers = self._headers_logged if logged else self._headers
        of_tasks = [told for told in batch if told[0].startswith(TASK_KEYS)]
        alone = [told for told in batch if not told[0].startswith(TASK_KEYS)]
        messages = [Broadcast(EVENT_EXCHANGE, key, body, headers) for key, body in alone if key != BEAT_KEY]
        key = routing_key_of_list(TASK_GROUP)
        messages += [Broadcast(EVENT_EXCHANGE, key, body, headers) for body, _ in in_lists(of_tasks)]
        if messages:
            await self._fan_out.broadcast(messages, ttl_s=EVENT_TTL_S)
        beats = [Broadcast(EVENT_EXCHANGE, key, body, headers) for key, body in alone if key == BEAT_KEY]
        if beats:
            await self._fan_out.broadcast(beats, ttl_s=self._beat_ttl_s)

    async def _log(self, batch: list[Told]) -> int:
        """Before they are broadcast, so that what says it is in the log is."""
        if not self.recorded:
            return 0
        entries, counts = by_type(batch)
        return await self._event_log.log_events(entries, counts=counts)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(RECORDER_CHECK_S)
            try:
                await self.look_for_recorders()
                self.clock.adjust(await self._cluster.coordination.raise_clock(self.clock.value))
            except BrokerError as error:
                log.debug("cannot check whether a recorder is running; retrying", extra={"why": str(error)})

    async def look_for_recorders(self) -> None:
        """Log events from now on, if anybody records; a recorder that begins asks for this at once."""
        if self._event_log.capabilities.event_log:
            self.recorded = bool(await self._event_log.recorders())
            self._note_listeners()
