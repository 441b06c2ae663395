"""Benchmark: the form that every benchmark of this project has.

A benchmark asks one question of several contenders. A round takes each stage in turn and lets
every contender run it before the next stage comes: A, B, A, B, so that a noisy neighbour or a hot
CPU hits all of them. After at least three rounds the medians are compared; see `measures.py`.

Umbel runs from the environment that runs the benchmark; peers run from `.venv-bench`, so that
their dependencies never mix with ours. Progress goes to stderr, the result to stdout: a table, or
one object with `--json`. The exit status says whether the benchmark could be run; whether targets
were met is part of its result, because a busy machine is not an error.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from benchmarks._harness.measures import Measure, Target
from benchmarks._harness.processes import BenchmarkFailed, ended_in_order
from benchmarks._harness.report import Findings, as_object, as_text

ROOT = Path(__file__).resolve().parent.parent.parent
PEERS_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
ROUNDS_MIN = 3


class Contender(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def is_peer(self) -> bool:
        """Whether it comes from the peers' environment."""
        ...

    def settings(self, home: Path) -> Mapping[str, str]:
        """What it runs with, for the reader."""
        ...


C = TypeVar("C", bound=Contender)

# A stage runs one contender in an empty directory, with so many tasks: the value of each measure, or none.
Stage = Callable[[C, Path, int], Mapping[str, float]]


@dataclass(frozen=True)
class Benchmark(Generic[C]):
    name: str
    question: str
    contenders: Sequence[C]  # the first is the subject, the others its peers
    stages: Mapping[str, Stage[C]]
    measures: Sequence[Measure]
    targets: Sequence[Target]
    tasks: int  # unless --tasks says otherwise
    notes: Sequence[str] = ()

    def main(self, arguments: Sequence[str] | None = None) -> int:
        options = self._parse(arguments)
        try:
            with ended_in_order():
                findings = self.run(rounds=options.rounds, tasks=options.tasks, only=options.only)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        except BenchmarkFailed as error:
            print(f"{self.name}: {error}", file=sys.stderr)
            return 1
        print(json.dumps(as_object(findings)) if options.json else as_text(findings))
        return 0

    def run(self, *, rounds: int, tasks: int, only: Iterable[str] | None = None) -> Findings:
        contenders = self._chosen(only)
        samples: dict[str, dict[str, list[float]]] = {one.name: {} for one in contenders}
        for number in range(1, rounds + 1):
            for title, stage in self.stages.items():
                for contender in contenders:
                    for measure, value in self._measure(number, title, stage, contender, tasks).items():
                        samples[contender.name].setdefault(measure, []).append(value)
        return Findings(
            benchmark=self.name,
            question=self.question,
            subject=self.contenders[0].name,
            rounds=rounds,
            tasks=tasks,
            measures=self.measures,
            targets=self.targets,
            notes=self.notes,
            samples=samples,
            settings={one.name: self._settings(one) for one in contenders},
        )

    def _chosen(self, only: Iterable[str] | None) -> list[C]:
        names = set(only or ()) or {one.name for one in self.contenders}
        contenders = [one for one in self.contenders if one.name in names]
        if any(one.is_peer for one in contenders) and not PEERS_PYTHON.exists():
            raise BenchmarkFailed("the peers are not installed; run: scripts/setup bench")
        return contenders

    def _measure(
        self, number: int, title: str, stage: Stage[C], contender: C, tasks: int
    ) -> Mapping[str, float]:
        began = time.monotonic()
        with _home() as home:
            measured = stage(contender, Path(home), tasks)
        if not measured:  # this stage is not for this contender
            return measured
        values = ", ".join(f"{name} {value:,.4g}" for name, value in measured.items())
        took_s = time.monotonic() - began
        print(f"round {number}, {title}, {contender.name}: {values} [{took_s:.1f} s]", file=sys.stderr)
        return measured

    def _settings(self, contender: C) -> Mapping[str, str]:
        with _home() as home:
            return contender.settings(Path(home))

    def _parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        names = [one.name for one in self.contenders]
        parser = argparse.ArgumentParser(description=self.question)
        parser.add_argument("--rounds", type=_at_least(ROUNDS_MIN), default=ROUNDS_MIN)
        parser.add_argument("--tasks", type=_at_least(1), default=self.tasks)
        parser.add_argument("--only", action="append", choices=names, help="run this one; may be repeated")
        parser.add_argument("--json", action="store_true", help="print one object instead of a table")
        return parser.parse_args(arguments)


def clean_environment(**more: str | Path) -> dict[str, str]:
    """This environment without what would change a contender's settings, and with `more`.

    The package is taken from beside the benchmark, so that another checkout's benchmark measures
    that checkout, whichever environment it runs in.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UMBEL_", "PYTHON"))}
    ours = f"{ROOT}{os.pathsep}{ROOT / 'src'}"
    return {**kept, "PYTHONPATH": ours, **{name: str(value) for name, value in more.items()}}


def _home() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="umbel-bench-")


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number
