"""RpcBackend: results sent to the client that asked, over RabbitMQ, as Celery's rpc:// does.

The client has a queue of its own and puts its name into `reply_to`; the worker publishes each
result there, beside the ack of its message. So a result reaches one process, the one that sent
the task, and is kept in its memory: nobody else can read it, and a client that ends takes its
results with it. Who needs more stores results in Redis or SQLite.

One thread receives for the whole process; it begins when an address is first needed. After a lost
connection the queue is made again under the same name, and what was sent meanwhile is lost.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import random
from uuid import uuid4
from weakref import WeakSet

import msgspec

from umbel.backends.interface import ChordPart
from umbel.brokers.amqp import outbox, topology
from umbel.brokers.amqp.blocking import BlockingLink
from umbel.brokers.amqp.frames import Incoming, Method
from umbel.brokers.amqp.location import locations_from_url
from umbel.brokers.amqp.producer import AmqpProducer
from umbel.brokers.amqp.table import decode_properties
from umbel.brokers.interface import BrokerSettings
from umbel.errors import BadURL, BrokerError, NotSupported
from umbel.protocol.retry import reconnect_wait_s
from umbel.protocol.states import READY_STATES, SUCCESS
from umbel.wire.message import Outgoing, StoredResult

RESULTS_MAX = 100_000  # kept in memory; past it the oldest is forgotten

_backends: "WeakSet[RpcBackend]" = WeakSet()


class _Status(msgspec.Struct):
    status: str


_status = msgspec.json.Decoder(_Status)


class RpcBackend:
    def __init__(self, url: str, settings: BrokerSettings) -> None:
        self._url = url
        broker_url = settings.url if url.startswith("rpc:") else url
        self._settings = replace(settings, url=broker_url)
        self._locations = locations_from_url(broker_url)
        self._producer = AmqpProducer(self._settings)
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
        try:
            return locations_from_url(broker_url) == self._locations
        except BadURL:
            return False

    def store(self, results: Sequence[StoredResult]) -> None:
        """Keep them here. In a forked child they go to the parent, whose tasks these may be."""
        self._keep(results)
        if self._inherited:
            self._producer.send([outbox.result(result, self._address) for result in results])

    def read(self, task_ids: Iterable[str]) -> Mapping[str, StoredResult]:
        oldest = time.monotonic() - self._settings.result_expires_s
        with self._changed:
            found = {task_id: self._results[task_id] for task_id in task_ids if task_id in self._results}
        return {task_id: result for task_id, (result, kept_at) in found.items() if kept_at >= oldest}

    def wait(self, task_ids: Iterable[str], timeout_s: float | None) -> Mapping[str, StoredResult]:
        wanted = list(task_ids)
        if not wanted:
            return {}
        self._receive()
        with self._changed:
            self._changed.wait_for(lambda: self._final(wanted), timeout_s)
            return self._final(wanted)

    async def wait_async(
        self, task_ids: Iterable[str], timeout_s: float | None
    ) -> Mapping[str, StoredResult]:
        wanted = list(task_ids)
        if not wanted:
            return {}
        await asyncio.to_thread(self._receive)
        arrived = asyncio.Event()
        with self._told(arrived):
            try:
                async with asyncio.timeout(timeout_s):
                    while not (found := self._final(wanted)):
                        arrived.clear()
                        await arrived.wait()
                    return found
            except TimeoutError:
                return self._final(wanted)

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

    def end_chord(self, group_id: str, batch: Sequence[Outgoing]) -> None:
        raise _no_chords()

    def close(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.stop()
        self._producer.close()

    def after_fork(self) -> None:
        """In the child: the receiving thread stayed behind, and so did its queue."""
        self._changed = threading.Condition()
        self._listeners = set()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            self._inherited = True
            receiver.abandon()

    def _receive(self) -> None:
        with self._changed:
            if self._receiver is not None:
                return
            if self._inherited:
                self._address, self._inherited = str(uuid4()), False
            receiver = _Receiver(self._settings, self._address, self._on_result)
            receiver.start()
            self._receiver = receiver

    def _on_result(self, incoming: Incoming) -> None:
        try:
            status = _status.decode(incoming.body).status
        except msgspec.MsgspecError:
            return  # no result map: whatever it is, it was not asked for
        task_id = decode_properties(incoming.properties).correlation_id
        self._keep([StoredResult(task_id, status, incoming.body)])

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

    def __init__(self, settings: BrokerSettings, address: str, take: Callable[[Incoming], None]) -> None:
        self._settings = settings
        self._address = address
        self._take = take
        self._link: BlockingLink | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="umbel results", daemon=True)

    def start(self) -> None:
        self._link = self._open()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if (link := self._link) is not None:
            link.interrupt()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def abandon(self) -> None:
        if self._link is not None:
            self._link.abandon()

    def _open(self) -> BlockingLink:
        location = locations_from_url(self._settings.url)[0]
        link = BlockingLink(
            location, timeout_s=self._settings.connect_timeout_s, name=f"umbel results {os.getpid()}"
        )
        for method, fields in topology.result_queue(self._address).calls():
            link.call(method, *fields)
        link.call(Method.BASIC_CONSUME, 0, self._address, "r", False, True, False, False, {})
        return link

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                if self._link is None:
                    self._link = self._open()
                self._link.receive(None)
                failures = 0
            except BrokerError:
                link, self._link = self._link, None
                if link is not None:
                    link.abandon()
                failures += 1
                self._stopping.wait(reconnect_wait_s(failures, random()))
                continue
            arrived, self._link.deliveries = self._link.deliveries, []
            for incoming in arrived:
                self._take(incoming)
        if self._link is not None:
            self._link.abandon()


def _no_chords() -> NotSupported:
    return NotSupported(
        "a chord needs a place where its parts are counted, and rpc results are kept nowhere: "
        "set 'backend' to redis://… or sqlite:///…"
    )


def _after_fork() -> None:
    for backend in _backends:
        backend.after_fork()


os.register_at_fork(after_in_child=_after_fork)
