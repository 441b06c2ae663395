"""Guarded: a machine whose faults cost one input, not the worker.

What other nodes send decides what a machine is fed, so that a mistake in it could be reached from
outside. It is counted and logged, and the worker goes on.
"""

import logging
from typing import Generic, TypeVar

from umbel.pools.guard import Raised, call_guarded
from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.machine import ClusterMachine, Tick
from umbel.worker.context import Counters

log = logging.getLogger("umbel.worker")
EventT = TypeVar("EventT")
EffectT = TypeVar("EffectT")


class Guarded(Generic[EventT, EffectT]):
    def __init__(self, machine: ClusterMachine[EventT, EffectT], counters: Counters) -> None:
        self._machine = machine
        self._counters = counters

    @property
    def deadline(self) -> float | None:
        return self._machine.deadline

    def step(self, event: EventT | Tick, now: Instant) -> list[EffectT]:
        happened = call_guarded(self._machine.step, event, now)
        if not isinstance(happened, Raised):
            return happened.value
        self._counters.election_errors += 1
        log.error("internal error; please report it", exc_info=happened.error)
        return []
