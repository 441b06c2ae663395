"""Link: one connection to a Redis server on the event loop, shared by many tasks.

Commands of different tasks are sent as they come and answered in that order, so no task waits for another's
reply before it sends. The reply to a cancelled caller is read and dropped in its turn. A reply that does not
come in time means that the connection is dead: it is closed, every waiting caller gets an error, and the next
call reconnects. So a caller that gets an error calls again later, and the first one that succeeds has
reconnected for all. After a failure the next of several addresses is tried.

`LoopLink` is one link for all clients of an event loop that use the same servers. Senders and waiters for
results hold it while they need it; the last one to release it closes it. Another loop, in any thread, has
another link. Links of closed loops are forgotten by `abandon_loop_links`, or when the next link is requested.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from threading import Lock
from typing import Any, cast

import hiredis

from umbel.brokers.links import LinkWatch, ignore_link
from umbel.brokers.redis.address import Address
from umbel.brokers.redis.replies import (
    NotPrimary,
    ServerRefused,
    check_greeting,
    checked,
    handshake,
    is_missing_script,
    lost,
    not_redis,
    primary_from,
    sentinel_commands,
    silent,
    unreachable,
)
from umbel.brokers.redis.scripts import Script
from umbel.errors import BrokerUnavailable
from umbel.protocol.shutdown import LinkChange

# ---- link ------------------------------------------------------------------------------------------

Command = Sequence[Any]
_pack = hiredis.pack_command
ANSWERED_MAX = 32  # senders that continue in one round of the loop, on a link that gathers


class Link:
    """A connection that reconnects on the next call. `timeout_s` is for connecting, and for each reply.

    `on_push` gets what the server sends without being asked; `on_lost` is called when a connection ends. A
    link with a `name` reports to `on_link` when a connection in use is lost, and when it is restored.

    A link that `gathers` is shared by many senders: what they send in one round of the loop is written at the
    end of the round, in one system call. Only some of them continue in one round, so that the loop has time
    for other tasks when a server that was silent answers a thousand senders at once, or is given up.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        timeout_s: float,
        resp3: bool = False,
        gathers: bool = False,
        reply_max_bytes: int | None = None,
        on_push: Callable[[list[Any]], None] | None = None,
        on_connect: Callable[[], Awaitable[None]] | None = None,
        on_lost: Callable[[], None] | None = None,
        name: str = "",
        on_link: Callable[[LinkChange], None] = ignore_link,
    ) -> None:
        self._watch = LinkWatch(name, on_link)
        self._addresses = addresses
        self._turn = 0
        self._timeout_s = timeout_s
        self._resp3 = resp3
        self._gathers = gathers
        self._reply_max_bytes = reply_max_bytes
        self._on_push = on_push
        self._on_connect = on_connect
        self._on_lost = on_lost
        self._wire: _Wire | None = None
        self._is_ready = False  # the handshake is done, and so is the caller's set-up
        self._connecting = asyncio.Lock()
        self.generation = 0
        """How many connections there have been."""

    @property
    def address(self) -> Address:
        """The address that is connected, or that is tried next."""
        return self._addresses[self._turn % len(self._addresses)]

    @property
    def is_lost(self) -> bool:
        """Whether a connection was lost and is not restored yet."""
        return self._watch.is_lost

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection that is ready for use."""
        return self._is_ready and self._wire is not None and not self._wire.is_closed

    async def connect(self) -> None:
        """Connect unless there is a connection; BrokerUnavailable if no address can be reached."""
        if self.is_connected:
            return
        async with self._connecting:
            if not self.is_connected:
                await self._try_each_address()

    async def call(self, *command: Any) -> Any:
        """Send one command; returns its reply, or raises the error that the reply stands for."""
        return (await self.call_all([command]))[0]

    async def call_all(self, commands: Sequence[Command]) -> list[Any]:
        """Send together and wait for all replies; the first error reply is raised."""
        if not commands:
            return []
        await self.connect()
        return self.checked(await self.reply_to(self.send(commands)))

    async def attempt_all(self, commands: Sequence[Command]) -> list[ServerRefused]:
        """Send commands of which each may be refused alone; returns the refusals."""
        await self.connect()
        refused: list[ServerRefused] = []
        for reply in await self.reply_to(self.send(commands)):
            try:
                self.checked([reply])
            except ServerRefused as problem:
                refused.append(problem)
        return refused

    async def run(self, script: Script, *args: Any) -> Any:
        """Run a script; returns its reply, or raises the error that the reply stands for."""
        await self.connect()
        return await self.finish_run(self.send_run(script, *args), script, *args)

    def send_run(self, script: Script, *args: Any) -> asyncio.Future[list[Any]]:
        """Send the digest of a script without waiting; `finish_run` gets the reply."""
        return self.send([("EVALSHA", script.digest, 0, *args)])

    async def finish_run(self, sent: asyncio.Future[list[Any]], script: Script, *args: Any) -> Any:
        """The reply to `send_run`; if the server does not know the script, its text is sent."""
        (reply,) = await self.reply_to(sent)
        if is_missing_script(reply):
            return await self.call("EVAL", script.text, 0, *args)
        return self.checked([reply])[0]

    def send(self, commands: Sequence[Command], *, takes_s: float = 0.0) -> asyncio.Future[list[Any]]:
        """Send on the existing connection; the result of the future may contain error replies.

        `takes_s`: how long the server may block before it answers.
        """
        return self._open_wire().send(commands, takes_s=takes_s)

    def send_after(self, commands: Sequence[Command], last: Command) -> asyncio.Future[list[Any]]:
        """Send commands that are answered only by pushes, and a last one with a reply, which follows them."""
        return self._open_wire().send([last], before=commands)

    async def reply_to(self, sent: asyncio.Future[list[Any]]) -> list[Any]:
        """Wait for the replies; BrokerUnavailable if the connection was lost, BrokerSilent if none came in
        time.
        """
        try:
            return await sent
        except TimeoutError:
            raise silent(self.address, self._timeout_s) from None
        except OSError:
            raise lost(self.address) from None

    def checked(self, replies: list[Any]) -> list[Any]:
        """Return the replies, or raise the first error among them. Disconnects at once from a server that has
        become a replica.
        """
        try:
            return checked(replies, self.address)
        except NotPrimary as problem:
            if self._is_ready:
                self._watch.lost(str(problem))
                self._turn += 1
            self._end_wire()
            raise

    def awaits(self, sent: asyncio.Future[list[Any]]) -> bool:
        """Whether the server has yet to answer this, even if no caller waits for the answer any more."""
        return self._wire is not None and self._wire.awaits(sent)

    async def replace(self) -> None:
        """Reconnect, because the connection may be dead; waiting callers get an error."""
        self._end_wire()
        await self.connect()

    def close(self) -> None:
        """Close the connection and report that it will not be restored."""
        self._watch.given_up()
        self._end_wire()

    def _open_wire(self) -> "_Wire":
        if self._wire is None or self._wire.is_closed:
            raise lost(self.address)
        return self._wire

    def _end_wire(self) -> None:
        wire, self._wire, self._is_ready = self._wire, None, False
        if wire is not None:
            wire.close()

    def _note_ended(self, *, is_late: bool) -> None:
        if self._on_lost is not None:
            self._on_lost()
        if self._is_ready:
            why = f"no answer within {self._timeout_s:g} s" if is_late else "the server closed it"
            self._watch.lost(f"the connection to Redis at {self.address.shown} was lost: {why}")

    async def _try_each_address(self) -> None:
        """Connect to the first address that can be reached, beginning with the present one."""
        problem: BrokerUnavailable | None = None
        for _ in self._addresses:
            self._end_wire()
            try:
                await self._connect_to(self.address)
                return
            except BrokerUnavailable as error:
                problem = problem or error
                self._turn += 1
            finally:
                if not self._is_ready:
                    self._end_wire()
        assert problem is not None
        raise problem

    async def _connect_to(self, address: Address) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                if address.master:
                    address = await self._primary_of(address)
                self._wire = await self._dial(address, self._note_ended)
                check_greeting(await self._wire.send(handshake(address, resp3=self._resp3)), address)
        except OSError as problem:  # TimeoutError and ConnectionError are among them
            if self._wire is not None and self._wire.is_garbled:
                raise not_redis(address) from None
            raise unreachable(address, problem, self._timeout_s) from None
        self.generation += 1
        if self._on_connect is not None:
            await self._on_connect()
        self._is_ready = True
        self._watch.restored()

    async def _primary_of(self, address: Address) -> Address:
        """The primary's address, as a sentinel names it."""
        sentinel = await self._dial(address, lambda **_: None)
        try:
            return primary_from(await sentinel.send(sentinel_commands(address)), address)
        finally:
            sentinel.close()

    async def _dial(self, address: Address, on_lost: Callable[..., None]) -> "_Wire":
        loop = asyncio.get_running_loop()

        def make() -> _Wire:
            return _Wire(
                self._on_push,
                on_lost,
                self._timeout_s,
                gathers=self._gathers,
                reply_max_bytes=self._reply_max_bytes,
            )

        if address.path:
            return (await loop.create_unix_connection(make, address.path))[1]
        # In a thread, because it reads the certificate files.
        context = await asyncio.to_thread(address.tls_context) if address.tls else None
        return (await loop.create_connection(make, address.host, address.port, ssl=context))[1]


class _Wire(asyncio.Protocol):
    """The protocol of one connection: bytes in, replies out, in order.

    One timer watches the oldest awaited reply, because a timer for each would cost as much as the call
    itself.
    """

    def __init__(
        self,
        on_push: Callable[[list[Any]], None] | None,
        on_lost: Callable[..., None],
        reply_timeout_s: float,
        *,
        gathers: bool = False,
        reply_max_bytes: int | None = None,
    ) -> None:
        self.is_closed = False
        self.is_garbled = False
        self._on_push = on_push
        self._on_lost = on_lost
        self._reader = hiredis.Reader(notEnoughData=_NOTHING)
        self._reply_max_bytes = math.inf if reply_max_bytes is None else reply_max_bytes
        self._unread_bytes = 0  # of the reply that is arriving
        self._transport: asyncio.Transport | None = None
        self._batches: deque[_Batch] = deque()
        self._loop = asyncio.get_running_loop()
        self._reply_timeout_s = reply_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._gathers = gathers
        self._gathered: list[bytes] = []
        self._answered: deque[tuple[asyncio.Future[list[Any]], list[Any] | OSError]] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # those of uvloop are no subclass of it

    def send(
        self, commands: Sequence[Command], *, before: Sequence[Command] = (), takes_s: float = 0.0
    ) -> asyncio.Future[list[Any]]:
        assert self._transport is not None
        replies: asyncio.Future[list[Any]] = self._loop.create_future()
        due_at = self._loop.time() + takes_s
        self._batches.append(_Batch(len(commands), replies, due_at, is_after=bool(before)))
        if self._timer is None:
            self._timer = self._loop.call_later(self._reply_timeout_s, self._check)
        packed = [_pack(tuple(command)) for command in (*before, *commands)]
        if not self._gathers:
            self._transport.write(b"".join(packed))
            return replies
        if not self._gathered:
            self._loop.call_soon(self._write_gathered)
        self._gathered += packed
        return replies

    def awaits(self, sent: asyncio.Future[list[Any]]) -> bool:
        return any(batch.replies is sent for batch in self._batches)

    def _write_gathered(self) -> None:
        gathered, self._gathered = self._gathered, []
        if self._transport is not None and not self.is_closed:
            self._transport.write(b"".join(gathered))

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            self._unread_bytes += len(data)
            while (reply := self._reader.gets()) is not _NOTHING:
                self._unread_bytes = 0
                self._take(reply)
        except hiredis.ProtocolError:
            self.is_garbled = True
            self.close()
        if self._unread_bytes > self._reply_max_bytes:
            self.close(why=OSError(f"the server sent a reply of more than {self._reply_max_bytes} bytes"))

    def connection_lost(self, problem: Exception | None) -> None:
        self.close(why=problem if isinstance(problem, OSError) else None)  # TLS errors say why

    def close(self, *, is_late: bool = False, why: OSError | None = None) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        kind = TimeoutError if is_late else ConnectionResetError
        for batch in self._batches:
            self._answer(batch.replies, why or kind("the connection was closed"))
        self._batches.clear()
        self._on_lost(is_late=is_late)

    def _check(self) -> None:
        self._timer = None
        if not self._batches:
            return
        overdue_at = self._batches[0].due_at + self._reply_timeout_s
        if overdue_at <= self._loop.time():
            self.close(is_late=True)
        else:
            self._timer = self._loop.call_at(overdue_at, self._check)

    def _take(self, reply: Any) -> None:
        if isinstance(reply, hiredis.PushNotification) or not self._batches:
            if self._on_push is not None:
                self._on_push(reply)
            return
        batch = self._batches[0]
        batch.read.append(reply)
        if batch.is_after and isinstance(reply, hiredis.ReplyError):
            # It may be the answer to an earlier command, which has no answer when it succeeds. Then every
            # later reply would be taken for another one's, so the connection cannot be used any more.
            self._answer(batch.replies, batch.read)
            self.close()
            return
        if len(batch.read) == batch.count:
            self._batches.popleft()
            self._answer(batch.replies, batch.read)

    def _answer(self, sender: asyncio.Future[list[Any]], answer: list[Any] | OSError) -> None:
        if not self._gathers:
            _answer(sender, answer)
            return
        if not self._answered:
            self._loop.call_soon(self._answer_some)
        self._answered.append((sender, answer))

    def _answer_some(self) -> None:
        for _ in range(min(len(self._answered), ANSWERED_MAX)):
            _answer(*self._answered.popleft())
        if self._answered:
            self._loop.call_soon(self._answer_some)


def _answer(sender: asyncio.Future[list[Any]], answer: list[Any] | OSError) -> None:
    if sender.done():  # cancelled
        return
    if isinstance(answer, OSError):
        sender.set_exception(answer)
        sender.exception()  # a caller that is cancelled meanwhile does not retrieve it
    else:
        sender.set_result(answer)


class _Batch:
    __slots__ = ("count", "due_at", "is_after", "read", "replies")

    def __init__(
        self, count: int, replies: asyncio.Future[list[Any]], due_at: float, *, is_after: bool = False
    ) -> None:
        self.is_after = is_after  # commands that are answered by pushes only
        self.count = count
        self.replies = replies
        self.due_at = due_at
        self.read: list[Any] = []


_NOTHING: Any = object()


# ---- loop links ------------------------------------------------------------------------------------

_Place = tuple[tuple[Address, ...], float]
_links: dict[asyncio.AbstractEventLoop, dict[_Place, "LoopLink"]] = {}
_changing = Lock()


class LoopLink:
    """A shared link. All listeners get the pushes of the server, and the loss of the connection."""

    def __init__(self, addresses: Sequence[Address], timeout_s: float) -> None:
        self.link = Link(
            addresses,
            timeout_s=timeout_s,
            resp3=True,
            gathers=True,
            on_push=self._pushed,
            on_lost=self._lost,
        )
        self.holders = 0
        self.on_push: list[Callable[[list[Any]], None]] = []
        self.on_lost: list[Callable[[], None]] = []

    def _pushed(self, pushed: list[Any]) -> None:
        for listener in self.on_push:
            listener(pushed)

    def _lost(self) -> None:
        for listener in self.on_lost:
            listener()


def hold_loop_link(addresses: Sequence[Address], *, timeout_s: float) -> LoopLink:
    """The running loop's link to these servers; release it in the same loop."""
    loop = asyncio.get_running_loop()
    with _changing:
        _forget_closed()
        places = _links.setdefault(loop, {})
        place = (tuple(addresses), timeout_s)
        if place not in places:
            places[place] = LoopLink(addresses, timeout_s)
        places[place].holders += 1
        return places[place]


def abandon_loop_links() -> None:
    """Forget the links of closed loops."""
    with _changing:
        _forget_closed()


def _forget_closed() -> None:
    for loop in [old for old in _links if old.is_closed()]:
        del _links[loop]


def release_loop_link(held: LoopLink) -> None:
    """Stop using the link; the last holder closes it."""
    with _changing:
        held.holders -= 1
        if held.holders:
            return
        loop = asyncio.get_running_loop()
        places = {place: link for place, link in _links.get(loop, {}).items() if link is not held}
        if places:
            _links[loop] = places
        else:
            _links.pop(loop, None)
    held.link.close()
