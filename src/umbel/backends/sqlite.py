"""SqliteBackend: results in the embedded broker's file, and waiting for them without polling.

A waiter registers its socket for the task ids, looks, and sleeps until it is poked. A result
that is settled by a worker pokes in the same step, so `get()` returns as soon as it can.
"""

import asyncio
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock

from msgspec.structs import replace

from umbel.backends.interface import ChordPart
from umbel.brokers.interface import BrokerSettings, Refused
from umbel.brokers.sqlite.chords import ChordStore, Part
from umbel.brokers.sqlite.location import path_from_url
from umbel.brokers.sqlite.store import Store
from umbel.brokers.sqlite.thread import StoreThread
from umbel.brokers.sqlite.wakeup import AsyncBell, Bell
from umbel.errors import BadURL, BrokerUnavailable
from umbel.protocol.delivery.states import READY_STATES
from umbel.wire.message import Outgoing, StoredResult

GROUP = "GROUP"  # the state of a row that says which results belong to a group

LOOK_S = 0.25  # who waits for less than this gets one look at the file


class SqliteBackend:
    def __init__(self, url: str, settings: BrokerSettings) -> None:
        self._url = url
        self._store = Store(replace(settings, url=url))
        self._chords = ChordStore(self._store)
        self._starting = Lock()
        self._thread: StoreThread | None = None
        self._thread_of = 0  # process

    @property
    def url(self) -> str:
        return self._url

    def shares_settle(self, broker_url: str) -> bool:
        try:
            return path_from_url(broker_url) == self._store.database.path
        except BadURL:
            return False

    def store(self, results: Sequence[StoredResult]) -> None:
        self._store.store_results(results)

    def read(self, task_ids: Iterable[str], timeout_s: float | None = None) -> Mapping[str, StoredResult]:
        return self._store.read_results(task_ids)

    def wait(self, task_ids: Iterable[str], timeout_s: float | None) -> Mapping[str, StoredResult]:
        """Block until one of the tasks has a final state, or the time-out; those that have one."""
        wanted = list(task_ids)
        found = self._final(wanted)
        if found or not wanted:
            return found
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        bell = Bell()
        try:
            with self._watched(wanted, bell.address):
                while not (found := self._final(wanted)) and time.monotonic() < deadline:
                    bell.wait(deadline - time.monotonic())
        finally:
            bell.close()
        return found

    async def wait_async(
        self, task_ids: Iterable[str], timeout_s: float | None
    ) -> Mapping[str, StoredResult]:
        """As `wait`. The file is read in a thread; the loop waits for the poke alone."""
        wanted = list(task_ids)
        if not wanted:
            return {}
        try:
            async with asyncio.timeout(None if timeout_s is None else max(timeout_s, LOOK_S)):
                found = await self._beside().call(self._final, wanted)
                return found or await self._wait_for_poke(wanted, timeout_s)
        except TimeoutError:
            return {}

    async def read_async(
        self, task_ids: Iterable[str], timeout_s: float | None = None
    ) -> Mapping[str, StoredResult]:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._beside().call(self.read, list(task_ids))
        except TimeoutError:
            raise BrokerUnavailable(
                f"{self._store.database.path} did not answer within {timeout_s:g} s"
            ) from None

    async def _wait_for_poke(self, wanted: Sequence[str], timeout_s: float | None) -> dict[str, StoredResult]:
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        thread, bell = self._beside(), AsyncBell()
        try:
            if bell.address is not None:
                await thread.call(self._store.watch_results, wanted, bell.address)
            while True:
                rings = bell.rings
                found = await thread.call(self._final, wanted)
                if found or time.monotonic() >= deadline:
                    return found
                await bell.wait(rings, deadline - time.monotonic())
        finally:
            bell.close()
            if bell.address is not None:
                thread.post(self._store.unregister, bell.address)

    def _beside(self) -> StoreThread:
        """The thread in which the file is read for event loops; a forked child has its own."""
        with self._starting:
            if self._thread is None or self._thread_of != os.getpid():
                timeout_s = 3 * self._store.settings.connect_timeout_s + LOOK_S
                self._thread = StoreThread(f"the database {self._store.database.path}", timeout_s=timeout_s)
                self._thread_of = os.getpid()
            return self._thread

    def forget(self, task_ids: Iterable[str]) -> None:
        self._store.forget_results(task_ids)

    def start_chord(self, group_id: str, size: int) -> None:
        self._chords.start(group_id, size)

    def add_chord_part(self, part: ChordPart) -> Sequence[ChordPart] | None:
        parts = self._chords.add(part.group_id, Part(part.task_id, part.index, part.status, part.payload))
        if parts is None:
            return None
        return [ChordPart(part.group_id, one.place, one.task_id, one.status, one.payload) for one in parts]

    def claim_chord(self, group_id: str, by: str) -> bool:
        return self._chords.claim(group_id, by)

    def grow_chord(self, group_id: str, task_id: str) -> None:
        self._chords.grow(group_id, task_id)

    def end_chord(self, group_id: str, batch: Sequence[Outgoing]) -> Sequence[Refused]:
        return self._chords.end(group_id, batch)

    def save_group(self, group_id: str, payload: bytes) -> None:
        self._store.store_results([StoredResult(_group_row(group_id), GROUP, payload)])

    def read_group(self, group_id: str) -> bytes | None:
        found = self._store.read_results([_group_row(group_id)]).get(_group_row(group_id))
        return None if found is None else found.payload

    def forget_group(self, group_id: str) -> None:
        self._store.forget_results([_group_row(group_id)])

    def close(self) -> None:
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None and self._thread_of == os.getpid():
            thread.post(self._store.close)  # after what it has begun
            thread.stop(cancel=False)
        self._store.close()

    def _final(self, task_ids: Sequence[str]) -> dict[str, StoredResult]:
        found = self._store.read_results(task_ids)
        return {task_id: result for task_id, result in found.items() if result.status in READY_STATES}

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
    """Where a group is kept among the results: under a name that nobody gives a task."""
    return f"umbel.group/{group_id}"
