"""What the settler brings to the broker, in which order, and what is left when that fails."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.worker.recorded import FOLLOW_UP, result_of
from umbel.brokers.interface import Ack, Bury, Return, Settled, Started, Verdict
from umbel.errors import BrokerUnavailable
from umbel.wire.message import Outgoing, StoredResult
from umbel.worker import settling
from umbel.worker.context import Counters
from umbel.worker.settling import BATCH_MAX, Settler

RESULT, SENT = result_of("SUCCESS"), [FOLLOW_UP]


@dataclass
class Recorder:
    """Broker, store and event log in one: what each was asked, in the order of asking."""

    asked: list[tuple[str, Any]] = field(default_factory=list)
    conflicts: frozenset[int | str] = frozenset()
    failures: list[str] = field(default_factory=list)  # what is asked for so often is away

    def _ask(self, what: str, value: Any) -> None:
        if what in self.failures:
            self.failures.remove(what)
            raise BrokerUnavailable(f"no {what} now")
        self.asked.append((what, value))

    async def settle(self, verdicts: Sequence[Verdict]) -> Settled:
        self._ask("settle", list(verdicts))
        return Settled(len(verdicts), self.conflicts)

    async def publish(self, messages: Sequence[Outgoing]) -> None:
        self._ask("publish", list(messages))

    def store(self, results: Sequence[StoredResult]) -> None:
        self._ask("store", list(results))

    async def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        self._ask("release", list(held))

    async def logged(self) -> None:
        self._ask("logged", None)

    @property
    def coordination(self) -> "Recorder":
        return self


@dataclass
class Bench:
    recorder: Recorder
    settler: Settler
    counters: Counters
    settled: list[int]  # how many were pending each time fewer were held

    @property
    def asked(self) -> list[tuple[str, Any]]:
        """Without the looks at the event log."""
        return [one for one in self.recorder.asked if one[0] != "logged"]


def play(scenario: Callable[[Bench], Coroutine[Any, Any, None]], *, together: bool = True) -> None:
    async def bounded() -> None:
        recorder, counters, settled = Recorder(), Counters(), list[int]()
        settler = Settler(
            cast("Any", recorder),
            cast("Any", SimpleNamespace(store=recorder.store)),
            counters,
            together=together,
            logged=recorder.logged,
            settled=lambda: settled.append(settler.pending),
        )
        async with asyncio.timeout(10.0):  # what never settles is a mutant, or a mistake
            await scenario(Bench(recorder, settler, counters, settled))

    asyncio.run(bounded())


async def run_until_drained(bench: Bench) -> None:
    going_on = asyncio.create_task(bench.settler.run())
    await bench.settler.drained()
    going_on.cancel()


def test_verdicts_are_settled_together_with_all_they_bring() -> None:
    bury = Bury(3, "why", results=[RESULT])
    verdicts: list[Verdict] = [Ack(1, [RESULT], SENT), Return(2, ran=True), bury, Started(4)]

    async def scenario(bench: Bench) -> None:
        for verdict in verdicts:
            bench.settler.add(verdict)
        assert bench.settler.pending == 4
        await run_until_drained(bench)
        assert bench.recorder.asked == [("logged", None), ("settle", verdicts)]
        assert (bench.settler.pending, bench.settled) == (0, [0])

    play(scenario)


def test_where_results_live_elsewhere_they_are_stored_before_their_acks() -> None:
    """A crash in between repeats work; the other order would lose a result."""

    async def scenario(bench: Bench) -> None:
        bench.settler.add(Ack(1, [RESULT], SENT))
        bench.settler.add(Bury(2, "why", charged=True, results=[RESULT], follow_ups=SENT))
        bench.settler.add(Return(3))
        await bench.settler.flush()
        bare = [Ack(1, (), SENT), Bury(2, "why", True, (), SENT), Return(3)]
        assert bench.asked == [("store", [RESULT, RESULT]), ("settle", bare)]

    play(scenario, together=False)


def test_where_there_is_no_result_the_store_is_not_asked() -> None:
    async def scenario(bench: Bench) -> None:
        bench.settler.add(Ack(1, (), SENT))
        await bench.settler.flush()
        assert bench.asked == [("settle", [Ack(1, (), SENT)])]

    play(scenario, together=False)


def test_more_than_a_batch_is_settled_in_several_and_in_its_order() -> None:
    async def scenario(bench: Bench) -> None:
        for tag in range(BATCH_MAX * 2 + 1):
            bench.settler.add(Ack(tag))
        await bench.settler.flush()
        batches = [[verdict.tag for verdict in verdicts] for _, verdicts in bench.asked]
        assert [len(batch) for batch in batches] == [BATCH_MAX, BATCH_MAX, 1]
        assert [tag for batch in batches for tag in batch] == list(range(BATCH_MAX * 2 + 1))
        assert bench.settled == [BATCH_MAX + 1, 1, 0]

    play(scenario)


def test_what_is_reported_is_stored_then_sent_and_goes_before_verdicts() -> None:
    async def scenario(bench: Bench) -> None:
        bench.settler.add(Ack(1))
        bench.settler.report([RESULT], SENT)
        assert bench.settler.pending == 3
        await run_until_drained(bench)
        assert bench.asked == [("store", [RESULT]), ("publish", SENT), ("settle", [Ack(1)])]
        assert bench.recorder.asked[0] == ("logged", None)
        assert bench.settled == [1, 0]

    play(scenario)


def test_a_report_of_nothing_asks_nothing() -> None:
    async def scenario(bench: Bench) -> None:
        bench.settler.report((), ())
        await bench.settler.flush()
        await bench.settler.drained()
        assert (bench.recorder.asked, bench.settled) == ([], [])

    play(scenario)


@pytest.mark.parametrize(("results", "follow_ups"), [([RESULT], []), ([], SENT)])
def test_half_a_report_is_enough(results: list[StoredResult], follow_ups: list[Outgoing]) -> None:
    async def scenario(bench: Bench) -> None:
        bench.settler.report(results, follow_ups)
        await run_until_drained(bench)
        assert bench.asked == [("store", results) if results else ("publish", follow_ups)]

    play(scenario)


def test_a_unique_key_is_released_after_its_message_is_settled() -> None:
    async def scenario(bench: Bench) -> None:
        bench.settler.release("key", "t")
        bench.settler.add(Ack(1))
        await run_until_drained(bench)
        assert bench.asked == [("settle", [Ack(1)]), ("release", [("key", "t")])]
        bench.settler.release("other", "u")
        await run_until_drained(bench)
        assert bench.asked[2:] == [("release", [("other", "u")])]

    play(scenario)


def test_claims_that_had_ended_are_counted() -> None:
    async def scenario(bench: Bench) -> None:
        bench.recorder.conflicts = frozenset({1, 2})
        bench.settler.add(Ack(1))
        await bench.settler.flush()
        bench.settler.add(Ack(2))
        await bench.settler.flush()
        assert bench.counters.conflicts == 4

    play(scenario)


def test_what_the_broker_cannot_take_now_is_kept_and_nothing_is_done_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """N2: unavailable is waited for. What was stored before it went away is not stored again."""
    waited: list[tuple[int, str]] = []
    benches: list[Bench] = []

    def wait_s(failures: int, chance: float) -> float:
        assert 0 <= chance < 1
        waited.append((failures, benches[0].settler.problem))
        return 0.0

    monkeypatch.setattr(settling, "reconnect_wait_s", wait_s)

    async def scenario(bench: Bench) -> None:
        benches.append(bench)
        bench.recorder.failures = ["publish", "settle", "settle", "release"]
        bench.settler.report([RESULT], SENT)
        bench.settler.add(Ack(1))
        bench.settler.release("key", "t")
        going_on = asyncio.create_task(bench.settler.run())
        await bench.settler.drained()
        assert [failures for failures, _ in waited] == [1, 2, 3, 4]
        assert "no publish now" in waited[0][1] and bench.settler.problem == ""
        assert [record.levelname for record in caplog.records].count("ERROR") == 1  # however often it failed
        assert bench.asked == [
            ("store", [RESULT]),
            ("publish", SENT),
            ("settle", [Ack(1)]),
            ("release", [("key", "t")]),
        ]
        bench.recorder.failures = ["settle"]
        bench.settler.add(Ack(2))
        await bench.settler.drained()
        assert [failures for failures, _ in waited[4:]] == [1]  # counted from the last success
        going_on.cancel()

    play(scenario)


def test_what_cannot_be_stored_is_not_acknowledged() -> None:
    async def scenario(bench: Bench) -> None:
        bench.recorder.failures = ["store"]
        bench.settler.add(Ack(1, [RESULT]))
        with pytest.raises(BrokerUnavailable):
            await bench.settler.flush()
        assert (bench.asked, bench.settler.pending, bench.settled) == ([], 1, [])
        await bench.settler.flush()
        assert bench.asked == [("store", [RESULT]), ("settle", [Ack(1)])]

    play(scenario, together=False)
