"""StoreThread: the one thread in which an asynchronous broker calls its store.

SQLite blocks, so it never runs on the event loop; one thread keeps the calls in order. A caller
that is cancelled before its call began takes it back. A call that has begun runs to its end in
the thread, and `abandoned` decides what becomes of an answer that nobody waits for any more.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from umbel.errors import BrokerUnavailable

P = ParamSpec("P")
R = TypeVar("R")


class StoreThread:
    def __init__(self, name: str, *, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._wait(self._executor.submit(function, *args, **kwargs))

    async def call_or(
        self, abandoned: Callable[[R], object], function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call; if nobody waits for the answer when it comes, hand it to `abandoned` in the thread."""
        future = self._executor.submit(function, *args, **kwargs)
        try:
            return await self._wait(future)
        except (asyncio.CancelledError, BrokerUnavailable):
            future.add_done_callback(lambda done: self._hand_over(done, abandoned))
            raise

    def post(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> Future[object]:
        """Call without waiting; for what is repeated soon, so that one failure does not matter."""
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
        """Take no more calls; what has begun ends by itself, and so do those that wait unless cancelled."""
        self._executor.shutdown(wait=False, cancel_futures=cancel)
