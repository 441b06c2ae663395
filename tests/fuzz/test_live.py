"""A real worker on Redis and on RabbitMQ under inputs that a seeded mutator makes of the corpus (N1).

Tasks, envelopes (which the scripts on Redis read), events, requests, replies and results, in batches
with tasks in order between them. `make soak` gives a million in all, `make test` a few hundred. The
worker may not end, and every neighbour runs exactly once. A failure prints how to do it again.
"""

import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.corpus.case import Case, Kind, as_line
from tests.corpus.delivering import EVENTS, REQUESTS, Addressed, Delivering, delivering_to
from tests.corpus.stranger import NODE, Stranger
from tests.fuzz.mutator import Mutator
from tests.scenarios.corpus_tasks import ledger_of
from tests.scenarios.places import place
from tests.waiting import wait_until
from umbel.errors import TaskError, WireError

SOAK = bool(os.environ.get("UMBEL_SOAK"))
INPUTS = int(os.environ.get("FUZZ_INPUTS") or (500_000 if SOAK else 400))
SEED = int(os.environ.get("FUZZ_SEED") or random.randrange(2**31))
FIRST = int(os.environ.get("FUZZ_FIRST") or 0)
BATCH = 1000 if SOAK else 200
NEIGHBOURS = BATCH // 10
TASKS_FILE = Path(__file__).parent.parent / "scenarios" / "corpus_tasks.py"
# Commands that do what they are told, and should: a fuzzer would end, starve or swell the worker by them.
OBEYED = ("shutdown", "cancel_consumer", "add_consumer", "pool_", "autoscale", "rate_limit", "time_limit")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(4 * 3600 if SOAK else 180)]


@pytest.mark.parametrize("broker", ["redis", "amqp"])
def test_no_input_ends_a_worker_or_costs_a_neighbour(broker: str, tmp_path: Path) -> None:
    print(f"FUZZ_SEED={SEED} FUZZ_FIRST={FIRST}")
    with (
        place(broker, tmp_path, durable=False) as where,
        Cluster(tmp_path, TASKS_FILE, broker=where.broker, backend=where.backend) as cluster,
    ):
        delivering = delivering_to(where.broker, where.backend)
        with Stranger(where.broker, delivering, []) as stranger:
            cluster.start_worker("w1", "-c", "2")
            assert cluster.app.AsyncResult("nothing").state == "PENDING"  # makes the tables of results
            Fuzzing(broker, cluster, delivering, stranger).run()
        assert cluster.stop_worker("w1") == 0


class Fuzzing:
    def __init__(self, broker: str, cluster: Cluster, delivering: Delivering, stranger: Stranger) -> None:
        self._broker = broker
        self._cluster = cluster
        self._delivering = delivering
        self._stranger = stranger
        self._sent: set[str] = set()
        self._missing: set[str] = set()  # those of them that did not run yet
        self._read = 0  # of the ledger, in bytes
        self._ran: Counter[str] = Counter()
        self._node = self._name_of_the_node()

    def run(self) -> None:
        # RabbitMQ itself ends the connection of who sends it properties that are none.
        kinds: tuple[Kind, ...] = ("task",) if self._broker == "amqp" else ("task", "envelope")
        queued = Mutator(SEED, *kinds, brokers=[self._broker])
        others = Mutator(SEED + 1, "event", "control", "reply", "result", brokers=[self._broker])
        for first in range(FIRST, FIRST + INPUTS, BATCH):
            half = range(first, first + BATCH // 2)
            tasks = [queued.input(number)[1] for number in half]
            rest = [others.input(number)[1] for number in half]
            try:
                self._give(tasks, rest)
            except AssertionError:
                self._keep(tasks + rest)
                print(f"FUZZ_SEED={SEED} FUZZ_FIRST={first} FUZZ_INPUTS={BATCH}")
                raise
        assert self._ran == Counter(self._sent), "a neighbour ran twice"
        print(f"{self._broker}: {INPUTS} inputs, {len(self._sent)} neighbours, seed {SEED}")

    def _give(self, tasks: Sequence[Case], rest: Sequence[Case]) -> None:
        self._delivering.tasks([case for case in tasks if not case.to])
        self._send_neighbours()
        self._tell([*rest, *(case for case in tasks if case.to)])
        self._stranger.replies = [replace(case, to="ping") for case in rest if case.kind == "reply"]
        self._read_results([case for case in rest if case.kind == "result"])
        self._send_neighbours()
        worker = self._cluster.workers["w1"]
        wait_until(
            lambda: worker.poll() is not None or self._have_all_run(),
            what=f"neighbours to run, of {len(self._sent)}",
        )
        assert worker.poll() is None, f"the worker ended: {self._cluster.log('w1')[-3000:]}"
        answers = self._cluster.app.control.ask("ping", destination=[self._node, NODE], timeout=20)
        assert {self._node, NODE} <= answers.replies.keys(), (
            f"ping is answered by {list(answers.replies)} only"
        )

    def _tell(self, cases: Sequence[Case]) -> None:
        addressed: list[Addressed] = []
        for case in cases:
            if case.kind == "event":
                addressed.append((EVENTS, case.to, case))
            elif case.kind == "control" and not is_obeyed(case):
                addressed.append((REQUESTS, "", case))
            elif case.kind == "envelope":
                addressed.append((case.to, "worker.x" if case.to == EVENTS else "", case))
        self._delivering.broadcast(addressed)

    def _read_results(self, cases: Sequence[Case]) -> None:
        self._delivering.results(cases)
        for case in cases:
            try:
                self._cluster.app.AsyncResult(case.name).result  # noqa: B018
            except (WireError, TaskError):
                continue

    def _send_neighbours(self) -> None:
        neighbour = self._cluster.app.tasks["corpus_tasks.neighbour"]
        calls = [neighbour.s(str(self._cluster.home)) for _ in range(NEIGHBOURS // 2)]
        sent = {result.id for result in self._cluster.app.send_many(calls)}
        self._sent |= sent
        self._missing |= sent

    def _have_all_run(self) -> bool:
        ledger = ledger_of(str(self._cluster.home))
        if ledger.exists():
            with ledger.open("rb") as lines:
                lines.seek(self._read)
                new = lines.read()
            whole = new[: new.rfind(b"\n") + 1]  # a line across two pages of the file may be half there
            self._read += len(whole)
            ran = whole.decode().split()
            self._ran.update(ran)
            self._missing.difference_update(ran)
        return not self._missing

    def _name_of_the_node(self) -> str:
        state = self._cluster.state_of("w1")
        assert state is not None
        return state.node

    def _keep(self, batch: Sequence[Case]) -> None:
        """For the search for the case that failed: each as a line of the corpus."""
        for case in batch:
            (self._cluster.home / f"{case.kind}-{case.name}.jsonl").write_text(as_line(case) + "\n")


def is_obeyed(case: Case) -> bool:
    try:
        method = json.loads(case.body)["method"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    return isinstance(method, str) and method.startswith(OBEYED)
