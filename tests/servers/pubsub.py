"""Google's Pub/Sub emulator, where it is installed: one for all tests of a run, a project for each test.

It ignores the filters of subscriptions and keeps nothing across restarts.
"""

import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.servers.ports import free_port
from tests.servers.shared import ends_with_run, once
from tests.waiting import wait_until
from umbel.brokers.gcpubsub.http import EMULATOR_VARIABLE

JARS = ("google-cloud-sdk", "google-cloud-cli")
MISSING = (
    "no Pub/Sub emulator: install google-cloud-cli-pubsub-emulator from Google's package source, with a Java"
)


def emulator_jar() -> Path | None:
    """The program of the emulator, where Google's packages put it."""
    roots = [Path("/usr/lib") / name for name in JARS] + [Path("/opt") / name for name in JARS]
    if (gcloud := shutil.which("gcloud")) is not None:
        roots.append(Path(gcloud).resolve().parents[1])
    for root in roots:
        for jar in sorted((root / "platform/pubsub-emulator/lib").glob("cloud-pubsub-emulator-*.jar")):
            return jar
    return None


@dataclass
class Emulator:
    directory: Path
    port: int
    _process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        jar, java = emulator_jar(), shutil.which("java")
        assert jar and java, MISSING
        # A small heap, and no second compiler: it is warm sooner.
        small = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        command = [java, *small, "-jar", str(jar), "--host=127.0.0.1", f"--port={self.port}"]
        with (self.directory / "out.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=self.directory, stdout=log, stderr=log, process_group=0
            )
        ends_with_run(self._process, self.directory, "KILL")
        wait_until(self._answers, what="the Pub/Sub emulator")

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, "the Pub/Sub emulator ended"
        try:
            with urllib.request.urlopen(f"http://{self.host}/", timeout=5):
                return True
        except (TimeoutError, urllib.error.URLError, OSError):
            return False


def subscriptions(url: str) -> set[str]:
    """The names of those that a project has."""
    project = url.rpartition("/")[2]
    address = f"http://{os.environ[EMULATOR_VARIABLE]}/v1/projects/{project}/subscriptions?pageSize=1000"
    with urllib.request.urlopen(address, timeout=10) as answer:
        return {item["name"].rpartition("/")[2] for item in json.load(answer).get("subscriptions", ())}


def shared_emulator() -> str:
    """Its host and port. The first call of the run starts it; without the program the test is skipped."""
    if emulator_jar() is None or shutil.which("java") is None:
        pytest.skip(MISSING)
    return _host()


@cache
def _host() -> str:
    return str(once("pubsub", _start_for_run)["host"])


def _start_for_run(directory: Path) -> dict[str, Any]:
    emulator = Emulator(directory, free_port())
    emulator.start()
    return {"host": emulator.host}


@pytest.fixture
def pubsub_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a project that nobody else has; the emulator is in the environment."""
    monkeypatch.setenv(EMULATOR_VARIABLE, shared_emulator())
    yield f"gcpubsub://projects/t{uuid4().hex[:12]}"
    assert os.environ[EMULATOR_VARIABLE]
