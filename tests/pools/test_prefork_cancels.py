"""Cancelling and terminating hit the job that was meant, and no other (P3, F8)."""

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from tests.pools.host import make_job
from tests.pools.recorder import Recorder, running, until_waiting
from umbel.pools.interface import Pool

SOAK = bool(os.environ.get("UMBEL_SOAK"))
CANCELS = 10_000 if SOAK else 300
AT_ONCE = 24


async def _teach(pool: Pool, recorder: Recorder, task: str) -> None:
    """Let the pool learn that a task is quick, so that it goes in batches."""
    for number in range(-8, 0):
        pool.submit([make_job(number, task=task)])
        await recorder.until_back(number)


def test_a_cancelled_job_is_told_and_its_child_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running("prefork", concurrency=1) as (pool, recorder):
            gate = tmp_path / "gate"
            (pid,) = pool.describe()["processes"]
            pool.submit([make_job(1, "wait-for", str(gate))])
            await until_waiting(gate)
            assert pool.cancel_job(1)
            await recorder.until_back(1)
            assert "TaskCancelled" in recorder.outcomes[1].summary
            assert not pool.cancel_job(1) and not pool.cancel_job(99)
            pool.submit([make_job(2)])
            await recorder.until_back(2)
            assert (recorder.pids[2], recorder.deaths()) == (pid, [])

    asyncio.run(scenario())


def test_a_cancel_for_a_job_that_waits_in_the_batch_does_not_hit_the_one_that_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running("prefork", concurrency=1, batch_patience_s=1000.0) as (pool, recorder):
            await _teach(pool, recorder, "return")
            gate = tmp_path / "gate"
            pool.submit([make_job(1, "wait-for", str(gate), task="return"), make_job(2)])
            await until_waiting(gate)
            assert all(pool.cancel_job(2) for _ in range(20))
            assert not pool.terminate_job(2, signal.SIGKILL)  # it has not started
            gate.touch()
            await recorder.until_back(1, 2)
            assert recorder.value(1) == "released"
            assert not recorder.lost

    asyncio.run(scenario())


@pytest.mark.scenario
@pytest.mark.timeout(3600 if SOAK else 120)
def test_random_cancels_hit_nobody_else() -> None:
    """Jobs in batches and alone, of no time and of some, cancelled gently and by signals, at any moment."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")

    async def scenario() -> tuple[int, int, int]:
        chance, number, asked, meant = random.Random(seed), 0, 0, set[int]()
        async with running("prefork", concurrency=4) as (pool, recorder):
            back = recorder.came_back
            await _teach(pool, recorder, "sleep")
            while asked < CANCELS:
                jobs = range(number, number + AT_ONCE)
                number += AT_ONCE
                seconds = [chance.choice((0.0, 0.0, 0.0, 0.001, 0.03)) for _ in jobs]
                pool.submit([make_job(one, "sleep", wait) for one, wait in zip(jobs, seconds, strict=True)])
                for position, target in enumerate(chance.sample(jobs, AT_ONCE // 2)):
                    asked += 1
                    enough = jobs[0] + 8 + chance.randrange(position + 1)
                    await recorder.until(lambda n=enough: len(back) >= n, what="some to be back")  # type: ignore[misc]
                    if chance.random() < 0.6:
                        hit = pool.cancel_job(target)
                    else:
                        hit = pool.terminate_job(target, chance.choice((signal.SIGTERM, signal.SIGKILL)))
                    meant.update({target} if hit else ())
                await recorder.until_back(*jobs)
        others = set(range(number)) - meant
        spoiled = {one for one in others if one in recorder.lost or recorder.outcomes[one].kind != "success"}
        assert not spoiled
        ended = {one for one in meant if one in recorder.lost or recorder.outcomes[one].kind != "success"}
        assert sorted(back) == list(range(-8, number))
        return asked, len(ended), len(others)

    asked, ended, others = asyncio.run(scenario())
    print(f"{asked} asked for, {ended} cut off, {others} others unharmed")
    assert ended
