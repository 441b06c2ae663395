"""Integrity: rows that do not fit the schema are moved out of their tables, and the rest is repaired.

SQLite stores any value in any column, and other programs, or a bad disk, may write to the file. A row that
cannot be used must not end a worker, delay other tasks or go unnoticed. So each column has a condition. A row
that does not meet it leaves its table: a message becomes a dead letter, any other row goes to the table
`set_aside`, as the SQL text of its values. Each such row is logged once, with what to do. What other rows
lose with it is restored: a message gets its place in the queue again, a claim its owner, a chord a failed
part.

Everything is checked after a row could not be read (`rows.Malformed`), and regularly by a worker. The few
rows on which all others depend are also checked whenever a worker returns the messages of dead owners.

The limits of this: a value of the right type and range is believed. A table of many millions of rows is
checked only after one of its rows could not be read.
"""

import logging
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic

from umbel.brokers.sqlite import limits, rows, schema
from umbel.brokers.sqlite.coordination import is_request
from umbel.brokers.sqlite.rows import ID_MAX
from umbel.errors import ChordError
from umbel.protocol.delivery.states import FAILURE
from umbel.protocol.leadership.coordination import ElectionState
from umbel.wire.result import exception_map
from umbel.wire.values import encode_json

log = logging.getLogger("umbel.brokers.sqlite")

SET_ASIDE_MAX = 10_000  # rows in `set_aside`; the oldest make room
TEXTS_AT_ONCE = 200_000
LOOK_S = 2.0  # for one part of the regular check, because a fork waits for it
STEPS_BETWEEN_LOOKS = 100_000  # of SQLite's machine, until the time is read again
RENUMBERED_MAX = 1000  # messages that get a new id; more become dead letters
SHOWN_MAX = 20  # rows of one table that are logged; the others are only counted
SHOWN_CHARS, RETAINED_CHARS = 120, 65_536  # of one value
JUMP = 1_000_000  # ids to skip if the last id that was given is not known

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
    """A log entry about rows that were set aside."""

    table: str
    row: str
    problem: str
    remedy: str


Look = Callable[[sqlite3.Connection], bool]
Rescue = Callable[[sqlite3.Connection, str, RepairTimes], None]
"""Repairs rows that meet an SQL condition; rows that still meet it afterwards leave the table."""


@dataclass(frozen=True, slots=True)
class TableRules:
    """The SQL conditions that each row of a table must meet, and what is done with other rows."""

    columns: Mapping[str, str]  # the condition of each
    remedy: str
    whole: str = "1"  # a condition of the row as a whole
    rescue: Rescue | None = None

    def usable(self, column: str, *, is_text: bool = False) -> str:
        """The condition that a column's value can be used; `is_text`: also that its text can be decoded."""
        condition = self.columns[column].format(f'"{column}"')
        return f"({condition}) AND {_is_text(column)}" if is_text else f"({condition})"

    def malformed(self, texts: Sequence[str] = ()) -> str:
        """The condition of a malformed row. `texts`: columns in which each text is decoded."""
        conditions = [self.usable(column, is_text=column in texts) for column in self.columns]
        return " OR ".join(f"NOT ({condition})" for condition in [*conditions, self.whole])

    @property
    def problem(self) -> str:
        """The expression that says what is wrong with a malformed row."""
        parts = [
            f"CASE WHEN {self.usable(column, is_text=self.columns[column] == _TEXT)} THEN '' "
            f"ELSE '; {column} is ' || {_shown(column, SHOWN_CHARS)} END"
            for column in self.columns
        ]
        parts.append(f"CASE WHEN {self.whole} THEN '' ELSE '; its values do not fit each other' END")
        return f"substr({' || '.join(parts)}, 3)"

    def values(self, chars: int) -> str:
        """The expression for the row as text for people."""
        return " || ', ' || ".join(f"'{column} = ' || {_shown(column, chars)}" for column in self.columns)


def _is_text(column: str) -> str:
    return f'umbel_is_text(CAST("{column}" AS BLOB))'


def _shown(column: str, chars: int) -> str:
    """The expression for a value as SQL text; a text that is not UTF-8 is shown as bytes."""
    return f"""substr(CASE WHEN typeof("{column}") = 'text' AND NOT {_is_text(column)}
               THEN quote(CAST("{column}" AS BLOB)) ELSE quote("{column}") END, 1, {chars})"""


# ---- repairs ---------------------------------------------------------------------------------------

_STATES = ("ready", "delayed", "limited", "claimed")  # the tables with the states of messages
_HAS_STATE = "id <= (SELECT value FROM meta WHERE name = 'filed')"


def _bury(db: sqlite3.Connection, which: str, reason: str, now: RepairTimes) -> None:
    """Turn messages into dead letters; their state rows are removed, and what they hold is freed."""
    messages = TABLES["messages"]
    # Read once: when state rows are removed, other messages meet the condition.
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
    for table in (*_STATES, "messages"):
        db.execute(f"DELETE FROM {table} WHERE id IN ({buried})", (ids,))


def _renumber_or_bury(db: sqlite3.Connection, malformed: str, now: RepairTimes) -> None:
    """Replace ids that are out of range: while one of them is the highest, SQLite gives new messages such
    ids, too.
    """
    usable = " AND ".join(TABLES["messages"].usable(column) for column in ("queue", "priority", "starts"))
    out_of_range = f"NOT (id BETWEEN 0 AND {ID_MAX})"
    strays = db.execute(
        f"SELECT id FROM messages WHERE {out_of_range} AND {usable} LIMIT {RENUMBERED_MAX}"
    ).fetchall()
    last = db.execute(f"SELECT coalesce(max(id), 0) FROM messages WHERE NOT ({out_of_range})").fetchone()[0]
    for number, (stray,) in enumerate(strays, last + 1):
        for table in ("messages", *_STATES):
            db.execute(f"UPDATE {table} SET id = ? WHERE id = ?", (number, stray))
    _bury(db, malformed, f"'malformed row of table messages: ' || {TABLES['messages'].problem}", now)


def _with_no_other_state(table: str, which: str) -> str:
    """The condition of messages that have no state row except these rows of the table."""
    others = " AND ".join(f"id NOT IN (SELECT id FROM {other})" for other in _STATES if other != table)
    return f"""id IN (SELECT id FROM {table} WHERE {which}) AND {_HAS_STATE} AND {others}
               AND id NOT IN (SELECT id FROM {table} WHERE NOT ({which}))"""


def _bury_delayed(db: sqlite3.Connection, malformed: str, now: RepairTimes) -> None:
    reason = "'malformed row of table delayed: nothing says when the task is due'"
    _bury(db, _with_no_other_state("delayed", malformed), reason, now)


def _refile(table: str, *, ran: bool = False) -> Rescue:
    """A repair that puts the messages of the rows into their queues again, at their old places."""

    def rescue(db: sqlite3.Connection, which: str, _now: RepairTimes) -> None:
        theirs = _with_no_other_state(table, which)
        if ran:
            db.execute(f"UPDATE messages SET redelivered = 1 WHERE {theirs}")
        db.execute(f"INSERT INTO ready SELECT queue, priority, id FROM messages WHERE {theirs}")

    return rescue


def _change(table: str, change: str, *named: str) -> Rescue:
    """A repair that gives usable values to rows whose `named` columns, which identify them, are usable."""

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

# The condition of a column follows from its declared type, except for columns with these names.
_BY_TYPE = {"TEXT": _TEXT, "BLOB": _BLOB, "INTEGER": _COUNT, "REAL": _NUMBER}
_BY_NAME = {
    "priority": _PRIORITY,
    "redelivered": _FLAG,
    "done": _FLAG,
    "started": _FLAG,
    "ticket": _NANOSECONDS,
    "place": _PLACE,
    "state": _STATE,
    "request": _REQUEST,
    "told": _NAMES,
}
_COLUMNS = {
    table: {name: _BY_NAME.get(name, _BY_TYPE[kind]) for name, kind in declared.items()}
    for table, declared in schema.columns().items()
}
# Any bytes pass: the worker that claims bytes that are not a message moves them to the dead letters.
_COLUMNS["messages"]["message"] = "1"

_AGAIN = "nothing: its message has its place again"
_REMEDIES = {
    "messages": "see `umbel dlq ls`: it is a dead letter, unless only its id was wrong",
    "ready": _AGAIN,
    "delayed": "its message is a dead letter: see `umbel dlq ls`, and requeue it when it is due",
    "limited": _AGAIN,
    "claimed": "nothing: its message runs again, marked as redelivered",
    "owners": "nothing: the lease of this worker began again",
    "dead_letters": f"{_SEE}; send the task again if it is still wanted",
    "failed": f"{_SEE}; send the task again if it is still wanted",
    "results": "its caller finds no result: send the task again",
    "chords": "its callback never runs: send the chord again",
    "chord_parts": "the chord fails: send it again",
    "chord_progress": "nothing: the parts are counted again",
    "waiters": "nothing: a waiting client checks again by itself",
    "subscriptions": "nothing: a listening worker or client subscribes again by itself",
    "broadcasts": "a command to workers, an event or a reply is lost: repeat the command if it had no effect",
    "recorders": "nothing: the recorder reads from the first event that is there",
    "events": f"an event is missing from the history; {_SEE}",
    "revokes": f"{_SEE}; revoke the task again if its id cannot be read",
    "elections": f"{_SEE}; start the election again, under another id",
    "leases": "nothing: the lease is free, and a worker takes it",
    "marks": "nothing: the worker reports again by itself that it is alive",
    "uniques": "a unique task can be sent again, also while it still waits or runs",
    "signatures": f"a copy of one signed message would not be refused; {_SEE}",
    "pauses": "nothing: the queue stays paused",
    "limits": "nothing: the limit holds from the next task on",
    "slots": "nothing: one task more than the limit says may run until this one ends",
}
_RESCUES: Mapping[str, Rescue] = {
    "messages": _renumber_or_bury,
    "ready": _refile("ready"),
    "delayed": _bury_delayed,
    "limited": _refile("limited"),
    "claimed": _refile("claimed", ran=True),
    "owners": _change("owners", "expires_at = :lease_ends", "owner"),
    "chord_parts": _change(
        "chord_parts", f"place = NULL, status = '{FAILURE}', payload = :failure", "group_id", "task_id"
    ),
    "recorders": _change(
        "recorders",
        'acknowledged = coalesce((SELECT min("offset") FROM events WHERE "offset" > 0), 1) - 1',
        "name",
    ),
    "revokes": _change(
        "revokes", "recorded_at = :now, expires_at = :revoke_ends", "cursor", "task_id", "header"
    ),
    "leases": _change(
        "leases",
        """holder = '', term = 0, expires_at = 0,
           data = CASE WHEN typeof(data) = 'blob' THEN data ELSE x'' END""",
        "name",
    ),
    "pauses": _change("pauses", "since = :now, told = '[]'", "queue"),
}
_WHOLE = {"limits": "(most > 0 OR interval_s > 0)"}
TABLES: Mapping[str, TableRules] = {
    table: TableRules(_COLUMNS[table], remedy, _WHOLE.get(table, "1"), _RESCUES.get(table))
    for table, remedy in _REMEDIES.items()
}
_SMALL = ("owners", "subscriptions", "recorders", "leases", "marks", "pauses")


# ---- rows that contradict others -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    """Rows of a table that must not exist; `where` and `problem` are SQL expressions."""

    table: str
    where: str
    problem: str
    remedy: str = "nothing: its message has its place"
    rescue: Rescue | None = None


def _without(table: str, other: str, key: str, remedy: str, rescue: Rescue | None = None) -> Fault:
    where = f"{key} NOT IN (SELECT {key} FROM {other})"
    return Fault(table, where, f"'its {key} is not in table {other}'", remedy, rescue)


CONTRADICTIONS = (
    *(_without(state, "messages", "id", "nothing: a message of this id is not there") for state in _STATES),
    *(
        Fault(table, f"id IN (SELECT id FROM {other})", f"'its message is in table {other}, too'")
        for table, other in (
            ("delayed", "claimed"),
            ("limited", "claimed"),
            ("limited", "delayed"),
            ("ready", "claimed"),
            ("ready", "delayed"),
            ("ready", "limited"),
        )
    ),
    _without("limited", "limits", "bucket", _AGAIN, _refile("limited")),
    _without("chord_parts", "chords", "group_id", "nothing: the chord has ended, or was set aside"),
)
# Most messages are ready, where their columns say; the other tables are searched only for the rest.
_STATELESS = f"""NOT EXISTS (SELECT 1 FROM ready WHERE ready.queue = messages.queue
                               AND ready.priority = messages.priority AND ready.id = messages.id)
                 AND {" AND ".join(f"id NOT IN (SELECT id FROM {table})" for table in reversed(_STATES))}"""
_OWNERLESS = "owner NOT IN (SELECT owner FROM owners)"
_PARTS_ENDED = """(SELECT count(*) FROM chord_parts
                   WHERE chord_parts.group_id = chords.group_id AND chord_parts.status <> '')"""


# ---- checks ----------------------------------------------------------------------------------------


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
    """Set aside the malformed rows of these tables, and rows that contradict others, in a transaction of the
    caller.
    """
    found = [*_meta(db, now), *_sequences(db)]
    for name in tables:
        rules = TABLES[name]
        malformed = rules.malformed(_bad_texts(db, name))
        found += _set_aside(db, Fault(name, malformed, rules.problem, rules.remedy, rules.rescue), now)
    for fault in CONTRADICTIONS:
        found += _set_aside(db, fault, now)
    found += [*_sequences(db), *_restore(db, now)]
    if found:
        limits.recount_waiting(db)
        db.execute("DELETE FROM set_aside WHERE id <= (SELECT max(id) FROM set_aside) - ?", (SET_ASIDE_MAX,))
    return found


def check_few(db: sqlite3.Connection, now: RepairTimes) -> list[MalformedRow]:
    """Check all, if one of the few rows on which all others depend is malformed; one statement finds out."""
    return check_all(db, now) if db.execute(_SUSPECT).fetchone()[0] else []


def looks() -> Iterator[Look]:
    """Checks of one part of the file each; if all return True, `check_all` would find nothing.

    They only read, and each takes at most LOOK_S: a part that takes longer is assumed to be sound.
    """
    conditions = [(name, table.malformed()) for name, table in TABLES.items()]
    conditions += [(fault.table, fault.where) for fault in CONTRADICTIONS]
    conditions += [("messages", f"{_HAS_STATE} AND {_STATELESS}"), ("claimed", _OWNERLESS)]
    conditions += [("(SELECT 1)", _FILED_IS_WRONG)]
    for table, where in conditions:
        yield partial(_in_time, partial(_none, table=table, where=where))
    for name in TABLES:
        yield partial(_in_time, partial(_all_readable, name=name))


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
    """Log each row that was set aside, to be called after the transaction has ended."""
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

    Many texts are read as one: reading each would release the interpreter lock for every row.
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


def _set_aside(db: sqlite3.Connection, fault: Fault, now: RepairTimes) -> Iterator[MalformedRow]:
    name, where, problem, rules = fault.table, fault.where, fault.problem, TABLES[fault.table]
    shown = db.execute(
        f"""SELECT CAST({rules.values(SHOWN_CHARS)} AS BLOB), CAST({problem} AS BLOB) FROM {name}
            WHERE {where} LIMIT {SHOWN_MAX}"""
    ).fetchall()
    if not shown:
        return
    retained = db.execute(
        f"""INSERT INTO set_aside (name, row, problem, set_aside_at)
            SELECT '{name}', {rules.values(RETAINED_CHARS)}, {problem}, ? FROM {name} WHERE {where}""",
        (now.wall_s,),
    )
    if fault.rescue is not None:
        fault.rescue(db, where, now)
    db.execute(f"DELETE FROM {name} WHERE {where}")
    for row, why in shown:
        yield MalformedRow(name, row.decode(errors="replace"), why.decode(errors="replace"), fault.remedy)
    if retained.rowcount > len(shown):
        yield MalformedRow(name, f"{retained.rowcount - len(shown):,} rows more", "likewise", fault.remedy)


# ---- single values, and counts of rows -------------------------------------------------------------

_META = {
    rows.BOOT_ID: _TEXT,
    rows.BORN: _NUMBER,
    rows.CLUSTER: _TEXT,
    rows.CLUSTER_SINCE: _NUMBER,
    rows.LAST_TERM: _COUNT,
    rows.CLOCK: _COUNT,
    rows.ADDITIONS: _COUNT,
    rows.EVENTS_LOST: _COUNT,
    rows.EVENTS_DROPPED: _COUNT,
    rows.DEAD_LETTERS_DROPPED: _COUNT,
    rows.FAILED_DROPPED: _COUNT,
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
        if shown and name == rows.BOOT_ID:  # the machine was not restarted: claims and leases stand
            rows.put_meta(db, name, now.boot_id)
    if shown := _removed(db, "meta", _UNNAMED, "name"):
        yield MalformedRow("meta", "", f"name is {shown}", _BEGINS_AGAIN)


def _sequences(db: sqlite3.Connection) -> Iterator[MalformedRow]:
    """Repair the last ids of AUTOINCREMENT tables: a wrong one makes inserts fail, or gives ids twice."""
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
    """Remove these rows; the column's value in the first of them, or "" if there are none."""
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


def _filed_is_wrong(states: Sequence[str]) -> str:
    """The condition that the id `filed` in `meta` is missing, or contradicts rows of these tables."""
    fits = " AND ".join(f"value >= coalesce((SELECT max(id) FROM {table}), 0)" for table in states)
    return f"""NOT EXISTS (SELECT 1 FROM meta WHERE name = 'filed' AND {_COUNT.format("value")} AND {fits}
                           AND value <= coalesce((SELECT max(id) FROM messages), 0))"""


_FILED_IS_WRONG = _filed_is_wrong(_STATES)
_SUSPICIONS = (
    ("meta", _META_MALFORMED),
    ("sqlite_sequence", f"NOT ({_COUNT.format('seq')}) OR {_UNKNOWN_SEQUENCE}"),
    *((name, f'"{key}" > {ID_MAX}') for name, key in _NUMBERED.items()),
    *((name, TABLES[name].malformed()) for name in _SMALL),
)
# Of the states only `claimed` has an index that gives the highest id.
_SUSPECT = " OR ".join(
    [
        f"SELECT {_filed_is_wrong(['claimed'])}",
        *(f"EXISTS (SELECT 1 FROM {table} WHERE {where})" for table, where in _SUSPICIONS),
    ]
)


def _restore(db: sqlite3.Connection, now: RepairTimes) -> Iterator[MalformedRow]:
    """Restore what rows lack because other rows were malformed, or are missing."""
    if _any(db, "claimed", _OWNERLESS):
        ends = now.boot_s + now.lease_s
        db.execute(f"INSERT INTO owners SELECT DISTINCT owner, ? FROM claimed WHERE {_OWNERLESS}", (ends,))
        yield MalformedRow("owners", "", "an owner of claims is missing", "nothing: its lease began again")
    if db.execute(f"SELECT {_FILED_IS_WRONG}").fetchone()[0]:
        db.execute(f"INSERT OR IGNORE INTO ready SELECT queue, priority, id FROM messages WHERE {_STATELESS}")
        rows.put_meta(db, rows.FILED, db.execute("SELECT coalesce(max(id), 0) FROM messages").fetchone()[0])
        yield MalformedRow("meta", "name = 'filed'", "its value does not fit the messages", _BEGINS_AGAIN)
    lost = f"{_HAS_STATE} AND {_STATELESS}"
    if _any(db, "messages", lost):  # they may have been claimed
        db.execute(f"UPDATE messages SET redelivered = 1 WHERE {lost}")
        filed = db.execute(f"INSERT INTO ready SELECT queue, priority, id FROM messages WHERE {lost}")
        problem = f"{filed.rowcount:,} messages had no place in their queues"
        yield MalformedRow("messages", "", problem, "nothing: they run, marked as redelivered")
    # Parts that a repair above has ended are not counted yet.
    db.execute(f"INSERT OR REPLACE INTO chord_progress SELECT group_id, {_PARTS_ENDED} FROM chords")
