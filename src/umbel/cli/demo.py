"""`umbel demo`: the main job on the embedded broker, in a minute, with nothing installed.

Two real workers in processes of their own, a broker file in a temporary directory, tasks of
several kinds. It watches the results come in, then says what was sent, what came back and what
the workers went through, and fails if anything is missing.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from umbel.cli import exits
from umbel.cli.options import json_option, print_json, print_table
from umbel.errors import UmbelError

if TYPE_CHECKING:
    from umbel.app.app import App
    from umbel.app.canvas import Signature

WORKERS = 2
CHILDREN = 2
DEADLINE_S = 55.0
STOP_S = 15.0
LOOK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    share: float  # of all tasks
    expected: str  # the state they must end in
    note: str


KINDS = (
    Kind("quick", 0.87, "SUCCESS", "adds two numbers"),
    Kind("slow", 0.05, "SUCCESS", "takes 20 ms"),
    Kind("awaited", 0.03, "SUCCESS", "async def, awaits 5 ms"),
    Kind("failing", 0.02, "FAILURE", "raises ValueError"),
    Kind("retried", 0.0285, "SUCCESS", "fails once, is tried again"),
    Kind("crashing", 0.0015, "SUCCESS", "kills its process once"),
)


@click.command("demo")
@click.option("--tasks", "count", type=click.IntRange(100, 1_000_000), default=2000, show_default=True)
@json_option
def command(count: int, as_json: bool) -> int:
    """See it work: two workers, 2,000 tasks, crashes and retries."""
    with tempfile.TemporaryDirectory(prefix="umbel-demo-") as directory, ExitStack() as stack:
        home = Path(directory)
        environment = {"UMBEL_BROKER": f"sqlite:///{home / 'demo.db'}", "UMBEL_RUN_DIR": str(home / "run")}
        environment |= {"UMBEL_LEASE_S": "5"}
        os.environ.update(environment)
        from umbel.cli.demo_tasks import app

        stack.callback(app.close)
        _note(f"starting {WORKERS} workers with {CHILDREN} children each on the embedded broker")
        workers = [stack.enter_context(_worker(f"demo{number}", home)) for number in range(1, WORKERS + 1)]
        began = time.perf_counter()
        sent = _send(app, home, count)
        _note(f"sent {len(sent)} tasks in {time.perf_counter() - began:.2f} s")
        states = _watch(app, sent, workers)
        took_s = time.perf_counter() - began
        counters = _worker_counters(home / "run")
        return _report(sent, states, counters, took_s, as_json=as_json)


def _send(app: "App", home: Path, count: int) -> dict[str, str]:
    """Send everything in one step; the kind of each task, by its id."""
    calls = [(kind.name, call) for kind in KINDS for call in _calls(app, kind, home, count)]
    # Mixed, so that the slow and the crashing ones meet the others.
    mixed = [call for start in range(7) for call in calls[start::7]]
    results = app.send_many(call for _kind, call in mixed)
    return {result.id: kind for (kind, _call), result in zip(mixed, results, strict=True)}


def _calls(app: "App", kind: Kind, home: Path, count: int) -> Iterator["Signature[Any]"]:
    task = app.tasks[f"umbel.cli.demo_tasks.{kind.name}"]
    for number in range(round(count * kind.share)):
        match kind.name:
            case "quick":
                yield task.s(number, number)
            case "slow":
                yield task.s(0.02)
            case "awaited":
                yield task.s(0.005)
            case "crashing":
                yield task.s(str(home / f"crash-{number}"))
            case _:
                yield task.s(number)


def _watch(app: "App", sent: Mapping[str, str], workers: list[subprocess.Popen[bytes]]) -> dict[str, str]:
    """Wait until every task has a final state; the state of each, by id."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from umbel.protocol.states import READY_STATES

    states: dict[str, str] = {}
    waiting = set(sent)
    deadline = time.monotonic() + DEADLINE_S
    columns = (TextColumn("running"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("tasks", total=len(sent))
        while waiting and time.monotonic() < deadline:
            for worker in workers:
                if worker.poll() is not None:
                    raise UmbelError(f"a worker of the demo ended with status {worker.returncode}")
            found = app.backend.read(list(waiting))
            states |= {one: kept.status for one, kept in found.items() if kept.status in READY_STATES}
            waiting -= states.keys()
            progress.update(bar, completed=len(states))
            time.sleep(LOOK_EVERY_S if waiting else 0)
    return states


@contextmanager
def _worker(name: str, home: Path) -> Iterator[subprocess.Popen[bytes]]:
    arguments = ["worker", "-A", "umbel.cli.demo_tasks:app", "-n", name, "-c", str(CHILDREN)]
    log = home / f"{name}.log"
    process = subprocess.Popen(
        [sys.executable, "-m", "umbel.cli.main", *arguments, "-f", str(log), "-l", "info"],
        stdin=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _worker_counters(run_directory: Path) -> dict[str, dict[str, int]]:
    """What each worker says it went through; asked until they have written down the end."""
    from umbel.worker.run_directory import REFRESH_S, read_states

    time.sleep(REFRESH_S * 1.5)
    return {state.node.partition("@")[0]: state.fields["counters"] for state in read_states(run_directory)}


def _report(
    sent: Mapping[str, str],
    states: Mapping[str, str],
    counters: Mapping[str, Mapping[str, int]],
    took_s: float,
    *,
    as_json: bool,
) -> int:
    ended = Counter((kind, states.get(task_id, "no result")) for task_id, kind in sent.items())
    rows = []
    as_expected = True
    for kind in KINDS:
        total = sum(1 for one in sent.values() if one == kind.name)
        right = ended[kind.name, kind.expected]
        as_expected = as_expected and right == total
        rows.append(
            (
                kind.name,
                kind.note,
                total,
                ended[kind.name, "SUCCESS"],
                ended[kind.name, "FAILURE"],
                total - right,
            )
        )
    totals = {name: sum(one[name] for one in counters.values()) for name in ("processed", *_SHOWN)}
    if as_json:
        print_json({"as_expected": as_expected, "took_s": took_s, "kinds": rows, "workers": dict(counters)})
    else:
        click.echo()
        print_table(("kind", "what it does", "sent", "succeeded", "failed", "unexpected"), rows)
        click.echo()
        workers = [
            (name, *(one[field] for field in ("processed", *_SHOWN))) for name, one in counters.items()
        ]
        workers.append(("together", *totals.values()))
        print_table(("worker", "runs", "retried", "processes died", "repeated runs", "dead letters"), workers)
        click.echo()
        missing = len(sent) - len(states)
        verdict = "every task ended as it should" if as_expected else f"{missing} tasks have no result"
        click.echo(f"{len(states)} of {len(sent)} tasks in {took_s:.1f} s: {verdict}")
    return exits.OK if as_expected else exits.FAILED


_SHOWN = ("retried", "children_died", "repeated", "buried")


def _note(text: str) -> None:
    click.echo(text, err=True)
