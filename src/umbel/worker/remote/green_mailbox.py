"""GreenMailbox: a mailbox with a separate connection, loop and thread (P6).

For workers whose main process may be claimed up by what tasks do in it: `ping` is answered here, from
this thread alone. Commands that look at the worker or change it are carried out on the worker's loop,
which owns that state, and wait for it.

It lives until a shutdown event is set, and then sets a stopped event, for which its stopper waits.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from umbel.brokers.interface import Broker, BrokerConnection
from umbel.brokers.links import MAILBOX
from umbel.clock import this_moment
from umbel.control.panel import Command, Panel
from umbel.control.state import ControlState
from umbel.errors import BrokerError
from umbel.pools.guard import Raised, call_guarded
from umbel.protocol.clock import LamportClock
from umbel.protocol.outage import Closed, LinkChange
from umbel.protocol.pidbox import Known, Mailbox
from umbel.protocol.retry import reconnect_wait_s
from umbel.worker.process.outages import Outages
from umbel.worker.remote.mailbox import Happened, MailboxShell, awaited, in_thread

log = logging.getLogger("umbel.worker.control")

STOP_S = 5.0
LOOK_EVERY_S = 1.0


class GreenMailbox:
    """Made on the worker's loop; `members` is called there, now and then."""

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
        members: Callable[[], Sequence[Known]],
        outages: Outages,
        accept: Collection[str],
    ) -> None:
        self._outages = outages
        self._accept = accept
        self._node = node
        self._open_broker = open_broker
        self._panel = panel
        self._state = state
        self._members = members
        self._known: Sequence[Known] = ()
        self._main = asyncio.get_running_loop()
        self._clock = clock
        self.mailbox = Mailbox(node, self, refusal_of=refusal_of, changes=changes, since=this_moment())
        self._shell: MailboxShell | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shutdown: asyncio.Event | None = None
        self._opened: Future[None] = Future()
        self._stopped: Future[None] = Future()  # with the error, where it ended by one
        self._thread = threading.Thread(target=self._live, name="umbel-mailbox", daemon=True)

    @property
    def resets(self) -> int:
        return 0 if self._shell is None else self._shell.resets

    @property
    def replies_dropped(self) -> int:
        return 0 if self._shell is None else self._shell.replies_dropped

    # -- on the worker's loop ------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled; an error of the thread is raised here."""
        self._thread.start()
        ended = asyncio.wrap_future(self._stopped)
        while not ended.done():
            self._known = tuple(self._members())
            await asyncio.wait([ended], timeout=LOOK_EVERY_S)
        await ended

    async def opened(self) -> None:
        await asyncio.shield(asyncio.wrap_future(self._opened))

    async def stop(self) -> None:
        """Set the shutdown event and wait for the stopped one."""
        if not self._thread.is_alive():
            return
        if self._loop is not None and self._shutdown is not None:
            call_guarded(self._loop.call_soon_threadsafe, self._shutdown.set)  # it may have ended meanwhile
        try:
            async with asyncio.timeout(STOP_S):
                await asyncio.wait([asyncio.wrap_future(self._stopped)])
                await asyncio.to_thread(self._thread.join)  # it has said so with its last line
        except TimeoutError:
            log.warning("remote-control mailbox did not stop in time; it ends with the process")

    def _run_here(self, command: Command, arguments: dict[str, Any]) -> Any:
        async def carried_out() -> Happened:
            if command.is_async:
                return await awaited(command.handler(self._state, **arguments))
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
            await living  # what went wrong
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
        """Of its own connection only what listens is told: the rest is restored when it is used."""
        name = change.name if isinstance(change, Closed) else change.link
        if name == MAILBOX:
            call_guarded(self._main.call_soon_threadsafe, self._outages.link, change)

    def _report(self, error: BrokerError | None) -> None:
        report = partial(self._outages.report, MAILBOX, error)
        call_guarded(self._main.call_soon_threadsafe, report)

    def forward(self) -> None:
        """Move the worker's clock, which its loop owns, before any handler runs there (P4)."""
        call_guarded(self._main.call_soon_threadsafe, self._clock.forward)

    def at_once(self, command: Command, arguments: dict[str, Any]) -> Happened | None:
        return call_guarded(command.handler, self._state, **arguments) if command.is_stateless else None

    async def beside(self, command: Command, arguments: dict[str, Any]) -> Happened:
        if command.is_users:
            return await in_thread(command, self._state, arguments)
        return await asyncio.wrap_future(self._run_here(command, arguments))
