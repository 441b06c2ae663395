"""Integrity: rows that are not what the schema says are set aside, each with its reason.

SQLite stores any value in any column, and other programs, or a bad disk, may write to the file. A row that
cannot be used must not end a worker, delay other tasks or go unnoticed. So each column has a condition. A row
that does not meet it leaves its table: a message goes to the dead letters, any other row to the table
`set_aside`, as the SQL text of its values. Each is logged once, with what to do. What other rows lose with it
is restored: a message gets its place in the queue again, a claim its owner, a chord a failed part.

When: everything is checked after a row could not be read (`rows.Malformed`), and now and then by a worker;
the few rows on which all others depend also whenever a worker returns the messages of dead owners.

Where it stops being right: a value of the right type and range is believed. A table of many millions of rows
is checked only after one of them could not be read.
"""

import logging
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic

from umbel.brokers.sqlite import limits, rows
from umbel.brokers.sqlite.coordination import is_request
from umbel.brokers.sqlite.rows import ID_MAX
from umbel.errors import ChordError
from umbel.protocol.delivery.states import FAILURE
from umbel.protocol.leadership.coordination import ElectionState
from umbel.wire.result import exception_map
from umbel.wire.values import encode_json

log = logging.getLogger("umbel.brokers.sqlite")

SET_ASIDE_MAX = 10_000  # rows that are retained; the oldest make room
TEXTS_AT_ONCE = 200_000
LOOK_S = 2.0  # a fork waits for the check
STEPS_BETWEEN_LOOKS = 100_000  # at the clock
RENUMBERED_MAX = 1000  # messages; more are buried
SHOWN_MAX = 20  # rows of one table that are logged; the others are only counted
SHOWN_CHARS, RETAINED_CHARS = 120, 65_536  # of one value
JUMP = 1_000_000  # how many more ids may have been given than are there, if the last one is not known

_TEXT = "typeof({0}) = 'text'"
_BLOB = "typeof({0}) = 'blob'"
_COUNT = f"typeof({{0}}) = 'integer' AND {{0}} BETWEEN 0 AND {ID_MAX}"
_NANOSECONDS = "typeof({0}) = 'integer' AND {0} >= 0"
_FLAG = "typeof({0}) = 'integer' AND {0} IN (0, 1)"
_PRIORITY = "typeof({0}) = 'integer' AND {0} BETWEEN 0 AND 9"
_PLACE = f"typeof({{0}}) = 'null' OR {_COUNT}"
_NUMBER = "typeof({0}) = 'real' AND {0} >= 0"
_STATE = f"coalesce({{0}} IN ({', '.join(repr(state.value) for state in ElectionState)}), 0)"
_REQUEST = "CASE typeof({0}) WHEN 'blob' THEN umbel_is_request({0}) ELSE 0 END"
_NAMES = """CASE WHEN typeof({0}) = 'text' AND json_valid({0}) THEN json_type({0}) = 'array'
            AND NOT EXISTS (SELECT 1 FROM json_each({0}) WHERE type <> 'text') ELSE 0 END"""


@dataclass(frozen=True, slots=True)
class RepairTimes:
    """The times and settings of the store that repairs need."""

    wall_s: float
    boot_s: float
    boot_id: str
    lease_s: float
    revoke_retention_s: float


@dataclass(frozen=True, slots=True)
class MalformedRow:
    """A row that was set aside, or several."""

    table: str
    row: str
    problem: str
    remedy: str


Look = Callable[[sqlite3.Connection], bool]
Rescue = Callable[[sqlite3.Connection, str, RepairTimes], None]
"""Repairs rows that meet a condition; those that still meet it afterwards leave the table."""


@dataclass(frozen=True, slots=True)
class TableRules:
    """The conditions that each row of a table must meet, and what is done with the others."""

    columns: Mapping[str, str]  # the condition of each
    remedy: str
    whole: str = "1"  # the condition of a row
    rescue: Rescue | None = None

    def usable(self, column: str, *, is_text: bool = False) -> str:
        """The SQL condition that a column's value can be used; `is_text`: also that its text decodes."""
        condition = self.columns[column].format(f'"{column}"')
        return f"({condition}) AND {_is_text(column)}" if is_text else f"({condition})"

    def malformed(self, texts: Sequence[str] = ()) -> str:
        """The condition of a row that is set aside. `texts`: columns in which each text is decoded."""
        conditions = [self.usable(column, is_text=column in texts) for column in self.columns]
        return " OR ".join(f"NOT ({condition})" for condition in [*conditions, self.whole])

    @property
    def problem(self) -> str:
        """The SQL expression that says what is wrong with such a row."""
        parts = [
            f"CASE WHEN {self.usable(column, is_text=self.columns[column] == _TEXT)} THEN '' "
            f"ELSE '; {column} is ' || {_shown(column, SHOWN_CHARS)} END"
            for column in self.columns
        ]
        parts.append(f"CASE WHEN {self.whole} THEN '' ELSE '; its values do not fit each other' END")
        return f"substr({' || '.join(parts)}, 3)"

    def values(self, chars: int) -> str:
        """The SQL expression for the row as text that people read."""
        return " || ', ' || ".join(f"'{column} = ' || {_shown(column, chars)}" for column in self.columns)


def _is_text(column: str) -> str:
    return f'umbel_is_text(CAST("{column}" AS BLOB))'


def _shown(column: str, chars: int) -> str:
    """A value as SQL text; a text that is not UTF-8 by its bytes."""
    return f"""substr(CASE WHEN typeof("{column}") = 'text' AND NOT {_is_text(column)}
               THEN quote(CAST("{column}" AS BLOB)) ELSE quote("{column}") END, 1, {chars})"""


# ---- what is saved of rows that are removed -----------------------------------------------------------

_SLIPS = ("ready", "delayed", "limited", "claimed")
_FILED = "(SELECT value FROM meta WHERE name = 'filed')"
_FILED_ALREADY = f"id <= {_FILED}"


def _bury(db: sqlite3.Connection, which: str, reason: str, now: RepairTimes) -> None:
    """Turn messages into dead letters; their slips are removed, and what they hold is freed."""
    messages = TABLES["messages"]
    # Read once: when slips are removed, other messages meet the condition.
    ids = rows.pack(number for (number,) in db.execute(f"SELECT id FROM messages WHERE {which}"))
    buried = "SELECT value FROM json_each(?)"
    db.execute(
        f"""INSERT INTO dead_letters (queue, priority, starts, reason, buried_at, message)
            SELECT CASE WHEN {messages.usable("queue", is_text=True)} THEN queue ELSE '' END,
                   CASE WHEN {messages.usable("priority")} THEN priority ELSE 0 END,
                   CASE WHEN {messages.usable("starts")} THEN starts ELSE 0 END,
                   {reason}, ?, coalesce(CAST(message AS BLOB), x'') FROM messages WHERE id IN ({buried})""",
        (now.wall_s, ids),
    )
    limits.release_keys(db, buried, (ids,))
    # The next sweep frees it, and calls the next message.
    db.execute(f"UPDATE slots SET until = 0 WHERE ticket = {limits.CALLED} AND id IN ({buried})", (ids,))
    for table in (*_SLIPS, "messages"):
        db.execute(f"DELETE FROM {table} WHERE id IN ({buried})", (ids,))


def _renumber_or_bury(db: sqlite3.Connection, malformed: str, now: RepairTimes) -> None:
    """Replace ids that are out of range: while the highest is used, SQLite gives every message such an id."""
    usable = " AND ".join(TABLES["messages"].usable(column) for column in ("queue", "priority", "starts"))
    out_of_range = f"NOT (id BETWEEN 0 AND {ID_MAX})"
    strays = db.execute(
        f"SELECT id FROM messages WHERE {out_of_range} AND {usable} LIMIT {RENUMBERED_MAX}"
    ).fetchall()
    last = db.execute(f"SELECT coalesce(max(id), 0) FROM messages WHERE NOT ({out_of_range})").fetchone()[0]
    for number, (stray,) in enumerate(strays, last + 1):
        for table in ("messages", *_SLIPS):
            db.execute(f"UPDATE {table} SET id = ? WHERE id = ?", (number, stray))
    _bury(db, malformed, f"'malformed row of table messages: ' || {TABLES['messages'].problem}", now)


def _left_alone(table: str, which: str) -> str:
    """The condition of messages whose only slips are in these rows."""
    others = " AND ".join(f"id NOT IN (SELECT id FROM {other})" for other in _SLIPS if other != table)
    return f"""id IN (SELECT id FROM {table} WHERE {which}) AND {_FILED_ALREADY} AND {others}
               AND id NOT IN (SELECT id FROM {table} WHERE NOT ({which}))"""


def _bury_delayed(db: sqlite3.Connection, malformed: str, now: RepairTimes) -> None:
    reason = "'malformed row of table delayed: nothing says when the task is due'"
    _bury(db, _left_alone("delayed", malformed), reason, now)


def _file_again(table: str, *, ran: bool = False) -> Rescue:
    """Put the messages of these rows into their queues again, at their places."""

    def rescue(db: sqlite3.Connection, which: str, _now: RepairTimes) -> None:
        theirs = _left_alone(table, which)
        if ran:
            db.execute(f"UPDATE messages SET redelivered = 1 WHERE {theirs}")
        db.execute(f"INSERT INTO ready SELECT queue, priority, id FROM messages WHERE {theirs}")

    return rescue


def _change(table: str, change: str, *named: str) -> Rescue:
    """Give usable values to rows whose identifying columns are usable."""

    def rescue(db: sqlite3.Connection, malformed: str, now: RepairTimes) -> None:
        known = " AND ".join(TABLES[table].usable(column, is_text=True) for column in named)
        values = {
            "now": now.wall_s,
            "lease_ends": now.boot_s + now.lease_s,
            "revoke_ends": now.wall_s + now.revoke_retention_s,
            "failure": _PART_FAILED,
        }
        db.execute(f"UPDATE OR IGNORE {table} SET {change} WHERE ({malformed}) AND {known}", values)

    return rescue


_PART_FAILED = encode_json(
    exception_map(ChordError("the result of this part was malformed in the table chord_parts"))
)
_SEE = "see the table set_aside of the file"
_LETTER = {
    "id": _COUNT,
    "queue": _TEXT,
    "priority": _PRIORITY,
    "starts": _COUNT,
    "reason": _TEXT,
    "buried_at": _NUMBER,
    "message": _BLOB,
}
TABLES: Mapping[str, TableRules] = {
    "messages": TableRules(
        {
            "id": _COUNT,
            "queue": _TEXT,
            "priority": _PRIORITY,
            "starts": _COUNT,
            "redelivered": _FLAG,
            "message": "1",  # bytes that are no message are buried by the worker that claims them
        },
        "see `umbel dlq ls`: it is a dead letter, unless only its id was wrong",
        rescue=_renumber_or_bury,
    ),
    "ready": TableRules(
        {"queue": _TEXT, "priority": _PRIORITY, "id": _COUNT},
        "nothing: its message has its place again",
        rescue=_file_again("ready"),
    ),
    "delayed": TableRules(
        {"not_before": _NUMBER, "id": _COUNT, "queue": _TEXT, "priority": _PRIORITY},
        "its message is a dead letter: see `umbel dlq ls`, and requeue it when it is due",
        rescue=_bury_delayed,
    ),
    "limited": TableRules(
        {"bucket": _TEXT, "id": _COUNT, "queue": _TEXT, "priority": _PRIORITY},
        "nothing: its message has its place again",
        rescue=_file_again("limited"),
    ),
    "claimed": TableRules(
        {"id": _COUNT, "ticket": _NANOSECONDS, "owner": _TEXT},
        "nothing: its message runs again, marked as redelivered",
        rescue=_file_again("claimed", ran=True),
    ),
    "owners": TableRules(
        {"owner": _TEXT, "expires_at": _NUMBER},
        "nothing: the lease of this worker began again",
        rescue=_change("owners", "expires_at = :lease_ends", "owner"),
    ),
    "dead_letters": TableRules(_LETTER, f"{_SEE}; send the task again if it is still wanted"),
    "failed": TableRules({**_LETTER, "task_id": _TEXT}, f"{_SEE}; send the task again if it is still wanted"),
    "results": TableRules(
        {"task_id": _TEXT, "status": _TEXT, "payload": _BLOB, "expires_at": _NUMBER},
        "its caller finds no result: send the task again",
    ),
    "chords": TableRules(
        {"group_id": _TEXT, "size": _COUNT, "done": _FLAG, "expires_at": _NUMBER},
        "its callback never runs: send the chord again",
    ),
    "chord_parts": TableRules(
        {"group_id": _TEXT, "task_id": _TEXT, "place": _PLACE, "status": _TEXT, "payload": _BLOB},
        "the chord fails: send it again",
        rescue=_change(
            "chord_parts",
            f"place = NULL, status = '{FAILURE}', payload = :failure",
            "group_id",
            "task_id",
        ),
    ),
    "chord_progress": TableRules(
        {"group_id": _TEXT, "ended": _COUNT}, "nothing: the parts are counted again"
    ),
    "waiters": TableRules(
        {"channel": _TEXT, "address": _BLOB}, "nothing: a waiting client looks again by itself"
    ),
    "subscriptions": TableRules(
        {"id": _COUNT, "exchange": _TEXT, "expires_at": _NUMBER},
        "nothing: a listening worker or client subscribes again by itself",
    ),
    "broadcasts": TableRules(
        {
            "offset": _COUNT,
            "exchange": _TEXT,
            "routing_key": _TEXT,
            "body": _BLOB,
            "headers": _BLOB,
            "expires_at": _NUMBER,
        },
        "a command to workers, an event or a reply is lost: repeat the command if it had no effect",
    ),
    "recorders": TableRules(
        {"name": _TEXT, "acknowledged": _COUNT},
        "nothing: the recorder reads from the first event that is there",
        rescue=_change(
            "recorders",
            'acknowledged = coalesce((SELECT min("offset") FROM events WHERE "offset" > 0), 1) - 1',
            "name",
        ),
    ),
    "events": TableRules(
        {"offset": _COUNT, "recorded_at": _NUMBER, "routing_key": _TEXT, "body": _BLOB},
        f"an event is missing from the history; {_SEE}",
    ),
    "revokes": TableRules(
        {"cursor": _COUNT, "task_id": _TEXT, "header": _TEXT, "recorded_at": _NUMBER, "expires_at": _NUMBER},
        f"{_SEE}; revoke the task again if its id cannot be read",
        rescue=_change(
            "revokes",
            "recorded_at = :now, expires_at = :revoke_ends",
            "cursor",
            "task_id",
            "header",
        ),
    ),
    "elections": TableRules(
        {
            "key": _TEXT,
            "state": _STATE,
            "request": _REQUEST,
            "changed_at": _NUMBER,
            "holder": _TEXT,
            "term": _COUNT,
            "attempt": _COUNT,
            "started": _FLAG,
            "expires_at": _NUMBER,
            "ttl_s": _NUMBER,
            "outcome": _TEXT,
        },
        f"{_SEE}; start the election again, under another id",
    ),
    "leases": TableRules(
        {"name": _TEXT, "holder": _TEXT, "term": _COUNT, "expires_at": _NUMBER, "data": _BLOB},
        "nothing: the lease is free, and a worker takes it",
        rescue=_change(
            "leases",
            """holder = '', term = 0, expires_at = 0,
               data = CASE WHEN typeof(data) = 'blob' THEN data ELSE x'' END""",
            "name",
        ),
    ),
    "marks": TableRules(
        {"node": _TEXT, "incarnation": _COUNT, "expires_at": _NUMBER},
        "nothing: the worker says by itself that it is alive",
    ),
    "uniques": TableRules(
        {"key": _TEXT, "task_id": _TEXT, "expires_at": _NUMBER},
        "a unique task can be sent again, also while it still waits or runs",
    ),
    "signatures": TableRules(
        {"mark": _TEXT, "message_id": _COUNT, "expires_at": _NUMBER},
        "a copy of one signed message would not be refused; see the table set_aside of the file",
    ),
    "pauses": TableRules(
        {"queue": _TEXT, "since": _NUMBER, "told": _NAMES},
        "nothing: the queue stays paused",
        rescue=_change("pauses", "since = :now, told = '[]'", "queue"),
    ),
    "limits": TableRules(
        {
            "bucket": _TEXT,
            "most": _COUNT,
            "interval_s": _NUMBER,
            "slack_s": _NUMBER,
            "free_at": _NUMBER,
            "waiting": _COUNT,
        },
        "nothing: the limit holds from the next task on",
        whole="(most > 0 OR interval_s > 0)",
    ),
    "slots": TableRules(
        {"bucket": _TEXT, "id": _COUNT, "ticket": _NANOSECONDS, "until": _NUMBER},
        "nothing: one task more than the limit says may run until this one ends",
    ),
}
_SMALL = ("owners", "subscriptions", "recorders", "leases", "marks", "pauses")

# ---- rows that contradict others ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Relation:
    """Rows of a table that must not exist, because of rows that exist, or do not, in other tables."""

    table: str
    where: str
    problem: str
    rescue: Rescue | None = None
    remedy: str = "nothing: its message has its place"


def _without(table: str, other: str, key: str, rescue: Rescue | None, remedy: str) -> Relation:
    where = f"{key} NOT IN (SELECT {key} FROM {other})"
    return Relation(table, where, f"its {key} is not in table {other}", rescue, remedy)


RELATIONS = (
    *(
        _without(slips, "messages", "id", None, "nothing: a message of this id is not there")
        for slips in _SLIPS
    ),
    *(
        Relation(table, f"id IN (SELECT id FROM {other})", f"its message is in table {other}, too")
        for table, other in (
            ("delayed", "claimed"),
            ("limited", "claimed"),
            ("limited", "delayed"),
            ("ready", "claimed"),
            ("ready", "delayed"),
            ("ready", "limited"),
        )
    ),
    _without(
        "limited", "limits", "bucket", _file_again("limited"), "nothing: its message has its place again"
    ),
    _without("chord_parts", "chords", "group_id", None, "nothing: the chord has ended, or was set aside"),
)
# Mostly a message is where its columns say; the other places are searched only for the rest.
_ORPHAN = f"""NOT EXISTS (SELECT 1 FROM ready WHERE ready.queue = messages.queue
                            AND ready.priority = messages.priority AND ready.id = messages.id)
              AND {" AND ".join(f"id NOT IN (SELECT id FROM {table})" for table in reversed(_SLIPS))}"""
_OWNERLESS = "owner NOT IN (SELECT owner FROM owners)"
_PARTS_ENDED = """(SELECT count(*) FROM chord_parts
                   WHERE chord_parts.group_id = chords.group_id AND chord_parts.status <> '')"""


def suspects(db: sqlite3.Connection) -> list[str]:
    """The tables with malformed rows. This only reads, so that no process waits while it checks millions of
    rows.
    """
    return [
        name for name, table in TABLES.items() if _any(db, name, table.malformed()) or _bad_texts(db, name)
    ]


def check_all(
    db: sqlite3.Connection, now: RepairTimes, tables: Sequence[str] = tuple(TABLES)
) -> list[MalformedRow]:
    """Set aside what is malformed, in a transaction of the caller: rows of these tables, relations of all."""
    found = [*_meta(db, now), *_sequences(db)]
    for name in tables:
        table = TABLES[name]
        found += _set_aside(
            db, name, table.malformed(_bad_texts(db, name)), table.problem, table.rescue, table.remedy, now
        )
    for relation in RELATIONS:
        found += _set_aside(
            db, relation.table, relation.where, f"'{relation.problem}'", relation.rescue, relation.remedy, now
        )
    found += [*_sequences(db), *_restore(db, now)]
    if found:
        limits.recount_waiting(db)
        db.execute("DELETE FROM set_aside WHERE id <= (SELECT max(id) FROM set_aside) - ?", (SET_ASIDE_MAX,))
    return found


def check_few(db: sqlite3.Connection, now: RepairTimes) -> list[MalformedRow]:
    """The same, if one of the few rows on which all others depend is malformed: that is one statement."""
    return check_all(db, now) if db.execute(_SUSPECT).fetchone()[0] else []


def looks() -> Iterator[Look]:
    """Checks of one part of the file each; if all return True, `check_all` would find nothing.

    They only read, and each takes LOOK_S at most: what is larger is assumed to be sound.
    """
    conditions = [(name, table.malformed()) for name, table in TABLES.items()]
    conditions += [(relation.table, relation.where) for relation in RELATIONS]
    conditions += [("messages", f"{_FILED_ALREADY} AND {_ORPHAN}"), ("claimed", _OWNERLESS)]
    for table, where in conditions:
        yield partial(_in_time, partial(_none, table=table, where=where))
    for name in TABLES:
        yield partial(_in_time, partial(_all_readable, name=name))
    yield partial(_in_time, partial(_none, table="(SELECT 1)", where=_FILED_IS_WRONG))


def _in_time(look: Look, db: sqlite3.Connection) -> bool:
    ends = monotonic() + LOOK_S
    db.set_progress_handler(lambda: int(monotonic() > ends), STEPS_BETWEEN_LOOKS)
    try:
        return look(db)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        return True
    finally:
        db.set_progress_handler(None, 0)


def _none(db: sqlite3.Connection, table: str, where: str) -> bool:
    return not _any(db, table, where)


def _all_readable(db: sqlite3.Connection, name: str) -> bool:
    return not _bad_texts(db, name)


def report(found: Sequence[MalformedRow], path: Path) -> None:
    """Log each row that was set aside; call it when the transaction has ended."""
    for row in found:
        log.error(
            "malformed row in the database file; set aside",
            extra={
                "file": str(path),
                "table": row.table,
                "row": row.row,
                "why": row.problem,
                "remedy": row.remedy,
            },
        )


def prepare(db: sqlite3.Connection) -> None:
    """Add the SQL functions that the checks use to a connection."""
    db.create_function("umbel_is_text", 1, _decodes, deterministic=True)
    db.create_function("umbel_is_request", 1, is_request, deterministic=True)


def _decodes(data: bytes | None) -> bool:
    try:
        return data is None or data.decode() is not None
    except UnicodeDecodeError:
        return False


def _bad_texts(db: sqlite3.Connection, name: str) -> list[str]:
    """The columns with texts that are not UTF-8.

    Many texts are read end to end: reading each would give up the interpreter lock for every row.
    """
    columns = [column for column, condition in TABLES[name].columns.items() if condition in (_TEXT, _NAMES)]
    bad: set[str] = set()
    count, place = TEXTS_AT_ONCE, 0
    while columns and count == TEXTS_AT_ONCE:
        joined = ", ".join(f"""CAST(group_concat("{column}", char(10)) AS BLOB)""" for column in columns)
        some = f"SELECT * FROM {name} LIMIT {TEXTS_AT_ONCE} OFFSET {place}"
        count, *texts = db.execute(f"SELECT count(*), {joined} FROM ({some})").fetchone()
        place += count
        bad.update(column for column, text in zip(columns, texts, strict=True) if not _decodes(text))
    return list(bad)


def _any(db: sqlite3.Connection, table: str, where: str) -> bool:
    return db.execute(f"SELECT 1 FROM {table} WHERE {where} LIMIT 1").fetchone() is not None


def _set_aside(
    db: sqlite3.Connection,
    name: str,
    where: str,
    problem: str,
    rescue: Rescue | None,
    remedy: str,
    now: RepairTimes,
) -> Iterator[MalformedRow]:
    table = TABLES[name]
    shown = db.execute(
        f"""SELECT CAST({table.values(SHOWN_CHARS)} AS BLOB), CAST({problem} AS BLOB) FROM {name}
            WHERE {where} LIMIT {SHOWN_MAX}"""
    ).fetchall()
    if not shown:
        return
    retained = db.execute(
        f"""INSERT INTO set_aside (name, row, problem, set_aside_at)
            SELECT '{name}', {table.values(RETAINED_CHARS)}, {problem}, ? FROM {name} WHERE {where}""",
        (now.wall_s,),
    )
    if rescue is not None:
        rescue(db, where, now)
    db.execute(f"DELETE FROM {name} WHERE {where}")
    for row, why in shown:
        yield MalformedRow(name, row.decode(errors="replace"), why.decode(errors="replace"), remedy)
    if retained.rowcount > len(shown):
        yield MalformedRow(name, f"{retained.rowcount - len(shown):,} rows more", "likewise", remedy)


# ---- single values, and what is counted from rows -----------------------------------------------------

_META = {
    rows.BOOT_ID: _TEXT,
    rows.BORN: _NUMBER,
    rows.CLUSTER: _TEXT,
    rows.CLUSTER_SINCE: _NUMBER,
    **dict.fromkeys(
        (
            rows.LAST_TERM,
            rows.CLOCK,
            rows.ADDITIONS,
            "events_lost",
            "events_dropped",
            "dead_letters_dropped",
            "failed_dropped",
        ),
        _COUNT,
    ),
}
_NUMBERED = {
    "messages": "id",
    "dead_letters": "id",
    "failed": "id",
    "subscriptions": "id",
    "broadcasts": "offset",
    "events": "offset",
    "revokes": "cursor",
    "set_aside": "id",
}


_META_USABLE = {
    name: condition.format("value") + (f" AND {_is_text('value')}" if condition == _TEXT else "")
    for name, condition in _META.items()
}
_UNNAMED = f"NOT ({_TEXT.format('name')} AND {_is_text('name')})"
_META_MALFORMED = " OR ".join(
    [_UNNAMED, *(f"(name = '{name}' AND NOT ({usable}))" for name, usable in _META_USABLE.items())]
)
_UNKNOWN_SEQUENCE = "name NOT IN (SELECT name FROM sqlite_master)"


def _meta(db: sqlite3.Connection, now: RepairTimes) -> Iterator[MalformedRow]:
    for name, usable in _META_USABLE.items():
        if shown := _removed(db, "meta", f"name = '{name}' AND NOT ({usable})", "value"):
            remedy = _RESTORE if name == rows.CLUSTER else _BEGINS_AGAIN
            yield MalformedRow("meta", f"name = '{name}'", f"value is {shown}", remedy)
        if shown and name == rows.BOOT_ID:  # this is no restart of the machine: claims and leases stand
            rows.put_meta(db, name, now.boot_id)
    if shown := _removed(db, "meta", _UNNAMED, "name"):
        yield MalformedRow("meta", "", f"name is {shown}", _BEGINS_AGAIN)


def _sequences(db: sqlite3.Connection) -> Iterator[MalformedRow]:
    """The last ids of AUTOINCREMENT tables: a wrong one makes every insert fail, or gives ids twice."""
    if shown := _removed(db, "sqlite_sequence", _UNKNOWN_SEQUENCE, "name"):
        yield MalformedRow("sqlite_sequence", "", f"name is {shown}", _BEGINS_AGAIN)
    for name, key in _NUMBERED.items():
        shown = _removed(db, "sqlite_sequence", f"name = '{name}' AND NOT ({_COUNT.format('seq')})", "seq")
        if shown:
            yield MalformedRow("sqlite_sequence", f"name = '{name}'", f"seq is {shown}", _BEGINS_AGAIN)
        known = f"SELECT 1 FROM sqlite_sequence WHERE name = '{name}'"
        if name == "messages" or not (shown or _any(db, name, f"NOT EXISTS ({known})")):
            continue
        usable = f'SELECT coalesce(max("{key}"), 0) FROM {name} WHERE "{key}" <= {ID_MAX}'
        read = f"SELECT coalesce(max(acknowledged), 0) FROM recorders WHERE {_COUNT.format('acknowledged')}"
        # A gap in the events would count as lost events.
        last = f"max(({usable}), ({read}))" if name == "events" else f"({usable}) + {JUMP}"
        db.execute(f"INSERT INTO sqlite_sequence (name, seq) SELECT '{name}', {last}")


def _removed(db: sqlite3.Connection, table: str, where: str, column: str) -> str:
    """The value of the column in the first of these rows, which are removed; "": there are none."""
    shown = db.execute(
        f"SELECT CAST({_shown(column, SHOWN_CHARS)} AS BLOB) FROM {table} WHERE {where} LIMIT 1"
    ).fetchone()
    if shown is None:
        return ""
    db.execute(f"DELETE FROM {table} WHERE {where}")
    return str(shown[0].decode(errors="replace"))


_BEGINS_AGAIN = "nothing: it has a value again"
_RESTORE = (
    "restore it with the id that you noted: umbel cluster-id restore ID; until then no signed message runs"
)


def _filed_is_wrong(slips: Sequence[str]) -> str:
    """The condition that the mark `filed` is missing, or contradicts the rows."""
    fits = " AND ".join(f"value >= coalesce((SELECT max(id) FROM {table}), 0)" for table in slips)
    return f"""NOT EXISTS (SELECT 1 FROM meta WHERE name = 'filed' AND {_COUNT.format("value")} AND {fits}
                           AND value <= coalesce((SELECT max(id) FROM messages), 0))"""


_FILED_IS_WRONG = _filed_is_wrong(_SLIPS)


_SUSPICIONS = (
    ("meta", _META_MALFORMED),
    ("sqlite_sequence", f"NOT ({_COUNT.format('seq')}) OR {_UNKNOWN_SEQUENCE}"),
    *((name, f'"{key}" > {ID_MAX}') for name, key in _NUMBERED.items()),
    *((name, TABLES[name].malformed()) for name in _SMALL),
)
# For slips other than `claimed` no index gives the highest id.
_SUSPECT = " OR ".join(
    [
        f"SELECT {_filed_is_wrong(['claimed'])}",
        *(f"EXISTS (SELECT 1 FROM {table} WHERE {where})" for table, where in _SUSPICIONS),
    ]
)


def _restore(db: sqlite3.Connection, now: RepairTimes) -> Iterator[MalformedRow]:
    """Restore what rows lack because others were malformed, or are gone."""
    if _any(db, "claimed", _OWNERLESS):
        ends = now.boot_s + now.lease_s
        db.execute(f"INSERT INTO owners SELECT DISTINCT owner, ? FROM claimed WHERE {_OWNERLESS}", (ends,))
        yield MalformedRow("owners", "", "an owner of claims is missing", "nothing: its lease began again")
    if db.execute(f"SELECT {_FILED_IS_WRONG}").fetchone()[0]:
        db.execute(f"INSERT OR IGNORE INTO ready SELECT queue, priority, id FROM messages WHERE {_ORPHAN}")
        rows.put_meta(db, rows.FILED, db.execute("SELECT coalesce(max(id), 0) FROM messages").fetchone()[0])
        yield MalformedRow("meta", "name = 'filed'", "its value does not fit the messages", _BEGINS_AGAIN)
    orphans = f"{_FILED_ALREADY} AND {_ORPHAN}"
    if _any(db, "messages", orphans):  # they may have been claimed
        db.execute(f"UPDATE messages SET redelivered = 1 WHERE {orphans}")
        filed = db.execute(f"INSERT INTO ready SELECT queue, priority, id FROM messages WHERE {orphans}")
        problem = f"{filed.rowcount:,} messages had no place in their queues"
        yield MalformedRow("messages", "", problem, "nothing: they run, marked as redelivered")
    # A part that was given an end above is not counted yet.
    db.execute(f"INSERT OR REPLACE INTO chord_progress SELECT group_id, {_PARTS_ENDED} FROM chords")
