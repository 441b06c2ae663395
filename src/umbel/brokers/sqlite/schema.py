"""Schema: the tables of the embedded broker, and the steps from each version of them to the next.

`PRAGMA user_version` counts the steps that a file has seen. Steps are only ever added: a file of any age is
brought up to date when it is opened, in one transaction. A file that has seen more steps than this code knows
belongs to a newer Umbel and is refused. A change that older versions can ignore is not a step but an
addition: `meta` counts those, so that workers of two versions can share a file.

A message is one row of `messages`, written once and deleted once, and one row in the table of its state:
`ready`, `delayed`, `limited` or `claimed`. A claim moves only the state row, so it costs the same for small
and for large messages, and no state slows the others down. The order of `ready` is the order of claims. Ids
grow, so within a priority the oldest message is first, and a message that comes back gets its old place.

Sending one message appends only its row in `messages`, which changes one page of the file instead of two.
Rows above the id `filed` in `meta` have no state row yet; they are ready. A claim adds the missing state rows
first, many at a time, and so does every send that finds many of them. Rows above that id are never removed.
When rows up to it are removed, it is lowered to the highest id that remains, because SQLite gives the next
row that id plus one.
"""

import re
import sqlite3
from pathlib import Path

from umbel.errors import AccessRefused

APPLICATION_ID = 0x756D626C  # "umbl": tells our files from those of other programs

MIGRATIONS: tuple[str, ...] = (
    """
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;

CREATE TABLE messages (
    id INTEGER PRIMARY KEY,
    queue TEXT NOT NULL,
    priority INTEGER NOT NULL,              -- 0 first
    starts INTEGER NOT NULL DEFAULT 0,
    redelivered INTEGER NOT NULL DEFAULT 0,
    message BLOB NOT NULL                   -- msgpack of wire.message.Message
);
CREATE TABLE ready (
    queue TEXT NOT NULL, priority INTEGER NOT NULL, id INTEGER NOT NULL,
    PRIMARY KEY (queue, priority, id)
) WITHOUT ROWID;
CREATE TABLE delayed (
    not_before REAL NOT NULL, id INTEGER NOT NULL, queue TEXT NOT NULL, priority INTEGER NOT NULL,
    PRIMARY KEY (not_before, id)
) WITHOUT ROWID;
CREATE TABLE claimed (
    id INTEGER PRIMARY KEY,
    ticket INTEGER NOT NULL,                -- which claim; a settle that names another is refused
    owner TEXT NOT NULL
);
CREATE TABLE owners (owner TEXT PRIMARY KEY, expires_at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE dead_letters (
    id INTEGER PRIMARY KEY AUTOINCREMENT,   -- never given twice: people type these numbers
    queue TEXT NOT NULL, priority INTEGER NOT NULL, starts INTEGER NOT NULL,
    reason TEXT NOT NULL, buried_at REAL NOT NULL, message BLOB NOT NULL
);

CREATE TABLE results (
    task_id TEXT PRIMARY KEY, status TEXT NOT NULL, payload BLOB NOT NULL, expires_at REAL NOT NULL
);
CREATE INDEX results_by_expiry ON results (expires_at);

CREATE TABLE chords (
    group_id TEXT PRIMARY KEY, size INTEGER NOT NULL, done INTEGER NOT NULL, expires_at REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX chords_by_expiry ON chords (expires_at);
CREATE TABLE chord_parts (
    group_id TEXT NOT NULL, task_id TEXT NOT NULL, place INTEGER, status TEXT NOT NULL, payload BLOB NOT NULL,
    PRIMARY KEY (group_id, task_id)
) WITHOUT ROWID;

CREATE TABLE waiters (
    channel TEXT NOT NULL, address BLOB NOT NULL, PRIMARY KEY (channel, address)
) WITHOUT ROWID;
CREATE INDEX waiters_by_address ON waiters (address);

CREATE TABLE subscriptions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, exchange TEXT NOT NULL, expires_at REAL NOT NULL
);
CREATE TABLE broadcasts (
    offset INTEGER PRIMARY KEY AUTOINCREMENT, -- never given twice: subscribers remember the last
    exchange TEXT NOT NULL, routing_key TEXT NOT NULL,
    body BLOB NOT NULL, headers BLOB NOT NULL, expires_at REAL NOT NULL
);
CREATE INDEX broadcasts_by_expiry ON broadcasts (expires_at);

CREATE TABLE recorders (name TEXT PRIMARY KEY, acknowledged INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE events (
    offset INTEGER PRIMARY KEY AUTOINCREMENT,
    recorded_at REAL NOT NULL, routing_key TEXT NOT NULL, body BLOB NOT NULL
);

CREATE TABLE revokes (
    cursor INTEGER PRIMARY KEY AUTOINCREMENT,
    task_id TEXT NOT NULL, header TEXT NOT NULL,
    recorded_at REAL NOT NULL, expires_at REAL NOT NULL,
    UNIQUE (task_id, header)
);
CREATE INDEX revokes_by_expiry ON revokes (expires_at);

CREATE TABLE elections (
    key TEXT PRIMARY KEY, state TEXT NOT NULL, request BLOB NOT NULL, changed_at REAL NOT NULL,
    holder TEXT NOT NULL, term INTEGER NOT NULL, attempt INTEGER NOT NULL, started INTEGER NOT NULL,
    expires_at REAL NOT NULL, ttl_s REAL NOT NULL, outcome TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX elections_unfinished ON elections (changed_at) WHERE state IN ('open', 'held');
CREATE INDEX elections_by_age ON elections (changed_at);
CREATE TABLE leases (
    name TEXT PRIMARY KEY, holder TEXT NOT NULL, term INTEGER NOT NULL,
    expires_at REAL NOT NULL, data BLOB NOT NULL
) WITHOUT ROWID;
""",
    """
CREATE TABLE marks (
    node TEXT PRIMARY KEY, incarnation INTEGER NOT NULL, expires_at REAL NOT NULL
) WITHOUT ROWID;
""",
    # Before this step, every message got its state row when it was sent.
    """
INSERT INTO meta SELECT 'filed', coalesce(max(id), 0) FROM messages;
""",
    """
CREATE TABLE uniques (
    key TEXT PRIMARY KEY, task_id TEXT NOT NULL, expires_at REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX uniques_by_expiry ON uniques (expires_at);
""",
    """
CREATE TABLE signatures (
    mark TEXT PRIMARY KEY, message_id INTEGER NOT NULL, expires_at REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX signatures_by_expiry ON signatures (expires_at);
""",
    """
CREATE TABLE pauses (
    queue TEXT PRIMARY KEY, since REAL NOT NULL, told TEXT NOT NULL -- JSON: nodes that do not look here
) WITHOUT ROWID;
""",
    # A message that waits for a limit of the cluster has its state row in `limited`.
    """
CREATE TABLE limits (
    bucket TEXT PRIMARY KEY, most INTEGER NOT NULL, interval_s REAL NOT NULL, slack_s REAL NOT NULL,
    free_at REAL NOT NULL, waiting INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE limited (
    bucket TEXT NOT NULL, id INTEGER NOT NULL, queue TEXT NOT NULL, priority INTEGER NOT NULL,
    PRIMARY KEY (bucket, id)
) WITHOUT ROWID;
CREATE INDEX limited_by_queue ON limited (queue);
CREATE TABLE slots (
    bucket TEXT NOT NULL, id INTEGER NOT NULL, ticket INTEGER NOT NULL, until REAL NOT NULL,
    PRIMARY KEY (bucket, id)
) WITHOUT ROWID;
""",
    """
CREATE TABLE failed (
    id INTEGER PRIMARY KEY AUTOINCREMENT,   -- never given twice: the id of a retry is made from it
    task_id TEXT NOT NULL, queue TEXT NOT NULL, priority INTEGER NOT NULL, starts INTEGER NOT NULL,
    reason TEXT NOT NULL, buried_at REAL NOT NULL, message BLOB NOT NULL
);
CREATE INDEX failed_by_task ON failed (task_id);
CREATE INDEX failed_by_age ON failed (buried_at);
""",
)
ADDITIONS: tuple[str, ...] = (
    # Rows that did not fit the schema (`integrity.py`).
    """
CREATE TABLE IF NOT EXISTS set_aside (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,                     -- of the table it was in
    row TEXT NOT NULL,                      -- its values, as SQL writes them
    problem TEXT NOT NULL, set_aside_at REAL NOT NULL
);
""",
    # How many parts of a chord have ended. Triggers count them, because workers of version 0.3 add parts,
    # too. A part has no status until it ends, and a part that ends twice counts once.
    """
CREATE TABLE IF NOT EXISTS chord_progress (
    group_id TEXT PRIMARY KEY, ended INTEGER NOT NULL
) WITHOUT ROWID;
INSERT OR IGNORE INTO chord_progress
    SELECT group_id, (SELECT count(*) FROM chord_parts
                      WHERE chord_parts.group_id = chords.group_id AND status <> '') FROM chords;
CREATE TRIGGER IF NOT EXISTS chord_begins AFTER INSERT ON chords
    BEGIN INSERT OR IGNORE INTO chord_progress VALUES (NEW.group_id, 0); END;
CREATE TRIGGER IF NOT EXISTS chord_part_ends BEFORE INSERT ON chord_parts
    WHEN NEW.status <> '' AND NOT EXISTS (
        SELECT 1 FROM chord_parts WHERE group_id = NEW.group_id AND task_id = NEW.task_id AND status <> '')
    BEGIN UPDATE chord_progress SET ended = CASE typeof(ended) WHEN 'integer' THEN ended + 1 ELSE ended END
          WHERE group_id = NEW.group_id; END;
CREATE TRIGGER IF NOT EXISTS chord_is_forgotten AFTER DELETE ON chords
    BEGIN DELETE FROM chord_progress WHERE group_id = OLD.group_id; END;
""",
)

_TABLE = re.compile(r"CREATE TABLE (?:IF NOT EXISTS )?(\w+) \((.*?)\)(?: WITHOUT ROWID)?;", re.DOTALL)
_COLUMN = re.compile(r"(\w+) (TEXT|INTEGER|REAL|BLOB)\b")


def columns() -> dict[str, dict[str, str]]:
    """The typed columns of every table, in the order of the schema, each with its declared type."""
    script = "".join((*MIGRATIONS, *ADDITIONS))
    return {table: dict(_COLUMN.findall(body)) for table, body in _TABLE.findall(script)}


def migrate(db: sqlite3.Connection, path: Path, migrations: tuple[str, ...]) -> int:
    """Bring the file up to date, inside the caller's transaction; the version it had before."""
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    if version > len(migrations):
        raise AccessRefused(
            f"{path} was written by a newer Umbel (schema {version}, this one supports {len(migrations)}); "
            "upgrade Umbel here, or choose another file"
        )
    if version == 0 and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise AccessRefused(f"{path} is the database of another program; choose another file")
    for step in migrations[version:]:
        _run(db, step)
    if version < len(migrations):
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {len(migrations)}")
    return version


def extend(db: sqlite3.Connection) -> None:
    """Make the additions if the file has not seen them all, inside the caller's transaction."""
    seen = "SELECT 1 FROM meta WHERE name = 'additions' AND typeof(value) = 'integer' AND value >= ?"
    if db.execute(seen, (len(ADDITIONS),)).fetchone():
        return
    for addition in ADDITIONS:
        _run(db, addition)
    db.execute("INSERT OR REPLACE INTO meta VALUES ('additions', ?)", (len(ADDITIONS),))


def _run(db: sqlite3.Connection, script: str) -> None:
    for statement in filter(str.strip, script.split(";\n")):
        db.execute(statement)
