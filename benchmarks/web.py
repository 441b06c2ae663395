"""What does the dashboard cost under a day's load at once, beside Flower on the same stream?

Each monitor in its turn, on a Redis of its own: the events of 1,000 nodes and 100,000 tasks, 5,000 a
second; then the same rate again while 50 visitors have a page open and one asks for all of them in turn.
Memory, CPU an event, and how long every page took. Last, what an open dashboard costs a worker: no-op tasks
drained with it and without it, in turn; `-E` in both, so that the same events are sent.

    scripts/setup interop; scripts/setup servers
    .venv/bin/python benchmarks/web.py [--json] [--nodes N] [--tasks N] [--rate N] [--seconds N] [--rounds N]

Umbel's visitors follow its stream; Flower has none, so its visitors load the list of tasks every second.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._harness.processes import Running, answer_of, running, wait_for
from tests.servers.ports import free_port
from tests.servers.redis import RedisServer

ROOT = Path(__file__).resolve().parent.parent
VISITORS = 50
PAGE_MAX_S = 0.3
DRAIN_AT_LEAST = 0.9
DRAINED = 40_000
STREAM_S = 3600.0
COLUMNS = "&".join(f"columns[{number}][data]=name" for number in range(8))


@dataclass(frozen=True)
class Monitor:
    name: str
    python: Path
    arguments: Sequence[str]
    ready: str
    stream: str
    pages: Sequence[str]
    task_list: str

    def command(self, url: str, port: int, tasks: int) -> list[str]:
        given = {"url": url, "port": str(port), "tasks": str(tasks)}
        return [str(self.python), *(one.format(**given) for one in self.arguments)]


UMBEL = Monitor(
    "umbel",
    ROOT / ".venv/bin/python",
    ("-m", "umbel", "web", "-b", "{url}", "--port", "{port}", "--no-login", "--state", "web.db"),
    "/healthcheck",
    "/api/v1/stream",
    ("/tasks", "/", "/cluster", "/queues", "/failures", "/schedule", "/elections", "/audit", "/api/v1/tasks"),
    "/tasks",
)
ORDER = "order[0][column]=0&order[0][dir]=desc"
FLOWER_TASKS = f"/tasks/datatable?draw=1&start=0&length=15&search[value]=&{ORDER}&{COLUMNS}"
FLOWER = Monitor(
    "flower",
    ROOT / ".venv-celery/bin/python",
    ("-m", "celery", "-b", "{url}", "flower", "--address=127.0.0.1", "--port={port}", "--max_tasks={tasks}"),
    "/healthcheck",
    "-",
    (FLOWER_TASKS, "/workers", "/tasks", "/api/tasks?limit=100"),
    FLOWER_TASKS,
)


def main() -> int:
    options = _options()
    found: dict[str, Any] = {one.name: watched(one, options) for one in (UMBEL, FLOWER)}
    found["drain"] = drained(options.rounds)
    found["met"] = judged(found)
    print(json.dumps(found) if options.json else as_text(found, options))
    return 0 if all(found["met"].values()) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--rate", type=int, default=5000, help="events a second")
    parser.add_argument("--seconds", type=float, default=40.0, help="how long pages are asked for")
    parser.add_argument("--rounds", type=int, default=5, help="of the drain")
    return parser.parse_args()


# -- one monitor ---------------------------------------------------------------------------------------


def watched(monitor: Monitor, options: argparse.Namespace) -> dict[str, Any]:
    with _a_redis() as (redis, home):
        port = free_port()
        command = monitor.command(redis.url, port, options.tasks)
        with running(monitor.name, command, environment=_environment(), directory=home) as process:
            wait_for(lambda: _answers(port, monitor.ready), "answer", process)
            empty_bytes = process.pss_bytes()
            filled = _fill(redis.url, home, process, options)
            visits = _visit(monitor, redis.url, port, home, options)
            return {
                **filled,
                "pages": visits["pages"],
                "broken_streams": visits["broken"],
                "task_list_s": visits["pages"][monitor.task_list]["median_s"],
                "empty_bytes": empty_bytes,
                "bytes": process.pss_bytes(),
            }


def _fill(url: str, home: Path, process: Running, options: argparse.Namespace) -> dict[str, float]:
    used_s = process.cpu_s()
    told = answer_of(
        "stream",
        _stream(url, options.nodes, options.tasks, options.rate),
        environment=_environment(),
        directory=home,
        timeout_s=STREAM_S,
    )
    _until_idle(process)
    cpu_s = process.cpu_s() - used_s
    return {
        "events": told["events"],
        "told_per_s": told["events"] / told["seconds"],
        "cpu_us_per_event": cpu_s / told["events"] * 1e6,
    }


def _visit(monitor: Monitor, url: str, port: int, home: Path, options: argparse.Namespace) -> dict[str, Any]:
    """While the stream goes on."""
    seconds = str(options.seconds)
    visit = [
        sys.executable,
        "-m",
        "benchmarks._web.visitors",
        f"http://127.0.0.1:{port}",
        str(VISITORS),
        seconds,
        "0",
    ]
    going_on = _stream(url, options.nodes, 10 * options.tasks, options.rate)
    with running("stream", going_on, environment=_environment(), directory=home):
        visits: dict[str, Any] = answer_of(
            "visitors",
            [*visit, monitor.stream, *monitor.pages],
            environment=_environment(),
            directory=home,
            timeout_s=STREAM_S,
        )
    return visits


def _stream(url: str, nodes: int, tasks: int, rate: int) -> list[str]:
    return [sys.executable, "-m", "benchmarks._web.stream", url, str(nodes), str(tasks), str(rate)]


def _until_idle(process: Running) -> None:
    """A monitor that fell behind is given the time to catch up: it counts as its CPU."""
    before = -1.0
    while process.cpu_s() - before > 0.2:
        before = process.cpu_s()
        time.sleep(1.0)


# -- what it costs a worker ----------------------------------------------------------------------------


def drained(rounds: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {"with": [], "without": []}
    for number in range(rounds):
        kinds = ["with", "without"]
        for kind in kinds if number % 2 else reversed(kinds):
            found[kind].append(_drain(is_watched=kind == "with"))
    ratios = [one / other for one, other in zip(found["with"], found["without"], strict=True)]
    return {
        **{kind: median(values) for kind, values in found.items()},
        "ratio": median(ratios),
        "ratios": ratios,
    }


def _drain(*, is_watched: bool) -> float:
    """Tasks a second."""
    with _a_redis() as (redis, home):
        environment = _environment() | {"BENCH_URL": redis.url, "BROKER_URL": redis.url}
        send = "from benchmarks._web.drained import app, noop; "
        send += f"[app.send_many(noop.s() for _ in range(1000)) for _ in range({DRAINED // 1000})]"
        subprocess.run([sys.executable, "-c", send], check=True, cwd=home, env=environment)
        port = free_port()
        with _watching(redis.url, port, home, is_watched=is_watched):
            worker = [sys.executable, "-m", "umbel", "worker", "-A", "benchmarks._web.drained:app"]
            began = time.monotonic()
            with running(
                "worker", [*worker, "-c", "2", "-E", "-l", "warning"], environment=environment, directory=home
            ) as process:
                wait_for(lambda: _waiting(redis) < DRAINED, "begin", process)
                began, left = time.monotonic(), _waiting(redis)
                wait_for(lambda: _waiting(redis) == 0, "drain", process)
                return left / (time.monotonic() - began)


@contextmanager
def _watching(url: str, port: int, home: Path, *, is_watched: bool) -> Iterator[None]:
    """A dashboard with one page open: it follows the stream, and fetches its figures once a second."""
    if not is_watched:
        yield
        return
    command = UMBEL.command(url, port, 0)
    with running("web", command, environment=_environment(), directory=home) as process:
        wait_for(lambda: _answers(port, UMBEL.ready), "answer", process)
        visit = [sys.executable, "-m", "benchmarks._web.visitors", f"http://127.0.0.1:{port}"]
        visit += ["1", str(STREAM_S), "1", UMBEL.stream, "/?part=figures"]
        with running("visitor", visit, environment=_environment(), directory=home):
            yield


def _waiting(redis: RedisServer) -> int:
    answer = redis.ask("LLEN", "celery")
    assert isinstance(answer, int)
    return answer


# -- what comes of it ----------------------------------------------------------------------------------


def judged(found: Mapping[str, Any]) -> dict[str, bool]:
    umbel = found["umbel"]
    return {
        "every page within 300 ms at the median": all(
            page["median_s"] <= PAGE_MAX_S for page in umbel["pages"].values()
        ),
        "all streams stay open": not umbel["broken_streams"],
        "a worker keeps 90 % of its drain": found["drain"]["ratio"] >= DRAIN_AT_LEAST,
    }


def as_text(found: Mapping[str, Any], options: argparse.Namespace) -> str:
    lines = [
        f"{options.nodes} nodes, {options.tasks} tasks, {options.rate} events a second, {VISITORS} visitors",
        "",
        f"{'':24}{'umbel':>12}{'flower':>12}",
    ]
    rows: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
        ("CPU an event, µs", lambda one: f"{one['cpu_us_per_event']:.0f}"),
        ("memory, empty, MiB", lambda one: f"{one['empty_bytes'] / 2**20:.0f}"),
        ("memory, full, MiB", lambda one: f"{one['bytes'] / 2**20:.0f}"),
        ("list of tasks, ms", lambda one: f"{one['task_list_s'] * 1000:.0f}"),
    )
    lines += [f"{title:24}{show(found['umbel']):>12}{show(found['flower']):>12}" for title, show in rows]
    for name in ("umbel", "flower"):
        lines += ["", f"{name}: answers while all that goes on, ms (median, longest, how many)"]
        for path, page in found[name]["pages"].items():
            times = f"{page['median_s'] * 1000:8.0f} {page['longest_s'] * 1000:8.0f} {page['count']:6}"
            lines.append(f"    {re.sub('[?].*', '', path):24}{times}")
    drain = found["drain"]
    lines += [
        "",
        f"drain with it {drain['with']:.0f}/s, without {drain['without']:.0f}/s: {drain['ratio']:.2f}",
    ]
    lines += ["", *(f"{'met' if met else 'NOT MET':8} {what}" for what, met in found["met"].items())]
    return "\n".join(lines)


# -- places --------------------------------------------------------------------------------------------


@contextmanager
def _a_redis() -> Iterator[tuple[RedisServer, Path]]:
    with tempfile.TemporaryDirectory(prefix="umbel-web-bench-") as name:
        redis = RedisServer(Path(name))
        redis.start()
        try:
            yield redis, Path(name)
        finally:
            redis.stop()


def _environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    return {**os.environ, "PYTHONPATH": paths, "FLOWER_UNAUTHENTICATED_API": "true"}


def _answers(port: int, path: str) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


if __name__ == "__main__":
    sys.exit(main())
