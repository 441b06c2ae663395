"""The mailbox: listens for control requests on one connection, runs the commands, sends the replies."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from time import monotonic, time
from typing import TYPE_CHECKING, Any

import msgspec

from umbel.backoff import Backoff
from umbel.brokers.interface import Broadcast, Broker
from umbel.clock import cluster_now
from umbel.control.panel import NO_ANSWER, Command, Panel
from umbel.coordination.driver import listen
from umbel.errors import BrokerError, BrokerRefused, WireError
from umbel.pools.event_loop import OffLoop
from umbel.pools.guard import Raised
from umbel.protocol.delivery.trust import Signed, unbound_doubt
from umbel.protocol.pidbox import Handle, Mailbox, Malformed, MemberReport, Refused, Request, RequestIgnored
from umbel.wire.control import REQUEST_EXCHANGE, decode_request, encode_reply
from umbel.worker.context import WorkerContext

if TYPE_CHECKING:
    from umbel.worker.remote.view import WorkerView

log = logging.getLogger("umbel.worker.control")

REPLIES_MAX, REPLIES_MAX_BYTES = 1000, 16 * 2**20
ERROR_CHARS_MAX = 2000
REPLY_TTL_S = 60.0
REPLY_TRIES_S = 10.0
HANDLED_MAX = 100
WAITING_MAX, WAITING_MAX_BYTES = 200, 4 * 2**20
MEMBERS_FRESH_S = 0.2
BUSY = "too many commands are queued on this worker; try again later"
MEMBERS_SENT_MAX = 100  # in a larger cluster only the first few nodes send the members
MEMBERS_SENT_BY = 3

Members = Callable[[], Sequence[MemberReport]]
Report = Callable[[BrokerError | None], None]


class MailboxFigures(msgspec.Struct):
    """What `stats` shows of the mailbox: how often its subscription failed, and how many replies were
    dropped.
    """

    resets: int = 0  # it restores lost links by itself; these are other faults
    replies_dropped: int = 0
    mailbox: Mailbox | None = None  # once there is one


class WaitingCommand(msgspec.Struct, frozen=True):
    """A command that waits for its turn."""

    request: Request
    command: Command
    arguments: Mapping[str, Any]
    size_bytes: int


class MailboxShell:
    """One subscription with its queues of commands and replies; the shell of `protocol/pidbox.py`.

    Umbel's own commands that do not wait run in the order of their requests. Commands that wait, and all
    users' commands, run concurrently, so that a `ping` is always answered. Users' commands run in new
    threads. `main`: the worker's loop, on which the others run, if this is not it.

    In a flood requests are read in small portions, so that tasks continue. A `ping` is answered when it is
    read. Other commands wait for their turn, and are answered with an error when WAITING_MAX of them wait. At
    most HANDLED_MAX of Umbel's waiting commands and as many of users' run at a time; the next of its kind
    waits, others pass it. While the limit of queued replies is reached, no request is read: the flood waits
    at the broker, or in the subscription, which has a limit.

    After a channel error the mailbox reconnects, and the worker continues (P5). Requests sent meanwhile are
    lost, on Redis as with Celery's workers; the caller sees which nodes did not answer.
    """

    def __init__(
        self,
        context: WorkerContext,
        broker: Broker,
        mailbox: Mailbox,
        panel: Panel,
        view: "WorkerView",
        figures: MailboxFigures,
        *,
        members: Members,
        report: Report,
        main: asyncio.AbstractEventLoop | None,
    ) -> None:
        self.is_open = asyncio.Event()
        self._node = context.identity.node
        self._settings = context.settings
        self._broker = broker
        self._mailbox = mailbox
        self._panel = panel
        self._view = view
        self._figures = figures
        self._members = members
        self._report = report  # called with None when the subscription works, else with its error
        self._main = main
        self._replies: deque[tuple[Broadcast, float]] = deque()
        self._replies_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._replies_clock = 0
        self._to_send = asyncio.Event()
        self._members_at = -MEMBERS_FRESH_S
        self._members_sent: Sequence[MemberReport] = ()
        self._waiting: deque[WaitingCommand] = deque()  # commands that have not begun
        self._waiting_count = self._waiting_bytes = 0  # of all commands that do not run yet
        self._to_do = asyncio.Event()
        self._our_places = asyncio.Semaphore(HANDLED_MAX)
        self._users_places = asyncio.Semaphore(HANDLED_MAX)  # users' commands may hang
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Listen and answer until cancelled; commands under way are then cancelled."""
        async with asyncio.TaskGroup() as self._group:
            self._group.create_task(self._send_replies())
            self._group.create_task(self._run_waiting())
            await listen(
                lambda: self._broker.subscribe(REQUEST_EXCHANGE, [self._node]),
                self._take_when_replies_fit,
                is_open=self.is_open,
                report=self._note_listening,
            )

    async def send_last_replies(self) -> None:
        """Try to send queued replies; called when `run` has ended."""
        try:
            async with asyncio.timeout(1.0):
                await self._send_waiting()
        except (BrokerError, TimeoutError) as error:
            log.debug("last control replies could not be sent before shutdown", extra={"why": str(error)})

    # -- requests --------------------------------------------------------------------------------

    def _note_listening(self, error: BrokerError | None) -> None:
        self._figures.resets += error is not None
        self._report(error)

    async def _take_when_replies_fit(self, broadcast: Broadcast) -> None:
        self._take(broadcast)
        await self._has_room.wait()

    def _take(self, broadcast: Broadcast) -> None:
        """Decode a request and let the protocol decide: run the command, refuse it, or ignore the request."""
        try:
            event = self._read(broadcast)
        except WireError as error:
            event = Malformed(str(error))
        for effect in self._mailbox.step(event, cluster_now()):
            match effect:
                case Handle(request):
                    self._handle(request, len(broadcast.body))
                case Refused(request, why):
                    fields = {"command": request.method[:100], "why": why}
                    log.warning("control command refused", extra=fields)
                    self._answer(request, {"error": why})
                case RequestIgnored(why):
                    log.debug("control command ignored", extra={"why": why})

    def _read(self, broadcast: Broadcast) -> Request | Malformed:
        signer = None if self._broker.keyring is None else self._broker.signer
        accept, unbound_s = self._settings.accept_content, self._settings.unbound_s
        request = decode_request(broadcast.headers, broadcast.body, signer, accept)
        if signer is None or not isinstance(request.proof, Signed):
            return request
        doubted = unbound_doubt(request.proof, cluster_now(), signer.cluster.since, unbound_s)
        return request if doubted is None else request.replaced(proof=doubted)

    # -- commands --------------------------------------------------------------------------------

    def _handle(self, request: Request, size_bytes: int) -> None:
        """Answer a stateless command at once; queue any other, or refuse it while the queue is full."""
        command = self._panel.find(request.method)
        assert command is not None, "the mailbox refuses unknown commands"
        log.debug("control command received", extra={"command": command.name})
        try:
            arguments = command.bind(request)
        except Exception as error:  # of arguments that anybody may send
            self._answer(request, _described(error))
            return
        if command.is_stateless and not command.is_users:
            self._run_now(request, command, arguments)
        elif self._waiting_count >= WAITING_MAX or self._waiting_bytes >= WAITING_MAX_BYTES:
            self._answer(request, {"error": BUSY})
        else:
            self._waiting.append(WaitingCommand(request, command, arguments, size_bytes))
            self._waiting_count += 1
            self._waiting_bytes += size_bytes
            self._to_do.set()

    async def _run_waiting(self) -> None:
        """Run queued commands in order. Commands that may wait run as tasks and do not delay the next."""
        async for waiting in self._commands():
            command = waiting.command
            if self._main is None and not (command.is_users or command.is_async):
                self._leave_line(waiting)
                self._run_now(waiting.request, command, waiting.arguments)
            else:
                assert self._group is not None
                self._group.create_task(self._run_in_turn(waiting))
            await asyncio.sleep(0)  # reading goes first: a ping may be next

    async def _commands(self) -> AsyncIterator[WaitingCommand]:
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            self._to_do.clear()
            await self._to_do.wait()

    def _leave_line(self, waiting: WaitingCommand) -> None:
        self._waiting_count -= 1
        self._waiting_bytes -= waiting.size_bytes

    def _run_now(self, request: Request, command: Command, arguments: Mapping[str, Any]) -> None:
        try:
            value = command.handler(self._view, **arguments)
        except (Exception, SystemExit) as error:  # of a command, with arguments that anybody may send
            self._answer_error(request, command, error)
        else:
            self._answer_value(request, command, value)

    async def _run_in_turn(self, waiting: WaitingCommand) -> None:
        """Run a command when one of the places of its kind is free, and queue its reply."""
        request, command = waiting.request, waiting.command
        async with self._users_places if command.is_users else self._our_places:  # in the order they came
            self._leave_line(waiting)
            try:
                value = await self._run(command, waiting.arguments)
            except (Exception, SystemExit) as error:  # of a command, which users may have written
                self._answer_error(request, command, error)
            else:
                self._answer_value(request, command, value)

    async def _run(self, command: Command, arguments: Mapping[str, Any]) -> Any:
        """Return what the command returns: of a user in a new thread, of Umbel on the worker's loop."""
        if command.is_users:
            call = OffLoop(f"umbel-control-{command.name}", lambda: self._run_users(command, arguments))
            happened = await call.ended()
            if isinstance(happened, Raised):
                raise happened.error
            return happened.value
        called = self._run_ours(command, arguments)
        if self._main is None:
            return await called
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(called, self._main))

    def _run_users(self, command: Command, arguments: Mapping[str, Any]) -> Any:
        value = command.handler(self._view, **arguments)
        return asyncio.run(value) if asyncio.iscoroutine(value) else value

    async def _run_ours(self, command: Command, arguments: Mapping[str, Any]) -> Any:
        value = command.handler(self._view, **arguments)
        return await value if command.is_async else value

    # -- replies ---------------------------------------------------------------------------------

    def _answer_error(self, request: Request, command: Command, error: BaseException) -> None:
        # The text of a broker's error says all; others are logged with the traceback.
        traced = None if isinstance(error, BrokerError) else error
        log.error("control command raised an exception", extra={"command": command.name}, exc_info=traced)
        self._answer(request, _described(error))

    def _answer_value(self, request: Request, command: Command, value: Any) -> None:
        if command.is_answered and value is not NO_ANSWER:
            self._answer(request, value)

    def _answer(self, request: Request, value: Any) -> None:
        """Queue a reply; when the queue is full, the next request waits."""
        to = request.reply_to
        if to is None:
            return
        self._replies_clock += 1
        stamp = (request.ticket, self._replies_clock, self._members_to_send())
        try:
            headers, body = encode_reply(self._node, value, *stamp)
        except WireError as error:
            headers, body = encode_reply(self._node, {"error": str(error)}, *stamp)
        self._replies.append((Broadcast(to.exchange, to.routing_key, body, headers), time()))
        self._replies_bytes += len(headers) + len(body)
        if len(self._replies) >= REPLIES_MAX or self._replies_bytes >= REPLIES_MAX_BYTES:
            self._has_room.clear()
        self._to_send.set()

    def _members_to_send(self) -> Sequence[MemberReport]:
        if monotonic() - self._members_at >= MEMBERS_FRESH_S:
            members = self._members()
            if len(members) > MEMBERS_SENT_MAX:
                first = sorted(member.node for member in members if member.is_umbel)[:MEMBERS_SENT_BY]
                members = members if self._node in first else ()
            self._members_sent, self._members_at = members, monotonic()
        return self._members_sent

    async def _send_replies(self) -> None:
        """Send queued replies until cancelled; replies older than REPLY_TRIES_S are dropped."""
        backoff = Backoff()
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            try:
                await self._send_waiting()
                backoff.reset()
            except BrokerError as error:
                log.debug("cannot send control replies; retrying", extra={"why": str(error)})
                self._to_send.set()
                await backoff.pause()

    async def _send_waiting(self) -> None:
        while self._replies:
            now = time()
            batch = list(self._replies)
            fresh = [reply for reply, at in batch if now - at < REPLY_TRIES_S]
            self._figures.replies_dropped += len(batch) - len(fresh)
            await self._send(fresh)
            for reply, _ in batch:
                self._replies.popleft()
                self._replies_bytes -= len(reply.headers) + len(reply.body)
            self._has_room.set()

    async def _send(self, replies: Sequence[Broadcast]) -> None:
        """Send replies; if the broker refuses, only those that it refuses are dropped."""
        try:
            if replies:
                await self._broker.broadcast(replies, ttl_s=REPLY_TTL_S)
        except (BrokerRefused, WireError) as error:
            if len(replies) > 1:
                for reply in replies:
                    await self._send([reply])
                return
            self._figures.replies_dropped += 1
            fields = {"to": replies[0].routing_key[:100], "why": str(error)}
            log.warning("broker refused a control reply; the caller gets no answer", extra=fields)


def _described(error: BaseException) -> dict[str, str]:
    return {"error": repr(error)[:ERROR_CHARS_MAX]}
