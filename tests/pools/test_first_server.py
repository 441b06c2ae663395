"""The first fork server is a fork of the main process, and like one that was started as a new program."""

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.pools.host import make_job
from tests.pools.processes import held_by, is_gone, parent_of, signals, title
from tests.pools.recorder import running, settings
from tests.waiting import until, wait_until
from umbel.logs import forget_logging, set_up_logging
from umbel.pools.prefork import kernel
from umbel.pools.prefork.child_guard_script import children_of
from umbel.pools.prefork.messages import Setup, setup_of
from umbel.pools.prefork.server_process import ForkedProcess, ForkPoint, StartedServer

HANDLED = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture
def as_a_main_process() -> Iterator[None]:
    """With a standard input, and the handlers that `umbel worker` has when it forks."""
    before = {signum: signal.signal(signum, lambda *_: None) for signum in HANDLED}
    stdin, (reading, writing) = os.dup(0), os.pipe()
    os.dup2(reading, 0)
    yield
    os.dup2(stdin, 0)
    for descriptor in (stdin, reading, writing):
        os.close(descriptor)
    for signum, handler in before.items():
        signal.signal(signum, handler)


def forked(**fields: object) -> StartedServer:
    return ForkPoint().fork(setup_of(settings(**fields)), lambda: None)  # type: ignore[arg-type]


def test_children_are_copies_of_the_main_process_without_what_is_its_own(as_a_main_process: None) -> None:
    inherited, _ = os.pipe()
    os.set_inheritable(inherited, True)
    point = ForkPoint()
    own, _ = os.pipe()  # what the app opened stays open, as if the server had imported it
    names = {one: os.readlink(f"/proc/self/fd/{one}") for one in (inherited, own)}
    first = point.fork(setup_of(settings()), lambda: None)

    async def scenario() -> None:
        async with running("prefork", first_server=first) as (pool, recorder):
            pool.submit([make_job(1, "facts")])
            await recorder.until_back(1)
            facts, server = recorder.value(1), pool.describe()["fork-server"]
            assert facts["imported_in"] == os.getpid()
            assert facts["loaded_in"] == server
            assert title(server) == "umbel: tester@here fork server"
            guard = parent_of(server)
            await until(lambda: title(guard).endswith("child guard of tester@here"), "the guard's program")
            assert title(facts["pid"]) == f"umbel: tester@here child {facts['child']}"
            assert facts["stdin"] == os.readlink(f"/proc/{server}/fd/0") == "/dev/null"
            assert os.getsid(server) == server
            for pid in (server, facts["pid"]):
                assert not set(HANDLED) & signals(pid, "SigCgt") and not signals(pid, "SigBlk")
            assert names[own] in held_by(server) and names[inherited] not in held_by(server)
            assert not set(names.values()) & held_by(parent_of(server))

    asyncio.run(scenario())


def test_a_server_that_follows_a_dead_one_is_a_new_program() -> None:
    first = forked()

    async def scenario() -> None:
        async with running("prefork", first_server=first) as (pool, recorder):
            server = pool.describe()["fork-server"]
            os.kill(server, signal.SIGKILL)
            await recorder.until(
                lambda: (
                    pool.describe()["fork-server"] not in (None, server)
                    and len(pool.describe()["processes"]) == 2
                ),
                what="another fork server and its children",
            )
            pool.submit([make_job(1, "facts")])
            await recorder.until_back(1)
            assert recorder.value(1)["imported_in"] == pool.describe()["fork-server"]
            assert is_gone(server)

    asyncio.run(scenario())


def test_a_server_for_other_settings_is_not_used() -> None:
    first = forked(loglevel="DEBUG")

    async def scenario() -> None:
        async with running("prefork", first_server=first) as (pool, recorder):
            pool.submit([make_job(1, "facts")])
            await recorder.until_back(1)
            assert recorder.value(1)["imported_in"] == pool.describe()["fork-server"]

    asyncio.run(scenario())
    assert is_gone(first.process.pid)


def test_a_server_that_nobody_needed_leaves_no_process_behind() -> None:
    first = forked()
    wait_until(lambda: children_of(first.process.pid), what="the fork server")
    (server,) = children_of(first.process.pid)
    first.discard()
    assert is_gone(first.process.pid)
    wait_until(lambda: is_gone(server), what="the fork server to be gone")
    first.discard()  # once more changes nothing


def test_a_process_whose_end_somebody_else_has_seen_has_ended() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(3)
    os.waitpid(pid, 0)
    assert ForkedProcess(pid).poll() == 0


@pytest.fixture
def safe(monkeypatch: pytest.MonkeyPatch) -> Setup:
    """For a process with this thread only; pytest may have others."""
    monkeypatch.setattr(
        "umbel.pools.prefork.kernel.thread_count", lambda: 1 + len(threading.enumerate()) - THREADS
    )
    return setup_of(settings())


THREADS = len(threading.enumerate())


def test_only_a_process_that_can_be_forked_safely_is(safe: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    count = kernel.thread_count
    of_the_tests = (count() or 1) - 1  # what shares tests between processes has a thread, too
    monkeypatch.setattr(kernel, "thread_count", lambda: (count() or 1) - of_the_tests)
    point = ForkPoint()
    assert point.can_fork(safe)
    assert point.can_fork(setup_of(settings(child_start="fork")))
    assert not point.can_fork(setup_of(settings(child_start="spawn")))
    assert not point.can_fork(setup_of(settings(green=True)))
    with closing(socket.socket()):
        assert not point.can_fork(safe)
        assert ForkPoint().can_fork(safe)  # whoever started the process gave it that one
    ending = threading.Event()
    thread = threading.Thread(target=ending.wait)
    thread.start()
    try:
        assert not point.can_fork(safe)
    finally:
        ending.set()
        thread.join()


def test_a_log_that_is_forgotten_leaves_what_the_app_has_set_up(tmp_path: Path) -> None:
    root = logging.getLogger()
    handlers, level, theirs = root.handlers[:], root.level, logging.NullHandler()
    try:
        set_up_logging("debug", logfile=str(tmp_path / "log"))
        root.addHandler(theirs)
        (ours,) = [one for one in root.handlers if isinstance(one, logging.FileHandler)]
        forget_logging()
        assert root.handlers == [theirs] and root.level == logging.WARNING
        assert ours.stream is None or ours.stream.closed
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
