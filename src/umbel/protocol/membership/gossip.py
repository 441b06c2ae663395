"""Membership: which nodes are in the cluster, suspect, or gone, from the view of one node.

Every event of a node is a sign of life. A name that sent a single event is not a member yet (`Newcomers`). A
node that is silent for too long becomes suspect: this node notifies the others, asks the broker, and pings
the suspect. A suspect that receives the notice sends a heartbeat at once. If its suspicion time ends without
a sign of life, it is lost. A node that announces its shutdown has left. Each run of a node (its incarnation)
joins once, and leaves or is lost once; late events of an older run are ignored.

Why a slow observer does not declare live nodes lost: silence is measured in intervals of the sender,
multiplied by this node's own health level. And if more than half of the cluster becomes silent at once, this
node or the broker is probably partitioned, so no node is declared lost.

Limits: two nodes may see different members while messages are in transit, and in a partition each side sees
the other as lost. Actions that must happen once must not depend on this view: elections and leases use the
store. A Celery node that restarts with the same process id can be recognized as a new run only by its clock.
"""

from collections.abc import Callable
from math import inf
from typing import assert_never

from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.machine import Tick
from umbel.protocol.membership.heartbeat import (
    OBSERVERS,
    SILENCE,
    SUSPICION_MAX,
    LocalHealth,
    QuorumGuard,
    silence_s,
    suspicion_s,
)
from umbel.protocol.membership.members import (
    MEMBERS_MAX,
    Accuse,
    Accused,
    Answered,
    Cleared,
    Condemn,
    Condemned,
    Degraded,
    Effect,
    Event,
    Introduced,
    Joined,
    Kind,
    Left,
    Looks,
    Lost,
    Member,
    Members,
    MemberState,
    Namesake,
    Namesakes,
    Newcomers,
    NodeEvent,
    Observe,
    Probe,
    Probed,
    Record,
    Refute,
    Restored,
    Strained,
    Suspected,
    Viewed,
    is_late,
    is_same_run,
    member_from,
)
from umbel.protocol.membership.observers import SETTLED_S, Views

GONE_KEPT_S = 3600.0
LAG_MAX = 0.25  # intervals
JITTER = 0.25  # in intervals, so that observers do not all notice a silence at the same moment


class Membership:
    """The machine of one node, which is never in its own table (`node`, `inc`, `pid`); `interval_s`: see
    `Looks`.
    """

    def __init__(
        self,
        node: str,
        inc: int,
        pid: int,
        uniform: Callable[[float, float], float],
        *,
        observing: bool = True,
        interval_s: float = 0.0,
        members_max: int = MEMBERS_MAX,
    ) -> None:
        self.health = LocalHealth()
        self.observing = observing
        self._node = node
        self._run = (inc, pid)
        self._uniform = uniform
        self._members = Members(self._due_s, Looks.every(interval_s, uniform), members_max=members_max)
        self._newcomers = Newcomers()
        self._guard = QuorumGuard()
        self._held_until: float | None = None
        self._now_s = 0.0
        self._namesakes = Namesakes(self._run)
        self._views = Views(self._members, Introduced(node, inc, pid), uniform)

    # -- queries ---------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """Return when the machine wants a Tick, on the boot clock; None for never."""
        due_s = min(self._views.deadline, self._held_until or inf)
        first = min(self._members.deadline, self.health.deadline or inf, due_s)
        return None if first == inf else first

    @property
    def nodes(self) -> int:
        """Return how many nodes are not known to be gone, including this node."""
        return 1 + self._members.present

    @property
    def evicted(self) -> int:
        """Return how many nodes were removed because the table was full."""
        return self._members.evicted

    def members(self) -> tuple[Member, ...]:
        """Return all other known nodes, including those that left or were lost in the last hour."""
        return tuple(record.member for record in self._members)

    def member(self, node: str) -> Member | None:
        """Return the record of this node; None if the node is unknown."""
        record = self._members.get(node)
        return record.member if record else None

    def step(self, event: Event | Tick, now: Instant) -> list[Effect]:
        """Process one event; return the changes to report and the messages to send."""
        self._now_s = now.boot_s
        match event:
            case NodeEvent():
                return self._hear(event, now)
            case Introduced():
                return self._introduce(event, now)
            case Accused():
                return self._accused(event, now)
            case Condemned():
                return self._condemned(event, now)
            case Viewed():
                return self._viewed(event, now)
            case Answered(node):
                record = self._members.get(node)
                return self._clear(record, now) if record else []
            case Probed():
                return self._probed(event, now)
            case Strained():
                self.health.strain(now.boot_s)
                return []
            case Observe(on, tells):
                self._views.tell(tells, now.boot_s)
                return self._observe(on, now)
            case Tick():
                return self._tick(now)
            case _:
                assert_never(event)

    # -- signs of life ---------------------------------------------------------------------------

    def _hear(self, event: NodeEvent, now: Instant) -> list[Effect]:
        if event.node == self._node:
            return [Namesake(event.pid, event.inc)] if self._namesakes.is_new(event) else []
        record = self._members.get(event.node)
        if record is not None and is_late(record, event, now):
            return []
        if record is None or not is_same_run(record, event):
            return self._meet(event, now)
        if event.kind is Kind.OFFLINE:
            return self._leave(record, event, now)
        was_gone = record.is_gone
        self._members.heard(record, event, now)
        if was_gone:
            self._set(record, MemberState.ALIVE, now)
            return [Joined(record.member, returned=True)]
        return self._clear(record, now)

    def _meet(self, event: NodeEvent, now: Instant) -> list[Effect]:
        """Make an unknown run a member at its second sign of life, or if the broker knows it."""
        if event.kind is Kind.OFFLINE:
            self._newcomers.forget(event.node)
        elif self._newcomers.is_first(event, now.boot_s):
            may_ask = self._newcomers.may_ask(now.boot_s)
            return [Probe(member_from(event, now), ping=False)] if may_ask else []
        elif self._newcomers.is_proven(event, now.boot_s):
            return self._join(event, now)
        return []

    def _join(self, event: NodeEvent, now: Instant) -> list[Effect]:
        """Add a run as a member; it replaces an older run."""
        record, member = self._members.get(event.node), member_from(event, now)
        older = [] if record is None or record.is_gone else self._lose(record, "restarted", self._node, now)
        self._newcomers.forget(event.node)
        jitter = self._uniform(0.0, JITTER)
        self._members.add(Record(member, now.boot_s, now.boot_s, jitter, sent_at=event.sent_at))
        return [*older, Joined(member)]

    def _introduce(self, named: Introduced, now: Instant, *, rather: bool = False) -> list[Effect]:
        """Add a node that a peer names. `rather`: accept this run although a later one is known."""
        record = self._members.get(named.node)
        if named.node == self._node:
            return []
        if record is not None and named.inc <= record.member.inc and not rather:
            return []  # an event from the node counts more than a report about it
        run = (named.node, named.inc, named.pid)
        event = NodeEvent(*run, Kind.OTHER, named.clock, freq_s=named.freq_s, software=named.software)
        return self._join(event, now)

    def _viewed(self, view: Viewed, now: Instant) -> list[Effect]:
        """Adopt an observer's view, if this node receives no heartbeats."""
        effects: list[Effect] = []
        if self.observing or self._members.get(view.by) is None:
            return effects
        unnamed = self._views.unnamed(view, now.boot_s)
        for record in unnamed:
            if not record.is_gone:
                effects += self._lose(record, "not seen by any observer", view.by, now)
        given_up = {record.node for record in unnamed}
        for named in view.runs:
            known = self._members.run(named.node, named.inc, named.pid)
            if known is None:
                effects += self._introduce(named, now, rather=named.node in given_up)
            elif known.state is MemberState.LOST and now.boot_s - known.changed_s >= SETTLED_S:
                self._set(known, MemberState.ALIVE, now)
                effects.append(Joined(known.member, returned=True))
        return effects

    def _leave(self, record: Record, event: NodeEvent, now: Instant) -> list[Effect]:
        if record.is_gone:
            return []
        self._members.heard(record, event, now)
        self._set(record, MemberState.LEFT, now, "went offline")
        return [Left(record.member)]

    def _clear(self, record: Record, now: Instant) -> list[Effect]:
        record.accusers.clear()
        if record.state is not MemberState.SUSPECT:
            return []
        record.heard_s = now.boot_s
        self._set(record, MemberState.ALIVE, now)
        return [Cleared(record.member)]

    # -- silence ---------------------------------------------------------------------------------

    def _tick(self, now: Instant) -> list[Effect]:
        effects: list[Effect] = [*self._views.tick(now.boot_s, doubtful=self._held_until is not None)]
        if self._overslept(now):
            return effects
        if self.health.recover(now.boot_s):
            self._members.all_changed()
        if self._held_until is not None and now.boot_s >= self._held_until:
            self._held_until = None
            effects.append(Restored())
        while (record := self._members.pop_due(now.boot_s)) is not None:
            if record.is_gone:
                self._members.forget(record.node)
            elif record.state is MemberState.ALIVE:
                effects += self._suspect(record, now)
            elif self._end_s(record) <= now.boot_s:
                effects += self._condemn(record, now)
            else:
                effects.append(Probe(record.member, ping=False))
                record.probe_s = now.boot_s + record.member.freq_s
                self._members.changed(record)
        return effects

    def _overslept(self, now: Instant) -> bool:
        """Return whether a Tick comes so late that this node was paused, and could not receive events.

        All nodes get that time in addition, plus one interval, because events sent meanwhile are still to be
        read.
        """
        slept_s = now.boot_s - self._members.deadline
        record = self._members.next_due
        if record is None or slept_s <= LAG_MAX * record.member.freq_s:
            return False
        self.health.strain(now.boot_s)
        for other in self._members:
            if not other.is_gone:
                other.heard_s = min(now.boot_s, other.heard_s + slept_s + other.member.freq_s)
                other.wait_s += slept_s + other.member.freq_s
                other.probe_s = max(other.probe_s, now.boot_s + other.member.freq_s)
        self._members.all_changed()
        return True

    def _suspect(self, record: Record, now: Instant) -> list[Effect]:
        freq_s = record.member.freq_s
        record.unmarked = record.ended = False
        record.wait_s = now.boot_s + suspicion_s(freq_s, record.agreeing)
        record.probe_s = now.boot_s + freq_s
        self._set(record, MemberState.SUSPECT, now, record.silence(now))
        effects: list[Effect] = [Suspected(record.member)]
        if len(record.accusers) < OBSERVERS - 1:  # otherwise enough observers have broadcast it
            effects.append(Accuse(record.member))
        effects.append(Probe(record.member, ping=True))
        self._guard.fell_silent(record.node, now.boot_s)
        if self._guard.is_most_of(self.nodes, within_s=SILENCE * freq_s, now_s=now.boot_s):
            if self._held_until is None:
                effects.append(Degraded(self._guard.silent, self.nodes))
            self._held_until = now.boot_s + SUSPICION_MAX * freq_s
        return effects

    def _accused(self, accused: Accused, now: Instant) -> list[Effect]:
        if accused.by == self._node:  # a fanout exchange returns our own broadcast
            return []
        if accused.subject == self._node:
            return [Refute(lost=False)] if (accused.inc, accused.pid) == self._run else []
        record = self._members.run(accused.subject, accused.inc, accused.pid)
        if record is not None and not record.is_gone and len(record.accusers) < OBSERVERS:
            record.accusers.add(accused.by)
            self._agree(record)
        return []

    def _condemned(self, condemned: Condemned, now: Instant) -> list[Effect]:
        run = (condemned.inc, condemned.pid)
        if condemned.subject == self._node:
            return [Refute(lost=True)] if run == self._run else []
        record = self._members.run(condemned.subject, *run)
        if record is None or record.is_gone:
            return []
        if self.observing and record.state is MemberState.ALIVE:
            # This node still receives its events, or will soon notice its silence.
            return self._accused(Accused(condemned.subject, *run, condemned.by), now)
        if self._held_until is not None or self._members.get(condemned.by) is None:
            return []
        return self._lose(record, condemned.reason, condemned.by, now)

    def _probed(self, probed: Probed, now: Instant) -> list[Effect]:
        newcomer = self._newcomers.find(probed.node, probed.inc, probed.pid)
        if newcomer is not None:
            return self._join(newcomer, now) if probed.evidence == "alive" else []
        record = self._members.run(probed.node, probed.inc, probed.pid)
        if record is None or record.state is not MemberState.SUSPECT:
            return []
        if probed.evidence == "gone":
            record.ended = True
        elif probed.evidence == "unknown" and record.member.inc:
            # a node that renews its presence key has not renewed it for three intervals
            record.unmarked = True
        self._agree(record)
        return self._condemn(record, now) if self._end_s(record) <= now.boot_s else []

    def _agree(self, record: Record) -> None:
        if record.state is MemberState.SUSPECT:
            allowed_s = suspicion_s(record.member.freq_s, record.agreeing)
            record.wait_s = min(record.wait_s, record.changed_s + allowed_s)
            self._members.changed(record)

    def _condemn(self, record: Record, now: Instant) -> list[Effect]:
        reason = "its connection ended" if record.ended else record.silence(now)
        return [*self._lose(record, reason, self._node, now), Condemn(record.member)]

    def _lose(self, record: Record, reason: str, by: str, now: Instant) -> list[Effect]:
        self._set(record, MemberState.LOST, now, reason)
        return [Lost(record.member, by)]

    def _observe(self, on: bool, now: Instant) -> list[Effect]:
        if on == self.observing:
            return []
        self.observing = on
        effects: list[Effect] = []
        for record in self._members:
            effects += self._clear(record, now)
            # time in which this node could not receive events does not count as silence
            record.heard_s = now.boot_s
        self._members.all_changed()
        return effects

    # -- times -----------------------------------------------------------------------------------

    def _set(self, record: Record, state: MemberState, now: Instant, reason: str = "") -> None:
        record.changed_s = now.boot_s
        record.member = record.member.replaced(state=state, since=now.wall_s, reason=reason)
        if state is not MemberState.SUSPECT:
            self._guard.spoke(record.node)
        self._members.changed(record)

    def _due_s(self, record: Record) -> float:
        """Return when the node must next be checked; never in the past.

        A timer in the past would look as if this node had been paused.
        """
        return max(self._judged_s(record), self._now_s)

    def _judged_s(self, record: Record) -> float:
        if record.is_gone:
            return record.changed_s + GONE_KEPT_S
        if record.state is MemberState.SUSPECT:
            return min(self._end_s(record), record.probe_s)
        if not self.observing:
            return inf
        freq_s = record.member.freq_s
        return record.heard_s + silence_s(freq_s, self.health.level) + record.jitter * freq_s

    def _end_s(self, record: Record) -> float:
        """Return when a suspect is declared lost."""
        end_s = record.changed_s if record.ended else record.wait_s
        return end_s if self._held_until is None else max(end_s, self._held_until)
