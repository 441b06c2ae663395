"""N1: what a task does to its process does not harm the task that comes after it."""

import asyncio
from collections import Counter
from pathlib import Path

from tests.pools.host import make_job
from tests.pools.recorder import running, until_waiting
from umbel.pools.prefork.kernel import LIMITS as KINDS
from umbel.pools.prefork.kernel import Limits

LIMITS = ("NOFILE", "AS", "FSIZE", "NPROC", "CPU", "DATA", "STACK")


def test_a_task_that_lowers_the_limits_of_its_process_is_the_last_to_run_there() -> None:
    async def scenario() -> None:
        async with running("prefork", concurrency=1) as (pool, recorder):
            for number, name in enumerate(LIMITS):
                pool.submit(
                    [make_job(number, "lower", name), *(make_job(100 * (number + 1) + n) for n in range(3))]
                )
                await recorder.until_back(number, *(100 * (number + 1) + n for n in range(3)))
                after = {recorder.pids[100 * (number + 1) + n] for n in range(3)}
                assert after.isdisjoint({recorder.pids[number]}), name
            assert not recorder.lost
            assert not recorder.deaths()
            ended = [fields["reason"] for what, fields in recorder.children if what == "ended"]
            assert len(ended) == len(LIMITS)
            for name, reason in zip(LIMITS, ended, strict=True):
                assert f"a task lowered its limits: RLIMIT_{name} from " in reason

    asyncio.run(scenario())


def test_what_was_sent_behind_it_is_run_by_another_and_nothing_is_lost() -> None:
    async def scenario() -> None:
        async with running("prefork") as (pool, recorder):
            pool.submit([make_job(-1)])
            await recorder.until_back(-1)
            # As the task "return" they are batched together with the others.
            spoilers = range(0, 300, 40)
            jobs = [
                make_job(n, "lower", "NOFILE", task="return") if n in spoilers else make_job(n)
                for n in range(300)
            ]
            pool.submit(jobs)
            await recorder.until_back(*range(300))
            assert Counter(recorder.came_back) == Counter(range(-1, 300))
            assert not recorder.lost
            assert not recorder.deaths()

    asyncio.run(scenario())


def test_a_task_that_takes_our_signals_does_not_take_them_from_the_next(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running("prefork", concurrency=1) as (pool, recorder):
            gate, other = tmp_path / "gate", tmp_path / "other"
            pool.submit([make_job(0, soft_limit_s=60.0), make_job(1, "ignore-signals")])
            await recorder.until_back(0, 1)
            pool.submit([make_job(2, "catch-soft", str(gate), soft_limit_s=0.05)])
            await recorder.until_back(2)
            assert recorder.value(2) == "cleaned up"
            pool.submit([make_job(3, "ignore-signals"), make_job(4, "wait-for", str(other))])
            await until_waiting(other)
            await recorder.until(lambda: 4 in recorder.begun, what="the job to be known to run")
            assert pool.cancel_job(4)
            await recorder.until_back(4)
            assert "ancelled" in recorder.outcomes[4].summary
            assert len(set(recorder.pids.values())) == 1

    asyncio.run(scenario())


def test_a_limit_that_is_raised_or_stays_harms_nobody() -> None:
    def read(soft: int) -> list[tuple[int, int]]:
        return [(soft, -1) for _ in KINDS]

    limits = Limits(read(100))
    assert not limits.lowered(read(100))
    assert not limits.lowered(read(200))
    assert not limits.lowered(read(-1))
    assert limits.lowered(read(200)) == "RLIMIT_NOFILE from unlimited/unlimited to 200/unlimited"
