"""What do typed arguments and results cost, per call?

One process, no broker: from the call to its message (send), and from the message to the stored result
(run), for the same order as a map that nobody checks, as a map made and read by hand with pydantic in the
task (what one does without typed arguments), and as an argument that is annotated with a dataclass, a
`msgspec.Struct` and a model of pydantic. Processor time; the least of many rounds counts.

    .venv/bin/python benchmarks/typed_arguments.py [--json] [--calls N] [--rounds N]
    .venv/bin/python benchmarks/typed_arguments.py --plain-since REV

The second counts the processor's instructions (valgrind) of one call of a task whose signature is plain,
sent, run and read in this process, here and at an older revision.
"""

import argparse
import dataclasses
import datetime
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import msgspec
from pydantic import BaseModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._harness.checkout import checkout
from umbel import App
from umbel.app.running.tracer import Tracer
from umbel.pools.interface import Job

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass
class Line:
    name: str
    price: float


@dataclasses.dataclass
class Order:
    number: int
    customer: str
    at: datetime.datetime
    lines: list[Line]


class StructLine(msgspec.Struct):
    name: str
    price: float


class StructOrder(msgspec.Struct):
    number: int
    customer: str
    at: datetime.datetime
    lines: list[StructLine]


class ModelLine(BaseModel):
    name: str
    price: float


class ModelOrder(BaseModel):
    number: int
    customer: str
    at: datetime.datetime
    lines: list[ModelLine]


AT = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
LINES = [("tea", 1.5), ("milk", 0.9), ("bread", 2.25)]
app = App("typed", broker="sqlite:////nowhere/typed.db")


@app.task
def plain(number: int, customer: str) -> str:
    return f"{customer} {number}"


@app.task
def untyped(order: Any) -> Any:
    return order


@app.task
def by_hand(order: Any) -> Any:
    return ModelOrder.model_validate(order).model_dump(mode="json")


@app.task
def typed_dataclass(order: Order) -> Order:
    return order


@app.task
def typed_struct(order: StructOrder) -> StructOrder:
    return order


@app.task
def typed_model(order: ModelOrder) -> ModelOrder:
    return order


ORDER = Order(7, "Ada", AT, [Line(*one) for one in LINES])
STRUCT = StructOrder(7, "Ada", AT, [StructLine(*one) for one in LINES])
MODEL = ModelOrder(
    number=7, customer="Ada", at=AT, lines=[ModelLine(name=name, price=price) for name, price in LINES]
)
MAP = dataclasses.asdict(ORDER)
CASES: dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]] = {
    "plain signature": (plain, lambda: (7, "Ada")),
    "untyped map": (untyped, lambda: (MAP,)),
    "untyped dataclass": (untyped, lambda: (ORDER,)),
    "pydantic by hand": (by_hand, lambda: (MODEL.model_dump(mode="json"),)),
    "typed dataclass": (typed_dataclass, lambda: (ORDER,)),
    "typed Struct": (typed_struct, lambda: (STRUCT,)),
    "typed pydantic": (typed_model, lambda: (MODEL,)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--plain-since", metavar="REV")
    options = parser.parse_args()
    if options.plain_since:
        count_instructions(options.plain_since)
        return
    rows = measure(options.calls, options.rounds)
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    base = rows["untyped map"]
    for name, row in rows.items():
        send, run = row["send_us"], row["run_us"]
        ratio = f"{(send + run) / (base['send_us'] + base['run_us']):.2f}"
        print(f"{name:18} send {send:7.2f} us   run {run:7.2f} us   {ratio} times the untyped map")


def measure(calls: int, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds per call. The cases take turns, so that a busy moment hits them all."""
    tracer = Tracer(app, hostname="bench@here")
    jobs = {}
    for name, (task, arguments) in CASES.items():
        prepared = app.prepare(task.name, arguments(), {}, {})
        jobs[name] = Job(1, task.name, prepared.task_id, "umbel", prepared.outgoing.message)
        outcome = tracer(jobs[name])
        assert outcome.kind == "success", outcome
    best: dict[str, dict[str, float]] = {name: {} for name in CASES}
    for _ in range(rounds):
        for name, (task, arguments) in CASES.items():
            note(best[name], "send_us", calls, lambda: app.prepare(task.name, arguments(), {}, {}))  # noqa: B023
            note(best[name], "run_us", calls, lambda: tracer(jobs[name]))  # noqa: B023
    return best


def note(best: dict[str, float], what: str, calls: int, work: Callable[[], object]) -> None:
    began = process_time()
    for _ in range(calls):
        work()
    took_us = (process_time() - began) / calls * 1e6
    best[what] = min(best.get(what, took_us), took_us)


PROBE = """
import sys
from umbel import App
app = App("probe", broker="sqlite:////nowhere/probe.db")

@app.task
def add(a: int, b: int) -> int:
    return a + b

with app.eager():
    for _ in range(int(sys.argv[1])):
        add.delay(1, 2).get()
"""
FEW, MANY = 300, 1300


def count_instructions(revision: str) -> None:
    """Twice each: the difference of a few calls and many is what the calls cost, without the start."""
    with checkout(ROOT, revision) as (name, source):
        before, here = per_call(source), per_call(ROOT / "src")
    print(f"{name}: {before:,.0f} instructions a call; here: {here:,.0f} ({here / before - 1:+.2%})")


def per_call(source: Path) -> float:
    return (instructions(source, MANY) - instructions(source, FEW)) / (MANY - FEW)


def instructions(source: Path, calls: int) -> int:
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable, "-c", PROBE]
    variables = {**os.environ, "PYTHONPATH": str(source), "PYTHONHASHSEED": "0"}
    ran = subprocess.run([*command, str(calls)], env=variables, capture_output=True, text=True, check=True)
    found = re.search(r"Collected : (\d+)", ran.stderr)
    assert found, ran.stderr
    return int(found[1])


if __name__ == "__main__":
    main()
