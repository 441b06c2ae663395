"""Backend: where results are stored, and how a client waits for them.

A backend is synchronous, safe to share between threads and safe to use after a fork, because clients and
running tasks use it. If broker and backend share a server (`shares_settle`), the worker stores results by
`Broker.settle`, so that a result and the acknowledgement of its message are one step. Otherwise it calls
`store` in a thread before it settles.

Promises: the first SUCCESS of a task stays, whatever is stored later; a result is deleted after its
retention; `wait` returns on a notification, never by polling alone.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from umbel.brokers.interface import Refused
from umbel.protocol.delivery.states import READY_STATES
from umbel.wire.message import Outgoing, StoredResult

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop


Take = Callable[[Mapping[str, StoredResult]], bool]
"""Called with final results as they arrive, each once; returns whether it has enough. It raises nothing."""


class Arrivals:
    """The results that a caller waits for. Each is handed over once, when it is final."""

    def __init__(self, task_ids: Iterable[str], take: Take | None) -> None:
        self.missing: dict[str, None] = dict.fromkeys(task_ids)
        self.found: dict[str, StoredResult] = {}
        self._take = take

    def take(self, results: Mapping[str, StoredResult]) -> bool:
        """Hand over the final results among these; return whether the wait is over."""
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


class Backend(Protocol):
    """Stores results, counts the parts of chords, and waits for results.

    Backends inherit from it: a backend that looks results up has no address, and one without a connection for
    each event loop has nothing to hold.
    """

    @property
    def url(self) -> str:
        """The address of the backend, as configured."""

    @property
    def reply_to(self) -> str:
        """The address to which results are sent, ready to receive; "" where results are looked up."""
        return ""

    def hold_connection(self) -> None:
        """Keep the connection of the running loop open; release it before the loop ends."""
        return

    def release_connection(self) -> None:
        """End one `hold_connection`; the last one closes the connection."""
        return

    def abandon_connection(self, loop: "AbstractEventLoop") -> None:
        """Forget the connection of a loop that was closed before it released the connection."""
        return

    def shares_settle(self, broker_url: str) -> bool:
        """Whether `Broker.settle` of the broker with this address can store results here."""

    def store(self, results: Sequence[StoredResult]) -> None:
        """Store results; a stored SUCCESS stays. BrokerRefused names the refused ones."""

    def read(self, task_ids: Iterable[str], timeout_s: float | None = None) -> Mapping[str, StoredResult]:
        """Return the stored results. An unreachable store raises BrokerUnavailable after the time-out."""

    def wait(
        self, task_ids: Iterable[str], timeout_s: float | None, take: Take | None = None
    ) -> Mapping[str, StoredResult]:
        """Block until one task has a final state, or the time-out; return the final results.

        With `take`: until all tasks have one, or `take` has enough. Each result is read once, so the work for
        many tasks is in proportion to their number, in whatever order they end.
        """

    async def wait_async(
        self, task_ids: Iterable[str], timeout_s: float | None, take: Take | None = None
    ) -> Mapping[str, StoredResult]:
        """Wait like `wait`, without blocking the event loop."""

    async def read_async(
        self, task_ids: Iterable[str], timeout_s: float | None = None
    ) -> Mapping[str, StoredResult]:
        """Read like `read`, without blocking the event loop."""

    def forget(self, task_ids: Iterable[str]) -> None:
        """Delete results."""

    def start_chord(self, group_id: str, size: int) -> None:
        """Begin a chord with this number of parts."""

    def add_chord_part(self, part: ChordPart) -> Sequence[ChordPart] | None:
        """Count the part, once however often it is delivered; return all parts in order when none is missing.

        None while parts are missing, and when the chord has ended already.
        """

    def claim_chord(self, group_id: str, by: str) -> bool:
        """Whether `by`, the task with the last part, may send the body. The same task may claim it again."""

    def grow_chord(self, group_id: str, task_id: str) -> None:
        """Let the chord wait for one more part, that of this task; each task counts once."""

    def end_chord(self, group_id: str, batch: Sequence[Outgoing]) -> Sequence[Refused]:
        """Send these messages, if the backend is the broker as well, and record that the chord is done.

        Messages that the broker refuses become dead letters, and are returned.
        """

    def save_group(self, group_id: str, payload: bytes) -> None:
        """Store which results belong to a group (`wire/result.py`), as long as results are retained."""

    def read_group(self, group_id: str) -> bytes | None:
        """Return the payload that `save_group` stored; None if there is none."""

    def forget_group(self, group_id: str) -> None:
        """Delete the payload that `save_group` stored."""

    def close(self) -> None:
        """Close connections; a later call opens them again."""
