"""RpcBackend: results sent to the client that asked, over the broker, as Celery's rpc:// does.

The client has a reply queue and puts its name into `reply_to`; the worker publishes each
result there, beside the ack of its message. So a result reaches one process, the one that sent
the task, and is kept in its memory: nobody else can read it, and a client that ends takes its
results with it. Who needs more stores results in Redis or SQLite.

One thread receives for the whole process; it begins when an address is first needed. After a lost
connection it listens again under the same name. How results travel is the `Post`'s part: one file
each for RabbitMQ and Redis.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol
from uuid import uuid4
from weakref import WeakSet

import msgspec

from umbel.backends.interface import ChordPart
from umbel.brokers.interface import BrokerSettings, Refused
from umbel.chance import random
from umbel.errors import BrokerError, BrokerSilent, NotSupported
from umbel.protocol.delivery.states import READY_STATES, SUCCESS
from umbel.protocol.retry import reconnect_wait_s
from umbel.wire.message import Outgoing, StoredResult
from umbel.wire.values import UNREADABLE

CONNECTING_S = 1.0
RESULTS_MAX = 100_000  # kept in memory; past it the oldest is forgotten

_backends: "WeakSet[RpcBackend]" = WeakSet()


class _Status(msgspec.Struct):
    status: str


_status = msgspec.json.Decoder(_Status)


class Inbox(Protocol):
    """A connection on which results for one address arrive, used by one thread."""

    def receive(self) -> Sequence[tuple[str, bytes]]:
        """Block until there are some: task ids and payloads. BrokerError: the connection is lost."""
        ...

    def interrupt(self) -> None:
        """From another thread: make `receive` end with an error."""
        ...

    def close(self) -> None:
        """Say nothing more on it: it has failed, or it is the parent's of this forked process."""
        ...


class Post(Protocol):
    """How results travel over one kind of broker."""

    def is_at(self, broker_url: str) -> bool: ...
    def send(self, results: Sequence[StoredResult]) -> None:
        """Each to its `reply_to`."""
        ...

    def open(self, address: str) -> Inbox:
        """When this returns, what is sent to the address is received."""
        ...

    def close(self) -> None: ...


class RpcBackend:
    def __init__(self, url: str, settings: BrokerSettings, post: Post) -> None:
        self._url = url
        self._post = post
        self._expires_s = settings.result_expires_s
        self._address = str(uuid4())
        self._inherited = False  # the address is that of the process this one was forked from
        self._results: dict[str, tuple[StoredResult, float]] = {}
        self._changed = threading.Condition()
        self._listeners: set[Callable[[], None]] = set()
        self._receiver: _Receiver | None = None
        _backends.add(self)

    @property
    def url(self) -> str:
        return self._url

    @property
    def reply_to(self) -> str:
        """The name of this process's queue, which is there when this returns."""
        self._receive()
        return self._address

    def shares_settle(self, broker_url: str) -> bool:
        return self._post.is_at(broker_url)

    def store(self, results: Sequence[StoredResult]) -> None:
        """Send those that somebody asked for, keep the others here.

        In a forked child these go to the parent too, whose tasks they may be.
        """
        letters = [result for result in results if result.reply_to]
        others = [result for result in results if not result.reply_to]
        self._keep(others)
        if self._inherited:
            letters += [msgspec.structs.replace(result, reply_to=self._address) for result in others]
        if letters:
            self._post.send(letters)

    def read(self, task_ids: Iterable[str], timeout_s: float | None = None) -> Mapping[str, StoredResult]:
        oldest = time.monotonic() - self._expires_s
        with self._changed:
            found = {task_id: self._results[task_id] for task_id in task_ids if task_id in self._results}
        return {task_id: result for task_id, (result, kept_at) in found.items() if kept_at >= oldest}

    def wait(self, task_ids: Iterable[str], timeout_s: float | None) -> Mapping[str, StoredResult]:
        wanted = list(task_ids)
        if not wanted:
            return {}
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._receive(timeout_s):
            return {}
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        with self._changed:
            self._changed.wait_for(lambda: self._final(wanted), left_s)
            return self._final(wanted)

    async def wait_async(
        self, task_ids: Iterable[str], timeout_s: float | None
    ) -> Mapping[str, StoredResult]:
        wanted = list(task_ids)
        if not wanted:
            return {}
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        if not await asyncio.to_thread(self._receive, timeout_s):
            return {}
        arrived = asyncio.Event()
        with self._told(arrived):
            try:
                async with asyncio.timeout_at(deadline):
                    while not (found := self._final(wanted)):
                        arrived.clear()
                        await arrived.wait()
                    return found
            except TimeoutError:
                return self._final(wanted)

    async def read_async(
        self, task_ids: Iterable[str], timeout_s: float | None = None
    ) -> Mapping[str, StoredResult]:
        return self.read(task_ids)  # in memory

    def forget(self, task_ids: Iterable[str]) -> None:
        with self._changed:
            for task_id in task_ids:
                self._results.pop(task_id, None)

    def start_chord(self, group_id: str, size: int) -> None:
        raise _no_chords()

    def add_chord_part(self, part: ChordPart) -> Sequence[ChordPart] | None:
        raise _no_chords()

    def claim_chord(self, group_id: str, by: str) -> bool:
        raise _no_chords()

    def grow_chord(self, group_id: str, task_id: str) -> None:
        raise _no_chords()

    def end_chord(self, group_id: str, batch: Sequence[Outgoing]) -> Sequence[Refused]:
        raise _no_chords()

    def save_group(self, group_id: str, payload: bytes) -> None:
        raise _no_groups()

    def read_group(self, group_id: str) -> bytes | None:
        raise _no_groups()

    def forget_group(self, group_id: str) -> None:
        raise _no_groups()

    def close(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.stop()
        self._post.close()

    def after_fork(self) -> None:
        """In the child: the receiving thread stayed behind, and so did its queue."""
        self._changed = threading.Condition()
        self._listeners = set()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            self._inherited = True
            receiver.abandon()

    def _receive(self, timeout_s: float | None = None) -> bool:
        """Start listening; whether it started in time. It goes on for later callers."""
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
                continue  # no result map: whatever it is, it was not asked for
            results.append(StoredResult(task_id, status, payload))
        self._keep(results)

    def _keep(self, results: Sequence[StoredResult]) -> None:
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
            self._changed.notify_all()
            listeners = list(self._listeners)
        for tell in listeners:
            tell()

    def _final(self, task_ids: Sequence[str]) -> dict[str, StoredResult]:
        return {
            task_id: result
            for task_id, result in self.read(task_ids).items()
            if result.status in READY_STATES
        }

    @contextmanager
    def _told(self, arrived: asyncio.Event) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def tell() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrived.set)

        with self._changed:
            self._listeners.add(tell)
        try:
            yield
        finally:
            with self._changed:
                self._listeners.discard(tell)


class _Receiver:
    """The thread that takes results from this process's queue."""

    def __init__(self, post: Post, address: str, take: Callable[[Sequence[tuple[str, bytes]]], None]) -> None:
        self._post = post
        self._address = address
        self._take = take
        self._inbox: Inbox | None = None
        self._stopping = threading.Event()
        self._told = threading.Condition()
        self._is_listening = False
        self._silent: BrokerError | None = None  # why the last try came to nothing
        self.refused: BrokerError | None = None  # why there is no use in another
        self._thread = threading.Thread(target=self._run, name="umbel results", daemon=True)

    def start(self) -> None:
        """The thread opens the connection: a server that is silent would keep the caller waiting."""
        self._thread.start()

    def has_begun(self, timeout_s: float | None) -> bool:
        """Whether it listens within the time; raises why it does not, as far as that is known.

        A server that is silent is tried again: who has no time-out waits for one try.
        """
        with self._told:
            self._told.wait_for(
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
            # One that is connected ends at once; one that waits for a silent server, by its time-out.
            self._thread.join(None if self._is_listening else CONNECTING_S)

    def _begin(self) -> bool:
        while not self._stopping.is_set():
            try:
                self._inbox = self._post.open(self._address)
            except BrokerSilent as error:
                self._tell(silent=error)
            except BrokerError as error:
                self._tell(refused=error)
                return False
            else:
                self._tell(is_listening=True)
                return True
        return False

    def _tell(
        self,
        *,
        is_listening: bool = False,
        silent: BrokerError | None = None,
        refused: BrokerError | None = None,
    ) -> None:
        with self._told:
            self._is_listening, self._silent, self.refused = is_listening, silent, refused
            self._told.notify_all()

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


def _no_chords() -> NotSupported:
    return NotSupported(
        "a chord needs a backend that counts its parts, and the rpc backend stores nothing: "
        "set 'backend' to redis://… or sqlite:///…"
    )


def _no_groups() -> NotSupported:
    return NotSupported(
        "a group cannot be kept, because the rpc backend stores nothing: "
        "set 'backend' to redis://… or sqlite:///…"
    )


def _after_fork() -> None:
    for backend in _backends:
        backend.after_fork()


os.register_at_fork(after_in_child=_after_fork)
