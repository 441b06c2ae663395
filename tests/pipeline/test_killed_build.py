"""D2: Python processes of Spark that are killed in the middle of a build change nothing.

Each is killed when it has written a file and not told of it: Spark runs its job again, under other names.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from pyspark.sql import SparkSession

from tests.fold.running import tables_of
from tests.pipeline.test_build import counted, looked, published, recorded
from tests.pipeline.test_fold import tables_in
from umbel.pipeline import io
from umbel.pipeline.build import build
from umbel.pipeline.engines import SparkEngine

BUILDS, KILLS = (7, 3) if os.environ.get("UMBEL_SOAK") else (1, 2)
"""Spark gives a job up when it has failed four times."""


def workers() -> list[psutil.Process]:
    """Python processes that executors have; their parent is one too, and Java's child."""
    below = psutil.Process().children(recursive=True)
    daemons = {one.pid for one in below if "pyspark.daemon" in " ".join(command_of(one))}
    return [one for one in below if _parent(one) in daemons]


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _parent(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.Error:
        return 0


@contextmanager
def killer(tables: Path, victims: Callable[[], list[psutil.Process]] = workers) -> Iterator[list[int]]:
    """Kills all such processes when a part of a table is there, then when more are."""
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        before = set(tables.glob("2*"))
        seen = 0
        while len(killed) < KILLS and not over.wait(0.01):
            found = len(
                [one for one in tables.glob("2*/tasks/part-*.parquet") if one.parents[1] not in before]
            )
            if found <= seen or not (doomed := victims()):
                continue
            seen = found
            for one in doomed:
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(signal.SIGKILL)
            killed.append(found)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def assert_only_what_was_told(lake: Path) -> None:
    """What jobs had written that were run again is gone."""
    manifest, state = io.newest_manifest(lake), io.newest_state(lake)
    assert manifest is not None
    assert state is not None
    folder = lake / "tables" / manifest.build
    files = {str(path.relative_to(lake / "tables")) for path in folder.rglob("part-*")}
    assert files == {name for names in manifest.tables.values() for name in names} | state.names()


@pytest.mark.timeout(400)
def test_a_build_whose_processes_are_killed_has_every_row_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umbel.fold.buckets.BUCKET_EVENTS", 150)
    parts = tables_in(seed=7)
    recorded(tmp_path, parts)
    for _ in range(BUILDS):
        with killer(tmp_path / "tables") as killed:
            build(SparkEngine(spark), tmp_path, looked(tmp_path), afresh=True)
        assert len(killed) == KILLS
        assert published(tmp_path) == counted(tables_of(parts, buckets=1))
        assert_only_what_was_told(tmp_path)
