"""Tasks: compute the tables tasks, attempts and timeline from registers and events, and metrics from
attempts.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from umbel.events.precedence import ENDINGS, STATES
from umbel.events.types import SLOTS, TASK_PREFIX
from umbel.events.view import TIMED
from umbel.fold.columns import (
    INSTANT,
    NOTHING,
    Events,
    Flags,
    Floats,
    Ints,
    Rows,
    float_array,
    groups,
    instants,
    int_array,
    made,
    moments,
    nullable,
    present,
    seconds_between,
)
from umbel.fold.registers import ATTEMPT_BITS, SLOT, JoinedRegisters, Ordered, OwnerRegisters, names_attempt

# ---- view ------------------------------------------------------------------------------------------

RUN_MAX_S = 1e12
"""A longer run time is not plausible and is ignored."""

_STATES = pa.array([STATES.get(slot) for slot in SLOTS])


class Winner(Rows):
    """The event that decides an owner's state, with its type and attempt.

    `umbel.events.view` defines the rules for these columns.
    """

    def __init__(self, known: OwnerRegisters) -> None:
        self.slot = known.winner()
        every = np.arange(len(self.slot))
        super().__init__(known.events, known.rows[every, self.slot])
        self.attempt: Ints = known.attempt[every, self.slot]

    def is_of(self, *slots: str) -> Flags:
        """Return for which owners the deciding event has one of these types."""
        return np.isin(self.slot, [SLOT[slot] for slot in slots])

    def state(self) -> pa.Array:
        """Return the state of each owner."""
        return states_of(self, self.slot)

    def worker(self) -> Rows:
        """Return the same events, without those of clients."""
        return self.where(~self.is_of("sent"))


def states_of(rows: Rows, slot: Ints) -> pa.Array:
    """Return the state that an event of this type implies; null if there is no event."""
    states = _STATES.take(pa.array(slot, mask=~rows.there))
    is_custom = pa.array(rows.there & (slot == SLOT["custom"]))
    if not is_custom.true_count:
        return states
    return pc.replace_with_mask(states, is_custom, _custom_states(rows.text("type").filter(is_custom)))


def _custom_states(types: pa.Array) -> pa.Array:
    """Return the states of custom events; `task-progress` becomes PROGRESS."""
    encoded = types.dictionary_encode()
    own = [text[len(TASK_PREFIX) :].upper() for text in encoded.dictionary.to_pylist()]
    return pa.array(own, pa.string()).take(encoded.indices)


class Described:
    """The events that describe a call: task-received, with missing fields from task-sent. If the task-sent
    event belongs to a newer attempt, it comes first.
    """

    def __init__(self, known: OwnerRegisters) -> None:
        sent, received = known.of("sent"), known.of("received")
        newer = sent.there & received.there & (known.told_by("sent") > known.told_by("received"))
        self._first = sent.where(newer).or_else(received)
        self._second = received.where(newer).or_else(sent)

    def by(self, name: str) -> Rows:
        """Return the events that contain the field `name`."""
        return self._first.or_else(self._second, name)


def error_of(known: OwnerRegisters) -> Rows:
    """Return the event with the exception: the failure, else the retry."""
    return known.of("failed").or_else(known.of("retried"))


def wait_s(sent: Rows, received: Rows, started: Rows, described: Described) -> pa.Array:
    """Return the seconds from when a task was sent and due, else received, until its start. A negative value
    becomes 0, because the clocks of two machines may differ.
    """
    due, is_due = moments(described.by("eta").where(sent.there & started.there).take("eta"))
    sent_at = sent.ints("timestamp")
    since = np.where(is_due, np.maximum(sent_at, due), sent_at)
    begun = np.where(sent.there, since, received.ints("timestamp"))
    waited = _not_below_0(seconds_between(begun, started.ints("timestamp")))
    return nullable(waited, started.there & (sent.there | received.there), pa.float64())


def run_s(measured: Rows, started: Rows, ended: Rows) -> pa.Array:
    """Return the run time in seconds: the worker's measurement if it is plausible, else the time from start
    to end.
    """
    runtime = float_array(measured.take("runtime"))
    is_measure = (runtime >= 0.0) & (runtime <= RUN_MAX_S)
    between = _not_below_0(seconds_between(started.ints("timestamp"), ended.ints("timestamp")))
    there = is_measure | (started.there & ended.there)
    return nullable(np.where(is_measure, runtime, between), there, pa.float64())


def _not_below_0(seconds: Floats) -> Floats:
    return np.where(seconds < 0, 0.0, seconds)


# ---- tasks -----------------------------------------------------------------------------------------

DESCRIBED = ("name", "args", "kwargs", "root_id", "parent_id", "eta", "expires")


def tasks(joined: JoinedRegisters, ids: pa.Array) -> pa.Table:
    """Return the table `tasks`. `ids` contains the task ids by number."""
    known, firsts = joined.tasks, joined.firsts
    winner, described = Winner(known), Described(known)
    by = {slot: known.of(slot) for slot in TIMED}
    sent, succeeded, revoked, error = by["sent"], by["succeeded"], by["revoked"], error_of(known)
    return made(
        "tasks",
        {
            "task_id": ids.take(pa.array(known.task)),
            "state": winner.state(),
            "state_at": winner.settled("timestamp"),
            "clock": winner.settled("clock"),
            "worker": winner.worker().text("hostname"),
            **{name: described.by(name).take(name) for name in DESCRIBED},
            "retries": pa.array(known.told.max(axis=1)),
            "client": sent.text("hostname"),
            **{name: sent.take(name) for name in ("queue", "exchange", "routing_key")},
            **{name: succeeded.take(name) for name in ("result", "runtime")},
            **{name: error.take(name) for name in ("exception", "traceback")},
            **{name: revoked.take(name) for name in ("terminated", "signum", "expired")},
            "requeue": by["rejected"].take("requeue"),
            **{f"{slot}_at": rows.settled("timestamp") for slot, rows in by.items()},
            **{f"first_{slot}_at": instants(firsts[:, SLOT[slot]], rows.there) for slot, rows in by.items()},
            "n_deliveries": pa.array(known.n_deliveries),
            "n_terminal": pa.array(known.n_terminal),
            "extra": winner.take("extra"),
            "wait_s": _wait_s(known, described),
            "run_s": _run_s(known, winner),
        },
    )


def _wait_s(known: OwnerRegisters, described: Described) -> pa.Array:
    """Return the waiting time of the last started attempt, using only events of that attempt."""
    number = known.attempt_of("started")
    sent = known.of("sent").where(known.told_by("sent") == number)
    received = known.of("received").where(known.attempt_of("received") == number)
    return wait_s(sent, received, known.of("started"), described)


def _run_s(known: OwnerRegisters, winner: Winner) -> pa.Array:
    """Return the run time of the last attempt, using only events of that attempt."""
    is_ended = winner.is_of(*ENDINGS) & (known.attempt_of("started") == winner.attempt)
    measured = known.of("succeeded").where(winner.is_of("succeeded"))
    return run_s(measured, known.of("started").where(is_ended), winner)


# ---- attempts --------------------------------------------------------------------------------------

_ENDS = ("succeeded", "failed", "revoked", "retried", "rejected")
"""The outcome of an attempt is the first of these types that was reported."""

_TASK_OF = ("name", "root_id", "parent_id")


def attempts(joined: JoinedRegisters, ids: pa.Array) -> pa.Table:
    """Return the table `attempts`. `ids` contains the task ids by number. Missing fields come from
    the task.
    """
    known, whole = joined.attempts, joined.tasks.at(joined.owner)
    winner, described = Winner(known), Described(known)
    of_task, worker, (end, outcome) = Described(whole), winner.worker(), _end(known)
    sent, received, started = known.of("sent"), known.of("received"), known.of("started")
    return made(
        "attempts",
        {
            "task_id": ids.take(pa.array(known.task)),
            "attempt": pa.array(joined.attempt),
            "state": winner.state(),
            "state_at": winner.settled("timestamp"),
            "clock": winner.settled("clock"),
            "worker": worker.text("hostname"),
            "pid": worker.settled("pid"),
            **{name: described.by(name).or_else(of_task.by(name), name).take(name) for name in _TASK_OF},
            "queue": sent.or_else(whole.of("sent"), "queue").take("queue"),
            "client": sent.or_else(whole.of("sent")).text("hostname"),
            "sent_at": sent.settled("timestamp"),
            "received_at": received.settled("timestamp"),
            "started_at": started.settled("timestamp"),
            "ended_at": end.settled("timestamp"),
            "outcome": states_of(end, outcome),
            "received_clock": received.settled("clock"),
            "started_clock": started.settled("clock"),
            "ended_clock": end.settled("clock"),
            "runtime": known.of("succeeded").take("runtime"),
            "exception": error_of(known).take("exception"),
            "n_deliveries": pa.array(known.n_deliveries),
            "n_terminal": pa.array(known.n_terminal),
            "out_of_order": pa.array(_is_out_of_order(known, received, started, end)),
            "wait_s": wait_s(sent, received, started, described),
            "run_s": run_s(known.of("succeeded"), started, end),
        },
    )


def _end(known: OwnerRegisters) -> tuple[Rows, Ints]:
    """Return the event that ended each attempt, and its type."""
    rows = np.full(len(known.task), NOTHING)
    slots = np.zeros(len(known.task), dtype=np.int64)
    for slot in reversed(_ENDS):
        found = known.rows[:, SLOT[slot]]
        rows, slots = np.where(found >= 0, found, rows), np.where(found >= 0, SLOT[slot], slots)
    return Rows(known.events, rows), slots


def _is_out_of_order(known: OwnerRegisters, received: Rows, started: Rows, end: Rows) -> Flags:
    """Return which attempts have events whose clocks contradict their order."""
    hosts = known.events.codes("hostname")

    def against(earlier: Rows, later: Rows) -> Flags:
        """Return where a process reported `later` before `earlier` by its own clock; a clock of 0 is
        ignored.
        """
        both = np.flatnonzero(earlier.there & later.there & (later.ints("clock") < earlier.ints("clock")))
        before, after = earlier.rows[both], later.rows[both]
        pid, clock = known.events.ints("pid"), known.events.ints("clock")
        found = np.zeros(len(earlier.rows), dtype=bool)
        found[both] = (hosts[before] == hosts[after]) & (pid[before] == pid[after]) & (clock[after] > 0)
        return found

    return against(received, started) | against(started, end) | against(received, end)


# ---- timeline --------------------------------------------------------------------------------------

_SAYING = ("result", "exception", "name", "outcome", "winner", "queue", "signum")
"""The most informative fields of an event; the first one that is not null is shown."""

_AS_THEY_ARE = ("timestamp", "hostname", "pid", "inc", "seq", "extra", "recorded_at")


def timeline(events: Events, order: Ordered) -> pa.Table:
    """Return the table `timeline`. If an event was recorded twice, only the first record is used.

    Each event once, in merge order, numbered within its task or node.
    """
    subject, digest = order.numbers, events.ints("digest")[order.rows]
    is_first = np.ones(len(subject), dtype=bool)
    is_first[1:] = subject[1:] != subject[:-1]
    is_new = is_first.copy()
    is_new[1:] |= digest[1:] != digest[:-1]
    places = np.flatnonzero(is_new)
    rows, subject = Rows(events, order.rows[places]), subject[places]
    since = np.flatnonzero(is_first[places])  # the first row of each subject
    rank = np.arange(1, len(places) + 1) - np.repeat(since, np.diff(np.append(since, len(places))))
    attempt = order.keys[places] & (2**ATTEMPT_BITS - 1)
    task = rows.take("uuid")
    return made(
        "timeline",
        {
            "subject": order.subjects.take(pa.array(subject)) if task.null_count else task,
            "rank": pa.array(rank),
            "task_id": task,
            "attempt": nullable(attempt, names_attempt(events)[rows.rows], pa.int64()),
            "type": rows.text("type"),
            "clock": rows.settled("clock"),
            "digest": rows.settled("digest"),
            "detail": _detail(rows, events),
            **{name: rows.take(name) for name in _AS_THEY_ARE},
        },
    )


def _detail(rows: Rows, events: Events) -> pa.Array:
    filled = [name for name in _SAYING if events.column(name).null_count < events.count]
    if not filled:
        return pa.nulls(len(rows.rows), pa.string())
    return pc.coalesce(*(rows.take(name) for name in filled))


# ---- metrics ---------------------------------------------------------------------------------------

MINUTE_S = 60.0
MINUTE_US = 60_000_000
_KEYS = ("minute", "name", "queue", "worker")
SAMPLES = pa.schema(
    [
        ("minute", INSTANT),
        *((name, pa.string()) for name in ("name", "queue", "worker", "outcome")),
        ("wait_s", pa.float64()),
        ("run_s", pa.float64()),
    ]
)
_OUTCOMES = {
    "n_succeeded": "SUCCESS",
    "n_failed": "FAILURE",
    "n_retried": "RETRY",
    "n_revoked": "REVOKED",
    "n_rejected": "REJECTED",
}
_SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def samples(attempts: pa.Table) -> pa.Table:
    """Return samples for metrics from a part of the table `attempts`."""
    at = pc.coalesce(attempts.column("ended_at"), attempts.column("state_at")).combine_chunks()
    minute = instants(int_array(at) // MINUTE_US * MINUTE_US, present(at))
    return pa.table([minute, *(attempts.column(name) for name in SAMPLES.names[1:])], schema=SAMPLES)


def by_minute(sampled: pa.Table) -> pa.Table:
    """Sort samples by minute."""
    minute = int_array(sampled.column("minute").combine_chunks())
    return sampled.combine_chunks().take(pa.array(np.argsort(minute, kind="stable")))


def counts_by_minute(sampled: pa.Table) -> dict[int, int]:
    """Return the sorted minutes, in microseconds, and the number of samples in each."""
    minutes, counts = np.unique(int_array(sampled.column("minute").combine_chunks()), return_counts=True)
    return dict(zip(minutes.tolist(), counts.tolist(), strict=True))


def metrics(sampled: pa.Table) -> pa.Table:
    """Return rows of the table `metrics`, from all samples of some minutes.

    One row for each minute, task name, queue and worker. A bucket yields a sample for each attempt; the rows
    of a minute are computed from all its samples. An attempt belongs to the minute in which it ended, else
    to that of its last event. Percentiles are exact, interpolated between the two nearest values like
    Spark's `percentile`.
    """
    column = {name: sampled.column(name).combine_chunks() for name in SAMPLES.names}
    group, firsts = groups(*(column[name] for name in _KEYS))
    count = len(firsts)
    n_attempts = np.bincount(group, minlength=count)
    counts = {
        name: _count(pc.equal(column["outcome"], outcome), group, count)
        for name, outcome in _OUTCOMES.items()
    }
    n_open = _count(pc.is_null(column["outcome"]), group, count)
    decided = counts["n_succeeded"] + counts["n_failed"]
    rate = counts["n_failed"] / np.maximum(decided, 1)
    return made(
        "metrics",
        {
            **{name: column[name].take(pa.array(firsts)) for name in _KEYS},
            "n_attempts": pa.array(n_attempts),
            **{name: pa.array(values) for name, values in counts.items()},
            "n_open": pa.array(n_open),
            "per_s": pa.array((n_attempts - n_open) / MINUTE_S),
            "failure_rate": nullable(rate, decided > 0, pa.float64()),
            **_percentiles("wait", column["wait_s"], group, count),
            **_percentiles("run", column["run_s"], group, count),
        },
    )


def _count(where: pa.Array, group: Ints, count: int) -> Ints:
    chosen: Flags = where.fill_null(False).to_numpy(zero_copy_only=False)
    return np.bincount(group[chosen], minlength=count)


def _percentiles(what: str, column: pa.Array, group: Ints, count: int) -> dict[str, pa.Array]:
    """Return the columns of percentiles for each group."""
    there = present(column)
    values, group = float_array(column)[there], group[there]
    values = values[np.lexsort((values, group))]
    sizes = np.bincount(group, minlength=count)
    begins = np.cumsum(sizes) - sizes
    return {
        f"{what}_{name}_s": nullable(_share(values, begins, sizes, share), sizes > 0, pa.float64())
        for name, share in _SHARES.items()
    }


def _share(values: Floats, begins: Ints, sizes: Ints, share: float) -> Floats:
    """Return the quantile of each group of sorted values; undefined for groups without values."""
    if not len(values):
        return np.zeros(len(sizes))
    place = np.maximum(sizes - 1, 0) * share
    low, high = np.floor(place), np.ceil(place)
    last = len(values) - 1
    below = values[np.minimum(begins + low.astype(np.int64), last)]
    above = values[np.minimum(begins + high.astype(np.int64), last)]
    return below + (place - low) * (above - below)
