"""Ledger: what the tasks themselves say that they did, and whether everybody else says the same.

Every figure of the demo comes from somewhere else: results from the backend, runs from the ledger,
states from the history that Spark made. The verdict compares them, task by task.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from umbel.demo.load import KINDS

SHOWN_MAX = 3


@dataclass(frozen=True, slots=True)
class Ledger:
    """`runs`: how often each attempt of each task began, by (id, attempt); `nodes`: where it last did."""

    runs: Counter[tuple[str, int]]
    nodes: Mapping[str, str]

    @property
    def repeated(self) -> dict[str, int]:
        """By task: runs beyond the first of each attempt."""
        found: Counter[str] = Counter()
        for (task_id, _), count in self.runs.items():
            found[task_id] += count - 1
        return {task_id: count for task_id, count in found.items() if count}

    def of(self, task_id: str) -> int:
        return sum(count for (one, _), count in self.runs.items() if one == task_id)


def read_ledger(path: Path) -> Ledger:
    runs: Counter[tuple[str, int]] = Counter()
    nodes: dict[str, str] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        task_id, _, attempt, node = line.split()
        runs[task_id, int(attempt)] += 1
        nodes[task_id] = node.partition("@")[0]
    return Ledger(runs, nodes)


@dataclass(slots=True)
class Verdict:
    """What does not fit, each in a sentence; nothing if all is well."""

    problems: list[str] = field(default_factory=list)

    def must(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)


def judge(
    sent: Mapping[str, str],
    states: Mapping[str, str],
    ledger: Ledger,
    history: Mapping[str, str] | None,
    slots: Mapping[str, int],
    killed: str = "",
) -> Verdict:
    """`sent`: kinds by task; `states`: results; `history`: states by Spark; `slots`: periodic ids."""
    verdict = Verdict()
    ran = {task_id for task_id, _ in ledger.runs}
    wrong = [one for one, kind in sent.items() if states.get(one) != KINDS[kind][0]]
    verdict.must(not wrong, f"{len(wrong)} tasks did not end as they should: {_some(wrong, sent, states)}")
    idle = [one for one, kind in sent.items() if kind != "never" and one not in ran]
    verdict.must(not idle, f"{len(idle)} tasks never ran: {', '.join(idle[:SHOWN_MAX])}")
    revoked = [one for one, kind in sent.items() if kind == "never" and one in ran]
    verdict.must(not revoked, f"a revoked task ran: {', '.join(revoked)}")
    strangers = ran - sent.keys() - slots.keys()
    verdict.must(not strangers, f"{len(strangers)} tasks ran that nobody sent")
    ticks = sorted(slots[one] for one in ran & slots.keys())
    gaps = [at for at in range(ticks[0], ticks[-1]) if at not in set(ticks)] if ticks else []
    verdict.must(bool(ticks), "no periodic task ran")
    verdict.must(not gaps, f"{len(gaps)} slots of the periodic task were left out")
    if history is not None:
        # What the worker that was killed had not told yet, nobody can record.
        told = [one for one in (*sent, *ran) if not killed or ledger.nodes.get(one) != killed]
        differ = [one for one in told if one in sent and history.get(one) != states.get(one)]
        verdict.must(not differ, f"history and results differ about {_some(differ, sent, history)}")
        unheard = [one for one in told if one in ran and one not in history]
        verdict.must(not unheard, f"history does not know {len(unheard)} tasks that ran")
    return verdict


def _some(ids: list[str], sent: Mapping[str, str], states: Mapping[str, str]) -> str:
    return ", ".join(f"{sent[one]} {one} is {states.get(one, 'unknown')}" for one in ids[:SHOWN_MAX])
