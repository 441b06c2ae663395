"""Benchmark: the form that every benchmark of this project has.

A benchmark asks one question of several contenders. A round takes each stage in turn and lets
every contender run it before the next stage comes: A, B, then B, A, so that a noisy neighbour or a hot
CPU hits all of them. After at least three rounds the medians are compared; see `measures.py`.

With `--against COMMIT` the subject runs beside itself as it was at that commit, in the same rounds, and
the result says what a task costs now and cost then, and whether that is more than noise. The benchmark's
own code is that of this checkout for both.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from benchmarks._harness.checkout import checkout
from benchmarks._harness.measures import Measure, Target
from benchmarks._harness.processes import BenchmarkFailed, ended_in_order
from benchmarks._harness.report import Findings, as_object, as_text

ROOT = Path(__file__).resolve().parent.parent.parent
PEERS_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
SOURCE = ROOT / "src"
ROUNDS_MIN = 3
ROUNDS_AGAINST = 5


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
    at_commit: Callable[[C, str, Path], C] | None = None  # the subject by another name, from another source

    def main(self, arguments: Sequence[str] | None = None) -> int:
        options = self._parse(arguments)
        try:
            with ended_in_order(), self._former(options.against, options.only) as former:
                findings = self.run(
                    rounds=options.rounds or (ROUNDS_AGAINST if former else ROUNDS_MIN),
                    tasks=options.tasks,
                    only=options.only,
                    former=former,
                )
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        except BenchmarkFailed as error:
            print(f"{self.name}: {error}", file=sys.stderr)
            return 1
        print(json.dumps(as_object(findings)) if options.json else as_text(findings))
        return 0

    def run(
        self, *, rounds: int, tasks: int, only: Iterable[str] | None = None, former: C | None = None
    ) -> Findings:
        named = list(only or ())
        subject = self.contenders[0] if former is None else self._compared(named)
        stages = {title: stage for title, stage in self.stages.items() if title in named} or self.stages
        only = [name for name in named if name not in self.stages]
        contenders = self._chosen(only if former is None else only or [subject.name])
        if former is not None:
            contenders = [subject, former, *(one for one in contenders if one is not subject)]
        samples: dict[str, dict[str, list[float]]] = {one.name: {} for one in contenders}
        for number in range(1, rounds + 1):
            for title, stage in stages.items():
                for contender in contenders if number % 2 else reversed(contenders):
                    for measure, value in self._measure(number, title, stage, contender, tasks).items():
                        samples[contender.name].setdefault(measure, []).append(value)
        return Findings(
            benchmark=self.name,
            question=self.question,
            subject=subject.name,
            rounds=rounds,
            tasks=tasks,
            measures=self.measures,
            targets=self.targets,
            notes=self.notes,
            samples=samples,
            settings={one.name: self._settings(one) for one in contenders},
            former=former.name if former is not None else "",
        )

    @contextmanager
    def _former(self, commit: str | None, only: Iterable[str] | None) -> Iterator[C | None]:
        if commit is None or self.at_commit is None:
            yield None
            return
        with checkout(ROOT, commit) as (name, source):
            subject = self._compared(only)
            yield self.at_commit(subject, f"{subject.name}@{name}", source)

    def _compared(self, only: Iterable[str] | None) -> C:
        """What is run beside itself as it was: the first of ours that is named, else the subject."""
        named = set(only or ())
        ours = (one for one in self.contenders if one.name in named and not one.is_peer)
        return next(ours, self.contenders[0])

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
        names = [*(one.name for one in self.contenders), *self.stages]
        parser = argparse.ArgumentParser(description=self.question)
        parser.add_argument("--rounds", type=_at_least(ROUNDS_MIN), help=f"at least {ROUNDS_MIN}")
        parser.add_argument("--tasks", type=_at_least(1), default=self.tasks)
        parser.add_argument(
            "--only", action="append", choices=names, help="this contender or part; may be repeated"
        )
        parser.add_argument("--json", action="store_true", help="print one object instead of a table")
        if self.at_commit is not None:
            parser.add_argument("--against", metavar="COMMIT", help="run beside the package of that commit")
        parser.set_defaults(against=None)
        return parser.parse_args(arguments)


def clean_environment(*, source: Path = SOURCE, **more: str | Path) -> dict[str, str]:
    """This environment without what would change a contender's settings, and with `more`.

    The package is taken from `source`, or from beside the benchmark, so that another checkout's
    benchmark measures that checkout, whichever environment it runs in.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UMBEL_", "PYTHON"))}
    ours = f"{ROOT}{os.pathsep}{source}"
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
