"""View: what people read of registers, by the rules of `umbel.events.view`; for tasks and attempts alike."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from umbel.events.precedence import STATES
from umbel.events.types import SLOTS, TASK_PREFIX
from umbel.fold.columns import Flags, Floats, Ints, Rows, float_array, nullable, seconds_between
from umbel.fold.moments import moments
from umbel.fold.registers import SLOT, Known

RUN_MAX_S = 1e12
"""No task runs longer; a larger value is not a measurement."""

_STATES = pa.array([STATES.get(slot) for slot in SLOTS])


class Winner(Rows):
    """The event that says what state an owner is in, and the type and attempt of it."""

    def __init__(self, known: Known) -> None:
        self.slot = known.winner()
        every = np.arange(len(self.slot))
        super().__init__(known.events, known.rows[every, self.slot])
        self.attempt: Ints = known.attempt[every, self.slot]

    def is_of(self, *slots: str) -> Flags:
        return np.isin(self.slot, [SLOT[slot] for slot in slots])

    def state(self) -> pa.Array:
        return states_of(self, self.slot)

    def worker(self) -> Rows:
        """The same event, unless it is the client's."""
        return self.where(~self.is_of("sent"))


def states_of(rows: Rows, slot: Ints) -> pa.Array:
    """The state that an event of this type stands for; null where there is no event."""
    states = _STATES.take(pa.array(slot, mask=~rows.there))
    is_custom = pa.array(rows.there & (slot == SLOT["custom"]))
    if not is_custom.true_count:
        return states
    return pc.replace_with_mask(states, is_custom, _custom_states(rows.text("type").filter(is_custom)))


def _custom_states(types: pa.Array) -> pa.Array:
    """`task-progress` is PROGRESS. Few differ, and Python knows how to write them in capitals."""
    encoded = types.dictionary_encode()
    own = [text[len(TASK_PREFIX) :].upper() for text in encoded.dictionary.to_pylist()]
    return pa.array(own, pa.string()).take(encoded.indices)


class Described:
    """Who describes the call: the receipt, its holes filled from the sending; the other way round if that is
    of a newer attempt."""

    def __init__(self, known: Known) -> None:
        sent, received = known.of("sent"), known.of("received")
        newer = sent.there & received.there & (known.told_by("sent") > known.told_by("received"))
        self._first = sent.where(newer).or_else(received)
        self._second = received.where(newer).or_else(sent)

    def by(self, name: str) -> Rows:
        """The events that a field is to be taken from."""
        return self._first.or_else(self._second, name)


def error(known: Known) -> Rows:
    return known.of("failed").or_else(known.of("retried"))


def wait_s(sent: Rows, received: Rows, started: Rows, described: Described) -> pa.Array:
    """From when it was sent and due, else received, to its start. Clocks of two machines may differ by more
    than a short wait, so less than nothing counts as nothing."""
    due, is_due = moments(described.by("eta").where(sent.there & started.there).take("eta"))
    sent_at = sent.ints("timestamp")
    since = np.where(is_due, np.maximum(sent_at, due), sent_at)
    begun = np.where(sent.there, since, received.ints("timestamp"))
    waited = _not_below_0(seconds_between(begun, started.ints("timestamp")))
    return nullable(waited, started.there & (sent.there | received.there), pa.float64())


def run_s(measured: Rows, started: Rows, ended: Rows) -> pa.Array:
    """The worker's own measure where it is one, else from start to end."""
    runtime = float_array(measured.take("runtime"))
    is_measure = (runtime >= 0.0) & (runtime <= RUN_MAX_S)
    between = _not_below_0(seconds_between(started.ints("timestamp"), ended.ints("timestamp")))
    there = is_measure | (started.there & ended.there)
    return nullable(np.where(is_measure, runtime, between), there, pa.float64())


def _not_below_0(seconds: Floats) -> Floats:
    return np.where(seconds < 0, 0.0, seconds)
