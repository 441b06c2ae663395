"""What does it cost a cluster to know itself and to elect one of its nodes?

Real workers on a private Redis, 2 to 16 of ours and, as far as `--peers-max` goes, as many of
Celery's. A listener beside them counts what is published: first while the cluster is idle, then
for each election. Deliveries are publishes times those who listen. Celery's election costs
1 + N + N² publishes by its rules; the count beside it is what was heard.

    scripts/setup bench; scripts/setup servers
    .venv/bin/python benchmarks/coordination.py [--json] [--nodes 2 4 8 16] [--peers-max 4]
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._coordination.listener import Listener
from benchmarks._harness.benchmark import PEERS_PYTHON, ROOT
from benchmarks._harness.processes import BenchmarkFailed, Running, ended_in_order, running
from tests.servers.redis import RedisServer
from umbel import App

APPS = ROOT / "benchmarks" / "_coordination"
PYTHONS = (PEERS_PYTHON, ROOT / ".venv-celery" / "bin" / "python")
CELERY = next((python for python in PYTHONS if python.exists()), None)
START_S = 120.0
IDLE_S = 10.0
ELECTIONS = 20
SETTLED_S = 2.0  # without a message of an election: nothing more comes
OF_ELECTIONS = ("worker-elect", "worker-elect-ack", "worker-elected", "command election")


def main() -> int:
    arguments = _arguments()
    rows: list[dict[str, Any]] = []
    with ended_in_order(), tempfile.TemporaryDirectory(prefix="umbel-bench-") as home:
        server = RedisServer(Path(home))
        server.start()
        try:
            for nodes in arguments.nodes:
                for library in ("umbel", "celery"):
                    if library == "celery" and (nodes > arguments.peers_max or CELERY is None):
                        continue
                    print(f"{nodes} nodes of {library}", file=sys.stderr)
                    server.ask("FLUSHALL")
                    rows.append(_measure(library, nodes, server.url, Path(home), arguments))
        except BenchmarkFailed as error:
            print(f"the benchmark could not be run: {error}", file=sys.stderr)
            return 1
        finally:
            server.stop()
    print(json.dumps(rows, indent=2) if arguments.json else _table(rows))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--peers-max", type=int, default=4, help="how many Celery workers at most")
    parser.add_argument("--elections", type=int, default=ELECTIONS)
    parser.add_argument("--idle", type=float, default=IDLE_S, help="seconds of listening")
    return parser.parse_args()


def _measure(library: str, nodes: int, url: str, home: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    with Listener(url) as listener, _cluster(library, nodes, url, home) as workers:
        _wait(lambda: listener.seen()["worker-heartbeat"] >= 2 * nodes, workers, "heartbeats of all")
        listener.take()
        _listen_for(arguments.idle)
        idle = listener.take()
        app = App("coordination", broker=url)
        try:
            calls_before = _store_calls(app, library)
            times = _elect(app, library, arguments.elections, listener)
            store_calls = _store_calls(app, library) - calls_before
        finally:
            app.close()
        heard = listener.take()
        died = sum(worker.process.poll() is not None for worker in workers)
    elections = sum(heard[kind] for kind in OF_ELECTIONS)
    idle_per_s = sum(idle.values()) / arguments.idle
    return {
        "library": library,
        "nodes": nodes,
        "idle_publishes_per_s": round(idle_per_s, 2),
        "idle_deliveries_per_s": round(idle_per_s * nodes, 1),
        "publishes_per_election": round(elections / arguments.elections, 2),
        "by_the_rules": 3 if library == "umbel" else 1 + nodes + nodes**2,
        "deliveries_per_election": round(elections * nodes / arguments.elections, 1),
        "store_calls_per_election": round(store_calls / arguments.elections, 2),
        "workers_died": died,
        "decided_p50_s": round(sorted(times)[len(times) // 2], 3) if times else None,
    }


@contextmanager
def _cluster(library: str, nodes: int, url: str, home: Path) -> Iterator[Sequence[Running]]:
    with ExitStack() as ends:
        yield [ends.enter_context(_worker(library, f"n{number}", url, home)) for number in range(nodes)]


@contextmanager
def _worker(library: str, name: str, url: str, home: Path) -> Iterator[Running]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("UMBEL_", "CELERY_"))}
    flags = ["-n", f"{name}@bench", "-P", "solo", "-l", "WARNING"]
    if library == "umbel":
        command = [sys.executable, "-m", "umbel.cli.main", "worker", "-A", f"{APPS / 'umbel_app.py'}:app"]
        environment = kept | {"UMBEL_BROKER": url, "UMBEL_RUN_DIR": str(home / "run")}
    else:
        command = [str(CELERY), "-m", "celery", "-A", "celery_app", "worker"]
        environment = kept | {"CELERY_BROKER_URL": url, "PYTHONPATH": str(APPS)}
    with running(f"{library}-{name}", [*command, *flags], environment=environment, directory=home) as worker:
        yield worker


def _elect(app: App, library: str, elections: int, listener: Listener) -> list[float]:
    call = app.signature(f"{library}_app.nothing").to_map()
    times: list[float] = []
    for number in range(elections):
        name = f"bench-{number}"
        began = time.monotonic()
        if library == "umbel":
            outcome = app.control.election(name, "task", call, timeout=60)
            if not outcome.ok:
                raise BenchmarkFailed(f"election {name} ended as {outcome}")
            times.append(time.monotonic() - began)
        else:
            app.control.broadcast("election", {"id": name, "topic": "task", "action": call})
            _settle(listener)
    _settle(listener)
    return times


def _settle(listener: Listener) -> None:
    """Return when no message of an election has come for a while."""
    last: Counter[str] = Counter()
    quiet_since = time.monotonic()

    def is_quiet() -> bool:
        nonlocal last, quiet_since
        seen = listener.seen()
        now = Counter({kind: seen[kind] for kind in OF_ELECTIONS})
        if now != last:
            last, quiet_since = now, time.monotonic()
        return time.monotonic() - quiet_since > SETTLED_S

    _wait(is_quiet, (), "elections to settle")  # a Celery worker may die of an election, at N = 2 for sure


def _store_calls(app: App, library: str) -> int:
    if library != "umbel":
        return 0
    stats = app.control.inspect(timeout=5.0).stats() or {}
    return sum(int(node["umbel"]["counters"]["election_calls"]) for node in stats.values())


def _wait(condition: Callable[[], bool], workers: Sequence[Running], what: str) -> None:
    ends = time.monotonic() + START_S
    while not condition():
        for worker in workers:
            worker.check()
        if time.monotonic() > ends:
            raise BenchmarkFailed(f"waited {START_S:g} s in vain for {what}")
        time.sleep(0.05)


def _listen_for(seconds: float) -> None:
    time.sleep(seconds)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [[*rows[0]], *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    padded = ([cell.rjust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join("  ".join(line) for line in padded)


def _cell(value: object) -> str:
    return "" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
