"""Clock and identity across restarts: whole or absent, never half, never in the way of the worker."""

import asyncio
import errno
import os
import threading
from contextlib import closing
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.protocol.clock import LamportClock
from umbel.worker.context import Identity
from umbel.worker.steps import state_store
from umbel.worker.steps.state_store import (
    SavedState,
    StateStore,
    next_incarnation,
    read_saved_state,
    saved_state_file,
    write_saved_state,
)

STATE = SavedState("a@x", 77, 1_794_700_000_000_000)


def test_what_was_saved_is_read_and_belongs_to_its_owner(tmp_path: Path) -> None:
    path = saved_state_file(tmp_path / "run", "a@x", "sqlite:///q.db")
    assert read_saved_state(path) is None
    write_saved_state(path, STATE)
    write_saved_state(path, STATE)
    assert read_saved_state(path) == STATE
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_nodes_of_other_clusters_have_other_files(tmp_path: Path) -> None:
    files = {saved_state_file(tmp_path, node, url) for node in ("a@x", "b@x") for url in ("one", "two")}
    assert len(files) == 4


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "\udcff\x00",
        '{"node": "a@x"}',
        '{"node": "a", "clock": -1, "incarnation": 5}',
        '{"node": "a", "clock": 1e30, "incarnation": 5}',
        '{"node": "a", "clock": true, "incarnation": 5}',
    ],
)
def test_a_file_that_cannot_be_read_is_set_aside_with_one_line(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.state"
    path.write_text(content, errors="surrogateescape")
    assert read_saved_state(path) is None
    assert read_saved_state(path) is None  # the second time it is not there any more
    assert [record.message for record in caplog.records] == [
        "cannot read this node's saved clock and incarnation; starting with new ones"
    ]
    assert [one.name for one in tmp_path.iterdir()] == ["a.unreadable"]


def test_a_full_disk_leaves_the_former_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.state"
    write_saved_state(path, STATE)

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_saved_state(path, SavedState("a@x", 78, 1))
    assert read_saved_state(path) == STATE
    assert [one.name for one in tmp_path.iterdir()] == ["a.state"]


@given(st.integers(0, 2**52), st.integers(0, 2**52))
def test_an_incarnation_grows_although_the_wall_clock_was_set_back(saved: int, now: int) -> None:
    assert next_incarnation(SavedState("a@x", 0, saved), now) == max(saved + 1, now)
    assert next_incarnation(None, now) == now


def test_the_last_save_waits_for_one_that_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_store, "SAVE_EVERY_S", 0.001)
    saves, entered, gate, busy = count(1), threading.Event(), threading.Event(), threading.Lock()
    overlaps: list[int] = []

    def save_slowly(path: Path, state: SavedState) -> None:
        number = next(saves)
        if not busy.acquire(blocking=False):
            overlaps.append(number)
            return
        with closing(SimpleNamespace(close=busy.release)):
            if number == 2:  # the first one after the start
                entered.set()
                gate.wait(20)

    monkeypatch.setattr(state_store, "write_saved_state", save_slowly)
    context = SimpleNamespace(
        identity=Identity("a@x", 1, 9),
        settings=SimpleNamespace(run_directory=tmp_path),
        broker=SimpleNamespace(url="sqlite:///q.db"),
    )
    store = StateStore(
        cast("Any", context), cast("Any", SimpleNamespace(clock=LamportClock(5), clock_reserved=5)), None
    )

    async def scenario() -> None:
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            store.adopt(group)
            await store.start()
            await asyncio.to_thread(entered.wait, 20)
            stopping = group.create_task(store.stop())
            await asyncio.wait({stopping}, timeout=0.2)  # ends early only if it does not wait
            gate.set()

    asyncio.run(scenario())
    assert overlaps == []
    assert next(saves) == 4  # at the start, in between, at the end


def test_a_save_that_fails_is_reported_once_and_never_stops_the_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_store, "SAVE_EVERY_S", 0.001)
    blocked = tmp_path / "run"
    blocked.write_text("a file where the directory should be")
    events = SimpleNamespace(clock=LamportClock(5), clock_reserved=1234)
    context = SimpleNamespace(
        identity=Identity("a@x", 1, 9),
        settings=SimpleNamespace(run_directory=blocked),
        broker=SimpleNamespace(url="sqlite:///q.db"),
    )
    store = StateStore(cast("Any", context), cast("Any", events), SavedState("a@x", 1000, 8))

    async def scenario() -> None:
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            store.adopt(group)
            await store.start()
            assert events.clock.value == 1000  # on from where it was
            blocked.unlink()
            path = saved_state_file(blocked, "a@x", "sqlite:///q.db")
            saved_again = asyncio.Event()

            async def watch() -> None:
                while read_saved_state(path) is None:
                    await asyncio.to_thread(os.sched_yield)
                saved_again.set()

            group.create_task(watch())
            await saved_again.wait()
            await store.stop()
            assert read_saved_state(path) == SavedState("a@x", 1234, 9)

    caplog.set_level("INFO")
    asyncio.run(scenario())
    messages = [record.message for record in caplog.records]
    assert messages == [
        "cannot save the node state; the worker continues, retrying",
        "node state saved again",
    ]
