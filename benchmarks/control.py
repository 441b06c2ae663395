"""How soon does a worker answer `ping`, whatever it is doing?

200 pings, one after the other, from one client, on each broker. A worker with two children: while it
is idle, while short tasks saturate it, while its children are blocked, and while it drains after a
SIGTERM. A worker with the asyncio pool, whose mailbox has a connection and a thread of its own: with
1,000 tasks that wait and one that holds their loop for 2 s at a time, and while nothing but the
mailbox gets through to the broker. The target is 100 ms at the 99th percentile.

    scripts/setup servers
    .venv/bin/python benchmarks/control.py [--json] [--pings N] [--only sqlite]

Redis keeps nothing on disk here: with `appendfsync always` every answer would wait for the disk.
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
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.cluster import Cluster
from tests.scenarios.places import place
from tests.servers.way import Way
from tests.waiting import wait_until
from umbel.launch.preparation import node_name
from umbel.launch.workers import MAILBOX

TASKS_FILE = Path(__file__).resolve().parent.parent / "tests" / "scenarios" / "control_tasks.py"
BROKERS = ("sqlite", "redis", "amqp")
NODE = "asked"
SHORT_TASKS, GREEN_TASKS = 60_000, 1000
TARGET_MS = 100.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pings", type=int, default=200)
    parser.add_argument("--only", choices=BROKERS)
    options = parser.parse_args()
    rows = []
    for broker in [options.only] if options.only else BROKERS:
        with TemporaryDirectory() as home, place(broker, Path(home), durable=False) as where:
            directory = Path(home)
            with Cluster(directory, TASKS_FILE, broker=where.broker, backend=where.backend) as cluster:
                for name, situation in SITUATIONS.items():
                    if broker == "sqlite" and situation is link_down:
                        continue  # there is no link
                    with situation(cluster, directory / name.replace(" ", "-")):
                        rows.append({"broker": broker, "while": name, **measure(cluster, options.pings)})
                        show(rows[-1], as_json=options.json)
    if options.json:
        print(json.dumps(rows, indent=2))


def measure(cluster: Cluster, pings: int) -> dict[str, float]:
    """The times that so many pings take, in milliseconds."""
    node = node_name(NODE)
    cluster.app.control.ask("ping", destination=[node], timeout=30.0)  # opens the caller's connection
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
        wait_until(lambda: "waiting for running tasks to finish" in cluster.log(NODE), what="it to drain")
        yield


@contextmanager
def green(cluster: Cluster, home: Path) -> Iterator[None]:
    home.mkdir()
    cluster.workers.pop(NODE).wait(60)  # it has drained
    flags = ("-P", "asyncio", "-c", str(GREEN_TASKS + 1), "-Q", "green")
    cluster.start_worker(NODE, *flags, worker_prefetch_max=2 * GREEN_TASKS)
    waits = cluster.app.tasks["control_tasks.waits_in_loop"]
    gate = home / "gate"
    cluster.app.send_many(waits.s(str(gate)).set(queue="green") for _ in range(GREEN_TASKS))
    wait_until(lambda: _running(cluster) >= GREEN_TASKS, what="all to run", deadline_s=60)
    holds = cluster.app.tasks["control_tasks.holds_its_loop"]
    marks = [home / f"started-{number}" for number in range(30)]
    cluster.app.send_many(holds.s(2.0, str(mark)).set(queue="green") for mark in marks)
    wait_until(marks[0].exists, what="the loop to be held", deadline_s=60)
    yield
    gate.touch()
    cluster.kill_worker(NODE)


def _running(cluster: Cluster) -> int:
    node = node_name(NODE)
    answers = cluster.app.control.ask("stats", destination=[node], timeout=30.0)
    return len(answers.replies[node]["pool"]["running"])


@contextmanager
def link_down(cluster: Cluster, _: Path) -> Iterator[None]:
    address = urlsplit(cluster.app.settings.broker)
    way = Way(address.port or 0)
    through = address._replace(netloc=address.netloc.replace(f":{address.port}", f":{way.port}")).geturl()
    cluster.start_worker(NODE, "-P", "asyncio", "-c", "2", "-Q", "quiet", broker=through)
    way.silence_all_but(MAILBOX.encode())
    yield
    cluster.kill_worker(NODE)
    way.end()


SITUATIONS: dict[str, Callable[[Cluster, Path], AbstractContextManager[None]]] = {
    "idle": idle,
    "saturated": saturated,
    "blocked": blocked,
    "draining": draining,
    "green pool": green,
    "link down": link_down,
}

if __name__ == "__main__":
    main()
