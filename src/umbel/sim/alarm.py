"""Alarm: gives the machine of a node its Tick when its deadline is due, by the node's own clock."""

from collections.abc import Callable

from umbel.sim.crowd import Process

SOON_S = 1e-6  # a tick is never a rounding error too early
NEVER = float("inf")


class Alarm:
    """Rings once; its owner sets it again. A node that is down or stands still hears nothing."""

    def __init__(self, node: Process, ring: Callable[[], None]) -> None:
        self._node = node
        self._ring = ring
        self._due_at = NEVER  # the newest in the world's heap; older ones are passed over

    def set(self, deadline: float | None) -> None:
        node = self._node
        if deadline is None or not node.up or node.paused:
            return
        when = max(node.clock.when(deadline), node.world.now) + SOON_S
        if when < self._due_at:
            self._due_at = when
            node.world.at(when, self._due, when)

    def set_anew(self, deadline: float | None) -> None:
        """What was set before the node stood still no longer counts."""
        self._due_at = NEVER
        self.set(deadline)

    def _due(self, when: float) -> None:
        if when == self._due_at:
            self._due_at = NEVER
            if self._node.up and not self._node.paused:
                self._ring()
