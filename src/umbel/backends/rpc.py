"""RpcBackend: results sent to the client that asked, over the broker, like Celery's rpc://.

The client has a reply queue and puts its name into `reply_to`. The worker publishes each result there,
together with the acknowledgement of its message. So a result reaches one process, the one that sent the task,
which stores it in memory: no other process can read it, and it is gone when the client ends. Clients that
need more use Redis or SQLite as the backend.

One thread receives for the whole process; it starts when an address is first needed. After a lost connection
it listens again under the same name. A `Post` defines how results travel; RabbitMQ and Redis have one each.
"""

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol
from uuid import uuid4
from weakref import WeakSet

import msgspec

from umbel.backends.interface import Arrivals, Backend, Take
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.refusals import unsupported_blocking
from umbel.chance import random
from umbel.errors import BrokerError, BrokerSilent
from umbel.protocol.delivery.states import READY_STATES, SUCCESS, reconnect_wait_s
from umbel.wire.message import StoredResult
from umbel.wire.values import UNREADABLE

CONNECTING_S = 1.0
RESULTS_MAX = 100_000  # in memory; beyond that the oldest is dropped

_backends: "WeakSet[RpcBackend]" = WeakSet()


class _Status(msgspec.Struct):
    status: str


_status = msgspec.json.Decoder(_Status)


class Inbox(Protocol):
    """A connection on which results for one address arrive, used by one thread."""

    def receive(self) -> Sequence[tuple[str, bytes]]:
        """Block until results arrive; return task ids and payloads. BrokerError: the connection is lost."""

    def interrupt(self) -> None:
        """Make `receive` fail; called from another thread."""

    def close(self) -> None:
        """Close the socket without a goodbye: it has failed, or it belongs to the parent of this forked
        process.
        """


class Post(Protocol):
    """How results travel over one kind of broker."""

    def is_at(self, broker_url: str) -> bool:
        """Whether this broker address names the same server."""

    def send(self, results: Sequence[StoredResult]) -> None:
        """Send each result to its `reply_to`."""

    def open(self, address: str) -> Inbox:
        """Open an inbox for the address; results that are sent after this returns are received."""

    def close(self) -> None:
        """Close the connection for sending."""


class RpcBackend(Backend):
    """Sends results to their clients, and stores the received results in memory."""

    start_chord = add_chord_part = claim_chord = grow_chord = end_chord = unsupported_blocking(
        "a chord needs a backend that counts its parts, and the rpc backend stores nothing: "
        "set 'backend' to redis://… or sqlite:///…"
    )
    save_group = read_group = forget_group = unsupported_blocking(
        "a group cannot be saved, because the rpc backend stores nothing: "
        "set 'backend' to redis://… or sqlite:///…"
    )

    def __init__(self, url: str, settings: BrokerSettings, post: Post) -> None:
        self._url = url
        self._post = post
        self._expires_s = settings.result_expires_s
        self._address = str(uuid4())
        self._inherited = False  # the address belongs to the parent of this forked process
        self._results: dict[str, tuple[StoredResult, float]] = {}
        self._changed = threading.Condition()
        self._waiters: set[_Waiter] = set()
        self._receiver: _Receiver | None = None
        _backends.add(self)

    @property
    def url(self) -> str:
        """The address of the backend, as configured."""
        return self._url

    @property
    def reply_to(self) -> str:
        """The name of this process's reply queue, which exists when this returns."""
        self._receive()
        return self._address

    def shares_settle(self, broker_url: str) -> bool:
        """Whether results can be published by the broker with this address."""
        return self._post.is_at(broker_url)

    def store(self, results: Sequence[StoredResult]) -> None:
        """Send the results that have a reply address, and store the others in memory.

        A forked child also sends the others to its parent, which may have sent their tasks.
        """
        letters = [result for result in results if result.reply_to]
        others = [result for result in results if not result.reply_to]
        self._add(others)
        if self._inherited:
            letters += [msgspec.structs.replace(result, reply_to=self._address) for result in others]
        if letters:
            self._post.send(letters)

    def read(self, task_ids: Iterable[str], timeout_s: float | None = None) -> Mapping[str, StoredResult]:
        """Return the results that this process has received and that have not expired."""
        oldest = time.monotonic() - self._expires_s
        with self._changed:
            found = {task_id: self._results[task_id] for task_id in task_ids if task_id in self._results}
        return {task_id: result for task_id, (result, received_at) in found.items() if received_at >= oldest}

    def wait(
        self, task_ids: Iterable[str], timeout_s: float | None, take: Take | None = None
    ) -> Mapping[str, StoredResult]:
        """Wait for results that this process receives; return nothing if it cannot listen within the
        time-out.
        """
        arrivals = Arrivals(task_ids, take)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not arrivals.missing or not self._receive(timeout_s):
            return {}
        with self._waiting(arrivals, lambda: None) as waiter:
            while not waiter.is_over():
                left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                with self._changed:
                    if not self._changed.wait_for(lambda: waiter.offered, left_s):
                        break
        return arrivals.found

    async def wait_async(
        self, task_ids: Iterable[str], timeout_s: float | None, take: Take | None = None
    ) -> Mapping[str, StoredResult]:
        """Wait like `wait`; the receiving thread wakes the event loop."""
        arrivals = Arrivals(task_ids, take)
        loop, wakeup = asyncio.get_running_loop(), asyncio.Event()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        if not arrivals.missing or not await asyncio.to_thread(self._receive, timeout_s):
            return {}

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(wakeup.set)

        with self._waiting(arrivals, wake) as waiter:
            try:
                async with asyncio.timeout_at(deadline):
                    while not waiter.is_over():
                        await wakeup.wait()
                        wakeup.clear()
            except TimeoutError:
                waiter.is_over()
        return arrivals.found

    async def read_async(
        self, task_ids: Iterable[str], timeout_s: float | None = None
    ) -> Mapping[str, StoredResult]:
        """Read like `read`: all results are in memory."""
        return self.read(task_ids)

    def forget(self, task_ids: Iterable[str]) -> None:
        """Drop results from memory."""
        with self._changed:
            for task_id in task_ids:
                self._results.pop(task_id, None)

    def close(self) -> None:
        """Stop the receiving thread and close all connections."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.stop()
        self._post.close()

    def after_fork(self) -> None:
        """Reset the state in a forked child: the receiving thread and its queue stayed in the parent."""
        self._changed = threading.Condition()
        self._waiters = set()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            self._inherited = True
            receiver.abandon()

    def _receive(self, timeout_s: float | None = None) -> bool:
        """Start listening; return whether it began in time. It continues for later callers."""
        receiver = self._receiver or self._begin_receiving()
        try:
            return receiver.has_begun(timeout_s)
        except BrokerError:
            with self._changed:
                if receiver.refused is not None and self._receiver is receiver:
                    self._receiver = None
            raise

    def _begin_receiving(self) -> "_Receiver":
        with self._changed:
            if self._receiver is None:
                if self._inherited:
                    self._address, self._inherited = str(uuid4()), False
                self._receiver = _Receiver(self._post, self._address, self._on_results)
                self._receiver.start()
            return self._receiver

    def _on_results(self, arrived: Sequence[tuple[str, bytes]]) -> None:
        results: list[StoredResult] = []
        for task_id, payload in arrived:
            try:
                status = _status.decode(payload).status
            except UNREADABLE:
                continue  # not a result map
            results.append(StoredResult(task_id, status, payload))
        self._add(results)

    def _add(self, results: Sequence[StoredResult]) -> None:
        now = time.monotonic()
        with self._changed:
            for result in results:
                known = self._results.get(result.task_id)
                if known is not None and known[0].status == SUCCESS:
                    continue  # the first success stays
                self._results.pop(result.task_id, None)
                self._results[result.task_id] = (result, now)
                if len(self._results) > RESULTS_MAX:
                    del self._results[next(iter(self._results))]
            for waiter in self._waiters:
                waiter.offer(results)
            self._changed.notify_all()

    @contextmanager
    def _waiting(self, arrivals: Arrivals, wake: Callable[[], None]) -> "Iterator[_Waiter]":
        waiter = _Waiter(arrivals, wake)
        with self._changed:
            waiter.offer(self.read(arrivals.missing).values())
            self._waiters.add(waiter)
        try:
            yield waiter
        finally:
            with self._changed:
                self._waiters.discard(waiter)


class _Waiter:
    """A wait for some results. The receiving thread offers it the results that arrive."""

    def __init__(self, arrivals: Arrivals, wake: Callable[[], None]) -> None:
        self.offered: deque[StoredResult] = deque()
        self._arrivals = arrivals
        self._wake = wake

    def offer(self, results: Iterable[StoredResult]) -> None:
        missing = self._arrivals.missing
        new = [result for result in results if result.task_id in missing and result.status in READY_STATES]
        if new:
            self.offered.extend(new)
            self._wake()

    def is_over(self) -> bool:
        """Take the offered results, in the waiting thread; return whether these are enough."""
        new: dict[str, StoredResult] = {}
        while self.offered:
            result = self.offered.popleft()
            new.setdefault(result.task_id, result)
        return self._arrivals.take(new)


class _Receiver:
    """The thread that receives results from this process's queue."""

    def __init__(self, post: Post, address: str, take: Callable[[Sequence[tuple[str, bytes]]], None]) -> None:
        self._post = post
        self._address = address
        self._take = take
        self._inbox: Inbox | None = None
        self._stopping = threading.Event()
        self._changed = threading.Condition()
        self._is_listening = False
        self._silent: BrokerError | None = None  # why the last attempt failed
        self.refused: BrokerError | None = None  # why retrying is useless
        self._thread = threading.Thread(target=self._run, name="umbel results", daemon=True)

    def start(self) -> None:
        """Start the thread, which opens the connection: an unresponsive server would block the caller."""
        self._thread.start()

    def has_begun(self, timeout_s: float | None) -> bool:
        """Return whether it listens within the time; raise the reason if it cannot.

        An unresponsive server is tried again; a caller without a time-out waits for one attempt.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_listening or self.refused or (timeout_s is None and self._silent), timeout_s
            )
            problem = self.refused or self._silent
            if problem is not None and not self._is_listening:
                raise problem
            return self._is_listening

    def stop(self) -> None:
        self._stopping.set()
        if (inbox := self._inbox) is not None:
            inbox.interrupt()
        if self._thread is not threading.current_thread():
            # A connected thread ends at once; one that waits for an unresponsive server, by its time-out.
            self._thread.join(None if self._is_listening else CONNECTING_S)

    def _begin(self) -> bool:
        while not self._stopping.is_set():
            try:
                self._inbox = self._post.open(self._address)
            except BrokerSilent as error:
                self._set_state(silent=error)
            except BrokerError as error:
                self._set_state(refused=error)
                return False
            else:
                self._set_state(is_listening=True)
                return True
        return False

    def _set_state(
        self,
        *,
        is_listening: bool = False,
        silent: BrokerError | None = None,
        refused: BrokerError | None = None,
    ) -> None:
        with self._changed:
            self._is_listening, self._silent, self.refused = is_listening, silent, refused
            self._changed.notify_all()

    def abandon(self) -> None:
        if self._inbox is not None:
            self._inbox.close()

    def _run(self) -> None:
        if not self._begin():
            if self._inbox is not None:
                self._inbox.close()
            return
        failures = 0
        while not self._stopping.is_set():
            try:
                if self._inbox is None:
                    self._inbox = self._post.open(self._address)
                arrived = self._inbox.receive()
                failures = 0
            except BrokerError:
                inbox, self._inbox = self._inbox, None
                if inbox is not None:
                    inbox.close()
                failures += 1
                self._stopping.wait(reconnect_wait_s(failures, random()))
                continue
            self._take(arrived)
        if self._inbox is not None:
            self._inbox.close()


def _after_fork() -> None:
    for backend in _backends:
        backend.after_fork()


os.register_at_fork(after_in_child=_after_fork)
