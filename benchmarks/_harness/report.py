"""Report: the same findings as a table for people and as one object for programs."""

import os
import platform
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks._harness.measures import (
    COST_TIMES_MAX,
    Change,
    Measure,
    Ratio,
    Samples,
    Spread,
    Target,
    Verdict,
    changes,
    ratios,
    verdicts,
)

GAP = "   "
COLUMNS_MAX = 4
ABSENT = "-"


@dataclass(frozen=True, slots=True)
class Findings:
    benchmark: str
    question: str
    subject: str
    rounds: int
    tasks: int
    measures: Sequence[Measure]
    targets: Sequence[Target]
    notes: Sequence[str]
    samples: Mapping[str, Samples]  # by contender
    settings: Mapping[str, Mapping[str, str]]  # by contender: what it ran with
    former: str = ""  # the subject at another commit, if it ran beside itself

    def changes(self) -> list[Change]:
        if not self.former:
            return []
        return changes(self.measures, self.samples[self.subject], self.samples[self.former])

    def ratios(self) -> list[Ratio]:
        if self.subject not in self.samples:
            return []
        peers = {name: samples for name, samples in self.samples.items() if name != self.subject}
        return ratios(self.measures, self.samples[self.subject], peers)

    def verdicts(self) -> list[Verdict]:
        return verdicts(self.targets, self.ratios())


def as_object(findings: Findings) -> dict[str, Any]:
    found = findings.ratios()
    return {
        "benchmark": findings.benchmark,
        "rounds": findings.rounds,
        "tasks": findings.tasks,
        "contenders": {name: _contender(findings, name) for name in findings.samples},
        "ratios": {ratio.key: round(ratio.value, 3) for ratio in found},
        "ratio_spreads": {ratio.key: [round(ratio.low, 3), round(ratio.high, 3)] for ratio in found},
        "targets": {
            f"{one.target.measure}_vs_{one.target.peer}": {
                "at_least": one.target.at_least,
                "measured": one.measured,
                "met": one.met,
            }
            for one in findings.verdicts()
        },
        "changes": {
            one.measure.name: {
                "times": round(one.times, 3),
                "low": round(one.low, 3),
                "high": round(one.high, 3),
                "noise": one.is_noise,
                "met": one.met,
            }
            for one in findings.changes()
        },
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "files_on": _file_system(Path(tempfile.gettempdir()).resolve()),
    }


def _file_system(directory: Path) -> str:
    """The kind of file system that holds the contenders' files: on tmpfs, waiting for the disk is free."""
    mounts = {Path(one.mountpoint): one.fstype for one in psutil.disk_partitions(all=True)}
    return next((mounts[place] for place in (directory, *directory.parents) if place in mounts), "unknown")


def as_text(findings: Findings) -> str:
    return "\n".join(_paragraphs(findings))


def _contender(findings: Findings, name: str) -> dict[str, Any]:
    samples = findings.samples[name]
    measured = {
        measure: {"median": spread.median, "low": spread.low, "high": spread.high, "values": list(values)}
        for measure, values in samples.items()
        for spread in [Spread.of(values)]
    }
    return {"settings": dict(findings.settings[name]), "measures": measured}


def _paragraphs(findings: Findings) -> Iterator[str]:
    here = machine()
    yield f"{findings.benchmark}: {findings.question}"
    yield (
        f"{findings.rounds} alternating rounds, {findings.tasks:,} tasks; median (lowest – highest); "
        f"{here['cpus']} CPUs, Python {here['python']}, SQLite {here['sqlite']}, files on {here['files_on']}"
    )
    yield ""
    found = findings.ratios()
    if len(findings.samples) <= COLUMNS_MAX:
        yield from _columns(findings, found)
    else:
        yield from _aligned(_list_rows(findings, found), left=1)
        yield ""
    if found:
        yield from map(_verdict_line, findings.verdicts())
        yield ""
    if changed := findings.changes():
        yield from _aligned(_change_rows(findings, changed), left=1)
        yield f"noise: rounds disagree on which is more; a cost may be {COST_TIMES_MAX:g} times what it was"
        yield ""
    for name, settings in findings.settings.items():
        yield f"{name}: " + ", ".join(f"{key} {value}" for key, value in settings.items())
    yield from findings.notes


def _columns(findings: Findings, found: Sequence[Ratio]) -> Iterator[str]:
    yield from _aligned([["", "", *findings.samples], *_rows(findings)], left=2)
    yield ""
    if found:
        yield from _aligned(_ratio_rows(findings, found), left=1)
        yield ""


def _list_rows(findings: Findings, found: Sequence[Ratio]) -> Iterator[list[str]]:
    """Many contenders make a line too long to read: a paragraph for each measure, a row for each of them."""
    by_key = {(ratio.measure, ratio.peer): ratio for ratio in found}
    for measure in findings.measures:
        measured = {
            name: samples[measure.name]
            for name, samples in findings.samples.items()
            if measure.name in samples
        }
        rows = [
            [f"    {name}", _cell(values), _ratio_cell(by_key.get((measure.name, name)))]
            for name, values in measured.items()
        ]
        if rows:
            yield [measure.title, measure.unit, f"{findings.subject} is better, times" if by_key else ""]
            yield from rows


def _rows(findings: Findings) -> Iterator[list[str]]:
    for measure in findings.measures:
        cells = [_cell(samples.get(measure.name)) for samples in findings.samples.values()]
        yield [measure.title, measure.unit, *cells]


def _cell(values: Sequence[float] | None) -> str:
    if not values:
        return ABSENT
    spread = Spread.of(values)
    return f"{_number(spread.median)} ({_number(spread.low)} – {_number(spread.high)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio_rows(findings: Findings, found: Sequence[Ratio]) -> Iterator[list[str]]:
    peers = [name for name in findings.samples if name != findings.subject]
    by_key = {(ratio.measure, ratio.peer): ratio for ratio in found}
    yield [f"{findings.subject} is so many times better", *(f"than {peer}" for peer in peers)]
    for measure in findings.measures:
        row = [by_key.get((measure.name, peer)) for peer in peers]
        if any(row):
            yield [measure.title, *(_ratio_cell(ratio) for ratio in row)]


def _ratio_cell(ratio: Ratio | None) -> str:
    return ABSENT if ratio is None else f"{ratio.value:.2f} ({ratio.low:.2f} – {ratio.high:.2f})"


def _change_rows(findings: Findings, changed: Sequence[Change]) -> Iterator[list[str]]:
    yield [f"{findings.subject} is so many times {findings.former}", "min – median – max", "", ""]
    for one in changed:
        spread = f"{one.low:.2f} – {one.times:.2f} – {one.high:.2f}"
        difference = "noise" if one.is_noise else "more" if one.times > 1 else "less"
        limit = {None: "", True: "within the limit", False: "OVER THE LIMIT"}[one.met]
        yield [one.measure.title, spread, difference, limit]


def _verdict_line(verdict: Verdict) -> str:
    target = verdict.target
    wanted = f"target: {target.measure} at least {target.at_least:g} times {target.peer}"
    if verdict.measured is None:
        return f"{wanted}: not measured"
    return f"{wanted}: {verdict.measured:.2f}, {'met' if verdict.met else 'NOT MET'}"


def _aligned(rows: Sequence[Sequence[str]] | Iterator[Sequence[str]], *, left: int) -> Iterator[str]:
    """Columns as wide as their widest cell: the first `left` begin together, the others end together."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield GAP.join(cells).rstrip()
