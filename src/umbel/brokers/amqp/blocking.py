"""BlockingLink: a connection to RabbitMQ for threads, as plain calls.

Clients and running tasks use it, because they have no event loop of Umbel. It sends no heartbeats, because
nothing would send them between two calls: none are agreed. A connection that died while it was idle is
detected, and replaced, at its next use. A server with a resource alarm is alive: a sender that waits for it
gives up, and the connection stays open, so that written messages are confirmed on it.

Many threads may publish at once; `SharedExclusiveLock` lets one thread have the connection to itself when it
must. Reading and writing the socket (`Connection`) never waits, so a thread that holds the lock releases it
at once; waiting needs no lock. TLS requires this: its state allows no reader while another thread writes.
"""

import select
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

from umbel.brokers.amqp.confirms import Batch, Sent, Unconfirmed
from umbel.brokers.amqp.frames import PROTOCOL_HEADER, BadFrames, FrameReader, Incoming, Method, encode_method
from umbel.brokers.amqp.handshake import (
    REPLY_TIMEOUT_S,
    Handshake,
    Location,
    blocked_by,
    channel_refusal,
    confirm_timeout_s,
    connection_refusal,
    unreachable,
)
from umbel.brokers.tls import nothing_to_read
from umbel.errors import BrokerError, BrokerUnavailable

# ---- connection ------------------------------------------------------------------------------------

RECEIVE_BYTES = 65_536
SEND_BUFFER_BYTES = 1_048_576  # a larger buffer lets larger batches be sent in one piece


class Connection:
    """A socket that is read and written without waiting. Only `wait` and `interrupt` may run in a second
    thread.
    """

    def __init__(self, location: Location, *, timeout_s: float) -> None:
        try:
            plain = socket.create_connection((location.host, location.port), timeout=timeout_s)
        except OSError as error:
            raise unreachable(location, error) from None
        self._socket: socket.socket = plain
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _keep_alive(plain)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            if (context := location.tls_context()) is not None:
                self._socket = context.wrap_socket(plain, server_hostname=location.host)
            self._socket.setblocking(False)
        except OSError as error:
            self.abandon()
            raise unreachable(location, error) from None
        except BaseException:
            self.abandon()
            raise
        self._is_tls = location.tls
        self._unwritten = memoryview(b"")

    @property
    def is_written(self) -> bool:
        """Whether everything passed to `write` is written."""
        return not self._unwritten

    def write(self, data: bytes) -> None:
        """Write as much as can be written at once; `write_on` writes the rest."""
        if self._unwritten:
            data = b"".join((self._unwritten, data))
        self._unwritten = memoryview(data)
        self.write_on()

    def write_on(self) -> None:
        """Write as much of the rest as the socket takes at once."""
        while self._unwritten:
            try:
                self._unwritten = self._unwritten[self._socket.send(self._unwritten) :]
            except OSError as error:
                if not _must_wait(error):
                    raise
                return

    def read(self) -> bytes:
        """Return the bytes that have arrived; b"" if none have. ConnectionResetError: the server closed the
        connection.
        """
        data = self._read_once()
        if len(data) < RECEIVE_BYTES and not (data and self._is_tls):
            return data
        pieces = [data]  # TLS may have decrypted more, which `wait` cannot see
        while data := self._read_once():
            pieces.append(data)
        return b"".join(pieces)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until there is something to read, or room to write the rest; False at the time-out."""
        number = self._socket.fileno()
        if number < 0:  # closed: the next read or write raises
            return True
        poll = select.poll()  # a poll object serves one thread
        poll.register(number, select.POLLIN | select.POLLOUT if self._unwritten else select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))

    def interrupt(self) -> None:
        """End the connection that another thread waits on; that thread gets the error of a lost
        connection.
        """
        with suppress(OSError):  # it had already ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """Close the socket without a last message, not even TLS's: in a forked child it is the parent's."""
        socket.socket.close(self._socket)

    def _read_once(self) -> bytes:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except OSError as error:
            if not _must_wait(error):
                raise
            return b""
        if not data:
            raise ConnectionResetError("RabbitMQ closed the connection")
        return data


def _must_wait(error: OSError) -> bool:
    return nothing_to_read(error) or type(error).__name__ == "SSLWantWriteError"


def _keep_alive(plain: socket.socket) -> None:
    """Let the kernel detect within half a minute a peer that disappeared."""
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if (option := getattr(socket, name, None)) is not None:
            plain.setsockopt(socket.IPPROTO_TCP, option, value)


# ---- turns -----------------------------------------------------------------------------------------


class SharedExclusiveLock:
    """A lock that many threads share (`with lock:`), or one has to itself (`with lock.alone():`).

    A thread that wants it alone waits for the others to end and keeps new ones out meanwhile, so it is not
    starved.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._together = self._wanting = 0
        self._is_alone = False
        self._inside = threading.local()

    @property
    def is_inside(self) -> bool:
        """Whether this thread has it already: then a signal handler asks, which must not wait for its own
        thread.
        """
        return getattr(self._inside, "it", False)

    def __enter__(self) -> None:
        """Take it together with other threads."""
        self._inside.it = True
        try:
            self._begin()
        except BaseException:
            self._inside.it = False
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._inside.it = False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Take it alone for the block."""
        self._inside.it = True
        try:
            self._begin_alone()
            try:
                yield
            finally:
                self._end_alone()
        finally:
            self._inside.it = False

    def _begin(self) -> None:
        with self._changed:
            while self._wanting or self._is_alone:
                self._changed.wait()
            self._together += 1

    def _end(self) -> None:
        with self._changed:
            self._together -= 1
            if self._wanting:
                self._changed.notify_all()

    def _begin_alone(self) -> None:
        with self._changed:
            self._wanting += 1
            try:
                while self._together or self._is_alone:
                    self._changed.wait()
            finally:
                self._wanting -= 1
            self._is_alone = True

    def _end_alone(self) -> None:
        with self._changed:
            self._is_alone = False
            self._changed.notify_all()


# ---- blocking link ---------------------------------------------------------------------------------

PIECE, PIECES_AHEAD = 1000, 5  # of a large batch, so that confirmations are read while the rest is sent
T = TypeVar("T")
Given = TypeVarTuple("Given")
_ACK = int(Method.BASIC_ACK)


class Published(NamedTuple):
    """The messages that the server did not accept, once it has answered for all."""

    refused: Collection[int]  # places
    returned: Collection[int]  # places of mandatory messages that no queue accepted


class BlockingLink:
    """One connection and one channel at a time. Several threads may `publish`, or ask `is_stale`.

    Each publishing thread writes its messages and waits for its own confirmations. One of the waiting threads
    reads for all, and passes this on to another when it has its own confirmations. So the server confirms for
    many with one flush of its disk, and no thread waits for the round trip of another.
    """

    def __init__(self, location: Location, *, timeout_s: float, name: str) -> None:
        self.location = location
        self.deliveries: list[Incoming] = []
        self.blocked = ""
        self.error: BrokerError | None = None  # why the connection cannot be used any more
        self._reader = FrameReader()
        self._answers: list[Incoming] = []
        self._unconfirmed = Unconfirmed()
        self._lock = threading.Lock()  # never held while waiting for the server
        self._is_read = False  # one of the waiting threads reads
        self._asleep: dict[WaitingThread, None] = {}
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
        """Return the answer to one request. An overdue answer ends the connection, or the next call would get
        it.
        """
        self.send(encode_method(1, method, *fields))
        ends = monotonic() + REPLY_TIMEOUT_S
        with self._ending():
            while not self._answers:
                self._turn(ends)
                if self.error is not None:
                    raise self.error
        return self._answers.pop(0)

    def send(self, data: bytes) -> None:
        """Write these bytes, and return when all are written."""
        self._guarded(self._connection.write, data)
        with self._ending():
            self._flush(monotonic() + REPLY_TIMEOUT_S)

    def publish(
        self, frames: Sequence[bytes], sent: Sequence[Sent] = (), batches: list[Batch] | None = None
    ) -> Published:
        """Publish messages and return when the server has answered for all.

        `sent` are the same messages in parts, by which returned messages are recognised. `batches` gets each
        PIECE that may have been written, also if the publish fails.
        """
        if self.blocked:  # it reads nothing now: the messages would arrive when no sender waits any more
            raise blocked_by(self.location, self.blocked)
        sleeper, batches = WaitingThread(self._asleep), [] if batches is None else batches
        if len(frames) <= PIECE:
            self._put(frames, sent, sleeper, batches)
            self._wait_for(batches[0], sleeper)
            return Published(batches[0].refused, batches[0].returned)
        for start in range(0, len(frames), PIECE):
            self._put(frames[start : start + PIECE], sent[start : start + PIECE], sleeper, batches)
            if len(batches) > PIECES_AHEAD:
                self._wait_for(batches[-PIECES_AHEAD - 1], sleeper)
        for batch in batches:
            self._wait_for(batch, sleeper)
        refused = [nth * PIECE + place for nth, batch in enumerate(batches) for place in batch.refused]
        returned = [nth * PIECE + place for nth, batch in enumerate(batches) for place in batch.returned]
        return Published(refused, returned)

    def answered(self, batch: Batch) -> None:
        """Return when the server has answered for a batch whose sender gave up."""
        sleeper = WaitingThread(self._asleep)
        with self._lock:
            batch.waiters.append(sleeper.wake)
        try:
            self._wait_for(batch, sleeper)
        finally:
            with self._lock:
                batch.waiters.remove(sleeper.wake)

    def reopen_channel(self) -> None:
        """Open a new channel, after `ChannelClosed`."""
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
        """Whether the server has closed the connection, as far as is known without a request."""
        if self.error is None and self._connection.wait(0.0) and self._begin_reading():
            try:
                with suppress(BrokerError):
                    self._take_in()
            finally:
                with self._lock:
                    self._is_read = False
                    self._wake_reader()
        return self.error is not None

    def close(self) -> None:
        """Close the connection, waiting at most a second for the server's answer."""
        with suppress(OSError):
            self._connection.write(encode_method(0, Method.CONNECTION_CLOSE, 200, "bye", 0, 0))
            self._connection.wait(1.0)  # for its answer; anything else that arrives is ignored
        self._connection.abandon()

    def interrupt(self) -> None:
        """End the connection that another thread waits on; that thread gets the error of a lost
        connection.
        """
        self._connection.interrupt()

    def abandon(self) -> None:
        """Close the socket in a forked child without writing: the connection is the parent's."""
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

    def _put(
        self, frames: Sequence[bytes], sent: Sequence[Sent], sleeper: "WaitingThread", batches: list[Batch]
    ) -> None:
        self._guarded(self._write, frames, sent, sleeper, batches)
        if self.error is not None or not self._connection.is_written:
            self._flush(monotonic() + confirm_timeout_s(len(frames)))

    def _write(
        self, frames: Sequence[bytes], sent: Sequence[Sent], sleeper: "WaitingThread", batches: list[Batch]
    ) -> None:
        batch = self._unconfirmed.add(len(frames), lambda: sent, sleeper)
        batch.waiters.append(sleeper.wake)
        batches.append(batch)
        self._connection.write(b"".join(frames))

    def _wait_for(self, batch: Batch, sleeper: "WaitingThread") -> None:
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
                self._wake_reader()

    def _begin_reading(self) -> bool:
        """Let this thread read, unless another one does; return whether it may."""
        with self._lock:
            begins, self._is_read = not self._is_read, True
        return begins

    def _wake_reader(self) -> None:
        """Let another waiting thread read."""
        if not self._is_read and (other := next(iter(self._asleep), None)) is not None:
            other.wake()

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """End the connection if the block fails with BrokerUnavailable."""
        try:
            yield
        except BrokerUnavailable as error:
            with self._lock:
                self._fail(error)
            raise

    def _flush(self, ends: float) -> None:
        """Return when all is written. Arriving bytes are read meanwhile: the server may wait for that."""
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
        """Use the connection alone; any error ends it, because the rest of its bytes cannot be read."""
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
        """End the connection, because the answer is overdue; during a resource alarm, only raise an error."""
        if self.blocked:
            raise blocked_by(self.location, self.blocked, is_written=True)
        with self._lock:
            self._fail(self._lost("no answer in time"))

    def _fail(self, error: BrokerError) -> None:
        if self.error is None:
            self.error = error
            self._unconfirmed.fail(error)

    def _lost(self, why: BaseException | str) -> BrokerUnavailable:
        return BrokerUnavailable(f"the connection to RabbitMQ at {self.location} was lost: {why}")


class WaitingThread:
    """A thread that waits while another reads for it. If it was woken before it sleeps, it does not sleep."""

    __slots__ = ("_asleep", "_lock")

    def __init__(self, asleep: dict["WaitingThread", None]) -> None:
        self._asleep = asleep
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        """Let the thread continue."""
        self._asleep.pop(self, None)
        if self._lock.locked():
            self._lock.release()

    def sleep(self, ends: float) -> bool:
        """Wait until the thread is woken; False at the time-out."""
        return self._lock.acquire(timeout=max(0.0, ends - monotonic()))
