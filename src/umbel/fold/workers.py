"""Workers: sessions of nodes, from what they say of themselves.

A sign of life covers the time until two heartbeats would be due; signs that overlap are one session; a
farewell ends it, and so does silence. A union of intervals does not depend on the order or the number of
times they are reported. At the lake's end a node whose last sign still covers that moment is alive; the
moment is put into the node's own time by how far that is ahead of the broker's.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from umbel.events.workers import BEAT_S, BEATS_MISSED
from umbel.fold.columns import (
    Events,
    Flags,
    Ints,
    Rows,
    float_array,
    instants,
    int_array,
    nullable,
    seconds_between,
)
from umbel.fold.groups import groups, running_max, starts_of
from umbel.fold.marks import Marks
from umbel.fold.schemas import made

BEAT_MIN_S, BEAT_MAX_S = 0.001, 86_400.0
OFFLINE = "worker-offline"
BEATS = ("worker-online", "worker-heartbeat", OFFLINE)
_TOLD = ("freq", "processed", "sw_ident", "sw_ver", "sw_sys")


def beats_of(others: pa.Table) -> Events:
    """Signs of life, each once, from events without a task."""
    is_beat = pc.is_in(others.column("type"), value_set=pa.array(BEATS))
    table = others.filter(pc.and_(is_beat, pc.is_null(others.column("slot"))))
    beats = Events(table)
    _, firsts = groups(beats.text("hostname"), pa.array(beats.ints("pid")), pa.array(beats.ints("digest")))
    return Events(table.take(pa.array(firsts)))


@dataclass(frozen=True, slots=True)
class _Sessions:
    """Beats by sender and time, and where sessions begin among them."""

    rows: Ints
    sender: Ints
    covered_to: Ints
    begins: Ints

    @property
    def ends(self) -> Ints:
        return np.append(self.begins[1:], len(self.rows)) - 1 if len(self.rows) else self.begins

    def number(self) -> Ints:
        """Of each session among those of its sender, from 1."""
        sender = self.sender[self.begins]
        since = starts_of(sender)
        return np.arange(1, len(sender) + 1) - np.repeat(since, np.diff(np.append(since, len(sender))))


def workers(others: pa.Table, marks: Marks) -> pa.Table:
    """From the events without a task, and the marks of all events."""
    beats = beats_of(others)
    sessions = _sessions(beats)
    begins, rows = sessions.begins, sessions.rows
    last = Rows(beats, rows[sessions.ends])
    at, clock = beats.ints("timestamp")[rows], beats.ints("clock")[rows]
    online_at, last_at = _reduced(np.minimum, at, begins), _reduced(np.maximum, at, begins)
    covered_to = _reduced(np.maximum, sessions.covered_to, begins)
    ending = _ending(last, covered_to, marks)
    ended_at = np.where(ending == "offline", last_at, covered_to)
    return made(
        "workers",
        {
            "hostname": last.text("hostname"),
            "pid": last.settled("pid"),
            "inc": last.take("inc"),
            "session": pa.array(sessions.number()),
            "online_at": instants(online_at),
            "last_at": instants(last_at),
            "ended_at": instants(ended_at, ending != "alive"),
            "ending": pa.array(ending, pa.string()),
            "up_s": pa.array(seconds_between(online_at, last_at)),
            "clock_min": pa.array(_reduced(np.minimum, clock, begins)),
            "clock_max": pa.array(_reduced(np.maximum, clock, begins)),
            "n_beats": pa.array(np.diff(np.append(begins, len(rows)))),
            "active_max": _active_max(beats, sessions),
            **{name: last.take(name) for name in _TOLD},
        },
    )


def _sessions(beats: Events) -> _Sessions:
    sender, _ = groups(beats.text("hostname"), pa.array(beats.ints("pid")), beats.column("inc"))
    at = beats.ints("timestamp")
    rows = np.lexsort((beats.ints("digest"), beats.ints("clock"), at, sender))
    is_offline = _is_offline(Rows(beats, rows))
    sender, at, covered_to = sender[rows], at[rows], _covered_to(beats)[rows]
    is_new = np.ones(len(rows), dtype=bool)
    is_new[1:] = (
        (sender[1:] != sender[:-1])
        | (at[1:] >= running_max(covered_to, sender)[:-1])
        | (is_offline[:-1] & ~is_offline[1:])
    )
    return _Sessions(rows, sender, covered_to, np.flatnonzero(is_new))


def _covered_to(beats: Events) -> Ints:
    freq = float_array(beats.column("freq"))
    freq = np.where((freq >= BEAT_MIN_S) & (freq <= BEAT_MAX_S), freq, BEAT_S)
    covers_us = (freq * (BEATS_MISSED * 1_000_000)).astype(np.int64)
    is_offline = _is_offline(Rows(beats, np.arange(beats.count)))
    return beats.ints("timestamp") + np.where(is_offline, 0, covers_us)


def _is_offline(rows: Rows) -> Flags:
    found: Flags = pc.equal(rows.take("type"), OFFLINE).to_numpy(zero_copy_only=False)
    return found


def _ending(last: Rows, covered_to: Ints, marks: Marks) -> "np.ndarray[tuple[int], np.dtype[np.object_]]":
    nodes, horizon_us = marks.nodes(), marks.horizon_us()
    place = pc.index_in(last.text("hostname"), value_set=nodes.column("hostname").combine_chunks())
    ahead_us = int_array(nodes.column("ahead_us").combine_chunks().take(place))
    moment = (0 if horizon_us is None else horizon_us) + _cut(ahead_us)
    is_alive = (covered_to > moment) if horizon_us is not None else np.zeros(len(covered_to), dtype=bool)
    return np.where(_is_offline(last), "offline", np.where(is_alive, "alive", "lost")).astype(object)


def _cut(ahead_us: Ints) -> Ints:
    """As seconds in a float and back, which is how the moment was always reckoned."""
    return (ahead_us / 1_000_000 * 1_000_000).astype(np.int64)


def _active_max(beats: Events, sessions: _Sessions) -> pa.Array:
    there = beats.has("active")[sessions.rows]
    active = np.where(there, beats.ints("active")[sessions.rows], np.iinfo(np.int64).min)
    most, told = (_reduced(np.maximum, one, sessions.begins) for one in (active, there.astype(np.int64)))
    return nullable(most, told > 0, pa.int64())


def _reduced(by: np.ufunc, values: Ints, begins: Ints) -> Ints:
    """Of each session; there is none of no beats."""
    found: Ints = by.reduceat(values, begins) if len(begins) else values[:0]
    return found
