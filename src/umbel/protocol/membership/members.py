"""The table of members: bounded, and it knows which node is to be looked at next.

Each node has one timer at most. A timer that fires too early is set again, so that a
heartbeat, which only ever moves a timer to later, costs nothing here.

Timers fire when they are due or, with an interval, at the next look: what has become due since the
last one is judged together. What others tell of a node does not wait for a look.

At its limit the table forgets the node that has been gone for longest, and only when none is gone
the one that was not heard for longest.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import ceil, inf

from umbel.protocol.leadership.coordination import Instant
from umbel.protocol.membership.events import GONE, Heard, Kind, Member, MemberState
from umbel.protocol.membership.suspicion import believable_freq_s
from umbel.protocol.value import Value

MEMBERS_MAX = 20_000
TIMERS_SPARE = 1000
NAMESAKES_MAX = 100
# No event is on its way for so long: a lower incarnation after that is a clock that was set back.
LATE_MAX_S = 60.0


@dataclass(slots=True)
class Record:
    """What is kept of one node: what others see of it, and what its next judgement needs.

    Names that end in `_s` are instants of the boot clock.
    """

    member: Member
    heard_s: float
    changed_s: float  # when its state began
    jitter: float
    sent_at: float = 0.0  # its newest timestamp
    wait_s: float = inf  # when a suspect's time is over
    probe_s: float = inf  # when a suspect is asked for again
    timer_s: float = inf
    unmarked: bool = False  # its mark at the broker is gone
    ended: bool = False  # the broker knows that its connection ended
    accusers: set[str] = field(default_factory=set)
    unnamed_s: float = inf  # since when views do not name it

    @property
    def node(self) -> str:
        return self.member.node

    @property
    def state(self) -> MemberState:
        return self.member.state

    @property
    def is_gone(self) -> bool:
        return self.member.state in GONE

    @property
    def agreeing(self) -> int:
        return len(self.accusers) + self.unmarked

    def silence(self, now: Instant) -> str:
        return f"silent for {now.boot_s - self.heard_s:.1f} s"


class Looks(Value):
    """When silent and lost nodes are looked for: every `interval_s`; 0: the moment that they are due."""

    interval_s: float
    phase_s: float  # how long after each multiple of the interval

    @classmethod
    def every(cls, interval_s: float, uniform: Callable[[float, float], float]) -> "Looks":
        """Observers that start together do not look at one moment."""
        return cls(interval_s, uniform(0.0, interval_s) if interval_s else 0.0)

    def after(self, due_s: float) -> float:
        """The first look at which this is due."""
        if not self.interval_s or due_s == inf:
            return due_s
        number = ceil((due_s - self.phase_s) / self.interval_s)
        return max(due_s, self.phase_s + number * self.interval_s)


class Members:
    def __init__(self, due_s: Callable[[Record], float], looks: Looks, *, members_max: int) -> None:
        """`due_s` says when something is to be decided about a node; `inf` for never."""
        self.evicted = 0
        self._due_s = due_s
        self._looks = looks
        self._members_max = members_max
        self._records: OrderedDict[str, Record] = OrderedDict()  # the longest unheard first
        self._gone: dict[str, None] = {}  # the longest gone first
        self._timers: list[tuple[float, str]] = []

    @property
    def deadline(self) -> float:
        return self._looks.after(self._timers[0][0]) if self._timers else inf

    @property
    def present(self) -> int:
        """How many are not known to be gone."""
        return len(self._records) - len(self._gone)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def get(self, node: str) -> Record | None:
        return self._records.get(node)

    def run(self, node: str, inc: int, pid: int) -> Record | None:
        """The node's record if this is the run of it that is known."""
        record = self._records.get(node)
        if record is None or (record.member.inc, record.member.pid) != (inc, pid):
            return None
        return record

    def add(self, record: Record) -> None:
        self.forget(record.node)
        if len(self._records) >= self._members_max:
            self.evicted += 1
            self.forget(next(iter(self._gone), None) or next(iter(self._records)))
        self._records[record.node] = record
        self.changed(record)

    def heard(self, record: Record, heard: Heard, now: Instant) -> None:
        known = record.member
        record.heard_s = now.boot_s
        record.sent_at = max(record.sent_at, heard.sent_at)
        record.member = known.replaced(
            software=heard.software or known.software,
            clock=max(known.clock, heard.clock),
            freq_s=believable_freq_s(heard.freq_s, known.freq_s),
            last_heard=now.wall_s,
            observed=heard.observed if heard.kind in (Kind.ONLINE, Kind.BEAT) else known.observed,
        )
        record.unnamed_s = inf
        self._records.move_to_end(record.node)
        self.changed(record)

    def changed(self, record: Record) -> None:
        """Its state or its times are other ones now."""
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
        self._timers = []
        for record in self._records.values():
            record.timer_s = self._due_s(record)
            if record.timer_s < inf:
                self._timers.append((record.timer_s, record.node))
        heapify(self._timers)

    def forget(self, node: str) -> None:
        self._records.pop(node, None)
        self._gone.pop(node, None)

    def first(self) -> Record | None:
        """The node whose timer is the next."""
        return self._records.get(self._timers[0][1]) if self._timers else None

    def pop_due(self, now_s: float) -> Record | None:
        """The next node about which something is to be decided now; call `changed` after that."""
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
    """Other processes under this node's name; `run` is this one's (incarnation, process id)."""

    def __init__(self, run: tuple[int, int]) -> None:
        self._run = run
        self._known: set[tuple[int, int]] = set()

    def is_new(self, heard: Heard) -> bool:
        run = (heard.inc, heard.pid)
        # A former run of this node that still has events on its way is no namesake.
        if run == self._run or 0 < heard.inc < self._run[0] or run in self._known:
            return False
        if len(self._known) >= NAMESAKES_MAX:
            return False
        self._known.add(run)
        return True


def member_from(heard: Heard, now: Instant) -> Member:
    return Member(
        heard.node,
        heard.inc,
        heard.pid,
        MemberState.ALIVE,
        heard.software,
        heard.clock,
        believable_freq_s(heard.freq_s),
        now.wall_s,
        now.wall_s,
        observed=heard.observed,
    )


def is_late(record: Record, heard: Heard, now: Instant) -> bool:
    """Whether the event is older than what is known of its node."""
    known = record.member
    if heard.inc and known.inc and heard.inc != known.inc:
        long_gone = record.is_gone and now.boot_s - record.changed_s > LATE_MAX_S
        return heard.inc < known.inc and not (long_gone and heard.kind in (Kind.ONLINE, Kind.BEAT))
    if (heard.inc, heard.pid) != (known.inc, known.pid):
        return heard.sent_at <= record.sent_at
    if record.state is MemberState.LEFT:
        # Celery's nodes leave and come online again when they have lost their connection.
        return bool(known.inc) or heard.sent_at <= record.sent_at
    if record.state is MemberState.LOST:
        return heard.clock <= known.clock and heard.sent_at <= record.sent_at
    return False


def is_same_run(record: Record, heard: Heard) -> bool:
    known = record.member
    if (heard.inc, heard.pid) != (known.inc, known.pid):
        return False
    began_anew = heard.kind is Kind.ONLINE and not heard.inc and heard.clock < known.clock
    return record.is_gone or not (began_anew and heard.sent_at > record.sent_at)
