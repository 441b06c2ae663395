"""The table of members, and the names that are not members yet; both are bounded.

`Members` has at most one timer for each node and knows which node to check next. `Newcomers` holds runs of
nodes that sent one sign of life: anybody can make up a name, so a run becomes a member with its second sign.
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
# What goes into the membership machine and what comes out; `gossip.py` decides.
#
# A run of a node is identified by (node, inc, pid). `inc` is the microsecond its process started, and 0 for
# a node that sends none, as Celery's nodes: there the process id tells one run from the next.


class MemberState(StrEnum):
    """What this node believes about another node."""

    ALIVE = "alive"
    SUSPECT = "suspect"  # silent for too long; it is pinged, and the other nodes are notified
    LOST = "lost"  # silent until the end of its suspicion time
    LEFT = "left"  # it announced its shutdown


GONE = frozenset({MemberState.LOST, MemberState.LEFT})


class Kind(StrEnum):
    """What kind of event a node sent."""

    ONLINE = "online"
    BEAT = "beat"
    OFFLINE = "offline"
    OTHER = "other"  # any other event: a sign of life


class Member(Value):
    """One node as this one sees it. `last_heard` and `since` (of its state) are Unix time."""

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
    observed: bool = False  # whether it is in observed mode, as its heartbeats say

    @property
    def holder(self) -> str:
        """This run of the node, as the store names holders of elections and leases."""
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
    """A peer names a node that it knows to be alive, so that a new node learns of the others."""

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
    """An observer lists the nodes that it knows to be present, of the names above `after` and up to `until`.

    An empty `until` is the end of all names.
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
    """Something in this process is slow, so that other nodes may only seem silent."""

    reason: str


class Observe(Value):
    """Whether this node receives heartbeats from now on, so that silence means something.

    `tells`: other nodes rely on what this one observes, and are sent views.
    """

    on: bool
    tells: bool = False


# ---- effects ---------------------------------------------------------------------------------------


class Joined(Value):
    """A node became a member. `returned`: it had been declared lost and is active again."""

    member: Member
    returned: bool = False


class Left(Value):
    """The node stopped in good order."""

    member: Member


class Lost(Value):
    """The node is declared lost, by the node `by`; `member.reason` says why."""

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
    """Another node takes this one for silent: send a heartbeat at once. `lost`: come online again."""

    lost: bool


class Degraded(Value):
    """More than half of the cluster fell silent at once: this node's link or the broker is more likely at
    fault.
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
# Bounded, and with the next node to check.
#
# Each node has one timer at most. A timer that fires too early is set again, so that a heartbeat, which
# only ever moves a timer to later, costs nothing here.
#
# Timers fire when they are due or, with an interval, at the next check: what has become due since the last
# check is judged together. Reports of other nodes do not wait for a check.
#
# At its limit the table forgets the node that has been gone for longest, and only when none is gone the one
# that has been silent for longest.

MEMBERS_MAX = 20_000
TIMERS_SPARE = 1000
NAMESAKES_MAX = 100
# No event is in transit for longer: a lower incarnation after that means that a clock was set back.
LATE_MAX_S = 60.0


@dataclass(slots=True)
class Record:
    """What is stored about one node: its public state, and what its next judgement needs.

    Names that end in `_s` are instants of the boot clock.
    """

    member: Member
    heard_s: float
    changed_s: float  # when its state began
    jitter: float
    sent_at: float = 0.0  # its newest timestamp
    wait_s: float = inf  # when a suspect's time is over
    probe_s: float = inf  # when the broker is asked about a suspect again
    timer_s: float = inf
    unmarked: bool = False  # its presence key in the broker has expired
    ended: bool = False  # the broker knows that its connection ended
    accusers: set[str] = field(default_factory=set)
    unnamed_s: float = inf  # since when observers' views have not named it

    @property
    def node(self) -> str:
        """The node's name."""
        return self.member.node

    @property
    def state(self) -> MemberState:
        """The state of its current run."""
        return self.member.state

    @property
    def is_gone(self) -> bool:
        """Whether the node is lost or has left."""
        return self.member.state in GONE

    @property
    def agreeing(self) -> int:
        """How many other sources agree that the node is silent."""
        return len(self.accusers) + self.unmarked

    def silence(self, now: Instant) -> str:
        """The reason text for a silent node."""
        return f"silent for {now.boot_s - self.heard_s:.1f} s"


class Looks(Value):
    """When silent and lost nodes are checked: every `interval_s`; 0: the moment that they are due."""

    interval_s: float
    phase_s: float  # how long after each multiple of the interval

    @classmethod
    def every(cls, interval_s: float, uniform: Callable[[float, float], float]) -> "Looks":
        """Return checks at a random phase, so that observers that start together do not check together."""
        return cls(interval_s, uniform(0.0, interval_s) if interval_s else 0.0)

    def after(self, due_s: float) -> float:
        """Return the first check at which this is due."""
        if not self.interval_s or due_s == inf:
            return due_s
        number = ceil((due_s - self.phase_s) / self.interval_s)
        return max(due_s, self.phase_s + number * self.interval_s)


class Members:
    """The nodes that are known, at most `members_max`, and a timer for each."""

    def __init__(self, due_s: Callable[[Record], float], looks: Looks, *, members_max: int) -> None:
        """`due_s` says when something must be decided about a node; `inf` for never."""
        self.evicted = 0
        self._due_s = due_s
        self._looks = looks
        self._members_max = members_max
        self._records: OrderedDict[str, Record] = OrderedDict()  # the longest silent first
        self._gone: dict[str, None] = {}  # the longest gone first
        self._timers: list[tuple[float, str]] = []

    @property
    def deadline(self) -> float:
        """When the next node must be checked; `inf` for never."""
        return self._looks.after(self._timers[0][0]) if self._timers else inf

    @property
    def present(self) -> int:
        """How many nodes are not known to be gone."""
        return len(self._records) - len(self._gone)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def get(self, node: str) -> Record | None:
        """Return the node's record; None if it is unknown."""
        return self._records.get(node)

    def run(self, node: str, inc: int, pid: int) -> Record | None:
        """Return the node's record if this is the known run of it."""
        record = self._records.get(node)
        if record is None or (record.member.inc, record.member.pid) != (inc, pid):
            return None
        return record

    def add(self, record: Record) -> None:
        """Add a record in place of the node's former one; at the limit another node is forgotten."""
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
        """The node whose timer is the next; any other node if that one was forgotten meanwhile."""
        due = self._records.get(self._timers[0][1]) if self._timers else None
        return due or next(iter(self._records.values()), None)

    def pop_due(self, now_s: float) -> Record | None:
        """Return the next node about which something must be decided now; call `changed` after that."""
        while self._timers and self.deadline <= now_s:
            timer_s, node = heappop(self._timers)
            record = self._records.get(node)
            if record is None or record.timer_s != timer_s:
                continue  # its timer was set again, or it was forgotten
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
        """Whether the event is of another process with this node's name that was not reported yet."""
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
    """Whether the event is older than what is known of its node."""
    known = record.member
    if event.inc and known.inc and event.inc != known.inc:
        long_gone = record.is_gone and now.boot_s - record.changed_s > LATE_MAX_S
        return event.inc < known.inc and not (long_gone and event.kind in (Kind.ONLINE, Kind.BEAT))
    if (event.inc, event.pid) != (known.inc, known.pid):
        return event.sent_at <= record.sent_at
    if record.state is MemberState.LEFT:
        # Celery's nodes leave and come online again when they have lost their connection.
        return bool(known.inc) or event.sent_at <= record.sent_at
    if record.state is MemberState.LOST:
        return event.clock <= known.clock and event.sent_at <= record.sent_at
    return False


def is_same_run(record: Record, event: NodeEvent) -> bool:
    """Whether the event is of the run that the record is about."""
    known = record.member
    if (event.inc, event.pid) != (known.inc, known.pid):
        return False
    restarted = event.kind is Kind.ONLINE and not event.inc and event.clock < known.clock
    return record.is_gone or not (restarted and event.sent_at > record.sent_at)


# ---- newcomers -------------------------------------------------------------------------------------
#
# Runs of nodes that sent one event and are not members yet, because anybody can make up a name.
#
# A run becomes a member when it gives a second sign of life: an event that was sent later, and that arrives
# at least half an interval after the first. The broker may be quicker: it is asked at the first sign, about
# at most ASKED_PER_S newcomers, and where it knows the node, by its presence key or its mailbox, the run is
# a member at once.
#
# At NEWCOMERS_MAX the oldest is dropped, and after KEPT_S any is. So a flood of names costs a table of that
# size, displaces no member and is not announced. In a flood that replaces the whole table within an
# interval, a node that starts becomes a member when the broker knows it, or when the flood is over.

NEWCOMERS_MAX = 10_000
KEPT_S = 120.0  # twice the interval that Celery assumes for a node that states none
ASKED_PER_S = 50
APART = 0.5  # intervals


class Newcomers:
    """The runs that sent one sign of life, at most NEWCOMERS_MAX, the oldest first."""

    def __init__(self, newcomers_max: int = NEWCOMERS_MAX) -> None:
        self._newcomers_max = newcomers_max
        self._first: dict[
            str, tuple[NodeEvent, float]
        ] = {}  # the first sign of each and when, the oldest first
        self._asked = 0
        self._asked_since_s = -inf

    def __len__(self) -> int:
        return len(self._first)

    def is_first(self, event: NodeEvent, now_s: float) -> bool:
        """Whether this is the first sign of life of that run; it is remembered then."""
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
        """Whether this is a second sign of life of a run."""
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
        """Whether the broker may be asked about one more node in this second."""
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
