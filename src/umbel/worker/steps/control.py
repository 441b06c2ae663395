"""Control: this node's mailbox (P1), apart from the queues of tasks.

It has two shapes (P6). As a rule it shares the worker's connection and loop. Where the pool is
green, what tasks do could hold the main process up, so it has a connection, a loop and a thread of
its own. The step stops after the tasks have: a worker that drains still answers.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from umbel.clock import this_moment
from umbel.control.commands import builtin_panel
from umbel.control.panel import Command, Panel, refusal
from umbel.control.state import ControlState
from umbel.pools.guard import call_guarded
from umbel.protocol.clock import LamportClock
from umbel.protocol.pidbox import Known, Mailbox
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext
from umbel.worker.remote.green_mailbox import GreenMailbox
from umbel.worker.remote.mailbox import Happened, MailboxShell, awaited, in_thread
from umbel.worker.remote.mailbox_figures import MailboxFigures

log = logging.getLogger("umbel.worker.control")

OPEN_S = 5.0


class Control(Step):
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
        members: Callable[[], Sequence[Known]],
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
            self._node, clock, refusal_of=self._refusal_of, changes=self._changes, since=this_moment()
        )
        self._shell: MailboxShell | None = None
        self._green: GreenMailbox | None = None

    async def start(self) -> None:
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

    def at_once(self, command: Command, arguments: dict[str, Any]) -> Happened | None:
        if command.is_users or command.is_async:
            return None
        return call_guarded(command.handler, self._state, **arguments)

    async def beside(self, command: Command, arguments: dict[str, Any]) -> Happened:
        if command.is_users:
            return await in_thread(command, self._state, arguments)
        return await awaited(command.handler(self._state, **arguments))
