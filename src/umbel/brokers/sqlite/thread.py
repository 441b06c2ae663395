"""StoreThread: the thread in which an asynchronous broker calls its store.

SQLite blocks, so it never runs on the event loop; one thread runs the calls in order. A caller that is
cancelled before its call began withdraws it. A call that has begun runs to its end in the thread; `call_or`
says what happens to a result that no caller waits for any more.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from umbel.errors import BrokerUnavailable, RowsSetAside

if TYPE_CHECKING:
    from umbel.brokers.sqlite.cluster_store import ClusterStore

P = ParamSpec("P")
R = TypeVar("R")

WORK_S = 10.0  # the most that one operation may take once it has the database


def repeated(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call, and once more if the file had unreadable rows that are set aside now."""
    try:
        return function(*args, **kwargs)
    except RowsSetAside:
        return function(*args, **kwargs)


class StoreThread:
    """Runs calls of one store in order; `timeout_s` is how long a caller waits for its result."""

    def __init__(self, name: str, *, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function in the thread; BrokerUnavailable if it takes longer than the time-out."""
        return await self._wait(self._executor.submit(lambda: repeated(function, *args, **kwargs)))

    async def call_or(
        self, abandoned: Callable[[R], object], function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call; if no caller waits for the result when it comes, pass it to `abandoned` in the thread."""
        future = self._executor.submit(lambda: repeated(function, *args, **kwargs))
        try:
            return await self._wait(future)
        except (asyncio.CancelledError, BrokerUnavailable):
            future.add_done_callback(lambda done: self._hand_over(done, abandoned))
            raise

    def post(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> Future[object]:
        """Call without waiting; for calls that are repeated soon, so that one failure does not matter."""
        return self._executor.submit(function, *args, **kwargs)

    async def _wait(self, future: Future[R]) -> R:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise BrokerUnavailable(
                f"{self._name} did not answer within {self._timeout_s:g} s; is the disk overloaded?"
            ) from None

    def _hand_over(self, done: Future[R], abandoned: Callable[[R], object]) -> None:
        if not done.cancelled() and done.exception() is None:
            abandoned(done.result())

    def stop(self, *, cancel: bool = True) -> None:
        """Take no more calls; those that have begun end by themselves, and so do queued ones unless
        cancelled.
        """
        self._executor.shutdown(wait=False, cancel_futures=cancel)


def thread_of(store: "ClusterStore") -> StoreThread:
    """A thread for the calls of a store."""
    # A call may wait for its turn in this process, at the gate, and for another program's lock.
    timeout_s = 3 * store.settings.connect_timeout_s + WORK_S
    return StoreThread(f"the database {store.database.path}", timeout_s=timeout_s)


class CallsStore:
    """Base of classes whose methods are operations of a store, each called in the store's thread."""

    _thread: StoreThread
    _store: "ClusterStore"


def in_thread(
    operation: "Callable[Concatenate[ClusterStore, P], R]",
) -> Callable[Concatenate[CallsStore, P], Coroutine[Any, Any, R]]:
    """A method that calls this operation of the store in its thread."""

    def method(self: CallsStore, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        return self._thread.call(operation, self._store, *args, **kwargs)

    return method
