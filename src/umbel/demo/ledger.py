"""Ledger: what the tasks themselves say that they did, and whether all other sources agree.

Every figure of the demo comes from somewhere else: results from the backend, runs from the ledger,
states from the history that Spark made. The verdict compares them, task by task.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from umbel.demo.load import KINDS
from umbel.text import numbered

SHOWN_MAX = 3
AGAIN = "again"  # in a line of the ledger: the message had been delivered before


@dataclass(frozen=True, slots=True)
class Ledger:
    """`runs`: by (task id, attempt), the nodes on which it began, in their order; `redelivered`: those whose
    message came again."""

    runs: Mapping[tuple[str, int], Sequence[str]]
    redelivered: Collection[tuple[str, int]] = ()

    @property
    def ids(self) -> set[str]:
        return {task_id for task_id, _ in self.runs}

    @property
    def total(self) -> int:
        return sum(len(nodes) for nodes in self.runs.values())

    def repeats(self) -> Counter[str]:
        """By task: runs that followed one of the same attempt."""
        return self._repeats(lambda _run, _nodes: True)

    def recovered(self, killed: str) -> Counter[str]:
        """Those because that worker was killed: it had begun, or held the message. Where publishing and
        acknowledging are two steps (RabbitMQ), it may have put a copy aside, or sent the next attempt."""
        at_fault: set[str] = set()

        def is_its(run: tuple[str, int], nodes: Sequence[str]) -> bool:
            found = killed in nodes[:-1] or run in self.redelivered or run[0] in at_fault
            at_fault.update([run[0]] if found else [])
            return found

        return self._repeats(is_its) if killed else Counter()

    def _repeats(self, counts: Callable[[tuple[str, int], Sequence[str]], bool]) -> Counter[str]:
        found: Counter[str] = Counter()
        for run, nodes in sorted(self.runs.items()):  # earlier attempts first
            if len(nodes) > 1 and counts(run, nodes):
                found[run[0]] += len(nodes) - 1
        return found

    def began_on(self, node: str) -> set[str]:
        return {task_id for (task_id, _), nodes in self.runs.items() if node in nodes}


def read_ledger(path: Path) -> Ledger:
    runs: dict[tuple[str, int], list[str]] = {}
    redelivered: set[tuple[str, int]] = set()
    for line in path.read_text().splitlines() if path.exists() else ():
        task_id, _, attempt, node, delivered = line.split()
        runs.setdefault((task_id, int(attempt)), []).append(node.partition("@")[0])
        if delivered == AGAIN:
            redelivered.add((task_id, int(attempt)))
    return Ledger(runs, redelivered)


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
    last_slot: int,
    killed: str = "",
    interrupted: Collection[str] = (),
) -> Verdict:
    """`sent`: kinds by task; `states`: results; `history`: states by Spark; `slots`: periodic ids,
    all of which ran up to `last_slot`, as later ones may wait in a queue when the workers stop;
    `killed`: the worker that was, and `interrupted`: the tasks that it certainly ran then.
    """
    verdict = Verdict()
    ran = ledger.ids
    wrong = [one for one, kind in sent.items() if states.get(one) != KINDS[kind][0]]
    named = _some(wrong, sent, states)
    verdict.must(not wrong, f"{numbered(len(wrong), 'task')} did not end as expected: {named}")
    idle = [one for one, kind in sent.items() if kind != "never" and one not in ran]
    verdict.must(not idle, f"{numbered(len(idle), 'task')} never ran: {', '.join(idle[:SHOWN_MAX])}")
    revoked = [one for one, kind in sent.items() if kind == "never" and one in ran]
    verdict.must(not revoked, f"a revoked task ran: {', '.join(revoked)}")
    repeated, recovered = ledger.repeats(), ledger.recovered(killed)
    unfinished = [one for one in interrupted if not recovered[one]]
    some = numbered(len(unfinished), "task")
    verdict.must(not unfinished, f"not run again by another worker: {some} of {killed}")
    causeless = [one for one in repeated - recovered if sent.get(one) != "crashing"]
    verdict.must(
        not causeless,
        f"{numbered(len(causeless), 'task')} ran twice without a cause: {', '.join(causeless[:SHOWN_MAX])}",
    )
    strangers = ran - sent.keys() - slots.keys()
    verdict.must(not strangers, f"{numbered(len(strangers), 'task')} ran without being sent")
    ticks = sorted(slots[one] for one in ran & slots.keys())
    gaps = set(range(ticks[0], last_slot + 1)) - set(ticks) if ticks else ()
    verdict.must(bool(ticks), "no periodic task ran")
    verdict.must(not gaps, f"the periodic task missed {numbered(len(gaps), 'slot')}")
    if history is not None:
        differ = [one for one in sent if history.get(one) != states.get(one)]
        verdict.must(not differ, f"history and results differ about {_some(differ, sent, history)}")
        unheard = ran - history.keys()
        verdict.must(not unheard, f"history lacks {numbered(len(unheard), 'task')} that ran")
    return verdict


def _some(ids: list[str], sent: Mapping[str, str], states: Mapping[str, str]) -> str:
    return ", ".join(f"{sent[one]} {one} is {states.get(one, 'unknown')}" for one in ids[:SHOWN_MAX])
