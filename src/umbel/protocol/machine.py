"""ClusterMachine and Tick: what a machine looks like from outside.

A machine decides and does nothing else: an event and the time go in, effects come out, in the
order in which they are to be performed. The shell around it owns the clock, the sockets and the
processes. Because step() neither waits nor fails, one caller at a time is all the locking needed.
"""

from typing import TYPE_CHECKING, Protocol, TypeVar

from umbel.protocol.value import Value

if TYPE_CHECKING:  # children know machines and no store
    from umbel.protocol.leadership.coordination import Instant

EventT_contra = TypeVar("EventT_contra", contravariant=True)
EffectT = TypeVar("EffectT")


class Tick(Value):
    """Time has passed. Sent when a machine's deadline is due; an early or a second one is harmless."""


class ClusterMachine(Protocol[EventT_contra, EffectT]):
    """A machine whose decisions other nodes hear of, so that it needs both clocks."""

    @property
    def deadline(self) -> float | None:
        """When the machine wants a Tick, as `Instant.boot_s`; None for never."""
        ...

    def step(self, event: EventT_contra | Tick, now: "Instant") -> list[EffectT]:
        """Take one event and return what is to be done, in order. Never blocks, never raises."""
        ...
