"""RedisBackend: results and chords under Celery's keys, and waiting for results on their channels (wire 6.2).

A result is stored and published in one script, in which the first SUCCESS stays. A waiter subscribes to the
channels of all its tasks on one connection and then reads once, so that no result falls in between. In
threads each waiter has its own connection. On an event loop all waiters share the loop's connection
(`brokers/redis/link.py`), which senders on this loop use as well.

A part of a chord is the JSON text `[1, task id, state, value]`, scored by its place, so that workers of
Celery and of Umbel count it alike. The text is exactly Celery's, because up to 5.6 Celery recognises a
counted part by its text only. The task that brings the last part claims the chord. The same task can claim
it again, so a redelivered part finishes the work that its former run began. Ending a chord pushes the body
and marks the chord done in one script.
"""

import asyncio
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from umbel.backends.interface import Arrivals, Backend, ChordPart, Take
from umbel.brokers.interface import BrokerSettings, Refused
from umbel.brokers.redis.address import Address, parse_addresses
from umbel.brokers.redis.keys import Keys
from umbel.brokers.redis.link import Link, LoopLink, hold_loop_link, release_loop_link
from umbel.brokers.redis.publishing import (
    BATCH_BYTES_MAX,
    Bindings,
    delivery_tags,
    portions,
    sealed,
    weight_of,
)
from umbel.brokers.redis.queues import bury_arguments
from umbel.brokers.redis.replies import checked
from umbel.brokers.redis.scripts import script
from umbel.brokers.redis.sockets import SocketConnection, SocketPool
from umbel.brokers.redis.verdicts import result_arguments, ttl_ms_of
from umbel.chance import random
from umbel.errors import AccessRefused, BadURL, BrokerRefused, BrokerSilent, BrokerUnavailable, ChordError
from umbel.protocol.delivery.states import FAILURE, PENDING, reconnect_wait_s
from umbel.wire.message import Outgoing, StoredResult
from umbel.wire.result import exception_map
from umbel.wire.values import UNREADABLE, encode_json

STORED_AT_ONCE = 1000
READ_AT_ONCE = 5000
SUBSCRIBED_AT_ONCE = 5000  # the server closes a connection on which too many confirmations are unread
LEAVE_S = 0.1
PING_EVERY_S = 5.0  # during a wait, to check that the server still answers
READ_AT_LEAST_S = 0.25  # a shorter wait gets one read
READ_SHARE = 20.0  # reads take at most a twentieth of the time
CHORD_CLAIM_S = 30
CHORD_DONE_S = 300  # as in Celery 5.7: long enough for the last redelivery of a part


class _Status(msgspec.Struct):
    status: str = PENDING


_status = msgspec.json.Decoder(_Status).decode


def decode_results(task_ids: Sequence[str], payloads: Sequence[bytes | None]) -> dict[str, StoredResult]:
    """Return the stored results; a payload that is not a result map counts as missing."""
    found: dict[str, StoredResult] = {}
    for task_id, payload in zip(task_ids, payloads, strict=True):
        if payload is None:
            continue
        try:
            found[task_id] = StoredResult(task_id, _status(payload).status, payload)
        except UNREADABLE:
            continue
    return found


# ---- waiting for results on an event loop ----------------------------------------------------------


class _Waiter:
    """The state of one wait: the results that were pushed since its last read."""

    def __init__(self) -> None:
        self.wakeup = asyncio.Event()
        self.pushed: dict[str, bytes] = {}  # by the result's key
        self.is_lost = False  # the connection was lost, perhaps with pushed results


class Listener:
    """The waits of one event loop, on one connection that is open while it is held."""

    def __init__(self, addresses: Sequence[Address], keys: Keys, *, timeout_s: float) -> None:
        self._addresses = addresses
        self._keys = keys
        self._timeout_s = timeout_s
        self._waiters: dict[str, set[_Waiter]] = {}  # by the result's key
        self._held: LoopLink | None = None
        self._holders = 0

    def hold(self) -> None:
        """Keep the connection until `release`, with or without waiters."""
        if self._held is None:
            self._held = hold_loop_link(self._addresses, timeout_s=self._timeout_s)
            self._held.on_push.append(self._on_push)
            self._held.on_lost.append(self._on_lost)
        self._holders += 1

    def release(self) -> None:
        """End one hold; the last one gives the connection back."""
        self._holders -= 1
        if self._held is not None and not self._holders:
            held, self._held = self._held, None
            held.on_push.remove(self._on_push)
            held.on_lost.remove(self._on_lost)
            release_loop_link(held)

    async def read(self, task_ids: Sequence[str], timeout_s: float | None) -> dict[str, StoredResult]:
        """Return the stored results, in whatever state."""
        keys = [self._keys.result(task_id) for task_id in task_ids]
        self.hold()
        try:
            async with asyncio.timeout(self._timeout_s if timeout_s is None else timeout_s):
                return decode_results(task_ids, await self._read_keys(keys))
        except TimeoutError:
            raise self._unanswered(timeout_s) from None
        finally:
            self.release()

    async def _read_keys(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        """Read the keys. A lost connection says nothing about the server, so the read is retried once on a
        new connection.
        """
        had_connection = self._link.is_connected
        try:
            payloads: Sequence[bytes | None] = await self._link.call("MGET", *keys)
        except AccessRefused:
            raise
        except BrokerUnavailable as problem:
            if not had_connection or isinstance(problem, BrokerSilent):
                raise
            payloads = await self._link.call("MGET", *keys)
        return payloads

    @property
    def _link(self) -> Link:
        assert self._held is not None, "it is held"
        return self._held.link

    def _unanswered(self, timeout_s: float | None) -> BrokerUnavailable:
        waited_s = self._timeout_s if timeout_s is None else timeout_s
        return BrokerUnavailable(f"Redis at {self._link.address.shown} did not answer within {waited_s:g} s")

    async def wait(self, arrivals: Arrivals, timeout_s: float | None) -> None:
        """Wait until `arrivals` has enough, or the time-out; BrokerUnavailable if the server never
        answered.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        tasks = {self._keys.result(task_id): task_id for task_id in arrivals.missing}
        waiter = _Waiter()
        self.hold()
        for key in tasks:
            self._waiters.setdefault(key, set()).add(waiter)
        answered = False
        try:
            async with asyncio.timeout(None if timeout_s is None else max(timeout_s, READ_AT_LEAST_S)):
                while True:
                    began, waiter.is_lost = time.monotonic(), False
                    if await self._subscribe_and_read(arrivals, deadline):
                        return
                    answered = True
                    # Reads of many results are rarer; pushed results arrive without them.
                    pause_s = max(PING_EVERY_S, READ_SHARE * (time.monotonic() - began))
                    if await _take_pushed(waiter, arrivals, tasks, min(deadline, began + pause_s)):
                        return
                    if time.monotonic() >= deadline:
                        return
        except TimeoutError:
            if not answered:
                raise self._unanswered(timeout_s) from None
        finally:
            self._leave(waiter, list(tasks))
            self.release()

    async def _subscribe_and_read(self, arrivals: Arrivals, deadline: float) -> bool:
        """Subscribe to the missing results, then read them; return whether these are enough.

        While the server cannot be reached, this retries for the connect time-out. If the server does not
        answer, it retries until the deadline, if there is one.
        """
        ends, failures = time.monotonic() + self._timeout_s, 0
        while True:
            try:
                await self._link.connect()
                task_ids = list(arrivals.missing)
                for first in range(0, len(task_ids), READ_AT_ONCE):
                    some = task_ids[first : first + READ_AT_ONCE]
                    keys = [self._keys.result(task_id) for task_id in some]
                    sent = self._link.send_after([("SUBSCRIBE", *keys)], ("MGET", *keys))
                    (payloads,) = self._link.checked(await self._link.reply_to(sent))
                    if arrivals.take(decode_results(some, payloads)):
                        return True
            except AccessRefused:
                raise
            except BrokerUnavailable as problem:
                failures += 1
                is_silent = isinstance(problem, BrokerSilent)
                if time.monotonic() >= (deadline if is_silent and deadline < math.inf else ends):
                    raise
                await asyncio.sleep(reconnect_wait_s(failures, random()))
            else:
                return False

    def _leave(self, waiter: _Waiter, keys: Sequence[str]) -> None:
        for key in keys:
            self._waiters[key].discard(waiter)
        unwanted = [key for key in keys if not self._waiters[key]]
        for key in unwanted:
            del self._waiters[key]
        if self._link.is_connected:
            for first in range(0, len(unwanted), READ_AT_ONCE):
                some = unwanted[first : first + READ_AT_ONCE]
                self._link.send_after([("UNSUBSCRIBE", *some)], ("PING",))

    def _on_push(self, pushed: list[Any]) -> None:
        if pushed[0] == b"message":
            key = pushed[1].decode()
            for waiter in self._waiters.get(key, ()):
                waiter.pushed[key] = pushed[2]
                waiter.wakeup.set()

    def _on_lost(self) -> None:
        """Let all waiters read again: pushed results may have been lost with the connection."""
        for waiter in {waiter for waiters in self._waiters.values() for waiter in waiters}:
            waiter.is_lost = True
            waiter.wakeup.set()


async def _take_pushed(waiter: _Waiter, arrivals: Arrivals, tasks: Mapping[str, str], ends: float) -> bool:
    """Take pushed results until `ends`, or until the connection is lost; return whether these are enough."""
    while not waiter.is_lost:
        try:
            async with asyncio.timeout(max(0.0, ends - time.monotonic())):
                await waiter.wakeup.wait()
        except TimeoutError:
            return False
        waiter.wakeup.clear()
        pushed, waiter.pushed = waiter.pushed, {}
        task_ids = [tasks[key] for key in pushed]
        if arrivals.take(decode_results(task_ids, list(pushed.values()))):
            return True
    return False


# ---- redis backend ---------------------------------------------------------------------------------


class RedisBackend(Backend):
    """Stores results in Redis, in Celery's format; several servers are tried in order."""

    def __init__(self, url: str, settings: BrokerSettings) -> None:
        self._url = url
        self._addresses = parse_addresses(url)
        self._keys = Keys.of(settings, self._addresses[0].database)
        self._bindings = Bindings(self._keys, settings.declared)
        self._store_script = script("store", prefix=self._keys.result_prefix)
        self._ttl_ms = ttl_ms_of(settings.result_expires_s)
        self._chord_ttl_s = max(1, math.ceil(settings.result_expires_s))
        self._pool = SocketPool(self._addresses, timeout_s=settings.connect_timeout_s)
        self._listening = SocketPool(self._addresses, timeout_s=settings.connect_timeout_s)
        self._timeout_s = settings.connect_timeout_s
        self._listeners: WeakKeyDictionary[asyncio.AbstractEventLoop, Listener] = WeakKeyDictionary()

    @property
    def url(self) -> str:
        """The address of the server, as configured."""
        return self._url

    def shares_settle(self, broker_url: str) -> bool:
        """Whether the broker's address names the same servers and database."""
        try:
            theirs = parse_addresses(broker_url)
        except BadURL:
            return False
        return [address.place for address in theirs] == [address.place for address in self._addresses]

    def store(self, results: Sequence[StoredResult]) -> None:
        """Store and publish in portions; BrokerRefused names results that are too large or were refused."""
        refused: dict[int, str] = {}
        for some in portions(results, STORED_AT_ONCE):
            if weight_of(results[some[0]]) > BATCH_BYTES_MAX:  # such a result is alone in its portion
                refused[some[0]] = f"it exceeds the limit of {BATCH_BYTES_MAX:,} bytes"
                continue
            args = result_arguments(self._keys, [results[place] for place in some])
            reply = self._pool.run(self._store_script, self._ttl_ms, *args)
            for place, why in zip(reply[::2], reply[1::2], strict=True):
                refused[some[place]] = why.decode(errors="replace")
        if refused:
            first = min(refused)
            raise BrokerRefused(
                f"the result of {results[first].task_id!r} cannot be stored: {refused[first]}",
                places=sorted(refused),
            )

    def read(self, task_ids: Iterable[str], timeout_s: float | None = None) -> Mapping[str, StoredResult]:
        """Return the stored results, read in portions on a pooled connection."""
        wanted = list(dict.fromkeys(task_ids))
        if not wanted:
            return {}
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        return self._pool.use(lambda connection: self._read(connection, wanted), deadline=deadline)

    def wait(
        self, task_ids: Iterable[str], timeout_s: float | None, take: Take | None = None
    ) -> Mapping[str, StoredResult]:
        """Subscribe to the results' channels on a separate connection, read, and wait for pushed results."""
        arrivals = Arrivals(task_ids, take)
        if arrivals.missing:
            deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
            self._listening.use(
                lambda connection: self._listen(connection, arrivals, deadline), deadline=deadline
            )
        return arrivals.found

    async def wait_async(
        self, task_ids: Iterable[str], timeout_s: float | None, take: Take | None = None
    ) -> Mapping[str, StoredResult]:
        """Wait like `wait`, on the connection of the running loop."""
        arrivals = Arrivals(task_ids, take)
        if arrivals.missing:
            await self._listener().wait(arrivals, timeout_s)
        return arrivals.found

    async def read_async(
        self, task_ids: Iterable[str], timeout_s: float | None = None
    ) -> Mapping[str, StoredResult]:
        """Read like `read`, on the connection of the running loop."""
        wanted = list(dict.fromkeys(task_ids))
        return await self._listener().read(wanted, timeout_s) if wanted else {}

    def hold_connection(self) -> None:
        """Keep the loop's connection open between calls."""
        self._listener().hold()

    def release_connection(self) -> None:
        """End one hold, and close idle connections of threads."""
        self._listener().release()
        self._pool.close()  # idle connections of the loop's threads; a blocking call opens another one

    def abandon_connection(self, loop: asyncio.AbstractEventLoop) -> None:
        """Forget the connection of a loop that was closed."""
        self._listeners.pop(loop, None)

    def forget(self, task_ids: Iterable[str]) -> None:
        """Delete results."""
        keys = [self._keys.result(task_id) for task_id in task_ids]
        if keys:
            self._call("DEL", *keys)

    def save_group(self, group_id: str, payload: bytes) -> None:
        """Store the payload under the chord's key, until results expire."""
        self._call("SET", self._keys.chord(group_id), payload, "PX", self._ttl_ms)

    def read_group(self, group_id: str) -> bytes | None:
        """Return the payload of the group; None if there is none."""
        found: bytes | None = self._call("GET", self._keys.chord(group_id))
        return found

    def forget_group(self, group_id: str) -> None:
        """Delete the payload of the group."""
        self._call("DEL", self._keys.chord(group_id))

    def close(self) -> None:
        """Close all pooled connections."""
        self._pool.close()
        self._listening.close()

    def _call(self, *command: object) -> Any:
        return self._pool.use(lambda connection: connection.call(*command))

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

    def _listen(self, connection: SocketConnection, arrivals: Arrivals, deadline: float) -> None:
        """Subscribe to the channels of all results, read once, then take pushed results.

        When it is repeated on another connection, it continues with the missing results.
        """
        names = {self._keys.result(task_id).encode(): task_id for task_id in arrivals.missing}
        channels = list(names)
        for first in range(0, len(channels), SUBSCRIBED_AT_ONCE):
            some = channels[first : first + SUBSCRIBED_AT_ONCE]
            connection.send([("SUBSCRIBE", *some)])
            for _ in some:
                while checked([connection.read()], connection.address)[0][0] != b"subscribe":
                    continue  # a result that was pushed meanwhile is read below
        is_over = arrivals.take(
            self._pool.use(lambda reader: self._read(reader, list(names.values())), deadline=deadline)
        )
        while not is_over and (left_s := deadline - time.monotonic()) > 0:
            pushed = self._next(connection, left_s)
            if pushed is not None and pushed[0] == b"message" and pushed[1] in names:
                is_over = arrivals.take(decode_results([names[pushed[1]]], [pushed[2]]))
        self._leave(connection, channels)

    def _leave(self, connection: SocketConnection, channels: Sequence[bytes]) -> None:
        """Unsubscribe, so that the connection can be reused; after the deadline this gets a moment more."""
        connection.deadline = max(connection.deadline, time.monotonic() + LEAVE_S)
        for first in range(0, len(channels), SUBSCRIBED_AT_ONCE):
            some = channels[first : first + SUBSCRIBED_AT_ONCE]
            connection.send([("UNSUBSCRIBE", *some)])
            for _ in some:
                while connection.read()[0] != b"unsubscribe":
                    continue

    def _next(self, connection: SocketConnection, left_s: float) -> list[Any] | None:
        """Return the server's next message, if it arrives in time. A silent server must answer a ping."""
        try:
            reply: list[Any] = connection.read(min(left_s, PING_EVERY_S))
        except TimeoutError:
            if left_s <= PING_EVERY_S:
                return None
            connection.send([("PING",)])
            reply = connection.read()
        return reply

    # -- chords ----------------------------------------------------------------------------------

    def start_chord(self, group_id: str, size: int) -> None:
        """Record the number of parts."""
        self._run_chord("start", group_id, size, self._chord_ttl_s)

    def add_chord_part(self, part: ChordPart) -> Sequence[ChordPart] | None:
        """Count the part in a script; return all parts when none is missing."""
        place = "+inf" if part.index is None else part.index
        counted_as = f"{part.task_id}:{part.index if part.index is not None else ''}"
        entry = json.dumps([1, part.task_id, part.status, json.loads(part.payload)])
        found = self._run_chord("add", part.group_id, self._chord_ttl_s, place, counted_as, entry)
        return [_read_part(part.group_id, *entry) for entry in enumerate(found)] if found else None

    def grow_chord(self, group_id: str, task_id: str) -> None:
        """Raise the number of parts by one, once for this task."""
        self._run_chord("grow", group_id, self._chord_ttl_s, task_id)

    def claim_chord(self, group_id: str, by: str) -> bool:
        """Claim the chord for this task, for CHORD_CLAIM_S."""
        return bool(self._run_chord("claim", group_id, by, CHORD_CLAIM_S))

    def end_chord(self, group_id: str, batch: Sequence[Outgoing]) -> Sequence[Refused]:
        """Push the body's messages and record the chord as done, in one script."""
        batch, unroutable = self._routed(batch)
        args: list[str | bytes] = []
        for outgoing, tag in zip(batch, delivery_tags(len(batch)), strict=True):
            args.append(self._keys.list_of(outgoing.queue, outgoing.message.priority))
            args.append(sealed(outgoing, tag, outgoing.not_before))
        reply = self._run_chord("end", group_id, CHORD_DONE_S, *args)
        refusals = reply[1:] if reply else ()
        refused = [
            Refused(batch[place], why.decode(errors="replace"))
            for place, why in zip(refusals[::2], refusals[1::2], strict=True)
        ]
        return [*refused, *unroutable] if reply else []

    def _routed(self, batch: Sequence[Outgoing]) -> tuple[Sequence[Outgoing], list[Refused]]:
        """Return the messages with their queues, and the unroutable messages, which are dead letters now."""
        if self._bindings.are_plain(batch):
            return batch, []
        read = self._bindings.read(batch)
        found = self._pool.use(lambda connection: connection.call_all(read)) if read else []
        routed = self._bindings.route(batch, found)
        unroutable = [Refused(batch[place], why) for place, why in routed.refused.items()]
        for args in bury_arguments(self._keys, unroutable):
            self._pool.run(self._keys.script("bury"), *args)
        return routed.batch, unroutable

    def _run_chord(self, verb: str, group_id: str, *args: object) -> Any:
        return self._pool.run(self._keys.script("chord"), verb, self._keys.chord(group_id), *args)


def _read_part(group_id: str, place: int, entry: bytes) -> ChordPart:
    """Decode a part; an entry that cannot be read counts as a failed part."""
    try:
        _, task_id, status, value = msgspec.json.decode(entry, type=tuple[int, str, str, msgspec.Raw])
    except UNREADABLE as error:
        lost = exception_map(ChordError(f"part {place} of the chord cannot be read: {error}"))
        return ChordPart(group_id, place, "", FAILURE, encode_json(lost))
    return ChordPart(group_id, place, task_id, status, bytes(value))
