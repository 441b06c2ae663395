"""F3, F8: a child that dies is replaced; its death is charged to the job that ran, and to no other."""

import asyncio
import logging
import os
import signal
import socket
from collections import Counter
from pathlib import Path

import pytest

from tests.pools.host import make_job
from tests.pools.processes import is_gone
from tests.pools.recorder import Recorder, running, settings, until_waiting
from tests.waiting import wait_until
from umbel.errors import PoolError
from umbel.pools import make_pool
from umbel.pools.prefork.kernel import exit_reason
from umbel.pools.prefork.links import ServerLink
from umbel.pools.prefork.messages import Signal, setup_of
from umbel.pools.prefork.server_process import spawn_server


@pytest.mark.parametrize(
    ("verb", "argument", "reason"),
    [
        ("segfault", None, "was killed by SIGSEGV"),
        ("exit", 3, "exited with status 3"),
        ("exit", 0, "exited with status 0"),
        ("sys-exit", 4, "exited with status 4"),
        ("kill", signal.SIGKILL, "was killed by SIGKILL, not by this worker"),
        ("kill", signal.SIGTERM, "was killed by SIGTERM"),
    ],
)
def test_a_crash_is_charged_to_the_job_that_ran_and_touches_no_other(
    verb: str, argument: int | None, reason: str
) -> None:
    async def scenario() -> None:
        async with running("prefork") as (pool, recorder):
            before, after = range(100), range(101, 200)
            # As the task "return" it is batched together with the others.
            pool.submit([make_job(number) for number in before])
            pool.submit([make_job(100, verb, argument, task="return")])
            pool.submit([make_job(number) for number in after])
            await recorder.until_back(*range(200))
            assert Counter(recorder.came_back) == Counter(range(200))
            assert list(recorder.lost) == [100]
            lost = recorder.lost[100]
            assert (lost.started, lost.ran, lost.timed_out) == (True, True, False)
            assert reason in lost.reason
            assert f"process {recorder.deaths()[0]['pid']} " in lost.reason

    asyncio.run(scenario())


def test_a_dead_child_is_replaced() -> None:
    async def scenario() -> None:
        async with running("prefork") as (pool, recorder):
            old = set(pool.describe()["processes"])
            victim = min(old)
            os.kill(victim, signal.SIGKILL)
            await recorder.until(lambda: len(recorder.children) >= 4, what="a death and a new child")
            new = set(pool.describe()["processes"])
            assert len(new) == 2
            assert new & old == old - {victim}
            pool.submit([make_job(number) for number in range(10)])
            await recorder.until_back(*range(10))
            assert not recorder.lost

    asyncio.run(scenario())


def test_a_listener_may_submit_when_it_hears_of_a_death() -> None:
    async def scenario() -> None:
        async with running("prefork", concurrency=1) as (pool, recorder):

            def submit_once() -> None:
                if recorder.deaths():
                    recorder.then = None
                    pool.submit([make_job(3)])

            pool.submit([make_job(1)])
            await recorder.until_back(1)
            recorder.then = submit_once
            pool.submit([make_job(2, "exit", 1)])
            await recorder.until_back(2, 3)
            assert 3 in recorder.outcomes

    asyncio.run(scenario())


def test_children_killed_all_the_time_lose_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running("prefork") as (pool, recorder):
            crashing = range(0, 600, 60)
            jobs = [
                make_job(n, "crash-once", str(tmp_path / str(n)), task="return")
                if n in crashing
                else make_job(n)
                for n in range(600)
            ]
            pool.submit(jobs)
            await recorder.until_back(*range(600))
            assert Counter(recorder.came_back) == Counter(range(600))
            assert {number for number, lost in recorder.lost.items() if lost.started} == set(crashing)
            # Outcomes are written at once, so what ended before a crash is not lost with it.
            assert set(recorder.lost) == set(crashing)

    asyncio.run(scenario())


def test_dead_children_leave_no_file_descriptors_behind() -> None:
    async def scenario() -> None:
        before = set(os.listdir("/proc/self/fd"))
        async with running("prefork") as (pool, recorder):
            while_open = len(os.listdir("/proc/self/fd"))
            pool.submit([make_job(number, "exit", 1) for number in range(20)])
            await recorder.until_back(*range(20))
            await recorder.until(lambda: len(recorder.children) == 2 + 40, what="everyone's replacement")
            # The last child's socket may be open for a moment after its successor has started.
            await recorder.until(
                lambda: len(os.listdir("/proc/self/fd")) == while_open, what="no descriptor to be left"
            )
            server = pool.describe()["fork-server"]
            links = [os.readlink(f"/proc/{server}/fd/{fd}") for fd in os.listdir(f"/proc/{server}/fd")]
            assert len([link for link in links if link.startswith("pipe:")]) <= 3  # its standard streams
        assert len(set(os.listdir("/proc/self/fd")) - before) <= 1

    asyncio.run(scenario())


def test_the_death_of_the_fork_server_restarts_the_pool_with_verdicts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running("prefork") as (pool, recorder):
            pool.submit([make_job(1, "subprocess")])
            await recorder.until_back(1)
            about = pool.describe()
            gate = tmp_path / "gate"
            pool.submit([make_job(2, "wait-for", str(gate))])
            await until_waiting(gate)
            pool.submit([make_job(number) for number in range(3, 50)])
            os.kill(about["fork-server"], signal.SIGKILL)
            await recorder.until_back(*range(2, 50))
            assert recorder.lost[2].started
            assert "the fork server ended" in recorder.lost[2].reason
            assert "SIGKILL" in recorder.lost[2].reason
            assert Counter(recorder.came_back) == Counter(range(1, 50))
            for pid in [*about["processes"], about["fork-server"], recorder.value(1)]:
                await asyncio.to_thread(wait_until, lambda pid=pid: is_gone(pid), what=f"{pid} to be gone")
            await recorder.until(lambda: set(pool.describe()["processes"]), what="new children")
            assert not set(about["processes"]) & set(pool.describe()["processes"])

    asyncio.run(scenario())


def test_a_task_that_kills_the_fork_server_does_not_end_the_pool() -> None:
    async def scenario() -> None:
        async with running("prefork") as (pool, recorder):
            pool.submit([make_job(1, "kill-server")])
            await recorder.until(
                lambda: [what for what, _ in recorder.children].count("started") == 4, what="two new children"
            )
            assert recorder.came_back == [1]  # killed with the server, or quick enough to answer
            pool.submit([make_job(2)])
            await recorder.until_back(2)

    asyncio.run(scenario())


def test_a_task_that_closes_our_connection_is_ended_and_charged() -> None:
    async def scenario() -> None:
        async with running("prefork") as (pool, recorder):
            pool.submit([make_job(1, "close-fds"), make_job(2)])
            await recorder.until_back(1, 2)
            assert recorder.lost[1].started
            assert 2 in recorder.outcomes

    asyncio.run(scenario())


def test_a_task_that_forks_does_not_double_its_child() -> None:
    async def scenario() -> None:
        async with running("prefork", concurrency=1) as (pool, recorder):
            pool.submit([make_job(1, "fork-and-return"), *(make_job(number) for number in range(2, 30))])
            await recorder.until_back(*range(1, 30))
            assert Counter(recorder.came_back) == Counter(range(1, 30))
            assert not recorder.lost

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("quirk", "reason"),
    [
        ("start-error", "RuntimeError: the database is not there"),
        ("start-crash", "exited with status 9"),
    ],
)
def test_children_that_cannot_start_fail_the_pool_with_the_reason(quirk: str, reason: str) -> None:
    async def scenario() -> None:
        pool = make_pool("prefork", settings(quirk, concurrency=1))
        with pytest.raises(PoolError) as caught:
            await pool.start(Recorder())
        assert reason in str(caught.value)
        assert "\n" not in str(caught.value)

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["prefork", "gevent"])
def test_a_lack_of_descriptors_delays_children_and_is_survived(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = [OSError(24, "Too many open files"), OSError(24, "Too many open files")]

    def refuse_twice(*args: object, **kwargs: object) -> tuple[socket.socket, socket.socket]:
        if refusals:
            raise refusals.pop()
        return make_pair()

    make_pair = socket.socketpair

    async def scenario() -> None:
        pool, recorder = make_pool(name, settings(concurrency=1)), Recorder()
        monkeypatch.setattr(socket, "socketpair", refuse_twice)
        await pool.start(recorder)
        assert not refusals
        (said,) = [one for one in caplog.records if one.levelno >= logging.ERROR]
        assert said.getMessage() == "cannot start a child process; retrying"
        assert "the limit of this process is" in said.why and "ulimit -n" in said.why  # type: ignore[attr-defined]
        pool.submit([make_job(1)])
        await recorder.until_back(1)
        await pool.stop(grace_s=1.0)

    asyncio.run(scenario(), debug=False)


def test_an_app_that_never_finishes_loading_fails_the_start() -> None:
    async def scenario() -> None:
        pool = make_pool("prefork", settings("load-forever", start_timeout_s=0.5))
        with pytest.raises(PoolError, match=r"not ready after 0\.5 s"):
            await pool.start(Recorder())

    asyncio.run(scenario())


def test_exit_reasons_are_said_in_words() -> None:
    assert exit_reason(4711, 11) == "process 4711 was killed by SIGSEGV"
    assert exit_reason(4711, 9) == "process 4711 was killed by SIGKILL, not by this worker"
    assert exit_reason(4711, 3 << 8) == "process 4711 exited with status 3"
    assert exit_reason(4711, 40) == "process 4711 was killed by signal 40"


def test_what_is_sent_to_a_fork_server_that_closed_its_socket_harms_nobody() -> None:
    """Until it is known how it ended the pool goes on with its work, signals to its children among it."""

    async def scenario() -> list[str]:
        passed_on: list[str] = []
        server = ServerLink(
            spawn_server(setup_of(settings())), on_messages=lambda *_: None, on_lost=lambda _: None
        )
        try:
            server.close()
            server.send(Signal(1, signal.SIGUSR1), sent=lambda: passed_on.append("first"))
            server.send(Signal(1, signal.SIGUSR1), sent=lambda: passed_on.append("second"))
        finally:
            await server.ended()
        return passed_on

    assert asyncio.run(scenario()) == ["first", "second"]
