"""Story: all events of one task, each once, in causal order.

It is looked for in the lake's files, which know more than the tables (what was recorded since they
were built), and in the tables, which may know more than the files (what retention has removed since).
An event has the same digest wherever it lies, so what both know is there once. The order is that of
the merge: by attempt, then by Lamport time; what no two senders can order is ordered by their clocks.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from umbel.errors import HistoryError, NothingBuilt
from umbel.events.columns import COLUMNS
from umbel.events.digest import eid
from umbel.events.merge import order_key
from umbel.events.reading import EventReader
from umbel.events.timeline import registers_of
from umbel.events.types import TaskEvent
from umbel.events.view import TaskRecord, view
from umbel.history.arrow import event_schema
from umbel.history.query import read
from umbel.history.scanning import scanned
from umbel.stores.interface import Store, Where
from umbel.stores.refusals import raise_unavailable

log = logging.getLogger(__name__)

EVENTS_MAX = 100_000
"""Of one task; of a task with more, only the first are shown."""

SAYING = ("name", "result", "exception", "queue")


class Told(msgspec.Struct, frozen=True):
    """One event of the story. `order` puts it into its place."""

    digest: int
    type: str
    attempt: int | None
    clock: int
    timestamp: float
    hostname: str
    pid: int
    detail: str | None
    order: tuple[int, int, int, str, int, int]


class Story(msgspec.Struct, frozen=True):
    """`record` is null where only the tables know the task: then `state` is what they say."""

    uuid: str
    state: str
    record: TaskRecord | None
    events: list[Told]


def story_of(uuid: str, events: Iterable[TaskEvent], rows: Iterable[Mapping[str, Any]] = ()) -> Story | None:
    """From events, and from rows of the table `timeline`; None without any."""
    heard = [event for event in events if event.uuid == uuid]
    told = {one.digest: one for one in map(_from_row, rows)} | {one.digest: one for one in map(_told, heard)}
    if not told:
        return None
    record = view(registers_of(uuid, heard)) if heard else None
    ordered = sorted(told.values(), key=lambda one: one.order)
    return Story(uuid, record.state if record else "", record, ordered)


def events_in_files(store: Store, files: Sequence[str], uuid: str) -> list[TaskEvent]:
    """What the lake's files say of a task. One that cannot be read is no reason to show nothing."""
    import duckdb

    found: list[TaskEvent] = []
    reader = EventReader()
    connection = duckdb.connect(":memory:")
    try:
        connection.execute("set TimeZone='UTC'")
        for row in _matching(connection, store, files, uuid):
            event = reader.read(as_wire(row))
            if isinstance(event, TaskEvent):
                found.append(event)
    finally:
        connection.close()
    return found


def rows_in_tables(lake: Where, uuid: str) -> list[dict[str, Any]]:
    """Rows of `timeline`; none where nothing is built."""
    try:
        return read(
            lake,
            lambda tables: tables.ask(
                "select * from timeline where subject = $task_id and task_id = $task_id order by rank",
                {"task_id": uuid},
                limit=EVENTS_MAX,
            ).dicts(),
        )
    except NothingBuilt:
        return []


def as_wire(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the lake as the event that it was: the inverse of `columns.row`."""
    event: dict[str, Any] = msgspec.json.decode(row["extra"]) if row.get("extra") else {}
    for name, value in row.items():
        if value is not None and name not in _NOT_ON_THE_WIRE:
            event[name] = msgspec.json.decode(value) if name in _AS_JSON else value
    timestamp = row.get("timestamp")
    event["timestamp"] = timestamp.timestamp() if isinstance(timestamp, datetime) else 0.0
    return event


_NOT_ON_THE_WIRE = frozenset({"digest", "slot", "extra", "recorded_at", "source", "timestamp"})
_AS_JSON = frozenset(column.name for column in COLUMNS if column.kind == "json")


def _matching(connection: Any, store: Store, files: Sequence[str], uuid: str) -> list[dict[str, Any]]:
    import duckdb

    if not files:
        return []
    source = scanned(connection, "files", store, files, event_schema)
    query = f"select * from {source} where uuid = $uuid limit $limit"
    try:
        result = connection.execute(query, {"uuid": uuid, "limit": EVENTS_MAX})
        names = [one[0] for one in result.description]
        return [dict(zip(names, row, strict=True)) for row in result.fetchall()]
    except duckdb.Error as error:
        raise_unavailable(error)
        if len(files) == 1:
            raise HistoryError(f"{store.where}/{files[0]} cannot be read: {error}") from None
    found: list[dict[str, Any]] = []
    for file in files:  # one of them is torn or gone: take each by itself
        try:
            found += _matching(connection, store, [file], uuid)
        except HistoryError as error:
            log.warning("skipping the events of a history file: %s", str(error))
    return found


def _told(event: TaskEvent) -> Told:
    said = next((value for name in SAYING if (value := getattr(event, name, None)) is not None), None)
    return Told(
        digest=eid(event),
        type=event.type_name,
        attempt=event.retries,
        clock=event.clock,
        timestamp=event.timestamp,
        hostname=event.hostname,
        pid=event.pid,
        detail=said,
        order=order_key(event),
    )


def _from_row(row: Mapping[str, Any]) -> Told:
    at = row["timestamp"] or datetime.fromtimestamp(0, UTC)
    hostname, pid = row["hostname"] or "", row["pid"] or 0
    timestamp = at.timestamp()
    order = (row["attempt"] or 0, row["clock"], round(timestamp * 1_000_000), hostname, pid, row["digest"])
    return Told(
        digest=row["digest"],
        type=row["type"],
        attempt=row["attempt"],
        clock=row["clock"],
        timestamp=timestamp,
        hostname=hostname,
        pid=pid,
        detail=row["detail"],
        order=order,
    )
