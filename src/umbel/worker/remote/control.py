"""Control: the step that opens this node's mailbox (P1), on the worker's loop or in a separate thread (P6).

The thread is for green pools, whose tasks could block the loop of the main process. The mailbox is separate
from the queues of tasks. The step stops after the tasks have: a worker that drains still answers.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from umbel.backoff import Backoff
from umbel.brokers.interface import Broker
from umbel.brokers.links import MAILBOX
from umbel.clock import this_moment
from umbel.control.commands import builtin_panel
from umbel.control.panel import refusal
from umbel.errors import BrokerError
from umbel.protocol.clock import LamportClock
from umbel.protocol.pidbox import Mailbox, MemberReport
from umbel.protocol.shutdown import Closed, LinkChange
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext
from umbel.worker.remote.mailbox import MailboxFigures, MailboxShell, Members, Report

if TYPE_CHECKING:
    from umbel.worker.remote.view import WorkerView

log = logging.getLogger("umbel.worker.control")

OPEN_S = 5.0
STOP_S = 5.0
CHECK_EVERY_S = 1.0

# ---- mailbox thread --------------------------------------------------------------------------------


class MailboxThread:
    """A mailbox with a separate connection, loop and thread, for a worker whose tasks may block its loop
    (P6).

    `ping` is answered from this thread alone. Commands that read or change the worker's state run on the
    worker's loop, which owns that state, and wait for it. `members` is called on the worker's loop once a
    second. Built on the worker's loop.
    """

    def __init__(
        self,
        context: WorkerContext,
        clock: LamportClock,
        members: Members,
        make_shell: Callable[[Broker, Members, Report], MailboxShell],
    ) -> None:
        self._context = context
        self._clock = clock
        self._members = members
        self._make_shell = make_shell
        self._known: Sequence[MemberReport] = ()
        self._main = asyncio.get_running_loop()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._opened: Future[None] = Future()
        self._stopped: Future[None] = Future()  # with the error that ended the thread, if any
        self._thread = threading.Thread(target=self._live, name="umbel-mailbox", daemon=True)

    # -- on the worker's loop --------------------------------------------------------------------

    async def run(self) -> None:
        """Start the thread and watch it until cancelled; an error of the thread is raised here."""
        self._thread.start()
        ended = asyncio.wrap_future(self._stopped)
        while not ended.done():
            self._known = tuple(self._members())
            await asyncio.wait([ended], timeout=CHECK_EVERY_S)
        await ended

    async def opened(self) -> None:
        """Return when the mailbox listens."""
        await asyncio.shield(asyncio.wrap_future(self._opened))

    async def stop(self) -> None:
        """End the thread after its last replies, and wait for that."""
        if not self._thread.is_alive():
            return
        self._is_stopping = True
        if self._loop is not None and self._serving is not None:
            with suppress(RuntimeError):  # the thread's loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._serving.cancel)
        try:
            async with asyncio.timeout(STOP_S):
                await asyncio.wait([asyncio.wrap_future(self._stopped)])
                await asyncio.to_thread(self._thread.join)  # setting `_stopped` is the last thing it does
        except TimeoutError:
            log.warning("remote-control mailbox did not stop in time; it ends with the process")

    # -- in the thread ---------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:  # by `stop`
            self._stopped.set_result(None)
        except (Exception, SystemExit) as error:  # of the mailbox: `run` raises it on the worker's loop
            if self._is_stopping:  # raised there now, it would keep the other steps from stopping
                log.warning("remote-control mailbox failed to stop cleanly", extra={"why": str(error)})
                self._stopped.set_result(None)
            else:
                self._stopped.set_exception(error)

    async def _serve(self) -> None:
        """Serve the mailbox over a separate connection until cancelled, then send the last replies."""
        self._loop, self._serving = asyncio.get_running_loop(), asyncio.current_task()
        open_broker = self._context.settings.open_broker
        assert open_broker is not None, "a worker that needs another connection can open one"
        broker = open_broker()
        broker.on_link(self._note_link)
        await self._open(broker)
        shell = self._make_shell(broker, lambda: self._known, self._report)
        try:
            await shell.run()
        finally:
            await shell.send_last_replies()
            await broker.close()

    async def _open(self, broker: Broker) -> None:
        backoff = Backoff()
        while True:
            try:
                return await broker.open()
            except BrokerError as error:
                self._report(error)
                await backoff.pause()

    def _report(self, error: BrokerError | None) -> None:
        if error is None and not self._opened.done():
            self._opened.set_result(None)
        self._on_main(partial(self._context.outages.report, MAILBOX, error))

    def _note_link(self, change: LinkChange) -> None:
        """Report changes of the subscription's link only: the others are restored when they are used."""
        name = change.name if isinstance(change, Closed) else change.link
        if name == MAILBOX:
            self._on_main(partial(self._context.outages.link, change))

    def forward(self) -> None:
        """Move the worker's clock, which its loop owns, before any handler runs there (P4)."""
        self._on_main(self._clock.forward)

    def _on_main(self, call: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the worker's loop has ended
            self._main.call_soon_threadsafe(call)


# ---- control ---------------------------------------------------------------------------------------


class Control(Step):
    """The step that opens the mailbox, and closes it after the last replies."""

    name = "control"
    requires = ("connection", "events")

    def __init__(
        self,
        context: WorkerContext,
        clock: LamportClock,
        view: "WorkerView",
        figures: MailboxFigures,
        before_listening: Callable[[], Awaitable[None]],
        *,
        members: Members,
    ) -> None:
        super().__init__(context)
        self._view = view
        self._figures = figures
        self._members = members
        self._before_listening = before_listening
        self._panel = builtin_panel()
        self._panel.include(context.settings.control_commands)
        self._main = asyncio.get_running_loop()
        chosen = context.settings.control_mailbox
        self._thread: MailboxThread | None = None
        if chosen == "own" or (chosen == "auto" and context.pool.is_green):
            self._thread = MailboxThread(context, clock, members, self._make_shell)
        self.mailbox = figures.mailbox = Mailbox(
            context.identity.node,
            (self._thread or clock).forward,
            refusal_of=lambda method: refusal(self._panel, method, context.settings.control_allow),
            changes=self._changes,
            since=this_moment(),
        )
        self._shell: MailboxShell | None = None

    async def start(self) -> None:
        """Open the mailbox; a broker that does not answer in time only delays it."""
        broker, about = self._context.broker, self._context.log_fields()
        if not broker.capabilities.fanout:
            log.warning("remote control disabled: %s", broker.capabilities.why_not("fanout"))
            return
        await self._before_listening()
        opened: Callable[[], Awaitable[object]]
        if self._thread is not None:
            self.run_in_background(self._thread.run())
            opened = self._thread.opened
            text = "remote-control mailbox runs in a separate thread with its own connection"
            log.info(text, extra=about)
        else:
            report = partial(self._context.outages.report, self.name)
            self._shell = self._make_shell(broker, self._members, report)
            self.run_in_background(self._shell.run())
            opened = self._shell.is_open.wait
        try:
            async with asyncio.timeout(OPEN_S):
                await opened()
        except TimeoutError:
            text = "remote-control mailbox is not open: the broker did not answer within %g s; retrying"
            log.warning(text, OPEN_S, extra=about)

    async def stop(self) -> None:
        """Close the mailbox after the last replies were sent."""
        if self._thread is not None:
            await self._thread.stop()
        await self.end_background()
        if self._shell is not None:
            await self._shell.send_last_replies()

    def _make_shell(self, broker: Broker, members: Members, report: Report) -> MailboxShell:
        return MailboxShell(
            self._context,
            broker,
            self.mailbox,
            self._panel,
            self._view,
            self._figures,
            members=members,
            report=report,
            main=None if self._thread is None else self._main,
        )

    def _changes(self, method: str) -> bool:
        command = self._panel.find(method)
        return command is not None and command.changes
