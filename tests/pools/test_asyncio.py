"""What only the asyncio pool promises: coroutines, many at once, on a loop that can be held up (F10)."""

import asyncio
import logging
import signal
from pathlib import Path

import pytest

from tests.pools.host import make_job
from tests.pools.recorder import running, until_waiting
from tests.waiting import wait_until


def test_a_thousand_coroutines_run_at_once(tmp_path: Path) -> None:
    """They wait for a file together, so none could end before all have begun."""

    async def scenario() -> None:
        async with running("asyncio", concurrency=1000) as (pool, recorder):
            gate = tmp_path / "gate"
            pool.submit([make_job(number, "await-file", str(gate)) for number in range(1000)])
            await recorder.until(lambda: len(recorder.begun) == 1000, what="all to run")
            assert len(pool.describe()["running"]) == 1000
            gate.touch()
            await recorder.until_back(*range(1000))
            assert {outcome.kind for outcome in recorder.outcomes.values()} == {"success"}

    asyncio.run(scenario())


def test_plain_functions_run_in_threads_beside_coroutines(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running("asyncio", concurrency=4) as (pool, recorder):
            gate = tmp_path / "gate"
            pool.submit([make_job(1, "wait-for", str(gate), task="plain"), make_job(2)])
            await recorder.until_back(2)
            assert recorder.came_back == [2]
            gate.touch()
            await recorder.until_back(1)

    asyncio.run(scenario())


def test_a_plain_function_cannot_have_a_hard_limit_but_a_soft_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running("asyncio") as (pool, recorder):
            pool.submit([make_job(1, "return", task="plain", hard_limit_s=1.0)])
            assert "plain functions run in threads" in recorder.lost[1].fault
            pool.submit([make_job(2, "catch-soft", str(tmp_path / "gate"), task="plain", soft_limit_s=0.05)])
            await recorder.until_back(2)
            assert recorder.value(2) == "cleaned up"
            pool.submit([make_job(3, "wait-for", str(tmp_path / "other"), task="plain")])
            await recorder.until(lambda: 3 in recorder.begun, what="the job to run")
            assert not pool.terminate_job(3, signal.SIGTERM)
            (tmp_path / "other").touch()
            await recorder.until_back(3)

    asyncio.run(scenario())


def test_a_soft_limit_ends_the_children_of_a_task_group_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running("asyncio") as (pool, recorder):
            pool.submit([make_job(1, "group", str(tmp_path / "gate"), soft_limit_s=0.05)])
            await recorder.until_back(1)
            assert recorder.value(1) == "3 ended"

    asyncio.run(scenario())


def test_a_coroutine_that_swallows_its_cancellation_gets_its_verdict(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running("asyncio", concurrency=1) as (pool, recorder):
            gate = tmp_path / "gate"
            pool.submit([make_job(1, "deaf", str(gate), hard_limit_s=0.05), make_job(2)])
            await recorder.until_back(1, 2)
            assert recorder.lost[1].timed_out
            assert recorder.outcomes[2].kind == "success"
            gate.touch()

    asyncio.run(scenario())


def test_a_coroutine_that_keeps_the_loop_is_broken_at_its_limit(tmp_path: Path) -> None:
    """The main loop goes on meanwhile, and the others go on afterwards."""

    async def scenario() -> None:
        async with running("asyncio", concurrency=3) as (pool, recorder):
            gate, other = tmp_path / "gate", tmp_path / "other"
            pool.submit([make_job(2, "wait-for", str(other))])
            await until_waiting(other)
            pool.submit([make_job(1, "spin", str(gate), hard_limit_s=0.05)])
            await recorder.until_back(1)
            assert recorder.lost[1].timed_out
            other.touch()
            await recorder.until_back(2)
            assert recorder.value(2) == "released"
            assert not gate.exists()

    asyncio.run(scenario())


def test_a_loop_that_stays_blocked_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that blocks fails at its limit; what was stuck behind it comes back to run again."""
    monkeypatch.setattr("umbel.pools.asyncio._ABANDON_S", 0.1)
    monkeypatch.setattr(
        "umbel.pools.loop_thread.LoopThread.break_in", lambda loop_thread: None
    )  # as if it waited in C

    async def scenario() -> None:
        async with running("asyncio", concurrency=3) as (pool, recorder):
            gate, other = tmp_path / "gate", tmp_path / "other"
            pool.submit([make_job(2, "wait-for", str(other))])
            await until_waiting(other)
            pool.submit([make_job(1, "block", str(gate), hard_limit_s=0.05)])
            await recorder.until_back(1, 2)
            assert recorder.lost[1].timed_out
            assert (recorder.lost[2].started, recorder.lost[2].ran) == (False, True)
            pool.submit([make_job(3)])
            await recorder.until_back(3)
            gate.touch()

    asyncio.run(scenario())


def test_who_holds_up_the_loop_is_named_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("umbel.pools.asyncio._WATCH_S", 0.02)

    async def scenario() -> None:
        async with running("asyncio") as (pool, recorder):
            gate = tmp_path / "gate"
            pool.submit([make_job(1, "block", str(gate))])
            await asyncio.to_thread(wait_until, lambda: _warnings(caplog), what="a line in the log")
            gate.touch()
            await recorder.until_back(1)

    asyncio.run(scenario())
    (record,) = _warnings(caplog)
    assert record.getMessage() == "task blocks the event loop of the asyncio pool"
    assert vars(record)["task"] == "block"
    assert ":" in vars(record)["where"]


def _warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [one for one in caplog.records if one.name == "umbel.pools.asyncio"]
