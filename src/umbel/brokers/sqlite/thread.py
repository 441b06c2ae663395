"""SQLite on an event loop: the thread that calls the store, the wake-ups, and the producer for async clients.

SQLite blocks, so it never runs on the event loop; one thread runs the calls in order. A caller that is
cancelled before its call began withdraws it. A call that has begun runs to its end in the thread; `call_or`
says what happens to a result that no caller waits for any more.

Clients without an event loop do not load this file: asyncio takes three megabytes.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from umbel.brokers.interface import SENT_REMEMBERED_S, Attempt, BrokerSettings, Capabilities
from umbel.brokers.sqlite.cluster_store import ClusterStore
from umbel.brokers.sqlite.store import CAPABILITIES
from umbel.brokers.sqlite.wakeup import Bell, Poked
from umbel.errors import BrokerUnavailable, RowsSetAside
from umbel.wire.message import Outgoing

WORK_S = 10.0  # the most that one operation may take once it has the database
UNREAD_MAX = 100_000  # unread names; beyond this the waiter checks all results

P = ParamSpec("P")
R = TypeVar("R")


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


def thread_of(store: ClusterStore) -> StoreThread:
    """A thread for the calls of a store."""
    # A call may wait for its turn in this process, at the gate, and for another program's lock.
    timeout_s = 3 * store.settings.connect_timeout_s + WORK_S
    return StoreThread(f"the database {store.database.path}", timeout_s=timeout_s)


class CallsStore:
    """Base of classes whose methods are operations of a store, each called in the store's thread."""

    _thread: StoreThread
    _store: ClusterStore


def in_thread(
    operation: Callable[Concatenate[ClusterStore, P], R],
) -> Callable[Concatenate[CallsStore, P], Coroutine[Any, Any, R]]:
    """A method that calls this operation of the store in its thread."""

    def method(self: CallsStore, /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        return self._thread.call(operation, self._store, *args, **kwargs)

    return method


class AsyncBell:
    """A `Bell` on the running event loop. Any number of tasks may wait for it."""

    def __init__(self, database: Path) -> None:
        self._bell = Bell(database)
        self.address = self._bell.address
        self.rings = 0
        self._poked = Poked([], is_all=False)
        self._waiting: set[asyncio.Future[None]] = set()
        self._loop = asyncio.get_running_loop()
        descriptor = self._bell.fileno()
        if descriptor is not None:
            self._loop.add_reader(descriptor, self._rung)

    async def wait(self, seen: int, timeout_s: float) -> None:
        """Return when `rings` differs from `seen`, or at the time-out.

        Read `rings` before you check whether there is something to wait for.
        """
        if self.rings != seen or timeout_s <= 0:
            return
        ring = self._loop.create_future()
        self._waiting.add(ring)
        try:
            await asyncio.wait([ring], timeout=min(timeout_s, self._bell.recheck_s))
        finally:
            self._waiting.discard(ring)

    def close(self) -> None:
        """Wake all waiting tasks and close the socket."""
        self._ignore()
        self.ring()
        self._bell.close()

    def poked(self) -> Poked:
        """The results that wake-ups have named since the last call."""
        poked, self._poked = self._poked, Poked([], is_all=False)
        is_deaf = self._bell.fileno() is None or self._bell.is_flooded
        return Poked(poked.names, is_all=True) if is_deaf else poked

    def _rung(self) -> None:
        if (poked := self._bell.drain()) is not None:
            names = self._poked.names + poked.names
            is_all = self._poked.is_all or poked.is_all or len(names) > UNREAD_MAX
            self._poked = Poked([] if is_all else names, is_all)
            self.ring()
        if self._bell.is_flooded:
            self._ignore()

    def _ignore(self) -> None:
        descriptor = self._bell.fileno()
        if descriptor is not None:
            self._loop.remove_reader(descriptor)

    def ring(self) -> None:
        """Wake the waiting tasks; must be called on the loop."""
        self.rings += 1
        for ring in self._waiting:
            if not ring.done():
                ring.set_result(None)


class SqliteAsyncProducer(CallsStore):
    """The producer for the clients of one event loop, with a store in its own thread.

    A call that has begun runs to its end in the thread even if its caller has gone, so the caller does not
    know whether the message was sent. The message is remembered in the same transaction, so that the same
    message is not sent twice.
    """

    repeats = True

    def __init__(self, settings: BrokerSettings) -> None:
        self._store = ClusterStore(settings)
        self._thread = thread_of(self._store)

    @property
    def capabilities(self) -> Capabilities:
        """What the embedded broker supports."""
        return CAPABILITIES

    async def publish(self, batch: Sequence[Outgoing], attempt: Attempt) -> None:
        """Publish the batch in one transaction; messages sent within SENT_REMEMBERED_S are left out."""

        def work() -> None:
            attempt.is_out = True
            self._store.publish_once(batch, remembered_s=SENT_REMEMBERED_S)

        await self._thread.call(work)

    hold_unique = in_thread(ClusterStore.hold_unique)
    release_unique = in_thread(ClusterStore.release_unique)

    async def close(self) -> None:
        """Close the file when calls that have begun are done, without waiting for them."""
        self.abandon()

    def abandon(self) -> None:
        """Close the file in the thread when calls that have begun are done."""
        self._thread.post(self._store.close)
        self._thread.stop(cancel=False)
