"""SqliteBackend: results in the embedded broker's file, and waiting for them without polling.

A waiter registers its socket for the task ids, reads, and sleeps until it is woken. A worker that settles a
result wakes it in the same step, so `get()` returns as soon as possible.
"""

import asyncio
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Lock

from msgspec.structs import replace

from umbel.backends.interface import Arrivals, Backend, ChordPart, Take
from umbel.brokers.interface import BrokerSettings, Refused
from umbel.brokers.sqlite import wakeup
from umbel.brokers.sqlite.chords import ChordStore, Part
from umbel.brokers.sqlite.files import path_from_url
from umbel.brokers.sqlite.store import Store
from umbel.brokers.sqlite.thread import AsyncBell, StoreThread, repeated
from umbel.brokers.sqlite.wakeup import Bell, Poked
from umbel.errors import BadURL, BrokerUnavailable
from umbel.wire.message import Outgoing, StoredResult

GROUP = "GROUP"  # the state of a row that stores a group

READ_AT_LEAST_S = 0.25  # a shorter wait gets one read of the file
# The pause until all results are read again, as a multiple of the time that this took last.
SOON_SHARE, RECHECK_SHARE = 4.0, 20.0


class Watch:
    """Which results a wait reads, and when: those that wake-ups name, and all of them now and then.

    Reading all results costs more the more are missing, so it takes a bounded share of the time.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._named: set[str] = set()
        self._is_all = True  # wake-ups may have been sent before the wait was registered
        self._reads_all = False
        self._began = self._not_before = self._again_at = 0.0
        self.read_at = 0.0  # when to read even without a wake-up

    def note(self, poked: Poked | None) -> None:
        """Note the results that a wake-up names; None: there was no wake-up."""
        if poked is not None:
            self._is_all |= poked.is_all
            self._named.update(poked.names)

    def due(self, now: float) -> list[str]:
        """Return the tasks whose results to read now."""
        self._began = now
        self._reads_all = (self._is_all and now >= self._not_before) or now >= self.read_at
        missing = self._arrivals.missing
        wanted = (
            list(missing) if self._reads_all else [task_id for task_id in self._named if task_id in missing]
        )
        self._named.clear()
        return wanted

    def take(self, found: Mapping[str, StoredResult], now: float) -> bool:
        """Take the results that were read; return whether these are enough."""
        if self._reads_all:
            took_s = now - self._began
            self._is_all = False
            self._not_before = now + SOON_SHARE * took_s
            self._again_at = now + max(wakeup.RECHECK_S, RECHECK_SHARE * took_s)
        self.read_at = self._not_before if self._is_all else self._again_at
        return self._arrivals.take(found)


class SqliteBackend(Backend):
    """Stores results in the SQLite file of the embedded broker."""

    def __init__(self, url: str, settings: BrokerSettings) -> None:
        self._url = url
        self._store = Store(replace(settings, url=url))
        self._chords = ChordStore(self._store)
        self._starting = Lock()
        self._thread: StoreThread | None = None
        self._thread_of = 0  # the pid of the process in which the thread runs

    @property
    def url(self) -> str:
        """The address of the file, as configured."""
        return self._url

    def shares_settle(self, broker_url: str) -> bool:
        """Whether the broker's address names the same file."""
        try:
            return path_from_url(broker_url) == self._store.database.path
        except BadURL:
            return False

    def store(self, results: Sequence[StoredResult]) -> None:
        """Store results in one transaction."""
        self._store.store_results(results)

    def read(self, task_ids: Iterable[str], timeout_s: float | None = None) -> Mapping[str, StoredResult]:
        """Return the stored results; a read that finds unreadable rows is repeated when they are set
        aside.
        """
        wanted = list(task_ids)
        return repeated(self._store.read_results, wanted, timeout_s) if wanted else {}

    def wait(
        self, task_ids: Iterable[str], timeout_s: float | None, take: Take | None = None
    ) -> Mapping[str, StoredResult]:
        """Block until one task has a final state, or the time-out; return the final results."""
        arrivals = Arrivals(task_ids, take)
        if not arrivals.missing or arrivals.take(self.read(arrivals.missing)):
            return arrivals.found
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        watch, bell = Watch(arrivals), Bell(self._store.database.path)
        try:
            with self._watched(list(arrivals.missing), bell.address):
                while not watch.take(self.read(watch.due(time.monotonic())), time.monotonic()):
                    if time.monotonic() >= deadline:
                        break
                    watch.note(bell.wait(min(deadline, watch.read_at) - time.monotonic()))
        finally:
            bell.close()
        return arrivals.found

    async def wait_async(
        self, task_ids: Iterable[str], timeout_s: float | None, take: Take | None = None
    ) -> Mapping[str, StoredResult]:
        """Wait like `wait`. A thread reads the file; the event loop only waits to be woken."""
        arrivals = Arrivals(task_ids, take)
        if not arrivals.missing:
            return {}
        with suppress(TimeoutError):
            async with asyncio.timeout(None if timeout_s is None else max(timeout_s, READ_AT_LEAST_S)):
                if not arrivals.take(await self._thread_for_loops().call(self.read, list(arrivals.missing))):
                    await self._wait_for_wakeups(arrivals, timeout_s)
        return arrivals.found

    async def read_async(
        self, task_ids: Iterable[str], timeout_s: float | None = None
    ) -> Mapping[str, StoredResult]:
        """Read like `read`, in a thread; BrokerUnavailable after the time-out."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._thread_for_loops().call(self.read, list(task_ids))
        except TimeoutError:  # without a time-out the thread's limit applies, which has its own error
            raise BrokerUnavailable(
                f"{self._store.database.path} did not answer within {timeout_s:g} s"
            ) from None

    async def _wait_for_wakeups(self, arrivals: Arrivals, timeout_s: float | None) -> None:
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        thread, watch = self._thread_for_loops(), Watch(arrivals)
        bell = AsyncBell(self._store.database.path)
        try:
            if bell.address is not None:
                await thread.call(self._store.watch_results, list(arrivals.missing), bell.address)
            while True:
                rings, wanted = bell.rings, watch.due(time.monotonic())
                found = await thread.call(self.read, wanted) if wanted else {}
                if watch.take(found, time.monotonic()) or time.monotonic() >= deadline:
                    return
                await bell.wait(rings, min(deadline, watch.read_at) - time.monotonic())
                watch.note(bell.poked())
        finally:
            bell.close()
            if bell.address is not None:
                thread.post(self._store.unregister, bell.address)

    def _thread_for_loops(self) -> StoreThread:
        """The thread that reads the file for event loops; a forked child has a separate one."""
        with self._starting:
            if self._thread is None or self._thread_of != os.getpid():
                timeout_s = 3 * self._store.settings.connect_timeout_s + READ_AT_LEAST_S
                self._thread = StoreThread(f"the database {self._store.database.path}", timeout_s=timeout_s)
                self._thread_of = os.getpid()
            return self._thread

    def forget(self, task_ids: Iterable[str]) -> None:
        """Delete results."""
        self._store.forget_results(task_ids)

    def start_chord(self, group_id: str, size: int) -> None:
        """Record the number of parts."""
        self._chords.start(group_id, size)

    def add_chord_part(self, part: ChordPart) -> Sequence[ChordPart] | None:
        """Count the part; return all parts in order when none is missing."""
        parts = self._chords.add(part.group_id, Part(part.task_id, part.index, part.status, part.payload))
        if parts is None:
            return None
        return [
            ChordPart(part.group_id, found.place, found.task_id, found.status, found.payload)
            for found in parts
        ]

    def claim_chord(self, group_id: str, by: str) -> bool:
        """Claim the chord for this task."""
        return self._chords.claim(group_id, by)

    def grow_chord(self, group_id: str, task_id: str) -> None:
        """Raise the number of parts by one, once for this task."""
        self._chords.grow(group_id, task_id)

    def end_chord(self, group_id: str, batch: Sequence[Outgoing]) -> Sequence[Refused]:
        """Queue the body's messages and record the chord as done, in one transaction."""
        return self._chords.end(group_id, batch)

    def save_group(self, group_id: str, payload: bytes) -> None:
        """Store the payload like a result, under a name that no task has."""
        self._store.store_results([StoredResult(_group_row(group_id), GROUP, payload)])

    def read_group(self, group_id: str) -> bytes | None:
        """Return the payload of the group; None if there is none."""
        found = self._store.read_results([_group_row(group_id)]).get(_group_row(group_id))
        return None if found is None else found.payload

    def forget_group(self, group_id: str) -> None:
        """Delete the payload of the group."""
        self._store.forget_results([_group_row(group_id)])

    def close(self) -> None:
        """Close the file, after the calls that its thread has begun."""
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None and self._thread_of == os.getpid():
            thread.post(self._store.close)
            thread.stop(cancel=False)
        self._store.close()

    @contextmanager
    def _watched(self, task_ids: Sequence[str], address: bytes | None) -> Iterator[None]:
        if address is None:
            yield
            return
        self._store.watch_results(task_ids, address)
        try:
            yield
        finally:
            self._store.unregister(address)


def _group_row(group_id: str) -> str:
    """Return the name under which a group is stored among the results: no task has such an id."""
    return f"umbel.group/{group_id}"
