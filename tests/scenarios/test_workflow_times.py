"""Critical paths and promises, against a ledger of a run with known delays.

Everything runs on one machine with one clock, in one child, and the ledger brackets each figure: what the
worker reports of a start lies between the end of what ran before and the body's own first line, and what it
reports of an end comes after the body's last line and before the next one's first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from time import time

import pytest

from tests.cluster import Cluster
from tests.fold.running import tables_of
from tests.history.published import publish
from tests.history.recording import paths_of, recording, rows_of
from tests.waiting import wait_until
from umbel import chain, chord
from umbel.history.lake import Lake, parquet
from umbel.history.query import read
from umbel.history.slo import Verdict, judge, parse_objective
from umbel.history.tables import Wanted

TASKS_FILE = Path(__file__).with_name("timed_tasks.py")
SINGLE = 20
PAUSE_S = 0.4  # until the second attempt is due
MICROSECOND = 2e-6  # the lake keeps no less, of each of two instants
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(240)]


@dataclass(frozen=True)
class Run:
    task_id: str
    attempt: int
    began: float
    ended: float


@dataclass(frozen=True)
class Ledger:
    """`sent`: around the sending of each task that the client sent. `done`: all had ended before that."""

    sent: dict[str, tuple[float, float]]
    runs: list[Run]
    done: float

    def of(self, task_id: str) -> list[Run]:
        return [run for run in self.runs if run.task_id == task_id]

    def free(self, run: Run) -> float:
        """From when on the child had nothing else to do."""
        place = self.runs.index(run)
        return self.runs[place - 1].ended if place else 0.0

    def next_began(self, run: Run) -> float:
        place = self.runs.index(run) + 1
        return self.runs[place].began if place < len(self.runs) else self.done


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ledger, str]:
    """A chain of one task, a chord of three of which one is retried, and its body; then single tasks."""
    home = tmp_path_factory.mktemp("timed")
    lake, url = home / "lake", f"sqlite:///{home / 'queue.db'}"
    sent: dict[str, tuple[float, float]] = {}
    with Cluster(home, TASKS_FILE, task_send_sent_event=True) as cluster, recording(url, lake) as recorder:
        recorder.wait_for("recording")
        cluster.start_worker("w1", "-c", "1", "-E")
        works, gathers = (cluster.app.tasks[f"timed_tasks.{name}"] for name in ("works", "gathers"))
        here = str(home)
        parts = [works.si(here, 0.1), works.si(here, 0.2), works.si(here, 0.15, PAUSE_S)]
        flow = chain(works.si(here, 0.3), chord(parts, gathers.s(here, 0.25)))
        before = time()
        root = flow.apply_async()
        handed = time()
        root.get(timeout=60)
        first = min(read_runs(home), key=lambda run: run.began).task_id
        sent[first] = before, handed
        for number in range(SINGLE):
            before = time()
            result = works.delay(here, 0.01 * (1 + number % 5))
            sent[str(result.id)] = before, time()
        wait_until(lambda: len(read_runs(home)) == SINGLE + 6, what="all to run")
        wait_until(lambda: len(ended(lake)) == SINGLE + 5, what="all to be recorded")
        done = time()
        assert cluster.stop_worker("w1") == 0
        assert recorder.stop() == 0
    files = [parquet().ParquetFile(path).read() for path in paths_of(Lake(lake))]
    publish(lake, {name: table.to_pylist() for name, table in tables_of(files).items()})
    return lake, Ledger(sent, sorted(read_runs(home), key=lambda run: run.began), done), first


def read_runs(home: Path) -> list[Run]:
    path = home / "ran.txt"
    lines = (line.split() for line in path.read_text().splitlines()) if path.exists() else ()
    return [Run(task_id, int(attempt), float(began), float(over)) for task_id, attempt, began, over in lines]


def ended(lake: Path) -> set[str]:
    return {row["uuid"] for row in rows_of(lake, "uuid", "type") if row["type"] == "task-succeeded"}


def test_the_critical_path_and_its_parts_are_those_of_the_ledger(ran: tuple[Path, Ledger, str]) -> None:
    lake, ledger, root = ran
    [flow] = read(
        lake, lambda tables: tables.rows("select *, from_json(path, '[\"varchar\"]') as ids from workflows")
    )
    tree = ledger.runs[:6]
    [retried] = {run.task_id for run in tree if run.attempt}
    body = tree[-1]
    assert flow["root_id"] == root
    assert flow["ids"] == [root, retried, body.task_id]
    assert (flow["n_tasks"], flow["n_retried"], flow["n_open"]) == (5, 1, 0)
    (head,) = ledger.of(root)
    vain, last = ledger.of(retried)
    before, handed = ledger.sent[root]

    def within(figure: float, low: float, high: float) -> None:
        assert low - MICROSECOND <= figure <= high + MICROSECOND

    within(flow["duration_s"], body.ended - handed, ledger.next_began(body) - before)
    within(flow["retry_s"], vain.ended + PAUSE_S - vain.began, last.began - ledger.free(vain))
    within(
        flow["run_s"],
        sum(run.ended - run.began for run in (head, last, body)),
        (tree[1].began - before)
        + (body.began - vain.ended - PAUSE_S)
        + (ledger.next_began(body) - last.ended),
    )
    # The retried part was sent with the others, and waited until they had run.
    within(
        flow["queue_s"],
        ledger.free(vain) - tree[1].began,
        (head.began - before) + (vain.began - head.ended) + (body.began - last.ended),
    )
    within(flow["follow_s"], 0.0, (tree[1].began - head.ended) + (body.began - last.ended))
    parts = sum(flow[name] for name in ("queue_s", "run_s", "retry_s", "follow_s"))
    assert parts == pytest.approx(flow["duration_s"], abs=MICROSECOND)


@pytest.mark.parametrize("percent", [50, 95])
def test_figures_and_verdicts_of_promises_are_those_of_the_ledger(
    ran: tuple[Path, Ledger, str], percent: int
) -> None:
    lake, ledger, root = ran
    single = [run for run in ledger.runs if run.task_id in ledger.sent and run.task_id != root]
    since = min(ledger.sent[run.task_id][0] for run in single)
    waits = [
        (max(ledger.free(run), handed) - handed, run.began - before)
        for run in single
        for before, handed in [ledger.sent[run.task_id]]
    ]
    runs = [(run.ended - run.began, ledger.next_began(run) - ledger.free(run)) for run in single]
    for measure, brackets in (("wait", waits), ("run", runs)):
        low, high = (quantile([one[side] for one in brackets], percent) for side in (0, 1))
        found = judged(lake, f"p{percent} {measure} < {high + 0.001:.6f}s", since)
        assert found.n == SINGLE
        assert low - MICROSECOND <= found.figure <= high + MICROSECOND
        assert found.is_kept and found.burn_rate is not None and found.burn_rate <= 1
        broken = judged(lake, f"p{percent} {measure} < {max(low - 0.001, 0):.6f}s", since)
        assert not broken.is_kept and broken.burn_rate is not None and broken.burn_rate > 1


def test_no_time_is_lost_but_that_of_the_attempt_in_vain(ran: tuple[Path, Ledger, str]) -> None:
    lake, ledger, _ = ran
    [lost] = read(lake, lambda tables: tables.rows("select * from lost_time"))
    vain, last = ledger.of(lost["task_id"])
    assert (lost["n_attempts"], lost["n_failed"], lost["n_repeats"]) == (2, 1, 0)
    assert vain.ended + PAUSE_S - vain.began - MICROSECOND <= lost["lost_s"] <= last.began - ledger.free(vain)


def test_the_queue_was_as_deep_as_the_ledger_says_at_the_end_of_each_minute(
    ran: tuple[Path, Ledger, str],
) -> None:
    lake, ledger, _ = ran
    rows = read(lake, lambda tables: tables.rows("select * from queues order by minute"))
    assert sum(row["n_started"] for row in rows) == sum(row["n_ended"] for row in rows) == len(ledger.runs)
    assert (rows[-1]["depth"], rows[-1]["running"]) == (0, 0)
    assert all(row["running_max"] <= 1 for row in rows)


def judged(lake: Path, text: str, since: float) -> Verdict:
    from datetime import UTC, datetime

    wanted = Wanted(since=datetime.fromtimestamp(since, UTC))
    verdict = read(lake, lambda tables: judge(tables, parse_objective(text)), wanted=wanted)
    assert verdict is not None
    return verdict


def quantile(values: Sequence[float], percent: int) -> float:
    """The smallest that so many do not exceed."""
    return sorted(values)[ceil(len(values) * percent / 100) - 1]


def test_the_ledger_is_of_one_child_that_did_one_thing_after_the_other(ran: tuple[Path, Ledger, str]) -> None:
    assert all(earlier.ended <= later.began for earlier, later in pairwise(ran[1].runs))
