"""The contract on the gevent pool, and what only it promises (F10)."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.pools.contract import PoolContract
from tests.pools.host import make_job
from tests.pools.recorder import Recorder, running, settings, until_waiting
from umbel.errors import PoolError
from umbel.pools import make_pool


class TestGevent(PoolContract):
    name = "gevent"


def test_a_hundred_jobs_wait_at_once_in_one_process(tmp_path: Path) -> None:
    """One that came after them ends before them: they gave it its turn."""

    async def scenario() -> None:
        async with running("gevent", concurrency=101) as (pool, recorder):
            gate = tmp_path / "gate"
            pool.submit([make_job(number, "wait-for", str(gate)) for number in range(100)])
            await until_waiting(gate)
            pool.submit([make_job(100, "facts")])
            await recorder.until_back(100)
            assert recorder.came_back == [100]
            gate.touch()
            await recorder.until_back(*range(100))
            assert set(recorder.pids.values()) == {recorder.value(100)["pid"]}
            assert recorder.value(100)["pid"] != os.getpid()

    asyncio.run(scenario())


def test_jobs_are_shared_among_children(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running("gevent", concurrency=4, green_children=2) as (pool, recorder):
            gate = tmp_path / "gate"
            pool.submit([make_job(number, "wait-for", str(gate)) for number in range(4)])
            gate.touch()
            await recorder.until_back(*range(4))
            assert len(set(recorder.pids.values())) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["prefork", "gevent"])
def test_a_fork_server_that_dies_before_there_are_children_is_replaced_twice(
    name: str, tmp_path: Path
) -> None:
    deaths = tmp_path / "deaths"
    deaths.write_text("2")

    async def scenario() -> None:
        async with running(name, f"dies-loading={deaths}") as (pool, recorder):
            pool.submit([make_job(1)])
            await recorder.until_back(1)
            assert [what for what, _ in recorder.children].count("server-died") == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["prefork", "gevent"])
def test_a_pool_whose_third_fork_server_dies_before_there_are_children_has_failed(
    name: str, tmp_path: Path
) -> None:
    deaths = tmp_path / "deaths"
    deaths.write_text("9")

    async def scenario() -> None:
        pool = make_pool(name, settings(f"dies-loading={deaths}"))
        with pytest.raises(PoolError, match=r"3 attempts failed; last error: the fork server .* SIGKILL"):
            await pool.start(Recorder())

    asyncio.run(scenario())
    assert deaths.read_text() == "6"


def test_when_a_child_dies_nobody_is_charged_who_was_not_alone(tmp_path: Path) -> None:
    """F3, F8: a redelivered job runs in a child of its own, and is charged when that dies."""

    async def scenario() -> None:
        async with running("gevent", concurrency=4) as (pool, recorder):
            gate = tmp_path / "gate"
            pool.submit([make_job(1, "wait-for", str(gate))])
            await until_waiting(gate)
            pool.submit([make_job(2, "kill", signal.SIGKILL)])
            await recorder.until_back(1, 2)
            assert [(recorder.lost[number].started, recorder.lost[number].ran) for number in (1, 2)] == [
                (False, True)
            ] * 2
            pool.submit([make_job(3, "wait-for", str(gate))])
            pool.submit([make_job(4, "kill", signal.SIGKILL, redelivered=True)])
            pool.submit([make_job(5, "return", "still here", redelivered=True)])
            await recorder.until_back(4, 5)
            assert recorder.lost[4].started
            assert recorder.value(5) == "still here"
            assert 3 not in recorder.came_back
            gate.touch()
            await recorder.until_back(3)
            assert recorder.value(3) == "released"
            await recorder.until(lambda: len(pool.describe()["processes"]) == 1, what="singles to leave")

    asyncio.run(scenario())


def test_a_job_that_holds_up_its_child_beyond_its_limit_takes_the_child_with_it(tmp_path: Path) -> None:
    """It fails; what was stuck behind it comes back, not charged, to run again."""

    async def scenario() -> None:
        async with running("gevent", concurrency=4) as (pool, recorder):
            gate = tmp_path / "gate"
            pool.submit([make_job(1, "wait-for", str(gate))])
            await until_waiting(gate)
            pool.submit([make_job(2, "never-yield", None, hard_limit_s=0.05)])
            await recorder.until_back(1, 2)
            assert recorder.lost[2].timed_out
            assert (recorder.lost[1].started, recorder.lost[1].ran) == (False, True)
            pool.submit([make_job(3)])
            await recorder.until_back(3)
            assert recorder.outcomes[3].kind == "success"

    asyncio.run(scenario())


def test_a_hard_limit_ends_one_greenlet_and_no_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running("gevent", concurrency=4) as (pool, recorder):
            gate, other = tmp_path / "gate", tmp_path / "other"
            pool.submit([make_job(1, "wait-for", str(gate))])
            await until_waiting(gate)
            pool.submit([make_job(2, "wait-for", str(other), hard_limit_s=0.05)])
            await recorder.until_back(2)
            assert recorder.lost[2].timed_out
            assert not recorder.deaths()
            gate.touch()
            await recorder.until_back(1)
            assert recorder.value(1) == "released"

    asyncio.run(scenario())


def test_children_that_start_afresh_are_patched_too(tmp_path: Path) -> None:
    """F10: they import the app for themselves, after the patch."""

    async def scenario() -> None:
        async with running("gevent", concurrency=4, child_start="spawn") as (pool, recorder):
            gate = tmp_path / "gate"
            pool.submit([make_job(1, "wait-for", str(gate))])
            await until_waiting(gate)
            pool.submit([make_job(2, "facts")])
            await recorder.until_back(2)
            assert recorder.value(2)["loaded_in"] == recorder.value(2)["pid"]
            gate.touch()
            await recorder.until_back(1)

    asyncio.run(scenario())
