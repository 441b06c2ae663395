"""Registers: find the last event of each type for every task and attempt, in the merge order.

Tasks with more events than fit into memory are first reduced in parts.
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

ATTEMPT_BITS = 16
assert RETRIES_MAX < 2**ATTEMPT_BITS


@dataclass(frozen=True, slots=True)
class Ordered:
    """Sorted events: `rows` contains their row numbers, `keys` their subject and attempt as one number."""

    subjects: pa.Array
    """The distinct subjects. The number of a subject is its position."""
    rows: Ints
    keys: Ints

    @property
    def numbers(self) -> Ints:
        """The number of each event's subject, in the sorted order."""
        return self.keys >> ATTEMPT_BITS


def ordered(events: Events, subject: pa.Array) -> Ordered:
    """Sort events by subject, and the events of a subject in the merge order.

    The merge order is (attempt, clock, time, hostname, pid, digest), then the time of recording, so that the
    first record of an event that was recorded twice comes first. A subject is a task, or a node for events
    without a task. Subject, attempt and clock distinguish nearly all events; the other fields are compared
    only if these are equal.
    """
    encoded = subject.dictionary_encode()
    keys = encoded.indices.to_numpy().astype(np.int64) << ATTEMPT_BITS | attempts_of(events)
    clock = events.ints("clock")
    rows = np.lexsort((clock, keys))
    _settle_ties(events, rows, keys, clock)
    return Ordered(encoded.dictionary, rows, keys[rows])


def names_attempt(events: Events) -> Flags:
    """Return which events contain a valid attempt number."""
    retries = events.ints("retries")
    return events.has("retries") & (retries >= 0) & (retries <= RETRIES_MAX)


def attempts_of(events: Events) -> Ints:
    """Return the attempt by which an event is sorted; 0 if it contains none."""
    return np.where(names_attempt(events), events.ints("retries"), 0)


def _settle_ties(events: Events, rows: Ints, keys: Ints, clock: Ints) -> None:
    """Sort events with equal subject, attempt and clock by the other fields, in place."""
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
    """Return numbers that sort in the same order as the texts."""
    encoded = texts.dictionary_encode()
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    found: Ints = rank[encoded.indices.to_numpy()]
    return found


# ---- registers -------------------------------------------------------------------------------------

SLOT = {slot: place for place, slot in enumerate(SLOTS)}
ENDINGS_MAX = len(ENDINGS) * DIGESTS_MAX
_STRONGEST_FIRST = ("succeeded", "failed", "revoked")
_RECEIVED = SLOT["received"]
_STRENGTH = np.array([STRENGTHS[slot] for slot in SLOTS])
_IS_ENDING = np.array([slot in ENDINGS for slot in SLOTS])


@dataclass(frozen=True, slots=True)
class OwnerRegisters:
    """The registers of owners, which are tasks or attempts: a row for each owner, a column for each type of
    event.
    """

    events: Events
    task: Ints
    """The number of the owner's task."""
    rows: Ints
    """The last event of each type; -1 if there is none."""
    told: Ints
    """The attempt number that this event contains; 0 if none."""
    attempt: Ints
    """The attempt to which the event belongs, as stated or derived."""
    n_deliveries: Ints
    n_terminal: Ints
    _by_slot: dict[str, Rows] = field(default_factory=dict)

    def of(self, slot: str) -> Rows:
        """Return the events of one type."""
        if slot not in self._by_slot:
            self._by_slot[slot] = Rows(self.events, np.ascontiguousarray(self.rows[:, SLOT[slot]]))
        return self._by_slot[slot]

    def told_by(self, slot: str) -> Ints:
        """Return the attempt number that the event of this type contains; 0 if none."""
        return self.told[:, SLOT[slot]]

    def attempt_of(self, slot: str) -> Ints:
        """Return the attempt to which the event of this type belongs."""
        return self.attempt[:, SLOT[slot]]

    def at(self, lines: Ints) -> "OwnerRegisters":
        """Return the registers of these owners. An owner may be repeated."""
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
        """Return the type of the event that decides each owner's state. No two types have the same rank."""
        epoch = self.attempt.copy()
        epoch[:, SLOT["retried"]] += 1
        rank = np.where(_IS_ENDING, ENDED, epoch * ATTEMPT_STEP) + _STRENGTH
        rank[self.rows < 0] = NOTHING
        best: Ints = rank.argmax(axis=1)
        return best


@dataclass(frozen=True, slots=True)
class JoinedRegisters:
    """The registers of tasks and of their attempts."""

    tasks: OwnerRegisters
    attempts: OwnerRegisters
    attempt: Ints
    """The number of each attempt."""
    owner: Ints
    """The row in `tasks` of each attempt's task."""
    firsts: Ints
    """The earliest time of each type for each task, in microseconds; valid if there is such an event."""


@dataclass(frozen=True, slots=True)
class _TaskEvents:
    """The events of tasks whose type has a register, in merge order. Tasks are numbered from 0."""

    rows: Ints
    task: Ints
    slot: Ints
    attempt: Ints
    said: Flags
    clock: Ints
    digest: Ints


def slots_of(events: Events) -> Ints:
    """Return the number of each event's register; -1 if there is none."""
    found = pc.index_in(events.column("slot"), value_set=pa.array(SLOTS)).fill_null(NOTHING)
    places: Ints = found.to_numpy(zero_copy_only=False).astype(np.int64)
    return places


def joined(events: Events, order: Ordered) -> JoinedRegisters:
    """Compute the registers of all tasks and attempts from ordered events.

    A register contains the last event of one type, for a task or an attempt. Events are in merge order, so
    each event is assigned to its register in turn, and the last assignment remains. Deliveries and endings
    are counted by digest, so a repeated event counts once. The attempt of an event without an attempt number
    depends on the task's newest task-received event (`umbel.events.precedence`). Such events are therefore
    first merged for each task, and only the newest of each type is assigned to an attempt.
    """
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
    """Return the distinct sorted keys, and the position of each key among them."""
    if (keys[1:] < keys[:-1]).any():
        distinct, number = np.unique(keys, return_inverse=True)
        return distinct, number
    is_new = np.ones(len(keys), dtype=bool)
    is_new[1:] = keys[1:] != keys[:-1]
    return keys[is_new], np.cumsum(is_new) - 1


def _task_events(events: Events, order: Ordered) -> tuple[_TaskEvents, Ints]:
    """Return the events whose type has a register, and the numbers of their tasks."""
    slot = slots_of(events)[order.rows]
    wanted = slice(None) if (slot >= 0).all() else slot >= 0
    rows, keys = order.rows[wanted], order.keys[wanted]
    tasks, task = numbered(keys >> ATTEMPT_BITS)
    attempt = keys & (2**ATTEMPT_BITS - 1)
    clock, digest = events.ints("clock")[rows], events.ints("digest")[rows]
    return _TaskEvents(rows, task, slot[wanted], attempt, names_attempt(events)[rows], clock, digest), tasks


def _latest(owner: Ints, slot: Ints, count: int) -> Ints:
    """Return the position of the last event for each owner and type; -1 if there is none."""
    latest = np.full(count * len(SLOTS), NOTHING)
    latest[owner * len(SLOTS) + slot] = np.arange(len(owner))
    return latest.reshape(count, len(SLOTS))


def _belonging(given: _TaskEvents, newest: Ints) -> Ints:
    """Return the attempt of each event: as stated, else the attempt of the task's newest task-received event
    or the previous one.
    """
    if given.said.all():
        return given.attempt
    receipt = newest[:, _RECEIVED][given.task]
    last, since = picked(given.attempt, receipt), picked(given.clock, receipt)
    read = np.where(given.clock >= since, last, np.maximum(last - 1, 0))
    return np.where(given.said, given.attempt, np.where(receipt < 0, 0, read))


def _dealt(given: _TaskEvents, count: int) -> tuple[Ints, Ints]:
    """Return the events for registers of attempts, and the newest event without an attempt number for each
    task and type.
    """
    if given.said.all():
        return np.arange(len(given.rows)), np.full((count, len(SLOTS)), NOTHING)
    without = np.flatnonzero(~given.said)
    last = _latest(given.task[without], given.slot[without], count)
    unsaid = _chosen(without, last)
    is_dealt = given.said.copy()
    is_dealt[unsaid[unsaid >= 0]] = True
    return np.flatnonzero(is_dealt), unsaid


def _counts(given: _TaskEvents, owner: Ints, unsaid: Ints, owners: int) -> tuple[Ints, Ints]:
    """Count the deliveries and endings of each attempt. Events without an attempt number are counted
    together: deliveries in the attempt of the newest event, endings in the attempt of the strongest event.
    """
    strongest = unsaid[:, SLOT[_STRONGEST_FIRST[0]]]
    for slot in _STRONGEST_FIRST[1:]:
        strongest = np.where(strongest < 0, unsaid[:, SLOT[slot]], strongest)
    is_delivery, is_ending = given.slot == _RECEIVED, _IS_ENDING[given.slot]
    return (
        _distinct(given, np.flatnonzero(is_delivery), owner, unsaid[:, _RECEIVED], owners),
        _distinct(given, np.flatnonzero(is_ending), owner, strongest, owners),
    )


def _distinct(given: _TaskEvents, places: Ints, owner: Ints, standing: Ints, owners: int) -> Ints:
    """Count the distinct digests of each attempt among the events at these places. `standing` is, for each
    task, the event in whose attempt events without an attempt number are counted.
    """
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
    """Return the earliest time of each type for each task."""
    at = events.ints("timestamp")[given.rows]
    firsts = picked(at, newest).reshape(-1)
    cell = given.task * len(SLOTS) + given.slot
    earlier = np.flatnonzero(newest.reshape(-1)[cell] != np.arange(len(cell)))
    np.minimum.at(firsts, cell[earlier], at[earlier])
    return firsts.reshape(newest.shape)


def _chosen(values: Ints, places: Ints) -> Ints:
    """Return the values at places; -1 if there is no place."""
    found = picked(values, places)
    found[places < 0] = NOTHING
    return found


def _sums(group: Ints, values: Ints, count: int) -> Ints:
    return np.bincount(group, values, count).astype(np.int64)


# ---- crowded ---------------------------------------------------------------------------------------

BINS = 1024
_COUNTED = [SLOT["received"], *(SLOT[slot] for slot in ("succeeded", "failed", "revoked"))]


def bins_of(ids: pa.ChunkedArray, buckets: int) -> Ints:
    """Return the bin of each id within its bucket, from 0 to BINS - 1."""
    return np.mod(hash_of(ids.combine_chunks()).astype(np.int64) // buckets, BINS)


def bin_sizes(parts: Iterable[pa.ChunkedArray], buckets: int) -> Ints:
    """Count the events in each bin."""
    sizes = np.zeros(BINS, dtype=np.int64)
    for ids in parts:
        sizes += np.bincount(bins_of(ids, buckets), minlength=BINS)
    return sizes


def within(ids: pa.ChunkedArray, bins: range, buckets: int) -> pa.Array:
    """Return a filter for the ids in these bins."""
    place = bins_of(ids, buckets)
    return pa.array((place >= bins.start) & (place < bins.stop))


def shared_out(sizes: Ints, most: int) -> list[range]:
    """Return ranges of adjacent bins with at most `most` events each; a single bin may have more."""
    found: list[range] = []
    start = total = 0
    for place, size in enumerate(sizes.tolist()):
        if total and total + size > most:
            found.append(range(start, place))
            start, total = place, 0
        total += size
    return [*found, range(start, len(sizes))] if total else found


def large_tasks(parts: Sequence[pa.ChunkedArray], most: int) -> list[str]:
    """Return the tasks with more than `most` events, from the ids of all events."""
    ids = pa.chunked_array([chunk for part in parts for chunk in part.cast(pa.string()).chunks], pa.string())
    counts = pc.value_counts(ids)
    large: list[str] = counts.field("values").filter(pc.greater(counts.field("counts"), most)).to_pylist()
    return large


def reduced(table: pa.Table) -> pa.Table:
    """Return only the events that the tables `tasks` and `attempts` need. The parts of a task can be reduced
    separately, and the results again together.

    A task may have more events than fit into memory. The tables `tasks` and `attempts` need only a few of
    them: the last and the earliest of each type and attempt, and those that are counted. The events are
    reduced to these in parts. The timeline is computed in consecutive parts, each of which fits into memory.
    """
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
    """Return one event for each digest, up to the limit of the count for each cell."""
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
    """The first fields of the merge order of each event: attempt, clock and time."""

    attempt: Ints
    clock: Ints
    at: Ints

    @staticmethod
    def of(table: pa.Table) -> "Keys":
        """Return the keys of a table's events."""
        events = Events(table)
        return Keys(attempts_of(events), events.ints("clock"), events.ints("timestamp"))

    @staticmethod
    def joined(parts: Sequence["Keys"]) -> "Keys":
        """Return the keys of several parts."""
        every = ((part.attempt, part.clock, part.at) for part in parts)
        return Keys(*(np.concatenate(columns) for columns in zip(*every, strict=True)))

    def cuts(self, most: int) -> list[Key]:
        """Return keys that divide the order into parts of about `most` events. Equal keys stay together."""
        order = np.lexsort((self.at, self.clock, self.attempt))
        places = order[most::most].tolist()
        keys = {(int(self.attempt[place]), int(self.clock[place]), int(self.at[place])) for place in places}
        return sorted(keys)

    def between(self, start: Key | None, end: Key | None) -> Flags:
        """Return which events are between two keys; the first is inclusive, the second exclusive."""
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
