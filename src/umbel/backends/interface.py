"""Backend: where results live, and how one waits for them.

Synchronous and safe to share between threads and to use after a fork, because clients and
running tasks use it. The worker stores results through `Broker.settle` when broker and backend
are one (`shares_settle`), so that a result and its ack are one step; otherwise it calls `store`
in a thread before it settles.

Promises: the first SUCCESS of a task stays, whatever is stored later; a result is gone after
its retention; `wait` returns on a notification, never by polling alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from umbel.brokers.interface import Refused
from umbel.wire.message import Outgoing, StoredResult

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop


class ChordPart(msgspec.Struct, frozen=True, array_like=True):
    """How one header task of a chord ended; `payload` is its value as JSON."""

    group_id: str
    index: int | None
    task_id: str
    status: str
    payload: bytes


@runtime_checkable
class Addressed(Protocol):
    """A backend that is sent results rather than asked for them: senders must name its address."""

    @property
    def reply_to(self) -> str: ...


@runtime_checkable
class Lasting(Protocol):
    """A backend that can keep its connection for an event loop between two awaited calls."""

    def hold_connection(self) -> None:
        """From now on in the running loop, which must let go of it before it ends."""
        ...

    def release_connection(self) -> None: ...
    def abandon_connection(self, loop: "AbstractEventLoop") -> None:
        """The loop was closed before it let go: forget it and what was open for it."""
        ...


class Backend(Protocol):
    @property
    def url(self) -> str: ...

    def shares_settle(self, broker_url: str) -> bool:
        """Whether results may ride in the settle() of the broker with this address."""
        ...

    def store(self, results: Sequence[StoredResult]) -> None: ...
    def read(self, task_ids: Iterable[str], timeout_s: float | None = None) -> Mapping[str, StoredResult]:
        """Those that are there. A store that is away raises BrokerUnavailable after the time-out."""
        ...

    def wait(self, task_ids: Iterable[str], timeout_s: float | None) -> Mapping[str, StoredResult]:
        """Block until one of the tasks has a final state, or the time-out; those that have one."""
        ...

    async def wait_async(
        self, task_ids: Iterable[str], timeout_s: float | None
    ) -> Mapping[str, StoredResult]: ...
    async def read_async(
        self, task_ids: Iterable[str], timeout_s: float | None = None
    ) -> Mapping[str, StoredResult]:
        """The same as `read`. Neither of the two blocks the event loop."""
        ...

    def forget(self, task_ids: Iterable[str]) -> None: ...

    def start_chord(self, group_id: str, size: int) -> None:
        """A chord of so many parts begins."""
        ...

    def add_chord_part(self, part: ChordPart) -> Sequence[ChordPart] | None:
        """Count the part, once however often it comes; all parts in order when none is missing.

        None while parts are missing, and when the chord has ended already.
        """
        ...

    def claim_chord(self, group_id: str, by: str) -> bool:
        """Whether `by`, which brought the last part, may send the body. It may ask again."""
        ...

    def grow_chord(self, group_id: str, task_id: str) -> None:
        """The chord waits for one more part, which this task will be; counted once for each task."""
        ...

    def end_chord(self, group_id: str, batch: Sequence[Outgoing]) -> Sequence[Refused]:
        """Send these, if the backend is the broker as well, and remember that it was done.

        Those that the broker refuses are among the dead letters then, and in the answer.
        """
        ...

    def save_group(self, group_id: str, payload: bytes) -> None:
        """Keep which results belong to a group (`wire/result.py`), as long as results are kept."""
        ...

    def read_group(self, group_id: str) -> bytes | None: ...
    def forget_group(self, group_id: str) -> None: ...

    def close(self) -> None: ...


class InPlaceBackend(Backend, Protocol):
    """Of tasks that run where they are sent, or wait there: no broker knows which of them are unique."""

    def unique_holder(self, key: str) -> str | None:
        """The task that was sent with this key and has not ended."""
        ...
