"""Claims on one connection to SQLite: what is taken, in which order, whose it is, how it comes back."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.brokers.under_test import message, texts
from umbel.brokers.interface import Delivery
from umbel.brokers.rules import Heap, share
from umbel.brokers.sqlite import claims, publishing
from umbel.brokers.sqlite.rows import Malformed
from umbel.brokers.sqlite.schema import MIGRATIONS, migrate
from umbel.wire.message import Outgoing


@pytest.fixture
def db() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        migrate(db, Path(":memory:"), MIGRATIONS)
        yield db


def put(db: sqlite3.Connection, *names: str) -> None:
    """Names are "<queue><priority><text>", oldest first."""
    batch = [Outgoing(name[0], message(name, priority=int(name[1]))) for name in names]
    publishing.insert(db, batch, 0.0)
    publishing.file(db)


def claim(
    db: sqlite3.Connection, queues: str, limit: int = 100, *, owner: str = "ada", ticket: int = 7
) -> tuple[list[Delivery], str]:
    found, large, last = claims.claim(db, owner, list(queues), limit, ticket, 10**9)
    assert large == {}
    return found, last


def ready(db: sqlite3.Connection) -> list[int]:
    return [number for (number,) in db.execute("SELECT id FROM ready ORDER BY id")]


def claimed(db: sqlite3.Connection) -> list[tuple[int, int, str]]:
    return db.execute("SELECT * FROM claimed ORDER BY id").fetchall()


def test_one_queue_is_taken_by_priority_then_oldest_first_and_no_more_than_the_limit(
    db: sqlite3.Connection,
) -> None:
    put(db, "a3", "a0", "a9", "a0x", "a3x", "b0")
    taken, last = claim(db, "a", 4)
    assert (texts(taken), last) == (["a0", "a0x", "a3", "a3x"], "a")
    assert [one.tag for one in taken] == ["7:2", "7:4", "7:1", "7:5"]
    assert claimed(db) == [(number, 7, "ada") for number in (1, 2, 4, 5)]
    assert ready(db) == [3, 6]
    assert {one.queue for one in taken} == {"a"}
    assert [(one.starts, one.redelivered) for one in taken] == [(0, False)] * 4


def test_several_queues_share_a_priority_and_what_is_taken_comes_in_order(db: sqlite3.Connection) -> None:
    put(db, "b3", "a0", "a0x", "a0y", "b0", "a3", "c0")
    taken, last = claim(db, "abc", 5)
    assert (texts(taken), last) == (["a0", "a0x", "a0y", "b0", "c0"], "a")
    taken, last = claim(db, "abc", 5, ticket=8)
    assert (texts(taken), last) == (["b3", "a3"], "b")
    assert [one.queue for one in taken] == ["b", "a"]


def test_oldest_first_within_a_priority_whichever_queue_it_is_in(db: sqlite3.Connection) -> None:
    put(db, "b0", "a0", "b0x", "a0x")
    assert texts(claim(db, "ab", 4)[0]) == ["b0", "a0", "b0x", "a0x"]


def test_where_nothing_waits_the_first_queue_had_the_turn(db: sqlite3.Connection) -> None:
    put(db, "c0")
    assert claim(db, "ab") == ([], "a")
    assert claim(db, "b") == ([], "b")
    assert claimed(db) == []


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [
        (0, []),
        (1, [("a", 0, [1])]),
        (2, [("a", 0, [1]), ("b", 0, [3])]),
        (3, [("b", 0, [3]), ("a", 0, [1, 2])]),
        (4, [("b", 0, [3]), ("a", 0, [1, 2]), ("b", 5, [4])]),
        (9, [("b", 0, [3]), ("a", 0, [1, 2]), ("b", 5, [4])]),
    ],
)
def test_the_last_heap_of_a_share_had_the_last_turn(limit: int, wanted: list[object]) -> None:
    heaps = [Heap("b", 5, [4]), Heap("b", 0, [3]), Heap("a", 0, [1, 2])]
    assert [(one.queue, one.priority, one.ids) for one in share(heaps, limit, ["a", "b"])] == wanted


def test_turns_are_in_the_order_of_the_queues_also_with_three(db: sqlite3.Connection) -> None:
    heaps = [Heap(queue, 0, [1, 2, 3]) for queue in "abc"]
    found = share(heaps, 4, ["c", "a", "b"])
    assert [(one.queue, one.ids) for one in found] == [("a", [1]), ("b", [1]), ("c", [1, 2])]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("value", ["text where bytes belong: \u00e4", 5, b"\xff no message"])
def test_a_row_that_is_not_ours_is_handed_on_and_the_others_are_whole(
    db: sqlite3.Connection, place: int, value: object
) -> None:
    put(db, "a0", "a0x", "a0y")
    db.execute("UPDATE messages SET message = ?, starts = 2 WHERE id = ?", (value, place + 1))
    taken, _ = claim(db, "a")
    good = [name for number, name in enumerate(["a0", "a0x", "a0y"]) if number != place]
    assert texts(one for number, one in enumerate(taken) if number != place) == good
    assert [one.tag for one in taken] == ["7:1", "7:2", "7:3"]
    assert taken[place].message.headers == b"" and taken[place].starts == 2
    assert {one.queue for one in taken} == {"a"}


@pytest.mark.parametrize("change", ["starts = 'many'", "queue = x'00'", "redelivered = 1.5", "id = 7"])
def test_a_message_that_is_not_what_the_schema_says_is_not_handed_out(
    db: sqlite3.Connection, change: str
) -> None:
    """Neither as it is nor with a value that we made up: the claim is rolled back, and the row set aside."""
    put(db, "a0", "a0x")
    db.execute(f"UPDATE messages SET {change} WHERE id = 1")
    with pytest.raises((Malformed, sqlite3.OperationalError)):  # the database takes both for a malformed row
        claim(db, "a")


def test_more_than_one_row_takes_is_fetched_one_by_one(db: sqlite3.Connection) -> None:
    put(db, "a0", "a0x")
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 250)
    size = db.execute("SELECT max(length(message)) FROM messages").fetchone()[0]
    assert size < 250
    for number in range(8):
        put(db, f"a0-{number}")
    assert len(claim(db, "a")[0]) == 10


def test_a_lease_says_whether_it_stood(db: sqlite3.Connection) -> None:
    assert claims.lease(db, "ada", 10.0) is False
    assert claims.lease(db, "ada", 20.0) is True
    claims.lease(db, "bob", 5.0)
    assert db.execute("SELECT * FROM owners ORDER BY owner").fetchall() == [("ada", 20.0), ("bob", 5.0)]


def test_what_an_owner_held_comes_back_redelivered_at_its_old_place(db: sqlite3.Connection) -> None:
    put(db, "a0", "b0", "a0x")
    claims.lease(db, "ada", 10.0)
    claim(db, "ab", 2)
    claim(db, "a", owner="bob", ticket=8)
    assert claims.forget(db, "ada") == (2, {"a", "b"})
    assert (ready(db), claimed(db)) == ([1, 2], [(3, 8, "bob")])
    assert db.execute("SELECT count(*) FROM owners").fetchone() == (0,)
    again, _ = claim(db, "ab")
    assert [(one.starts, one.redelivered) for one in again] == [(0, True), (0, True)]
    assert claims.forget(db, "cy") == (0, set())


def test_the_messages_of_all_whose_time_is_over_come_back(db: sqlite3.Connection) -> None:
    put(db, "a0", "b0", "b0x", "c0")
    for queue, owner, ends in (("a", "ada", 10.0), ("b", "bob", 9.0), ("c", "cy", 10.5)):
        claims.lease(db, owner, ends)
        claim(db, queue, owner=owner)
    claims.lease(db, "idle", 1.0)
    assert claims.return_lost(db, 8.0) == (0, set())
    assert claims.return_lost(db, 10.0) == (3, {"a", "b"})
    assert claims.return_lost(db, 10.0) == (0, set())
    assert claimed(db) == [(4, 7, "cy")]
