"""Queries run in processes of their own: what DuckDB cannot stop is killed, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.history.published import Story, publish
from tests.waiting import wait_until
from umbel.errors import BadQuery, ConfigurationError, HistoryError, NothingBuilt, SlowQuery
from umbel.history.isolation import ADDRESS_SPACE_MAX_BYTES, QueryProcess
from umbel.history.query import Answer, Tables, asked

# One vector of rows, between which DuckDB does not look whether it was interrupted: more than ten minutes.
ENDLESS = "select max(levenshtein(repeat('a', 30000 + range::int), repeat('b', 30000))) from range(2000)"


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("lake"), Story(tasks=40).rows)


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[QueryProcess]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # it reads by functions of this module
    made = QueryProcess()
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == [], "what queries wrote is removed"


def ask(process: QueryProcess, lake: Path, sql: str, timeout_s: float = 60.0, **options: Any) -> Answer:
    work = partial(asked, sql=sql, limit=1000, timeout_s=timeout_s)
    return process.read(lake, work, Answer, timeout_s=timeout_s, **options)


def test_a_query_that_cannot_be_interrupted_is_killed_at_its_limit_of_time(
    process: QueryProcess, lake: Path
) -> None:
    with pytest.raises(SlowQuery, match="took longer than 1 s; select a shorter time or fewer rows"):
        ask(process, lake, ENDLESS, timeout_s=1.0)
    assert children_of(process) == []
    assert ask(process, lake, "select count(*) from tasks").rows == [(40,)]


@pytest.mark.parametrize(
    "sql",
    [
        "select damerau_levenshtein(repeat('a', 30000), repeat('b', 30000))",  # 7 GB
        "select list_sort(range(900000000))[1]",
    ],
)
def test_a_query_that_takes_the_machines_memory_is_refused(
    process: QueryProcess, lake: Path, sql: str
) -> None:
    with pytest.raises(BadQuery, match="needs more than 1 GB of memory"):
        ask(process, lake, sql, timeout_s=120.0)
    assert ask(process, lake, "select 1").rows == [(1,)]


def test_a_query_runs_nothing_that_lies_in_the_folder_where_it_is_asked(
    process: QueryProcess,
    lake: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a person stands, such as /tmp, others may make files."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "duckdb.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(folder)
    assert ask(process, lake, "select 1").rows == [(1,)]
    assert not (folder / "ran").exists()


def exhausted(_: Tables) -> str:
    return "x" * ADDRESS_SPACE_MAX_BYTES


def aborted(_: Tables) -> None:
    os.abort()


def computed(_: Tables) -> None:
    while True:
        pass


def broken(_: Tables) -> None:
    raise AssertionError("a bug")


def misconfigured(_: Tables) -> None:
    raise ConfigurationError("set it")


@pytest.mark.parametrize(
    ("work", "error", "text"),
    [
        (exhausted, BadQuery, "needs more than 3 GiB of memory"),
        (aborted, BadQuery, "needs more than 3 GiB of memory"),  # so ends C++ without memory
        (computed, SlowQuery, "took longer than 0.5 s"),
        (broken, HistoryError, "please report its output on stderr"),
        (misconfigured, ConfigurationError, "set it"),
    ],
)
def test_every_way_in_which_a_read_can_end_has_one_error(
    process: QueryProcess, lake: Path, work: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as raised:
        process.read(lake, work, str, timeout_s=0.5 if work is computed else 30.0)
    assert raised.type is error


def test_an_answer_that_is_too_large_for_the_caller_is_refused(process: QueryProcess, lake: Path) -> None:
    with pytest.raises(BadQuery, match="more than 1,000 bytes; select fewer columns or rows"):
        ask(process, lake, "select repeat('x', 2000)", answer_max_bytes=1000)


def test_values_and_errors_are_those_of_a_read_in_the_own_process(
    process: QueryProcess, lake: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sql = (
        "select timestamptz '2026-01-01' as at, date '2026-01-02' as day, 1.5::decimal as price,"
        " 'nan'::double as no, [1, null] as list, {'a': 1} as map, '1' || repeat('0', 30) as text,"
        " ('1' || repeat('0', 30))::hugeint as huge, '\\x00'::blob as data, null as nothing"
    )
    found = ask(process, lake, sql)
    assert found.rows == [
        (
            "2026-01-01T00:00:00Z",
            "2026-01-02",
            1.5,
            "nan",
            [1, None],
            {"a": 1},
            str(10**30),
            10**30,
            "00",
            None,
        )
    ]
    with pytest.raises(BadQuery, match="line 1, column 15: unknown table 'task'"):
        ask(process, lake, "select * from task")
    with pytest.raises(NothingBuilt, match="no tables in the lake"):
        ask(process, tmp_path_factory.mktemp("empty"), "select 1")


def test_a_server_that_has_ended_is_started_again(process: QueryProcess, lake: Path) -> None:
    assert ask(process, lake, "select 1").rows == [(1,)]
    assert process._server is not None
    os.kill(process._server.pid, signal.SIGKILL)
    assert ask(process, lake, "select 2").rows == [(2,)]


def test_a_query_ends_with_the_process_that_asked(lake: Path, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from tests.history.test_isolation import ENDLESS, QueryProcess, ask\n"
        "ask(QueryProcess(), sys.argv[1], ENDLESS)\n"
    )
    asker = subprocess.Popen(
        [sys.executable, "-c", program, str(lake)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    try:
        started = wait_until(
            lambda: found if len(found := psutil.Process(asker.pid).children(recursive=True)) == 2 else None,
            what="the server and the process that reads",
        )
    finally:
        asker.kill()
        asker.wait()
    wait_until(lambda: not any(map(_runs, started)), what="both to end")


def children_of(process: QueryProcess) -> list[psutil.Process]:
    assert process._server is not None
    return psutil.Process(process._server.pid).children()


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
