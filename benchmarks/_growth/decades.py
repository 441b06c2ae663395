"""Decades: what chords, groups, unique and limited tasks, revokes and retained failures cost by their number.

Each kind runs with 100, 1,000, 10,000 and 100,000 tasks on each broker, with a worker of two children. What
counts is the CPU of all who take part (client, worker, children, servers), from when the worker is idle until
the last task has run: it hardly depends on what else the machine does.

The exponent is the slope of the straight line through the logarithms of tasks and CPU (least squares): 1 is
linear, 2 quadratic. With it stands the steepest decade: the logarithm of what ten times as many cost, in
times of the cost of the size before. What is done once weighs more in small sizes, which makes the line
flatter: the last decades tell most.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import linear_regression
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks._harness.processes import CPU_TICK_S, BenchmarkFailed, Running, answer_of, ended_in_order
from benchmarks._throughput import tally
from benchmarks._throughput.contenders import UMBEL, Contender
from benchmarks._throughput.places import CHILDREN, TALLY
from benchmarks._throughput.servers import RABBITMQ, REDIS, Server

KINDS = ("chord", "group", "unique", "limits", "revokes", "failures")
BROKERS = ("sqlite", "redis", "rabbitmq")
RESULTS_VARIABLE = "BENCH_RESULTS"  # where results are, if not in the broker
FIRST = 2  # tasks that open the client's connections
SIZES = (100, 1_000, 10_000, 100_000)
EXPONENT_MAX = 1.1
SIDE = "benchmarks._growth.decades_side"
RUN_S, LOOK_EVERY_S = 3600.0, 0.05
REPEATED = 5_000  # tasks at least, so that the kernel's clock can tell what a small size costs
SETTLE_S = 0.5  # after the last task has run, until it is settled
NOT_SUPPORTED = {("rabbitmq", "unique"), ("rabbitmq", "limits")}  # `Capabilities.reasons` says why


@dataclass(frozen=True, slots=True)
class Row:
    broker: str
    kind: str
    cpu_s: dict[int, float]  # by size
    took_s: dict[int, float]
    peak_mib: dict[int, float]  # of the client

    @property
    def exponent(self) -> float:
        return slope(self.cpu_s)

    @property
    def steepest(self) -> float:
        return max(decades(self.cpu_s))

    @property
    def met(self) -> bool:
        return self.exponent <= EXPONENT_MAX


def slope(cpu_s: Mapping[int, float]) -> float:
    """Of the straight line through the logarithms."""
    if len(cpu_s) < 2:
        return math.nan
    return linear_regression(
        [math.log10(size) for size in cpu_s], [math.log10(s) for s in cpu_s.values()]
    ).slope


def decades(cpu_s: Mapping[int, float]) -> list[float]:
    """The exponent from each size to the next."""
    sizes = sorted(cpu_s)
    return [
        math.log10(cpu_s[more] / cpu_s[less]) / math.log10(more / less) for less, more in pairwise(sizes)
    ] or [math.nan]


@contextmanager
def _place(broker: str, kind: str, home: Path) -> Iterator[tuple[str, str, Sequence[Server]]]:
    """The addresses of broker and results, both empty, and the servers behind them."""
    if broker == "sqlite":
        yield f"sqlite:///{home}/queue.db", "", ()
    elif broker == "redis":
        yield REDIS.empty_url(), "", (REDIS,)
    elif kind == "chord":  # something must count its parts
        yield RABBITMQ.empty_url(), REDIS.empty_url(), (RABBITMQ, REDIS)
    else:
        yield RABBITMQ.empty_url(), "", (RABBITMQ,)


def run(broker: str, kind: str, size: int) -> tuple[float, float, float]:
    """The CPU of all in seconds, the time that it took, and the most memory of the client."""
    with TemporaryDirectory(prefix="umbel-bench-") as name, _place(broker, kind, Path(name)) as place:
        home, (url, results, servers) = Path(name), place
        contender = replace(
            UMBEL,
            module=SIDE,
            worker=f"umbel worker -A {SIDE}:app -c {CHILDREN} -l critical",
            variables={RESULTS_VARIABLE: results} if results else {},
        )
        with contender.working(home, url) as worker:
            _ask(contender, home, url, kind, FIRST, 1)  # until the worker has started
            ran = _wait_until_ran(home, _tasks(kind, FIRST, 1), worker)
            time.sleep(SETTLE_S)
            cpu_s, began = _cpu_s(worker, servers), time.monotonic()
            times = max(1, REPEATED // size)
            client = _ask(contender, home, url, kind, size, times)
            _wait_until_ran(home, ran + _tasks(kind, size, times), worker)
            took_s = time.monotonic() - began
            time.sleep(SETTLE_S)
            used_s = _cpu_s(worker, servers) - cpu_s + client["cpu_s"]
    return max(used_s, CPU_TICK_S) / times, took_s / times, client["peak_mib"]


def _tasks(kind: str, size: int, times: int) -> int:
    """How many tasks a client's run leaves in the tally, with the few that it begins with."""
    return 1 + times if kind == "revokes" else FIRST + size * times


def _cpu_s(worker: Running, servers: Sequence[Server]) -> float:
    return worker.cpu_s() + sum(server.cpu_s() for server in servers)


def _ask(contender: Contender, home: Path, url: str, kind: str, size: int, times: int) -> dict[str, float]:
    answer: dict[str, float] = answer_of(
        "umbel-client",
        [contender.python, "-m", SIDE, kind, str(size), str(times)],
        environment=contender._environment(home, url),
        directory=home,
        timeout_s=RUN_S,
    )
    return answer


def _wait_until_ran(home: Path, least: int, worker: Running) -> int:
    deadline = time.monotonic() + RUN_S
    while (ran := tally.read(home / TALLY).tasks) < least:
        worker.check()
        if time.monotonic() > deadline:
            raise worker.failed(f"ran {ran:,} of {least:,} tasks within {RUN_S:g} s")
        time.sleep(LOOK_EVERY_S)
    return ran


def measure(brokers: Sequence[str], kinds: Sequence[str], most: int) -> Iterator[Row]:
    for kind in kinds:
        for broker in brokers:
            if (broker, kind) in NOT_SUPPORTED:
                continue
            row = Row(broker, kind, {}, {}, {})
            for size in SIZES:
                if size > most:
                    break
                found = run(broker, kind, size)
                row.cpu_s[size], row.took_s[size], row.peak_mib[size] = found
                print(
                    f"{kind}, {broker}, {size:,}: {found[0]:.2f} s of CPU [{found[1]:.1f} s]", file=sys.stderr
                )
            yield row


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="growth.py --decades", description=__doc__)
    parser.add_argument("--broker", action="append", choices=BROKERS, help="this one; may be repeated")
    parser.add_argument("--kind", action="append", choices=KINDS, help="this one; may be repeated")
    parser.add_argument("--most", type=int, default=SIZES[-1], help="leave larger sizes out")
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    chosen = parser.parse_args(arguments)
    try:
        with ended_in_order():
            rows = list(measure(chosen.broker or BROKERS, chosen.kind or KINDS, chosen.most))
    except BenchmarkFailed as error:
        print(f"growth: {error}", file=sys.stderr)
        return 1
    print(json.dumps([_object(row) for row in rows]) if chosen.json else "\n".join(_lines(rows, chosen)))
    return 0


def _object(row: Row) -> dict[str, Any]:
    return {
        "kind": row.kind,
        "broker": row.broker,
        "cpu_s": row.cpu_s,
        "took_s": row.took_s,
        "client_peak_mib": row.peak_mib,
        "exponent": round(row.exponent, 3),
        "decades": [round(one, 3) for one in decades(row.cpu_s)],
        "met": row.met,
    }


def _lines(rows: Sequence[Row], chosen: argparse.Namespace) -> Iterator[str]:
    sizes = [size for size in SIZES if size <= chosen.most]
    yield "CPU of client, worker and servers, µs a task, by the number of tasks"
    yield "  ".join([f"{'':8} {'':9}", *(f"{size:>8,}" for size in sizes), "exponent", "steepest decade"])
    for row in rows:
        cells = [f"{row.cpu_s[size] / size * 1e6:8,.0f}" for size in row.cpu_s]
        verdict = "" if row.met else f"  OVER {EXPONENT_MAX}"
        yield "  ".join(
            [f"{row.kind:8} {row.broker:9}", *cells, f"{row.exponent:8.2f}", f"{row.steepest:15.2f}{verdict}"]
        )
    for broker, kind in sorted(NOT_SUPPORTED):
        if broker in (chosen.broker or BROKERS) and kind in (chosen.kind or KINDS):
            yield f"{kind:8} {broker:9}  not supported"
