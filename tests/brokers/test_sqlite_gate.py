"""The embedded broker's gate between writers, and what happens to it in a fork."""

import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.brokers.contract_processes import in_a_fork
from tests.brokers.under_test import outgoing
from tests.waiting import wait_until
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.sqlite import database, files
from umbel.brokers.sqlite.files import WriteGate
from umbel.brokers.sqlite.store import Store
from umbel.errors import BrokerUnavailable


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "umbel.db"


def test_one_writer_is_inside_at_a_time_and_the_wait_is_bounded(path: Path) -> None:
    one, other = WriteGate(path), WriteGate(path)
    one.enter(1.0)
    with pytest.raises(BrokerUnavailable, match=r"stayed locked by another process for 0\.05 s"):
        other.enter(0.05)
    one.leave()
    other.enter(1.0)
    with pytest.raises(BrokerUnavailable):
        one.enter(0.0)
    one.close()
    other.close()  # closing leaves
    third = WriteGate(path)
    third.enter(0.0)
    third.close()


def test_who_leaves_and_comes_back_at_once_goes_behind_who_waits(path: Path) -> None:
    hasty, patient, probe = WriteGate(path), WriteGate(path), WriteGate(path)
    inside: list[str] = []

    def wait_in_line() -> None:
        patient.enter(10.0)
        inside.append("patient")
        patient.leave()

    probe.enter(1.0)
    probe.leave()
    hasty.enter(1.0)
    waiting = threading.Thread(target=wait_in_line)
    waiting.start()

    def turnstile_taken() -> bool:
        if probe._set(files._TAKE_TURNSTILE):
            probe._set(files._FREE_TURNSTILE)
            return False
        return True

    wait_until(turnstile_taken, what="the patient one at the turnstile")
    hasty.leave()
    hasty.enter(10.0)
    inside.append("hasty")
    hasty.leave()
    waiting.join()
    assert inside == ["patient", "hasty"]
    for one in (hasty, patient, probe):
        one.close()


def test_who_was_interrupted_on_the_way_in_leaves_nothing_shut(path: Path) -> None:
    one, other = WriteGate(path), WriteGate(path)
    one.enter(1.0)
    assert one._set(files._TAKE_BOTH)  # inside, and still at the turnstile
    one.leave()
    other.enter(0.0)
    one.leave()  # what it does not hold, it cannot open to others
    with pytest.raises(BrokerUnavailable):
        one.enter(0.0)
    one.close()
    other.close()


def test_where_the_system_has_no_such_locks_the_gate_is_open(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_SUPPORTED", False)
    one, other = WriteGate(path), WriteGate(path)
    one.enter(0.0)
    other.enter(0.0)
    one.leave()
    other.leave()
    store = Store(BrokerSettings(f"sqlite:///{path}"))
    store.publish(outgoing("a"))
    store.close()


def test_a_child_forked_in_the_middle_of_a_write_is_refused_and_its_parent_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "FORK_WAIT_S", 0.05)
    store = Store(BrokerSettings(f"sqlite:///{path}"))
    writing, enough = threading.Event(), threading.Event()

    def write_for_long() -> None:
        with store.database.write() as db:
            db.execute("INSERT INTO meta VALUES ('written', 1)")
            writing.set()
            enough.wait()

    def child() -> None:
        for one in (store, Store(BrokerSettings(f"sqlite:///{path}"))):
            with pytest.raises(BrokerUnavailable, match="after the fork"):
                one.publish(outgoing("a"))

    writer = threading.Thread(target=write_for_long)
    writer.start()
    writing.wait()
    try:
        assert in_a_fork(child) == 0
    finally:
        enough.set()
        writer.join()
    with store.database.read() as db:
        assert db.execute("SELECT value FROM meta WHERE name = 'written'").fetchone() == (1,)
    store.close()


def test_forking_keeps_no_lock_and_no_connection_in_the_child(path: Path) -> None:
    store = Store(BrokerSettings(f"sqlite:///{path}"))
    store.publish(outgoing("a"))

    def child() -> None:
        for name in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # listdir's own descriptor is gone by now
                assert not os.readlink(f"/proc/self/fd/{name}").startswith(str(path))

    assert in_a_fork(child) == 0
    store.close()
