"""How quickly does history get from the log to tables, beside DuckDB, and does that grow evenly?

Lakes of 1, 5 and 20 million synthetic events (4.3 a task, 1 % twice, 1 % late, 6 % of tasks tried
again). On each, one after the other: all tables by Spark as of another commit (`--against`), from the files
as recorded; the same files written by bucket, which is what housekeeping does; from those all tables by
Spark, then all tables once more when 100,000 events have come, all tables by processes of this machine
without Java, and the table `tasks` alone by Spark; that table by DuckDB, row for row the same; the stream
over the files as recorded.
The recorder writes a lake from the embedded broker's log of a million events, and one worker makes events
as fast as it can run tasks that do nothing: each pool in turn, the fastest counts. `--steps recorder` does
that alone, within two minutes.

    .venv/bin/python benchmarks/pipeline.py [--json] [--millions 1 5 20] [--rounds N] [--scale 0.01]
        [--against COMMIT] [--steps before bucket all increment local tasks duckdb stream recorder]

Rates are events per second of the build alone: starting Java, some seconds, is told apart. Peak memory
and seconds of CPU are those of all processes of a step together; on a machine that others use too, CPU
compares two steps better than time does. `--lakes DIR` keeps the lakes, and takes those that are there.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._harness.benchmark import ROOT
from benchmarks._harness.checkout import checkout
from benchmarks._harness.processes import BenchmarkFailed, ended_in_order
from benchmarks._pipeline.measuring import Measured, measured
from benchmarks._pipeline.synthetic import LATER, hour_of

MILLION = 1_000_000
LATER_EVENTS = 100_000
WORKED = 40_000
WORKERS = ("-P prefork", "-P prefork -c 1", "-P threads -c 2", "-P solo", "-P asyncio")
"""The fastest of these is what the recorder is held against."""

LAKE_STEPS = ("before", "bucket", "all", "increment", "local", "tasks", "duckdb", "stream")
STEPS = (*LAKE_STEPS, "recorder")
TARGETS = {
    "all_events_per_s": ("at least", 220_000.0),
    "all_vs_before": ("at least", 4.0),
    "increment_of_all": ("at most", 0.1),
    "stream_events_per_s": ("at least", 120_000.0),
    "growth": ("at most", 4.4),
    "memory_gib": ("at most", 3.0),
    "recorder_vs_worker": ("at least", 2.0),
}


@dataclass(frozen=True)
class Size:
    """What was measured on one lake; medians over the rounds."""

    events: int
    results: dict[str, Measured]

    def ratio(self, step: str, peer: str) -> float | None:
        ours, theirs = self.results.get(step), self.results.get(peer)
        return ours.rate / theirs.rate if ours and theirs else None


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        with (
            ended_in_order(),
            checkout(ROOT, options.against) if options.against else nullcontext(("", None)) as (_, source),
            tempfile.TemporaryDirectory(prefix="umbel-bench-", dir=options.dir) as home,
        ):
            findings = run(Path(home), options, source)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BenchmarkFailed as error:
        print(f"pipeline: {error}", file=sys.stderr)
        return 1
    print(json.dumps(findings) if options.json else as_text(findings))
    return 0


def run(home: Path, options: argparse.Namespace, source: Path | None = None) -> dict[str, Any]:
    """`source`: of the commit that is measured beside this one."""
    scale = options.scale
    flow = _measure_flow(home, options) if "recorder" in options.steps else {}
    millions = options.millions if set(options.steps) & set(LAKE_STEPS) else []
    sizes = [_measure_lake(home, round(count * MILLION * scale), options, source) for count in millions]
    return {
        "sizes": [
            {
                "events": size.events,
                "tasks_vs_duckdb": size.ratio("tasks", "duckdb"),
                **{name: one.as_object() for name, one in size.results.items()},
            }
            for size in sizes
        ],
        **{name: one.as_object() for name, one in flow.items()},
        "targets": _judged(sizes, flow["recorder"].rate / flow["worker"].rate if flow else None),
    }


def _measure_flow(home: Path, options: argparse.Namespace) -> dict[str, Measured]:
    """A million events recorded, and the worker that makes events most quickly."""
    recorded, worked = max(1000, round(MILLION * options.scale)), max(200, round(WORKED * options.scale))
    recorders, workers = [], []
    for _ in range(options.rounds):
        recorders.append(measured("recorder", home, "recorder", recorded))
        workers.append([measured(f"worker {one}", home, "worker", worked, *one.split()) for one in WORKERS])
    by_flags = [Measured.median(found) for found in zip(*workers, strict=True)]
    fastest = max(by_flags, key=lambda one: one.rate)
    return {"recorder": Measured.median(recorders), "worker": fastest}


def _measure_lake(home: Path, events: int, options: argparse.Namespace, source: Path | None) -> Size:
    """Round by round each contender in turn, so that a noisy neighbour meets all of them."""
    lake, count = _lake(home, events, options)
    dealt = lake.with_name(f"{lake.name}-bucketed")

    def built(name: str, where: Path, *more: str, source: Path | None = None) -> Measured:
        return measured(name, home, "umbel", "build", "--lake", where, *more, source=source)

    steps: dict[str, Callable[[], Measured]] = {
        "bucket": lambda: _bucket(home, lake, dealt),
        "all": lambda: built("all", dealt, "--afresh"),
        "increment": lambda: _increment(lake, dealt, lambda: built("increment", dealt)),
        "local": lambda: built("local", dealt, "--engine", "local", "--afresh"),
        "tasks": lambda: built("tasks", dealt, "--tables", "tasks", "--afresh"),
        "duckdb": lambda: measured("duckdb", home, "duckdb", lake),
        "stream": lambda: _stream(home, lake),
    }
    if source is not None:
        steps = {"before": lambda: built("before", lake, source=source), **steps}
    chosen = {name: step for name, step in steps.items() if name in options.steps}
    if chosen.keys() & {"all", "local", "tasks"} and "bucket" not in chosen and not dealt.exists():
        _bucket(home, lake, dealt)
    samples: dict[str, list[Measured]] = {name: [] for name in chosen}
    for _ in range(options.rounds):
        for name, step in chosen.items():
            found = step()
            samples[name].append(found if name == "increment" else found.over(count))
    return Size(count, {name: Measured.median(found) for name, found in samples.items()})


def _increment(lake: Path, dealt: Path, build: Callable[[], Measured]) -> Measured:
    """What has come since all was built; it is taken away again."""
    came = hour_of(dealt, 23) / "ev-synthetic-1-000000000000.parquet"
    came.parent.mkdir(parents=True, exist_ok=True)
    os.link(lake / LATER, came)
    try:
        return build().over(pq.read_metadata(came).num_rows)
    finally:
        came.unlink()


def _bucket(home: Path, lake: Path, dealt: Path) -> Measured:
    shutil.rmtree(dealt, ignore_errors=True)
    return measured("bucket", home, "bucket", dealt, lake)


def _lake(home: Path, events: int, options: argparse.Namespace) -> tuple[Path, int]:
    """A lake of so many events, made now unless it was kept; and how many it has."""
    lake = Path(options.lakes or home).resolve() / f"lake-{events}"
    told = lake / "made.json"
    if not told.exists() or not (lake / LATER).exists():
        shutil.rmtree(lake, ignore_errors=True)
        later = max(1, round(LATER_EVENTS * options.scale))
        made = measured("generate", home, "generate", lake, events, later)
        told.write_text(json.dumps({"events": made.events}))
    return lake, int(json.loads(told.read_text())["events"])


def _stream(home: Path, lake: Path) -> Measured:
    """Over all files, as if none had been taken before."""
    shutil.rmtree(lake / "tables", ignore_errors=True)
    return measured("stream", home, "umbel", "build", "--lake", lake, "--follow", "--until-caught-up")


def _judged(sizes: Sequence[Size], recorder_vs_worker: float | None) -> dict[str, Any]:
    last = sizes[-1] if sizes else Size(0, {})
    whole, more, stream = (last.results.get(name) for name in ("all", "increment", "stream"))
    found: dict[str, float | None] = {
        "all_events_per_s": whole.rate if whole else None,
        "all_vs_before": last.ratio("all", "before"),
        "increment_of_all": more.seconds / whole.seconds if more and whole else None,
        "stream_events_per_s": stream.rate if stream else None,
        "growth": None,
        "memory_gib": whole.peak_mib / 1024 if whole else None,
        "recorder_vs_worker": recorder_vs_worker,
    }
    before = [size for size in sizes if "all" in size.results and 3.5 <= last.events / size.events <= 4.5]
    if before and whole:
        found["growth"] = whole.seconds / before[0].results["all"].seconds
    return {
        name: {"measured": value, how.replace(" ", "_"): limit, "met": _met(value, how, limit)}
        for name, value in found.items()
        for how, limit in [TARGETS[name]]
    }


def _met(value: float | None, how: str, limit: float) -> bool | None:
    if value is None:
        return None
    return value >= limit if how == "at least" else value <= limit


def as_text(findings: dict[str, Any]) -> str:
    heads = f"{'events/s':>12}{'seconds':>10}{'start s':>9}{'CPU s':>9}{'peak MiB':>10}"
    lines = [f"{'events':>12}  {'step':<10}{heads}"]
    for size in findings["sizes"]:
        lines += [_line(size["events"], name, size[name]) for name in STEPS if name in size]
    flow = [name for name in ("recorder", "worker") if name in findings]
    lines += [_line(findings[name]["events"], name, findings[name]) for name in flow]
    lines.append("")
    for name, target in findings["targets"].items():
        value = target["measured"]
        how = "at least" if "at_least" in target else "at most"
        said = "not measured" if value is None else f"{value:.2f}"
        met = {True: "met", False: "missed", None: "open"}[target["met"]]
        lines.append(f"{name:<20} {said:>12}   {how} {target.get('at_least', target.get('at_most'))}: {met}")
    return "\n".join(lines)


def _line(events: int, name: str, one: dict[str, Any]) -> str:
    return (
        f"{events:>12,}  {name:<10}{one['events_per_s']:>12,.0f}{one['seconds']:>10.2f}"
        f"{one['start_s']:>9.1f}{one['cpu_s']:>9.1f}{one['peak_mib']:>10,.0f}"
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="from the log to tables, beside DuckDB")
    parser.add_argument(
        "--millions", type=float, nargs="+", default=[1.0, 5.0, 20.0], help="sizes of the lakes"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="all counts times this, for trying it out")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--against", metavar="COMMIT", help="build beside the package of that commit")
    parser.add_argument("--dir", help="where lakes are made and built; some 4 GB for 20 million events")
    parser.add_argument("--lakes", help="keep the lakes here, and take those that are here already")
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    options = parser.parse_args(arguments)
    options.millions = sorted(options.millions)
    return options


if __name__ == "__main__":
    sys.exit(main())
