"""Sweeper: a node's campaign for the lease `coord-sweeper`, and the sweeps of the lease's holder.

It is the shell of `protocol/leadership/lease.py` in the simulator. While its machine believes that it leads,
the checkers compare that with the store's record.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from umbel.protocol.election.events import Swept
from umbel.protocol.leadership.coordination import ElectionRecord, LeaseReply
from umbel.protocol.leadership.lease import (
    AcquireReplied,
    CallAcquire,
    CallRelease,
    CallRenewLease,
    Campaign,
    Effect,
    Event,
    LeadershipLost,
    LeaseAcquired,
    LeaseReleased,
    LeaseRenewReplied,
    ReleaseReceived,
    Role,
    StopCampaign,
)
from umbel.protocol.machine import Tick
from umbel.sim.plan import Alarm, Process

if TYPE_CHECKING:
    from umbel.sim.rounds import Cluster

LEASE = "coord-sweeper"
SWEEP_S = 5.0
SWEEP_JITTER = 0.2
SWEEP_MAX = 100
TICK = Tick()


class Sweeper:
    """One node's campaign for the lease, and its sweeps while it leads."""

    def __init__(self, cluster: "Cluster", node: Process) -> None:
        self.index = node.index
        self.lease = cluster.make_lease(LEASE, node)
        self._node = node
        self._cluster = cluster
        self._world = cluster.world
        self._inbox: list[Event] = []
        self._alarm = Alarm(node, lambda: self._take(TICK))
        self._sweeps = 0  # the number of the current series of sweeps; older series end

    def start(self) -> None:
        """Begin the campaign."""
        self.hear(Campaign())

    def stop(self) -> None:
        """Release the lease and end the campaign."""
        self.hear(StopCampaign())

    def hear(self, event: Event) -> None:
        """Receive an event: handle it, queue it during a pause, or drop it if the node is dead."""
        if not self._node.up:
            return
        if self._node.paused:
            self._inbox.append(event)
        else:
            self._take(event)

    def resume(self) -> None:
        """Handle the events that arrived during a pause, and set the alarm."""
        inbox, self._inbox = self._inbox, []
        for event in inbox:
            self._take(event)
        self._alarm.set_anew(self.lease.deadline)

    # ---- the shell ---------------------------------------------------------------------------------

    def _take(self, event: Event | Tick) -> None:
        now = self._node.clock.read(self._world.now)
        if event is not TICK and self.lease.deadline is not None and self.lease.deadline <= now.boot_s:
            self._take(TICK)
        effects = self.lease.step(event, now)
        self._world.trace.note(f"{self._world.now:.6f} {self.index} lease {type(event).__name__}")
        if self.lease.role is Role.LEADER:
            self._check()
        for effect in effects:
            self._perform(effect)
        self._alarm.set(self.lease.deadline)

    def _check(self) -> None:
        until = self._node.clock.when(self.lease.give_up_s)
        lease = self._cluster.store.leases.get(LEASE)
        self._cluster.checkers.led(self._node.holder, self.lease.term, until, lease)

    def _perform(self, effect: Effect) -> None:
        store = self._cluster.store
        match effect:
            case CallAcquire(name, holder, ttl_s):
                store.call(self.index, store.acquire_lease, (name, holder, ttl_s), self._acquired, effect)
            case CallRenewLease(name, holder, term, ttl_s):
                store.call(self.index, store.renew_lease, (name, holder, term, ttl_s), self._renewed, effect)
            case CallRelease(name, holder, term):
                store.call(self.index, store.release_lease, (name, holder, term), self._ignored, None)
            case LeaseAcquired():
                self._cluster.count("lease acquired")
                self._sweeps += 1
                self._sweep(self._sweeps)
            case LeadershipLost():
                self._cluster.count("lease lost")
            case LeaseReleased():
                self._cluster.network.broadcast(self.index, ReleaseReceived(), self._cluster.sweepers())

    def _acquired(self, call: CallAcquire, reply: LeaseReply) -> None:
        self.hear(AcquireReplied(call.sent_s, reply))

    def _renewed(self, call: CallRenewLease, ok: bool) -> None:
        self.hear(LeaseRenewReplied(call.term, call.sent_s, ok))

    def _ignored(self, _context: None, _reply: bool) -> None:
        """Do nothing: the reply to a release is not needed."""

    # ---- sweeping ----------------------------------------------------------------------------------

    def _sweep(self, number: int) -> None:
        if number != self._sweeps or not self._node.up:
            return
        world = self._world
        world.after(SWEEP_S * world.random.uniform(1.0, 1.0 + SWEEP_JITTER), self._sweep, number)
        if not self._node.paused and self.lease.still_mine(self._node.clock.read(world.now)):
            self._check()
            store = self._cluster.store
            store.call(self.index, store.unfinished, (SWEEP_MAX,), self._swept, None)

    def _swept(self, _context: None, found: Sequence[tuple[str, ElectionRecord]]) -> None:
        for _key, record in found:
            self._node.hear(Swept(record.request))
