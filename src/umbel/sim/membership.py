"""Membership in the simulator: which nodes the workers' own machines consider alive, suspect or lost.

The nodes, faults and network conditions are the same as for elections. Each node runs the machines of
`protocol/membership/gossip.py` and `protocol/membership/heartbeat.py`. `MemberChecks` checks the guarantees
of membership by what each node observed of the others.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.machine import Tick
from umbel.protocol.membership import members
from umbel.protocol.membership.gossip import Membership
from umbel.protocol.membership.heartbeat import (
    Beat,
    BeatKind,
    BeatNow,
    BeginBeats,
    Echoed,
    EndBeats,
    Heartbeat,
    Lagged,
)
from umbel.protocol.membership.observers import UNNAMED_MAX_S, VIEW_S
from umbel.sim.checkers import Violation
from umbel.sim.plan import NEVER, STORM_S, Alarm, Crowd, Plan, Process, schedule_faults
from umbel.sim.world import NEAR_S, NodeClock

# ---- member checks ---------------------------------------------------------------------------------
#
#
# | guarantee | what is checked |
# |---|---|
# | M1 | a run of a node joins once; it leaves or is lost once, and again only after it returned |
# | M2 | no node is lost without silence: not while it sends heartbeats, nor because its observer was paused |
# | M3 | after all faults have ended, every node sees exactly the nodes that are up |
#
# The caller knows whether a node was silent: it is the simulator, or the log of a real network.


class MemberChecks:
    """The views of all nodes. `report` is called with each broken guarantee and a text."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        # by observer and subject: whether the subject is present
        self._seen: dict[tuple[str, str], bool] = {}

    def joined(self, observer: str, subject: str, *, returned: bool) -> None:
        """Check that an observer may see the subject as a new or returned member."""
        before = self._seen.get((observer, subject))
        if before if returned else before is not None:
            self._report("M1", f"{observer} sees {subject} join again")
        if returned and before is None:
            self._report("M1", f"{observer} sees {subject} return, which never came")
        self._seen[observer, subject] = True

    def gone(self, observer: str, subject: str, *, unfounded: str = "") -> None:
        """Check that a node may leave or be lost. `unfounded`: the stated reason for declaring a healthy node
        lost.
        """
        if not self._seen.get((observer, subject)):
            self._report("M1", f"{observer} sees {subject} go, which was not there")
        self._seen[observer, subject] = False
        if unfounded:
            self._report("M2", f"{observer} gives up {subject}, which is well: {unfounded}")

    def check_view(self, observer: str, seen: Set[str], there: Set[str]) -> None:
        """Check a node's view at the end. `there`: all nodes that are up, including the observer."""
        wrong = sorted(seen ^ (there - {observer}))
        if wrong:
            self._report("M3", f"{observer} is wrong about {', '.join(wrong)}")


# ---- membership in the simulator -------------------------------------------------------------------
#
# In *observed* mode only three nodes receive heartbeats. The simulator chooses them; in a worker, leases do.

BEAT_S = 2.0
OBSERVERS = 3
CHOOSE_S = 5.0  # how often a dead observer is replaced
# twice: the silence at the worst health level, the suspicion, and the time of an older run
SETTLING_S = 150.0
VIEWS_S = 2 * VIEW_S + UNNAMED_MAX_S  # until nodes without heartbeats have the knowledge of the observers
PAUSE_EXCUSED_S = 3.5  # a shorter pause must not make a node lost
# With only these faults every heartbeat arrives, so only dead and paused nodes are silent.
AUDIBLE = {"crash", "stop", "pause", "skew", "wall-jump", "drift", "duplicate"}
KINDS = {
    BeatKind.ONLINE: members.Kind.ONLINE,
    BeatKind.BEAT: members.Kind.BEAT,
    BeatKind.OFFLINE: members.Kind.OFFLINE,
}
PRESENT = {members.MemberState.ALIVE, members.MemberState.SUSPECT}
TICK = Tick()


class MemberNode(Process):
    """A process with the machines of membership and heartbeats."""

    def __init__(self, crowd: "MemberCrowd", index: int, pid: int, clock: NodeClock) -> None:
        super().__init__(crowd.world, index, pid, clock)
        self.inc, self.pid = int(self.holder.rpartition(".")[2]), pid
        uniform = crowd.world.random.uniform
        observing = crowd.hears_beats(index)
        self.view = Membership(
            self.name, self.inc, pid, uniform, observing=observing, interval_s=crowd.interval_s
        )
        self._heart = Heartbeat(BEAT_S, uniform)
        self._crowd = crowd
        self._alarm = Alarm(self, self._tick)

    def start(self) -> None:
        """Go online, and learn of other nodes."""
        self._beat(self._heart.step(BeginBeats(), self._now()))
        self._crowd.introduce(self)
        self._rearm()

    def stop(self) -> None:
        """Announce that the node goes offline."""
        if self.up and not self.paused:
            self._beat(self._heart.step(EndBeats(), self._now()))

    def wake(self) -> None:
        """Act on deadlines that passed during a pause."""
        self._tick_due()

    def woken(self) -> None:
        """Set the alarm after a pause."""
        self._alarm.set_anew(self._deadline())

    def take(self, event: Any) -> None:
        """Pass an event to the machines, after a due deadline."""
        self._tick_due()
        if isinstance(event, members.NodeEvent) and (event.node, event.inc) == (self.name, self.inc):
            self._beat(self._heart.step(Echoed(event.sent_at), self._now()))
        self._perform(self.view.step(event, self._now()))
        self._rearm()

    def _now(self) -> Instant:
        return self.clock.read(self.world.now)

    def _tick_due(self) -> None:
        now = self._now()
        if self._heart.deadline is not None and self._heart.deadline <= now.boot_s:
            self._beat(self._heart.step(TICK, now))
        if self.view.deadline is not None and self.view.deadline <= now.boot_s:
            self._perform(self.view.step(TICK, now))

    def _rearm(self) -> None:
        self._alarm.set(self._deadline())

    def _deadline(self) -> float | None:
        deadlines = [
            deadline for deadline in (self._heart.deadline, self.view.deadline) if deadline is not None
        ]
        return min(deadlines, default=None)

    def _tick(self) -> None:
        self._tick_due()
        self._rearm()

    def _beat(self, effects: Any) -> None:
        for effect in effects:
            match effect:
                case Lagged(reason):
                    self.view.step(members.Strained(reason), self._now())
                case Beat(kind, freq_s):
                    self._crowd.send_beat(self, KINDS[kind], freq_s)

    def _perform(self, effects: list[members.Effect]) -> None:
        for effect in effects:
            self.world.trace.note(f"{self.world.now:.6f} {self.index} {type(effect).__name__}")
            match effect:
                case members.Accuse(member):
                    self._crowd.tell(self, members.Accused(member.node, member.inc, member.pid, self.name))
                case members.Condemn(member):
                    condemned = members.Condemned(
                        member.node, member.inc, member.pid, self.name, member.reason
                    )
                    self._crowd.tell(self, condemned)
                case members.BroadcastView(after, until, runs):
                    self._crowd.tell(self, members.Viewed(self.name, after, until, runs))
                case members.Probe(member, ping):
                    self._crowd.probe(self, member, ping=ping)
                case members.Refute(lost):
                    self._beat(self._heart.step(BeginBeats() if lost else BeatNow(), self._now()))
                case members.Joined(member, returned):
                    self._crowd.joined(self, member, returned=returned)
                case members.Left(member) | members.Lost(member):
                    self._crowd.gone(self, member)
                case _:
                    self._crowd.count(type(effect).__name__)


class MemberCrowd(Crowd[MemberNode]):
    """The nodes of a membership simulation, in full or observed mode."""

    def __init__(self, plan: Plan, *, observed: bool, interval_s: float = 0.0) -> None:
        super().__init__(plan)
        self.interval_s = interval_s
        self.violation: Violation | None = None
        self._observed = observed
        self._observers = set(range(min(OBSERVERS, plan.nodes)))
        self._checks = MemberChecks(self._fail)
        self._paused: dict[int, tuple[float, float]] = {}
        self.populate()
        self.world.at(CHOOSE_S, self._choose_observers)

    def make_node(self, index: int, pid: int, clock: NodeClock) -> MemberNode:
        """Return a process with this place, process id and clock."""
        return MemberNode(self, index, pid, clock)

    def hears_beats(self, index: int) -> bool:
        """Return whether the node at this place receives heartbeats."""
        return not self._observed or index in self._observers

    # ---- the nodes ---------------------------------------------------------------------------------

    def send_beat(self, node: MemberNode, kind: members.Kind, freq_s: float) -> None:
        """Broadcast a heartbeat to the nodes that receive it."""
        sent_at = node.clock.read(self.world.now).wall_s
        event = members.NodeEvent(
            *(node.name, node.inc, node.pid, kind),
            clock=int(self.world.now * 10),
            sent_at=sent_at,
            freq_s=freq_s,
            software="umbel",
            observed=self._observed,
        )
        rare = kind is not members.Kind.BEAT
        listeners = [peer for peer in self.nodes if rare or peer is node or self.hears_beats(peer.index)]
        self.network.broadcast(node.index, event, listeners)

    def tell(self, node: MemberNode, message: members.Event) -> None:
        """Broadcast an event to all nodes."""
        self.network.broadcast(node.index, message, self.nodes)

    def introduce(self, node: MemberNode) -> None:
        """Simulate the replies to `hello`: another node names the members that it knows."""
        others = [other for other in self.nodes if other is not node and other.up and not other.paused]
        if others and node.index not in self.network.calls.cut_off:
            peer = self.world.random.choice(others)
            known = [(peer.name, peer.inc, peer.pid)]
            known += [
                (other.node, other.inc, other.pid) for other in peer.view.members() if other.state in PRESENT
            ]
            for name, inc, pid in known:
                self.world.after(NEAR_S[1], node.hear, members.Introduced(name, inc, pid, freq_s=BEAT_S))

    def probe(self, node: MemberNode, member: members.Member, *, ping: bool) -> None:
        """Reply for the broker, which has a node's key for three intervals, and for a pinged node."""
        if node.index in self.network.calls.cut_off:
            return
        subject = self.nodes[_index(member.node)]
        cut_off = self.network.calls.cut_off | self.network.broadcasts.cut_off
        answers = subject.up and not subject.paused and subject.index not in cut_off
        same = answers and subject.inc == member.inc
        evidence = members.Probed(member.node, member.inc, member.pid, "alive" if same else "unknown")
        self.world.after(NEAR_S[1], node.hear, evidence)
        if ping and answers:
            self.world.after(2 * NEAR_S[1], node.hear, members.Answered(member.node))

    # ---- the promises ------------------------------------------------------------------------------

    def joined(self, node: MemberNode, member: members.Member, *, returned: bool) -> None:
        """Check the guarantees when a node sees another join."""
        self._checks.joined(node.holder, member.holder, returned=returned)

    def gone(self, node: MemberNode, member: members.Member) -> None:
        """Check the guarantees when a node sees another leave or declares it lost."""
        subject = self.nodes[_index(member.node)]
        lost = member.state is members.MemberState.LOST
        alive = subject.up and subject.holder == member.holder
        well = lost and alive and self.plan.kinds <= AUDIBLE and not self._stood_still(subject, node)
        self._checks.gone(
            node.holder, member.holder, unfounded=(member.reason or "no reason") if well else ""
        )
        self.count("lost" if lost else "left")

    def _stood_still(self, subject: MemberNode, observer: MemberNode) -> bool:
        """Return whether the subject had a long pause, and the observer cannot know of its return yet."""
        began, ended = self._paused.get(subject.index, (NEVER, 0.0))
        slept, woke = self._paused.get(observer.index, (NEVER, 0.0))
        until = ended + 2 * BEAT_S
        if slept < until:  # the observer will read events that were sent while it was paused
            until = max(until, woke + BEAT_S)
        return ended - began >= PAUSE_EXCUSED_S and self.world.now <= until

    def check_views(self) -> None:
        """Check at the end that every node sees exactly the nodes that are up."""
        there = {node.holder for node in self.nodes}
        for node in self.nodes:
            seen = {member.holder for member in node.view.members() if member.state in PRESENT}
            self._checks.check_view(node.holder, seen, there)

    def _fail(self, promise: str, detail: str) -> None:
        if self.violation is None:
            self.violation = Violation(promise, self.world.now, "", detail)
            self.world.stop()

    # ---- faults ------------------------------------------------------------------------------------

    def note_pause(self, index: int, lasts_s: float) -> None:
        """Record when a node is paused, which excuses its loss."""
        self._paused[index] = (self.world.now, min(self.world.now + lasts_s, STORM_S))

    def died(self, node: MemberNode) -> None:
        """Do nothing: the other nodes notice the silence."""

    def take_for_lost(self, index: int) -> None:
        """Broadcast a false suspicion of a living node, which the node refutes."""
        node = self.nodes[index]
        self.tell(node, members.Accused(node.name, node.inc, node.pid, "w?@sim"))

    def set_store_down(self, down: bool) -> None:
        """Do nothing: membership needs no store."""

    def empty_store(self) -> None:
        """Do nothing: membership needs no store."""

    def _choose_observers(self) -> None:
        self.world.after(CHOOSE_S, self._choose_observers)
        if not self._observed:
            return
        chosen = {index for index in self._observers if self.nodes[index].up}
        for node in self.nodes:
            if len(chosen) < OBSERVERS and node.up:
                chosen.add(node.index)
        self._observers = chosen
        for node in self.nodes:
            node.hear(members.Observe(node.index in chosen, tells=node.index in chosen))


@dataclass(frozen=True, slots=True)
class MemberOutcome:
    """The first broken guarantee, if any, the trace's hash, and counts of effects."""

    violation: Violation | None
    trace_hash: str
    counts: dict[str, int]


def run_membership(plan: Plan, *, observed: bool, interval_s: float = 0.0) -> MemberOutcome:
    """Run a plan. `interval_s`: how often nodes check for lost ones; 0: at once."""
    crowd = MemberCrowd(plan, observed=observed, interval_s=interval_s)
    for fault in plan.faults:
        if fault.kind == "pause":
            crowd.world.at(fault.at_s, crowd.note_pause, fault.node, fault.lasts_s)
    schedule_faults(crowd)
    crowd.world.run(STORM_S + SETTLING_S + (VIEWS_S if observed else 0.0))
    if crowd.violation is None:
        crowd.check_views()
    return MemberOutcome(crowd.violation, crowd.world.trace.digest(), dict(crowd.counts))


def _index(name: str) -> int:
    return int(name.partition("@")[0].removeprefix("w"))
