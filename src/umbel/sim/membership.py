"""Membership in the simulator: who is taken for alive, suspect and lost, by the workers' own machines.

The same crowd, faults and weather as for elections, with `protocol/membership/gossip.py` and
`protocol/membership/heartbeat.py` in each node. In *observed* mode only three nodes hear heartbeats; who they
are is settled by the crowd here, by leases in the worker. `member_checks.py` judges.
"""

from dataclasses import dataclass
from typing import Any

from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.machine import Tick
from umbel.protocol.membership import events as said
from umbel.protocol.membership.gossip import Membership
from umbel.protocol.membership.heartbeat import Beat, BeatKind, BeatNow, Begin, Echoed, End, Heartbeat, Lagged
from umbel.protocol.membership.views import UNNAMED_MAX_S, VIEW_S
from umbel.sim.alarm import NEVER, Alarm
from umbel.sim.checkers import Violation
from umbel.sim.crowd import Crowd, Process
from umbel.sim.faults import schedule_faults
from umbel.sim.member_checks import MemberChecks
from umbel.sim.network import NEAR_S
from umbel.sim.plan import STORM_S, Plan
from umbel.sim.world import NodeClock

BEAT_S = 2.0
OBSERVERS = 3
CHOOSE_S = 5.0  # how often a dead observer is replaced
SETTLING_S = 150.0  # twice the silence of the worst local health, suspicion, and an older run's time
VIEWS_S = 2 * VIEW_S + UNNAMED_MAX_S  # until who hears no heartbeats has learnt what observers know
PAUSE_EXCUSED_S = 3.5  # a shorter pause must not cost a node its membership
# Under these alone every heartbeat arrives, so that only who is dead or stands still is silent.
AUDIBLE = {"crash", "stop", "pause", "skew", "wall-jump", "drift", "duplicate"}
KINDS = {
    BeatKind.ONLINE: said.Kind.ONLINE,
    BeatKind.BEAT: said.Kind.BEAT,
    BeatKind.OFFLINE: said.Kind.OFFLINE,
}
PRESENT = {said.MemberState.ALIVE, said.MemberState.SUSPECT}
TICK = Tick()


class MemberNode(Process):
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
        self._beat(self._heart.step(Begin(), self._now()))
        self._crowd.introduce(self)
        self._rearm()

    def stop(self) -> None:
        if self.up and not self.paused:
            self._beat(self._heart.step(End(), self._now()))

    def wake(self) -> None:
        self._tick_due()

    def woken(self) -> None:
        self._alarm.set_anew(self._deadline())

    def take(self, event: Any) -> None:
        self._tick_due()
        if isinstance(event, said.Heard) and (event.node, event.inc) == (self.name, self.inc):
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
        deadlines = [one for one in (self._heart.deadline, self.view.deadline) if one is not None]
        return min(deadlines, default=None)

    def _tick(self) -> None:
        self._tick_due()
        self._rearm()

    def _beat(self, effects: Any) -> None:
        for effect in effects:
            match effect:
                case Lagged(reason):
                    self.view.step(said.Strained(reason), self._now())
                case Beat(kind, freq_s):
                    self._crowd.send_beat(self, KINDS[kind], freq_s)

    def _perform(self, effects: list[said.Effect]) -> None:
        for effect in effects:
            self.world.trace.note(f"{self.world.now:.6f} {self.index} {type(effect).__name__}")
            match effect:
                case said.Accuse(member):
                    self._crowd.tell(self, said.Accused(member.node, member.inc, member.pid, self.name))
                case said.Condemn(member):
                    condemned = said.Condemned(member.node, member.inc, member.pid, self.name, member.reason)
                    self._crowd.tell(self, condemned)
                case said.TellView(after, until, runs):
                    self._crowd.tell(self, said.Viewed(self.name, after, until, runs))
                case said.Probe(member, ping):
                    self._crowd.probe(self, member, ping=ping)
                case said.Refute(lost):
                    self._beat(self._heart.step(Begin() if lost else BeatNow(), self._now()))
                case said.Joined(member, returned):
                    self._crowd.joined(self, member, returned=returned)
                case said.Left(member) | said.Lost(member):
                    self._crowd.gone(self, member)
                case _:
                    self._crowd.count(type(effect).__name__)


class MemberCrowd(Crowd[MemberNode]):
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
        return MemberNode(self, index, pid, clock)

    def hears_beats(self, index: int) -> bool:
        return not self._observed or index in self._observers

    # ---- what nodes do -----------------------------------------------------------------------------

    def send_beat(self, node: MemberNode, kind: said.Kind, freq_s: float) -> None:
        sent_at = node.clock.read(self.world.now).wall_s
        heard = said.Heard(
            *(node.name, node.inc, node.pid, kind),
            clock=int(self.world.now * 10),
            sent_at=sent_at,
            freq_s=freq_s,
            software="umbel",
            observed=self._observed,
        )
        rare = kind is not said.Kind.BEAT
        listeners = [one for one in self.nodes if rare or one is node or self.hears_beats(one.index)]
        self.network.broadcast(node.index, heard, listeners)

    def tell(self, node: MemberNode, message: said.Event) -> None:
        self.network.broadcast(node.index, message, self.nodes)

    def introduce(self, node: MemberNode) -> None:
        """What the answers to `hello` do: another node names those that it knows."""
        others = [one for one in self.nodes if one is not node and one.up and not one.paused]
        if others and node.index not in self.network.calls.cut_off:
            peer = self.world.random.choice(others)
            known = [(peer.name, peer.inc, peer.pid)]
            known += [(one.node, one.inc, one.pid) for one in peer.view.members() if one.state in PRESENT]
            for name, inc, pid in known:
                self.world.after(NEAR_S[1], node.hear, said.Introduced(name, inc, pid, freq_s=BEAT_S))

    def probe(self, node: MemberNode, member: said.Member, *, ping: bool) -> None:
        """The broker has a mark of a node for three intervals after its last beat; a node answers a ping."""
        if node.index in self.network.calls.cut_off:
            return
        subject = self.nodes[_index(member.node)]
        cut_off = self.network.calls.cut_off | self.network.broadcasts.cut_off
        answers = subject.up and not subject.paused and subject.index not in cut_off
        same = answers and subject.inc == member.inc
        evidence = said.Probed(member.node, member.inc, member.pid, "alive" if same else "unknown")
        self.world.after(NEAR_S[1], node.hear, evidence)
        if ping and answers:
            self.world.after(2 * NEAR_S[1], node.hear, said.Answered(member.node))

    # ---- what is judged ----------------------------------------------------------------------------

    def joined(self, node: MemberNode, member: said.Member, *, returned: bool) -> None:
        self._checks.joined(node.holder, member.holder, returned=returned)

    def gone(self, node: MemberNode, member: said.Member) -> None:
        subject = self.nodes[_index(member.node)]
        lost = member.state is said.MemberState.LOST
        alive = subject.up and subject.holder == member.holder
        well = lost and alive and self.plan.kinds <= AUDIBLE and not self._stood_still(subject, node)
        self._checks.gone(
            node.holder, member.holder, unfounded=(member.reason or "no reason") if well else ""
        )
        self.count("lost" if lost else "left")

    def _stood_still(self, subject: MemberNode, observer: MemberNode) -> bool:
        """Whether the subject was paused for long, and the observer can only have heard of that by now."""
        began, ended = self._paused.get(subject.index, (NEVER, 0.0))
        slept, woke = self._paused.get(observer.index, (NEVER, 0.0))
        until = ended + 2 * BEAT_S
        if slept < until:  # what it hears when it wakes was said meanwhile
            until = max(until, woke + BEAT_S)
        return ended - began >= PAUSE_EXCUSED_S and self.world.now <= until

    def check_views(self) -> None:
        there = {node.holder for node in self.nodes}
        for node in self.nodes:
            seen = {one.holder for one in node.view.members() if one.state in PRESENT}
            self._checks.check_view(node.holder, seen, there)

    def _fail(self, promise: str, detail: str) -> None:
        if self.violation is None:
            self.violation = Violation(promise, self.world.now, "", detail)
            self.world.stop()

    # ---- what befalls it ---------------------------------------------------------------------------

    def note_pause(self, index: int, lasts_s: float) -> None:
        self._paused[index] = (self.world.now, min(self.world.now + lasts_s, STORM_S))

    def died(self, node: MemberNode) -> None:
        """The others notice by its silence."""

    def take_for_lost(self, index: int) -> None:
        """A false report is refuted: an observer reports a living node lost, and the node answers."""
        node = self.nodes[index]
        self.tell(node, said.Accused(node.name, node.inc, node.pid, "w?@sim"))

    def set_store_down(self, down: bool) -> None:
        """Membership needs no store."""

    def empty_store(self) -> None:
        """Membership needs no store."""

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
            node.hear(said.Observe(node.index in chosen, tells=node.index in chosen))


@dataclass(frozen=True, slots=True)
class MemberOutcome:
    violation: Violation | None
    trace_hash: str
    counts: dict[str, int]


def run_membership(plan: Plan, *, observed: bool, interval_s: float = 0.0) -> MemberOutcome:
    """`interval_s`: how often nodes look for lost ones; 0: at once."""
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
