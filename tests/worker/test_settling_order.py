"""What the settler brings to the broker, in which order, and what is left when that fails."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from tests.worker.recorded import FOLLOW_UP, QUEUE, TAG, delivery_of, result_of
from umbel import backoff
from umbel.brokers.interface import Ack, Bury, Delivery, Refused, Return, Settled, Started, Tag, Verdict
from umbel.brokers.interface.connection import Capabilities
from umbel.brokers.sqlite.store import CAPABILITIES
from umbel.errors import BrokerRefused, BrokerUnavailable
from umbel.wire.message import Message, Outgoing, StoredResult
from umbel.worker.context import Counters, Ending
from umbel.worker.delivery import settle
from umbel.worker.delivery.claimed import RetainedOutcomes
from umbel.worker.delivery.settle import BATCH_MAX, AfterSettling, Settler
from umbel.worker.outages import Outages

RESULT, SENT = result_of("SUCCESS"), [FOLLOW_UP]


@dataclass
class Recorder:
    """Broker, store and event log in one: what each was asked, in the order of asking."""

    asked: list[tuple[str, Any]] = field(default_factory=list)
    conflicts: frozenset[int | str] = frozenset()
    failures: list[str] = field(default_factory=list)  # what is asked for so often is away
    refuses: Callable[[str, Any], Exception | None] = lambda what, value: None
    refused: Sequence[Refused] = ()
    keyring: None = None
    url: str = "sqlite:///queue.db"
    signer: None = None
    capabilities: Capabilities = CAPABILITIES
    recorded: bool = True
    before: Callable[[], Coroutine[Any, Any, None]] | None = None  # what a broker's reply takes

    def _ask(self, what: str, value: Any) -> None:
        if what in self.failures:
            self.failures.remove(what)
            raise BrokerUnavailable(f"no {what} now")
        if (error := self.refuses(what, value)) is not None:
            raise error
        self.asked.append((what, value))

    async def settle(self, verdicts: Sequence[Verdict]) -> Settled:
        await self._reply()
        self._ask("settle", list(verdicts))
        return Settled(len(verdicts), self.conflicts, self.refused)

    async def ended(self, tags: Sequence[Tag]) -> frozenset[Tag]:
        self._ask("ended", list(tags))
        return self.conflicts

    async def bury(self, refused: Sequence[Refused]) -> None:
        self._ask("bury", list(refused))

    async def keep_failed(self, failed: Sequence[Refused]) -> None:
        self._ask("keep", list(failed))

    async def publish(self, messages: Sequence[Outgoing]) -> None:
        self._ask("publish", list(messages))

    def store(self, results: Sequence[StoredResult]) -> None:
        self._ask("store", list(results))

    async def release_unique(self, held: Sequence[tuple[str, str]]) -> None:
        await self._reply()
        self._ask("release", list(held))

    async def _reply(self) -> None:
        if self.before is not None:
            await self.before()

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
    refused: list[Refused]  # what it was told of
    after: list[bytes]  # what it asked for
    kept: RetainedOutcomes

    @property
    def asked(self) -> list[tuple[str, Any]]:
        """Without the looks at the event log."""
        return [one for one in self.recorder.asked if one[0] != "logged"]


def play(
    scenario: Callable[[Bench], Coroutine[Any, Any, None]], *, together: bool = True, confirmed: bool = True
) -> None:
    async def bounded() -> None:
        recorder, counters, settled, refused = Recorder(), Counters(), list[int](), list[Refused]()
        if not confirmed:
            recorder.capabilities = replace(CAPABILITIES, transport="amqp")
        context = SimpleNamespace(
            broker=recorder,
            backend=SimpleNamespace(store=recorder.store, shares_settle=lambda _url: together),
            counters=counters,
            outages=Outages(),
            store_outages=Outages("result store"),
            settings=SimpleNamespace(after_settle=None),
        )
        settler = Settler(
            cast("Any", context),
            cast("Any", recorder),
            refused=refused.extend,
            settled=lambda: settled.append(settler.pending),
        )
        after = list[bytes]()
        cast("Any", settler.after).add = after.extend
        async with asyncio.timeout(10.0):  # what never settles is a mutant, or a mistake
            await scenario(Bench(recorder, settler, counters, settled, refused, after, settler.retained))

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


def test_without_a_recorder_no_event_log_is_waited_for() -> None:
    async def scenario(bench: Bench) -> None:
        bench.recorder.recorded = False
        bench.settler.add(Ack(1))
        bench.settler.report([RESULT], ())
        await bench.settler.flush()
        assert bench.recorder.asked == [("store", [RESULT]), ("settle", [Ack(1)])]

    play(scenario)


def test_where_results_live_elsewhere_they_are_stored_before_their_acks() -> None:
    """A crash in between repeats work; the other order would lose a result."""

    async def scenario(bench: Bench) -> None:
        bench.settler.add(Ack(1, [RESULT], SENT))
        bench.settler.add(Bury(2, "why", charged=True, results=[RESULT], follow_ups=SENT))
        bench.settler.add(Return(3))
        await bench.settler.flush()
        bare = [Ack(1, (), SENT), Bury(2, "why", True, (), SENT), Return(3)]
        assert bench.asked == [("ended", [1, 2]), ("store", [RESULT, RESULT]), ("settle", bare)]

    play(scenario, together=False)


def test_a_run_whose_claim_has_ended_stores_no_result() -> None:
    """It is repeated elsewhere, and that run's result must not meet another."""
    other = StoredResult("other", "SUCCESS", b"{}")

    async def scenario(bench: Bench) -> None:
        bench.recorder.conflicts = frozenset({1})
        bench.settler.add(Ack(1, [RESULT], SENT))
        bench.settler.add(Ack(2, [other]))
        await bench.settler.flush()
        bare = [Ack(1, (), SENT), Ack(2)]
        assert bench.asked == [("ended", [1, 2]), ("store", [other]), ("settle", bare)]
        assert bench.counters.conflicts == 1

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


def test_where_the_broker_holds_no_keys_none_is_released() -> None:
    async def scenario(bench: Bench) -> None:
        bench.recorder.capabilities = replace(CAPABILITIES, unique=False)
        bench.settler.add(Ack(1))
        bench.settler.release("key", "t")
        bench.settler.release_of(HOLDS)
        await run_until_drained(bench)
        assert bench.asked == [("settle", [Ack(1)])]

    play(scenario)


HOLDS = Message(b'{"task": "t", "id": "t", "umbel_unique": "key"}', b"[]")


@pytest.mark.parametrize(
    ("headers", "released"),
    [
        (HOLDS.headers, [("key", "t")]),
        (b'{"id": "t", "umbel_unique": null, "umbel_limit": "k"}', []),
        (b'{"id": "t", "umbel_unique": 5}', []),
        (b'{"id": "t", "umbel_unique": ', []),
        (b"{}", []),
    ],
)
def test_the_key_of_a_message_that_nobody_opened_is_read_from_its_headers(
    headers: bytes, released: list[tuple[str, str]]
) -> None:
    async def scenario(bench: Bench) -> None:
        bench.settler.release_of(replace(HOLDS, headers=headers))
        await bench.settler.flush()
        assert [value for what, value in bench.asked if what == "release"] == [released][: len(released)]

    play(scenario)


def test_a_message_that_cannot_be_returned_has_ended_and_is_reported_as_refused() -> None:
    """Or those who wait for its task would wait for ever, and its key would stay held."""
    message = Outgoing(QUEUE, HOLDS)

    def refuses(what: str, value: Any) -> Exception | None:
        is_return = what == "settle" and any(isinstance(one, Return) for one in value)
        return BrokerRefused("it cannot be written") if is_return else None

    async def scenario(bench: Bench) -> None:
        bench.recorder.refuses = refuses
        bench.settler.add(Return(1, not_before=5.0), message)
        await run_until_drained(bench)
        ((what, (burial,)),) = bench.asked
        assert (what, burial.tag) == ("settle", 1) and "it cannot be written" in burial.reason
        assert bench.refused == [Refused(message, burial.reason)]

    play(scenario)


@pytest.mark.parametrize("what", ["settle", "release"])
def test_what_gathers_while_the_last_is_brought_is_waited_for_too(what: str) -> None:
    async def scenario(bench: Bench) -> None:
        def another(asked: str, value: Any) -> None:
            if asked != "release" or value != [("key", "t")]:
                return
            if what == "settle":
                bench.settler.add(Ack(1))
            else:
                bench.settler.release("other", "u")

        async def slowly() -> None:
            loop = asyncio.get_running_loop()
            replied = loop.create_future()
            loop.call_soon(replied.set_result, None)
            await replied

        bench.recorder.refuses = another
        bench.recorder.before = slowly
        bench.settler.release("key", "t")
        await run_until_drained(bench)
        last = ("settle", [Ack(1)]) if what == "settle" else ("release", [("other", "u")])
        assert bench.asked == [("release", [("key", "t")]), last]

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


@pytest.mark.parametrize("conflicts", [frozenset[int | str](), frozenset[int | str]({TAG})])
def test_an_outcome_whose_message_came_back_is_settled_with_the_new_claim(
    conflicts: frozenset[int | str],
) -> None:
    async def scenario(bench: Bench) -> None:
        bench.recorder.conflicts = conflicts
        bench.settler.add_outcome(Ack(TAG, [RESULT]), delivery_of())
        bench.kept.came_back[TAG] = Delivery(8, QUEUE, delivery_of().message)
        await bench.settler.flush()
        again = Ack(8, [RESULT]) if conflicts else Ack(8)  # the rest was applied
        assert bench.asked == [("settle", [Ack(TAG, [RESULT])]), ("settle", [again])]
        assert (bench.settler.pending, bench.kept.came_back) == (0, {})

    play(scenario)


def test_an_outcome_waits_until_it_is_settled_and_nothing_else_does() -> None:
    async def scenario(bench: Bench) -> None:
        bench.settler.add(Started(TAG))
        assert bench.settler.waiting_outcome(delivery_of()) is None
        bench.settler.add_outcome(Ack(TAG), delivery_of())
        assert bench.settler.waiting_outcome(delivery_of()) == TAG
        await bench.settler.flush()
        assert bench.settler.waiting_outcome(delivery_of()) is None

    play(scenario)


@pytest.mark.parametrize(
    ("confirmed", "conflicts", "kept"),
    [
        (True, frozenset[int | str](), None),
        (True, frozenset[int | str]({TAG}), Ack(8, [RESULT])),
        (False, frozenset[int | str](), Ack(8)),
    ],
)
def test_what_was_not_applied_or_may_not_have_arrived_is_kept(
    confirmed: bool, conflicts: frozenset[int | str], kept: Ack | None
) -> None:
    async def scenario(bench: Bench) -> None:
        bench.recorder.conflicts = conflicts
        bench.settler.add_outcome(Ack(TAG, [RESULT]), delivery_of())
        await bench.settler.flush()
        assert bench.kept.take(Delivery(8, QUEUE, delivery_of().message)) == kept

    play(scenario, confirmed=confirmed)


def test_what_the_broker_cannot_take_now_is_kept_and_nothing_is_done_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """N2: unavailable is waited for. What was stored before it went away is not stored again."""
    waited: list[tuple[int, str]] = []
    benches: list[Bench] = []

    def wait_s(failures: int, chance: float, **_limits: float) -> float:
        assert 0 <= chance < 1
        waited.append((failures, benches[0].settler.problem))
        return 0.0

    monkeypatch.setattr(backoff, "reconnect_wait_s", wait_s)

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
        assert [record.levelname for record in caplog.records].count(
            "WARNING"
        ) == 1  # however often it failed
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
        assert (bench.asked, bench.settler.pending, bench.settled) == ([("ended", [1])], 1, [])
        await bench.settler.flush()
        assert bench.asked[1:] == [("ended", [1]), ("store", [RESULT]), ("settle", [Ack(1)])]

    play(scenario, together=False)


# -- what is refused (N2) ----------------------------------------------------------------------------


def test_what_a_broker_refused_while_it_settled_is_told() -> None:
    async def scenario(bench: Bench) -> None:
        bench.recorder.refused = [Refused(FOLLOW_UP, "closed")]
        bench.settler.add(Ack(1, (), SENT))
        await bench.settler.flush()
        assert bench.refused == [Refused(FOLLOW_UP, "closed")]
        assert bench.settler.pending == 0

    play(scenario)


@pytest.mark.parametrize("error", [BrokerRefused("no to all of it"), OverflowError("a fault of our own")])
def test_a_verdict_that_cannot_be_written_is_found_and_its_message_buried(error: Exception) -> None:
    bad = Ack(2, [RESULT])

    async def scenario(bench: Bench) -> None:
        bench.recorder.refuses = lambda what, value: error if what == "settle" and bad in value else None
        for verdict in (Ack(1), bad, Ack(3), Ack(4)):
            bench.settler.add(verdict)
        await bench.settler.flush()
        settled = [verdicts for _, verdicts in bench.asked]
        assert settled[0] == [Ack(1)] and settled[2:] == [[Ack(3)], [Ack(4)]]
        (burial,) = settled[1]
        assert isinstance(burial, Bury) and burial.tag == 2 and str(error) in burial.reason
        assert (bench.settler.pending, bench.counters.faults) == (0, 1)
        bench.settler.add(Ack(5))
        bench.settler.add(Ack(6))
        await bench.settler.flush()
        assert bench.asked[-1] == ("settle", [Ack(5), Ack(6)])  # together again

    play(scenario)


def test_failures_that_the_broker_refuses_to_keep_hold_up_nothing(caplog: pytest.LogCaptureFixture) -> None:
    failed = Outgoing(QUEUE, delivery_of().message)

    async def scenario(bench: Bench) -> None:
        error = BrokerRefused("umbel.failed is another kind of key")
        bench.recorder.refuses = lambda what, _: error if what == "keep" else None
        bench.settler.retain_failed(failed, "broke")
        bench.settler.retain_failed(failed, "broke too")
        bench.settler.report([RESULT], ())
        bench.settler.add(Ack(1))
        await run_until_drained(bench)
        assert bench.asked == [("store", [RESULT]), ("settle", [Ack(1)])]
        assert (bench.settler.pending, bench.settler.problem) == (0, "")

    play(scenario)
    (told,) = caplog.records
    assert "refuses to store failed tasks" in told.message
    assert (told.__dict__["count"], told.__dict__["why"]) == (2, "umbel.failed is another kind of key")


def test_a_message_that_cannot_even_be_buried_stays_and_the_others_are_settled() -> None:
    async def scenario(bench: Bench) -> None:
        bench.recorder.refuses = lambda what, value: (
            BrokerRefused("no") if what == "settle" and any(one.tag == 2 for one in value) else None
        )
        for tag in (1, 2, 3):
            bench.settler.add(Ack(tag))
        await bench.settler.flush()
        assert bench.asked == [("settle", [Ack(1)]), ("settle", [Ack(3)])]
        assert bench.settler.pending == 0

    play(scenario)


def test_a_broker_that_goes_away_while_a_message_is_buried_is_waited_for() -> None:
    async def scenario(bench: Bench) -> None:
        answers = iter([BrokerRefused("no"), BrokerUnavailable("away")])
        bench.recorder.refuses = lambda what, value: next(answers, None) if what == "settle" else None
        bench.settler.add(Ack(1))
        with pytest.raises(BrokerUnavailable):
            await bench.settler.flush()
        assert bench.settler.pending == 1
        await bench.settler.flush()
        assert bench.asked == [("settle", [Ack(1)])]

    play(scenario)


def test_refused_results_are_told_and_the_message_is_acknowledged() -> None:
    other = StoredResult("other", "SUCCESS", b"{}")

    async def scenario(bench: Bench) -> None:
        answers = iter([BrokerRefused("too large", places=[1])])
        bench.recorder.refuses = lambda what, value: next(answers, None) if what == "store" else None
        bench.settler.add(Ack(1, [RESULT, other]))
        await bench.settler.flush()
        assert bench.refused == [Refused(other, "too large")]
        assert bench.asked == [("ended", [1]), ("settle", [Ack(1)])]

    play(scenario, together=False)


def test_of_reported_messages_the_refused_one_is_buried_and_the_others_are_sent() -> None:
    good, bad = Outgoing("good", FOLLOW_UP.message), Outgoing("closed", FOLLOW_UP.message)

    async def scenario(bench: Bench) -> None:
        bench.recorder.refuses = lambda what, value: (
            BrokerRefused("closed") if what == "publish" and bad in value else None
        )
        bench.settler.report((), [good, bad, good])
        await bench.settler.flush()
        refused = [Refused(bad, "closed")]
        assert bench.asked == [("publish", [good]), ("bury", refused), ("publish", [good])]
        assert bench.refused == refused and bench.settler.pending == 0

    play(scenario)


def test_of_messages_that_were_sent_in_part_only_the_refused_are_buried() -> None:
    first, bad = Outgoing("good", FOLLOW_UP.message), Outgoing("full", FOLLOW_UP.message)

    async def scenario(bench: Bench) -> None:
        answers = iter([BrokerRefused("full", places=[1])])
        bench.recorder.refuses = lambda what, value: next(answers, None) if what == "publish" else None
        bench.settler.report((), [first, bad])
        await bench.settler.flush()
        assert bench.asked == [("bury", [Refused(bad, "full")])]

    play(scenario)


def test_a_chord_is_counted_before_the_message_that_was_a_part_of_it_is_settled() -> None:
    async def scenario(bench: Bench) -> None:
        answers = iter([BrokerUnavailable("away")])

        def count() -> Ending:
            if (error := next(answers, None)) is not None:
                raise error
            return Ending([RESULT], SENT)

        bench.settler.do_first(count)
        bench.settler.add(Ack(1))
        with pytest.raises(BrokerUnavailable):
            await bench.settler.flush()
        assert bench.asked == [] and bench.settler.pending == 2
        await bench.settler.flush()
        assert bench.asked == [("store", [RESULT]), ("publish", SENT), ("settle", [Ack(1)])]

    play(scenario)


def test_a_chord_that_cannot_be_counted_holds_nothing_up() -> None:
    async def scenario(bench: Bench) -> None:
        def count() -> Ending:
            raise KeyError("a body that a peer wrote")

        bench.settler.do_first(count)
        bench.settler.add(Ack(1))
        await bench.settler.flush()
        assert bench.asked == [("settle", [Ack(1)])]

    play(scenario)


def test_work_that_comes_first_and_fails_is_given_up_after_so_many_attempts() -> None:
    async def scenario(bench: Bench) -> None:
        attempts: list[int] = []

        def work() -> Ending:
            attempts.append(1)
            raise OSError("the database is away")

        bench.settler.do_first(work, attempts_max=3)
        bench.settler.add(Ack(1))
        for _ in range(2):
            with pytest.raises(BrokerUnavailable, match="the database is away"):
                await bench.settler.flush()
        assert bench.asked == []
        await bench.settler.flush()
        assert (len(attempts), bench.asked) == (3, [("settle", [Ack(1)])])

    play(scenario)


def test_what_joins_a_verdict_is_settled_with_it() -> None:
    async def scenario(bench: Bench) -> None:
        given = Ending([RESULT], SENT, after=b"then")
        bench.settler.do_first(lambda: given, joins=2)
        bench.settler.do_first(lambda: Ending([RESULT]), joins=3)
        for verdict in (Ack(1), Ack(2, [RESULT], [], b"first"), Return(3)):
            bench.settler.add(verdict)
        await bench.settler.flush()
        joined = Ack(2, [RESULT, RESULT], SENT, b"then")
        assert bench.asked == [("store", [RESULT]), ("settle", [Ack(1), joined, Return(3)])]
        assert bench.after == [b"then"]

    play(scenario)


def test_work_that_comes_first_and_hangs_is_waited_for_again_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settle, "TIMEOUT_S", 0.0)
    began, go_on = list[int](), threading.Event()

    def work() -> Ending:
        began.append(1)
        go_on.wait(10.0)
        return Ending([RESULT], after=b"then")

    async def scenario(bench: Bench) -> None:
        bench.settler.do_first(work)
        for _ in range(2):
            with pytest.raises(BrokerUnavailable):
                await bench.settler.flush()
        go_on.set()
        monkeypatch.setattr(settle, "TIMEOUT_S", 10.0)
        await bench.settler.flush()
        assert (len(began), bench.asked, bench.after) == (1, [("store", [RESULT])], [b"then"])

    play(scenario)


def test_what_is_to_come_after_comes_when_all_the_rest_is_applied() -> None:
    async def scenario(bench: Bench) -> None:
        bench.recorder.conflicts = frozenset({2})
        bench.settler.add(Ack(1, [RESULT], SENT, b"one"))
        bench.settler.add_outcome(Ack(2, [RESULT], SENT, b"two"), delivery_of())
        bench.settler.add(Bury(3, "why", after=b"three"))
        bench.settler.report([RESULT], [], b"reported")
        bench.recorder.failures = ["settle"]
        with pytest.raises(BrokerUnavailable):
            await bench.settler.flush()
        assert bench.after == [b"reported"]
        await bench.settler.flush()
        assert bench.after == [b"reported", b"one", b"three"] and bench.settler.pending == 0

    play(scenario)


def test_what_cannot_be_written_has_no_after() -> None:
    async def scenario(bench: Bench) -> None:
        bench.recorder.refuses = lambda what, value: (
            TypeError("odd") if what == "settle" and isinstance(value[0], Ack) else None
        )
        bench.settler.add(Ack(1, [RESULT], SENT, b"one"))
        await bench.settler.flush()
        assert [what for what, _ in bench.asked] == ["settle"] and bench.after == []

    play(scenario)


def test_work_after_settling_is_tried_again_and_given_up_in_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backoff, "reconnect_wait_s", lambda *_, **_limits: 0.0)
    asked: list[tuple[bytes, ...]] = []

    def do(work: Sequence[bytes]) -> None:
        asked.append(tuple(work))
        if b"never" in work or len(asked) == 1:
            raise OSError("away")

    async def scenario() -> None:
        after = AfterSettling(do)
        going_on = asyncio.create_task(after.run())
        async with asyncio.timeout(10.0):
            after.add([b"once more"])
            assert after.waiting == [b"once more"]
            await after.drained()
            after.add([b"never"])
            await after.drained()
        going_on.cancel()
        assert after.waiting == []

    asyncio.run(scenario())
    assert asked == [(b"once more",)] * 2 + [(b"never",)] * settle.ATTEMPTS_MAX
    assert [one.message for one in caplog.records] == [
        "chords of finished tasks cannot be updated in the result backend; giving up"
    ]


def test_where_nobody_does_the_work_after_settling_none_waits() -> None:
    async def scenario() -> None:
        after = AfterSettling(None)
        after.add([b"one"])
        await after.run()
        assert after.waiting == []

    asyncio.run(scenario())
