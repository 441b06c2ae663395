"""Measuring one step in a process of its own: its time, and the most memory that it and its children held."""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks._harness.benchmark import SOURCE, clean_environment
from benchmarks._harness.processes import BenchmarkFailed

LOOK_EVERY_S = 0.25
TIMEOUT_S = 3600.0
TAIL = 2000


@dataclass(frozen=True)
class Measured:
    """`seconds`: of the work itself, as the process told; `start_s`: what it took besides; `cpu_s`: all."""

    events: int
    seconds: float
    start_s: float
    cpu_s: float
    peak_mib: float

    @property
    def rate(self) -> float:
        return self.events / self.seconds

    def over(self, events: int) -> "Measured":
        return replace(self, events=events)

    def as_object(self) -> dict[str, float]:
        return {
            "events": self.events,
            "events_per_s": round(self.rate, 1),
            "seconds": round(self.seconds, 3),
            "start_s": round(self.start_s, 2),
            "cpu_s": round(self.cpu_s, 1),
            "peak_mib": round(self.peak_mib),
        }

    @staticmethod
    def median(found: Sequence["Measured"]) -> "Measured":
        return Measured(
            found[0].events,
            median(one.seconds for one in found),
            median(one.start_s for one in found),
            median(one.cpu_s for one in found),
            median(one.peak_mib for one in found),
        )


def measured(name: str, home: Path, step: str, *arguments: object, source: Path | None = None) -> Measured:
    """Run a step of `side.py`, or `umbel history`, and say how it went on stderr. `source`: if not this
    commit's."""
    print(f"{name}: begins at {time.strftime('%H:%M:%S')}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=home) as folder:
        if step == "umbel":
            command = ["-m", "umbel.cli.main", "history", *map(str, arguments), "--json"]
        else:
            place = [folder] if step in {"recorder", "worker"} else []
            command = ["-m", "benchmarks._pipeline.side", step, *place, *map(str, arguments)]
        told, took_s, family = _run(name, command, Path(folder), source or SOURCE)
    seconds, peak_mib = told["seconds"], family.peak_bytes / 2**20
    found = Measured(int(told["events"]), seconds, took_s - seconds, family.cpu_s, peak_mib)
    print(
        f"{name}: {found.events:,} events in {found.seconds:.2f} s, {found.rate:,.0f}/s,"
        f" {found.cpu_s:.1f} s of CPU, {found.peak_mib:,.0f} MiB",
        file=sys.stderr,
    )
    return found


def _run(
    name: str, command: Sequence[str], folder: Path, source: Path
) -> tuple[dict[str, Any], float, "Family"]:
    began = time.perf_counter()
    with (folder / "stderr").open("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=folder,
            env=clean_environment(source=source),
        )
        family = Family(process.pid)
        try:
            printed, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise BenchmarkFailed(f"{name} took longer than {TIMEOUT_S:g} s") from None
        finally:
            family.stop()
            if process.poll() is None:
                process.terminate()
                process.wait()
        took_s = time.perf_counter() - began
        if process.returncode != 0:
            errors.seek(0)
            raise BenchmarkFailed(f"{name} ended with status {process.returncode}\n{errors.read()[-TAIL:]}")
    return json.loads(printed), took_s, family


class Family:
    """Looks at a process and its descendants until told to stop.

    `peak_bytes`: the most memory they held together; `cpu_s`: what they used of the CPU. Java is not
    waited for by who started it, so its CPU is not in the sum that the system keeps for a parent. A process
    counts from the second look on: Java begins commands by a fork that shows Java's memory as its own.
    """

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._pid = pid
        self._cpu_s: dict[int, float] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    @property
    def cpu_s(self) -> float:
        return sum(self._cpu_s.values())

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stopped.wait(LOOK_EVERY_S):
            self.peak_bytes = max(self.peak_bytes, self._held_bytes())

    def _held_bytes(self) -> int:
        held = 0
        try:
            first = psutil.Process(self._pid)
            for one in (first, *first.children(recursive=True)):
                if one.pid in self._cpu_s:
                    held += one.memory_info().rss
                used = one.cpu_times()
                self._cpu_s[one.pid] = used.user + used.system
        except psutil.Error:
            return held
        return held
