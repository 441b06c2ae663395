"""The table of members, and of newcomers that are not members yet; both are bounded.

`Members` has at most one timer for each node and knows which node to check next. `Newcomers` holds runs of
nodes that sent one sign of life. Anyone with write access to the broker can forge a name, so a run becomes a
member only with its second sign of life.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heapify, heappop, heappush
from math import ceil, inf
from typing import Literal

from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.machine import Value
from umbel.protocol.membership.heartbeat import believable_freq_s

# ---- events ----------------------------------------------------------------------------------------
#
# The inputs of the membership machine (`gossip.py`). A run of a node is identified by (node, inc, pid). `inc`
# is the microsecond at which its process started, and 0 for a node that sends none, such as Celery's: there
# the process id distinguishes runs.


class MemberState(StrEnum):
    """What this node believes about another node."""

    ALIVE = "alive"
    SUSPECT = "suspect"  # silent for too long; this node pings it and notifies the others
    LOST = "lost"  # silent until the end of its suspicion time
    LEFT = "left"  # the node announced its shutdown


GONE = frozenset({MemberState.LOST, MemberState.LEFT})


class Kind(StrEnum):
    """The kind of event that a node sent."""

    ONLINE = "online"
    BEAT = "beat"
    OFFLINE = "offline"
    OTHER = "other"  # any other event: a sign of life


class Member(Value):
    """Another node as this node sees it. `last_heard` and `since` (of its state) are Unix time."""

    node: str
    inc: int
    pid: int
    state: MemberState
    software: str
    clock: int
    freq_s: float
    last_heard: float
    since: float
    reason: str = ""
    observed: bool = False  # whether the node is in observed mode, according to its heartbeats

    @property
    def holder(self) -> str:
        """Return this run of the node in the form of the store's holders of elections and leases."""
        return f"{self.node}.{self.pid}.{self.inc}"


# ---- events ----------------------------------------------------------------------------------------


class NodeEvent(Value):
    """An event of another node arrived. `sent_at` is the sender's Unix time."""

    node: str
    inc: int
    pid: int
    kind: Kind
    clock: int = 0
    sent_at: float = 0.0
    freq_s: float | None = None
    software: str = ""
    observed: bool = False


class Introduced(Value):
    """A peer names a live node, so that a new node learns of the others."""

    node: str
    inc: int
    pid: int
    clock: int = 0
    freq_s: float | None = None
    software: str = ""


class Accused(Value):
    """The node `by` no longer receives events of the subject."""

    subject: str
    inc: int
    pid: int
    by: str


class Condemned(Value):
    """The node `by` has declared the subject lost."""

    subject: str
    inc: int
    pid: int
    by: str
    reason: str = ""


class Viewed(Value):
    """An observer lists the nodes that it sees, with names above `after` and up to `until`.

    An empty `until` means the end of all names.
    """

    by: str
    after: str
    until: str
    runs: tuple[Introduced, ...]


class Answered(Value):
    """The node replied to a ping."""

    node: str


class Probed(Value):
    """What the broker knows about a run of a node: see `brokers.interface.Evidence`."""

    node: str
    inc: int
    pid: int
    evidence: Literal["alive", "gone", "unknown"]


class Strained(Value):
    """This process is slow, so other nodes may only seem silent."""

    reason: str


class Observe(Value):
    """Sets whether this node receives heartbeats from now on, so that silence has a meaning.

    `tells`: other nodes rely on this node's observations, and receive views from it.
    """

    on: bool
    tells: bool = False


# ---- effects ---------------------------------------------------------------------------------------


class Joined(Value):
    """A node became a member. `returned`: it had been declared lost and is active again."""

    member: Member
    returned: bool = False


class Left(Value):
    """The node shut down gracefully."""

    member: Member


class Lost(Value):
    """The node `by` declares the node lost; `member.reason` is the reason."""

    member: Member
    by: str


class Suspected(Value):
    """A member is silent for too long and is now suspect."""

    member: Member


class Cleared(Value):
    """A suspect sent an event or replied: it is alive."""

    member: Member


class Accuse(Value):
    """Broadcast `worker-suspect` about the member."""

    member: Member


class Condemn(Value):
    """Broadcast `worker-lost` about the member."""

    member: Member


class BroadcastView(Value):
    """Broadcast `worker-view`: see Viewed."""

    after: str
    until: str
    runs: tuple[Introduced, ...]


class Probe(Value):
    """Ask the broker about the member, and ping it; answer with Probed and Answered."""

    member: Member
    ping: bool


class Refute(Value):
    """Another node considers this one silent: send a heartbeat at once. `lost`: go online again."""

    lost: bool


class Degraded(Value):
    """More than half of the cluster became silent at once: probably this node's connection or the broker
    failed.
    """

    suspects: int
    nodes: int


class Restored(Value):
    """The cluster is no longer silent: nodes are declared lost again."""


class Namesake(Value):
    """Another process uses this node's name."""

    pid: int
    inc: int


Event = NodeEvent | Introduced | Accused | Condemned | Viewed | Answered | Probed | Strained | Observe
Effect = (
    Joined
    | Left
    | Lost
    | Suspected
    | Cleared
    | Accuse
    | Condemn
    | BroadcastView
    | Probe
    | Refute
    | Degraded
    | Restored
    | Namesake
)
Change = Joined | Left | Lost


# ---- the table of members --------------------------------------------------------------------------
#
# Each node has at most one timer. A timer that fires too early is set again. So a heartbeat, which only ever
# moves a timer to a later time, needs no change of the heap.
#
# Timers fire when they are due or, with an interval, at the next check; then all nodes due since the last
# check are checked together. Reports of other nodes do not wait for a check.
#
# At its limit the table removes the node that has been gone for longest or, if none is gone, the node that
# has been silent for longest.

MEMBERS_MAX = 20_000
TIMERS_SPARE = 1000
NAMESAKES_MAX = 100
# No event is in transit for longer: a lower incarnation after that means that a clock was set back.
LATE_MAX_S = 60.0


@dataclass(slots=True)
class Record:
    """The record of one node: its public state, and the times needed to check it.

    Names that end in `_s` are times of the boot clock.
    """

    member: Member
    heard_s: float
    changed_s: float  # when its state began
    jitter: float
    sent_at: float = 0.0  # the newest timestamp in its events
    wait_s: float = inf  # when a suspect's time ends
    probe_s: float = inf  # when the broker is asked about a suspect again
    timer_s: float = inf
    unmarked: bool = False  # its presence key in the broker has expired
    ended: bool = False  # the broker knows that its connection ended
    accusers: set[str] = field(default_factory=set)
    unnamed_s: float = inf  # since when observers' views have not named it

    @property
    def node(self) -> str:
        """Return the node's name."""
        return self.member.node

    @property
    def state(self) -> MemberState:
        """Return the state of the node's current run."""
        return self.member.state

    @property
    def is_gone(self) -> bool:
        """Return whether the node is lost or has left."""
        return self.member.state in GONE

    @property
    def agreeing(self) -> int:
        """Return how many other sources agree that the node is silent."""
        return len(self.accusers) + self.unmarked

    def silence(self, now: Instant) -> str:
        """Return the reason for a silent node."""
        return f"silent for {now.boot_s - self.heard_s:.1f} s"


class Looks(Value):
    """The times at which nodes are checked: every `interval_s`; with 0, the moment that they are due."""

    interval_s: float
    phase_s: float  # offset from each multiple of the interval

    @classmethod
    def every(cls, interval_s: float, uniform: Callable[[float, float], float]) -> "Looks":
        """Return checks with a random offset, so that observers that start together do not check together."""
        return cls(interval_s, uniform(0.0, interval_s) if interval_s else 0.0)

    def after(self, due_s: float) -> float:
        """Return the time of the first check at or after this time."""
        if not self.interval_s or due_s == inf:
            return due_s
        number = ceil((due_s - self.phase_s) / self.interval_s)
        return max(due_s, self.phase_s + number * self.interval_s)


class Members:
    """The known nodes, at most `members_max`, and a timer for each."""

    def __init__(self, due_s: Callable[[Record], float], looks: Looks, *, members_max: int) -> None:
        """Create an empty table. `due_s` returns when a node must next be checked; `inf` for never."""
        self.evicted = 0
        self._due_s = due_s
        self._looks = looks
        self._members_max = members_max
        self._records: OrderedDict[str, Record] = OrderedDict()  # the node silent for longest comes first
        self._gone: dict[str, None] = {}  # the node gone for longest comes first
        self._timers: list[tuple[float, str]] = []

    @property
    def deadline(self) -> float:
        """Return when the next node must be checked; `inf` for never."""
        return self._looks.after(self._timers[0][0]) if self._timers else inf

    @property
    def present(self) -> int:
        """Return how many nodes are not known to be gone."""
        return len(self._records) - len(self._gone)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def get(self, node: str) -> Record | None:
        """Return the node's record; None if it is unknown."""
        return self._records.get(node)

    def run(self, node: str, inc: int, pid: int) -> Record | None:
        """Return the node's record if it is about this run."""
        record = self._records.get(node)
        if record is None or (record.member.inc, record.member.pid) != (inc, pid):
            return None
        return record

    def add(self, record: Record) -> None:
        """Add a record, which replaces the node's old record; at the limit, another node is removed."""
        self.forget(record.node)
        if len(self._records) >= self._members_max:
            self.evicted += 1
            self.forget(next(iter(self._gone), None) or next(iter(self._records)))
        self._records[record.node] = record
        self.changed(record)

    def heard(self, record: Record, event: NodeEvent, now: Instant) -> None:
        """Update the record from an event of the node."""
        known = record.member
        record.heard_s = now.boot_s
        record.sent_at = max(record.sent_at, event.sent_at)
        record.member = known.replaced(
            software=event.software or known.software,
            clock=max(known.clock, event.clock),
            freq_s=believable_freq_s(event.freq_s, known.freq_s),
            last_heard=now.wall_s,
            observed=event.observed if event.kind in (Kind.ONLINE, Kind.BEAT) else known.observed,
        )
        record.unnamed_s = inf
        self._records.move_to_end(record.node)
        self.changed(record)

    def changed(self, record: Record) -> None:
        """Set the node's timer after its state or its times changed."""
        if record.is_gone:
            self._gone[record.node] = None
        else:
            self._gone.pop(record.node, None)
        due_s = self._due_s(record)
        if due_s < record.timer_s:
            record.timer_s = due_s
            heappush(self._timers, (due_s, record.node))
            if len(self._timers) > 4 * len(self._records) + TIMERS_SPARE:
                self.all_changed()

    def all_changed(self) -> None:
        """Set the timers of all nodes again."""
        self._timers = []
        for record in self._records.values():
            record.timer_s = self._due_s(record)
            if record.timer_s < inf:
                self._timers.append((record.timer_s, record.node))
        heapify(self._timers)

    def forget(self, node: str) -> None:
        """Remove the node."""
        self._records.pop(node, None)
        self._gone.pop(node, None)

    @property
    def next_due(self) -> Record | None:
        """Return the node whose timer is due first; another node if that one was removed meanwhile."""
        due = self._records.get(self._timers[0][1]) if self._timers else None
        return due or next(iter(self._records.values()), None)

    def pop_due(self, now_s: float) -> Record | None:
        """Return the next node to check now; the caller calls `changed` after that."""
        while self._timers and self.deadline <= now_s:
            timer_s, node = heappop(self._timers)
            record = self._records.get(node)
            if record is None or record.timer_s != timer_s:
                continue  # its timer was set again, or the node was removed
            record.timer_s = inf
            if self._due_s(record) <= now_s:
                return record
            self.changed(record)
        return None


class Namesakes:
    """Other processes with this node's name; `run` is this node's (incarnation, process id)."""

    def __init__(self, run: tuple[int, int]) -> None:
        self._run = run
        self._known: set[tuple[int, int]] = set()

    def is_new(self, event: NodeEvent) -> bool:
        """Return whether the event is from an unreported process with this node's name."""
        run = (event.inc, event.pid)
        # An earlier run of this node whose events are still in transit is not a namesake.
        if run == self._run or 0 < event.inc < self._run[0] or run in self._known:
            return False
        if len(self._known) >= NAMESAKES_MAX:
            return False
        self._known.add(run)
        return True


def member_from(event: NodeEvent, now: Instant) -> Member:
    """Return a new, live member from its first event."""
    return Member(
        event.node,
        event.inc,
        event.pid,
        MemberState.ALIVE,
        event.software,
        event.clock,
        believable_freq_s(event.freq_s),
        now.wall_s,
        now.wall_s,
        observed=event.observed,
    )


def is_late(record: Record, event: NodeEvent, now: Instant) -> bool:
    """Return whether the event is older than the node's record."""
    known = record.member
    if event.inc and known.inc and event.inc != known.inc:
        long_gone = record.is_gone and now.boot_s - record.changed_s > LATE_MAX_S
        return event.inc < known.inc and not (long_gone and event.kind in (Kind.ONLINE, Kind.BEAT))
    if (event.inc, event.pid) != (known.inc, known.pid):
        return event.sent_at <= record.sent_at
    if record.state is MemberState.LEFT:
        # Celery's nodes go offline and online again when they have lost their connection.
        return bool(known.inc) or event.sent_at <= record.sent_at
    if record.state is MemberState.LOST:
        return event.clock <= known.clock and event.sent_at <= record.sent_at
    return False


def is_same_run(record: Record, event: NodeEvent) -> bool:
    """Return whether the event is from the run that the record is about."""
    known = record.member
    if (event.inc, event.pid) != (known.inc, known.pid):
        return False
    restarted = event.kind is Kind.ONLINE and not event.inc and event.clock < known.clock
    return record.is_gone or not (restarted and event.sent_at > record.sent_at)


# ---- newcomers -------------------------------------------------------------------------------------
#
# A run becomes a member with its second sign of life: an event that was sent later than the first, and that
# arrives at least half an interval after it. The broker may be quicker: it is asked at the first sign, about
# at most ASKED_PER_S newcomers. If it knows the node, by its presence key or its mailbox, the run becomes a
# member at once.
#
# At NEWCOMERS_MAX the oldest newcomer is removed, and after KEPT_S each is. So a flood of forged names fills
# only this table: it displaces no member and is not announced. If a flood replaces the whole table within an
# interval, a starting node becomes a member when the broker knows it, or when the flood is over.

NEWCOMERS_MAX = 10_000
KEPT_S = 120.0  # twice the interval that Celery assumes for a node that states none
ASKED_PER_S = 50
APART = 0.5  # in intervals


class Newcomers:
    """The runs that sent one sign of life, at most NEWCOMERS_MAX, oldest first."""

    def __init__(self, newcomers_max: int = NEWCOMERS_MAX) -> None:
        self._newcomers_max = newcomers_max
        self._first: dict[
            str, tuple[NodeEvent, float]
        ] = {}  # the first sign of life of each and its time, oldest first
        self._asked = 0
        self._asked_since_s = -inf

    def __len__(self) -> int:
        return len(self._first)

    def is_first(self, event: NodeEvent, now_s: float) -> bool:
        """Return whether this is the first sign of life of that run, and remember it."""
        self._forget_old(now_s)
        known = self._first.get(event.node)
        if known is not None and (_run(known[0]) == _run(event) or event.inc < known[0].inc):
            return False
        self._first.pop(event.node, None)
        self._first[event.node] = (event, now_s)
        if len(self._first) > self._newcomers_max:
            del self._first[next(iter(self._first))]
        return True

    def is_proven(self, event: NodeEvent, now_s: float) -> bool:
        """Return whether this is a second sign of life of a run."""
        known = self._first.get(event.node)
        if known is None or _run(known[0]) != _run(event):
            return False
        first, first_s = known
        later = event.sent_at > first.sent_at or event.clock > first.clock
        return later and now_s - first_s >= APART * believable_freq_s(event.freq_s)

    def find(self, node: str, inc: int, pid: int) -> NodeEvent | None:
        """Return the first event of this run; None if the run is unknown."""
        known = self._first.get(node)
        return known[0] if known is not None and _run(known[0]) == (inc, pid) else None

    def may_ask(self, now_s: float) -> bool:
        """Return whether the broker may be asked about another node in this second."""
        if now_s - self._asked_since_s >= 1.0:
            self._asked, self._asked_since_s = 0, now_s
        self._asked += 1
        return self._asked <= ASKED_PER_S

    def forget(self, node: str) -> None:
        """Remove the node."""
        self._first.pop(node, None)

    def _forget_old(self, now_s: float) -> None:
        while self._first:
            oldest = next(iter(self._first))
            if now_s - self._first[oldest][1] <= KEPT_S:
                return
            del self._first[oldest]


def _run(event: NodeEvent) -> tuple[int, int]:
    return event.inc, event.pid
