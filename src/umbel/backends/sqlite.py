"""SqliteBackend: results in the embedded broker's file, and waiting for them without polling.

A waiter registers its socket for the task ids, looks, and sleeps until it is poked. A result
that is settled by a worker pokes in the same step, so `get()` returns as soon as it can.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from umbel.backends.interface import ChordPart
from umbel.brokers.interface import BrokerSettings, Refused
from umbel.brokers.sqlite.chords import ChordStore, Part
from umbel.brokers.sqlite.location import path_from_url
from umbel.brokers.sqlite.store import Store
from umbel.brokers.sqlite.wakeup import AsyncBell, Bell
from umbel.errors import BadURL
from umbel.protocol.delivery.states import READY_STATES
from umbel.wire.message import Outgoing, StoredResult

GROUP = "GROUP"  # the state of a row that says which results belong to a group


class SqliteBackend:
    def __init__(self, url: str, settings: BrokerSettings) -> None:
        self._url = url
        self._store = Store(replace(settings, url=url))
        self._chords = ChordStore(self._store)

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
        """As `wait`, on the event loop. Reads are short, so they need no thread."""
        wanted = list(task_ids)
        found = self._final(wanted)
        if found or not wanted:
            return found
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        bell = AsyncBell()
        try:
            with self._watched(wanted, bell.address):
                while True:
                    rings = bell.rings
                    if (found := self._final(wanted)) or time.monotonic() >= deadline:
                        return found
                    await bell.wait(rings, deadline - time.monotonic())
        finally:
            bell.close()

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
        """Ending it is what decides, in one transaction: until then anybody may try."""
        return self._chords.is_open(group_id)

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
