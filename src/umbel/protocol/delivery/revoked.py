"""RevokedTasks: what must not start, as one worker knows it.

There are two sources. The broker's durable record is the truth: it is read before the first dispatch
and with every claim. An entry of it leaves when it expires, never to make room: the record refuses
new entries at its limit, so what comes from there is bounded by it. The other source is what peers
say in `hello`, Celery's above all, which know no record: that is kept as Celery keeps it, for three
hours and up to 50,000 ids, of which the one that arrived first goes first.

Both are joins: whatever order entries come in, and however often, the same is known. The record
joins by the later expiry, because whoever revokes again wants it to hold longer. What peers say
joins by the earlier stamp: what is passed on from node to node arrives later and never earlier than
it was said, so nobody can prolong it by repeating it. An id that has expired leaves a tombstone, so
that a peer that stamps what it hears anew does not make it immortal. So does one that was taken back:
from then on only the record can bring it again, not what a peer has not forgotten.
"""

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import Any

OUTDATED_MAX = 1000
HEARSAY_S = 3 * 3600.0
HEARSAY_MAX = 50_000
TOMBSTONE_S = 2 * HEARSAY_S
STRAYS_MAX = 1000
SWEEP_EVERY_S = 10.0


class RevokedTasks:
    def __init__(self) -> None:
        self.dropped = 0  # ids of peers that had to make room before their time
        self._recorded: dict[str, tuple[float, float]] = {}  # (expires at, recorded at)
        self._headers: dict[str, float] = {}
        self._by_expiry: list[tuple[float, str]] = []
        self._hearsay: dict[str, float] = {}  # when it was revoked, in the order of arrival
        self._tombstones: dict[str, float] = {}  # until when, in the order of expiry
        self._swept_at = 0.0

    # -- the durable record ----------------------------------------------------------------------

    def add(self, task_id: str, expires_at: float, recorded_at: float = 0.0) -> None:
        """Known ids keep the later expiry."""
        known_until, known_at = self._recorded.get(task_id, (0.0, 0.0))
        recorded_at = max(recorded_at, known_at)
        if expires_at > known_until:
            self._recorded.pop(task_id, None)  # to the end: it is the newest
            self._recorded[task_id] = (expires_at, recorded_at)
            self._push(expires_at, task_id)
        elif recorded_at > known_at:
            self._recorded[task_id] = (known_until, recorded_at)

    def add_header(self, header: str, expires_at: float) -> None:
        """Tasks with this stamped header, written `key=value`, must not start."""
        self._headers[header] = max(expires_at, self._headers.get(header, 0.0))

    def take_back(self, task_id: str, now: float) -> None:
        """It may start again."""
        self._recorded.pop(task_id, None)
        self._hearsay.pop(task_id, None)
        self._tombstones.pop(task_id, None)  # to the end: they are kept in the order of expiry
        self._bury(task_id, now)

    def take_back_header(self, header: str) -> None:
        self._headers.pop(header, None)

    def _push(self, expires_at: float, task_id: str) -> None:
        heappush(self._by_expiry, (expires_at, task_id))
        if len(self._by_expiry) > 2 * len(self._recorded) + OUTDATED_MAX:
            # An id that was revoked again left its former expiry behind; most of these are such.
            self._by_expiry = [(until, known) for known, (until, _) in self._recorded.items()]
            heapify(self._by_expiry)

    # -- what peers say --------------------------------------------------------------------------

    def learn(self, task_id: str, age_s: float, now: float) -> bool:
        """A peer says that this was revoked so long ago; whether that is news."""
        if task_id in self._tombstones:
            return False
        stamp = now - min(max(age_s, 0.0), HEARSAY_S)
        known = self._hearsay.get(task_id)
        if known is not None:
            self._hearsay[task_id] = min(known, stamp)
            return False
        while len(self._hearsay) >= HEARSAY_MAX:
            first = next(iter(self._hearsay))
            del self._hearsay[first]
            self.dropped += first not in self._recorded
        self._hearsay[task_id] = stamp
        return task_id not in self._recorded

    def told(self, now: float, limit: int = HEARSAY_MAX) -> list[tuple[str, float]]:
        """What peers are told: the newest ids with their ages, the oldest first."""
        ages: dict[str, float] = {}
        strays = 0
        for task_id in reversed(self._recorded):
            age_s = max(0.0, now - self._recorded[task_id][1])
            if age_s < HEARSAY_S:
                ages[task_id] = age_s
            strays += age_s >= HEARSAY_S
            if len(ages) >= limit or strays > STRAYS_MAX:  # they came about in the order of time
                break
        for task_id in reversed(self._hearsay):
            if len(ages) >= limit:
                break
            ages.setdefault(task_id, max(0.0, now - self._hearsay[task_id]))
        return sorted(ages.items(), key=lambda entry: -entry[1])

    # -- asking ----------------------------------------------------------------------------------

    def covers(self, task_id: str, stamps: Mapping[str, Any] | None = None) -> bool:
        """Whether a task must not start, by its id or by one of its stamped headers."""
        if task_id in self._recorded or task_id in self._hearsay:
            return True
        if not self._headers or not stamps:
            return False
        return any(
            f"{key}={value}" in self._headers
            for key, values in stamps.items()
            for value in (values if isinstance(values, list | tuple) else (values,))
        )

    def expire(self, now: float) -> None:
        while self._by_expiry and self._by_expiry[0][0] <= now:
            expires_at, task_id = heappop(self._by_expiry)
            if self._recorded.get(task_id, (0.0,))[0] == expires_at:
                del self._recorded[task_id]
        if not 0.0 <= now - self._swept_at < SWEEP_EVERY_S:
            self._swept_at = now
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        self._headers = {header: until for header, until in self._headers.items() if until > now}
        for task_id in [one for one, stamp in self._hearsay.items() if now - stamp >= HEARSAY_S]:
            del self._hearsay[task_id]
            self._bury(task_id, now)
        while self._tombstones and next(iter(self._tombstones.values())) <= now:
            del self._tombstones[next(iter(self._tombstones))]

    def _bury(self, task_id: str, now: float) -> None:
        if len(self._tombstones) >= HEARSAY_MAX:
            del self._tombstones[next(iter(self._tombstones))]
        self._tombstones[task_id] = now + TOMBSTONE_S

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._recorded or task_id in self._hearsay

    def __iter__(self) -> Iterator[str]:
        """In the order in which they became known."""
        yield from self._recorded
        yield from (task_id for task_id in self._hearsay if task_id not in self._recorded)

    def __len__(self) -> int:
        return len(self._recorded) + sum(task_id not in self._recorded for task_id in self._hearsay)
