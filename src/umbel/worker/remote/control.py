"""Control: the step that opens this node's mailbox (P1), on the worker's loop or in a separate thread (P6).

The thread is for green pools, whose tasks could block the main process.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from umbel.brokers.interface import Broker, BrokerConnection
from umbel.brokers.links import MAILBOX
from umbel.clock import this_moment
from umbel.control.commands import builtin_panel
from umbel.control.panel import Command, Panel, refusal
from umbel.control.state import ControlState
from umbel.errors import BrokerError
from umbel.pools.guard import Raised, call_guarded
from umbel.protocol.clock import LamportClock
from umbel.protocol.delivery.states import reconnect_wait_s
from umbel.protocol.pidbox import Mailbox, MemberReport
from umbel.protocol.shutdown import Closed, LinkChange
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext
from umbel.worker.remote.mailbox import (
    CommandOutcome,
    MailboxFigures,
    MailboxShell,
    await_command,
    run_in_thread,
)
from umbel.worker.sidecar import Outages

# ---- green mailbox ---------------------------------------------------------------------------------
#
# A mailbox with a separate connection, loop and thread (P6).
#
# For workers whose main process may be blocked by the tasks that run in it: `ping` is answered from this
# thread alone. Commands that read or change the worker's state run on the worker's loop, which owns that
# state, and wait for it.
#
# It lives until a shutdown event is set, and then sets a stopped event, for which `stop` waits.

STOP_S = 5.0
LOOK_EVERY_S = 1.0


class GreenMailbox:
    """Built on the worker's loop; `members` is called there once a second."""

    def __init__(
        self,
        node: str,
        open_broker: Callable[[], Broker],
        clock: LamportClock,
        panel: Panel,
        state: ControlState,
        *,
        refusal_of: Callable[[str], str],
        changes: Callable[[str], bool],
        members: Callable[[], Sequence[MemberReport]],
        outages: Outages,
        accept: Collection[str],
        unbound_s: float,
    ) -> None:
        self._outages = outages
        self._accept = accept
        self._unbound_s = unbound_s
        self._node = node
        self._open_broker = open_broker
        self._panel = panel
        self._state = state
        self._members = members
        self._known: Sequence[MemberReport] = ()
        self._main = asyncio.get_running_loop()
        self._clock = clock
        self.mailbox = Mailbox(
            node, self.forward, refusal_of=refusal_of, changes=changes, since=this_moment()
        )
        self._shell: MailboxShell | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shutdown: asyncio.Event | None = None
        self._opened: Future[None] = Future()
        self._stopped: Future[None] = Future()  # with the error that ended the thread, if any
        self._thread = threading.Thread(target=self._live, name="umbel-mailbox", daemon=True)

    @property
    def resets(self) -> int:
        """How often its subscription was restored after an error."""
        return 0 if self._shell is None else self._shell.resets

    @property
    def replies_dropped(self) -> int:
        """How many replies could not be sent."""
        return 0 if self._shell is None else self._shell.replies_dropped

    # -- on the worker's loop ------------------------------------------------------------------------

    async def run(self) -> None:
        """Start the thread and watch it until cancelled; an error of the thread is raised here."""
        self._thread.start()
        ended = asyncio.wrap_future(self._stopped)
        while not ended.done():
            self._known = tuple(self._members())
            await asyncio.wait([ended], timeout=LOOK_EVERY_S)
        await ended

    async def opened(self) -> None:
        """Return when the mailbox listens."""
        await asyncio.shield(asyncio.wrap_future(self._opened))

    async def stop(self) -> None:
        """Set the shutdown event and wait for the stopped event."""
        if not self._thread.is_alive():
            return
        if self._loop is not None and self._shutdown is not None:
            call_guarded(
                self._loop.call_soon_threadsafe, self._shutdown.set
            )  # the loop may have ended meanwhile
        try:
            async with asyncio.timeout(STOP_S):
                await asyncio.wait([asyncio.wrap_future(self._stopped)])
                await asyncio.to_thread(self._thread.join)  # setting `_stopped` is the last thing it does
        except TimeoutError:
            log.warning("remote-control mailbox did not stop in time; it ends with the process")

    def _run_here(self, command: Command, arguments: dict[str, Any]) -> Any:
        async def carried_out() -> CommandOutcome:
            if command.is_async:
                return await await_command(command.handler(self._state, **arguments))
            return call_guarded(command.handler, self._state, **arguments)

        return asyncio.run_coroutine_threadsafe(carried_out(), self._main)

    # -- in the thread -------------------------------------------------------------------------------

    def _live(self) -> None:
        ended = call_guarded(asyncio.run, self._serve())
        if isinstance(ended, Raised):
            self._stopped.set_exception(ended.error)
        else:
            self._stopped.set_result(None)

    async def _serve(self) -> None:
        self._loop, self._shutdown = asyncio.get_running_loop(), asyncio.Event()
        stopping = asyncio.create_task(self._shutdown.wait())
        living = asyncio.create_task(self._listen())
        await asyncio.wait([stopping, living], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if living.done():
            await living  # raises its error
        living.cancel()
        await asyncio.wait([living])

    async def _listen(self) -> None:
        broker = self._open_broker()
        broker.on_link(self._note_link)
        await self._open(broker)
        self._shell = MailboxShell(
            self._node,
            broker,
            self.mailbox,
            self._panel,
            self,
            lambda: self._known,
            self._report,
            accept=self._accept,
            unbound_s=self._unbound_s,
        )
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._tell_when_open(self._shell))
                await self._shell.run()
        finally:
            await self._shell.send_last_replies()
            await broker.close()

    async def _open(self, broker: BrokerConnection) -> None:
        failures = 0
        while True:
            try:
                await broker.open()
            except BrokerError as error:
                failures += 1
                self._report(error)
                await asyncio.sleep(reconnect_wait_s(failures, 0.5))
            else:
                return

    async def _tell_when_open(self, shell: MailboxShell) -> None:
        await shell.is_open.wait()
        if not self._opened.done():
            self._opened.set_result(None)

    def _note_link(self, change: LinkChange) -> None:
        """Report changes of the subscription's link only: the others are restored when they are used."""
        name = change.name if isinstance(change, Closed) else change.link
        if name == MAILBOX:
            call_guarded(self._main.call_soon_threadsafe, self._outages.link, change)

    def _report(self, error: BrokerError | None) -> None:
        report = partial(self._outages.report, MAILBOX, error)
        call_guarded(self._main.call_soon_threadsafe, report)

    def forward(self) -> None:
        """Move the worker's clock, which its loop owns, before any handler runs there (P4)."""
        call_guarded(self._main.call_soon_threadsafe, self._clock.forward)

    def at_once(self, command: Command, arguments: dict[str, Any]) -> CommandOutcome | None:
        """Run a command that needs no state of the worker; None for any other."""
        return call_guarded(command.handler, self._state, **arguments) if command.is_stateless else None

    async def beside(self, command: Command, arguments: dict[str, Any]) -> CommandOutcome:
        """Run a command on the worker's loop, or a user's in a new thread."""
        if command.is_users:
            return await run_in_thread(command, self._state, arguments)
        return await asyncio.wrap_future(self._run_here(command, arguments))


# ---- control ---------------------------------------------------------------------------------------
#
# This node's mailbox (P1), separate from the queues of tasks.
#
# It has two shapes (P6). Usually it shares the worker's connection and loop. Where the pool is green, tasks
# could block the main process, so the mailbox has a separate connection, loop and thread. The step stops
# after the tasks have: a worker that drains still answers.

log = logging.getLogger("umbel.worker.control")

OPEN_S = 5.0


class Control(Step):
    """The step that opens the mailbox and runs commands on the worker's loop."""

    name = "control"
    requires = ("connection", "events")

    def __init__(
        self,
        context: WorkerContext,
        clock: LamportClock,
        state: ControlState,
        figures: MailboxFigures,
        before_listening: Callable[[], Awaitable[None]],
        *,
        members: Callable[[], Sequence[MemberReport]],
    ) -> None:
        super().__init__()
        self._context = context
        self._node = context.identity.node
        self._state = state
        self._clock = clock
        self._figures = figures
        self._members = members
        self._before_listening = before_listening
        self.panel: Panel = builtin_panel()
        self.panel.include(context.settings.control_commands)
        self.mailbox = Mailbox(
            self._node, clock.forward, refusal_of=self._refusal_of, changes=self._changes, since=this_moment()
        )
        self._shell: MailboxShell | None = None
        self._green: GreenMailbox | None = None

    async def start(self) -> None:
        """Open the mailbox; a broker that does not answer in time only delays it."""
        capabilities = self._context.broker.capabilities
        if not capabilities.fanout:
            log.warning("remote control disabled: %s", capabilities.why_not("fanout"))
            return
        await self._before_listening()
        opened = self._start_green() if self._has_own_thread() else self._start_shared()
        try:
            async with asyncio.timeout(OPEN_S):
                await opened()
        except TimeoutError:
            text = "remote-control mailbox is not open: the broker did not answer within %g s; retrying"
            log.warning(text, OPEN_S, extra={"node": self._node})

    async def stop(self) -> None:
        """Close the mailbox after the last replies were sent."""
        if self._green is not None:
            await self._green.stop()
        await self.end_background()
        if self._shell is not None:
            await self._shell.send_last_replies()

    def _has_own_thread(self) -> bool:
        chosen = self._context.settings.control_mailbox
        return chosen == "own" or (chosen == "auto" and self._context.pool.is_green)

    def _start_shared(self) -> Callable[[], Any]:
        shell = self._shell = MailboxShell(
            self._node,
            self._context.broker,
            self.mailbox,
            self.panel,
            self,
            self._members,
            partial(self._context.outages.report, self.name),
            accept=self._context.settings.accept_content,
            unbound_s=self._context.settings.unbound_s,
        )
        self._figures.read_from(self.mailbox, shell)
        self.run_in_background(shell.run())
        return shell.is_open.wait

    def _start_green(self) -> Callable[[], Any]:
        open_broker = self._context.settings.open_broker
        assert open_broker is not None, "a worker that needs another connection can open one"
        green = self._green = GreenMailbox(
            self._node,
            open_broker,
            self._clock,
            self.panel,
            self._state,
            refusal_of=self._refusal_of,
            changes=self._changes,
            members=self._members,
            outages=self._context.outages,
            accept=self._context.settings.accept_content,
            unbound_s=self._context.settings.unbound_s,
        )
        self.mailbox = green.mailbox
        self._figures.read_from(green.mailbox, green)
        self.run_in_background(green.run())
        log.info(
            "remote-control mailbox runs in a separate thread with its own connection",
            extra={"node": self._node},
        )
        return green.opened

    def _refusal_of(self, method: str) -> str:
        return refusal(self.panel, method, self._context.settings.control_allow)

    def _changes(self, method: str) -> bool:
        command = self.panel.find(method)
        return command is not None and command.changes

    # -- commands, on the worker's loop --------------------------------------------------------------

    def at_once(self, command: Command, arguments: dict[str, Any]) -> CommandOutcome | None:
        """Run one of Umbel's commands that does not wait; None for any other."""
        if command.is_users or command.is_async:
            return None
        return call_guarded(command.handler, self._state, **arguments)

    async def beside(self, command: Command, arguments: dict[str, Any]) -> CommandOutcome:
        """Run a command that waits, or a user's in a new thread."""
        if command.is_users:
            return await run_in_thread(command, self._state, arguments)
        return await await_command(command.handler(self._state, **arguments))
