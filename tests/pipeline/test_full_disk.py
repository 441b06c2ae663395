"""D2: a disk that is full in the middle of a build: one clear error, nothing published, nothing lost."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.pipeline.lakes import record
from tests.pipeline.test_equality import random_histories
from tests.pipeline.test_follow import caught_up, contents, look, numbered
from umbel.pipeline import BuildFailed, io
from umbel.pipeline.build import build
from umbel.pipeline.engines import SparkEngine, failing_as

SIZE = 3 * 1024**2
LEFT = 24 * 1024
"""Enough for a folder and a lock, not for a table."""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, which takes a right that not everybody has."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "umbel-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("may not mount a small disk here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, name: str, *, left: int) -> Path:
    stats = os.statvfs(disk)
    filler = disk / name
    with filler.open("wb") as file:
        file.write(bytes(max(0, stats.f_bavail * stats.f_frsize - left)))
    return filler


@pytest.mark.timeout(400)
def test_a_full_disk_ends_a_build_and_takes_nothing_away(spark: SparkSession, small_disk: Path) -> None:
    """D2: of a batch and of a stream; with room again, both go on."""
    lake = small_disk / "lake"
    record(lake, "1", numbered(random_histories(40)))
    build(SparkEngine(spark), lake, look(lake), only=["tasks", "attempts"])
    before, number = contents(lake), io.newest_number(lake)

    fillers = [fill(small_disk, "filler", left=LEFT), fill(small_disk, "more", left=0)]
    # First the stream, whose round without news writes little: jobs of a build that failed may still end.
    with pytest.raises(BuildFailed, match=r"nothing was published: .*No space left on device") as stream:
        caught_up(SparkEngine(spark), lake, only=["tasks", "attempts"])
    fillers.pop().unlink()
    with pytest.raises(BuildFailed, match=r"nothing was published: .*No space left on device") as batch:
        build(SparkEngine(spark), lake, look(lake), only=["tasks", "attempts"], afresh=True)
    assert all(len(str(raised.value).splitlines()) == 1 for raised in (batch, stream))
    assert (contents(lake), io.newest_number(lake)) == (before, number)

    for filler in fillers:
        filler.unlink()
    caught_up(SparkEngine(spark), lake, only=["tasks", "attempts"])
    assert contents(lake) == before
    builds = [one for one in (lake / "tables").iterdir() if one.is_dir() and one.name != "_manifest"]
    assert len(builds) == io.BUILDS_KEPT, "what the builds that failed had written is gone"


def test_a_manifest_that_cannot_be_written_publishes_nothing(tmp_path: Path) -> None:
    """D2: its folder cannot be written to, whoever we are."""
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/_manifest").write_text("in the way")
    nothing = io.Manifest("b", {}, {}, 0, 0, "", 0, 0.0)
    with (
        pytest.raises(
            BuildFailed, match=r"nothing was published: .*_manifest.*: (File exists|Not a directory)"
        ),
        failing_as("nothing was published"),
    ):
        io.publish(tmp_path, nothing)
