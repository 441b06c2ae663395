import asyncio

import pytest

from tests.pools.contract import PoolContract
from tests.pools.host import make_job
from tests.pools.recorder import running
from umbel.errors import PoolError


class TestSolo(PoolContract):
    name = "solo"

    def test_the_loop_goes_on_while_a_job_runs(self) -> None:
        async def scenario() -> None:
            async with running(self.name) as (pool, recorder):
                turns = 0

                def turn() -> None:
                    nonlocal turns
                    turns += 1
                    if not recorder.came_back:
                        asyncio.get_running_loop().call_soon(turn)

                pool.submit([make_job(1, "sleep", 0.05)])
                turn()
                await recorder.until_back(1)
                assert turns > 10

        asyncio.run(scenario())

    def test_time_limits_are_refused(self) -> None:
        async def scenario() -> None:
            async with running(self.name) as (pool, _):
                assert not pool.supports_time_limits
                with pytest.raises(PoolError, match="cannot end a job at its time limit"):
                    pool.submit([make_job(1, hard_limit_s=1.0)])

        asyncio.run(scenario())

    def test_a_task_that_exits_is_lost_and_charged_and_the_pool_goes_on(self) -> None:
        async def scenario() -> None:
            async with running(self.name) as (pool, recorder):
                pool.submit([make_job(1, "sys-exit", 3), make_job(2)])
                await recorder.until_back(1, 2)
                assert recorder.lost[1].started
                assert 2 in recorder.outcomes

        asyncio.run(scenario())
