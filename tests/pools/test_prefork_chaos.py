"""Children and fork servers killed at random while jobs of all kinds run: nothing is lost or doubled."""

import asyncio
import os
import random
import signal
from collections import Counter
from contextlib import suppress
from itertools import islice

import pytest

from tests.pools.host import make_job
from tests.pools.recorder import Recorder, running
from umbel.pools.interface import Job, Pool

JOBS, KILLS, SERVER_KILLS = (50_000, 300, 20) if os.environ.get("UMBEL_SOAK") else (4_000, 30, 2)


def job_of(number: int, chance: random.Random) -> Job:
    match chance.randrange(100):
        case 0:
            return make_job(number, "sleep", 0.03)
        case 1:
            return make_job(number, "sleep", 0.08, task="return")  # slow under the name of a quick task
        case 2:
            return make_job(number, "big", 300_000)
        case 3:
            return make_job(number, "sleep", 5.0, hard_limit_s=0.02)
        case 4:
            return make_job(number, "sleep", 0.01, soft_limit_s=0.01)
        case _:
            return make_job(number)


class Killer:
    """Kills somebody now and then, until it has killed enough."""

    def __init__(self, pool: Pool, chance: random.Random) -> None:
        self.kills = self.server_kills = 0
        self._pool = pool
        self._chance = chance
        self._loop = asyncio.get_running_loop()

    def strike(self) -> None:
        about = self._pool.describe()
        if self.server_kills < SERVER_KILLS and self._chance.randrange(KILLS // SERVER_KILLS) == 0:
            victim = about["fork-server"]
            self.server_kills += victim is not None
        else:
            victim = self._chance.choice(about["processes"] or [None])
            self.kills += bool(victim)
        if victim:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        if self.kills < KILLS:
            self._loop.call_later(self._chance.uniform(0.0, 0.04), self.strike)


@pytest.mark.scenario
def test_each_job_comes_back_once_while_processes_are_killed() -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)

    async def scenario() -> None:
        async with running("prefork", concurrency=3) as (pool, recorder):
            jobs = iter([job_of(number, chance) for number in range(JOBS)])

            def refill() -> None:
                pool.submit(list(islice(jobs, pool.room() + chance.randrange(3))))

            recorder.then = refill
            killer = Killer(pool, chance)
            killer.strike()
            refill()
            await recorder.until(
                lambda: len(recorder.came_back) >= JOBS, what=f"all jobs (seed {seed})", deadline_s=110.0
            )
            judge(recorder, killer)

    asyncio.run(scenario())


def judge(recorder: Recorder, killer: Killer) -> None:
    assert Counter(recorder.came_back) == Counter(range(JOBS))
    charged = [lost for lost in recorder.lost.values() if lost.started and not lost.timed_out]
    assert len(charged) <= killer.kills + 3 * killer.server_kills
    assert all(lost.ran for lost in charged)
    # Outcomes are sent one by one, so a death costs at most the one that was being written.
    uncharged = [lost for lost in recorder.lost.values() if not lost.started]
    assert not uncharged, uncharged[:3]
