"""Mingle: exchanges hellos with the other nodes at the start and after a lost connection (S2).

It starts after the broker's record of revoked tasks was read and before any task is claimed. The nodes of the
embedded broker share that record and the cluster's clock, so there it does not wait. Celery's nodes have no
such record: where they may exist, a node waits for the answers of its peers up to `mingle_wait_s`. It waits
less once all known peers have answered, or all that received the hello, which Redis counts. A node that
begins alone, which RabbitMQ can report as well, claims tasks at once. Revokes learned from Celery's nodes go
into the record, and so reach nodes that are down.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import time
from typing import Any

from umbel.brokers.links import MAILBOX, MAIN
from umbel.clock import cluster_now
from umbel.control.client import ControlClient
from umbel.errors import BrokerError
from umbel.protocol.delivery import revoked
from umbel.protocol.shutdown import LinkChange, LinkLost
from umbel.wire.coordination import read_introduction
from umbel.wire.records import Revoke
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext
from umbel.worker.delivery.take import Tasks
from umbel.worker.events import Events
from umbel.worker.steps.gossip import Gossip

log = logging.getLogger("umbel.worker.mingle")

ONLY_OURS = frozenset({"sqlite"})  # brokers that Celery cannot use
BACKGROUND_WAIT_S = 1.0
RELINK_S = 5.0  # how long lost links are waited for
TRIES_MAX = 3
SYNCHRONIZED = "synchronized with other nodes"
LEARNED = "received revoked task ids from other nodes"
UNLINKED = "not all connections restored; synchronizing without them"


class Mingle(Step):
    """The step that asks for revokes and clocks, and answers the hellos of others."""

    name = "mingle"
    requires = ("events", "control")

    def __init__(
        self,
        context: WorkerContext,
        events: Events,
        asker: ControlClient,
        tasks: Tasks,
        gossip: Gossip,
        *,
        take_time: Callable[[object, object], None],
    ) -> None:
        super().__init__(context)
        self._events = events
        self._asker = asker
        self._tasks = tasks
        self._gossip = gossip
        self._take_time = take_time
        self._revoked = tasks.revoked
        self._began_alone = False
        self._is_due = False  # events may have been lost since the last hello
        self._hello_lock = asyncio.Lock()

    async def check_alone(self) -> None:
        """Note whether this node is the first, before it listens.

        It sends a ping for itself, which all others ignore, and the broker counts the receivers.
        """
        is_waited_for = self._context.broker.capabilities.transport not in ONLY_OURS
        if is_waited_for and not self._context.settings.without_mingle:
            with suppress(BrokerError):
                listeners = await self._asker.tell("ping", destination=[self._context.identity.node])
                self._began_alone = listeners == 0

    async def start(self) -> None:
        """Read the broker's revokes and say hello to the other nodes."""
        capabilities = self._context.broker.capabilities
        if self._context.settings.without_mingle:
            log.info("mingle disabled by without_mingle")
            return
        if not capabilities.fanout:
            log.warning("mingle disabled: %s", capabilities.why_not("fanout"))
            return
        outages = self._context.outages
        outages.on_begin(lambda: self._gossip.strained("broker reconnected"))
        outages.on_link(self._note_link)
        if capabilities.transport in ONLY_OURS:  # it reports no links
            outages.on_end(self._hello_again)
        await self._tasks.revokes.read()
        if capabilities.transport in ONLY_OURS or self._began_alone:
            self.run_in_background(self._begin(BACKGROUND_WAIT_S))
        else:
            await self._begin(self._context.settings.mingle_wait_s)

    async def _begin(self, wait_s: float) -> None:
        if why := await self._say_hello(wait_s):
            text = "cannot ask other nodes for their revokes and clocks at start-up; starting without them"
            log.warning(text, extra={"why": why})

    # -- asking ----------------------------------------------------------------------------------

    def _note_link(self, change: LinkChange) -> None:
        """Say hello again after a lost link, because revokes may have been sent meanwhile."""
        outages = self._context.outages
        if isinstance(change, LinkLost) and change.link in (MAIN, MAILBOX):
            self._note_due()
            outages.reconciling(self.name)
        elif self._is_due and outages.is_linked:
            self.run_in_background(self._catch_up())

    def _hello_again(self) -> None:
        self._note_due()
        self.run_in_background(self._catch_up())

    def _note_due(self) -> None:
        self._is_due = True
        self._tasks.before_taking(self.name, self._catch_up)

    async def _catch_up(self) -> None:
        """Say hello after a lost link, before any task is claimed, and apply the revokes sent meanwhile."""
        async with self._hello_lock:  # waits for the answers of a hello under way, too
            for _ in range(TRIES_MAX):
                if not self._is_due:
                    break
                await self._relinked()
                self._is_due = False
                if await self._say_hello(self._context.settings.mingle_wait_s):
                    self._is_due = True
            if not self._is_due:
                self._tasks.before_taking(self.name, None)
        # A hello that failed is no separate outage: other parts fail too.
        self._context.outages.worked(self.name)
        self._tasks.drop_revoked()

    async def _relinked(self) -> None:
        """Wait for the mailbox: a revoke sent between the hello and its subscription would be lost."""
        try:
            async with asyncio.timeout(RELINK_S):
                await self._context.outages.linked()
        except TimeoutError:
            self._context.outages.consequence(
                log, logging.WARNING, UNLINKED, named="synchronized without a link"
            )

    async def _say_hello(self, wait_s: float) -> str:
        """Ask all nodes; return why that failed, or ""."""
        node = self._context.identity.node
        try:
            hello = revoked.hello(node, self._revoked, cluster_now())
            answers = await self._asker.ask("hello", hello, timeout_s=wait_s, unless=node, expires=False)
            others = {peer: reply for peer, reply in answers.replies.items() if peer != node}
            revoked.adjust_clock(self._events.clock, others)
            for peer, reply in others.items():
                if isinstance(reply, Mapping):
                    self._take_time(peer, reply.get("timestamp"))
                    await self._take_in(peer, reply)
                    self._introduce(reply.get("members"))
        except BrokerError as error:
            log.debug("cannot ask other nodes for their revokes and clocks", extra={"why": str(error)})
            return str(error) or repr(error)
        fields = {"peers": len(others), "clock": self._events.clock.value}
        self._context.outages.consequence(log, logging.INFO, SYNCHRONIZED, named="synchronized", **fields)
        return ""

    def _introduce(self, members: object) -> None:
        """Take in the members that an answering peer knows; a hello is not trusted with that."""
        for named in members[: revoked.INTRODUCED_MAX] if isinstance(members, list) else ():
            introduced = read_introduction(named)
            if introduced is not None:
                self._gossip.introduce(introduced)

    # -- answering -------------------------------------------------------------------------------

    async def answer(self, greeting: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to another node's hello, after taking in its revokes (S2)."""
        await self._take_in(str(greeting.get("from_node")), greeting)
        members = self._gossip.introductions() if greeting.get("cver") == revoked.VERSION else []
        reply = revoked.answer(self._revoked, self._events.clock, members, cluster_now())
        await self._events.reserve_clock()
        # The time of the wall clock, uncorrected: it counts as one vote for the cluster's time.
        return reply | {"timestamp": time()}

    async def _take_in(self, peer: str, hello: Mapping[str, Any]) -> None:
        """Apply the revokes in another node's hello, and record those that the broker does not have yet."""
        now = cluster_now()
        learned = revoked.take_in(hello, self._revoked, now)
        if learned.bad:
            log.warning(
                "unreadable revokes in the hello of another node skipped",
                extra={"peer": peer, "count": learned.bad},
            )
        is_recorded = "ages" in hello or not self._context.broker.capabilities.revokes
        if learned.news and not is_recorded:  # Umbel's nodes have read them in the record already
            self._context.outages.consequence(
                log, logging.INFO, LEARNED, named="revokes learned", count=len(learned.news), peer=peer
            )
            expires_at = now + self._context.broker.revoke_retention_s
            news = [Revoke(task_id, now, expires_at) for task_id in learned.news]
            try:
                await self._context.broker.revoke(news)
            except BrokerError as error:
                log.error(
                    "cannot save revokes received from another node; this worker applies them until it stops",
                    extra={"peer": peer, "why": str(error)},
                )
