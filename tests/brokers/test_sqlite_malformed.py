"""N1 for the embedded broker's file: a row that is not what the schema says is set aside, and that is all.

Every column of every table gets values of the wrong kind, as another program or a bad disk would leave them.
Then a broker does everything with the file: the other messages run once, and the log says what was wrong.
"""

import asyncio
import logging
import os
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.brokers.under_test import outgoing, result, run
from umbel.backends.sqlite import SqliteBackend
from umbel.brokers.interface import (
    Ack,
    Broadcast,
    BrokerSettings,
    Bury,
    Depth,
    Pause,
    Permit,
    Spend,
)
from umbel.brokers.registry import open_broker
from umbel.brokers.sqlite import integrity, messages
from umbel.brokers.sqlite.chords import ChordStore, Part
from umbel.brokers.sqlite.cluster_store import ClusterStore
from umbel.brokers.sqlite.store import Store
from umbel.brokers.sqlite.wakeup import Bell
from umbel.errors import BrokerError
from umbel.protocol.delivery.limits import Terms
from umbel.protocol.delivery.trust import ClusterId
from umbel.protocol.leadership.coordination import ElectionRequest, Policy
from umbel.wire.records import Revoke

SOAK = bool(os.environ.get("UMBEL_SOAK"))
QUEUES = ("celery", "other", "paused")
NEIGHBOURS = ("one", "two", "three")
OWNER, PEER = "ada@here.1", "bob@here.2"
ODD: dict[str, tuple[str, Any]] = {  # an expression of SQL, and its argument
    "text": ("?", "x"),
    "nothing": ("?", None),
    "huge": ("?", 2**63 - 1),
    "bytes": ("?", b"\x00\xff"),
    "no UTF-8": ("CAST(? AS TEXT)", b"\xff"),
    **(
        {
            "negative": ("?", -5),
            "fraction": ("?", 1.5),
            "infinite": ("?", float("inf")),
            "JSON": ("?", "{"),
            "empty": ("?", b""),
        }
        if SOAK
        else {}
    ),
}
KINDS = {"INTEGER": ("integer",), "REAL": ("real",), "TEXT": ("text",), "BLOB": ("blob",)}


def election(name: str) -> ElectionRequest:
    return ElectionRequest(name, "task", b"{}", Policy.AT_LEAST_ONCE, time.time())


def fill(path: Path, address: bytes) -> None:
    """A file with rows in each of its tables, as a cluster at work has it."""
    store = ClusterStore(BrokerSettings(f"sqlite:///{path}", lease_s=1000.0))
    chords = ChordStore(store)
    now = time.time()
    store.publish(outgoing(*(f"held {number}" for number in range(8))))
    held = store.claim(OWNER, ["celery"], 8, 0).deliveries
    store.keep_cluster_id(ClusterId("here", now))
    store.spend([Spend(held[0].tag, "mark", now + 1000)], "here")
    one = Terms(most=1)
    store.permit([Permit(delivery.tag, "t", "bucket", one) for delivery in held[1:3]])  # the second waits
    store.settle([Bury(held[3].tag, "buried"), Ack(held[4].tag, [result("known")], keep="failed")])
    store.publish([*outgoing("filed"), *outgoing("later", not_before=now + 1000)])
    store.publish(outgoing("unfiled"))
    chords.start("chord", 3)
    chords.add("chord", Part("first", 0, "SUCCESS", b"1"))
    store.watch_results(["nobody stores this"], address)
    store.subscribe("exchange", None)
    store.broadcast([Broadcast("exchange", "key", b"{}", b"{}")], ttl_s=1000.0)
    store.register_recorder("recorder")
    store.log_events([("key", b"{}"), ("key", b"{}")])
    store.revoke([Revoke("revoked", now, now + 1000)])
    store.claim_election("election", OWNER, election("election"), ttl_s=1000.0)
    store.acquire_lease("lease", OWNER, ttl_s=1000.0)
    store.mark_alive("node", 1, ttl_s=1000.0)
    store.hold_unique("key", "task", ttl_s=1000.0)
    store.raise_clock(7)
    store.pause("paused", Pause(now, ("node",)))
    store.database.close()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("filled") / "umbel.db"
    bell = Bell(path)
    assert bell.address is not None
    fill(path, bell.address)
    yield path
    bell.close()


def columns_of(path: Path) -> dict[str, dict[str, str]]:
    """The columns of every table, and what each was declared to be."""
    with closing(sqlite3.connect(path)) as db:
        names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {
            name: {column: kind for _, column, kind, *_ in db.execute(f"PRAGMA table_info({name})")}
            for name in names
        }


def spoil(path: Path, table: str, place: int, column: str, expression: str, value: object) -> bool:
    """Put the value into the row at this place; whether SQLite let it in."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        key = "rowid" if _has_rowid(db, table) else _primary_key(db, table)
        row = f"SELECT {key} FROM {table} ORDER BY {key} LIMIT 1 OFFSET {place}"
        try:
            db.execute(f'UPDATE {table} SET "{column}" = {expression} WHERE ({key}) = ({row})', (value,))
        except sqlite3.IntegrityError:
            return False
        return True


def _has_rowid(db: sqlite3.Connection, table: str) -> bool:
    sql = db.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()[0]
    return "WITHOUT ROWID" not in sql


def _primary_key(db: sqlite3.Connection, table: str) -> str:
    parts = sorted((place, name) for _, name, *_, place in db.execute(f"PRAGMA table_info({table})") if place)
    return ", ".join(f'"{name}"' for _, name in parts)


def misfits(path: Path) -> int:
    """How many values are not of the kind that their column was declared to be."""
    count = 0
    with closing(sqlite3.connect(path)) as db:
        db.text_factory = bytes
        for table, columns in columns_of(path).items():
            for column, declared in columns.items():
                for kind, value in db.execute(f'SELECT typeof("{column}"), "{column}" FROM {table}'):
                    if declared in KINDS and kind.decode() not in KINDS[declared]:
                        count += (table, column, value) != ("chord_parts", "place", None)
                    elif kind == b"text":
                        try:
                            value.decode()
                        except UnicodeDecodeError:
                            count += 1
    return count


def bodies(path: Path) -> set[str]:
    """Of every message that is somewhere in the file, or in the text of a row that was set aside."""
    with closing(sqlite3.connect(path)) as db:
        found = [
            messages.decode(message).body.decode(errors="replace")
            for table in ("messages", "dead_letters", "failed")
            for (message,) in db.execute(f"SELECT CAST(message AS BLOB) FROM {table}")
        ]
        for (row,) in db.execute("SELECT row FROM set_aside WHERE row LIKE '%message = X%'"):
            data = bytes.fromhex(row.partition("message = X'")[2].partition("'")[0])
            found.append(messages.decode(data).body.decode(errors="replace"))
        return set(found)


class Use:
    """Everything that a worker and its clients do with a file."""

    def __init__(self, path: Path) -> None:
        self.settings = BrokerSettings(f"sqlite:///{path}", lease_s=1000.0)
        self.broker = open_broker(self.settings)
        self.started: Counter[str] = Counter()

    async def __call__(self) -> None:
        broker = self.broker
        await broker.open()
        try:
            await broker.return_lost()
            await broker.publish([outgoing(text, queue="other")[0] for text in NEIGHBOURS])
            await self._run_all("celery", "other", "paused")
            await self._listen()
            for part in self._parts():
                await part()
            await broker.sweep()
            await self._run_all("celery", "other", "paused")
        finally:
            await broker.close()

    async def each(self) -> list[Exception]:
        """Each by itself: what was raised."""
        raised: list[Exception] = []
        calls = [self.broker.open, *self._parts(), self.broker.sweep, self.broker.close]
        while calls:
            call = calls.pop(0)
            try:
                await call()
            except Exception as error:
                raised.append(error)
                if call == self.broker.open:
                    del calls[:-1]
        return raised

    async def _listen(self) -> None:
        async with self.broker.subscribe("exchange", ["#"]) as subscription:
            await self.broker.broadcast([Broadcast("exchange", "key", b"{}", b"{}")], ttl_s=10.0)
            async for heard in subscription:
                assert heard.body == b"{}"
                return

    def _parts(self) -> list[Callable[[], Awaitable[object]]]:
        broker, store = self.broker, self.broker.coordination
        request = election("another")

        return [
            lambda: broker.publish(outgoing("more")),
            lambda: broker.claim(PEER, ["celery"], 5),
            broker.queues,
            lambda: broker.peek("celery", 100),
            broker.dead_letters,
            lambda: broker.failed(100),
            broker.paused,
            lambda: broker.register_recorder("recorder"),
            lambda: broker.log_events([("key", b"{}")]),
            lambda: broker.read_events("recorder", 100),
            broker.event_log,
            lambda: broker.acknowledge_events("recorder", 1),
            lambda: broker.revoke([Revoke("again", time.time(), time.time() + 1000)]),
            lambda: broker.mark_alive("node", 2, ttl_s=10.0),
            lambda: broker.probe("node"),
            lambda: store.acquire_lease("lease", PEER, ttl_s=10.0),
            lambda: store.read_lease("lease"),
            lambda: store.claim_election("another", PEER, request, ttl_s=10.0),
            lambda: store.read_election("election"),
            lambda: store.unfinished_elections(100),
            lambda: store.raise_clock(9),
            lambda: broker.pause("celery", Pause(time.time())),
            lambda: broker.resume("celery"),
            lambda: broker.move("celery", "other", 100),
            lambda: broker.wait_ready(["celery"], 0.0),
            lambda: broker.renew(PEER),
            self._results,
            self._chord,
        ]

    async def _run_all(self, *queues: str) -> None:
        """Claim, ask for permits, and settle, as long as something comes."""
        for _ in range(20):
            claim = await self.broker.claim(PEER, queues, 100)
            if not claim.deliveries:
                return
            self.started.update(one.message.body.decode(errors="replace") for one in claim.deliveries)
            await self.broker.settle([Ack(one.tag, [result(str(one.tag))]) for one in claim.deliveries])
        raise AssertionError("messages come back again and again")

    async def _results(self) -> None:
        backend = SqliteBackend(self.settings.url, self.settings)
        try:
            backend.store([result("another")])
            assert set(await asyncio.to_thread(backend.read, ["another", "known"])) >= {"another"}
        finally:
            backend.close()

    async def _chord(self) -> None:
        """The chord ends, whatever its parts say; or it was set aside."""
        store = Store(self.settings)
        chords = ChordStore(store)

        def parts() -> None:
            for place, name in ((1, "second"), (2, "third")):
                part = Part(name, place, "SUCCESS", b"2")
                try:
                    chords.add("chord", part)
                except BrokerError:  # a worker asks again
                    chords.add("chord", part)

        try:
            await asyncio.to_thread(parts)
        finally:
            store.close()


TABLES = sorted(name for name in integrity.TABLES if name != "chord_progress")


def test_every_column_of_every_table_has_a_condition(filled: Path) -> None:
    columns = columns_of(filled)
    apart = {"meta", "sqlite_sequence", "set_aside"}
    assert {name: set(table.columns) for name, table in integrity.TABLES.items()} == {
        name: set(of) for name, of in columns.items() if name not in apart
    }
    with closing(sqlite3.connect(filled)) as db:
        empty = [
            name
            for name in columns
            if name != "set_aside" and not db.execute(f"SELECT count(*) FROM {name}").fetchone()[0]
        ]
    assert empty == []  # the tests below would look at nothing
    assert misfits(filled) == 0
    with closing(sqlite3.connect(filled)) as db:
        integrity.prepare(db)
        assert all(look(db) for look in integrity.looks())


@pytest.mark.parametrize("table", [*TABLES, "chord_progress", "meta", "sqlite_sequence"])
def test_an_odd_value_in_any_column_is_set_aside_and_nothing_else_suffers(
    table: str, filled: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    path = tmp_path / "umbel.db"
    looked_at, before = 0, bodies(filled)
    for (column, place), (what, (expression, value)) in product(_cells(filled, table), ODD.items()):
        shutil.copy(filled, path)
        if not spoil(path, table, place, column, expression, value):
            continue
        is_odd = misfits(path) > 0
        caplog.clear()
        use, cell = Use(path), f"{table}.{column}[{place}]"
        where = f"{cell} = {what}"
        try:
            run(use())
        except Exception as error:
            raise AssertionError(where) from error
        assert [use.started[text] for text in NEIGHBOURS] == [1, 1, 1], where
        assert max(use.started.values()) == 1, where
        if cell not in OWN_MESSAGE:
            assert before <= set(use.started) | bodies(path), where
        logged = [record for record in caplog.records if "malformed row" in record.getMessage()]
        if is_odd and cell not in UNSAID:
            assert logged, where
            assert misfits(path) == 0, where
        _restart(path, where)
        looked_at += 1
        for end in ("-wal", "-shm", "-lock"):
            Path(f"{path}{end}").unlink(missing_ok=True)
    assert looked_at


@pytest.mark.parametrize("value", ["soon", b"x", -1.0])
def test_a_message_whose_time_is_malformed_is_a_dead_letter_and_does_not_run(
    value: object, tmp_path: Path
) -> None:
    path = tmp_path / "umbel.db"
    store = Store(BrokerSettings(f"sqlite:///{path}"))
    store.publish(outgoing("later", "much later", not_before=time.time() + 1000))
    assert spoil(path, "delayed", 0, "not_before", "?", value)
    assert store.set_aside()
    assert [one.message.body for one in store.dead_letters(10)] == [b"later"]
    assert store.claim(OWNER, ["celery"], 10, 0).deliveries == []
    assert store.depths() == {"celery": Depth(ready=0, delayed=1, claimed=0)}
    store.database.close()


def test_a_chord_ends_though_a_part_that_was_added_later_is_malformed(tmp_path: Path) -> None:
    path = tmp_path / "umbel.db"
    store = Store(BrokerSettings(f"sqlite:///{path}"))
    chords = ChordStore(store)
    chords.start("chord", 1)
    chords.grow("chord", "later")
    assert spoil(path, "chord_parts", 0, "payload", "?", "x")
    assert store.set_aside()
    assert chords.add("chord", Part("first", 0, "SUCCESS", b"1")) is not None
    whole = chords.add("chord", Part("later", None, "SUCCESS", b"2"))
    assert whole is not None and [part.task_id for part in whole] == ["later", "first"]
    store.database.close()


OWN_MESSAGE = {"messages.message[0]", "dead_letters.message[0]", "failed.message[0]"}
UNSAID = {
    "messages.message[0]",  # the worker that claims it buries it, with the reason
    "slots.id[0]",  # no claim stands for it: it is removed as others are that have ended
    "slots.ticket[0]",
    "meta.value[0]",  # the number of additions is written again when the file is opened
}


def _cells(path: Path, table: str) -> list[tuple[str, int]]:
    """Each column, with a row to spoil it in. What `meta` has is a row for each."""
    columns = columns_of(path)[table]
    if table != "meta":
        return [(column, 0) for column in columns]
    with closing(sqlite3.connect(path)) as db:
        return [
            (column, place)
            for place in range(*db.execute("SELECT count(*) FROM meta").fetchone())
            for column in columns
        ]


def _restart(path: Path, where: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        integrity.prepare(db)
        assert all(look(db) for look in integrity.looks()), where

    async def scenario() -> None:
        broker = open_broker(BrokerSettings(f"sqlite:///{path}"))
        await broker.open()
        await broker.publish(outgoing("after", queue="other"))
        claim = await broker.claim(PEER, ["other"], 100)
        assert [one.message.body for one in claim.deliveries] == [b"after"], where
        await broker.close()

    run(scenario())
