"""Backend: where results live, and how one waits for them.

Synchronous and safe to share between threads and to use after a fork, because clients and
running tasks use it. The worker stores results through `Broker.settle` when broker and backend
are one (`shares_settle`), so that a result and its ack are one step; otherwise it calls `store`
in a thread before it settles.

Promises: the first SUCCESS of a task stays, whatever is stored later; a result is gone after
its retention; `wait` returns on a notification, never by polling alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from umbel.wire.message import StoredResult


class Backend(Protocol):
    @property
    def url(self) -> str: ...

    def shares_settle(self, broker_url: str) -> bool:
        """Whether results may ride in the settle() of the broker with this address."""
        ...

    def store(self, results: Sequence[StoredResult]) -> None: ...
    def read(self, task_ids: Iterable[str]) -> Mapping[str, StoredResult]: ...

    def wait(self, task_ids: Iterable[str], timeout_s: float | None) -> Mapping[str, StoredResult]:
        """Block until one of the tasks has a final state, or the time-out; those that have one."""
        ...

    async def wait_async(
        self, task_ids: Iterable[str], timeout_s: float | None
    ) -> Mapping[str, StoredResult]: ...

    def forget(self, task_ids: Iterable[str]) -> None: ...
    def close(self) -> None: ...
