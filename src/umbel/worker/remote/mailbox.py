"""The mailbox: listens for control requests on one connection, runs the commands, sends the replies.

The shell of `protocol/pidbox.py`, and the counts of it that `stats` shows.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from time import monotonic, time
from typing import Any, Protocol

import msgspec

from umbel.backoff import Backoff
from umbel.brokers.interface import Broadcast, FanOut
from umbel.clock import cluster_now
from umbel.control.panel import NO_ANSWER, Command, Panel
from umbel.control.state import ControlState
from umbel.coordination.driver import listen
from umbel.errors import BrokerError, BrokerRefused, WireError
from umbel.pools.guard import Raised, Returned, call_guarded
from umbel.protocol.delivery.trust import Signed, unbound_doubt
from umbel.protocol.pidbox import Handle, Mailbox, Malformed, MemberReport, Refused, Request, RequestIgnored
from umbel.wire.control import REQUEST_EXCHANGE, decode_request, encode_reply

# ---- mailbox shell ---------------------------------------------------------------------------------
#
# Listens for control requests on one connection, runs the commands, sends the replies.
#
# The shell of `protocol/pidbox.py`. Umbel's own commands that do not wait run in the order of their
# requests. Commands that wait, and all users' commands, run concurrently, so that a `ping` is always
# answered. The creator of the shell decides where they run (`Runner`).
#
# In a flood requests are read in small shares, so that the worker goes on. A `ping` is answered when it is
# read. Other commands wait for their turn, and are answered with an error when WAITING_MAX of them wait. At
# most HANDLED_MAX of Umbel's waiting commands and as many of users' run at a time; the next of its kind
# waits, others pass it. While the limit of queued replies is reached, no request is read: the flood waits
# at the broker, or in the subscription, which has a limit.
#
# After a channel error the mailbox reconnects, and the worker goes on (P5). Requests sent meanwhile are
# lost, on Redis as with Celery's workers; the caller sees which nodes did not answer.

log = logging.getLogger("umbel.worker.control")

REPLIES_MAX, REPLIES_MAX_BYTES = 1000, 16 * 2**20
ERROR_CHARS_MAX = 2000
REPLY_TTL_S = 60.0
REPLY_TRIES_S = 10.0
HANDLED_MAX = 100
WAITING_MAX, WAITING_MAX_BYTES = 200, 4 * 2**20
MEMBERS_FRESH_S = 0.2
BUSY = "too many commands are queued on this worker; try again later"
MEMBERS_TOLD_MAX = 100  # in a larger cluster only the first few nodes send the members
MEMBERS_TOLD_BY = 3

CommandOutcome = Returned[Any] | Raised


class WaitingCommand(msgspec.Struct, frozen=True):
    """A command that waits for its turn."""

    request: Request
    command: Command
    arguments: dict[str, Any]
    size_bytes: int


class Runner(Protocol):
    """Runs commands with the worker's state."""

    def at_once(self, command: Command, arguments: dict[str, Any]) -> CommandOutcome | None:
        """Run a command that may run here and now and return what happened; None for any other."""
        ...

    async def beside(self, command: Command, arguments: dict[str, Any]) -> CommandOutcome:
        """Run a command that waits; return what happened."""


class MailboxShell:
    """One subscription with its queues of commands and replies."""

    def __init__(
        self,
        node: str,
        broker: FanOut,
        mailbox: Mailbox,
        panel: Panel,
        runner: Runner,
        members: Callable[[], Sequence[MemberReport]],
        report: Callable[[BrokerError | None], None],
        *,
        accept: Collection[str],
        unbound_s: float,
    ) -> None:
        self.resets = 0  # faults that ended the subscription; it restores lost links by itself
        self.replies_dropped = 0
        self.is_open = asyncio.Event()
        self._node = node
        self._broker = broker
        self._mailbox = mailbox
        self._panel = panel
        self._runner = runner
        self._members = members
        self._accept = accept  # content types that requests may have
        self._unbound_s = unbound_s  # how long after the upgrade requests signed by Umbel 0.3 are accepted
        self._report = report  # called with None when the subscription works, else with its error
        self._replies: deque[tuple[Broadcast, float]] = deque()
        self._replies_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._replies_clock = 0
        self._to_send = asyncio.Event()
        self._members_at = -MEMBERS_FRESH_S
        self._members_told: Sequence[MemberReport] = ()
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
            self._group.create_task(self._carry_out())
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
        self.resets += error is not None
        self._report(error)

    async def _take_when_replies_fit(self, broadcast: Broadcast) -> None:
        self._take(broadcast)
        await self._has_room.wait()

    def _take(self, broadcast: Broadcast) -> None:
        try:
            event = self._read(broadcast)
        except WireError as error:
            event = Malformed(str(error))
        for effect in self._mailbox.step(event, cluster_now()):
            match effect:
                case Handle(request):
                    self._handle(request, len(broadcast.body))
                case Refused(request, why):
                    log.warning(
                        "control command refused", extra={"command": request.method[:100], "why": why}
                    )
                    self._answer(request, {"error": why})
                case RequestIgnored(why):
                    log.debug("control command ignored", extra={"why": why})

    def _read(self, broadcast: Broadcast) -> Request | Malformed:
        signer = None if self._broker.keyring is None else self._broker.signer
        request = decode_request(broadcast.headers, broadcast.body, signer, self._accept)
        if signer is None or not isinstance(request.proof, Signed):
            return request
        doubted = unbound_doubt(request.proof, cluster_now(), signer.cluster.since, self._unbound_s)
        return request if doubted is None else request.replaced(proof=doubted)

    # -- handlers --------------------------------------------------------------------------------

    def _handle(self, request: Request, size_bytes: int) -> None:
        command = self._panel.find(request.method)
        assert command is not None, "the mailbox refuses unknown commands"
        log.debug("control command received", extra={"command": command.name})
        bound = call_guarded(command.bind, request)
        if isinstance(bound, Raised):
            self._answer(request, _error(bound.error))
        elif command.is_stateless and (happened := self._runner.at_once(command, bound.value)) is not None:
            self._finish(request, command, happened)
        elif self._waiting_count >= WAITING_MAX or self._waiting_bytes >= WAITING_MAX_BYTES:
            self._answer(request, {"error": BUSY})
        else:
            self._waiting.append(WaitingCommand(request, command, bound.value, size_bytes))
            self._waiting_count += 1
            self._waiting_bytes += size_bytes
            self._to_do.set()

    async def _carry_out(self) -> None:
        async for waiting in self._commands():
            if (happened := self._runner.at_once(waiting.command, waiting.arguments)) is not None:
                self._leave_line(waiting)
                self._finish(waiting.request, waiting.command, happened)
            else:
                assert self._group is not None
                self._group.create_task(self._handle_beside(waiting))
            await asyncio.sleep(0)  # reading goes first: a ping may be next

    async def _commands(self) -> AsyncIterator[WaitingCommand]:
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            self._to_do.clear()
            await self._to_do.wait()

    async def _handle_beside(self, waiting: WaitingCommand) -> None:
        places = self._users_places if waiting.command.is_users else self._our_places
        async with places:  # in the order in which they came
            self._leave_line(waiting)
            happened = await self._runner.beside(waiting.command, waiting.arguments)
            self._finish(waiting.request, waiting.command, happened)

    def _leave_line(self, waiting: WaitingCommand) -> None:
        self._waiting_count -= 1
        self._waiting_bytes -= waiting.size_bytes

    def _finish(self, request: Request, command: Command, happened: CommandOutcome) -> None:
        if isinstance(happened, Raised):
            log.error(
                "control command raised an exception",
                extra={"command": command.name},
                exc_info=_unless_ours(happened.error),
            )
            self._answer(request, _error(happened.error))
        elif command.is_answered and happened.value is not NO_ANSWER:
            self._answer(request, happened.value)

    # -- replies ---------------------------------------------------------------------------------

    def _answer(self, request: Request, value: Any) -> None:
        """Queue a reply; when the queue is full, the next request waits."""
        to = request.reply_to
        if to is None:
            return
        self._replies_clock += 1
        stamp = (request.ticket, self._replies_clock, self._members_to_tell())
        try:
            headers, body = encode_reply(self._node, value, *stamp)
        except WireError as error:
            headers, body = encode_reply(self._node, {"error": str(error)}, *stamp)
        self._replies.append((Broadcast(to.exchange, to.routing_key, body, headers), time()))
        self._replies_bytes += len(headers) + len(body)
        if len(self._replies) >= REPLIES_MAX or self._replies_bytes >= REPLIES_MAX_BYTES:
            self._has_room.clear()
        self._to_send.set()

    def _members_to_tell(self) -> Sequence[MemberReport]:
        if monotonic() - self._members_at >= MEMBERS_FRESH_S:
            members = self._members()
            if len(members) > MEMBERS_TOLD_MAX:
                first = sorted(member.node for member in members if member.is_umbel)[:MEMBERS_TOLD_BY]
                members = members if self._node in first else ()
            self._members_told, self._members_at = members, monotonic()
        return self._members_told

    async def _send_replies(self) -> None:
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
            self.replies_dropped += len(batch) - len(fresh)
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
            self.replies_dropped += 1
            log.warning(
                "broker refused a control reply; the caller gets no answer",
                extra={"to": replies[0].routing_key[:100], "why": str(error)},
            )


async def await_command(coroutine: Coroutine[Any, Any, Any]) -> CommandOutcome:
    """Return what a waiting command of Umbel returned or raised."""
    done = await asyncio.gather(coroutine, return_exceptions=True)
    return Raised(done[0]) if isinstance(done[0], Exception) else Returned(done[0])


async def run_in_thread(command: Command, state: ControlState, arguments: dict[str, Any]) -> CommandOutcome:
    """Run a user's handler in a new daemon thread, which does not keep the worker from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[CommandOutcome] = loop.create_future()

    def run() -> Any:
        value = command.handler(state, **arguments)
        return asyncio.run(value) if asyncio.iscoroutine(value) else value

    def settle(happened: CommandOutcome) -> None:
        if not done.done():
            done.set_result(happened)

    def work() -> None:
        happened = call_guarded(run)
        call_guarded(loop.call_soon_threadsafe, settle, happened)  # the loop may have ended meanwhile

    threading.Thread(target=work, name=f"umbel-control-{command.name}", daemon=True).start()
    return await done


def _error(error: BaseException) -> dict[str, str]:
    return {"error": repr(error)[:ERROR_CHARS_MAX]}


def _unless_ours(error: BaseException) -> BaseException | None:
    """Return the error to log with its traceback; None for errors of the broker, whose text says all."""
    return None if isinstance(error, BrokerError) else error


# ---- mailbox figures -------------------------------------------------------------------------------
#
# The counts of the mailbox that `stats` shows, for both shapes of it (P6).


class CountingMailbox(Protocol):
    """A mailbox that counts its errors."""

    @property
    def resets(self) -> int:
        """How often its subscription was restored after an error."""
        ...

    @property
    def replies_dropped(self) -> int:
        """How many replies could not be sent."""


class MailboxFigures:
    """The control step sets the mailbox that it opened; the worker's state reads its counts."""

    def __init__(self) -> None:
        self._mailbox: Mailbox | None = None
        self._shell: CountingMailbox | None = None

    def read_from(self, mailbox: Mailbox, shell: CountingMailbox) -> None:
        """Read the counts of this mailbox from now on."""
        self._mailbox, self._shell = mailbox, shell

    @property
    def resets(self) -> int:
        """How often the subscription was restored after an error."""
        return 0 if self._shell is None else self._shell.resets

    @property
    def replies_dropped(self) -> int:
        """How many replies could not be sent."""
        return 0 if self._shell is None else self._shell.replies_dropped

    @property
    def malformed(self) -> int:
        """How many requests could not be read."""
        return 0 if self._mailbox is None else self._mailbox.malformed

    @property
    def distrusted(self) -> int:
        """How many requests failed the signature check."""
        return 0 if self._mailbox is None else self._mailbox.distrusted
