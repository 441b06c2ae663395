"""ElectionRules: what the two sets of rules for elections have in common in a worker.

The step `elections` calls the rules on the loop: with what a command asks for, with the events of other
nodes, and with changes of the membership. The rules put them into the inbox of a machine and perform its
effects.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from umbel.control.panel import NO_HANDLER
from umbel.coordination.driver import drive
from umbel.protocol.election.events import HandlerEnded, PublishElected
from umbel.protocol.machine import ClusterMachine
from umbel.protocol.membership.members import Member
from umbel.wire import coordination as wire
from umbel.worker.context import WorkerContext
from umbel.worker.events import Events
from umbel.worker.user_code import HandlerThreads

INBOX_MAX = 10_000


class ElectionRules:
    """Elections by one set of rules. Methods that one set does not need do nothing here."""

    def __init__(self, context: WorkerContext, events: Events, machine: ClusterMachine[Any, Any]) -> None:
        self._context = context
        self._events = events
        self._counters = context.counters
        self._node = context.identity.node
        self._topics = frozenset(context.settings.election_handlers)
        # Unbounded: events from outside are limited by `_put`, the rest by the records of the machine.
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._handlers = HandlerThreads(context.settings.election_handlers, self._handler_ended)
        self._driven = machine
        self._group: asyncio.TaskGroup | None = None

    def asked(self, arguments: Mapping[str, Any]) -> str:
        """Take part in the election that a command asks for; return why this node cannot, or ""."""
        raise NotImplementedError

    def elected(self, event: Mapping[str, Any]) -> None:
        """Take in the outcome of an election on another node."""

    def candidacy(self, event: Mapping[str, Any]) -> None:
        """Take in the candidacy of a node under the classic rules."""
        raise NotImplementedError

    def ack(self, event: Mapping[str, Any]) -> None:
        """Take in the ack of a node under the classic rules."""
        raise NotImplementedError

    def members_changed(self, ours: Sequence[Member], others: Sequence[Member]) -> None:
        """Take in which Umbel nodes and which other nodes take part."""
        raise NotImplementedError

    def holder_gone(self, holder: str) -> None:
        """Note that a node that may hold elections has left or was lost."""

    async def sweep(self) -> None:
        """Look for elections without a holder."""

    def begin_stop(self) -> None:
        """Take part in no new election; running handlers go on."""
        raise NotImplementedError

    @property
    def busy(self) -> bool:
        """Whether a handler runs, or an event is not handled yet."""
        raise NotImplementedError

    async def close(self) -> None:
        """Cancel the calls that are still under way, after `run` has ended."""

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Drive the elections until cancelled."""
        self._group = group
        fault = self._context.note_election_fault
        await drive(self._driven, self._inbox, self._perform, on_fault=fault)

    async def _perform(self, effect: Any) -> None:
        raise NotImplementedError

    def _handler_ended(self, ended: HandlerEnded) -> None:
        raise NotImplementedError

    def _put(self, event: object) -> None:
        if self._inbox.qsize() >= INBOX_MAX:  # the sweep and the timers repeat what matters
            self._counters.elections_shed += 1
            return
        self._inbox.put_nowait(event)

    def _unknown(self, topic: str) -> str:
        if topic in self._topics:
            return ""
        return f"{NO_HANDLER} {topic!r} on this node; it has {', '.join(sorted(self._topics))}"

    def _announce(self, outcome: PublishElected) -> None:
        freq_s = self._context.settings.heartbeat_interval_s
        self._events.send(wire.ELECTED, freq=freq_s, **wire.elected_fields(outcome))
