"""Recorder: read the broker's event log, write it to the lake as Parquet files, acknowledge the written
events.

A recorder acknowledges an event only after the file that contains it is published. If it dies before that,
it reads the event again: events may be stored twice, but none are lost. Readers drop duplicates by their
digest.

It also records events about its own work:

recorder-online, recorder-offline   the recorder started or stopped; `unheard_since`: no
                                    recorder has received events of Celery workers since then
recorder-gap                        the events `first` to `last` of that node never arrived
recorder-lost                       the log dropped `lost` events before they were read; `why`
recorder-deaf                       the broker was unavailable since `since`; events of Celery workers
                                    from that period may be lost
recorder-unreadable                 `count` entries are not valid events; `file` contains them
"""

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic, time, time_ns
from typing import Any, TypeVar

import msgspec

from umbel.brokers.interface import Broadcast, Broker, LoggedEvent
from umbel.chance import random
from umbel.clock import cluster_now
from umbel.errors import BrokerError, LakeError, NoClusterId, NotSupported
from umbel.events.reorder import Gap, Sequences
from umbel.events.stamp import EVENT_EXCHANGE
from umbel.history.lake import EVENTS, Lake, arrow, compute, entered, event_schema, parquet
from umbel.history.rows import BatchFindings, Rows, UnreadableEntry
from umbel.history.segment import RecorderMemory, Segment, account_numbers, read_memory, write_memory
from umbel.protocol.delivery.states import reconnect_wait_s
from umbel.protocol.leadership.lease import (
    Acknowledge,
    BeginRecording,
    EntriesRead,
    FactsAdded,
    FileFinished,
    FinishFile,
    ForgetFile,
    ReadAfter,
    Recording,
    RecordingEffect,
    RecordingEnded,
    RecordingEvent,
    RotationSettings,
    StopRecording,
    WritingFailed,
)
from umbel.protocol.machine import Tick
from umbel.protocol.pidbox import Request
from umbel.wire.control import REQUEST_EXCHANGE, encode_request
from umbel.wire.coordination import NODE_BYTES_MAX
from umbel.wire.event import LOGGED
from umbel.wire.values import UNREADABLE as VALUES_UNREADABLE

# ---- listening -------------------------------------------------------------------------------------

log = logging.getLogger("umbel.history")

WAITING_MAX = 20_000
APPEND_MAX = 500
ASK_EVERY_S = 3.0  # a worker that starts sends worker-online before it can receive requests
REQUEST_TTL_S = 60.0
STRANGERS_MAX = 200  # workers that are addressed by name; with more than this, all workers are asked


class _Headers(msgspec.Struct):
    logged: bool = False


assert _Headers.__struct_fields__ == (LOGGED,)
_headers = msgspec.json.Decoder(_Headers)


class Listening:
    """Copies the events that Celery workers broadcast to the event log, and asks those workers to send task
    events.

    Celery workers broadcast their events and do not write them to the event log. On RabbitMQ the event log
    is bound to the exchange of these broadcasts, so the recorder only asks for events. Redis drops a
    broadcast that has no subscriber, so the recorder subscribes and appends each broadcast to the event log.
    Events that Celery workers send while no recorder runs, or while its connection is down, are lost; the
    recorder records that period.
    """

    def __init__(self, broker: Broker) -> None:
        self.heard = 0
        self.dropped = 0  # the buffer was full while the broker was unavailable
        self._broker = broker
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._arrived = asyncio.Event()
        self._strangers: set[str] = set()
        self._asked: set[str] = set()
        self._unasked = asyncio.Event()

    async def run(self) -> None:
        """Run until cancelled; return at once if the broker has no events of other workers."""
        others = self._broker.capabilities.events_of_others
        if others == "none":
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ask_on())
            if others == "fan-out":
                group.create_task(self._append_on())
                group.create_task(self._listen())

    def met(self, strangers: set[str], arrived: set[str]) -> None:
        """Register workers whose events have no sequence numbers (Celery workers); `arrived` have just
        started.

        A new worker is asked for task events at once. All workers are asked again every few seconds, because
        a worker that restarts does not remember the request.
        """
        self._asked -= arrived
        if len(self._strangers) <= STRANGERS_MAX:
            self._strangers |= strangers
        if self._strangers - self._asked:
            self._unasked.set()

    async def _ask_on(self) -> None:
        """Ask new workers for task events at once, and all workers again every few seconds."""
        while True:
            try:
                async with asyncio.timeout(ASK_EVERY_S):
                    await self._unasked.wait()
            except TimeoutError:
                self._asked.clear()
            self._unasked.clear()
            asked, self._strangers = self._strangers, set()
            if not asked:
                continue
            try:
                await self._ask(sorted(asked) if len(asked) <= STRANGERS_MAX else None)
                self._asked = asked if len(self._asked) > STRANGERS_MAX else self._asked | asked
            except (BrokerError, NoClusterId) as error:
                log.debug(
                    "cannot ask workers to send events; asking again when they send an event",
                    extra={"why": str(error)},
                )

    async def _ask(self, destination: Sequence[str] | None) -> None:
        """Broadcast `enable_events` to these workers; None addresses all workers."""
        named = None if destination is None else tuple(name[:NODE_BYTES_MAX] for name in destination)
        request = Request("enable_events", {}, named)
        headers, body = encode_request(request, 0, self._broker.signer, cluster_now())
        await self._broker.broadcast([Broadcast(REQUEST_EXCHANGE, "", body, headers)], ttl_s=REQUEST_TTL_S)

    async def _listen(self) -> None:
        """Subscribe to broadcast events, and collect those that are not in the event log. Reconnect after
        errors.
        """
        failures = 0
        while True:
            try:
                async with self._broker.subscribe(EVENT_EXCHANGE, ["#"]) as subscription:
                    failures = 0
                    async for broadcast in subscription:
                        self._take(broadcast)
            except BrokerError as error:
                failures += 1
                log.debug("cannot subscribe to events; retrying", extra={"why": str(error)})
                await asyncio.sleep(reconnect_wait_s(failures, time() % 1))

    def _take(self, broadcast: Broadcast) -> None:
        """Collect a broadcast event, or count it as dropped if the buffer is full."""
        if _is_logged(broadcast.headers):
            return
        if len(self._waiting) >= WAITING_MAX:
            self.dropped += 1
            return
        self._waiting.append((broadcast.routing_key, broadcast.body))
        self._arrived.set()

    async def _append_on(self) -> None:
        """Append collected events to the event log in batches. A batch stays in the buffer until it is
        appended.
        """
        failures = 0
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                batch = [self._waiting[place] for place in range(min(len(self._waiting), APPEND_MAX))]
                try:
                    await self._broker.log_events(batch)
                except BrokerError as error:
                    failures += 1
                    log.debug("cannot append events to the event log; retrying", extra={"why": str(error)})
                    await asyncio.sleep(reconnect_wait_s(failures, time() % 1))
                    continue
                failures = 0
                self.heard += len(batch)
                for _ in batch:
                    self._waiting.popleft()


def _is_logged(headers: bytes) -> bool:
    """Return whether the sender has also written the event to the event log."""
    try:
        return _headers.decode(headers).logged
    except VALUES_UNREADABLE:
        return False


# ---- facts -----------------------------------------------------------------------------------------

ONLINE, OFFLINE = "recorder-online", "recorder-offline"
GAP, LOST, DEAF, UNREADABLE = "recorder-gap", "recorder-lost", "recorder-deaf", "recorder-unreadable"

Fact = dict[str, Any]


class FactMaker:
    """Creates events about the recorder, with its name and the start time of this run."""

    def __init__(self, recorder: str, boot: int) -> None:
        self._recorder = recorder
        self._boot = boot

    def make(self, type_name: str, **fields: Any) -> Fact:
        """Return an event about this recorder, with the current time."""
        return {
            "type": type_name,
            "hostname": f"{self._recorder}@{socket.gethostname()}",
            "pid": os.getpid(),
            "timestamp": time(),
            "inc": self._boot,
            "recorder": self._recorder,
            **fields,
        }

    def gap(self, gap: Gap) -> Fact:
        """Return the event for a gap. The same gap always gives the same event, because a recorder that was
        killed reports it again after a restart, and readers drop duplicates.
        """
        return {
            "type": GAP,
            "hostname": gap.hostname,
            "pid": gap.pid,
            "inc": gap.inc,
            "timestamp": gap.at_us / 1_000_000,
            "recorder": self._recorder,
            "first": gap.first,
            "last": gap.last,
        }


# ---- recorder --------------------------------------------------------------------------------------

DEFAULT_NAME = "recorder"
READ_MAX = 20_000
GROUP_ROWS, GROUP_BYTES = 50_000, 32 * 1024 * 1024
LOOK_EVERY_S = 5.0
UNREADABLE_MAX = 10_000
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RecorderSettings:
    """The name of a recorder, and when it closes a file."""

    name: str = DEFAULT_NAME
    rotation: RotationSettings = field(default_factory=RotationSettings)


@dataclass(slots=True)
class Progress:
    """Counts of this run, for status lines."""

    events: int = 0
    files: int = 0
    size_bytes: int = 0
    lag: int = 0
    problem: str = ""  # why the recorder cannot read or write at the moment


class Recorder:
    """Records the events of one broker in one lake.

    `protocol/leadership/lease.py` decides when to read, to close a file and to acknowledge; this class
    performs the effects, one at a time. Decoding and writing Parquet run in a separate thread, so that they
    do not block the event loop of a worker that hosts a recorder.

    `holding` returns whether this process still holds the lease; a recorder without its lease stops at once.
    `answered` is called with the error of each failed call to the broker, and with None after the next
    success.
    """

    def __init__(
        self,
        broker: Broker,
        lake: Lake,
        settings: RecorderSettings | None = None,
        *,
        holding: Callable[[], bool] = lambda: True,
        answered: Callable[[BrokerError | None], None] = lambda _: None,
    ) -> None:
        if not broker.capabilities.event_log:
            problem = f"transport {broker.capabilities.transport} has no event log to record"
            raise NotSupported(f"{problem}; use Redis, RabbitMQ or SQLite")
        self.progress = Progress()
        self.registered = asyncio.Event()  # set when the broker retains its event log for this recorder
        self._broker = broker
        self._lake = lake
        self._settings = settings or RecorderSettings()
        self._holding = holding
        self._answered = answered
        self._boot = time_ns() // 1000
        self._machine = Recording(self._settings.rotation)
        self._segment = Segment(lake, self._settings.name, self._boot)
        self._rows = Rows(broker.capabilities.transport)
        self._group_bytes = 0
        self._memory = RecorderMemory(self._settings.name)
        self._sequences = Sequences()
        self._maker = FactMaker(self._settings.name, self._boot)
        self._facts: list[Fact] = []
        self._unreadable: list[UnreadableEntry] = []
        self._unreadable_count = 0
        self._listening = Listening(broker)
        self._dropped_told = 0
        self._look_at = 0.0
        self._deaf_since = 0.0
        self._thread = ThreadPoolExecutor(1, "umbel-recorder")

    async def run(self, stop: asyncio.Event) -> None:
        """Record until `stop` is set or the lease is lost. On return, all events that were read are
        on disk.
        """
        name = self._settings.name
        try:
            async with entered(self._lake.locked(name, f"a recorder named {name!r}"), self._in_thread):
                await self._in_thread(self._open_lake)
                async with asyncio.TaskGroup() as group:
                    listening = group.create_task(self._listening.run(), name="umbel-listening")
                    await self._record(stop)
                    listening.cancel()
        except OSError as error:
            raise LakeError(f"cannot use the lake {self._lake.store.where}: {error}") from None
        except BaseExceptionGroup as several:
            raise _first_cause(several) from several
        finally:
            self._thread.shutdown()
            self._segment.close()

    # -- the loop --------------------------------------------------------------------------------

    async def _record(self, stop: asyncio.Event) -> None:
        """Record until stopped. On errors and after loss of the lease, write the events that were read."""
        try:
            if await self._drive(stop):
                return
        except BrokerError as error:
            if not stop.is_set() and self._holding():
                raise
            if stop.is_set():
                log.warning(
                    "broker unavailable at shutdown; the next run reads the last events again: %s",
                    error,
                )
        await self._in_thread(self._abandon)

    async def _drive(self, stop: asyncio.Event) -> bool:
        """Perform the effects of the state machine until it stops. Return False if the lease was lost."""
        effects: deque[RecordingEffect] = deque(self._step(BeginRecording(await self._register(stop))))
        effects.extend(self._tell(self._online()))
        stopping = False
        while self._holding():
            if stop.is_set() and not stopping:
                stopping = True
                effects.extend(self._tell(self._maker.make(OFFLINE)))
                effects.extend(self._step(StopRecording()))
            if not effects:
                effects.extend(await self._next_tick(stop))
                continue
            effect = effects.popleft()
            if isinstance(effect, RecordingEnded):
                return True
            effects.extend(await self._perform(effect, stop))
        return False

    def _step(self, event: RecordingEvent | Tick) -> list[RecordingEffect]:
        """Pass an event to the state machine, with the current time."""
        return self._machine.step(event, monotonic())

    async def _next_tick(self, stop: asyncio.Event) -> list[RecordingEffect]:
        """Wait for the state machine's deadline or for the request to stop."""
        deadline = self._machine.deadline
        wait_s = LOOK_EVERY_S if deadline is None else max(0.0, deadline - monotonic())
        try:
            async with asyncio.timeout(wait_s):
                await stop.wait()
        except TimeoutError:
            return self._step(Tick())
        return []

    async def _perform(self, effect: RecordingEffect, stop: asyncio.Event) -> list[RecordingEffect]:
        """Perform one effect, and return the effects that follow from its result.

        An error of the lake is reported to the state machine, which retries later. The broker retains the
        events until they are acknowledged.
        """
        try:
            match effect:
                case ReadAfter(place):
                    if monotonic() >= self._look_at:
                        again = await self._patiently(self._look, stop)
                        if again is not None:
                            return self._step(BeginRecording(again))
                    return await self._read(place, stop)
                case FinishFile(through):
                    await self._patiently(self._count_lost, stop)
                    name = await self._in_thread(self._finish, through)
                    log.info("history segment written", extra={"file": name, "rows": self._machine.rows})
                    return self._step(FileFinished(through))
                case Acknowledge(place):
                    name = self._settings.name
                    await self._patiently(lambda: self._broker.acknowledge_events(name, place), stop)
                    return []
                case ForgetFile():
                    await self._in_thread(self._forget)
                    return self._step(FactsAdded(len(self._facts)))
                case RecordingEnded():
                    return []
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            self._complain(f"cannot write to {self._lake.store.where}: {why}")
            return self._step(WritingFailed())

    async def _read(self, place: int, stop: asyncio.Event) -> list[RecordingEffect]:
        """Read the next entries of the event log, and convert them in the recorder's thread."""
        name = self._settings.name
        entries = await self._patiently(lambda: self._broker.read_events(name, READ_MAX, after=place), stop)
        if not entries:
            return self._step(EntriesRead(place, 0, self._segment.size_bytes, more=False))
        before = self.progress.events
        await self._in_thread(self._take, entries)
        rows = self.progress.events - before
        # with fewer entries, wait, so that the next read returns more
        more = max(len(entries), rows) >= READ_MAX // 2
        size = self._segment.size_bytes + self._group_bytes // 10
        return self._step(EntriesRead(entries[-1].offset, rows, size, more=more))

    # -- in the thread ---------------------------------------------------------------------------

    def _open_lake(self) -> None:
        """Load PyArrow, delete drafts of a crashed recorder with this name, and read the stored state."""
        # import the libraries now: it is slow, and fails with a clear message if one is missing
        arrow(), parquet(), compute(), event_schema()
        self._lake.store.clear_drafts(EVENTS, f"ev-{self._settings.name}-")
        found = read_memory(self._lake, self._settings.name)
        if found is not None:
            self._memory = found

    def _take(self, entries: Sequence[LoggedEvent]) -> None:
        """Convert entries to rows, and write a row group if there are enough rows."""
        before = self._rows.count
        batch = self._rows.add(entries)
        self.progress.events += self._rows.count - before
        self._group_bytes += sum(len(entry.body) for entry in entries)
        self._account(batch)
        if self._rows.count >= GROUP_ROWS or self._group_bytes >= GROUP_BYTES:
            self._write_group()

    def _account(self, batch: BatchFindings) -> None:
        """Collect unreadable entries for the quarantine, and report workers without sequence numbers."""
        self._unreadable_count += len(batch.unreadable)
        self._unreadable += batch.unreadable[: UNREADABLE_MAX - len(self._unreadable)]
        if batch.strangers:
            self._loop.call_soon_threadsafe(self._listening.met, batch.strangers, batch.arrived)

    def _write_group(self) -> None:
        """Write the collected rows as a row group, and update the sequence numbers."""
        if self._rows.count:
            table = self._rows.table()
            account_numbers(self._sequences, table, time())
            self._segment.write(table)
            self._group_bytes = 0

    def _finish(self, through: int) -> str:
        """Publish the file, then store the recorder's state; return the file's name. The order matters: only
        after both are stored may the events be acknowledged.
        """
        self._write_group()
        gaps = self._sequences.settled(time())
        self._facts += [self._maker.gap(gap) for gap in gaps]
        facts = list(self._facts)
        if self._unreadable:
            aside = self._segment.set_aside(self._unreadable)
            facts.append(self._maker.make(UNREADABLE, count=self._unreadable_count, file=aside))
        recorded_us = time_ns() // 1000
        for fact in facts:
            self._rows.add_fact(fact, recorded_us=recorded_us)
        self._write_group()
        name, size = self._segment.finish()
        memory = self._memory
        memory.unreadable += self._unreadable_count
        self._facts, self._unreadable, self._unreadable_count = [], [], 0
        memory.gaps += len(gaps)
        memory.missing += sum(gap.missing for gap in gaps)
        memory.files += 1
        memory.size_bytes += size
        memory.events += self._machine.rows
        memory.acknowledged, memory.updated_at = through, time()
        memory.senders = self._sequences.known()
        write_memory(self._lake, memory)
        self.progress.files += 1
        self.progress.size_bytes += size
        self.progress.problem = ""
        return name

    def _abandon(self) -> None:
        """Write the events that were read, without acknowledging them. Duplicates are harmless; lost events
        are not.
        """
        try:
            if self._machine.rows:
                self._finish(self._machine.acknowledged)
        except OSError as error:
            log.warning("cannot write the last events to the lake; the next run reads them again: %s", error)
            self._forget()

    def _forget(self) -> None:
        """Discard the unfinished file and all rows. The events are read again."""
        self._segment.forget()
        self._rows = Rows(self._broker.capabilities.transport)
        self._group_bytes = 0
        self._unreadable, self._unreadable_count = [], 0

    # -- with the broker -------------------------------------------------------------------------

    async def _register(self, stop: asyncio.Event) -> int:
        """Register the recorder with the broker, and return the offset from which to read.

        If the broker does not know the recorder although it has recorded before, the broker has lost its
        data. Events may be missing, which is recorded, and the sequence numbers start again.
        """
        self._loop = asyncio.get_running_loop()
        name = self._settings.name
        known = await self._patiently(self._broker.recorders, stop)
        acknowledged = await self._patiently(lambda: self._broker.register_recorder(name), stop)
        if name not in known and self._memory.began_us:
            self._facts.append(
                self._maker.make(LOST, lost=0, why="the broker had no registration of this recorder")
            )
        if name not in known or not self._memory.began_us:
            self._memory.began_us, self._memory.senders = time_ns() // 1000, []
            self._memory.lost_told = await self._patiently(self._broker.lost_events, stop)
            self._memory.updated_at = 0.0
        self._sequences = Sequences(began_us=self._memory.began_us, known=self._memory.senders)
        self._memory.starts += 1
        self.registered.set()
        return acknowledged

    async def _look(self) -> int | None:
        """Return the offset to restart from if the broker lost its log or this recorder's registration; else
        None.
        """
        self._look_at = monotonic() + LOOK_EVERY_S
        acknowledged = await self._broker.register_recorder(self._settings.name)
        state = await self._broker.event_log()
        machine = self._machine
        self.progress.lag = max(0, state.last_offset - machine.through)
        if acknowledged >= machine.acknowledged and state.last_offset >= machine.through:
            return None
        log.warning(
            "broker lost its event log; recording restarts from the beginning of the new log",
            extra={"from": acknowledged},
        )
        self._facts.append(self._maker.make(LOST, lost=0, why="the broker has lost its event log"))
        self._step(FactsAdded(1))
        return acknowledged

    async def _count_lost(self) -> None:
        """Record how many events the broker's full log has dropped since the last file."""
        lost, dropped = await self._broker.lost_events(), self._listening.dropped
        fresh = max(0, lost - self._memory.lost_told) + dropped - self._dropped_told
        self._memory.lost_told, self._dropped_told = lost, dropped
        if fresh:
            self._memory.lost += fresh
            self._facts.append(self._maker.make(LOST, lost=fresh, why="the log was full"))

    async def _patiently(self, ask: Callable[[], Awaitable[T]], stop: asyncio.Event) -> T:
        """Retry a call until the broker answers. Raise BrokerError if the recorder must stop: unacknowledged
        events stay in the log.
        """
        failures = 0
        while True:
            try:
                answer = await ask()
            except BrokerError as error:
                failures += 1
                self.progress.problem = f"the broker does not answer: {error}"
                self._answered(error)
                self._deaf_since = self._deaf_since or time()
                if stop.is_set() or not self._holding():
                    raise
                await asyncio.sleep(reconnect_wait_s(failures, random()))
                continue
            if self._deaf_since:
                self._heard_again()
            return answer

    def _heard_again(self) -> None:
        """Record for how long the broker was unavailable, if events may have been lost in this time."""
        since, self._deaf_since = self._deaf_since, 0.0
        self.progress.problem = ""
        self._answered(None)
        if self._broker.capabilities.events_of_others == "fan-out":
            self._memory.deaf_s += time() - since
            self._facts.append(self._maker.make(DEAF, since=since))
            self._step(FactsAdded(1))

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """Run a function in the recorder's thread. All access to the lake happens there."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def _complain(self, problem: str) -> None:
        """Log a problem with the lake once, and show it in the status."""
        if self.progress.problem != problem:
            log.error("cannot record events; retrying; the broker retains them until then: %s", problem)
        self.progress.problem = problem

    # -- facts -----------------------------------------------------------------------------------

    def _tell(self, fact: Fact) -> list[RecordingEffect]:
        """Add an event about the recorder to the current file."""
        self._facts.append(fact)
        return self._step(FactsAdded(1))

    def _online(self) -> Fact:
        """Return the event for the start of the recorder."""
        others = self._broker.capabilities.events_of_others
        unheard = self._memory.updated_at if others == "fan-out" else 0.0
        return self._maker.make(ONLINE, unheard_since=unheard or None, starts=self._memory.starts)


def _first_cause(several: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error in nested exception groups."""
    first = several.exceptions[0]
    return _first_cause(first) if isinstance(first, BaseExceptionGroup) else first
