"""Records: what is written to Umbel's streams, and what their readers know from it.

Every reader of a stream sees the same entries in the same order, so all know the same in the
end. Entries are small JSON texts; one that cannot be read is passed over, because a stream cannot
be mended and the next reader must not stop at it.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import msgspec

from umbel.brokers.interface.queue_control import Pause
from umbel.errors import RevokesFull
from umbel.protocol.leadership.coordination import RETENTION_S, ElectionRecord
from umbel.wire.revoke import Revoke
from umbel.wire.values import UNREADABLE

log = logging.getLogger("umbel.brokers.amqp")
RecordT = TypeVar("RecordT")

STARTS_MAX = 100_000
USED_MAX = 1_000_000
ENDED, FREE = "ended", "free"
TELL_AGAIN_AFTER = 5_000  # entries of the facts; the stream keeps many times as many


class View(Protocol):
    """What one reader knows. `apply` is called with every entry once, in order."""

    def apply(self, offset: int, body: bytes) -> None: ...

    def begin_anew(self) -> None:
        """The stream was lost, and another one of its name begins: keep what is true all the same."""
        ...


class RevokeView:
    """Every revoke that has not expired, by the offset of its newest entry."""

    def __init__(self) -> None:
        self.cursor = 0
        self._before = 0  # entries of streams that were lost
        self._entries: dict[tuple[str, str], tuple[int, Revoke]] = {}
        self._order: list[tuple[int, Revoke]] = []

    def apply(self, offset: int, body: bytes) -> None:
        self.cursor = self._before + offset + 1
        revoke = _decoded(_revoke_decoder, body)
        if revoke is None:
            return
        self._entries[revoke.task_id, revoke.header] = (self.cursor, revoke)
        self._order.append((self.cursor, revoke))

    def begin_anew(self) -> None:
        """What was revoked stays revoked, and the cursor goes on rising."""
        self._before = self.cursor

    def after(self, cursor: int, now: float) -> list[Revoke]:
        if cursor >= self.cursor:
            return []
        first = bisect_right(self._order, cursor, key=lambda entry: entry[0])
        return [
            revoke
            for place, revoke in self._order[first:]
            if revoke.is_news(now) and self._entries[revoke.task_id, revoke.header][0] == place
        ]

    def check_room(self, new: Sequence[Revoke], limit: int, now: float) -> None:
        if self.count_with(new, now) > limit:
            raise RevokesFull(
                f"the revoke record is at its limit of {limit:,} entries: {len(new)} more were not "
                "recorded; raise revokes_max, shorten revoke_retention, or purge the queue instead"
            )

    def count_with(self, new: Sequence[Revoke], now: float) -> int:
        """How many entries would stand with these."""
        standing = {key for key, (_, revoke) in self._entries.items() if revoke.expires_at > now}
        return len(standing | {(revoke.task_id, revoke.header) for revoke in new if revoke.expires_at > now})

    def sweep(self, now: float) -> None:
        self._entries = {key: entry for key, entry in self._entries.items() if entry[1].expires_at > now}
        self._order = sorted(self._entries.values(), key=lambda entry: entry[0])


class Start(msgspec.Struct, frozen=True, gc=False):
    """This message was started so often; 0 when its count ended."""

    queue: str
    message: str
    starts: int


class StartsView:
    """The counted starts of messages that may have taken a worker down."""

    def __init__(self) -> None:
        self._starts: dict[tuple[str, str], int] = {}

    def apply(self, offset: int, body: bytes) -> None:
        start = _decoded(_start_decoder, body)
        if start is None:
            return
        key = (start.queue, start.message)
        self._starts.pop(key, None)
        if start.starts:
            self._starts[key] = start.starts
            if len(self._starts) > STARTS_MAX:  # the oldest suspect gets a fresh chance
                del self._starts[next(iter(self._starts))]

    def begin_anew(self) -> None:
        """A count that is lost elsewhere is not lost here."""

    def count(self, queue: str, message: str) -> int:
        return self._starts.get((queue, message), 0)


class Use(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """By whom a signature is used: a name for one attempt, or ENDED, or FREE."""

    mark: str
    user: str
    expires_at: float = 0.0


class SignaturesView:
    """Who was the first to use each signature. Past USED_MAX the oldest is forgotten."""

    def __init__(self) -> None:
        self.attempts: dict[str, dict[str, bool]] = {}  # by user, while its entries are read: who was first
        self._used: dict[str, Use] = {}

    def apply(self, offset: int, body: bytes) -> None:
        use = _decoded(_use_decoder, body)
        if use is None:
            return
        known = self._used.get(use.mark)
        if (attempt := self.attempts.get(use.user)) is not None:
            attempt[use.mark] = known is None
        if use.user == FREE:
            if known is not None and known.user != ENDED:
                del self._used[use.mark]
        elif known is None:
            self._used[use.mark] = use
            if len(self._used) > USED_MAX:
                del self._used[next(iter(self._used))]
        elif use.user == ENDED:
            self._used[use.mark] = Use(use.mark, ENDED, known.expires_at)

    def begin_anew(self) -> None:
        """What was used stays used."""

    def user(self, mark: str) -> str | None:
        used = self._used.get(mark)
        return None if used is None else used.user

    def sweep(self, now: float) -> None:
        self._used = {mark: use for mark, use in self._used.items() if use.expires_at > now}


class ClockView:
    """The highest mark that was ever written."""

    def __init__(self) -> None:
        self.mark = 0

    def apply(self, offset: int, body: bytes) -> None:
        if body.isdigit():
            self.mark = max(self.mark, int(body))

    def begin_anew(self) -> None:
        """Time does not go back."""


class QueueFact(msgspec.Struct, frozen=True, tag="queue"):
    """Somebody made this task queue."""

    name: str


class PauseFact(msgspec.Struct, frozen=True, tag="pause"):
    """A queue is paused, or with None as its pause: it is resumed."""

    name: str
    pause: Pause | None


class RecorderFact(msgspec.Struct, frozen=True, tag="recorder"):
    """A recorder has read the event log up to here; None: it is not interested any more."""

    name: str
    acknowledged: int | None
    lost: int = 0


class LeaseFact(msgspec.Struct, frozen=True, tag="lease"):
    """Who took a lease, for how long at a time; whether it still holds, its hold queue tells."""

    name: str
    holder: str
    term: int
    ttl_s: float
    data: bytes
    version: int


class ElectionFact(msgspec.Struct, frozen=True, tag="election"):
    """One election as its holder, or who opened it, last wrote it."""

    key: str
    record: ElectionRecord
    version: int


class MarkFact(msgspec.Struct, frozen=True, tag="mark"):
    """Nothing but a place in the stream: who reads its own mark has read all that came before."""

    nonce: str


class LogEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One event of the event log."""

    recorded_at: float
    routing_key: str  # "": a recorder was registered
    body: str


Fact = QueueFact | PauseFact | RecorderFact | LeaseFact | ElectionFact | MarkFact
Changed = LeaseFact | ElectionFact


class FactsView:
    """The last word on each thing.

    A lease or an election is changed by who knows its last version: the entry names the next one,
    and of two that name the same, the first in the stream counts. All readers see one order, so
    all agree which one that was, and its writer learns it by reading on: a comparison and a
    change in one step, which RabbitMQ itself does not have.
    """

    def __init__(self) -> None:
        self.queues: set[str] = set()
        self.paused: dict[str, Pause] = {}
        self.pauses_heard = 0  # and resumes
        self.on_pause: Callable[[], None] = lambda: None
        self.recorders: dict[str, int] = {}
        self.lost = 0
        self.leases: dict[str, LeaseFact] = {}
        self.elections: dict[str, ElectionRecord] = {}
        self.last_term = 0
        self.awaited: dict[str, Callable[[], None]] = {}  # by mark: what to do when it is read
        self._told: dict[tuple[str, str], int] = {}
        self._offset = 0
        self._versions: dict[tuple[str, str], int] = {}
        self._attempts: dict[Changed, bool] = {}

    def apply(self, offset: int, body: bytes) -> None:
        self._offset = offset
        fact = _decoded(_fact_decoder, body)
        if fact is None:
            return
        match fact:
            case QueueFact(name):
                self._told["queue", name] = offset
                self.queues.add(name)
            case PauseFact(name, pause):
                self.paused.pop(name, None)
                self._told.pop(("pause", name), None)
                if pause is not None:
                    self.paused[name], self._told["pause", name] = pause, offset
                self.pauses_heard += 1
                self.on_pause()
            case RecorderFact(name, acknowledged, lost):
                self.lost += lost
                self._told["recorder", name] = offset
                if acknowledged is None:
                    self.recorders.pop(name, None)
                    del self._told["recorder", name]
                else:
                    self.recorders[name] = max(acknowledged, self.recorders.get(name, 0))
            case LeaseFact(name, _, term):
                self.last_term = max(self.last_term, term)
                if self._is_next(fact):
                    self._told["lease", name] = offset
                    self.leases[name] = fact
            case MarkFact(nonce):
                self.awaited.pop(nonce, lambda: None)()
            case ElectionFact(key, record):
                self.last_term = max(self.last_term, record.term)
                if self._is_next(fact):
                    self.elections[key] = record

    def begin_anew(self) -> None:
        """Nobody else knows any of it any more; terms go on rising all the same."""
        for forgotten in (
            self.queues,
            self.paused,
            self.recorders,
            self.leases,
            self.elections,
            self._told,
            self._versions,
        ):
            forgotten.clear()

    def next_version(self, kind: str, name: str) -> int:
        return self._versions.get((kind, name), 0) + 1

    @contextmanager
    def attempt(self, fact: "Changed") -> Iterator[Callable[[], bool]]:
        """While it is written and read again; what is given tells whether it counted."""
        self._attempts[fact] = False
        try:
            yield lambda: self._attempts[fact]
        finally:
            del self._attempts[fact]

    def fading(self) -> list[Fact]:
        """Facts written so long ago that they should be written again. Elections may expire."""
        old = [key for key, offset in self._told.items() if offset < self._offset - TELL_AGAIN_AFTER]
        facts: list[Fact] = []
        for kind, name in old:
            if kind == "queue":
                facts.append(QueueFact(name))
            elif kind == "pause":
                facts.append(PauseFact(name, self.paused[name]))
            elif kind == "recorder":
                facts.append(RecorderFact(name, self.recorders[name]))
            else:
                lease = self.leases[name]
                facts.append(msgspec.structs.replace(lease, version=lease.version + 1))
        return facts

    def sweep(self, now: float) -> None:
        ended = [key for key, record in self.elections.items() if record.changed_at <= now - RETENTION_S]
        for key in ended:
            del self.elections[key]
            del self._versions["election", key]

    def _is_next(self, fact: "Changed") -> bool:
        """Whether it counts. Of what fell off the stream's end, or was swept, any version is the next."""
        place = ("lease", fact.name) if isinstance(fact, LeaseFact) else ("election", fact.key)
        known = self._versions.get(place)
        if known is not None and fact.version != known + 1 and not self._is_anew(fact):
            return False
        self._versions[place] = fact.version
        if fact in self._attempts:
            self._attempts[fact] = True
        return True

    def _is_anew(self, fact: "Changed") -> bool:
        """Written by one who has forgotten an election that we still know; time tells, as it told him."""
        if isinstance(fact, LeaseFact):
            return False
        known = self.elections[fact.key]
        return fact.record.changed_at >= known.changed_at + RETENTION_S


def _decoded(decoder: msgspec.json.Decoder[RecordT], body: bytes) -> RecordT | None:
    try:
        return decoder.decode(body)
    except UNREADABLE as error:  # written by another version, or by somebody else
        extra = {"why": str(error), "begins": body[:80].decode(errors="replace")}
        log.warning(
            "unreadable entry in a cluster record of RabbitMQ ignored; does another Umbel version run?",
            extra=extra,
        )
        return None


_revoke_decoder = msgspec.json.Decoder(Revoke)
_start_decoder = msgspec.json.Decoder(Start)
_use_decoder = msgspec.json.Decoder(Use)
_fact_decoder: msgspec.json.Decoder[Fact] = msgspec.json.Decoder(Fact)
encode_record = msgspec.json.Encoder().encode
