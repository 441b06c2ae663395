"""A lake of synthetic events, as many as wanted, made column by column.

What a busy cluster tells: each task is sent, received, started and ends; 6 % are tried again, 4 %
fail, one task in a hundred is revoked; every event is there once, 1 % twice, and 1 % reach the log up
to a minute late. Some 4.3 events a task, in the order of arrival, and a heartbeat now and then. The
same seed gives the same lake. The tasks of a span of time, a million events, are made at once, so memory
does not grow with the lake.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from umbel.events.tables import COLUMNS, Kind

Numbers = np.ndarray[Any, Any]

LATER = "later.parquet"
SLICE_EVENTS = 1_000_000
FILE_EVENTS = 250_000
EVENTS_PER_TASK = 4.35
NODES = 24
NAMES = 60
BEGAN_US = 1_794_700_800_000_000
RATE_PER_S = 2000
RETRIED, FAILED, REVOKED, TWICE, LATE = 0.06, 0.04, 0.01, 0.01, 0.01
LATE_MAX_US = 60_000_000
TRACEBACK = (
    "Traceback (most recent call last):\n" + '  File "tasks.py", line 12, in pay\n    charge(order)\n' * 8
)

INSTANT = pa.timestamp("us", tz="UTC")
ARROW: Mapping[Kind, pa.DataType] = {
    "text": pa.string(),
    "json": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "instant": INSTANT,
}
SCHEMA = pa.schema([(column.name, ARROW[column.kind]) for column in COLUMNS])
TYPES = ("sent", "received", "started", "succeeded", "failed", "retried", "revoked")
SENT, RECEIVED, STARTED, SUCCEEDED, FAILED_, RETRIED_, REVOKED_, BEAT = range(8)
BEAT_US = 2_000_000


def write_lake(lake: Path, events: int, *, later: int = 0, seed: int = 7) -> int:
    """Write about so many events as the recorder would; how many there are.

    They arrive without a pause: tasks are still sent while others end. The `later` ones that come after
    these, many of them of the same tasks, are in a file beside (LATER)."""
    written, held = 0, SCHEMA.empty_table()
    for number, table in enumerate(_in_order(_spans(events + later, seed))):
        held = pa.concat_tables([held, table])
        ready = max(0, held.num_rows - later)
        written = _write_files(lake, held.slice(0, ready), number, written)
        held = held.slice(ready)
    if later:
        _write(held, lake / LATER)
    return written


def _in_order(spans: Iterable[tuple[pa.Table, int]]) -> Iterator[pa.Table]:
    """What of one span arrives when the next has begun lies between the events of that one."""
    late = SCHEMA.empty_table()
    for table, ends_us in spans:
        arrived = pa.concat_tables([late, table])
        in_time = pc.less(arrived.column("recorded_at"), pa.scalar(ends_us).cast(INSTANT))
        late = arrived.filter(pc.invert(in_time))
        yield arrived.filter(in_time).sort_by("recorded_at")
    yield late.sort_by("recorded_at")


def _write_files(lake: Path, table: pa.Table, number: int, written: int) -> int:
    for place in range(0, table.num_rows, FILE_EVENTS):
        part = table.slice(place, FILE_EVENTS)
        _write(part, hour_of(lake, number) / f"ev-synthetic-0-{written:012d}.parquet")
        written += part.num_rows
    return written


def hour_of(lake: Path, number: int) -> Path:
    return lake / "events" / "dt=2026-11-15" / f"hour={number % 24:02d}"


def _write(table: pa.Table, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, compression="zstd", compression_level=1)


def slices(events: int, *, seed: int = 7) -> Iterator[pa.Table]:
    """Tables of about a million events each, together about as many as asked for."""
    for table, _ in _spans(events, seed):
        yield table


def _spans(events: int, seed: int) -> Iterator[tuple[pa.Table, int]]:
    """The events of all tasks that were sent in a span of time, and when it ended and the next began."""
    random = np.random.default_rng(seed)
    made, began_us, counters = 0, BEGAN_US, np.zeros(NODES + 1, dtype=np.int64)
    while made < events:
        wanted = min(SLICE_EVENTS, events - made)
        tasks = max(1, round(wanted / EVENTS_PER_TASK))
        table = _Slice(random, tasks, began_us, clock=made, counters=counters).table()
        began_us += tasks * 1_000_000 // RATE_PER_S
        made += table.num_rows
        yield table, began_us


@dataclass
class _Told:
    """Events of one type: which tasks, which attempt, when, by which node."""

    kind: int
    task: Numbers
    attempt: Numbers
    at_us: Numbers
    node: Numbers


class _Slice:
    """`clock` and `counters`: how far the cluster's clock and each node's events had come before."""

    def __init__(
        self, random: np.random.Generator, tasks: int, began_us: int, *, clock: int, counters: Numbers
    ) -> None:
        self._clock = clock
        self._counters = counters
        self._random = random
        self._tasks = tasks
        self._uuids = _uuids(random, tasks)
        self._name = random.zipf(1.4, tasks) % NAMES
        self._sent_us = began_us + np.sort(random.integers(0, tasks * 1_000_000 // RATE_PER_S + 1, tasks))
        self._began_us = began_us

    def table(self) -> pa.Table:
        told = self._told()
        kind = np.concatenate([np.full(len(one.task), one.kind) for one in told])
        task = np.concatenate([one.task for one in told])
        attempt = np.concatenate([one.attempt for one in told])
        at_us = np.concatenate([one.at_us for one in told])
        node = np.concatenate([one.node for one in told])
        ordered = np.lexsort((kind, at_us))  # as they happened: clocks and counters grow with it
        kind, task, attempt = kind[ordered], task[ordered], attempt[ordered]
        at_us, node = at_us[ordered], node[ordered]
        table = self._columns(kind, task, attempt, at_us, node)
        return self._arrived(table, at_us)

    def _told(self) -> list[_Told]:
        random = self._random
        every = np.arange(self._tasks)
        zero = np.zeros(self._tasks, dtype=np.int64)
        again = every[random.random(self._tasks) < RETRIED]
        first = self._attempt(every, zero, self._sent_us, ends_in=RETRIED_, only=again)
        retried = first.pop()  # those whose first attempt asks for another
        later = self._attempt(retried.task, np.ones(len(again), dtype=np.int64), retried.at_us + 200_000)
        return [*first, retried, *later, self._beats()]

    def _beats(self) -> _Told:
        """Heartbeats of every node; they are of no task."""
        span_us = self._tasks * 1_000_000 // RATE_PER_S
        times = np.arange(self._began_us, self._began_us + span_us + 1, BEAT_US)
        node = np.tile(np.arange(NODES), len(times))
        none = np.zeros(len(node), dtype=np.int64)
        return _Told(BEAT, none, none, np.repeat(times, NODES) + node, node)

    def _attempt(
        self,
        task: Numbers,
        attempt: Numbers,
        sent_us: Numbers,
        *,
        ends_in: int | None = None,
        only: Numbers | None = None,
    ) -> list[_Told]:
        """One attempt of each of these tasks; `only` of them end so, and are told last."""
        random, count = self._random, len(task)
        node = random.integers(0, NODES, count)
        wait_us = (random.lognormal(-3.5, 1.2, count) * 1e6).astype(np.int64) + 500
        run_us = (random.lognormal(-2.0, 1.5, count) * 1e6).astype(np.int64) + 100
        received, started = sent_us + wait_us // 2, sent_us + wait_us
        ended = started + run_us
        chance = random.random(count)
        kind = np.where(chance < FAILED, FAILED_, np.where(chance < FAILED + REVOKED, REVOKED_, SUCCEEDED))
        if only is not None and ends_in is not None:
            kind[np.isin(task, only)] = ends_in
        told = [
            _Told(SENT, task, attempt, sent_us, np.full(count, NODES)),
            _Told(RECEIVED, task, attempt, received, node),
            _Told(STARTED, task, attempt, started, node),
        ]
        for one in (SUCCEEDED, FAILED_, REVOKED_, *(() if ends_in is None else (ends_in,))):
            these = kind == one
            told.append(_Told(one, task[these], attempt[these], ended[these], node[these]))
        return told

    def _columns(
        self, kind: Numbers, task: Numbers, attempt: Numbers, at_us: Numbers, node: Numbers
    ) -> pa.Table:
        count = len(kind)
        is_task, is_sent, ended = kind != BEAT, kind == SENT, kind == SUCCEEDED
        described = kind <= RECEIVED
        erred = np.isin(kind, (FAILED_, RETRIED_))
        clock = np.where(is_sent, 0, self._clock + np.arange(1, count + 1))
        number = pa.array(task).cast(pa.string())
        found: dict[str, Any] = {
            "digest": pa.array(self._random.integers(-(2**63), 2**63 - 1, count)),
            "type": _chosen([*(f"task-{name}" for name in TYPES), "worker-heartbeat"], kind),
            "slot": _where(is_task, _chosen([*TYPES, ""], kind)),
            "timestamp": _instants(at_us),
            "recorded_at": _instants(at_us + 3000),
            "source": _repeated("synthetic", count),
            "hostname": _chosen(
                [*(f"worker{one:02d}@host{one // 4}" for one in range(NODES)), "shop@client"], node
            ),
            "pid": pa.array(1000 + node),
            "clock": pa.array(clock),
            "utcoffset": pa.array(np.zeros(count)),
            "inc": pa.array(BEGAN_US - node),
            "seq": pa.array(self._counted(node)),
            "uuid": _where(is_task, self._uuids.take(pa.array(task))),
            "retries": _where(is_task, pa.array(attempt)),
            "name": _where(
                described, _chosen([f"shop.tasks.step_{one}" for one in range(NAMES)], self._name[task])
            ),
            "args": _where(described, pc.binary_join_element_wise("(", number, ", 'order')", "")),
            "kwargs": _where(described, pc.binary_join_element_wise("{'customer': ", number, "}", "")),
            "root_id": _where(described, self._uuids.take(pa.array(task))),
            "queue": _where(is_sent, _repeated("celery", count)),
            "routing_key": _where(is_sent, _repeated("celery", count)),
            "result": _where(ended, pc.binary_join_element_wise("{'charged': ", number, "}", "")),
            "runtime": _where(ended, pa.array(self._random.lognormal(-2.0, 1.5, count))),
            "exception": _where(erred, pc.binary_join_element_wise("ValueError('order ", number, "')", "")),
            "traceback": _where(erred, _repeated(TRACEBACK, count)),
            "freq": _where(~is_task, pa.array(np.full(count, BEAT_US / 1e6))),
            "sw_ident": _where(~is_task, _repeated("umbel", count)),
            "terminated": _where(kind == REVOKED_, pa.array(np.ones(count, dtype=bool))),
        }
        columns = [found.get(field.name, pa.nulls(count, field.type)) for field in SCHEMA]
        return pa.table(
            [_cast(one, field.type) for one, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
        )

    def _counted(self, node: Numbers) -> Numbers:
        """The place of each event among those of its node, from 1, without gaps."""
        ordered = np.argsort(node, kind="stable")
        firsts = np.searchsorted(node[ordered], np.arange(NODES + 1))
        counted = np.empty(len(node), dtype=np.int64)
        counted[ordered] = np.arange(len(node)) - firsts[node[ordered]] + 1
        counted += self._counters[node]
        self._counters += np.bincount(node, minlength=NODES + 1)
        return counted

    def _arrived(self, table: pa.Table, at_us: Numbers) -> pa.Table:
        """In the order of arrival, some late, some twice."""
        random, count = self._random, table.num_rows
        late_us = np.where(random.random(count) < LATE, random.integers(0, LATE_MAX_US, count), 0)
        twice = np.flatnonzero(random.random(count) < TWICE)
        place = np.concatenate([np.arange(count), twice])
        arrived_us = np.concatenate([at_us + 3000 + late_us, at_us[twice] + 2_000_000])
        ordered = np.argsort(arrived_us, kind="stable")
        table = table.take(pa.array(place[ordered]))
        recorded = table.schema.get_field_index("recorded_at")
        return table.set_column(recorded, SCHEMA.field(recorded), _instants(arrived_us[ordered]))


def _uuids(random: np.random.Generator, count: int) -> pa.Array:
    """Random ids as text, without a loop: bytes, their hexadecimal digits, dashes between them."""
    digits = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
    raw = random.integers(0, 256, (count, 16), dtype=np.uint8)
    text = np.full((count, 36), ord("-"), dtype=np.uint8)
    places = [place for place in range(36) if place not in {8, 13, 18, 23}]
    text[:, places[0::2]], text[:, places[1::2]] = digits[raw >> 4], digits[raw & 15]
    offsets = np.arange(0, 36 * (count + 1), 36, dtype=np.int32)
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets.tobytes()), pa.py_buffer(text.tobytes()))


def _chosen(texts: list[str], index: Numbers) -> pa.Array:
    return pa.array(texts).take(pa.array(index))


def _repeated(text: str, count: int) -> pa.Array:
    return pa.array([text]).take(pa.array(np.zeros(count, dtype=np.int64)))


def _instants(at_us: Numbers) -> pa.Array:
    return pa.array(at_us).cast(INSTANT)


def _where(mask: Numbers, values: pa.Array) -> pa.Array:
    return pc.if_else(pa.array(mask), values, pa.scalar(None, values.type))


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return column if column.type == kind else column.cast(kind)
