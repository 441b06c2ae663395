"""Control: this node's mailbox (P1), apart from the queues of tasks.

Commands of ours run on the loop, one after the other, in the order in which they came; those that
wait for the broker, and all that users wrote, run beside it, so that a `ping` is answered whatever
the others do. The step stops after the tasks have: a worker that drains still answers (P6).

A fault of the channel makes the mailbox anew, and the worker goes on (P5). What was sent while it
was away is missed, on Redis as with Celery's workers; the caller sees who is silent.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from random import random
from time import monotonic, time
from typing import Any

from umbel.brokers.interface import Broadcast
from umbel.control.client import Asker
from umbel.control.commands import builtin_panel
from umbel.control.panel import NO_ANSWER, Command, Panel, refusal
from umbel.control.state import ControlState
from umbel.errors import BrokerError, WireError
from umbel.pools.guard import Raised, Returned, call_guarded
from umbel.protocol.clock import LamportClock
from umbel.protocol.pidbox import (
    Answers,
    Handle,
    Known,
    Mailbox,
    Malformed,
    PassedOver,
    Refused,
    Request,
)
from umbel.protocol.retry import reconnect_wait_s
from umbel.wire.control import REQUEST_EXCHANGE, decode_request, encode_reply
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext

log = logging.getLogger("umbel.worker.control")

OPEN_S = 5.0
REPLIES_MAX = 1000
REPLY_TTL_S = 60.0
REPLY_TRIES_S = 10.0
HANDLED_MAX = 100
COMPLAIN_EVERY_S = 10.0
MEMBERS_TOLD_MAX = 100  # in a larger cluster only the first few nodes tell who is a member
MEMBERS_TOLD_BY = 3

_Happened = Returned[Any] | Raised


class Control(Step):
    name = "control"
    requires = ("connection", "events")

    def __init__(self, context: WorkerContext, clock: LamportClock, state: ControlState) -> None:
        super().__init__()
        self._context = context
        self._node = context.identity.node
        self._state = state
        self.panel: Panel = builtin_panel()
        self.panel.include(context.settings.control_commands)
        self.members: Callable[[], Sequence[Known]] = tuple  # set by whoever knows the members
        self.resets = 0
        self.replies_dropped = 0
        self._complained_at = -COMPLAIN_EVERY_S
        self.mailbox = Mailbox(self._node, clock, refusal_of=self._refusal_of)
        self._asker = Asker(context.broker)
        self._replies: deque[tuple[Broadcast, float]] = deque()
        self._replies_clock = 0
        self._to_send = asyncio.Event()
        self._is_open = asyncio.Event()
        self._handling: set[asyncio.Task[None]] = set()

    async def ask(
        self,
        method: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        destination: Sequence[str] | None = None,
        timeout_s: float = 1.0,
        limit: int | None = None,
        unless: str = "",
    ) -> Answers:
        """Ask other nodes, on this worker's own connection; possible once the broker is open.

        The replies, by node, hold our own too where the request reached us. Raises BrokerError.
        """
        return await self._asker.ask(
            method, arguments, destination=destination, timeout_s=timeout_s, limit=limit, unless=unless
        )

    async def tell(
        self,
        method: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        destination: Sequence[str] | None = None,
    ) -> None:
        """The same without waiting for replies."""
        await self._asker.tell(method, arguments, destination=destination)

    async def start(self) -> None:
        capabilities = self._context.broker.capabilities
        if not capabilities.fanout:
            log.warning("control is off: transport %s has no fan-out", capabilities.transport)
            return
        self.run_in_background(self._send_replies())
        self.run_in_background(self._listen())
        try:
            async with asyncio.timeout(OPEN_S):
                await self._is_open.wait()
        except TimeoutError:
            log.warning("the mailbox cannot be opened yet; trying on", extra={"node": self._node})

    async def stop(self) -> None:
        await self.end_background()
        for task in self._handling:
            task.cancel()
        try:
            async with asyncio.timeout(1.0):
                await self._send_waiting()
        except (BrokerError, TimeoutError) as error:
            log.debug("the last replies are lost", extra={"why": str(error)})

    # -- requests --------------------------------------------------------------------------------

    async def _listen(self) -> None:
        failures = 0
        while True:
            try:
                async with self._context.broker.subscribe(REQUEST_EXCHANGE, [self._node]) as requests:
                    self._is_open.set()
                    failures = 0
                    async for broadcast in requests:
                        self._take(broadcast)
            except BrokerError as error:
                self.resets += 1
                failures += 1
                if failures == 1:
                    log.warning("the mailbox is made anew", extra={"node": self._node, "why": str(error)})
                await asyncio.sleep(reconnect_wait_s(failures, random()))

    def _take(self, broadcast: Broadcast) -> None:
        try:
            event: Request | Malformed = decode_request(broadcast.headers, broadcast.body)
        except WireError as error:
            event = Malformed(str(error))
        for effect in self.mailbox.step(event, time()):
            match effect:
                case Handle(request):
                    self._handle(request)
                case Refused(request, why):
                    self._complain(request, why)
                    self._answer(request, {"error": why})
                case PassedOver(why):
                    log.debug("command passed over", extra={"why": why})

    def _complain(self, request: Request, why: str) -> None:
        """Say so, but not for each one of a flood."""
        is_time = monotonic() - self._complained_at >= COMPLAIN_EVERY_S
        if is_time:
            self._complained_at = monotonic()
        fields = {"command": request.method[:100], "why": why, "refused": self.mailbox.refused}
        log.log(logging.WARNING if is_time else logging.DEBUG, "command refused", extra=fields)

    def _refusal_of(self, method: str) -> str:
        return refusal(self.panel, method, self._context.settings.control_allow)

    # -- handlers --------------------------------------------------------------------------------

    def _handle(self, request: Request) -> None:
        command = self.panel.find(request.method)
        assert command is not None, "the mailbox refuses commands that nobody knows"
        log.debug("command", extra={"command": command.name})
        bound = call_guarded(command.bind, request)
        if isinstance(bound, Raised):
            self._answer(request, {"error": repr(bound.error)})
        elif not command.is_users and not command.is_async:
            self._finish(request, command, call_guarded(command.handler, self._state, **bound.value))
        elif len(self._handling) >= HANDLED_MAX:
            self._answer(request, {"error": f"{HANDLED_MAX} commands are being carried out here; ask later"})
        else:
            assert self._group is not None
            task = self._group.create_task(self._handle_beside(request, command, bound.value))
            self._handling.add(task)
            task.add_done_callback(self._handling.discard)

    async def _handle_beside(self, request: Request, command: Command, arguments: dict[str, Any]) -> None:
        happened: _Happened
        if command.is_users:
            happened = await _in_thread(command, self._state, arguments)
        else:
            done = await asyncio.gather(command.handler(self._state, **arguments), return_exceptions=True)
            happened = Raised(done[0]) if isinstance(done[0], Exception) else Returned(done[0])
        self._finish(request, command, happened)

    def _finish(self, request: Request, command: Command, happened: _Happened) -> None:
        if isinstance(happened, Raised):
            log.error(
                "a command failed", extra={"command": command.name}, exc_info=_unless_ours(happened.error)
            )
            self._answer(request, {"error": repr(happened.error)})
        elif command.is_answered and happened.value is not NO_ANSWER:
            self._answer(request, happened.value)

    # -- replies ---------------------------------------------------------------------------------

    def _answer(self, request: Request, value: Any) -> None:
        """Queue a reply; the oldest goes when too many wait for a broker that does not take them."""
        to = request.reply_to
        if to is None:
            return
        self._replies_clock += 1
        told = (request.ticket, self._replies_clock, self._members_to_tell())
        try:
            headers, body = encode_reply(self._node, value, *told)
        except WireError as error:
            headers, body = encode_reply(self._node, {"error": str(error)}, *told)
        if len(self._replies) >= REPLIES_MAX:
            self._replies.popleft()
            self.replies_dropped += 1
        self._replies.append((Broadcast(to.exchange, to.routing_key, body, headers), time()))
        self._to_send.set()

    def _members_to_tell(self) -> Sequence[Known]:
        members = self.members()
        if len(members) <= MEMBERS_TOLD_MAX:
            return members
        first = sorted(one.node for one in members if one.is_umbel)[:MEMBERS_TOLD_BY]
        return members if self._node in first else ()

    async def _send_replies(self) -> None:
        failures = 0
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            try:
                await self._send_waiting()
                failures = 0
            except BrokerError as error:
                failures += 1
                log.debug("replies cannot be sent; trying on", extra={"why": str(error)})
                self._to_send.set()
                await asyncio.sleep(reconnect_wait_s(failures, random()))

    async def _send_waiting(self) -> None:
        while self._replies:
            now = time()
            batch = list(self._replies)
            fresh = [reply for reply, at in batch if now - at < REPLY_TRIES_S]
            self.replies_dropped += len(batch) - len(fresh)
            if fresh:
                await self._context.broker.broadcast(fresh, ttl_s=REPLY_TTL_S)
            for _ in range(min(len(batch), len(self._replies))):
                self._replies.popleft()


async def _in_thread(command: Command, state: ControlState, arguments: dict[str, Any]) -> _Happened:
    """Run a user's handler in a thread of its own, which does not keep the worker from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Happened] = loop.create_future()

    def run() -> Any:
        value = command.handler(state, **arguments)
        return asyncio.run(value) if asyncio.iscoroutine(value) else value

    def settle(happened: _Happened) -> None:
        if not done.done():
            done.set_result(happened)

    def work() -> None:
        happened = call_guarded(run)
        call_guarded(loop.call_soon_threadsafe, settle, happened)  # the loop may have ended meanwhile

    threading.Thread(target=work, name=f"umbel-control-{command.name}", daemon=True).start()
    return await done


def _unless_ours(error: BaseException) -> BaseException | None:
    """The error with its traceback; the broker's own say all in one line."""
    return None if isinstance(error, BrokerError) else error
