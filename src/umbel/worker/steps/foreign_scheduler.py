"""ForeignSchedulerStep: runs a scheduler that others wrote while this node holds the lease for it.

Every worker that was given one stands for the lease, and any may lead. The state that the scheduler leaves
for its next leader is the data of the lease, as the marks of our own scheduler are.
"""

import asyncio
import logging
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from umbel.brokers.coordination import CoordinationStore
from umbel.brokers.interface import ClusterRecord
from umbel.coordination.lease_keeper import Change, LeaseKeeper
from umbel.errors import BrokerUnavailable
from umbel.pools.off_loop import OffLoop
from umbel.protocol.leadership.lease import Acquired, Lost
from umbel.wire.message import Outgoing
from umbel.worker.bootsteps import Step
from umbel.worker.context import Counters, WorkerContext
from umbel.worker.leases.announced import PHASES, announced_lease
from umbel.worker.steps.events import Events
from umbel.worker.steps.gossip import Gossip
from umbel.worker.steps.scheduler import CALL_TIMEOUT_S, lease_settings
from umbel.worker.user_code.foreign_scheduler import STATE_MAX_BYTES, SchedulerThread

log = logging.getLogger("umbel.worker.scheduler")
R = TypeVar("R")


class ForeignSchedulerStep(Step):
    name = "foreign_scheduler"
    requires = ("control", "gossip")

    def __init__(self, context: WorkerContext, events: Events, gossip: Gossip) -> None:
        super().__init__()
        self._context = context
        self._cluster: ClusterRecord = context.broker
        self._events = events
        self._gossip = gossip
        self._keeper: LeaseKeeper | None = None
        self._thread: SchedulerThread | None = None
        self._term: Term | None = None
        self._turn = threading.Lock()

    async def start(self) -> None:
        if self._context.settings.scheduler is None:
            return
        capabilities = self._cluster.capabilities
        if not capabilities.leases:
            log.warning("scheduler disabled: %s", capabilities.why_not("leases"))
            return
        self._keeper = announced_lease(
            self._context,
            self._events,
            self._gossip,
            self._context.settings.scheduler_lease,
            settings=lease_settings(self._context.settings.scheduler_lease_s),
            changed=self._changed,
        )
        self.run_in_background(self._keeper.run())

    async def stop(self) -> None:
        """The scheduler ends first, while the lease is kept: what it saves at the end is saved under it."""
        self._end_term(lost=False)
        if self._thread is not None:
            try:
                await OffLoop("umbel-scheduler-end", self._thread.over.wait).ended(
                    self._context.settings.hooks.timeout_s
                )
            except TimeoutError:
                log.error("scheduler did not stop in time; the worker shuts down without waiting for it")
        await self.end_background()
        if self._keeper is not None:
            await self._keeper.stop()

    def _changed(self, change: Change) -> None:
        make = self._context.settings.scheduler
        assert self._keeper is not None
        assert make is not None
        if isinstance(change, Acquired):
            self._term = Term(self._cluster.coordination, self._keeper, change.term, self._context.counters)
            self._thread = SchedulerThread(make, self._term, self._turn)
        else:
            self._end_term(lost=isinstance(change, Lost))
        text = f"foreign scheduler {PHASES[type(change)]}"
        fields = self._context.log_fields(lease=self._keeper.name, term=change.term)
        self._context.outages.consequence(log, logging.INFO, text, named=text, **fields)

    def _end_term(self, *, lost: bool) -> None:
        if self._term is not None and self._thread is not None:
            self._term.has_ended = True
            self._thread.end(lost=lost)


class Term:
    """A `Leadership`: made on the loop, used in the scheduler's thread."""

    def __init__(
        self, store: CoordinationStore, keeper: LeaseKeeper, number: int, counters: Counters
    ) -> None:
        self.has_ended = False
        self._store = store
        self._keeper = keeper
        self._number = number
        self._counters = counters
        self._loop = asyncio.get_running_loop()

    def still_leader(self) -> bool:
        return not self.has_ended and self._keeper.term == self._number and self._keeper.still_mine()

    def load_state(self) -> bytes:
        return self._ask(self._store.read_lease(self._keeper.name)).data

    def save_state(self, state: bytes) -> bool:
        _check(state)
        keeper = self._keeper
        return self._ask(self._store.update_lease(keeper.name, keeper.holder, self._number, state))

    def publish(self, messages: Sequence[Outgoing], state: bytes) -> bool:
        _check(state)
        if not self.still_leader():
            return False
        name, holder = self._keeper.name, self._keeper.holder
        done = self._ask(self._store.fenced_publish(name, holder, self._number, tuple(messages), data=state))
        self._counters.periodic_sent += len(messages) if done else 0
        return done

    def _ask(self, question: Coroutine[Any, Any, R]) -> R:
        """The store's answer. It is asked on the loop: a broker's connection belongs to it."""
        asked = asyncio.run_coroutine_threadsafe(_in_time(question), self._loop)
        try:
            return asked.result(2 * CALL_TIMEOUT_S)  # a loop that has ended answers nothing
        except TimeoutError:
            asked.cancel()
            raise BrokerUnavailable(
                "the broker, which stores the scheduler's lease, did not answer in time"
            ) from None


async def _in_time(question: Coroutine[Any, Any, R]) -> R:
    async with asyncio.timeout(CALL_TIMEOUT_S):
        return await question


def _check(state: bytes) -> None:
    if len(state) > STATE_MAX_BYTES:
        raise ValueError(
            f"the scheduler's state has {len(state)} bytes, over the limit of {STATE_MAX_BYTES}: nothing was "
            "saved or sent; define fewer periodic tasks"
        )
