"""The embedded broker's way of sending: messages between their row and their slip, and the log's flush.

None is lost, and none is out of turn.
"""

import errno
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.brokers.under_test import OWNER, message
from umbel.brokers.interface import Ack, BrokerSettings, Delivery, Return
from umbel.brokers.sqlite import publishing, schema
from umbel.brokers.sqlite.store import Store
from umbel.errors import BrokerUnavailable, StorageFull
from umbel.wire.message import Outgoing

QUEUES = ("a", "b")
LATER = 1000.0

queue_names = st.sampled_from(QUEUES)
priorities = st.integers(0, 2)


def sent(number: int, queue: str, priority: int, *, in_s: float = 0.0) -> Outgoing:
    not_before = time.time() + in_s if in_s else 0.0
    return Outgoing(queue, message(str(number), priority=priority), not_before)


class Queues(RuleBasedStateMachine):
    """One store beside lists of what should be in it, in the order of claims."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = TemporaryDirectory()
        self.store = Store(BrokerSettings(f"sqlite:///{self.directory.name}/umbel.db"))
        self.waiting: dict[str, list[tuple[int, int]]] = {queue: [] for queue in QUEUES}
        self.delayed: dict[str, int] = dict.fromkeys(QUEUES, 0)
        self.held: list[tuple[str, int, Delivery]] = []
        self.count = 0

    @rule(queue=queue_names, priority=priorities)
    def send_one(self, queue: str, priority: int) -> None:
        self.store.publish([sent(self._next(queue, priority), queue, priority)])

    @rule(calls=st.lists(st.tuples(queue_names, priorities, st.booleans()), max_size=12))
    def send_many(self, calls: list[tuple[str, int, bool]]) -> None:
        batch = []
        for queue, priority, delayed in calls:
            if delayed:
                batch.append(sent(-1, queue, priority, in_s=LATER))
                self.delayed[queue] += 1
            else:
                batch.append(sent(self._next(queue, priority), queue, priority))
        self.store.publish(batch)

    @rule(queue=queue_names, limit=st.integers(1, 8))
    def claim(self, queue: str, limit: int) -> None:
        claimed = self.store.claim(OWNER, [queue], limit, 0).deliveries
        first = sorted(self.waiting[queue])[:limit]
        assert [int(one.message.body) for one in claimed] == [number for _, number in first]
        self.waiting[queue] = sorted(self.waiting[queue])[limit:]
        for (priority, _), delivery in zip(first, claimed, strict=True):
            self.held.append((queue, priority, delivery))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), done=st.booleans())
    def settle(self, data: st.DataObject, done: bool) -> None:
        queue, priority, delivery = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        verdict = Ack(delivery.tag) if done else Return(delivery.tag)
        assert not self.store.settle([verdict]).conflicts
        if not done:
            self.waiting[queue].append((priority, int(delivery.message.body)))

    @rule(queue=queue_names)
    def purge(self, queue: str) -> None:
        assert self.store.purge(queue) == len(self.waiting[queue]) + self.delayed[queue]
        self.waiting[queue].clear()
        self.delayed[queue] = 0

    @invariant()
    def what_is_seen_is_what_is_there(self) -> None:
        depths = self.store.depths()
        for queue in QUEUES:
            in_line = [number for _, number in sorted(self.waiting[queue])]
            held = sum(one == queue for one, _, _ in self.held)
            found = depths.get(queue)
            counts = (found.ready, found.delayed, found.claimed) if found else (0, 0, 0)
            assert counts == (len(in_line), self.delayed[queue], held)
            assert [int(one.message.body) for one in self.store.peek(queue, 5)] == in_line[:5]

    def teardown(self) -> None:
        self.store.close()
        self.directory.cleanup()

    def _next(self, queue: str, priority: int) -> int:
        self.count += 1
        self.waiting[queue].append((priority, self.count))
        return self.count


@pytest.fixture(autouse=True)
def _file_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "FILE_EVERY", 4)


def test_no_message_is_lost_or_out_of_turn_whatever_is_sent_claimed_settled_and_purged() -> None:
    run_state_machine_as_test(
        Queues, settings=settings(max_examples=40, stateful_step_count=30, deadline=None)
    )


def unfiled(path: Path) -> int:
    with closing(sqlite3.connect(path)) as db:
        count: int = db.execute(
            "SELECT count(*) FROM messages WHERE id > (SELECT value FROM meta WHERE name = 'filed')"
        ).fetchone()[0]
        return count


@contextmanager
def opened(path: Path) -> Iterator[Store]:
    store = Store(BrokerSettings(f"sqlite:///{path}"))
    yield store
    store.close()


@given(sizes=st.lists(st.integers(1, 9), max_size=6))
@settings(max_examples=20, deadline=None)
def test_what_waits_to_be_filed_stays_little_however_much_is_sent(sizes: list[int]) -> None:
    with TemporaryDirectory() as directory, opened(Path(directory) / "umbel.db") as store:
        for size in sizes:
            store.publish([sent(number, "a", 0) for number in range(size)])
            assert unfiled(store.database.path) < publishing.FILE_EVERY + size


def test_a_file_of_the_first_version_keeps_its_messages_and_its_order(tmp_path: Path) -> None:
    path = tmp_path / "umbel.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        schema.migrate(db, path, schema.MIGRATIONS[:1])
        for number in (1, 2):
            db.execute(publishing.APPEND, publishing.row(sent(number, "a", 0)))
            db.execute("INSERT INTO ready VALUES ('a', 0, ?)", (number,))
    with opened(path) as store:
        store.publish([sent(3, "a", 0)])
        claimed = store.claim(OWNER, ["a"], 10, 0).deliveries
        assert [one.message.body for one in claimed] == [b"1", b"2", b"3"]


def test_who_closes_the_file_does_not_disturb_another_threads_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = os.fdatasync
    with opened(tmp_path / "umbel.db") as store:

        def close_meanwhile(descriptor: int) -> None:
            store.close()
            assert os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{store.database.path}-wal")
            flush(descriptor)

        monkeypatch.setattr(os, "fdatasync", close_meanwhile)
        for number in range(3):
            store.publish([sent(number, "a", 0)])
        assert [one.message.body for one in store.claim(OWNER, ["a"], 9, 0).deliveries] == [b"0", b"1", b"2"]


def test_a_log_that_cannot_be_opened_is_one_clear_error_and_nothing_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = os.open

    def refuse(path: str, *how: int) -> int:
        if str(path).endswith("-wal"):
            raise OSError(errno.EMFILE, "Too many open files")
        return open_file(path, *how)

    with opened(tmp_path / "umbel.db") as store:
        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(BrokerUnavailable, match="-wal to flush it: Too many open files"):
            store.publish([sent(1, "a", 0)])
        monkeypatch.undo()
        store.publish([sent(2, "a", 0)])
        assert [one.message.body for one in store.peek("a", 9)] == [b"2"]


def fill(store: Store, sizes: Sequence[int]) -> int:
    """Send messages one by one until there is no room for the smallest: how many were confirmed."""
    confirmed = 0
    for size_bytes in sizes:
        try:
            while True:
                store.publish([Outgoing("a", message("x" * size_bytes))])
                confirmed += 1
        except StorageFull:
            continue
    return confirmed


@pytest.mark.parametrize("is_purged", [True, False])
def test_a_full_file_is_emptied_although_its_messages_were_not_filed(
    tmp_path: Path, is_purged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes room has some left for it; what was confirmed is there, and nothing else."""
    monkeypatch.setattr(publishing, "FILE_EVERY", 1024)
    settings = BrokerSettings(f"sqlite:///{tmp_path}/umbel.db", storage_max_bytes=2**19)
    with closing(Store(settings)) as store:
        store.publish([sent(number, "a", 0) for number in range(900)])
        confirmed, found = 900 + fill(store, (20_000, 3000, 1)), 0
        if is_purged:
            found = store.purge("a")
        while deliveries := store.claim(OWNER, ["a"], 100, 0).deliveries:
            found += store.settle([Ack(one.tag) for one in deliveries]).applied
        assert found == confirmed
        store.publish([sent(0, "a", 0)])


def test_a_message_that_is_stored_is_sent_although_it_cannot_be_filed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "FILE_EVERY", 16)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)  # no power cut is in this
    for size_bytes in range(304_096, 345_056, 4096):
        url = f"sqlite:///{tmp_path}/{size_bytes}.db"
        with closing(Store(BrokerSettings(url, storage_max_bytes=size_bytes))) as store:
            confirmed = fill(store, (1,))
            assert store.depths()["a"].ready == confirmed
