"""Backend: where results live, and how a client waits for them.

Synchronous and safe to share between threads and to use after a fork, because clients and running tasks use
it. The worker stores results through `Broker.settle` if broker and backend share a server (`shares_settle`),
so that a result and its ack are one step; otherwise it calls `store` in a thread before it settles.

Promises: the first SUCCESS of a task stays, whatever is stored later; a result is deleted after its
retention; `wait` returns on a notification, never by polling alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from umbel.brokers.interface import Refused
from umbel.protocol.delivery.states import READY_STATES
from umbel.wire.message import Outgoing, StoredResult

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop


Take = Callable[[Mapping[str, StoredResult]], bool]
"""Called with final results as they arrive, each once; returns whether it has enough. It raises nothing."""


class Arrivals:
    """The results that a caller waits for: each is handed over once, when it is final."""

    def __init__(self, task_ids: Iterable[str], take: Take | None) -> None:
        self.missing: dict[str, None] = dict.fromkeys(task_ids)
        self.found: dict[str, StoredResult] = {}
        self._take = take

    def take(self, results: Mapping[str, StoredResult]) -> bool:
        """Hand over the final results among these; returns whether the wait is over."""
        new = {
            task_id: result
            for task_id, result in results.items()
            if task_id in self.missing and result.status in READY_STATES
        }
        for task_id in new:
            del self.missing[task_id]
        self.found |= new
        has_enough = bool(new) and (self._take is None or self._take(new))
        return has_enough or not self.missing


class ChordPart(msgspec.Struct, frozen=True, array_like=True):
    """How one header task of a chord ended; `payload` is its value as JSON."""

    group_id: str
    index: int | None
    task_id: str
    status: str
    payload: bytes


@runtime_checkable
class Addressed(Protocol):
    """A backend to which results are sent: senders must name its address in `reply_to`."""

    @property
    def reply_to(self) -> str:
        """The address of this process, at which it receives when this returns."""


@runtime_checkable
class Lasting(Protocol):
    """A backend that can keep its connection for an event loop between two awaited calls."""

    def hold_connection(self) -> None:
        """Keep the connection of the running loop open; it must be released before the loop ends."""
        ...

    def release_connection(self) -> None:
        """End one `hold_connection`; the connection is closed with the last one."""

    def abandon_connection(self, loop: "AbstractEventLoop") -> None:
        """The loop was closed before it released the connection: forget what was open for it."""
        ...


class Backend(Protocol):
    """Stores results, counts the parts of chords, and waits for results."""

    @property
    def url(self) -> str:
        """The address of the backend, as configured."""

    def shares_settle(self, broker_url: str) -> bool:
        """Whether results can be stored by the settle() of the broker with this address."""
        ...

    def store(self, results: Sequence[StoredResult]) -> None:
        """Store these; a SUCCESS that is there already stays. BrokerRefused names those that were refused."""

    def read(self, task_ids: Iterable[str], timeout_s: float | None = None) -> Mapping[str, StoredResult]:
        """Those that are stored. An unreachable store raises BrokerUnavailable after the time-out."""
        ...

    def wait(
        self, task_ids: Iterable[str], timeout_s: float | None, take: Take | None = None
    ) -> Mapping[str, StoredResult]:
        """Block until one of the tasks has a final state, or the time-out; returns those that have one.

        With `take`: until all have one, or it has enough. Each result is read once, so the work for many
        tasks is in proportion to their number, however they arrive.
        """
        ...

    async def wait_async(
        self, task_ids: Iterable[str], timeout_s: float | None, take: Take | None = None
    ) -> Mapping[str, StoredResult]:
        """As `wait`, without blocking the event loop."""

    async def read_async(
        self, task_ids: Iterable[str], timeout_s: float | None = None
    ) -> Mapping[str, StoredResult]:
        """As `read`, without blocking the event loop."""
        ...

    def forget(self, task_ids: Iterable[str]) -> None:
        """Delete these results."""

    def start_chord(self, group_id: str, size: int) -> None:
        """A chord with this number of parts begins."""
        ...

    def add_chord_part(self, part: ChordPart) -> Sequence[ChordPart] | None:
        """Count the part, once however often it is delivered; returns all parts in order when none is
        missing.

        None while parts are missing, and when the chord has ended already.
        """
        ...

    def claim_chord(self, group_id: str, by: str) -> bool:
        """Whether `by`, the task with the last part, may send the body. The same task may claim it again."""
        ...

    def grow_chord(self, group_id: str, task_id: str) -> None:
        """The chord waits for one more part, that of this task; counted once for each task."""
        ...

    def end_chord(self, group_id: str, batch: Sequence[Outgoing]) -> Sequence[Refused]:
        """Send these messages, if the backend is the broker as well, and record that the chord is done.

        Messages that the broker refuses become dead letters, and are returned.
        """
        ...

    def save_group(self, group_id: str, payload: bytes) -> None:
        """Store which results belong to a group (`wire/result.py`), as long as results are retained."""
        ...

    def read_group(self, group_id: str) -> bytes | None:
        """What `save_group` stored; None if there is nothing."""

    def forget_group(self, group_id: str) -> None:
        """Delete what `save_group` stored."""

    def close(self) -> None:
        """Close connections; a later call opens them again."""


class InPlaceBackend(Backend, Protocol):
    """The backend of tasks that run where they are sent, or wait there: it also knows which of them are
    unique.
    """

    def unique_holder(self, key: str) -> str | None:
        """The id of the task that was sent with this key and has not ended."""
        ...
