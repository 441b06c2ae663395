"""Load: send the tasks of the demo, and check that all sources agree about their outcomes.

Each task writes a line to a ledger when it runs. The ledger does not depend on results, events or workers,
so it is an independent check of all three.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import cos, tau
from pathlib import Path
from typing import Any

from umbel.app.canvas.chain import chain
from umbel.app.canvas.group import chord, group
from umbel.app.canvas.signature import Signature
from umbel.app.cluster.elections import ElectionOutcome
from umbel.app.results import AsyncResult, GroupResult
from umbel.app.sending.preparation import new_id
from umbel.demo import tasks
from umbel.text import numbered

# ---- load ------------------------------------------------------------------------------------------

BATCHES_PER_S = 2
GROUP_SIZE = 4
CANVAS_EVERY = 4  # batches
CRASHES_AT = (3, 9)  # batches
CHARGES = 4  # a batch
SLOW_S = 0.05
LONG_S = 0.3
DELAY_S = 2.0
HELD = 6  # as many as the demo has child processes
SWELL = 240  # gentle batches in one period of the changing load
GENTLE_CANVAS_EVERY = 20  # gentle batches

KINDS: Mapping[str, tuple[str, str]] = {
    "quick": ("SUCCESS", "adds two numbers"),
    "slow": ("SUCCESS", "takes 50 ms"),
    "held": ("SUCCESS", "runs while a worker dies"),
    "awaited": ("SUCCESS", "async def, awaits 10 ms"),
    "failing": ("FAILURE", "raises ValueError"),
    "retried": ("SUCCESS", "fails once, is retried"),
    "delayed": ("SUCCESS", "is due two seconds later"),
    "crashing": ("SUCCESS", "kills its process once"),
    "chain": ("SUCCESS", "three steps in a row"),
    "group": ("SUCCESS", "four at once"),
    "chord": ("SUCCESS", "four at once, then their sum"),
    "never": ("REVOKED", "is revoked before it is due"),
    "elected": ("SUCCESS", "is sent by an elected worker"),
    "charge": ("SUCCESS", "a Celery app's task"),
    "order": ("SUCCESS", "a Celery app's chain, retried"),
}
"""The kinds of tasks: the expected final state, and a description."""
OF_CELERY = ("charge", "order")  # kinds of tasks


@dataclass(slots=True)
class Sent:
    """The kind of each task that was sent, by task id."""

    kinds: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, result: Any) -> None:
        """Record the kind of a result and of all results that belong to it."""
        for task_id in _ids(result):
            self.kinds[task_id] = kind

    def __len__(self) -> int:
        return len(self.kinds)


def send_batch(sent: Sent, number: int, home: Path, *, celery: bool) -> None:
    """Send the mixed load of half a second."""
    calls = list(_singles(number, home))
    if celery:
        calls += [("charge", _of_celery("charge", number)) for _ in range(CHARGES)]
    results = tasks.app.send_many(call for _, call in calls)
    for (kind, _), result in zip(calls, results, strict=True):
        sent.add(kind, result)
    if number % CANVAS_EVERY == 0:
        _send_canvas(sent, number)
        if celery:
            sent.add("order", _celery_chain(number))


def send_gently(number: int, *, celery: bool) -> None:
    """Send the load of one second, which is small enough to leave the machine usable."""
    tasks.app.send_many(gentle(number))
    if celery:
        _of_celery("charge", number).apply_async()
    if number % GENTLE_CANVAS_EVERY == 0:
        _send_canvas(Sent(), number)
        if celery:
            _celery_chain(number)


def gentle(number: int) -> Iterator[Signature[Any]]:
    """Yield the tasks of a small batch: four to twenty, changing slowly, so that charts show variation."""
    share = (1 - cos(tau * number / SWELL)) / 2
    mixed: list[Signature[Any]] = [
        tasks.quick.s(number, 1),
        tasks.slow.s(round(LONG_S * (1 + share), 2)),
        tasks.quick.s(number, 2),
        tasks.retried.s(number),
        tasks.awaited.s(LONG_S),
        tasks.quick.s(number, 3),
        tasks.delayed.s(number).set(countdown=DELAY_S),
        tasks.failing.s(number),
        tasks.quick.s(number, 4),
    ]
    for place in range(4 + round(16 * share)):
        yield mixed[(4 * number + place) % len(mixed)]


def elect(number: int, *, timeout_s: float) -> tuple[str, ElectionOutcome]:
    """Elect a worker to send a task; return the task's id and the outcome."""
    call = tasks.elected.s().set(task_id=new_id())
    name = f"{tasks.RUN}-report-{number}"
    return call.options["task_id"], tasks.app.control.election(name, "task", call.to_map(), timeout=timeout_s)


def send_held(sent: Sent, release: Path) -> None:
    """Send tasks that run until the file `release` exists."""
    for result in tasks.app.send_many(tasks.held.s(str(release)) for _ in range(HELD)):
        sent.add("held", result)


def _send_canvas(sent: Sent, number: int) -> None:
    """Send a chain, a group and a chord."""
    steps = [tasks.step.s(place) for place in range(GROUP_SIZE)]
    sent.add("chain", chain(tasks.step.s(number), tasks.step.s(2), tasks.step.s(3)).apply_async())
    sent.add("group", group(steps).apply_async())
    sent.add("chord", chord(steps, tasks.total.s()).apply_async())


def _celery_chain(number: int) -> Any:
    """Send a chain of tasks of the Celery app."""
    return chain(_of_celery("charge", number), _of_celery("ship")).apply_async()


def _of_celery(name: str, *args: int) -> Signature[Any]:
    """Return a signature by task name, as a client without the Celery app's code sends it."""
    return tasks.app.signature(f"umbel.demo.celery_shop.{name}", args, queue=tasks.CELERY_QUEUE)


def _singles(number: int, home: Path) -> Iterator[tuple[str, Signature[Any]]]:
    """Yield the single tasks of a batch with their kinds."""
    for place in range(40):
        yield "quick", tasks.quick.s(number, place)
    for _ in range(3):
        yield "slow", tasks.slow.s(SLOW_S)
        yield "awaited", tasks.awaited.s(0.01)
    yield "failing", tasks.failing.s(number)
    yield "retried", tasks.retried.s(number)
    yield "delayed", tasks.delayed.s(number).set(countdown=DELAY_S)
    if number in CRASHES_AT:
        yield "crashing", tasks.crashing.s(str(home / f"crash-{number}"))


def _ids(result: Any) -> Iterator[str]:
    """Yield the ids of a result, of all members of a group, and of earlier results in a chain."""
    if isinstance(result, GroupResult):
        for member in result.results:
            yield from _ids(member)
    elif isinstance(result, AsyncResult):
        yield result.id
    if getattr(result, "parent", None) is not None:
        yield from _ids(result.parent)


# ---- ledger ----------------------------------------------------------------------------------------

SHOWN_MAX = 3
AGAIN = "again"  # in a line of the ledger: the message was redelivered


@dataclass(frozen=True, slots=True)
class Ledger:
    """All runs of tasks. `runs` maps (task id, attempt) to the nodes on which it started, in order.
    `redelivered` contains those whose message was redelivered.
    """

    runs: Mapping[tuple[str, int], Sequence[str]]
    redelivered: Collection[tuple[str, int]] = ()

    @property
    def ids(self) -> set[str]:
        """The ids of all tasks that ran."""
        return {task_id for task_id, _ in self.runs}

    @property
    def total(self) -> int:
        """The number of runs, including repeated ones."""
        return sum(len(nodes) for nodes in self.runs.values())

    def repeats(self) -> Counter[str]:
        """Return the number of repeated runs for each task."""
        return self._repeats(lambda _run, _nodes: True)

    def recovered(self, killed: str) -> Counter[str]:
        """Return the number of repeated runs that the killed worker caused, for each task: it had started
        them, or they were redelivered.
        """
        if not killed:
            return Counter()
        return self._repeats(lambda run, nodes: killed in nodes[:-1] or run in self.redelivered)

    def _repeats(self, counts: Callable[[tuple[str, int], Sequence[str]], bool]) -> Counter[str]:
        found: Counter[str] = Counter()
        for run, nodes in sorted(self.runs.items()):  # earlier attempts first
            if len(nodes) > 1 and counts(run, nodes):
                found[run[0]] += len(nodes) - 1
        return found

    def began_on(self, node: str) -> set[str]:
        """Return the ids of the tasks that started on a node."""
        return {task_id for (task_id, _), nodes in self.runs.items() if node in nodes}


def read_ledger(path: Path) -> Ledger:
    """Read the ledger; a missing file is an empty ledger."""
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
    """The problems that were found, each as a sentence; empty if all sources agree."""

    problems: list[str] = field(default_factory=list)

    def must(self, holds: bool, problem: str) -> None:
        """Record the problem unless the condition holds."""
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
    """Compare all sources, and return the problems.

    `sent` contains the kind of each task, `states` the results, `history` the states in the tables that
    Spark built. `slots` contains the ids of periodic tasks; they must have run up to `last_slot`, because
    later ones may still be in a queue when the workers stop. `killed` is the worker that was killed, and
    `interrupted` the tasks that it was running.
    """
    verdict = Verdict()
    ran = ledger.ids
    wrong = [task_id for task_id, kind in sent.items() if states.get(task_id) != KINDS[kind][0]]
    named = _some(wrong, sent, states)
    verdict.must(not wrong, f"{numbered(len(wrong), 'task')} did not end as expected: {named}")
    idle = [task_id for task_id, kind in sent.items() if kind != "never" and task_id not in ran]
    verdict.must(not idle, f"{numbered(len(idle), 'task')} never ran: {', '.join(idle[:SHOWN_MAX])}")
    revoked = [task_id for task_id, kind in sent.items() if kind == "never" and task_id in ran]
    verdict.must(not revoked, f"a revoked task ran: {', '.join(revoked)}")
    repeated, recovered = ledger.repeats(), ledger.recovered(killed)
    unfinished = [task_id for task_id in interrupted if not recovered[task_id]]
    some = numbered(len(unfinished), "task")
    verdict.must(not unfinished, f"not run again by another worker: {some} of {killed}")
    causeless = [task_id for task_id in repeated - recovered if sent.get(task_id) != "crashing"]
    verdict.must(
        not causeless,
        f"{numbered(len(causeless), 'task')} ran twice without a cause: {', '.join(causeless[:SHOWN_MAX])}",
    )
    strangers = ran - sent.keys() - slots.keys()
    verdict.must(not strangers, f"{numbered(len(strangers), 'task')} ran without being sent")
    ticks = sorted(slots[task_id] for task_id in ran & slots.keys())
    gaps = set(range(ticks[0], last_slot + 1)) - set(ticks) if ticks else ()
    verdict.must(bool(ticks), "no periodic task ran")
    verdict.must(not gaps, f"the periodic task missed {numbered(len(gaps), 'slot')}")
    if history is not None:
        differ = [task_id for task_id in sent if history.get(task_id) != states.get(task_id)]
        verdict.must(not differ, f"history and results differ in {_some(differ, sent, history)}")
        missing = ran - history.keys()
        verdict.must(not missing, f"history lacks {numbered(len(missing), 'task')} that ran")
    return verdict


def _some(ids: list[str], sent: Mapping[str, str], states: Mapping[str, str]) -> str:
    """Describe the first of these tasks with their states."""
    return ", ".join(
        f"{sent[task_id]} {task_id} is {states.get(task_id, 'unknown')}" for task_id in ids[:SHOWN_MAX]
    )
