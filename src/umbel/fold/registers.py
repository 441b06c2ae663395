"""Registers: of every task, and of every attempt, the greatest event of each type.

Events lie in the order of the merge, so the greatest of a kind is the last: each event is written into
its register in turn, and the last assignment stays. What is counted (deliveries, endings) is counted by
digest, so an event that is there twice counts once.

An event without an attempt belongs to one by a rule that needs the task's newest receipt
(`umbel.events.precedence`), so such events are joined per task first and their registers are dealt out
then: of a task's earlier attempts the newest of each type is known, not every one.
"""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from umbel.events.merge import DIGESTS_MAX
from umbel.events.precedence import ATTEMPT_STEP, ENDED, ENDINGS, STRENGTHS
from umbel.events.types import SLOTS
from umbel.fold.columns import NOTHING, Events, Flags, Ints, Rows, picked
from umbel.fold.order import ATTEMPT_BITS, Ordered, said

SLOT = {slot: place for place, slot in enumerate(SLOTS)}
ENDINGS_MAX = len(ENDINGS) * DIGESTS_MAX
_STRONGEST_FIRST = ("succeeded", "failed", "revoked")
_RECEIVED = SLOT["received"]
_STRENGTH = np.array([STRENGTHS[slot] for slot in SLOTS])
_IS_ENDING = np.array([slot in ENDINGS for slot in SLOTS])


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of owners, which are tasks or attempts: one line each, one column a type of event."""

    events: Events
    task: Ints
    """The number of the owner's task."""
    rows: Ints
    """The greatest event of each type, -1 for none."""
    told: Ints
    """The attempt that this event names; 0 if none."""
    attempt: Ints
    """The attempt that it belongs to, as it says or as it is read."""
    n_deliveries: Ints
    n_terminal: Ints
    _by_slot: dict[str, Rows] = field(default_factory=dict)

    def of(self, slot: str) -> Rows:
        if slot not in self._by_slot:
            self._by_slot[slot] = Rows(self.events, np.ascontiguousarray(self.rows[:, SLOT[slot]]))
        return self._by_slot[slot]

    def told_by(self, slot: str) -> Ints:
        return self.told[:, SLOT[slot]]

    def attempt_of(self, slot: str) -> Ints:
        return self.attempt[:, SLOT[slot]]

    def at(self, lines: Ints) -> "Known":
        """Of these owners, each as often as it is named."""
        return Known(
            self.events,
            self.task[lines],
            self.rows[lines],
            self.told[lines],
            self.attempt[lines],
            self.n_deliveries[lines],
            self.n_terminal[lines],
        )

    def winner(self) -> Ints:
        """The type whose event says what state the owner is in; no two have the same rank."""
        epoch = self.attempt.copy()
        epoch[:, SLOT["retried"]] += 1
        rank = np.where(_IS_ENDING, ENDED, epoch * ATTEMPT_STEP) + _STRENGTH
        rank[self.rows < 0] = NOTHING
        best: Ints = rank.argmax(axis=1)
        return best


@dataclass(frozen=True, slots=True)
class Joined:
    tasks: Known
    attempts: Known
    attempt: Ints
    """The number of each attempt."""
    owner: Ints
    """The line in `tasks` of each attempt's task."""
    firsts: Ints
    """The earliest time of each type of each task, in microseconds; of use where there is an event."""


@dataclass(frozen=True, slots=True)
class _Told:
    """Events of tasks whose type has a register, in order. Tasks are numbered from 0."""

    rows: Ints
    task: Ints
    slot: Ints
    attempt: Ints
    said: Flags
    clock: Ints
    digest: Ints


def slots_of(events: Events) -> Ints:
    """For each event the place of its register, -1 for none."""
    found = pc.index_in(events.column("slot"), value_set=pa.array(SLOTS)).fill_null(NOTHING)
    places: Ints = found.to_numpy(zero_copy_only=False).astype(np.int64)
    return places


def joined(events: Events, order: Ordered) -> Joined:
    told, tasks = _told(events, order)
    newest = _latest(told.task, told.slot, len(tasks))
    attempt = _belonging(told, newest)
    dealt, unsaid = _dealt(told, len(tasks))
    keys, number = numbered(told.task[dealt] << ATTEMPT_BITS | attempt[dealt])
    owner = np.zeros(len(told.rows), dtype=np.int64)
    owner[dealt] = number
    latest = _latest(number, told.slot[dealt], len(keys))
    deliveries, endings = _counts(told, owner, unsaid, len(keys))
    numbers, task = keys & (2**ATTEMPT_BITS - 1), keys >> ATTEMPT_BITS
    whole = Known(
        events,
        tasks,
        _chosen(told.rows, newest),
        picked(told.attempt, newest),
        picked(attempt, newest),
        np.minimum(_sums(task, deliveries, len(tasks)), DIGESTS_MAX),
        np.minimum(_sums(task, endings, len(tasks)), ENDINGS_MAX),
    )
    single = Known(
        events,
        tasks[task],
        _chosen(told.rows[dealt], latest),
        picked(told.attempt[dealt], latest),
        np.repeat(numbers[:, None], len(SLOTS), axis=1),
        np.minimum(deliveries, DIGESTS_MAX),
        np.minimum(endings, ENDINGS_MAX),
    )
    return Joined(whole, single, numbers, task, _firsts(events, told, newest))


def numbered(keys: Ints) -> tuple[Ints, Ints]:
    """The different keys in order, and for each key its number among them."""
    if (keys[1:] < keys[:-1]).any():
        distinct, number = np.unique(keys, return_inverse=True)
        return distinct, number
    is_new = np.ones(len(keys), dtype=bool)
    is_new[1:] = keys[1:] != keys[:-1]
    return keys[is_new], np.cumsum(is_new) - 1


def _told(events: Events, order: Ordered) -> tuple[_Told, Ints]:
    slot = slots_of(events)[order.rows]
    kept = slice(None) if (slot >= 0).all() else slot >= 0
    rows, keys = order.rows[kept], order.keys[kept]
    tasks, task = numbered(keys >> ATTEMPT_BITS)
    attempt = keys & (2**ATTEMPT_BITS - 1)
    clock, digest = events.ints("clock")[rows], events.ints("digest")[rows]
    return _Told(rows, task, slot[kept], attempt, said(events)[rows], clock, digest), tasks


def _latest(owner: Ints, slot: Ints, count: int) -> Ints:
    """For each owner and type the place of the last event, -1 for none."""
    latest = np.full(count * len(SLOTS), NOTHING)
    latest[owner * len(SLOTS) + slot] = np.arange(len(owner))
    return latest.reshape(count, len(SLOTS))


def _belonging(told: _Told, newest: Ints) -> Ints:
    """The attempt of each event: as it says, else that of the task's newest receipt or the one before."""
    if told.said.all():
        return told.attempt
    receipt = newest[:, _RECEIVED][told.task]
    last, since = picked(told.attempt, receipt), picked(told.clock, receipt)
    read = np.where(told.clock >= since, last, np.maximum(last - 1, 0))
    return np.where(told.said, told.attempt, np.where(receipt < 0, 0, read))


def _dealt(told: _Told, count: int) -> tuple[Ints, Ints]:
    """The events that registers of attempts are made of; and of those without an attempt the newest of
    each task and type."""
    if told.said.all():
        return np.arange(len(told.rows)), np.full((count, len(SLOTS)), NOTHING)
    without = np.flatnonzero(~told.said)
    last = _latest(told.task[without], told.slot[without], count)
    unsaid = _chosen(without, last)
    is_dealt = told.said.copy()
    is_dealt[unsaid[unsaid >= 0]] = True
    return np.flatnonzero(is_dealt), unsaid


def _counts(told: _Told, owner: Ints, unsaid: Ints, owners: int) -> tuple[Ints, Ints]:
    """Deliveries and endings of each attempt. Of what has no attempt, all deliveries count where the newest
    does, and all endings where the strongest does."""
    strongest = unsaid[:, SLOT[_STRONGEST_FIRST[0]]]
    for slot in _STRONGEST_FIRST[1:]:
        strongest = np.where(strongest < 0, unsaid[:, SLOT[slot]], strongest)
    is_delivery, is_ending = told.slot == _RECEIVED, _IS_ENDING[told.slot]
    return (
        _distinct(told, np.flatnonzero(is_delivery), owner, unsaid[:, _RECEIVED], owners),
        _distinct(told, np.flatnonzero(is_ending), owner, strongest, owners),
    )


def _distinct(told: _Told, places: Ints, owner: Ints, standing: Ints, owners: int) -> Ints:
    """How many different digests each attempt has among the events at these places. `standing`: of each task
    the event in whose attempt those without one are counted."""
    into = np.where(told.said[places], owner[places], picked(owner, standing[told.task[places]]))
    counts = np.bincount(into, minlength=owners)
    several = np.flatnonzero(counts[into] > 1)
    if not len(several):
        return counts
    these = places[several]
    source = (told.task[these] << ATTEMPT_BITS | told.attempt[these]) << 1 | told.said[these]
    digest = told.digest[these]
    by = np.lexsort((digest, source))
    again = np.flatnonzero((source[by][1:] == source[by][:-1]) & (digest[by][1:] == digest[by][:-1])) + 1
    return counts - np.bincount(into[several[by[again]]], minlength=owners)


def _firsts(events: Events, told: _Told, newest: Ints) -> Ints:
    at = events.ints("timestamp")[told.rows]
    firsts = picked(at, newest).reshape(-1)
    cell = told.task * len(SLOTS) + told.slot
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
