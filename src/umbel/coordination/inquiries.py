"""Inquiries: asks after a node that is new or silent, and tells the membership what came back.

The machine is not kept waiting: a suspect's time runs while others are asked. How many questions wait and
how many are under way has a limit, and newcomers leave room for suspects.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from umbel.brokers.interface import ClusterRecord
from umbel.control.client import Asker
from umbel.errors import BrokerError
from umbel.protocol.membership.events import Answered, Event, Member, MemberState, Probed

log = logging.getLogger("umbel.coordination")

WAITING_MAX = 200
NEWCOMERS_MAX = 100  # of these
AT_ONCE = 32
TIMEOUT_S = 2.0


class Inquiries:
    """`under_way` are tasks, to be cancelled by who stops."""

    def __init__(self, asker: Asker, cluster: ClusterRecord, tell: Callable[[Event], None]) -> None:
        self.under_way: set[asyncio.Task[None]] = set()
        self._asker = asker
        self._cluster = cluster
        self._tell = tell
        self._turns = asyncio.Semaphore(AT_ONCE)

    def probe(self, member: Member, group: asyncio.TaskGroup) -> None:
        """Ask what the broker and others know of it."""
        is_newcomer = member.state is MemberState.ALIVE
        self._begin(group, self._probe(member), NEWCOMERS_MAX if is_newcomer else WAITING_MAX)

    def ping(self, member: Member, group: asyncio.TaskGroup) -> None:
        """Ask the node itself."""
        self._begin(group, self._ping(member), WAITING_MAX)

    def _begin(self, group: asyncio.TaskGroup, asking: Coroutine[Any, Any, None], waiting_max: int) -> None:
        if len(self.under_way) >= waiting_max:
            asking.close()
            return
        task = group.create_task(self._in_turn(asking), name="umbel-gossip-asks")
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)

    async def _in_turn(self, asking: Coroutine[Any, Any, None]) -> None:
        try:
            async with self._turns:
                await asking
        finally:
            asking.close()  # one whose turn never came was not awaited

    async def _ping(self, member: Member) -> None:
        wait_s = max(TIMEOUT_S, member.freq_s)
        try:
            answers = await self._asker.ask("ping", destination=[member.node], timeout_s=wait_s)
        except BrokerError as error:
            log.debug("cannot ping a silent node", extra={"suspect": member.node, "why": str(error)})
            return
        if member.node in answers.replies:
            self._tell(Answered(member.node))

    async def _probe(self, member: Member) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                evidence = await self._cluster.probe(member.node, member.inc)
        except (BrokerError, TimeoutError) as error:
            fields = {"suspect": member.node, "why": str(error)}
            log.debug("cannot ask other nodes about a silent node", extra=fields)
            return
        self._tell(Probed(member.node, member.inc, member.pid, evidence.value))
