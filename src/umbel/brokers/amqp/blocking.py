"""BlockingLink: a connection to RabbitMQ for threads, as plain calls.

For clients and running tasks, which have no event loop of ours. It sends no heartbeats, because
nobody would send them between two calls: none are agreed, and a connection that died while it was
idle is found out, and replaced, at its next use.

Many threads may publish at once. Each writes its messages and waits for its own confirmations; of those who
wait, one reads for all and hands that on when it has its own. So the server answers for many with one
flush of its disk, and nobody waits for a round trip of somebody else's.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

from umbel.brokers.amqp.confirms import Batch, Sent, Unconfirmed
from umbel.brokers.amqp.connection import Connection
from umbel.brokers.amqp.frames import (
    PROTOCOL_HEADER,
    BadFrames,
    FrameReader,
    Incoming,
    Method,
    encode_method,
)
from umbel.brokers.amqp.handshake import REPLY_TIMEOUT_S, Handshake, confirm_timeout_s
from umbel.brokers.amqp.location import Location
from umbel.brokers.amqp.refusals import blocked_by, channel_refusal, connection_refusal, unreachable
from umbel.errors import BrokerError, BrokerUnavailable

PIECE, PIECES_AHEAD = 1000, 5  # of a large batch, so that its confirmations are read while it is sent
T = TypeVar("T")
Given = TypeVarTuple("Given")
_ACK = int(Method.BASIC_ACK)


class Published(NamedTuple):
    """What the server did not take, when it has answered for all."""

    refused: Sequence[int]  # places
    returned: Sequence[Incoming]  # mandatory messages that no queue took


class BlockingLink:
    """One connection and one channel at a time. Only `publish` and `is_stale` are for several threads."""

    def __init__(self, location: Location, *, timeout_s: float, name: str) -> None:
        self.location = location
        self.deliveries: list[Incoming] = []
        self.blocked = ""
        self.error: BrokerError | None = None  # why it cannot be used any more
        self._reader = FrameReader()
        self._answers: list[Incoming] = []
        self._unconfirmed = Unconfirmed()
        self._lock = threading.Lock()  # never held while waiting for the server
        self._is_read = False  # by one of those who wait
        self._asleep: dict[Sleeper, None] = {}
        self._connection = Connection(location, timeout_s=timeout_s)
        try:
            self._shake_hands(timeout_s, name)
        except (OSError, BadFrames) as error:
            self._connection.abandon()
            raise unreachable(location, error) from None
        except BaseException:
            self._connection.abandon()
            raise

    def call(self, method: Method, *fields: Any) -> Incoming:
        self.send(encode_method(1, method, *fields))
        ends = monotonic() + REPLY_TIMEOUT_S
        while not self._answers:
            self._turn(ends)
            if self.error is not None:
                raise self.error
        return self._answers.pop(0)

    def send(self, data: bytes) -> None:
        self._guarded(self._connection.write, data)
        self._flush(monotonic() + REPLY_TIMEOUT_S)

    def publish(self, frames: Sequence[bytes], sent: Sequence[Sent] = ()) -> Published:
        """Publish messages and return when the server has answered for all.

        `sent` are the same messages in parts, by which those are known that come back.
        """
        if self.blocked:  # it reads nothing: what is written now would be there when nobody waits for it
            raise blocked_by(self.location, self.blocked)
        sleeper = Sleeper(self._asleep)
        if len(frames) <= PIECE:
            batch = self._put(frames, sent, sleeper)
            self._wait_for(batch, sleeper)
            return Published(batch.refused, batch.returned)
        batches: list[Batch] = []
        for start in range(0, len(frames), PIECE):
            batches.append(self._put(frames[start : start + PIECE], sent[start : start + PIECE], sleeper))
            if len(batches) > PIECES_AHEAD:
                self._wait_for(batches[-PIECES_AHEAD - 1], sleeper)
        for batch in batches:
            self._wait_for(batch, sleeper)
        refused = [nth * PIECE + place for nth, batch in enumerate(batches) for place in batch.refused]
        return Published(refused, [one for batch in batches for one in batch.returned])

    def reopen_channel(self) -> None:
        """After `ChannelClosed`, go on with a new channel."""
        self.error = None
        self.call(Method.CHANNEL_OPEN, "")
        self.call(Method.CONFIRM_SELECT, False)

    def receive(self, timeout_s: float | None) -> None:
        """Wait for a delivery, which is then in `deliveries`; at the time-out there is none."""
        while not self.deliveries:
            if not self._connection.wait(timeout_s):
                return
            self._take_in()
            if self.error is not None:
                raise self.error

    def is_stale(self) -> bool:
        """Whether the server has closed the connection, as far as can be told without asking."""
        if self.error is None and not len(self._unconfirmed) and self._connection.wait(0.0):
            with suppress(BrokerError):
                self._take_in()
        return self.error is not None

    def close(self) -> None:
        with suppress(OSError):
            self._connection.write(encode_method(0, Method.CONNECTION_CLOSE, 200, "bye", 0, 0))
            self._connection.wait(1.0)  # its goodbye; what else it says concerns nobody now
        self._connection.abandon()

    def interrupt(self) -> None:
        """End the connection under a thread that waits on it; the thread sees that it was lost."""
        self._connection.interrupt()

    def abandon(self) -> None:
        """In a forked child: the connection is the parent's, so nothing is said on it."""
        self._connection.abandon()

    def _shake_hands(self, timeout_s: float, name: str) -> None:
        handshake = Handshake(self.location, heartbeat_s=0, name=name)
        self._connection.write(PROTOCOL_HEADER)
        while not handshake.is_done():
            if not self._connection.wait(timeout_s):
                raise TimeoutError
            for incoming in self._reader.feed(self._connection.read()):
                self._connection.write(handshake.step(incoming))
        self.reopen_channel()

    # -- sending, with others --------------------------------------------------------------------

    def _put(self, frames: Sequence[bytes], sent: Sequence[Sent], sleeper: "Sleeper") -> Batch:
        batch = self._guarded(self._write, frames, sent, sleeper)
        if batch is None or not self._connection.is_written:
            self._flush(monotonic() + confirm_timeout_s(len(frames)))
        assert batch is not None, "a failure was raised"
        return batch

    def _write(self, frames: Sequence[bytes], sent: Sequence[Sent], sleeper: "Sleeper") -> Batch:
        batch = self._unconfirmed.add(len(frames), lambda: sent, sleeper.wake)
        self._connection.write(b"".join(frames))
        return batch

    def _wait_for(self, batch: Batch, sleeper: "Sleeper") -> None:
        ends, reads = monotonic() + confirm_timeout_s(batch.missing), False
        try:
            while batch.missing:
                if (error := batch.error or self.error) is not None:
                    raise error
                if not reads:
                    with self._lock:
                        reads, self._is_read = not self._is_read, True
                        if not reads and batch.missing:
                            self._asleep[sleeper] = None
                if reads:
                    self._turn(ends)
                elif not sleeper.sleep(ends):
                    self._give_up()
        finally:
            with self._lock:
                self._asleep.pop(sleeper, None)
                if reads:
                    self._is_read = False
                if not self._is_read and (other := next(iter(self._asleep), None)) is not None:
                    other.wake()

    def _flush(self, ends: float) -> None:
        """Until all is written. What arrives meanwhile is read: the server may wait for that."""
        while not self._connection.is_written and self.error is None:
            self._turn(ends)
        if self.error is not None:
            raise self.error

    # -- the connection --------------------------------------------------------------------------

    def _turn(self, ends: float) -> None:
        """Wait until there is something to read or room to write, and do so."""
        if self._connection.wait(ends - monotonic()):
            self._take_in()
        elif monotonic() >= ends:
            self._give_up()

    def _take_in(self) -> None:
        self._guarded(self._read)

    def _read(self) -> None:
        self._connection.write_on()
        for incoming in self._reader.feed(self._connection.read()):
            self._deal_with(incoming)

    def _guarded(self, work: Callable[[*Given], T], *given: *Given) -> T | None:
        """Use the connection alone; whatever goes wrong there, nothing can be read after it."""
        with self._lock:
            if self.error is not None:
                raise self.error
            try:
                return work(*given)
            except (OSError, BadFrames) as error:
                self._fail(self._lost(error))
                return None
            except BaseException:
                self._fail(self._lost("interrupted"))
                raise

    def _deal_with(self, incoming: Incoming) -> None:
        match incoming.method:
            case Method.BASIC_ACK | Method.BASIC_NACK:
                number, multiple, *_ = incoming.fields
                accepted = incoming.method == _ACK
                self._unconfirmed.answer(number, multiple=multiple, accepted=accepted)
            case Method.BASIC_DELIVER:
                self.deliveries.append(incoming)
            case Method.BASIC_RETURN:
                self._unconfirmed.take_back(incoming)
            case Method.CONNECTION_BLOCKED:
                self.blocked = incoming.fields[0] or "a resource alarm"
            case Method.CONNECTION_UNBLOCKED:
                self.blocked = ""
            case Method.CHANNEL_CLOSE:
                code, text, group, method = incoming.fields
                self._connection.write(encode_method(1, Method.CHANNEL_CLOSE_OK))
                self._fail(channel_refusal(self.location, code, text, group << 16 | method))
            case Method.CONNECTION_CLOSE:
                code, text, _, _ = incoming.fields
                self._connection.write(encode_method(0, Method.CONNECTION_CLOSE_OK))
                self._fail(connection_refusal(self.location, code, text))
            case _:
                self._answers.append(incoming)

    def _give_up(self) -> None:
        with self._lock:
            error = self._lost("no answer in time")
            if self.blocked:
                error = blocked_by(self.location, self.blocked, is_written=True)
            self._fail(error)

    def _fail(self, error: BrokerError) -> None:
        if self.error is None:
            self.error = error
            self._unconfirmed.fail(error)

    def _lost(self, why: BaseException | str) -> BrokerUnavailable:
        return BrokerUnavailable(f"the connection to RabbitMQ at {self.location} was lost: {why}")


class Sleeper:
    """A thread that waits for others to read for it. Woken before it sleeps, it does not."""

    __slots__ = ("_asleep", "_lock")

    def __init__(self, asleep: dict["Sleeper", None]) -> None:
        self._asleep = asleep
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        self._asleep.pop(self, None)
        if self._lock.locked():
            self._lock.release()

    def sleep(self, ends: float) -> bool:
        """Whether it was woken in time."""
        return self._lock.acquire(timeout=max(0.0, ends - monotonic()))
