"""How soon does a worker answer `ping`, whatever it is doing?

One worker with two children on each broker. 200 pings, one after the other, from one client:
while the worker is idle, while short tasks saturate it, while its children are blocked, and while
it drains after a SIGTERM. The target is 100 ms at the 99th percentile.

    scripts/setup servers
    .venv/bin/python benchmarks/control.py [--json] [--pings N] [--only sqlite]
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.cluster import Cluster
from tests.scenarios.places import place
from tests.waiting import wait_until
from umbel.app.workers import node_name

TASKS_FILE = Path(__file__).resolve().parent.parent / "tests" / "scenarios" / "control_tasks.py"
BROKERS = ("sqlite", "redis", "amqp")
NODE = "asked"
SHORT_TASKS = 60_000
TARGET_MS = 100.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pings", type=int, default=200)
    parser.add_argument("--only", choices=BROKERS)
    options = parser.parse_args()
    rows = []
    for broker in [options.only] if options.only else BROKERS:
        with TemporaryDirectory() as home, place(broker, Path(home)) as where:
            directory = Path(home)
            with Cluster(directory, TASKS_FILE, broker=where.broker, backend=where.backend) as cluster:
                for name, situation in SITUATIONS.items():
                    with situation(cluster, directory / name.replace(" ", "-")):
                        rows.append({"broker": broker, "while": name, **measure(cluster, options.pings)})
                        show(rows[-1], as_json=options.json)
    if options.json:
        print(json.dumps(rows, indent=2))


def measure(cluster: Cluster, pings: int) -> dict[str, float]:
    """The times that so many pings take, in milliseconds."""
    node = node_name(NODE)
    times_ms: list[float] = []
    for _ in range(pings):
        began = perf_counter()
        answers = cluster.app.control.ask("ping", destination=[node], timeout=30.0)
        times_ms.append((perf_counter() - began) * 1000)
        assert answers.replies == {node: {"ok": "pong"}}
    times_ms.sort()
    places = {"p50": len(times_ms) // 2, "p99": int(len(times_ms) * 0.99), "max": -1}
    return {name: round(times_ms[min(at, len(times_ms) - 1)], 1) for name, at in places.items()}


def show(row: dict[str, object], *, as_json: bool) -> None:
    judged = "" if float(str(row["p99"])) <= TARGET_MS else f"  over {TARGET_MS:g} ms"
    times = "  ".join(f"{name} {row[name]:6} ms" for name in ("p50", "p99", "max"))
    text = f"{row['broker']:8}{row['while']:12}{times}"
    print(text + judged, file=sys.stderr if as_json else sys.stdout, flush=True)


@contextmanager
def idle(cluster: Cluster, _: Path) -> Iterator[None]:
    cluster.start_worker(NODE, "-c", "2")
    yield


@contextmanager
def saturated(cluster: Cluster, _: Path) -> Iterator[None]:
    add = cluster.app.tasks["control_tasks.add"]
    cluster.app.send_many(add.s(1, 1).set(ignore_result=True) for _ in range(SHORT_TASKS))
    yield
    cluster.umbel("queues", "purge", "celery", "--yes", check=False)


@contextmanager
def blocked(cluster: Cluster, home: Path) -> Iterator[None]:
    home.mkdir()
    for number in range(2):
        started = str(home / f"started-{number}")
        cluster.app.send_task("control_tasks.waits_for", [str(home / "gate"), started])
    wait_until(lambda: len(list(home.glob("started-*"))) == 2, what="both children to block", deadline_s=60)
    yield
    (home / "gate").touch()


@contextmanager
def draining(cluster: Cluster, home: Path) -> Iterator[None]:
    with blocked(cluster, home):
        cluster.workers[NODE].send_signal(signal.SIGTERM)
        wait_until(lambda: "waiting for running tasks" in cluster.log(NODE), what="it to drain")
        yield


SITUATIONS: dict[str, Callable[[Cluster, Path], AbstractContextManager[None]]] = {
    "idle": idle,
    "saturated": saturated,
    "blocked": blocked,
    "draining": draining,
}

if __name__ == "__main__":
    main()
