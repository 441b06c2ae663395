"""The pages for Kubernetes and systemd: what they print is started, probed and stopped as they say."""

import configparser
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.docs.blocks import DOCS, blocks_of
from tests.docs.terminal import BIN
from tests.waiting import wait_until
from tests.web.promql import used_by

APP = """
import time
from pathlib import Path
from umbel import App

app = App("shop")

@app.task
def pack():
    Path("packing").touch()
    while not Path("packed").exists():
        time.sleep(0.05)
"""


def manifests() -> dict[tuple[str, str], Any]:
    """By kind and name."""
    pages = [yaml.safe_load(block.text) for block in blocks_of(DOCS / "kubernetes.md")]
    return {(page["kind"], page["metadata"]["name"]): page for page in pages}


def units() -> list[str]:
    return [block.text for block in blocks_of(DOCS / "systemd.md") if block.language == "ini"]


class Pod:
    """The containers of a deployment as processes here: in a folder, with a broker in a file."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._broker = f"sqlite:///{home / 'queue.db'}"

    def run(self, command: list[str], container: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._here(command),
            cwd=self.home,
            env=self._environment(container),
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    @contextmanager
    def start(self, container: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
        with (self.home / "log").open("wb") as log:
            process = subprocess.Popen(
                self._here(container["command"]),
                cwd=self.home,
                env=self._environment(container),
                stderr=log,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def _here(self, command: list[str]) -> list[str]:
        moved = {"amqp://rabbitmq": self._broker, "0.0.0.0": "127.0.0.1", "5555": "0"}
        return [moved.get(one, one).replace("/data", str(self.home)) for one in command]

    def _environment(self, container: dict[str, Any]) -> dict[str, str]:
        stated = {one["name"]: one["value"] for one in container.get("env", ())}
        moved = {name: self._here([value])[0] for name, value in stated.items()}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("UMBEL_")}
        moved = {"PATH": f"{BIN}:{os.environ['PATH']}", "UMBEL_BROKER": self._broker, **moved}
        if "UMBEL_RUN_DIR" in moved:
            moved["UMBEL_RUN_DIR"] = str(self.home / "run")
        return inherited | moved


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    (tmp_path / "shop.py").write_text(APP)
    return Pod(tmp_path)


def test_the_probes_of_the_manifest_tell_starting_running_draining_and_gone_apart(pod: Pod) -> None:
    spec = manifests()["Deployment", "worker"]["spec"]["template"]["spec"]
    [worker] = spec["containers"]

    def passes(probe: str) -> int:
        return pod.run(worker[probe]["exec"]["command"], worker).returncode

    assert (passes("startupProbe"), passes("livenessProbe")) == (3, 3)
    with pod.start(worker) as process:
        wait_until(lambda: passes("startupProbe") == 0, deadline_s=90, what="the worker to be ready")
        assert (passes("livenessProbe"), passes("readinessProbe")) == (0, 0)
        assert pod.run(["umbel", "call", "-A", "shop:app", "shop.pack"], worker).returncode == 0
        wait_until((pod.home / "packing").exists, what="the task to run")
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: passes("readinessProbe") == 1, what="the worker to drain")
        assert passes("livenessProbe") == 0
        (pod.home / "packed").touch()
        assert process.wait(60) == 0
    assert passes("livenessProbe") == 3


def test_the_autoscaler_asks_for_figures_that_the_dashboard_of_the_manifest_serves(pod: Pod) -> None:
    spec = manifests()["Deployment", "umbel-web"]["spec"]["template"]["spec"]
    [web], [token] = spec["containers"], spec["initContainers"]
    for _ in range(2):  # a pod that is started again finds its token
        assert pod.run(token["command"], token).returncode == 0
    bearer = (pod.home / "token").read_text().strip()
    assert pod.run(["umbel", "call", "-A", "shop:app", "shop.pack"], {}).returncode == 0
    [trigger] = manifests()["ScaledObject", "worker"]["spec"]["triggers"]
    asked = used_by(trigger["metadata"]["query"])
    assert asked.metrics == {"umbel_queue_ready", "umbel_queue_claimed"}
    with pod.start(web), httpx.Client(headers={"Authorization": f"Bearer {bearer}"}) as browser:
        address = wait_until(
            lambda: re.search(r"http://[\d.]+:\d+(?=/)", (pod.home / "log").read_text()),
            what="the address of the dashboard",
        )
        series = [f'{metric}{{queue="celery"}} ' for metric in asked.metrics]
        wait_until(
            lambda: all(one in browser.get(f"{address[0]}/metrics", timeout=60).text for one in series),
            what="the depth of the queue",
        )
        assert httpx.get(f"{address[0]}/metrics", timeout=60).status_code == 401


def test_service_managers_wait_longer_than_the_worker_does() -> None:
    spec = manifests()["Deployment", "worker"]["spec"]["template"]["spec"]
    [worker] = spec["containers"]
    grace = worker["command"][worker["command"].index("--grace") + 1]
    assert spec["terminationGracePeriodSeconds"] > float(grace)
    service = _read(units()[0])["Service"]
    found = re.search(r"--grace (\d+)", service["ExecStart"])
    assert found is not None and int(service["TimeoutStopSec"]) > int(found[1])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_units_as_printed(tmp_path: Path) -> None:
    (tmp_path / "umbel").symlink_to(Path(sys.executable).with_name("umbel"))
    texts = dict(zip(("worker.service", "web.service"), units(), strict=True))
    texts["umbel@.service"] = (
        texts["worker.service"]
        .replace("umbel worker", "umbel worker -n %i")
        .replace("RuntimeDirectory=umbel", "RuntimeDirectory=umbel-%i")
        .replace("/run/umbel", "/run/umbel-%i")
    )
    for name, text in texts.items():
        (tmp_path / name).write_text(text.replace("/srv/shop/venv/bin", str(tmp_path)))
    names = [str(tmp_path / name.replace("@", "@w1")) for name in texts]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *names],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    about_ours = [line for line in done.stderr.splitlines() if any(name in line for name in (*texts, "w1"))]
    assert (done.returncode, about_ours) == (0, []), done.stderr


def _read(unit: str) -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read_string(unit)
    return parsed
