"""Everything in `tests/corpus`, given to one real worker on each broker, between tasks in order (N1)."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster import Cluster
from tests.corpus import case as corpus
from tests.corpus.case import Broker, Case
from tests.corpus.delivering import EVENTS, REQUESTS, Delivering, delivering_to
from tests.corpus.readers import read_case
from tests.corpus.stranger import NODE, Stranger
from tests.scenarios.corpus_tasks import ledger_of
from tests.scenarios.places import place
from tests.waiting import wait_until
from umbel.brokers.interface import DeadLetter, Depth
from umbel.errors import RemoteError, UmbelError, WireError
from umbel.protocol.delivery.states import FAILURE, REVOKED, SUCCESS

TASKS_FILE = Path(__file__).with_name("corpus_tasks.py")
TOGETHER = 8  # cases between which the neighbours stand
GROWTH_MAX_BYTES = 150 * 1024 * 1024  # of the main process, which is sent some 40 MB
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(180)]


@pytest.mark.parametrize("broker", corpus.BROKERS)
def test_whatever_comes_the_worker_lives_and_no_neighbour_is_lost(broker: Broker, tmp_path: Path) -> None:
    with (
        place(broker, tmp_path, durable=False) as where,
        # Files of many megabytes are written: others wait for their turn, long on a busy machine.
        Cluster(
            tmp_path, TASKS_FILE, broker=where.broker, backend=where.backend, connect_timeout_s=30.0
        ) as cluster,
    ):
        delivering = delivering_to(where.broker, where.backend)
        with Stranger(where.broker, delivering, corpus.of(broker, "reply")) as stranger:
            Trial(broker, cluster, delivering, stranger).run()


class Trial:
    """One worker, all cases of one broker."""

    def __init__(self, broker: Broker, cluster: Cluster, delivering: Delivering, stranger: Stranger) -> None:
        self._broker = broker
        self._cluster = cluster
        self._delivering = delivering
        self._stranger = stranger
        self._queued = [case for case in corpus.of(broker, "task", "envelope") if not case.to]
        self._sent: list[str] = []

    def run(self) -> None:
        worker = self._cluster.start_worker("w1", "-c", "2")
        self._send_neighbours(20)
        self._wait_for_neighbours()
        process = psutil.Process(worker.pid)
        before = process.memory_info().rss
        for start in range(0, len(self._queued), TOGETHER):
            self._delivering.tasks(self._queued[start : start + TOGETHER])
            self._send_neighbours(TOGETHER)
        self._broadcast()
        self._delivering.results(corpus.of(self._broker, "result"))
        self._wait_for_neighbours()
        wait_until(lambda: self._unsettled() == 0, what="the queue to be empty")
        assert self._replies_at_the_end() == {self._node, NODE}
        assert self._wrong_in_queue() == {}
        assert self._wrong_answers() == {}
        assert self._wrong_results() == {}
        unreadable = self._unreadable()
        wait_until(lambda: self._stats()["unreadable"] == unreadable, what=f"{unreadable} to be counted")
        assert worker.poll() is None, self._cluster.log("w1")[-4000:]
        growth = process.memory_info().rss - before
        print(f"{self._broker}: {len(self._queued)} in the queue, grown by {growth / 2**20:.0f} MiB")
        assert growth < GROWTH_MAX_BYTES
        assert self._ledger() == Counter(self._sent)
        counters = self._cluster.counters("w1")
        assert counters["faults"] == 0, "what the last guard catches was not judged where it came in"
        assert self._cluster.stop_worker("w1") == 0

    # -- sending ---------------------------------------------------------------------------------

    def _send_neighbours(self, count: int) -> None:
        neighbour = self._cluster.app.tasks["corpus_tasks.neighbour"]
        calls = [neighbour.s(str(self._cluster.home)) for _ in range(count)]
        self._sent += [result.id for result in self._cluster.app.send_many(calls)]

    def _broadcast(self) -> None:
        incarnation = str(self._stats()["incarnation"])
        words = {b"@NODE@": self._node.encode(), b"@INC@": incarnation.encode()}
        for case in corpus.of(self._broker, "event"):
            self._delivering.broadcast([(EVENTS, case.to, corpus.changed(case, words))])
        self._delivering.broadcast([(REQUESTS, "", case) for case in corpus.of(self._broker, "control")])
        for case in corpus.of(self._broker, "envelope"):
            if case.to:
                self._delivering.broadcast([(case.to, "worker.x" if case.to == EVENTS else "", case)])

    @property
    def _node(self) -> str:
        state = self._cluster.state_of("w1")
        assert state is not None
        return state.node

    def _stats(self) -> dict[str, Any]:
        answers = self._cluster.app.control.ask("stats", destination=[self._node], timeout=20)
        told: dict[str, Any] = answers.replies[self._node]["umbel"]
        return told

    # -- what came of it -------------------------------------------------------------------------

    def _ledger(self) -> Counter[str]:
        ledger = ledger_of(str(self._cluster.home))
        return Counter(ledger.read_text().splitlines()) if ledger.exists() else Counter()

    def _wait_for_neighbours(self) -> None:
        worker = self._cluster.workers["w1"]
        wait_until(
            lambda: worker.poll() is not None or not set(self._sent) - self._ledger().keys(),
            what="all neighbours to run",
        )
        assert worker.poll() is None, f"the worker ended: {self._cluster.log('w1')[-4000:]}"

    def _unsettled(self) -> int:
        depths: dict[str, Depth] = self._stranger.do(self._stranger.broker.queues())
        depth = depths.get("celery", Depth(0, 0, 0))
        return depth.ready + depth.claimed

    def _replies_at_the_end(self) -> set[str]:
        answers = self._cluster.app.control.ask("ping", destination=[self._node, NODE], timeout=20)
        return set(answers.replies)

    def _unreadable(self) -> dict[str, int]:
        """What this node heard and could not read: it is counted."""
        heard = {"events": EVENTS, "requests": REQUESTS}
        kinds = {"events": "event", "requests": "control"}
        return {
            what: sum(
                case.to == heard[what] or (case.kind == kinds[what] and not is_readable(case, self._broker))
                for case in corpus.of(self._broker, "event", "control", "envelope")
                if case.kind != "event" or case.to.startswith("worker.")  # others it does not listen to
            )
            for what in heard
        }

    def _wrong_in_queue(self) -> dict[str, str]:
        """The cases that did not end as they say, and how they did.

        They are asked for again for a while: on RabbitMQ a result is stored a moment before the letter.
        """
        wrong: dict[str, str] = {}

        def look() -> bool:
            nonlocal wrong
            letters: Sequence[DeadLetter] = self._stranger.do(self._stranger.broker.dead_letters())
            judged = {case.name: self._judge(case, letters) for case in self._queued}
            wrong = {name: what for name, what in judged.items() if what}
            return not wrong

        with suppress(AssertionError):
            wait_until(look, deadline_s=5, what="the last letters")
        return wrong

    def _judge(self, case: Case, letters: Sequence[DeadLetter]) -> str:
        expected = case.expect(self._broker)
        letter = next((one for one in letters if is_of(case, one)), None)
        if letter is not None:
            found, why = "dead", letter.reason
        else:
            status = self._cluster.app.AsyncResult(case.task_id).state
            found, why = {SUCCESS: "runs", FAILURE: "error", REVOKED: "error"}.get(status, "waits"), status
        if found != expected:
            return f"is {found}, not {expected}: {why[:200]}"
        return "" if case.reason in why else f"for another reason: {why[:200]}"

    def _wrong_answers(self) -> dict[str, str]:
        judged = {case.name: self._wrong_answer(case) for case in corpus.of(self._broker, "control")}
        return {name: what for name, what in judged.items() if what}

    def _wrong_results(self) -> dict[str, str]:
        judged = {case.name: self._wrong_result(case) for case in corpus.of(self._broker, "result")}
        return {name: what for name, what in judged.items() if what}

    def _wrong_answer(self, case: Case) -> str:
        said = next(
            (v for ticket, v in self._stranger.answered.items() if ticket.startswith(case.name)), None
        )
        found = (
            "ignored" if said is None else "error" if isinstance(said, dict) and "error" in said else "runs"
        )
        return "" if found == case.expect(self._broker) else f"is {found}: {said!r:.200}"

    def _wrong_result(self, case: Case) -> str:
        expected = case.expect(self._broker)
        try:
            value = self._cluster.app.AsyncResult(case.name).get(timeout=0.05)
        except (UmbelError, RemoteError, ValueError) as error:
            return "" if expected == "error" else f"raises {error!r:.200}"
        return "" if expected == "runs" else f"is {value!r:.200}"


def is_readable(case: Case, broker: Broker) -> bool:
    try:
        read_case(corpus.changed(case, {b"@INC@": b"1"}), broker)
    except WireError:
        return False
    return True


def is_of(case: Case, letter: DeadLetter) -> bool:
    """Whether the letter is the case itself; what follows a case has ids of its own."""
    message = letter.message
    if not message.body and letter.reason.endswith("it was not read"):
        return case.reason == "message_max_bytes"
    if message.correlation_id in (case.name, case.task_id) or message.body == case.raw:
        return True
    quoted = f'"{case.name}"'.encode()
    return b'"id":' + quoted in message.headers.replace(b" ", b"") or quoted in b'"%b"' % message.body
