"""Forked: a pytest plugin. Many mutants of one script are tried by one pytest, each in a process of its own.

A script is a text that Python hands to the server, so nothing has to be loaded anew for a mutant, and to
start pytest is most of what a trial takes. A child begins where the tests are collected and none has run:
no fixture, no server.
"""

import os
import select
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.main import pytest_runtestloop as run_tests

from tests.mutants import killers
from umbel.brokers.redis import scripts

DIRECTORY = (
    "MUTANTS_FORKED"  # the variable: where the mutants lie as 0, 1, ... and what became of each is put
)
SCRIPT = "MUTANTS_SCRIPT"  # the variable: the file they replace
LIMIT_S = "MUTANTS_LIMIT_S"


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    directory, file = Path(os.environ[DIRECTORY]), Path(os.environ[SCRIPT])
    original = file.read_bytes()
    try:
        for place in range(len(list(directory.iterdir()))):
            file.write_bytes((directory / str(place)).read_bytes())
            status = _try(session, float(os.environ[LIMIT_S]))
            (directory / f"{place}.status").write_text(str(status))
    finally:
        file.write_bytes(original)
    return True


def _try(session: pytest.Session, limit_s: float) -> int | None:
    """The status of a child that ran the tests; None when it took too long."""
    if not (child := os.fork()):
        os.setsid()
        _run(session)
    ending = os.pidfd_open(child)
    is_over = bool(select.select([ending], [], [], limit_s)[0])
    os.close(ending)
    with suppress(ProcessLookupError):  # also servers that the tests started and did not stop
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if is_over else None


def _run(session: pytest.Session) -> None:
    try:
        _load_scripts()
        killers.pytest_collection_modifyitems(session.items)
        with suppress(session.Failed):
            run_tests(session)
        session._setupstate.teardown_exact(None)
    finally:
        os._exit(1 if session.testsfailed else 0)


def _load_scripts() -> None:
    """Forget the texts that were read before the fork, so that the changed file is read."""
    scripts.sections.cache_clear()
    scripts.script.cache_clear()
