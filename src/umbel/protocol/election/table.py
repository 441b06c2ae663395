"""The table of the elections machine: bounded records, one timer each, and which node asks first.

A record has one timer, and only the newest fires: setting it again leaves the old entry in the heap, where
its number no longer matches. The number of records and of request bytes is limited. Closed elections
(tombstones, which hold no request) are removed first. If all are undecided, a new one is refused, and the
sweep returns it later.
"""

import hashlib
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from umbel.protocol.election.events import HandlerEnded, RecordView, Snapshot, Stage
from umbel.protocol.leadership.coordination import (
    NAMESPACE,
    RETENTION_S,
    TTL_S,
    ElectionRequest,
    Instant,
    election_key,
)
from umbel.protocol.machine import Value

SPREAD_S = 0.25
RECORDS_MAX = 10_000
REQUEST_BYTES_MAX = 64 * 2**20
NAME_BYTES_MAX = 128  # of an id, and of a topic
RECORD_BYTES = 400  # memory for a request in addition to its texts


class ElectionSettings(Value):
    """The limits and times of elections on one node."""

    namespace: str = NAMESPACE
    ttl_s: float = TTL_S
    rpc_timeout_s: float = 1.0
    spread_s: float = SPREAD_S
    records_max: int = RECORDS_MAX
    request_bytes_max: int = REQUEST_BYTES_MAX


@dataclass(slots=True)
class Record:
    """One election on this node.

    `deadline_s`: until when a grant is valid; after the end, until when to report the outcome. `over_s`: when
    the request expires, if it was new when this node first saw it. The store knows the exact time; a wall
    clock may be wrong by days. `acted`: the last term in which the handler ran here; a record that replaces a
    tombstone takes it over.
    """

    election_id: str
    key: str
    request: ElectionRequest
    request_bytes: int
    eligible: bool
    over_s: float
    stage: Stage = Stage.WAIT
    term: int = 0
    attempt: int = 0
    acted: int = 0
    winner: str = ""
    deadline_s: float = 0.0
    unheard: int = 0  # number of consecutive claims without a reply
    lost: bool = False
    ended: HandlerEnded | None = None
    timer_s: float | None = None
    token: int = 0


class Table:
    """The elections that this node knows of, and their timers."""

    def __init__(self, namespace: str, records_max: int, request_bytes_max: int) -> None:
        self.records: dict[str, Record] = {}
        self._namespace = namespace
        self._records_max = records_max
        self._request_bytes_max = request_bytes_max
        self._request_bytes = 0
        self._tombstones: dict[str, None] = {}  # oldest first
        self._timers: list[tuple[float, int, str]] = []
        self._tokens = 0
        self._shed = 0

    def add(self, request: ElectionRequest, now_s: float, *, eligible: bool) -> Record | None:
        """Return a new record, which may replace a tombstone; None if undecided records fill the table."""
        known = self.records.get(request.election_id)
        assert known is None or known.stage is Stage.CLOSED, "an undecided record must not be replaced"
        if known is not None:
            self.remove(known)
        size = RECORD_BYTES + len(request.action) + len(request.election_id) + len(request.topic)
        while len(self.records) >= self._records_max and self._tombstones:
            self.remove(self.records[next(iter(self._tombstones))])
        if len(self.records) >= self._records_max or self._request_bytes + size > self._request_bytes_max:
            self._shed += eligible
            return None
        key = election_key(self._namespace, request.election_id)
        record = Record(request.election_id, key, request, size, eligible, now_s + request.expires_s)
        record.acted = 0 if known is None else known.acted
        self.records[record.election_id] = record
        self._request_bytes += size
        return record

    def bury(self, record: Record) -> None:
        """Turn the record into a tombstone, without the request's action."""
        record.stage, record.ended = Stage.CLOSED, None
        record.request = replace(record.request, action=b"")
        self._request_bytes -= record.request_bytes
        record.request_bytes = 0
        self._tombstones[record.election_id] = None

    def remove(self, record: Record) -> None:
        """Remove the record and its timer."""
        self.disarm(record)
        del self.records[record.election_id]
        self._tombstones.pop(record.election_id, None)
        self._request_bytes -= record.request_bytes

    # -- timers ----------------------------------------------------------------------------------

    def arm(self, record: Record, at_s: float) -> None:
        """Set the record's timer; it replaces an earlier timer."""
        self._tokens += 1
        record.timer_s, record.token = at_s, self._tokens
        heapq.heappush(self._timers, (at_s, record.token, record.election_id))
        if len(self._timers) > 2 * len(self.records) + 64:
            self._timers = [timer for timer in self._timers if self._is_newest(timer)]
            heapq.heapify(self._timers)

    def disarm(self, record: Record) -> None:
        """Cancel the record's timer."""
        record.timer_s, record.token = None, 0

    def next_timer(self) -> float | None:
        """Return when the next timer is due; None if there is no timer."""
        while self._timers and not self._is_newest(self._timers[0]):
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def due(self, now_s: float) -> Iterator[Record]:
        """Yield the records whose timers are due, oldest first; each timer is cancelled first."""
        at_s = self.next_timer()
        while at_s is not None and at_s <= now_s:
            record = self.records[heapq.heappop(self._timers)[2]]
            self.disarm(record)
            yield record
            at_s = self.next_timer()

    def _is_newest(self, timer: tuple[float, int, str]) -> bool:
        record = self.records.get(timer[2])
        return record is not None and record.token == timer[1]

    # -- the view --------------------------------------------------------------------------------

    def snapshot(self, *, stopping: bool) -> Snapshot:
        """Return the state of the table."""
        views = tuple(
            RecordView(
                election_id=record.election_id,
                stage=record.stage,
                term=record.term,
                attempt=record.attempt,
                winner=record.winner,
                timer_s=record.timer_s,
                finishing=record.ended is not None,
                request_bytes=record.request_bytes,
            )
            for record in self.records.values()
        )
        return Snapshot(views, self._request_bytes, self._shed, stopping)


def cohort(election_id: str, node: str, nodes: int) -> int:
    """Return the round in which this node asks: about one of N nodes in the first, twice as many in each
    next.
    """
    digest = hashlib.blake2b(f"{election_id}\0{node}".encode(), digest_size=8).digest()
    share = int.from_bytes(digest, "big") / 2**64
    return math.floor(math.log2(share * max(nodes, 1) + 1))


def is_forgotten(request: ElectionRequest, now: Instant) -> bool:
    """Return whether the request is so old that no store remembers its end, even if a clock is wrong by a
    day.
    """
    return now.wall_s > request.asked_at + request.expires_s + RETENTION_S


def flaw(request: ElectionRequest) -> str:
    """Return why no worker takes part in this election; "" if workers do."""
    if not _is_name(request.election_id):
        return f"id must be text of 1 to {NAME_BYTES_MAX} bytes"
    if not _is_name(request.topic):
        return f"topic must be text of 1 to {NAME_BYTES_MAX} bytes"
    if not math.isfinite(request.asked_at):
        return "asked_at must be a finite time"
    if not 0 < request.expires_s <= RETENTION_S / 2:
        return f"expires must be above 0 and at most {RETENTION_S / 2:.0f} s"
    return ""


def _is_name(text: str) -> bool:
    try:
        return 0 < len(text.encode()) <= NAME_BYTES_MAX
    except UnicodeEncodeError:  # half a surrogate pair: JSON can contain it, a key cannot
        return False
