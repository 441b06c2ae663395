"""RedisBackend: results under Celery's keys, and waiting for them on their channels (wire 6.2).

A result is stored and published in one script, in which the first SUCCESS stays. A waiter subscribes to
the channels of all its tasks on one connection and then reads once, so that no result falls in
between. On an event loop all waiters share one connection, in threads each waiter has its own.
"""

import asyncio
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from umbel.backends.interface import ChordPart
from umbel.backends.redis_chords import RedisChords
from umbel.backends.redis_waiting import Listener, decode_results
from umbel.brokers.interface import BrokerSettings, Refused
from umbel.brokers.redis.address import parse_addresses
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.publishing import BATCH_BYTES_MAX, portions, weight_of
from umbel.brokers.redis.replies import checked
from umbel.brokers.redis.scripts import script
from umbel.brokers.redis.sockets import SocketConnection, SocketPool
from umbel.brokers.redis.verdicts import result_arguments, ttl_ms_of
from umbel.errors import BadURL, BrokerRefused
from umbel.protocol.delivery.states import READY_STATES
from umbel.wire.message import Outgoing, StoredResult

STORED_AT_ONCE = 1000
READ_AT_ONCE = 5000
LEAVE_S = 0.1
LIVELY_S = 5.0  # a wait asks so often whether the server is still there

_STORE = script("store")


class RedisBackend:
    def __init__(self, url: str, settings: BrokerSettings) -> None:
        self._url = url
        self._addresses = parse_addresses(url)
        self._keys = Keys.of(settings, self._addresses[0].database)
        self._ttl_ms = ttl_ms_of(settings.result_expires_s)
        self._pool = SocketPool(self._addresses, timeout_s=settings.connect_timeout_s)
        self._listening = SocketPool(self._addresses, timeout_s=settings.connect_timeout_s)
        self._timeout_s = settings.connect_timeout_s
        self._chords = RedisChords(
            self._pool, self._keys, ttl_s=settings.result_expires_s, declared=settings.declared
        )
        self._listeners: WeakKeyDictionary[asyncio.AbstractEventLoop, Listener] = WeakKeyDictionary()

    @property
    def url(self) -> str:
        return self._url

    def shares_settle(self, broker_url: str) -> bool:
        try:
            theirs = parse_addresses(broker_url)
        except BadURL:
            return False
        return [one.place for one in theirs] == [one.place for one in self._addresses]

    def store(self, results: Sequence[StoredResult]) -> None:
        refused: dict[int, str] = {}
        for some in portions(results, STORED_AT_ONCE):
            if weight_of(results[some[0]]) > BATCH_BYTES_MAX:  # then it is alone
                refused[some[0]] = f"it exceeds the limit of {BATCH_BYTES_MAX:,} bytes"
                continue
            args = result_arguments(self._keys, [results[place] for place in some])
            told = self._pool.run(_STORE, self._keys.result_prefix, self._ttl_ms, *args)
            for place, why in zip(told[::2], told[1::2], strict=True):
                refused[some[place]] = why.decode(errors="replace")
        if refused:
            first = min(refused)
            raise BrokerRefused(
                f"the result of {results[first].task_id!r} cannot be stored: {refused[first]}",
                places=sorted(refused),
            )

    def read(self, task_ids: Iterable[str], timeout_s: float | None = None) -> Mapping[str, StoredResult]:
        wanted = list(dict.fromkeys(task_ids))
        if not wanted:
            return {}
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        return self._pool.use(lambda connection: self._read(connection, wanted), deadline=deadline)

    def wait(self, task_ids: Iterable[str], timeout_s: float | None) -> Mapping[str, StoredResult]:
        """Block until one of the tasks has a final state, or the time-out; those that have one."""
        wanted = list(dict.fromkeys(task_ids))
        if not wanted:
            return {}
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        return self._listening.use(
            lambda connection: self._listen(connection, wanted, deadline), deadline=deadline
        )

    async def wait_async(
        self, task_ids: Iterable[str], timeout_s: float | None
    ) -> Mapping[str, StoredResult]:
        wanted = list(dict.fromkeys(task_ids))
        if not wanted:
            return {}
        return await self._listener().wait(wanted, timeout_s)

    async def read_async(
        self, task_ids: Iterable[str], timeout_s: float | None = None
    ) -> Mapping[str, StoredResult]:
        wanted = list(dict.fromkeys(task_ids))
        return await self._listener().read(wanted, timeout_s) if wanted else {}

    def hold_connection(self) -> None:
        self._listener().hold()

    def release_connection(self) -> None:
        self._listener().release()
        self._pool.close()  # what the loop's threads have left idle; who blocks opens another one

    def abandon_connection(self, loop: asyncio.AbstractEventLoop) -> None:
        self._listeners.pop(loop, None)

    def forget(self, task_ids: Iterable[str]) -> None:
        keys = [self._keys.result(task_id) for task_id in task_ids]
        if keys:
            self._pool.use(lambda connection: connection.call("DEL", *keys))

    def start_chord(self, group_id: str, size: int) -> None:
        self._chords.start(group_id, size)

    def add_chord_part(self, part: ChordPart) -> Sequence[ChordPart] | None:
        return self._chords.add(part)

    def claim_chord(self, group_id: str, by: str) -> bool:
        return self._chords.claim(group_id, by)

    def grow_chord(self, group_id: str, task_id: str) -> None:
        self._chords.grow(group_id, task_id)

    def end_chord(self, group_id: str, batch: Sequence[Outgoing]) -> Sequence[Refused]:
        return self._chords.end(group_id, batch)

    def save_group(self, group_id: str, payload: bytes) -> None:
        key = self._keys.chord(group_id)
        self._pool.use(lambda connection: connection.call("SET", key, payload, "PX", self._ttl_ms))

    def read_group(self, group_id: str) -> bytes | None:
        key = self._keys.chord(group_id)
        found: bytes | None = self._pool.use(lambda connection: connection.call("GET", key))
        return found

    def forget_group(self, group_id: str) -> None:
        key = self._keys.chord(group_id)
        self._pool.use(lambda connection: connection.call("DEL", key))

    def close(self) -> None:
        self._pool.close()
        self._listening.close()

    def _listener(self) -> Listener:
        loop = asyncio.get_running_loop()
        if loop not in self._listeners:
            self._listeners[loop] = Listener(self._addresses, self._keys, timeout_s=self._timeout_s)
        return self._listeners[loop]

    def _read(self, connection: SocketConnection, task_ids: Sequence[str]) -> dict[str, StoredResult]:
        found: dict[str, StoredResult] = {}
        for first in range(0, len(task_ids), READ_AT_ONCE):
            some = task_ids[first : first + READ_AT_ONCE]
            found |= decode_results(some, connection.call("MGET", *map(self._keys.result, some)))
        return found

    def _listen(
        self, connection: SocketConnection, task_ids: Sequence[str], deadline: float
    ) -> dict[str, StoredResult]:
        names = {self._keys.result(task_id).encode(): task_id for task_id in task_ids}
        connection.send([("SUBSCRIBE", *names)])
        for _ in names:
            while checked([connection.read()], connection.address)[0][0] != b"subscribe":
                continue  # a result that came meanwhile is read below
        found = {
            task_id: result
            for task_id, result in self._pool.use(
                lambda reader: self._read(reader, task_ids), deadline=deadline
            ).items()
            if result.status in READY_STATES
        }
        while not found and (left_s := deadline - time.monotonic()) > 0:
            pushed = self._next(connection, left_s)
            if pushed is not None and pushed[0] == b"message" and pushed[1] in names:
                told = decode_results([names[pushed[1]]], [pushed[2]])
                found |= {task_id: one for task_id, one in told.items() if one.status in READY_STATES}
        self._leave(connection)
        return found

    def _leave(self, connection: SocketConnection) -> None:
        """Unsubscribe, so that the connection can be used again; at the end of the time it has a moment."""
        connection.deadline = max(connection.deadline, time.monotonic() + LEAVE_S)
        connection.send([("UNSUBSCRIBE",)])
        while (reply := connection.read())[0] != b"unsubscribe" or reply[2] != 0:
            continue

    def _next(self, connection: SocketConnection, left_s: float) -> list[Any] | None:
        """The next thing that the server says, if it does in time. A silent one must answer a ping."""
        try:
            reply: list[Any] = connection.read(min(left_s, LIVELY_S))
        except TimeoutError:
            if left_s <= LIVELY_S:
                return None
            connection.send([("PING",)])
            reply = connection.read()
        return reply
