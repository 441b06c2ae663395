"""Registers: of every task and attempt, the greatest event of each type, in the total order of the merge.

Tasks with more events than fit into memory are reduced in pieces first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from umbel.events.merge import DIGESTS_MAX
from umbel.events.precedence import ATTEMPT_STEP, ENDED, ENDINGS, STRENGTHS
from umbel.events.types import RETRIES_MAX, SLOTS
from umbel.fold.buckets import hash_of
from umbel.fold.columns import NOTHING, Events, Flags, Ints, Rows, picked, starts_of

# ---- order -----------------------------------------------------------------------------------------
#
# Events by subject, and those of one subject in the total order of the merge.
#
# The order is (attempt, clock, time, hostname, pid, digest), then the moment of recording, so that the
# first record of an event that was recorded twice comes first. A subject is a task, or a node for events
# without a task. Subject, attempt and clock distinguish nearly all events; only events that are equal in
# these are compared by the rest.

ATTEMPT_BITS = 16
assert RETRIES_MAX < 2**ATTEMPT_BITS


@dataclass(frozen=True, slots=True)
class Ordered:
    """`rows`: the rows of the events in order. `keys`: in that order, subject and attempt as one number."""

    subjects: pa.Array
    """The distinct subjects; a subject's number is its position here."""
    rows: Ints
    keys: Ints

    @property
    def numbers(self) -> Ints:
        """The subject of each event, in order."""
        return self.keys >> ATTEMPT_BITS


def ordered(events: Events, subject: pa.Array) -> Ordered:
    """Sort events by subject and, within a subject, in the total order of the merge."""
    encoded = subject.dictionary_encode()
    keys = encoded.indices.to_numpy().astype(np.int64) << ATTEMPT_BITS | attempts_of(events)
    clock = events.ints("clock")
    rows = np.lexsort((clock, keys))
    _settle_ties(events, rows, keys, clock)
    return Ordered(encoded.dictionary, rows, keys[rows])


def names_attempt(events: Events) -> Flags:
    """Which events name a valid attempt."""
    retries = events.ints("retries")
    return events.has("retries") & (retries >= 0) & (retries <= RETRIES_MAX)


def attempts_of(events: Events) -> Ints:
    """The attempt that an event is ordered by: 0 where it names none."""
    return np.where(names_attempt(events), events.ints("retries"), 0)


def _settle_ties(events: Events, rows: Ints, keys: Ints, clock: Ints) -> None:
    """Sort events that are equal so far by the rest of the order, in place."""
    keys, clock = keys[rows], clock[rows]
    is_like_last = np.zeros(len(rows), dtype=bool)
    is_like_last[1:] = (keys[1:] == keys[:-1]) & (clock[1:] == clock[:-1])
    is_tied = is_like_last.copy()
    is_tied[:-1] |= is_like_last[1:]
    places = np.flatnonzero(is_tied)
    if not len(places):
        return
    run = np.cumsum(~is_like_last)[places]
    tied = rows[places]
    rest = ("recorded_at", "digest", "pid")
    by = np.lexsort(
        (
            *(events.ints(name)[tied] for name in rest),
            _alphabetical(events.text("hostname").take(pa.array(tied))),
            events.ints("timestamp")[tied],
            run,
        )
    )
    rows[places] = tied[by]


def _alphabetical(texts: pa.Array) -> Ints:
    """Numbers in the same order as the texts."""
    encoded = texts.dictionary_encode()
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    found: Ints = rank[encoded.indices.to_numpy()]
    return found


# ---- registers -------------------------------------------------------------------------------------
#
# Of every task, and of every attempt, the greatest event of each type.
#
# Events are in the order of the merge, so the greatest of a type is the last: each event is written into
# its register in turn, and the last assignment stays. Deliveries and endings are counted by digest, so a
# repeated event counts once.
#
# An event without an attempt is assigned to one by a rule that needs the task's newest receipt
# (`umbel.events.precedence`). So such events are joined per task first, and only the newest of each type is
# assigned to an attempt.

SLOT = {slot: place for place, slot in enumerate(SLOTS)}
ENDINGS_MAX = len(ENDINGS) * DIGESTS_MAX
_STRONGEST_FIRST = ("succeeded", "failed", "revoked")
_RECEIVED = SLOT["received"]
_STRENGTH = np.array([STRENGTHS[slot] for slot in SLOTS])
_IS_ENDING = np.array([slot in ENDINGS for slot in SLOTS])


@dataclass(frozen=True, slots=True)
class OwnerRegisters:
    """Registers of owners, which are tasks or attempts: one line per owner, one column per type of event."""

    events: Events
    task: Ints
    """The number of the owner's task."""
    rows: Ints
    """The greatest event of each type, -1 for none."""
    told: Ints
    """The attempt that this event names; 0 if none."""
    attempt: Ints
    """The attempt that the event belongs to, as named or as derived."""
    n_deliveries: Ints
    n_terminal: Ints
    _by_slot: dict[str, Rows] = field(default_factory=dict)

    def of(self, slot: str) -> Rows:
        """The events of one type."""
        if slot not in self._by_slot:
            self._by_slot[slot] = Rows(self.events, np.ascontiguousarray(self.rows[:, SLOT[slot]]))
        return self._by_slot[slot]

    def told_by(self, slot: str) -> Ints:
        """The attempt that the event of this type names; 0 if none."""
        return self.told[:, SLOT[slot]]

    def attempt_of(self, slot: str) -> Ints:
        """The attempt that the event of this type belongs to."""
        return self.attempt[:, SLOT[slot]]

    def at(self, lines: Ints) -> "OwnerRegisters":
        """The registers of these owners; a line that is named twice is there twice."""
        return OwnerRegisters(
            self.events,
            self.task[lines],
            self.rows[lines],
            self.told[lines],
            self.attempt[lines],
            self.n_deliveries[lines],
            self.n_terminal[lines],
        )

    def winner(self) -> Ints:
        """The type of the event that decides each owner's state; no two types have the same rank."""
        epoch = self.attempt.copy()
        epoch[:, SLOT["retried"]] += 1
        rank = np.where(_IS_ENDING, ENDED, epoch * ATTEMPT_STEP) + _STRENGTH
        rank[self.rows < 0] = NOTHING
        best: Ints = rank.argmax(axis=1)
        return best


@dataclass(frozen=True, slots=True)
class JoinedRegisters:
    """Registers of tasks and of their attempts."""

    tasks: OwnerRegisters
    attempts: OwnerRegisters
    attempt: Ints
    """The number of each attempt."""
    owner: Ints
    """The line in `tasks` of each attempt's task."""
    firsts: Ints
    """The earliest time of each type of each task, in microseconds; valid where there is an event."""


@dataclass(frozen=True, slots=True)
class _TaskEvents:
    """Events of tasks whose type has a register, in order. Tasks are numbered from 0."""

    rows: Ints
    task: Ints
    slot: Ints
    attempt: Ints
    said: Flags
    clock: Ints
    digest: Ints


def slots_of(events: Events) -> Ints:
    """The number of each event's register, -1 for none."""
    found = pc.index_in(events.column("slot"), value_set=pa.array(SLOTS)).fill_null(NOTHING)
    places: Ints = found.to_numpy(zero_copy_only=False).astype(np.int64)
    return places


def joined(events: Events, order: Ordered) -> JoinedRegisters:
    """Compute the registers of all tasks and attempts from ordered events."""
    events_of_tasks, tasks = _task_events(events, order)
    newest = _latest(events_of_tasks.task, events_of_tasks.slot, len(tasks))
    attempt = _belonging(events_of_tasks, newest)
    dealt, unsaid = _dealt(events_of_tasks, len(tasks))
    keys, number = numbered(events_of_tasks.task[dealt] << ATTEMPT_BITS | attempt[dealt])
    owner = np.zeros(len(events_of_tasks.rows), dtype=np.int64)
    owner[dealt] = number
    latest = _latest(number, events_of_tasks.slot[dealt], len(keys))
    deliveries, endings = _counts(events_of_tasks, owner, unsaid, len(keys))
    numbers, task = keys & (2**ATTEMPT_BITS - 1), keys >> ATTEMPT_BITS
    whole = OwnerRegisters(
        events,
        tasks,
        _chosen(events_of_tasks.rows, newest),
        picked(events_of_tasks.attempt, newest),
        picked(attempt, newest),
        np.minimum(_sums(task, deliveries, len(tasks)), DIGESTS_MAX),
        np.minimum(_sums(task, endings, len(tasks)), ENDINGS_MAX),
    )
    single = OwnerRegisters(
        events,
        tasks[task],
        _chosen(events_of_tasks.rows[dealt], latest),
        picked(events_of_tasks.attempt[dealt], latest),
        np.repeat(numbers[:, None], len(SLOTS), axis=1),
        np.minimum(deliveries, DIGESTS_MAX),
        np.minimum(endings, ENDINGS_MAX),
    )
    return JoinedRegisters(whole, single, numbers, task, _firsts(events, events_of_tasks, newest))


def numbered(keys: Ints) -> tuple[Ints, Ints]:
    """The distinct keys, sorted, and for each key its position among them."""
    if (keys[1:] < keys[:-1]).any():
        distinct, number = np.unique(keys, return_inverse=True)
        return distinct, number
    is_new = np.ones(len(keys), dtype=bool)
    is_new[1:] = keys[1:] != keys[:-1]
    return keys[is_new], np.cumsum(is_new) - 1


def _task_events(events: Events, order: Ordered) -> tuple[_TaskEvents, Ints]:
    slot = slots_of(events)[order.rows]
    wanted = slice(None) if (slot >= 0).all() else slot >= 0
    rows, keys = order.rows[wanted], order.keys[wanted]
    tasks, task = numbered(keys >> ATTEMPT_BITS)
    attempt = keys & (2**ATTEMPT_BITS - 1)
    clock, digest = events.ints("clock")[rows], events.ints("digest")[rows]
    return _TaskEvents(rows, task, slot[wanted], attempt, names_attempt(events)[rows], clock, digest), tasks


def _latest(owner: Ints, slot: Ints, count: int) -> Ints:
    """For each owner and type, the position of the last event, -1 for none."""
    latest = np.full(count * len(SLOTS), NOTHING)
    latest[owner * len(SLOTS) + slot] = np.arange(len(owner))
    return latest.reshape(count, len(SLOTS))


def _belonging(given: _TaskEvents, newest: Ints) -> Ints:
    """The attempt of each event: as named, else that of the task's newest receipt or the one before it."""
    if given.said.all():
        return given.attempt
    receipt = newest[:, _RECEIVED][given.task]
    last, since = picked(given.attempt, receipt), picked(given.clock, receipt)
    read = np.where(given.clock >= since, last, np.maximum(last - 1, 0))
    return np.where(given.said, given.attempt, np.where(receipt < 0, 0, read))


def _dealt(given: _TaskEvents, count: int) -> tuple[Ints, Ints]:
    """The events that go into registers of attempts; and the newest event without an attempt of each task
    and type."""
    if given.said.all():
        return np.arange(len(given.rows)), np.full((count, len(SLOTS)), NOTHING)
    without = np.flatnonzero(~given.said)
    last = _latest(given.task[without], given.slot[without], count)
    unsaid = _chosen(without, last)
    is_dealt = given.said.copy()
    is_dealt[unsaid[unsaid >= 0]] = True
    return np.flatnonzero(is_dealt), unsaid


def _counts(given: _TaskEvents, owner: Ints, unsaid: Ints, owners: int) -> tuple[Ints, Ints]:
    """Deliveries and endings of each attempt. Events without an attempt count together: deliveries in the
    attempt of the newest one, endings in that of the strongest one."""
    strongest = unsaid[:, SLOT[_STRONGEST_FIRST[0]]]
    for slot in _STRONGEST_FIRST[1:]:
        strongest = np.where(strongest < 0, unsaid[:, SLOT[slot]], strongest)
    is_delivery, is_ending = given.slot == _RECEIVED, _IS_ENDING[given.slot]
    return (
        _distinct(given, np.flatnonzero(is_delivery), owner, unsaid[:, _RECEIVED], owners),
        _distinct(given, np.flatnonzero(is_ending), owner, strongest, owners),
    )


def _distinct(given: _TaskEvents, places: Ints, owner: Ints, standing: Ints, owners: int) -> Ints:
    """How many distinct digests each attempt has among the events at these places. `standing`: by task, the
    event in whose attempt events without an attempt are counted."""
    into = np.where(given.said[places], owner[places], picked(owner, standing[given.task[places]]))
    counts = np.bincount(into, minlength=owners)
    several = np.flatnonzero(counts[into] > 1)
    if not len(several):
        return counts
    these = places[several]
    source = (given.task[these] << ATTEMPT_BITS | given.attempt[these]) << 1 | given.said[these]
    digest = given.digest[these]
    by = np.lexsort((digest, source))
    again = np.flatnonzero((source[by][1:] == source[by][:-1]) & (digest[by][1:] == digest[by][:-1])) + 1
    return counts - np.bincount(into[several[by[again]]], minlength=owners)


def _firsts(events: Events, given: _TaskEvents, newest: Ints) -> Ints:
    at = events.ints("timestamp")[given.rows]
    firsts = picked(at, newest).reshape(-1)
    cell = given.task * len(SLOTS) + given.slot
    earlier = np.flatnonzero(newest.reshape(-1)[cell] != np.arange(len(cell)))
    np.minimum.at(firsts, cell[earlier], at[earlier])
    return firsts.reshape(newest.shape)


def _chosen(values: Ints, places: Ints) -> Ints:
    """Values at places; -1 where there is no place."""
    found = picked(values, places)
    found[places < 0] = NOTHING
    return found


def _sums(group: Ints, values: Ints, count: int) -> Ints:
    return np.bincount(group, values, count).astype(np.int64)


# ---- crowded ---------------------------------------------------------------------------------------
#
# Tasks with more events than fit into memory at once.
#
# The tables `tasks` and `attempts` need few of a task's events: of each type and attempt the greatest, the
# earliest, and as many as are counted. So its events are reduced to these, part by part. Its timeline is
# made in stretches of the order, each of which fits into memory.

BINS = 1024
_COUNTED = [SLOT["received"], *(SLOT[slot] for slot in ("succeeded", "failed", "revoked"))]


def bins_of(ids: pa.ChunkedArray, buckets: int) -> Ints:
    """The bin of each id within its bucket, from 0 to BINS - 1."""
    return np.mod(hash_of(ids.combine_chunks()).astype(np.int64) // buckets, BINS)


def bin_sizes(parts: Iterable[pa.ChunkedArray], buckets: int) -> Ints:
    """The number of events in each bin."""
    sizes = np.zeros(BINS, dtype=np.int64)
    for ids in parts:
        sizes += np.bincount(bins_of(ids, buckets), minlength=BINS)
    return sizes


def within(ids: pa.ChunkedArray, bins: range, buckets: int) -> pa.Array:
    """A filter for the ids in these bins."""
    place = bins_of(ids, buckets)
    return pa.array((place >= bins.start) & (place < bins.stop))


def shared_out(sizes: Ints, most: int) -> list[range]:
    """Ranges of neighbouring bins with at most `most` events each; a single bin may have more."""
    found: list[range] = []
    start = total = 0
    for place, size in enumerate(sizes.tolist()):
        if total and total + size > most:
            found.append(range(start, place))
            start, total = place, 0
        total += size
    return [*found, range(start, len(sizes))] if total else found


def large_tasks(parts: Sequence[pa.ChunkedArray], most: int) -> list[str]:
    """Tasks that have more events than that, from the ids of all events."""
    ids = pa.chunked_array([chunk for part in parts for chunk in part.cast(pa.string()).chunks], pa.string())
    counts = pc.value_counts(ids)
    large: list[str] = counts.field("values").filter(pc.greater(counts.field("counts"), most)).to_pylist()
    return large


def reduced(table: pa.Table) -> pa.Table:
    """Only the events that the tables `tasks` and `attempts` need. Parts of a task can be reduced separately,
    and then together."""
    events = Events(table)
    order = ordered(events, events.column("uuid"))
    slot = slots_of(events)[order.rows]
    has_register = slot >= 0
    rows, slot = order.rows[has_register], slot[has_register]
    owner = order.keys[has_register] << 1 | names_attempt(events)[rows]
    _, cell = numbered(owner * len(SLOTS) + slot)
    is_kept = np.zeros(len(rows), dtype=bool)
    last = np.zeros(int(cell.max()) + 1 if len(cell) else 0, dtype=np.int64)
    last[cell] = np.arange(len(cell))
    is_kept[last] = True
    by_time = np.lexsort((events.ints("timestamp")[rows], cell))
    is_kept[by_time[starts_of(cell[by_time])]] = True
    is_kept[_counted(events.ints("digest")[rows], cell, np.isin(slot, _COUNTED))] = True
    return table.take(pa.array(np.sort(rows[is_kept])))


def _counted(digest: Ints, cell: Ints, is_counted: Flags) -> Ints:
    """One event for each digest, at most as many of each cell as are counted."""
    places = np.flatnonzero(is_counted)
    places = places[np.lexsort((digest[places], cell[places]))]
    is_new = np.ones(len(places), dtype=bool)
    is_new[1:] = (cell[places][1:] != cell[places][:-1]) | (digest[places][1:] != digest[places][:-1])
    places = places[is_new]
    since = starts_of(cell[places])
    rank = np.arange(len(places)) - np.repeat(since, np.diff(np.append(since, len(places))))
    return places[rank < ENDINGS_MAX]


Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Keys:
    """The beginning of the order of each event: attempt, clock and time."""

    attempt: Ints
    clock: Ints
    at: Ints

    @staticmethod
    def of(table: pa.Table) -> "Keys":
        """The keys of a table's events."""
        events = Events(table)
        return Keys(attempts_of(events), events.ints("clock"), events.ints("timestamp"))

    @staticmethod
    def joined(parts: Sequence["Keys"]) -> "Keys":
        """The keys of several parts."""
        every = ((part.attempt, part.clock, part.at) for part in parts)
        return Keys(*(np.concatenate(columns) for columns in zip(*every, strict=True)))

    def cuts(self, most: int) -> list[Key]:
        """Keys at which to cut the order into stretches of about `most` events; equal keys stay together."""
        order = np.lexsort((self.at, self.clock, self.attempt))
        places = order[most::most].tolist()
        keys = {(int(self.attempt[place]), int(self.clock[place]), int(self.at[place])) for place in places}
        return sorted(keys)

    def between(self, start: Key | None, end: Key | None) -> Flags:
        """Which events are between two cuts; the first is inclusive, the second exclusive."""
        inside = np.ones(len(self.attempt), dtype=bool)
        if start is not None:
            inside &= ~self._before(start)
        return inside & self._before(end) if end is not None else inside

    def _before(self, key: Key) -> Flags:
        attempt, clock, at = key
        is_same = self.attempt == attempt
        earlier = (self.clock < clock) | ((self.clock == clock) & (self.at < at))
        found: Flags = (self.attempt < attempt) | (is_same & earlier)
        return found
