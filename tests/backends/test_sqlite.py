import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing as closed
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.backends.contract import BackendContract, Stores, closing
from tests.backends.contract_chords import ChordContract
from tests.brokers.under_test import result, run
from tests.waiting import wait_until
from umbel.backends.interface import Backend
from umbel.backends.registry import open_backend
from umbel.backends.sqlite import SqliteBackend
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.sqlite import wakeup
from umbel.brokers.sqlite.store import Store
from umbel.errors import BadURL, BrokerUnavailable
from umbel.wire.message import StoredResult


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'umbel.db'}"


@pytest.fixture
def stores(url: str) -> Iterator[Stores]:
    opened: list[Backend] = []
    yield closing(opened, lambda **changes: open_backend(url, replace(BrokerSettings(url), **changes)))
    for backend in opened:
        backend.close()


class TestSqlite(BackendContract, ChordContract):
    """The embedded store keeps every promise."""

    def test_no_waiter_is_left_registered(self, stores: Stores, tmp_path: Path) -> None:
        stores().wait(["a"], 0.01)
        with closed(sqlite3.connect(tmp_path / "umbel.db")) as db:
            assert db.execute("SELECT count(*) FROM waiters").fetchone() == (0,)

    def test_results_ride_in_the_settle_of_a_broker_on_the_same_file_only(
        self, stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = stores()
        monkeypatch.chdir(tmp_path)
        assert backend.shares_settle("sqlite:///umbel.db")
        assert not backend.shares_settle("sqlite:///other.db")
        assert not backend.shares_settle("redis://localhost")

    def test_where_sockets_have_no_abstract_names_waiting_works_all_the_same(
        self, stores: Stores, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(wakeup, "_SUPPORTED", False)
        self.test_waiting_ends_with_the_first_final_state(stores)
        self.test_waiting_on_the_event_loop_does_not_block_it(stores)

    def test_waiting_for_many_looks_at_each_a_few_times_however_many_there_are(
        self, stores: Stores, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each ends by itself. To look at all that are missing whenever one comes would be 90,000 looks."""
        monkeypatch.setattr(wakeup, "RECHECK_S", 3600.0)
        waiter, worker = stores(), stores()
        names, looked_at = [str(number) for number in range(600)], list[int]()
        read = Store.read_results

        def counted(
            store: Store, task_ids: Sequence[str], timeout_s: float | None
        ) -> dict[str, StoredResult]:
            looked_at.append(len(task_ids))
            return read(store, task_ids, timeout_s)

        monkeypatch.setattr(Store, "read_results", counted)

        async def scenario() -> None:
            await waiter.wait_async(names, None, lambda _: False)

        def judge(wait: Callable[[], object]) -> None:
            worker.forget(names)
            looked_at.clear()
            with ThreadPoolExecutor(1) as threads:
                waiting = threads.submit(wait)
                wait_until(lambda: waiting.running() and len(looked_at) > 1, what="the first looks")
                for name in names:
                    worker.store([result(name)])
                waiting.result(60)
            assert sum(looked_at) < 40 * len(names)

        judge(lambda: waiter.wait(names, None, lambda _: False))
        judge(lambda: run(scenario()))

    def test_a_read_ends_at_its_time_out_while_other_threads_use_the_file(self, url: str) -> None:
        backend = SqliteBackend(url, BrokerSettings(url, connect_timeout_s=60.0))
        backend.store([result("a")])
        with backend._store.database.read(), ThreadPoolExecutor(1) as threads:
            reading = threads.submit(backend.read, ["a"], 0.01)
            with pytest.raises(BrokerUnavailable, match=r"used the database for 0\.01 s"):
                reading.result(30)
        assert set(backend.read(["a"], 0.01)) == {"a"}
        backend.close()

    def test_a_wait_begun_before_a_fork_does_not_disturb_the_child(self, stores: Stores) -> None:
        backend = stores()
        backend.wait(["a"], 0.01)
        pid = os.fork()
        if pid == 0:
            backend.store([result("a")])
            os._exit(0)
        os.waitpid(pid, 0)
        assert set(backend.wait(["a"], None)) == {"a"}


def test_an_unknown_scheme_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadURL, match=r"known schemes: .*sqlite"):
        open_backend("carrier-pigeon://roof", BrokerSettings("sqlite:///umbel.db"))
