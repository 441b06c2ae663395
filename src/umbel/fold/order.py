"""Order: events by subject, and those of one subject in the total order of the merge.

The order is (attempt, clock, time, hostname, pid, digest), then the moment of recording, so that of an
event that was recorded twice the first comes first. A subject is a task, or a node for what is about no
task. Subject, attempt and clock tell nearly all events apart; only those that they leave equal are
compared by the rest.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from umbel.events.types import RETRIES_MAX
from umbel.fold.columns import Events, Flags, Ints

ATTEMPT_BITS = 16
assert RETRIES_MAX < 2**ATTEMPT_BITS


@dataclass(frozen=True, slots=True)
class Ordered:
    """`rows`: the rows of the events in order. `keys`: in that order, subject and attempt as one number."""

    subjects: pa.Array
    """The different ones; they are numbered by their place here."""
    rows: Ints
    keys: Ints

    @property
    def numbers(self) -> Ints:
        """The subject of each event, in order."""
        return self.keys >> ATTEMPT_BITS


def ordered(events: Events, subject: pa.Array) -> Ordered:
    encoded = subject.dictionary_encode()
    keys = encoded.indices.to_numpy().astype(np.int64) << ATTEMPT_BITS | attempts_of(events)
    clock = events.ints("clock")
    rows = np.lexsort((clock, keys))
    _settle_ties(events, rows, keys, clock)
    return Ordered(encoded.dictionary, rows, keys[rows])


def said(events: Events) -> Flags:
    """Which events name an attempt that can be one."""
    retries = events.ints("retries")
    return events.has("retries") & (retries >= 0) & (retries <= RETRIES_MAX)


def attempts_of(events: Events) -> Ints:
    """The attempt that an event is ordered by: 0 where it names none."""
    return np.where(said(events), events.ints("retries"), 0)


def _settle_ties(events: Events, rows: Ints, keys: Ints, clock: Ints) -> None:
    """Order those that are alike so far by the rest of the order, in place."""
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
    """Numbers that are ordered as the texts are."""
    encoded = texts.dictionary_encode()
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    found: Ints = rank[encoded.indices.to_numpy()]
    return found
