"""What a worker imports: each module is time at its start, and memory in every process that has it."""

import json
import subprocess
import sys

import pytest

# What the child processes share with the main process, and what a running worker has beside it.
PROGRAM = """
import json, sys
import umbel.cli.main, umbel.cli.run.worker
shared = sorted(sys.modules)
import umbel.cli.run.running_worker
from umbel.backends.registry import open_backend
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.pools.prefork.parent import PreforkPool
settings = BrokerSettings(sys.argv[1])
open_broker(settings), open_backend(settings.url, settings)
print(json.dumps([shared, sorted(sys.modules)]))
"""
OURS_MAX, SHARED_MAX, MAIN_MAX = 372, 360, 600
URLS = ("sqlite:///modules.db", "redis://localhost/0", "amqp://localhost")
# Large, and needed by few workers or by none.
NOT_IN_CHILDREN = {"asyncio", "ssl", "subprocess", "sqlite3", "hiredis", "ctypes", "umbel.worker.worker"}
NOWHERE = {
    "statistics",
    "tempfile",
    "importlib.resources",
    "pyarrow",
    "rich",
    "umbel.celery",
    "umbel.events.meters",
    "umbel.history",
    "umbel.outbox.relay",
}


@pytest.mark.parametrize("url", URLS)
def test_a_worker_imports_no_more_modules_than_it_needs(url: str) -> None:
    command = [sys.executable, "-P", "-c", PROGRAM, url]
    shared, everything = map(set, json.loads(subprocess.check_output(command, text=True)))
    assert not shared & NOT_IN_CHILDREN
    assert not everything & NOWHERE
    assert sum(one.startswith("umbel") for one in everything) <= OURS_MAX
    assert len(shared) <= SHARED_MAX, len(shared)
    assert len(everything) <= MAIN_MAX, len(everything)
