"""Decision 9: an app whose import leaves threads, a gRPC channel and a TLS connection works in children."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.servers.certificates import make_certificates

TASKS_FILE = Path(__file__).with_name("unsafe_tasks.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def echoes(tmp_path: Path) -> Iterator[dict[str, str]]:
    certificates = make_certificates(tmp_path)
    server = certificates.server
    command = [sys.executable, "-m", "tests.servers.echoes", str(server.certificate), str(server.key)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ports = json.loads(process.stdout.readline())
            yield {
                "ECHO_GRPC": str(ports["grpc"]),
                "ECHO_TLS": str(ports["tls"]),
                "ECHO_AUTHORITY": str(certificates.authority),
            }
        finally:
            process.kill()


@pytest.mark.scenario
def test_children_of_an_app_that_cannot_be_forked_start_afresh_and_work(
    tmp_path: Path, echoes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`child_start` is auto: it notices, and the log says so."""
    with Cluster(tmp_path, TASKS_FILE) as cluster:
        for name, value in echoes.items():
            monkeypatch.setenv(name, value)
        cluster.start_worker("w1", "-c", "2")
        converse = cluster.app.tasks["unsafe_tasks.converse"]
        results = cluster.app.send_many(converse.s(f"number {n}") for n in range(40))
        answers = [result.get(timeout=60) for result in results]
        assert [(by_grpc, by_tls) for _, by_grpc, by_tls in answers] == [
            (f"number {n}", f"number {n}") for n in range(40)
        ]
        assert {pid for pid, _, _ in answers} <= set(cluster.children_of("w1"))
        assert cluster.counters("w1")["children_died"] == 0
        assert cluster.stop_worker("w1") == 0
    (said,) = re.findall(r".*app is not fork-safe.*", cluster.log("w1"))
    assert "threads running" in said and "metrics" in said
