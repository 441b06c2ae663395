"""Callers that are killed while they ask leave nothing behind on Redis (P7)."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest

from tests.cluster import Cluster
from tests.servers.redis import RedisServer
from tests.waiting import wait_until

SOAK = bool(os.environ.get("UMBEL_SOAK"))
CALLERS, AT_ONCE = 1000, 50
TASKS_FILE = Path(__file__).with_name("control_tasks.py")
CALLERS_FILE = Path(__file__).with_name("asking_callers.py")
EXCHANGE = "reply.celery.pidbox"


@pytest.mark.scenario
@pytest.mark.timeout(900)
@pytest.mark.skipif(not SOAK, reason="it waits for a minute: make soak")
def test_callers_killed_in_mid_call_leave_no_key(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    with Cluster(tmp_path, TASKS_FILE, broker=server.url, backend=server.url) as cluster:
        cluster.start_worker("one", "-c", "1")
        for _ in range(CALLERS // AT_ONCE):
            command = [sys.executable, str(CALLERS_FILE), server.url, str(AT_ONCE)]
            callers = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
            assert callers.stdout is not None and callers.stdout.readline() == b"asked\n"
            os.killpg(callers.pid, signal.SIGKILL)
            callers.wait()
            callers.stdout.close()
        ended = monotonic()
        left = server.ask("SCARD", f"_kombu.binding.{EXCHANGE}")
        assert isinstance(left, int) and left >= AT_ONCE  # those of the last ones, at least

        def nothing_left() -> bool:
            return server.ask("KEYS", f"*{EXCHANGE}*") == []

        wait_until(nothing_left, what="the last key to go")
        print(f"{CALLERS} callers killed; the last key was gone after {monotonic() - ended:.0f} s")
    server.stop()
