"""What every pool promises. A pool's test file inherits from PoolContract and says its name."""

import asyncio
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.pools.host import make_job
from tests.pools.recorder import Recorder, hands_of, running, settings, until_waiting
from umbel.errors import NotSupported, PoolError
from umbel.pools import make_pool


class PoolContract:
    name: str
    options: Mapping[str, Any] = {}

    def test_outcomes_carry_what_the_runner_returned(self) -> None:
        async def scenario() -> None:
            async with running(self.name, **self.options) as (pool, recorder):
                pool.submit([make_job(1, "return", {"answer": 42}), make_job(2, "divide", 0)])
                await recorder.until_back(1, 2)
                assert recorder.outcomes[1].kind == "success"
                assert recorder.value(1) == {"answer": 42}
                assert recorder.outcomes[2].kind == "failure"
                assert "division by zero" in recorder.outcomes[2].summary

        asyncio.run(scenario())

    def test_each_job_comes_back_once(self) -> None:
        async def scenario() -> None:
            async with running(self.name, **self.options) as (pool, recorder):
                numbers = range(500)
                pool.submit([make_job(number, argument=number) for number in numbers])
                await recorder.until_back(*numbers)
                assert Counter(recorder.came_back) == Counter(numbers)
                assert [recorder.value(number) for number in numbers] == list(numbers)

        asyncio.run(scenario())

    def test_a_listener_may_submit_and_withdraw_while_it_is_called(self) -> None:
        async def scenario() -> None:
            async with running(self.name, **self.options) as (pool, recorder):
                withdrawn: set[int] = set()
                waiting = [make_job(number) for number in range(1, 300)]

                def go_on() -> None:
                    batch, waiting[:] = waiting[:7], waiting[7:]
                    pool.submit(batch)
                    if len(waiting) % 2:
                        jobs = pool.withdraw()
                        withdrawn.update(job.number for job in jobs[1:])
                        pool.submit(jobs[:1])  # or nothing might be left that reports

                recorder.then = go_on
                pool.submit([make_job(0)])
                await recorder.until(
                    lambda: not waiting and len(withdrawn) + len(recorder.came_back) >= 300, what="all jobs"
                )
                assert sorted([*withdrawn, *recorder.came_back]) == list(range(300))

        asyncio.run(scenario())

    def test_withdrawn_jobs_do_not_run(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with running(self.name, concurrency=1, **self.options) as (pool, recorder):
                gate, trace = tmp_path / "gate", tmp_path / "trace"
                pool.submit([make_job(1, "wait-for", str(gate))])
                await until_waiting(gate)
                pool.submit([make_job(number, "append", str(trace)) for number in (2, 3, 4)])
                assert [job.number for job in pool.withdraw()] == [2, 3, 4]
                assert pool.withdraw() == ()
                gate.touch()
                await recorder.until_back(1)
                pool.submit([make_job(5)])
                await recorder.until_back(5)
                assert recorder.came_back == [1, 5]
                assert not trace.exists()

        asyncio.run(scenario())

    def test_room_is_for_idle_hands_and_gone_when_they_are_full(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with running(self.name, concurrency=1, **self.options) as (pool, recorder):
                assert pool.room() == 1
                gate = tmp_path / "gate"
                pool.submit([make_job(1, "wait-for", str(gate))])
                assert pool.room() == 0
                gate.touch()
                await recorder.until_back(1)
                assert pool.room() >= 1

        asyncio.run(scenario())

    def test_a_pool_is_free_for_what_it_can_start_at_once(self, tmp_path: Path) -> None:
        """Unlike its room, however short its tasks were."""

        async def scenario() -> None:
            async with running(self.name, concurrency=1, **self.options) as (pool, recorder):
                assert pool.free() == 1
                pool.submit([make_job(number) for number in range(1, 21)])
                await recorder.until_back(*range(1, 21))
                assert (pool.free(), pool.room() > 1) == (1, True)
                gate = tmp_path / "gate"
                pool.submit([make_job(21, "wait-for", str(gate))])
                await until_waiting(gate)
                assert pool.free() == 0
                pool.submit([make_job(22)])
                assert pool.free() == 0
                gate.touch()
                await recorder.until_back(21, 22)
                assert pool.free() == 1
                await pool.stop(grace_s=1.0)
                assert pool.free() == 0

        asyncio.run(scenario())

    def test_stopping_waits_for_the_running_job_and_gives_back_the_rest(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with running(self.name, concurrency=1, **self.options) as (pool, recorder):
                gate = tmp_path / "gate"
                pool.submit([make_job(1, "wait-for", str(gate))])
                await until_waiting(gate)
                pool.submit([make_job(2)])
                async with asyncio.TaskGroup() as group:
                    group.create_task(pool.stop(grace_s=20.0))
                    await recorder.until_back(2)
                    gate.touch()
                assert recorder.value(1) == "released"
                assert (recorder.lost[2].started, recorder.lost[2].ran) == (False, False)
                assert sorted(recorder.came_back) == [1, 2]

        asyncio.run(scenario())

    def test_a_job_that_runs_on_after_the_grace_is_lost_but_not_charged(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with running(self.name, concurrency=1, **self.options) as (pool, recorder):
                gate = tmp_path / "gate"
                pool.submit([make_job(1, "wait-for", str(gate))])
                await until_waiting(gate)
                await pool.stop(grace_s=0.0)
                gate.touch()  # a thread cannot be ended: let it go
                assert recorder.came_back == [1]
                assert (recorder.lost[1].started, recorder.lost[1].ran) == (False, True)

        asyncio.run(scenario())

    def test_a_pool_grows_and_shrinks_or_says_that_it_cannot(self, tmp_path: Path) -> None:
        """F4."""

        async def scenario() -> None:
            async with running(self.name, concurrency=1, **self.options) as (pool, recorder):
                gate = tmp_path / "gate"
                try:
                    assert pool.resize(2) == 3
                except NotSupported:
                    assert pool.abilities.resize
                    assert pool.describe()["max-concurrency"] == 1
                    return
                assert not pool.abilities.resize
                await recorder.until(lambda: hands_of(pool) == 3, what="three children")
                pool.submit([make_job(number, "wait-for", str(gate)) for number in (1, 2, 3)])
                await recorder.until(lambda: len(pool.describe()["running"]) == 3, what="all to be busy")
                assert pool.resize(-2) == 1 == pool.describe()["max-concurrency"]
                with pytest.raises(PoolError, match="at least 1 must remain"):
                    pool.resize(-1)
                gate.touch()
                await recorder.until_back(1, 2, 3)
                assert [recorder.value(number) for number in (1, 2, 3)] == ["released"] * 3
                await recorder.until(lambda: hands_of(pool) == 1, what="one child")

        asyncio.run(scenario())

    def test_a_soft_limit_is_an_exception_in_the_task(self, tmp_path: Path) -> None:
        """F6."""

        async def scenario() -> None:
            async with running(self.name, **self.options) as (pool, recorder):
                gate = str(tmp_path / "gate")
                limited = [
                    make_job(1, "catch-soft", gate, soft_limit_s=0.05, alone=True),
                    make_job(2, "wait-for", gate, soft_limit_s=0.05, alone=True),
                ]
                pool.submit([*limited, make_job(3)])
                await recorder.until_back(1, 2, 3)
                assert recorder.value(1) == "cleaned up"
                assert "SoftTimeLimitExceeded" in recorder.outcomes[2].summary
                pool.submit([make_job(number, soft_limit_s=0.001) for number in range(4, 104)])
                await recorder.until_back(*range(4, 104))
                pool.submit([make_job(number) for number in range(104, 154)])
                await recorder.until_back(*range(104, 154))
                assert all(recorder.outcomes[number].kind == "success" for number in range(104, 154))

        asyncio.run(scenario())

    def test_a_host_has_its_own_soft_limit_and_is_ready_before_its_children(self, tmp_path: Path) -> None:
        async def scenario() -> Any:
            quirk = f"own-ways-in={tmp_path}"
            async with running(self.name, quirk, concurrency=1, **self.options) as (pool, recorder):
                gate = str(tmp_path / "gate")
                job = make_job(1, "wait-for", gate, task="plain", soft_limit_s=0.05, alone=True)
                pool.submit([job, make_job(2, "facts", task="plain")])
                await recorder.until_back(1, 2)
                assert recorder.outcomes[1].summary == "OwnLimit()"
                return recorder.value(2)

        facts = asyncio.run(scenario())
        notes = {int(one.name): one.read_text() for one in tmp_path.iterdir() if one.name.isdigit()}
        how = "runs" if facts["loaded_in"] == facts["pid"] else "forks"
        assert notes[facts["loaded_in"]] == f"tester@here {how}\n"  # once, and in no forked child
        assert len(notes) == (2 if self.options.get("child_start") == "spawn" else 1)

    def test_a_stopping_worker_is_heard_by_the_jobs_that_run(self, tmp_path: Path) -> None:
        """F7."""

        async def scenario() -> None:
            async with running(self.name, **self.options) as (pool, recorder):
                gate = tmp_path / "gate"
                pool.submit([make_job(1, "catch-soft", str(gate))])
                await until_waiting(gate)
                await recorder.until(lambda: 1 in recorder.begun, what="the job to be known to run")
                assert pool.interrupt() == 1
                await recorder.until_back(1)
                assert recorder.value(1) == "cleaned up"
                assert pool.interrupt() == 0

        asyncio.run(scenario())

    def test_a_cancelled_job_hears_it_and_no_other_does(self, tmp_path: Path) -> None:
        """P3."""

        async def scenario() -> None:
            async with running(self.name, **self.options) as (pool, recorder):
                gate = tmp_path / "gate"
                pool.submit([make_job(1, "wait-for", str(gate))])
                await until_waiting(gate)
                await recorder.until(lambda: 1 in recorder.begun, what="the job to be known to run")
                assert pool.cancel_job(1)
                assert not pool.cancel_job(77)
                pool.submit([make_job(2)])
                await recorder.until_back(1, 2)
                assert recorder.outcomes[1].kind == "failure"
                assert "ancelled" in recorder.outcomes[1].summary
                assert recorder.outcomes[2].kind == "success"

        asyncio.run(scenario())

    def test_a_hard_limit_ends_the_job_or_is_refused(self, tmp_path: Path) -> None:
        """F6."""

        async def scenario() -> None:
            async with running(self.name, **self.options) as (pool, recorder):
                gate = str(tmp_path / "gate")
                limited = make_job(1, "wait-for", gate, hard_limit_s=0.1, alone=True)
                if pool.abilities.hard_limits and pool.abilities.async_hard_limits:
                    pool.submit([limited, make_job(2)])
                    await recorder.until_back(1, 2)
                    assert "cannot enforce the hard limit" in recorder.lost[1].fault
                    assert recorder.outcomes[2].kind == "success"
                    return
                pool.submit([limited, make_job(2)])
                await recorder.until_back(1, 2)
                assert recorder.lost[1].timed_out
                assert recorder.lost[1].ran
                assert recorder.outcomes[2].kind == "success"

        asyncio.run(scenario())

    def test_a_running_job_is_ended_on_request_or_that_is_refused(self, tmp_path: Path) -> None:
        """F10."""

        async def scenario() -> None:
            async with running(self.name, **self.options) as (pool, recorder):
                gate = tmp_path / "gate"
                pool.submit([make_job(1, "wait-for", str(gate))])
                await until_waiting(gate)
                await recorder.until(lambda: 1 in recorder.begun, what="the job to be known to run")
                assert not pool.terminate_job(77, signal.SIGTERM)
                if not pool.terminate_job(1, signal.SIGTERM):
                    assert pool.abilities.terminate
                    gate.touch()
                    await recorder.until_back(1)
                    return
                assert not (pool.abilities.terminate and pool.abilities.async_terminate)
                await recorder.until_back(1)
                assert recorder.lost[1].ran
                pool.submit([make_job(2)])
                await recorder.until_back(2)
                assert recorder.outcomes[2].kind == "success"

        asyncio.run(scenario())

    def test_a_job_that_is_running_is_told_of_and_described(self, tmp_path: Path) -> None:
        """F10."""

        async def scenario() -> None:
            async with running(self.name, **self.options) as (pool, recorder):
                gate = tmp_path / "gate"
                pool.submit([make_job(1, "wait-for", str(gate))])
                await until_waiting(gate)
                await recorder.until(lambda: 1 in recorder.begun, what="the job to be known to run")
                about = pool.describe()
                assert about["implementation"] == self.name
                assert about["running"] == {"id-1": recorder.begun[1]}
                gate.touch()
                await recorder.until_back(1)
                assert pool.describe()["running"] == {}

        asyncio.run(scenario())

    def test_a_job_that_raises_system_exit_is_charged_and_the_pool_goes_on(self) -> None:
        """F8."""

        async def scenario() -> None:
            async with running(self.name, **self.options) as (pool, recorder):
                pool.submit([make_job(1, "sys-exit", 3, alone=True)])
                await recorder.until_back(1)
                pool.submit([make_job(2)])
                await recorder.until_back(2)
                assert recorder.lost[1].started
                assert recorder.outcomes[2].kind == "success"

        asyncio.run(scenario())

    def test_a_job_that_raises_what_no_task_should_gets_a_verdict_and_the_pool_goes_on(self) -> None:
        """N1: neither its thread, its loop nor its child may be missing afterwards."""

        async def scenario() -> None:
            async with running(self.name, **self.options) as (pool, recorder):
                verbs = ["keyboard-interrupt", "no-ordinary-error"] * 2
                pool.submit([make_job(number, verb) for number, verb in enumerate(verbs)])
                pool.submit([make_job(number, verb, task="plain") for number, verb in enumerate(verbs, 4)])
                await recorder.until_back(*range(8))
                assert all(lost.started or lost.fault for lost in recorder.lost.values())
                assert sorted(recorder.lost) == list(range(8))
                pool.submit([make_job(number) for number in range(8, 20)])
                await recorder.until_back(*range(8, 20))
                assert Counter(recorder.came_back) == Counter(range(20))

        asyncio.run(scenario())

    def test_a_job_that_cannot_be_handed_over_comes_back_with_the_reason(self) -> None:
        """N1: nothing that a message says may end a pool's step half-way."""

        async def scenario() -> None:
            async with running(self.name, **self.options) as (pool, recorder):
                limits: list[float] = [10**30, 10**400, float("nan"), float("inf")]
                unfit = [make_job(number, soft_limit_s=limit) for number, limit in enumerate(limits)]
                pool.submit([make_job(4), *unfit, make_job(5)])
                await recorder.until_back(*range(6))
                assert sorted(recorder.lost) == [0, 1, 2, 3]
                for lost in recorder.lost.values():
                    assert (lost.started, lost.ran) == (False, False)
                    assert lost.fault.startswith("cannot run in this pool: ")
                assert sorted(recorder.outcomes) == [4, 5]

        asyncio.run(scenario())

    def test_a_listener_that_raises_ends_nothing(self) -> None:
        async def scenario() -> None:
            async with running(self.name, **self.options) as (pool, recorder):

                def fail() -> None:
                    raise RuntimeError("the listener's own fault")

                recorder.then = fail
                pool.submit([make_job(number) for number in range(20)])
                await recorder.until_back(*range(20))
                assert Counter(recorder.came_back) == Counter(range(20))
                assert pool.describe()["faults"] > 0

        asyncio.run(scenario())

    def test_the_loop_goes_on_while_jobs_run(self) -> None:
        """P6."""

        async def scenario() -> None:
            async with running(self.name, **self.options) as (pool, recorder):
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

    def test_children_say_goodbye_when_the_pool_stops(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with running(self.name, f"say-goodbye-in={tmp_path}", concurrency=1, **self.options) as (
                pool,
                _,
            ):
                await pool.stop(grace_s=5.0)
            assert (tmp_path / "goodbye-0").exists()

        asyncio.run(scenario())

    def test_what_is_submitted_after_stopping_comes_straight_back(self) -> None:
        async def scenario() -> None:
            async with running(self.name, **self.options) as (pool, recorder):
                await pool.stop(grace_s=1.0)
                pool.submit([make_job(1)])
                assert recorder.came_back == [1]
                assert not recorder.lost[1].ran
                assert pool.room() == 0

        asyncio.run(scenario())

    def test_an_app_that_cannot_be_imported_is_one_clear_error(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        async def scenario() -> None:
            pool = make_pool(self.name, settings("import-error", **self.options))
            with pytest.raises(PoolError) as caught:
                await pool.start(Recorder())
            message = str(caught.value)
            assert "the app 'import-error' cannot be loaded" in message
            assert "ImportError: no module named 'flux_capacitor'" in message
            assert "host.py, line" in message
            assert "\n" not in message
            await pool.stop(grace_s=0.0)

        asyncio.run(scenario())
        assert capfd.readouterr().err.count("Traceback") == 1

    def test_a_pool_that_was_never_started_can_be_stopped(self) -> None:
        asyncio.run(make_pool(self.name, settings(**self.options)).stop(grace_s=1.0))
