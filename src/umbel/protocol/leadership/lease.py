"""Leases: a lasting leader, under a term that fences its effects; and the recorder, which a lease elects.

A follower asks for the lease when its holder's time expires. A leader renews it, and relies on it for nine
tenths of a ttl, counted from its last successful call to renew. That call is before the store's decision, so
the leader stops before the store's lease ends, as long as the speeds of their clocks differ by less than a
tenth. A leader checks this first at every event.

Limit: a leader can be paused between that check and its effect. Effects that must not happen twice carry the
term, and their receiver compares it (`fenced_publish`).

One Lease object serves one campaign, under a unique holder name. Otherwise a delayed release could end a
lease that the same holder has acquired again under the same term.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from umbel.protocol.leadership.coordination import LEASE_TTL_S, Instant, LeaseReply
from umbel.protocol.machine import Tick, Value

# ---- lease -----------------------------------------------------------------------------------------

SAFE_SHARE = 0.9
RENEW_JITTER = 0.2
RELEASED_WAIT_S = 0.5


class Role(StrEnum):
    """The node's role with respect to the lease."""

    FOLLOWER = "follower"
    CANDIDATE = "candidate"
    LEADER = "leader"


class LeaseSettings(Value):
    """Times of a lease. `wait_s`: the range over which followers spread their claims once the lease is free.

    `ask_every_s` is for followers that are not notified of a release: they ask at least this often.
    """

    ttl_s: float = LEASE_TTL_S
    renew_s: float = 5.0
    rpc_timeout_s: float = 1.0
    wait_s: float = 2.0
    ask_every_s: float | None = None


# ---- events ----------------------------------------------------------------------------------------


class Campaign(Value):
    """This node wants the lease from now on, until Stop. Sent once."""


class AcquireReplied(Value):
    """The store replied to CallAcquire."""

    sent_s: float
    reply: LeaseReply


class LeaseRenewReplied(Value):
    """The store replied to CallRenew."""

    term: int
    sent_s: float
    ok: bool


class ReleaseReceived(Value):
    """The leader announced that it released the lease."""


class StopCampaign(Value):
    """Release the lease if this node holds it, and stop asking for it."""


# ---- effects ---------------------------------------------------------------------------------------


class CallAcquire(Value):
    """Call `acquire_lease(name, holder, ttl_s)`; answer with AcquireReplied."""

    name: str
    holder: str
    ttl_s: float
    sent_s: float


class CallRenewLease(Value):
    """Call `renew_lease(name, holder, term, ttl_s)`; answer with RenewReplied."""

    name: str
    holder: str
    term: int
    ttl_s: float
    sent_s: float


class CallRelease(Value):
    """Call `release_lease(name, holder, term)`; no reply is needed."""

    name: str
    holder: str
    term: int


class LeaseAcquired(Value):
    """This node leads. `data` is the data that the previous leader stored in the lease."""

    term: int
    data: bytes


class LeadershipLost(Value):
    """This node no longer leads, for this reason."""

    term: int
    reason: str


class LeaseReleased(Value):
    """This node has released the lease because it stops."""

    term: int


Event = Campaign | AcquireReplied | LeaseRenewReplied | ReleaseReceived | StopCampaign
Effect = CallAcquire | CallRenewLease | CallRelease | LeaseAcquired | LeadershipLost | LeaseReleased


class Lease:
    """One node's campaign for one lease. `holder_seen` and `term` describe the leader, as far as known."""

    def __init__(
        self,
        name: str,
        holder: str,
        settings: LeaseSettings,
        uniform: Callable[[float, float], float],
    ) -> None:
        self.name = name
        self.role = Role.FOLLOWER
        self.term = 0
        self.holder_seen = ""
        self.give_up_s = 0.0
        self._holder = holder
        self._settings = settings
        self._uniform = uniform
        self._wanted = False
        self._stopped = False
        self._timer_s: float | None = None

    @property
    def deadline(self) -> float | None:
        """Return when the machine wants a Tick, on the boot clock; None for never."""
        if self.role is Role.LEADER:
            return self.give_up_s if self._timer_s is None else min(self._timer_s, self.give_up_s)
        return self._timer_s

    def still_mine(self, now: Instant) -> bool:
        """Return whether this node may act as the leader at this moment."""
        return self.role is Role.LEADER and now.boot_s < self.give_up_s

    def step(self, event: Event | Tick, now: Instant) -> list[Effect]:
        """Process one event; return the calls to the store and the change of leadership."""
        lost: list[Effect] = []
        if self.role is Role.LEADER and now.boot_s >= self.give_up_s:
            lost = self._follow("not renewed in time", now, self._settings.ttl_s * (1 - SAFE_SHARE))
        return [*lost, *self._decide(event, now)]

    def _decide(self, event: Event | Tick, now: Instant) -> list[Effect]:
        match event:
            case Campaign():
                return self._campaign(now)
            case AcquireReplied(sent_s, reply):
                return self._answered(sent_s, reply, now)
            case LeaseRenewReplied():
                return self._renewed(event, now)
            case ReleaseReceived():
                if self.role is Role.FOLLOWER and self._wanted:
                    self.holder_seen = ""
                    self._arm(now, self._uniform(0.0, RELEASED_WAIT_S))
                return []
            case StopCampaign():
                return self._stop()
            case Tick():
                return self._fire(now)

    def _campaign(self, now: Instant) -> list[Effect]:
        if self._wanted or self._stopped:
            return []
        self._wanted = True
        return self._ask(now)

    def _fire(self, now: Instant) -> list[Effect]:
        if self._timer_s is None or now.boot_s < self._timer_s:
            return []
        if self.role is not Role.LEADER:
            return self._ask(now)
        self._arm(now, self._settings.rpc_timeout_s)  # if there is no reply, renew again
        return [CallRenewLease(self.name, self._holder, self.term, self._settings.ttl_s, now.boot_s)]

    def _ask(self, now: Instant) -> list[Effect]:
        self.role = Role.CANDIDATE
        self._arm(now, self._settings.rpc_timeout_s * self._uniform(1.0, 1.5))
        return [CallAcquire(self.name, self._holder, self._settings.ttl_s, now.boot_s)]

    def _answered(self, sent_s: float, reply: LeaseReply, now: Instant) -> list[Effect]:
        if reply.granted and not self._wanted:  # the reply arrived after Stop
            return [CallRelease(self.name, self._holder, reply.term)]
        if self.role is not Role.CANDIDATE:
            return []
        self.term, self.holder_seen = reply.term, reply.holder
        give_up_s = sent_s + SAFE_SHARE * self._settings.ttl_s
        if not reply.granted or now.boot_s >= give_up_s:
            self.role = Role.FOLLOWER
            self._await_turn(now, 0.0 if reply.granted else reply.left_s)
            return []
        self.role, self.give_up_s = Role.LEADER, give_up_s
        self._arm_renewal(sent_s)
        return [LeaseAcquired(reply.term, reply.data)]

    def _renewed(self, replied: LeaseRenewReplied, now: Instant) -> list[Effect]:
        if self.role is not Role.LEADER or replied.term != self.term:
            return []
        if not replied.ok:
            return self._follow("acquired by another node", now, 0.0)
        give_up_s = replied.sent_s + SAFE_SHARE * self._settings.ttl_s
        if give_up_s > self.give_up_s:
            self.give_up_s = give_up_s
            self._arm_renewal(replied.sent_s)
        return []

    def _follow(self, reason: str, now: Instant, left_s: float) -> list[Effect]:
        self.role, self.holder_seen = Role.FOLLOWER, ""
        self._await_turn(now, left_s)
        return [LeadershipLost(self.term, reason)]

    def _await_turn(self, now: Instant, left_s: float) -> None:
        wait_s = left_s + self._uniform(0.0, self._settings.wait_s)
        most_s = self._settings.ask_every_s
        self._arm(now, wait_s if most_s is None else min(wait_s, most_s))

    def _stop(self) -> list[Effect]:
        led = self.role is Role.LEADER
        self._wanted, self._stopped = False, True
        self._timer_s, self.role = None, Role.FOLLOWER
        if not led:
            return []
        self.holder_seen = ""
        return [CallRelease(self.name, self._holder, self.term), LeaseReleased(self.term)]

    def _arm(self, now: Instant, wait_s: float) -> None:
        self._timer_s = now.boot_s + wait_s

    def _arm_renewal(self, sent_s: float) -> None:
        jitter = self._uniform(1 - RENEW_JITTER, 1 + RENEW_JITTER)
        self._timer_s = sent_s + self._settings.renew_s * jitter


# ---- recording -------------------------------------------------------------------------------------
#
# The machine decides when a recorder reads, closes a file, and acknowledges entries of the broker's log. The
# log is the journal: an entry that was read but is not in a finished file is not acknowledged, so a recorder
# that dies at any moment reads it again. The rules:
#
# 1. Read from the last position on. Rows go into one open file.
# 2. Close the file when it is large enough or old enough, or when the recorder stops.
# 3. Acknowledge the last position only when the file is finished: synced and renamed.
# 4. When any part of 2 fails, discard the open file and read again from the acknowledged position.
#
# So every acknowledged event is in a finished file. An event that was written but not acknowledged when the
# recorder died is written twice; readers recognize it by its digest.
#
# The guarantee needs a log that retains entries until they are acknowledged. At its limit the log drops
# entries and counts them, and the recorder stores that number.

LAST_READS_MAX = 20
RETRY_FIRST_S, RETRY_MAX_S = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class RotationSettings:
    """Limits of a file: bytes on disk, rows, and seconds since its first row."""

    file_max_bytes: int = 64 * 1024 * 1024
    file_max_rows: int = 2_000_000
    file_max_age_s: float = 60.0
    idle_poll_s: float = 0.25


@dataclass(frozen=True, slots=True)
class BeginRecording:
    """The position up to which the recorder has acknowledged, as the broker reports it.

    Sent again if the broker has lost its log and started another: the events read so far are written to the
    lake, and reading starts again.
    """

    acknowledged: int


@dataclass(frozen=True, slots=True)
class EntriesRead:
    """The state after a read: rows in the open file, its size, and the position of the last entry."""

    through: int
    rows: int
    file_bytes: int
    more: bool  # there are probably more entries to read now


@dataclass(frozen=True, slots=True)
class FactsAdded:
    """The recorder added rows about itself to the open file."""

    rows: int


@dataclass(frozen=True, slots=True)
class FileFinished:
    """The file is on disk under its final name, with everything read up to that position."""

    through: int


@dataclass(frozen=True, slots=True)
class WritingFailed:
    """Writing failed (full disk, missing folder): the content of the open file is not on disk."""


@dataclass(frozen=True, slots=True)
class StopRecording:
    """Read the remaining entries, then finish the file.

    Reads at most LAST_READS_MAX times, because new events may never end.
    """


@dataclass(frozen=True, slots=True)
class ReadAfter:
    """Read the entries after this position into the open file."""

    place: int


@dataclass(frozen=True, slots=True)
class FinishFile:
    """Close, sync and rename the open file, which has everything up to this position."""

    through: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Acknowledge the log's entries up to this position."""

    place: int


@dataclass(frozen=True, slots=True)
class ForgetFile:
    """Remove the unfinished file and its rows in memory."""


@dataclass(frozen=True, slots=True)
class RecordingEnded:
    """Everything that was read is acknowledged."""


RecordingEvent = BeginRecording | EntriesRead | FactsAdded | FileFinished | WritingFailed | StopRecording
RecordingEffect = ReadAfter | FinishFile | Acknowledge | ForgetFile | RecordingEnded


class Recording:
    """The machine of one recorder: it decides what is read, written and acknowledged."""

    def __init__(self, settings: RotationSettings | None = None) -> None:
        self.deadline: float | None = None
        self.acknowledged = 0
        self.through = 0
        self.rows = 0
        self.failures = 0
        self._settings = settings or RotationSettings()
        self._opened_at: float | None = None
        self._reading = False
        self._finishing = False
        self._stopping = False
        self._last_reads = LAST_READS_MAX

    def step(self, event: RecordingEvent | Tick, now: float) -> list[RecordingEffect]:
        """Process one event; return what to read, finish or acknowledge next."""
        match event:
            case BeginRecording(acknowledged):
                self.acknowledged = self.through = acknowledged
                return self._finish() if self.rows else self._read()
            case EntriesRead(through, rows, file_bytes, more):
                self._reading = False
                self.through = max(self.through, through)
                self._count(rows, now)
                return self._after_reading(file_bytes, more, now)
            case FactsAdded(rows):
                self._count(rows, now)
                return []
            case FileFinished(through):
                return self._finished(through)
            case WritingFailed():
                return self._failed(now)
            case StopRecording():
                return self._stop()
            case Tick():
                return self._tick(now)
            case _:
                assert_never(event)

    def _stop(self) -> list[RecordingEffect]:
        is_first, self._stopping = not self._stopping, True
        if not is_first or self._reading or self._finishing:
            return []
        return self._finish() if self.failures else self._read()

    def _count(self, rows: int, now: float) -> None:
        if rows and self._opened_at is None:
            self._opened_at = now
        self.rows += rows

    def _after_reading(self, file_bytes: int, more: bool, now: float) -> list[RecordingEffect]:
        settings = self._settings
        if self._stopping:
            self._last_reads -= 1
            return self._read() if more and self._last_reads > 0 else self._finish()
        if file_bytes >= settings.file_max_bytes or self.rows >= settings.file_max_rows or self._is_old(now):
            return self._finish()
        if more:
            return self._read()
        self.deadline = now + settings.idle_poll_s
        return []

    def _is_old(self, now: float) -> bool:
        return self._opened_at is not None and now - self._opened_at >= self._settings.file_max_age_s

    def _tick(self, now: float) -> list[RecordingEffect]:
        if self.deadline is None or now < self.deadline:
            return []
        return self._finish() if self._is_old(now) else self._read()

    def _read(self) -> list[RecordingEffect]:
        self.deadline = None
        self._reading = True
        return [ReadAfter(self.through)]

    def _finish(self) -> list[RecordingEffect]:
        self.deadline = None
        if self.rows:
            self._finishing = True
            return [FinishFile(self.through)]
        # Entries without readable rows need no file, so they can be acknowledged.
        acknowledge = self._acknowledge(self.through)
        return [*acknowledge, RecordingEnded()] if self._stopping else [*acknowledge, *self._read()]

    def _finished(self, through: int) -> list[RecordingEffect]:
        assert self._finishing, "a finished file was requested before"
        self._finishing, self._opened_at, self.rows, self.failures = False, None, 0, 0
        acknowledge = self._acknowledge(through)
        return [*acknowledge, RecordingEnded()] if self._stopping else [*acknowledge, *self._read()]

    def _acknowledge(self, place: int) -> list[RecordingEffect]:
        if place <= self.acknowledged:
            return []
        self.acknowledged = place
        return [Acknowledge(place)]

    def _failed(self, now: float) -> list[RecordingEffect]:
        self._reading = self._finishing = False
        self._opened_at, self.rows = None, 0
        self.through = self.acknowledged
        self.failures += 1
        if self._stopping:
            return [ForgetFile(), RecordingEnded()]
        self.deadline = now + min(RETRY_FIRST_S * 2 ** (self.failures - 1), RETRY_MAX_S)
        return [ForgetFile()]
