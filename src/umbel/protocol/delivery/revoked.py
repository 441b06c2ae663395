"""Revoked tasks: which tasks must not start, as one worker knows it, and how nodes exchange this in `hello`.

There are two sources. The broker's durable record is authoritative: it is read before the first dispatch and
with every claim. Reports of other nodes (`mingle`, in Celery's format) are less trusted: they are limited in
number, expire, and never remove an entry of the record.

A node that starts sends its name and the ids it knows to be revoked. Every peer merges them, and replies with
its ids and its clock. The format is Celery's, `{"revoked": [ids], "clock": n}`, because every version of
Celery accepts a list of ids. Umbel's nodes add the ages of the ids, and the members they know, which Celery's
nodes ignore.

Timestamps of other machines are unreliable: clocks differ by hours, and older Celery versions send the uptime
of the machine. So nodes send ages, and a timestamp is interpreted by plausibility:

* a timestamp of the last three hours comes from a wall clock like ours;
* a timestamp in the future, or one that has expired although its owner still has it, comes from a wrong wall
  clock,
or is the uptime of another machine: it counts as now.

"Now" counts only once: the set never accepts a later timestamp for an id that it has, or had.

The replies advance this node's clock past the highest clock among them; an impossible clock is ignored. An
invalid entry does not affect the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

from umbel.protocol.clock import LamportClock

# ---- revoked tasks ---------------------------------------------------------------------------------
#
# An entry of the durable record is removed when it expires, never to make room: the record refuses new
# entries at its limit, so entries from there are limited by it. Reports of peers, above all of Celery's
# nodes, which have no record, are stored as in Celery, for three hours and up to 50,000 ids; beyond that the
# earliest arrival is dropped.
#
# Both sources merge as joins: order and repetition do not change the result. For the record the later expiry
# wins, because a second revoke is meant to last longer. For reports of peers the earlier timestamp wins: a
# forwarded report arrives later than the original, so no node can prolong a report by repeating it.
#
# An expired id leaves a tombstone. Otherwise a peer that puts new timestamps on forwarded reports would make
# it immortal. An id whose revoke was cancelled leaves a tombstone too: then only the record can revoke it
# again, not a peer that still reports it.

OUTDATED_MAX = 1000
HEARSAY_S = 3 * 3600.0
HEARSAY_MAX = 50_000
TOMBSTONE_S = 2 * HEARSAY_S
STRAYS_MAX = 1000
SWEEP_EVERY_S = 10.0


class RevokedTasks:
    """The revoked task ids and stamped headers that one worker knows, from the record and from peers."""

    def __init__(self) -> None:
        self.dropped = 0  # ids from peers that were removed at the limit, before they expired
        self._recorded: dict[str, tuple[float, float]] = {}  # (expires at, recorded at)
        self._headers: dict[str, float] = {}
        self._by_expiry: list[tuple[float, str]] = []
        self._hearsay: dict[str, float] = {}  # by id, when it was revoked, in the order of arrival
        self._tombstones: dict[str, float] = {}  # by id, when it expires, in the order of expiry
        self._swept_at = 0.0

    # -- the durable record ----------------------------------------------------------------------

    def add(self, task_id: str, expires_at: float, recorded_at: float = 0.0) -> None:
        """Add an id of the durable record; if the id is known, the later expiry applies."""
        known_until, known_at = self._recorded.get(task_id, (0.0, 0.0))
        recorded_at = max(recorded_at, known_at)
        if expires_at > known_until:
            self._recorded.pop(task_id, None)  # moves it to the end, because it is now the newest
            self._recorded[task_id] = (expires_at, recorded_at)
            self._push(expires_at, task_id)
        elif recorded_at > known_at:
            self._recorded[task_id] = (known_until, recorded_at)

    def add_header(self, header: str, expires_at: float) -> None:
        """Revoke all tasks with this stamped header, written `key=value`."""
        self._headers[header] = max(expires_at, self._headers.get(header, 0.0))

    def take_back(self, task_id: str, now: float) -> None:
        """Remove an id, so that the task may start, unless the durable record adds the id again."""
        self._recorded.pop(task_id, None)
        self._hearsay.pop(task_id, None)
        self._tombstones.pop(task_id, None)  # moves it to the end, because the order is by expiry
        self._bury(task_id, now)

    def take_back_header(self, header: str) -> None:
        """Remove a stamped header, so that its tasks may start."""
        self._headers.pop(header, None)

    def _push(self, expires_at: float, task_id: str) -> None:
        heappush(self._by_expiry, (expires_at, task_id))
        if len(self._by_expiry) > 2 * len(self._recorded) + OUTDATED_MAX:
            # If an id is revoked again, its old expiry stays in the heap; rebuild the heap when most entries
            # are such.
            self._by_expiry = [(until, known) for known, (until, _) in self._recorded.items()]
            heapify(self._by_expiry)

    # -- what peers report -----------------------------------------------------------------------

    def learn(self, task_id: str, age_s: float, now: float) -> bool:
        """Add an id that a peer reports as revoked `age_s` ago; return whether it was unknown."""
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
        """Return what to report to peers: the newest ids with their ages, oldest first."""
        ages: dict[str, float] = {}
        strays = 0
        for task_id in reversed(self._recorded):
            age_s = max(0.0, now - self._recorded[task_id][1])
            if age_s < HEARSAY_S:
                ages[task_id] = age_s
            strays += age_s >= HEARSAY_S
            if len(ages) >= limit or strays > STRAYS_MAX:  # entries are in chronological order
                break
        for task_id in reversed(self._hearsay):
            if len(ages) >= limit:
                break
            ages.setdefault(task_id, max(0.0, now - self._hearsay[task_id]))
        return sorted(ages.items(), key=lambda entry: -entry[1])

    # -- asking ----------------------------------------------------------------------------------

    def covers(self, task_id: str, stamps: Mapping[str, Any] | None = None) -> bool:
        """Return whether a task must not start, because of its id or one of its stamped headers."""
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
        """Drop expired entries. May be called often: it does the work every SWEEP_EVERY_S."""
        while self._by_expiry and self._by_expiry[0][0] <= now:
            expires_at, task_id = heappop(self._by_expiry)
            if self._recorded.get(task_id, (0.0,))[0] == expires_at:
                del self._recorded[task_id]
        if not 0.0 <= now - self._swept_at < SWEEP_EVERY_S:
            self._swept_at = now
            self._sweep(now)

    def _sweep(self, now: float) -> None:
        self._headers = {header: until for header, until in self._headers.items() if until > now}
        for task_id in [reported for reported, stamp in self._hearsay.items() if now - stamp >= HEARSAY_S]:
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
        """Yield the ids in the order in which they became known."""
        yield from self._recorded
        yield from (task_id for task_id in self._hearsay if task_id not in self._recorded)

    def __len__(self) -> int:
        return len(self._recorded) + sum(task_id not in self._recorded for task_id in self._hearsay)


# ---- mingle ----------------------------------------------------------------------------------------
#
# Revoked ids are merged by rule S2.

TASK_ID_MAX = 1000  # characters
TOLD_MAX = 10_000  # ids in one hello
TOLD_CHARACTERS_MAX = 400_000
INTRODUCED_MAX = 2_000
VERSION = 2


@dataclass(slots=True)
class Learned:
    """The result of one message: ids that were unknown, and the number of unreadable entries."""

    news: list[str] = field(default_factory=list)
    bad: int = 0


def hello(node: str, revoked: RevokedTasks, now: float) -> dict[str, Any]:
    """Return the arguments of the command `hello`."""
    return {"from_node": node, "cver": VERSION, **_told(revoked, now)}


def answer(
    revoked: RevokedTasks, clock: LamportClock, members: Sequence[list[Any]], now: float
) -> dict[str, Any]:
    """Return the reply to a starting node; pass `members` only if that node understands them."""
    reply: dict[str, Any] = {"clock": clock.forward(), **_told(revoked, now)}
    return reply | {"members": list(members[:INTRODUCED_MAX])} if members else reply


def take_in(message: Mapping[str, Any], revoked: RevokedTasks, now: float) -> Learned:
    """Merge the revoked ids of a hello, or of a reply to it."""
    ids, ages = message.get("revoked"), message.get("ages")
    learned = Learned()
    entries: Sequence[tuple[Any, Any]]
    if isinstance(ids, Mapping):
        entries = [(task_id, _age_of_stamp(stamp, now)) for task_id, stamp in ids.items()]
    elif isinstance(ids, list | tuple):
        if not isinstance(ages, list | tuple) or len(ages) != len(ids):
            ages = [0.0] * len(ids)
        entries = list(zip(ids, ages, strict=True))
    else:
        learned.bad += ids is not None
        return learned
    for task_id, age_s in entries[-HEARSAY_MAX:]:
        if not isinstance(task_id, str) or not 0 < len(task_id) <= TASK_ID_MAX or not _is_number(age_s):
            learned.bad += 1
        elif revoked.learn(task_id, age_s, now):
            learned.news.append(task_id)
    return learned


def adjust_clock(clock: LamportClock, answers: Mapping[str, Any]) -> None:
    """Advance the clock past the highest clock of all replies."""
    for reply in answers.values():
        if isinstance(reply, Mapping) and reply.get("clock") is not None:
            clock.adjust(reply["clock"])


def _told(revoked: RevokedTasks, now: float) -> dict[str, Any]:
    entries = revoked.told(now, TOLD_MAX)
    room = TOLD_CHARACTERS_MAX
    sent: list[tuple[str, float]] = []
    for task_id, age_s in reversed(entries):  # the newest first, because they matter most
        room -= len(task_id)
        if room < 0:
            break
        sent.append((task_id, round(age_s, 3)))
    sent.reverse()
    return {"revoked": [task_id for task_id, _ in sent], "ages": [age_s for _, age_s in sent]}


def _age_of_stamp(stamp: Any, now: float) -> float | None:
    """Return the age of a timestamp by our clock; None if it is not a timestamp."""
    if isinstance(stamp, list | tuple):
        stamp = stamp[0] if stamp else None
    if not _is_number(stamp):
        return None
    age_s = now - stamp
    return age_s if 0.0 <= age_s < HEARSAY_S else 0.0


def _is_number(value: Any) -> bool:
    return (type(value) is float or type(value) is int) and -1e18 < value < 1e18  # NaN fails every comparison
