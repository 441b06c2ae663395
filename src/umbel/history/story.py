"""Story: the events of one task in causal order, and the tasks that retry it."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from umbel.errors import HistoryError, NothingBuilt
from umbel.events.merge import eid, order_key, registers_of
from umbel.events.tables import COLUMNS
from umbel.events.types import EARLIER_STARTS, TaskEvent, TaskReceived
from umbel.events.view import EventReader, TaskRecord, view
from umbel.history.lake import event_schema
from umbel.history.query import read
from umbel.history.tables import scanned
from umbel.stores.interface import Store, Where, raise_unavailable

# ---- story -----------------------------------------------------------------------------------------

log = logging.getLogger(__name__)

EVENTS_MAX = 100_000
"""Limit of events that are shown for one task."""

SAYING = ("name", "result", "exception", "queue")


class TaskStoryEvent(msgspec.Struct, frozen=True):
    """One event of the story. `order` is the sort key."""

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
    """All events of one task. `record` is None if no events were found in files or logs; then `state` is
    empty.
    """

    uuid: str
    state: str
    record: TaskRecord | None
    events: list[TaskStoryEvent]


def story_of(uuid: str, events: Iterable[TaskEvent], rows: Iterable[Mapping[str, Any]] = ()) -> Story | None:
    """Return the story of a task, from events and rows of `timeline`; None if there are none.

    Events come from two sources: the lake's files, which also contain events that were recorded after the
    last build, and the tables, which may still contain events that were deleted from the files. An event has
    the same digest in both, so it is shown once. Events are sorted by attempt, then by Lamport time; events
    with equal Lamport times are sorted by the clocks of their senders.
    """
    recorded = [event for event in events if event.uuid == uuid]
    entries = {entry.digest: entry for entry in (*map(_from_row, rows), *map(_from_event, recorded))}
    if not entries:
        return None
    record = view(registers_of(uuid, recorded)) if recorded else None
    ordered = sorted(entries.values(), key=lambda entry: entry.order)
    return Story(uuid, record.state if record else "", record, ordered)


def events_in_files(store: Store, files: Sequence[str], uuid: str) -> list[TaskEvent]:
    """Return the events of a task in the lake's files. Skip unreadable files with a warning."""
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
    """Return the rows of a task in the table `timeline`; empty if there is no build."""
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
    """Convert a row of the lake to the fields of the event: the inverse of `tables.row`."""
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
    """Return the rows of a task in the files. If a file is unreadable, read each file separately and skip
    it.
    """
    import duckdb

    if not files:
        return []
    source = scanned(connection, "files", store, files, event_schema)
    query = f"select * from {source} where uuid = $uuid limit $limit"
    try:
        result = connection.execute(query, {"uuid": uuid, "limit": EVENTS_MAX})
        names = [column[0] for column in result.description]
        return [dict(zip(names, row, strict=True)) for row in result.fetchall()]
    except duckdb.Error as error:
        raise_unavailable(error)
        if len(files) == 1:
            raise HistoryError(f"{store.where}/{files[0]} cannot be read: {error}") from None
    found: list[dict[str, Any]] = []
    for file in files:  # a file is damaged or missing: read each file separately
        try:
            found += _matching(connection, store, [file], uuid)
        except HistoryError as error:
            log.warning("skipping the events of a history file: %s", str(error))
    return found


def _from_event(event: TaskEvent) -> TaskStoryEvent:
    """Convert an event to an entry of the story."""
    detail = next((value for name in SAYING if (value := getattr(event, name, None)) is not None), None)
    return TaskStoryEvent(
        digest=eid(event),
        type=event.type_name,
        attempt=event.retries,
        clock=event.clock,
        timestamp=event.timestamp,
        hostname=event.hostname,
        pid=event.pid,
        detail=_with_starts(detail, event.extra),
        order=order_key(event),
    )


def _from_row(row: Mapping[str, Any]) -> TaskStoryEvent:
    """Convert a row of the table `timeline` to an entry of the story."""
    at = row["timestamp"] or datetime.fromtimestamp(0, UTC)
    hostname, pid = row["hostname"] or "", row["pid"] or 0
    timestamp = at.timestamp()
    order = (row["attempt"] or 0, row["clock"], round(timestamp * 1_000_000), hostname, pid, row["digest"])
    return TaskStoryEvent(
        digest=row["digest"],
        type=row["type"],
        attempt=row["attempt"],
        clock=row["clock"],
        timestamp=timestamp,
        hostname=hostname,
        pid=pid,
        detail=_with_starts(row["detail"], msgspec.json.decode(row["extra"]) if row.get("extra") else None),
        order=order,
    )


def _with_starts(detail: str | None, extra: Mapping[str, Any] | None) -> str | None:
    """Add to the detail how often a requeued dead letter had started before."""
    starts = extra.get(EARLIER_STARTS) if extra else None
    return f"{detail or ''}, requeued after {starts} starts" if isinstance(starts, int) else detail


# ---- retries ---------------------------------------------------------------------------------------

FIELD = "retry_of"
LINKS_MAX = 1000


class Link(NamedTuple):
    """One retry: the task `new` retries the task `old`.

    The task-received event of a retry names the task that it retries.
    """

    new: str
    old: str


def links_in_events(events: Iterable[TaskEvent]) -> set[Link]:
    """Return the links between retries that the events contain."""
    return {
        Link(event.uuid, event.extra[FIELD])
        for event in events
        if isinstance(event, TaskReceived) and event.extra and isinstance(event.extra.get(FIELD), str)
    }


def links_in_files(store: Store, files: Sequence[str], uuid: str) -> set[Link]:
    """Return the links from and to a task in the lake's files."""
    import duckdb

    connection = duckdb.connect(":memory:")
    try:
        return set(_links(connection, store, files, uuid))
    finally:
        connection.close()


def _links(connection: Any, store: Store, files: Sequence[str], uuid: str) -> list[Link]:
    """Return the links in the files. If a file is unreadable, read each file separately and skip it."""
    import duckdb

    if not files:
        return []
    source = scanned(connection, "files", store, files, event_schema)
    query = f"""select uuid, extra from {source}
               where type = 'task-received' and contains(extra, $field)
                 and (uuid = $uuid or contains(extra, $uuid)) limit $most"""
    wanted = {"field": f'"{FIELD}"', "uuid": uuid, "most": LINKS_MAX}
    try:
        rows: list[tuple[str, str]] = connection.execute(query, wanted).fetchall()
    except duckdb.Error as error:  # a file is damaged or missing: read each file separately
        raise_unavailable(error)
        if len(files) == 1:
            return []
        return [link for file in files for link in _links(connection, store, [file], uuid)]
    return _about(uuid, rows)


def links_in_tables(lake: Where, uuid: str) -> set[Link]:
    """Return the links from and to a task in the table `timeline`, which may be kept longer than the
    files.
    """
    query = """select task_id, extra from timeline where type = 'task-received' and contains(extra, $field)
               and (task_id = $uuid or contains(extra, $uuid)) order by task_id"""
    wanted = {"field": f'"{FIELD}"', "uuid": uuid}
    try:
        rows = read(lake, lambda tables: tables.ask(query, wanted, limit=LINKS_MAX).dicts())
    except NothingBuilt:
        return set()
    return set(_about(uuid, [(row["task_id"], row["extra"]) for row in rows]))


def _about(uuid: str, rows: Iterable[tuple[str, str]]) -> list[Link]:
    """Return the links that name the task. Other rows may contain its id in other fields."""
    found = [(new, msgspec.json.decode(extra).get(FIELD)) for new, extra in rows]
    return [Link(new, old) for new, old in found if isinstance(old, str) and uuid in (new, old)]
