"""ClusterClock: estimates the cluster's time in this process; the shell of `protocol/cluster_time.py`.

The store's clock is read at the start and every STORE_EVERY_S; peers send theirs with heartbeats and
with the replies to this node's hello. No task and no message costs a request.
"""

import asyncio
import logging
from typing import Any

from umbel import clock
from umbel.coordination.driver import instant
from umbel.errors import BrokerError
from umbel.protocol.cluster_time import OWN, ClockCorrection, ClusterTime
from umbel.protocol.membership.members import MemberState
from umbel.worker.bootsteps import Step
from umbel.worker.context import WorkerContext
from umbel.worker.delivery.take import Tasks
from umbel.worker.steps.gossip import Gossip

log = logging.getLogger("umbel.worker.clock")

JUDGE_EVERY_S = 1.0
STORE_EVERY_S = 30.0
SETTLED_S = 10.0  # after the start: nodes without an event by then are not there
TOO_FEW = "too few nodes to compare wall clocks with; trusting this machine's clock"
DIFFERENT = (
    "wall clocks of the nodes differ, and no majority agrees; trusting this machine's clock: check NTP"
)
HEARTBEATS = ("worker-online", "worker-heartbeat")


class ClusterClock(Step):
    """The step that corrects `umbel.clock` in this process."""

    name = "cluster_clock"
    requires = ("connection",)

    def __init__(self, context: WorkerContext, gossip: Gossip, tasks: Tasks) -> None:
        super().__init__(context)
        self._machine = ClusterTime()
        self._judged = ClockCorrection(0.0, "", 1)
        self._logged = ""
        self._tasks = tasks
        self._gossip = gossip
        self._members: frozenset[str] = frozenset()  # whose clocks count, as of the last check
        for event_type in HEARTBEATS:
            gossip.listen(event_type, self._take_heartbeat)

    async def start(self) -> None:
        """Read the store's clock and correct this process's clock, now and periodically."""
        await self._read_store()
        self._judge()
        self.run_in_background(self._compare_clocks())

    async def stop(self) -> None:
        """Drop the correction."""
        await self.end_background()
        clock.correct(0.0)

    def answered(self, node: object, at_s: object) -> None:
        """Take in the time of a node that answered this one's hello.

        It is judged at once, because the first task is claimed after the hello.
        """
        self._take_clock(node, at_s)
        self._judge()

    def _take_heartbeat(self, event: dict[str, Any]) -> None:
        node = event.get("hostname")
        if isinstance(node, str) and node in self._members:
            self._take_clock(node, event.get("timestamp"))

    def _take_clock(self, node: object, at_s: object) -> None:
        if not isinstance(node, str) or node == self._context.identity.node:
            return
        if isinstance(at_s, int | float) and not isinstance(at_s, bool) and 0 < at_s < 1e12:
            self._machine.hear_peer(node, float(at_s), instant())

    async def _compare_clocks(self) -> None:
        """Compare the clocks once a second; nodes that have left count no more."""
        loop = asyncio.get_running_loop()
        began = read_at = loop.time()
        while True:
            await asyncio.sleep(JUDGE_EVERY_S)
            if loop.time() - read_at >= STORE_EVERY_S:
                read_at = loop.time()
                await self._read_store()
            self._members = self._alive()
            is_settled = loop.time() - began >= SETTLED_S
            if is_settled:
                self._machine.forget_all_but(self._members)
            self._judge()
            if is_settled:
                self._log_alone()

    def _alive(self) -> frozenset[str]:
        members = self._gossip.members()
        return frozenset(member.node for member in members if member.state is MemberState.ALIVE)

    async def _read_store(self) -> None:
        try:
            before = instant()
            at_s = await self._context.broker.store_time()
            if at_s is not None:
                answered = instant()
                self._machine.hear_store(at_s, answered.boot_s - before.boot_s, answered)
        except BrokerError as error:
            log.debug("cannot read the broker's clock; retrying", extra={"why": str(error)})

    def _judge(self) -> None:
        """Correct this process's clock as the machine decides, and log when that begins or ends."""
        judged, before = self._machine.judge(instant()), self._judged
        self._judged = judged
        clock.correct(judged.offset_s)
        fields = self._context.log_fields(compared_with=judged.source, clocks=judged.voices)
        if judged.stepped_s:
            text = "wall clock of this machine was changed; check NTP if nobody did so on purpose"
            log.warning(text, extra=fields | {"by_s": round(judged.stepped_s, 1)})
        if judged.offset_s and not before.offset_s:
            wrong_s = round(-judged.offset_s, 1)
            text = "wall clock of this machine is wrong; using the cluster's time: check NTP"
            log.warning(text, extra=fields | {"ahead_s": wrong_s})
            self._tasks.revokes.read_again()  # the wrong clock may have expired some
        elif before.offset_s and not judged.offset_s:
            log.info("wall clock of this machine is correct again", extra=fields)

    def _log_alone(self) -> None:
        alone = self._judged.source == OWN
        text = (DIFFERENT if self._judged.disagreeing else TOO_FEW) if alone else ""
        if text and text != self._logged:
            level = logging.WARNING if self._judged.disagreeing else logging.INFO
            log.log(level, text, extra=self._context.log_fields(clocks=self._judged.voices))
        self._logged = text
