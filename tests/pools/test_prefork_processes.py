"""F1 and decision 9: how children start, and that none is left behind."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.pools.host import make_job
from tests.pools.processes import is_gone, parent_of, signals, title
from tests.pools.recorder import Recorder, running, settings
from tests.waiting import wait_until
from umbel.pools import make_pool
from umbel.pools.prefork.child_guard_script import children_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("child_start", ["fork", "spawn"])
def test_a_child_starts_as_promised(child_start: str) -> None:
    async def scenario() -> None:
        async with running("prefork", child_start=child_start) as (pool, recorder):
            pool.submit([make_job(1, "facts", alone=True), make_job(2, "facts", alone=True)])
            await recorder.until_back(1, 2)
            about = pool.describe()
            server = about["fork-server"]
            assert title(server) == "umbel: tester@here fork server"
            for number in (1, 2):
                facts = recorder.value(number)
                pid = facts["pid"]
                assert title(pid) == f"umbel: tester@here child {facts['child']}"
                reset = {signal.SIGTERM, signal.SIGHUP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGUSR1}
                assert not reset & (signals(pid, "SigIgn") | signals(pid, "SigCgt"))
                assert signal.SIGINT in signals(pid, "SigIgn")
                assert facts["stdin"] == "/dev/null"
                assert facts["sockets"] == 1  # its own, not the server's and not its neighbours'
                assert facts["loaded_in"] == (server if child_start == "fork" else pid)
            assert recorder.value(1)["pid"] != recorder.value(2)["pid"]

    asyncio.run(scenario())


def test_ctrl_c_at_the_terminal_reaches_neither_server_nor_children() -> None:
    async def scenario() -> None:
        async with running("prefork") as (pool, recorder):
            about = pool.describe()
            everyone = [about["fork-server"], *about["processes"]]
            for pid in everyone:
                assert os.getsid(pid) == about["fork-server"] != os.getsid(0)
                os.kill(pid, signal.SIGINT)
            pool.submit([make_job(number) for number in range(20)])
            await recorder.until_back(*range(20))
            assert not recorder.lost
            assert [about["fork-server"], *pool.describe()["processes"]] == everyone

    asyncio.run(scenario())


def test_signal_handlers_of_the_app_do_not_reach_the_fork_server() -> None:
    async def scenario() -> None:
        async with running("prefork", "signals") as (pool, recorder):
            server = pool.describe()["fork-server"]
            assert signal.SIGTERM in signals(server, "SigIgn")
            pool.submit([make_job(1, "exit", 3), make_job(2)])
            await recorder.until_back(1, 2)
            assert "exited with status 3" in recorder.lost[1].reason

    asyncio.run(scenario())


def test_a_start_that_is_cancelled_leaves_no_process_behind() -> None:
    async def scenario() -> int:
        pool = make_pool("prefork", settings("load-forever"))
        start = asyncio.ensure_future(pool.start(Recorder()))
        await asyncio.wait([start], timeout=0.1)
        server: int = pool.describe()["fork-server"]
        start.cancel()
        await asyncio.wait([start])
        assert start.cancelled()
        return server

    assert is_gone(asyncio.run(scenario()))


def test_forked_children_draw_different_random_numbers() -> None:
    async def scenario() -> None:
        async with running("prefork", child_start="fork") as (pool, recorder):
            pool.submit([make_job(1, "random", alone=True), make_job(2, "random", alone=True)])
            await recorder.until_back(1, 2)
            assert recorder.pids[1] != recorder.pids[2]
            assert recorder.value(1) != recorder.value(2)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("quirk", "because"),
    [
        ("thread", "importing the app left 1 threads running (left-behind)"),
        ("socket", "importing the app left 2 sockets open"),
    ],
)
def test_an_app_that_leaves_something_behind_gets_children_that_start_afresh(
    quirk: str, because: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with running("prefork", quirk) as (pool, recorder):
            assert ("spawning", {"because": because}) in recorder.children
            pool.submit([make_job(1, "facts")])
            await recorder.until_back(1)
            assert recorder.value(1)["loaded_in"] == recorder.value(1)["pid"]

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert "each child process imports it itself" in caplog.text


def test_fork_can_be_forced() -> None:
    async def scenario() -> None:
        async with running("prefork", "socket", child_start="fork") as (pool, recorder):
            pool.submit([make_job(1, "facts")])
            await recorder.until_back(1)
            assert recorder.value(1)["loaded_in"] == pool.describe()["fork-server"]

    asyncio.run(scenario())


@contextmanager
def main_process(server: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Another main process with a pool, and what it says about its processes.

    `server`: how its fork server was started.
    """
    command = [sys.executable, "-m", "tests.pools.main_process", server]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.parametrize("server", ["spawned", "forked"])
def test_killing_the_main_process_leaves_no_process_behind(server: str) -> None:
    with main_process(server) as (process, about):
        everyone = [about["fork-server"], *about["processes"], *about["grandchildren"]]
        assert len(everyone) == 6
        assert not any(is_gone(pid) for pid in everyone)
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: all(is_gone(pid) for pid in everyone), what=f"all of {everyone} to be gone")


@pytest.mark.parametrize(
    ("first", "server"), [("main", "spawned"), ("server", "spawned"), ("main", "forked")]
)
def test_killing_main_process_and_fork_server_together_leaves_no_process_behind(
    first: str, server: str
) -> None:
    """Not even what made a session of its own: the guard inherits it."""
    with main_process(server) as (process, about):
        guard = parent_of(about["fork-server"])
        assert title(guard).endswith("child guard of tester@here")
        everyone = [guard, about["fork-server"], *about["processes"], *about["grandchildren"]]
        assert len(everyone) == 7
        assert not any(is_gone(pid) for pid in everyone)
        victims = [process.pid, about["fork-server"]]
        for pid in victims if first == "main" else reversed(victims):
            os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda: all(is_gone(pid) for pid in everyone),
            deadline_s=5.0,
            what=f"all of {everyone} to be gone",
        )


@pytest.mark.parametrize("server", ["spawned", "forked"])
def test_killing_the_fork_server_alone_ends_what_its_tasks_had_started(server: str) -> None:
    with main_process(server) as (_, about):
        os.kill(about["fork-server"], signal.SIGKILL)
        orphans = [*about["processes"], *about["grandchildren"]]
        wait_until(
            lambda: all(is_gone(pid) for pid in orphans), deadline_s=5.0, what=f"all of {orphans} to be gone"
        )


def test_killing_the_keeper_ends_the_fork_server_and_restarts_the_pool() -> None:
    async def scenario() -> None:
        async with running("prefork") as (pool, recorder):
            server = pool.describe()["fork-server"]
            os.kill(parent_of(server), signal.SIGKILL)
            await recorder.until(
                lambda: (
                    pool.describe()["fork-server"] not in (None, server)
                    and len(pool.describe()["processes"]) == 2
                ),
                what="another fork server and its children",
            )
            pool.submit([make_job(1)])
            await recorder.until_back(1)
            assert is_gone(server)

    asyncio.run(scenario())


def test_a_fork_server_that_loads_for_ever_goes_with_the_main_process() -> None:
    """While it imports the app it looks at nothing; the guard does."""
    command = [sys.executable, "-m", "tests.pools.main_process", "load-forever"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        guard = int(process.stdout.readline())
        wait_until(lambda: children_of(guard), what="the fork server")
        (server,) = children_of(guard)
        process.kill()
        wait_until(lambda: is_gone(guard) and is_gone(server), what="both to be gone")


def test_stopping_the_pool_leaves_no_process_behind() -> None:
    async def scenario() -> list[int]:
        async with running("prefork") as (pool, recorder):
            pool.submit([make_job(1, "subprocess"), make_job(2, "multiprocess")])
            await recorder.until_back(1, 2)
            about = pool.describe()
            await pool.stop(grace_s=5.0)
            return [about["fork-server"], *about["processes"], recorder.value(1), recorder.value(2)]

    assert all(is_gone(pid) for pid in asyncio.run(scenario()))
