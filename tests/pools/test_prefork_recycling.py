"""F4, F5: children are replaced after so many tasks or so much memory, or all of them; nothing is lost."""

import asyncio
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from tests.pools.host import make_job
from tests.pools.recorder import running, until_waiting
from umbel.pools.prefork.kernel import OomKills, exit_of, resident_bytes
from umbel.pools.prefork.parent import PreforkPool

MIB = 1024 * 1024
JOBS = 1500


@pytest.mark.scenario
def test_children_replaced_after_so_many_tasks_lose_nothing_under_load() -> None:
    async def scenario() -> None:
        async with running("prefork", concurrency=3, max_tasks_per_child=40) as (pool, recorder):
            numbers = iter(range(JOBS))

            def refill() -> None:
                pool.submit([make_job(number) for number in islice(numbers, pool.room())])

            recorder.then = refill
            refill()
            await recorder.until(lambda: len(recorder.came_back) >= JOBS, what="all jobs")
            assert Counter(recorder.came_back) == Counter(range(JOBS))
            assert not recorder.lost
            assert not recorder.deaths()
            by_child = Counter(recorder.pids.values())
            assert max(by_child.values()) == 40
            ended = [fields for what, fields in recorder.children if what == "ended"]
            assert len(ended) >= JOBS // 40 - 3
            assert {fields["how"] for fields in ended} == {"asked"}
            assert "max_tasks_per_child reached after 40 tasks" in ended[0]["reason"]

    asyncio.run(scenario())


def test_each_task_can_have_a_child_of_its_own() -> None:
    async def scenario() -> None:
        async with running("prefork", max_tasks_per_child=1) as (pool, recorder):
            pool.submit([make_job(number) for number in range(20)])
            await recorder.until_back(*range(20))
            assert len(set(recorder.pids.values())) == 20
            assert not recorder.lost

    asyncio.run(scenario())


def test_a_child_that_holds_too_much_is_replaced_when_its_task_has_ended(tmp_path: Path) -> None:
    """The memory is seen while the task runs, and said; the task goes on and is not lost."""

    async def scenario() -> None:
        async with running("prefork", concurrency=1) as (pool, _):
            fresh = resident_bytes(pool.describe()["processes"][0])
        most = fresh + 40 * MIB
        async with running("prefork", concurrency=1, max_memory_bytes=most) as (pool, recorder):
            gate = tmp_path / "gate"
            pool.submit([make_job(1, "hold", [80, str(gate)])])
            await until_waiting(gate)
            heavy = await recorder.until(
                lambda: [fields for what, fields in recorder.children if what == "heavy"],
                what="the child to be found heavy",
            )
            assert heavy[0]["job"] == 1
            assert heavy[0]["size_bytes"] > most
            pool.submit([make_job(2)])
            gate.touch()
            await recorder.until_back(1, 2)
            assert recorder.value(1) == "released"
            assert recorder.pids[1] != recorder.pids[2]
            assert not recorder.lost
            (ended,) = [fields for what, fields in recorder.children if what == "ended"]
            assert "exceeds max_memory_per_child" in ended["reason"]

    asyncio.run(scenario())


def test_a_child_far_over_the_limit_is_killed_with_a_verdict(tmp_path: Path) -> None:
    """F8: a task that takes all the memory there is touches no other."""

    async def scenario() -> None:
        async with running("prefork", max_memory_hard_bytes=150 * MIB) as (pool, recorder):
            pool.submit([make_job(1, "leak", 20), make_job(2)])
            await recorder.until_back(1, 2)
            lost = recorder.lost[1]
            assert (lost.started, lost.ran, lost.timed_out) == (True, True, False)
            assert "exceeds max_memory_hard of 150 MiB" in lost.reason
            assert list(recorder.lost) == [1]
            (death,) = recorder.deaths()
            assert death["how"] == "killed"
            assert "max_memory_hard" in death["reason"]

    asyncio.run(scenario())


def test_a_pool_is_started_anew_one_idle_child_after_the_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running("prefork", concurrency=3) as (pool, recorder):
            assert isinstance(pool, PreforkPool)
            old = set(pool.describe()["processes"])
            gate = tmp_path / "gate"
            pool.submit([make_job(1, "wait-for", str(gate))])
            await until_waiting(gate)
            pool.restart()
            await recorder.until(lambda: len(old & set(pool.describe()["processes"])) == 1, what="two others")
            pool.submit([make_job(number) for number in range(2, 100)])
            await recorder.until_back(*range(2, 100))
            gate.touch()
            await recorder.until_back(1)
            await recorder.until(
                lambda: len(set(pool.describe()["processes"]) - old) == 3, what="all of them to be new"
            )
            assert recorder.value(1) == "released"
            assert Counter(recorder.came_back) == Counter(range(1, 100))
            assert not recorder.lost
            assert not recorder.deaths()

    asyncio.run(scenario())


def test_restarting_with_the_app_loaded_anew_takes_a_new_fork_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running("prefork", f"version-in={tmp_path / 'version'}") as (pool, recorder):
            assert isinstance(pool, PreforkPool)
            server = pool.describe()["fork-server"]
            gate = tmp_path / "gate"
            pool.submit([make_job(1, "wait-for", str(gate))])
            await until_waiting(gate)
            (tmp_path / "version").write_text("broken")
            pool.restart(reload=True)
            (reason,) = await recorder.until(
                lambda: [fields["reason"] for what, fields in recorder.children if what == "not-reloaded"],
                what="to hear that it cannot be loaded",
            )
            assert "cannot be loaded: ValueError: broken" in reason
            assert pool.describe()["fork-server"] == server
            (tmp_path / "version").write_text("2")
            pool.restart(reload=True)
            await recorder.until(lambda: pool.describe()["fork-server"] != server, what="another server")
            gate.touch()
            await recorder.until_back(1)
            await recorder.until(
                lambda: [what for what, _ in recorder.children].count("ended") == 2,
                what="both to be replaced",
            )
            pool.submit([make_job(2, "version")])
            await recorder.until_back(2)
            assert recorder.value(1) == "released"
            assert recorder.value(2) == "2"
            assert not recorder.lost

    asyncio.run(scenario())


def test_how_a_process_ended_is_told_apart() -> None:
    def told(status: int, **known: str | bool) -> tuple[str, str]:
        about = {"dismissed": "", "killed": "", "out_of_memory": False} | known
        ended = exit_of(4711, status, **about)  # type: ignore[arg-type]
        return ended.kind, ended.reason

    assert told(0, dismissed="worn") == ("asked", "process 4711 exited (worn)")
    assert told(1 << 8, dismissed="worn") == ("exit", "process 4711 exited with status 1")
    assert told(9, killed="it was late") == ("killed", "process 4711 was killed by this worker: it was late")
    assert told(9) == ("signal", "process 4711 was killed by SIGKILL, not by this worker")
    assert told(9, out_of_memory=True)[0] == "out-of-memory"
    assert told(11, out_of_memory=True)[0] == "signal"


def test_the_kernels_count_of_kills_for_want_of_memory_is_read(tmp_path: Path) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom 1\noom_kill 3\noom_group_kill 0\n")
    kills = OomKills((tmp_path / "not there", counter))
    assert not kills.happened()
    counter.write_text("low 0\noom 2\noom_kill 4\noom_group_kill 0\n")
    assert kills.happened()
    assert not kills.happened()
    assert not OomKills(()).happened()
