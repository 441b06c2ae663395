"""F2, F6: batches, large jobs and results, time limits, terminating a job."""

import asyncio
import os
import signal
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.pools.host import make_job
from tests.pools.processes import is_gone
from tests.pools.recorder import Recorder, running, until_waiting
from tests.waiting import wait_until
from umbel.pools.interface import Pool


async def teach(pool: Pool, recorder: Recorder, number: int = -1) -> None:
    """Let the pool learn that the task `return` is quick, so that it makes batches of it."""
    pool.submit([make_job(number)])
    await recorder.until_back(number)


def test_a_slow_job_in_a_batch_does_not_hold_those_behind_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running("prefork") as (pool, recorder):
            await teach(pool, recorder)
            gate = tmp_path / "gate"
            slow = make_job(3, "wait-for", str(gate), task="return")
            pool.submit([make_job(n) if n != 3 else slow for n in range(40)])
            others = set(range(40)) - {3}
            await recorder.until_back(*others)  # those before it too: their outcomes are not kept back
            assert 3 in recorder.begun
            gate.touch()
            await recorder.until_back(3)
            assert Counter(recorder.came_back) == Counter(range(-1, 40))

    asyncio.run(scenario())


def test_with_a_single_child_what_ran_before_a_slow_job_is_reported_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running("prefork", concurrency=1) as (pool, recorder):
            await teach(pool, recorder)
            gate = tmp_path / "gate"
            pool.submit([make_job(1), make_job(2, "wait-for", str(gate), task="return"), make_job(3)])
            await recorder.until_back(1)
            await recorder.until(lambda: 2 in recorder.begun, what="the slow job to be found running")
            assert [job.number for job in pool.withdraw()] == [3]
            gate.touch()
            await recorder.until_back(2)
            # Found late, and yet told with the time at which it could begin: waiting times are made of that.
            began, before, ran = recorder.begun_at, recorder.outcomes[1], recorder.outcomes[2]
            assert before.started_at <= began[2] <= ran.started_at
            assert began[-1] <= recorder.outcomes[-1].started_at

    asyncio.run(scenario())


def test_a_result_of_5_mb_and_a_job_of_5_mb_pass(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running("prefork") as (pool, recorder):
            size = 5 * 1024 * 1024
            pool.submit([make_job(1, "big", size), make_job(2, "return", "y" * size), make_job(3)])
            await recorder.until_back(1, 2, 3)
            assert recorder.value(1) == "x" * size
            assert recorder.value(2) == "y" * size

    asyncio.run(scenario())


@pytest.mark.scenario
def test_20_000_quick_jobs_come_back_once() -> None:
    async def scenario() -> None:
        async with running("prefork") as (pool, recorder):
            numbers = iter(range(20_000))

            def refill() -> None:
                pool.submit([make_job(number) for number in islice(numbers, pool.room())])

            recorder.then = refill
            refill()
            await recorder.until(lambda: len(recorder.came_back) >= 20_000, what="20,000 jobs")
            assert Counter(recorder.came_back) == Counter(range(20_000))
            assert len(recorder.outcomes) == 20_000
            assert len(set(recorder.pids.values())) == 2

    asyncio.run(scenario())


# ---- time limits -------------------------------------------------------------------------------------


def test_the_hard_limit_kills_the_child_with_what_its_task_started(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running("prefork") as (pool, recorder):
            pool.submit([make_job(1, "subprocess")])
            await recorder.until_back(1)
            (child,) = [pid for pid in pool.describe()["processes"] if pid == recorder.pids[1]]
            gate = tmp_path / "gate"
            pool.submit([make_job(n, "wait-for", str(gate), hard_limit_s=0.2) for n in (2, 3)])
            await recorder.until_back(2, 3)
            for number in (2, 3):
                lost = recorder.lost[number]
                assert (lost.timed_out, lost.started, lost.ran) == (True, True, True)
                assert "hard time limit of 0.2 s" in lost.reason
            for pid in (child, recorder.value(1)):
                await asyncio.to_thread(wait_until, lambda pid=pid: is_gone(pid), what=f"{pid} to be gone")
            pool.submit([make_job(4)])
            await recorder.until_back(4)

    asyncio.run(scenario())


@pytest.mark.parametrize("soft_limit_s", [0.2, 0.000001])
def test_the_soft_limit_raises_inside_the_task(tmp_path: Path, soft_limit_s: float) -> None:
    async def scenario() -> None:
        async with running("prefork", concurrency=1) as (pool, recorder):
            gate = str(tmp_path / "gate")
            pool.submit([make_job(1, "wait-for", gate, soft_limit_s=soft_limit_s)])
            pool.submit([make_job(2, "catch-soft", gate, soft_limit_s=soft_limit_s)])
            pool.submit([make_job(3)])
            await recorder.until_back(1, 2, 3)
            assert recorder.outcomes[1].kind == "failure"
            assert "SoftTimeLimitExceeded" in recorder.outcomes[1].summary
            assert recorder.value(2) == "cleaned up"
            assert not recorder.lost
            assert not recorder.deaths()

    asyncio.run(scenario())


def test_a_late_soft_limit_signal_hits_nothing() -> None:
    async def scenario() -> None:
        async with running("prefork", concurrency=1) as (pool, recorder):
            # Jobs that take about as long as their limit: many signals come late.
            jobs = [make_job(n, "sleep", 0.004, soft_limit_s=0.0045, task=f"t{n % 7}") for n in range(100)]
            pool.submit(jobs)
            (pid,) = pool.describe()["processes"]
            await recorder.until_back(*range(100))
            assert not recorder.lost
            assert pool.describe()["processes"] == [pid]
            unlimited = [make_job(n, "sleep", 0.001) for n in range(100, 150)]
            pool.submit(unlimited)
            await recorder.until_back(*range(100, 150))
            assert all(recorder.outcomes[n].kind == "success" for n in range(100, 150))

    asyncio.run(scenario())


def test_a_signal_of_an_outsider_during_a_limited_job_is_ignored(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running("prefork", concurrency=1) as (pool, recorder):
            gate = tmp_path / "gate"
            pool.submit([make_job(1, "wait-for", str(gate), soft_limit_s=60.0)])
            await until_waiting(gate)
            os.kill(pool.describe()["processes"][0], signal.SIGUSR1)
            gate.touch()
            await recorder.until_back(1)
            assert recorder.value(1) == "released"

    asyncio.run(scenario())


# ---- terminate ---------------------------------------------------------------------------------------


def test_terminate_signals_the_child_that_runs_the_job(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running("prefork") as (pool, recorder):
            gate = tmp_path / "gate"
            pool.submit([make_job(1, "wait-for", str(gate)), make_job(2)])
            await until_waiting(gate)
            assert pool.terminate_job(1, signal.SIGTERM)
            await recorder.until_back(1, 2)
            assert "was killed by SIGTERM" in recorder.lost[1].reason
            assert not pool.terminate_job(1, signal.SIGTERM)
            assert not pool.terminate_job(99, signal.SIGTERM)

    asyncio.run(scenario())


def test_terminating_a_job_in_a_batch_leaves_its_neighbours_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running("prefork", concurrency=1, batch_patience_s=1000.0) as (pool, recorder):
            await teach(pool, recorder)
            gate = tmp_path / "gate"
            pool.submit([make_job(1), make_job(2, "wait-for", str(gate), task="return"), make_job(3)])
            await until_waiting(gate)
            assert not pool.terminate_job(3, signal.SIGKILL)  # it has not started
            assert pool.terminate_job(2, signal.SIGKILL)
            await recorder.until_back(1, 2, 3)
            assert list(recorder.lost) == [2]

    asyncio.run(scenario())


def test_describe_tells_what_runs_where(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running("prefork") as (pool, recorder):
            gate = tmp_path / "gate"
            pool.submit([make_job(1, "wait-for", str(gate))])
            await until_waiting(gate)
            about: dict[str, Any] = pool.describe()
            assert about["implementation"] == "prefork"
            assert about["max-concurrency"] == len(about["processes"]) == 2
            assert about["running"] == {"id-1": recorder.begun[1]}
            assert about["waiting"] == 0

    asyncio.run(scenario())


def test_the_loop_is_never_held_while_children_work() -> None:
    async def scenario() -> None:
        async with running("prefork") as (pool, recorder):
            loop = asyncio.get_running_loop()
            longest_s, last = 0.0, loop.time()

            def beat() -> None:
                nonlocal longest_s, last
                longest_s, last = max(longest_s, loop.time() - last), loop.time()
                if len(recorder.came_back) < 4:
                    loop.call_later(0.001, beat)

            pool.submit([make_job(n, "sleep", 0.5) for n in range(4)])
            beat()
            await recorder.until_back(*range(4))
            assert longest_s < 0.4

    asyncio.run(scenario())
