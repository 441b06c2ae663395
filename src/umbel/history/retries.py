"""Retries: which tasks retry which, from the receipts of retries: each names the task that it retries."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from umbel.errors import NothingBuilt
from umbel.events.types import TaskEvent, TaskReceived
from umbel.history.arrow import event_schema
from umbel.history.query import read
from umbel.history.scanning import scanned
from umbel.stores.interface import Store, Where
from umbel.stores.refusals import raise_unavailable

FIELD = "retry_of"
LINKS_MAX = 1000


class Link(NamedTuple):
    """`new` is a retry of `old`."""

    new: str
    old: str


def links_in_events(events: Iterable[TaskEvent]) -> set[Link]:
    return {
        Link(one.uuid, one.extra[FIELD])
        for one in events
        if isinstance(one, TaskReceived) and one.extra and isinstance(one.extra.get(FIELD), str)
    }


def links_in_files(store: Store, files: Sequence[str], uuid: str) -> set[Link]:
    """Of a task, both ways, from the lake's files."""
    import duckdb

    connection = duckdb.connect(":memory:")
    try:
        return set(_links(connection, store, files, uuid))
    finally:
        connection.close()


def _links(connection: Any, store: Store, files: Sequence[str], uuid: str) -> list[Link]:
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
    except duckdb.Error as error:  # one of them is torn or gone: take each by itself
        raise_unavailable(error)
        if len(files) == 1:
            return []
        return [link for one in files for link in _links(connection, store, [one], uuid)]
    return _about(uuid, rows)


def links_in_tables(lake: Where, uuid: str) -> set[Link]:
    """From the table `timeline`, which may know what the files do not any more."""
    query = """select task_id, extra from timeline where type = 'task-received' and contains(extra, $field)
               and (task_id = $uuid or contains(extra, $uuid)) order by task_id"""
    wanted = {"field": f'"{FIELD}"', "uuid": uuid}
    try:
        rows = read(lake, lambda tables: tables.ask(query, wanted, limit=LINKS_MAX).dicts())
    except NothingBuilt:
        return set()
    return set(_about(uuid, [(row["task_id"], row["extra"]) for row in rows]))


def _about(uuid: str, rows: Iterable[tuple[str, str]]) -> list[Link]:
    """Some may only mention the id elsewhere."""
    found = [(new, msgspec.json.decode(extra).get(FIELD)) for new, extra in rows]
    return [Link(new, old) for new, old in found if isinstance(old, str) and uuid in (new, old)]
