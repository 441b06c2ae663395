"""What the ledger says: which tasks waited although a worker had nothing to do.

Pure. A message can have waited since it was sent, and since the long task began. Of that time, the stretches
count in which some child ran nothing, apart from the moments between two of its tasks.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf

MOMENT_S = 0.1  # a shorter stretch is a child on its way from one task to the next
LATE_S = 1.0


@dataclass(frozen=True)
class Run:
    child: str
    kind: str
    began_s: float
    ended_s: float


def read_runs(lines: Iterable[str]) -> list[Run]:
    """The runs that have begun, in the order of their beginnings; one that goes on ends at infinity."""
    begun: dict[str, tuple[str, float]] = {}  # by child: it runs one task at a time
    runs: list[Run] = []
    for line in lines:
        what, child, kind, at = line.split()
        if what == "began":
            begun[child] = (kind, float(at))
        else:
            runs.append(Run(child, *begun.pop(child), float(at)))
    runs += [Run(child, kind, began_s, inf) for child, (kind, began_s) in begun.items()]
    return sorted(runs, key=lambda run: run.began_s)


def idle_stretches(runs: Sequence[Run], children: Collection[str]) -> list[tuple[float, float]]:
    """When some child had nothing to do, for longer than a moment, in order and without overlaps."""
    gaps: list[tuple[float, float]] = []
    for child in children:
        ended_s = -inf
        for run in (run for run in runs if run.child == child):
            gaps.append((ended_s, run.began_s))
            ended_s = run.ended_s
        gaps.append((ended_s, inf))
    joined: list[tuple[float, float]] = []
    for start, end in sorted(gap for gap in gaps if gap[1] - gap[0] > MOMENT_S):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def late(runs: Sequence[Run], *, children: Collection[str], sent_s: float) -> int:
    """How many short tasks started more than LATE_S later than a child without work could have run them."""
    (long,) = (run for run in runs if run.kind == "long")
    since = max(sent_s, long.began_s)
    stretches = idle_stretches(runs, children)
    count = 0
    for run in runs:
        waited_s = sum(max(0.0, min(end, run.began_s) - max(start, since)) for start, end in stretches)
        count += run.kind == "short" and waited_s > LATE_S
    return count
