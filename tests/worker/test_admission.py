"""What becomes of messages between claim and pool, and of their counts when they end."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from tests.brokers.under_test import eventually
from tests.worker.light_node import nothing_refused
from umbel import App
from umbel.backends.registry import open_backend
from umbel.backends.sqlite import SqliteBackend
from umbel.brokers.interface import BrokerSettings, Settled, Verdict
from umbel.brokers.sqlite.broker import SqliteBroker
from umbel.errors import BrokerUnavailable
from umbel.pools.interface import LostJob, PoolSettings
from umbel.pools.prefork.parent import PreforkPool
from umbel.protocol.delivery.delivery import AdmissionPolicy, TaskRules
from umbel.protocol.delivery.revoked import RevokedTasks
from umbel.wire.message import Message, StoredResult
from umbel.worker.context import Ending, Identity, WorkerContext, WorkerSettings
from umbel.worker.delivery.admit import Admission
from umbel.worker.delivery.end import Endings
from umbel.worker.delivery.settle import Settler
from umbel.worker.delivery.task_events import TaskEvents
from umbel.worker.events import Events

OWNER, QUEUE = "w@host.1.1", "celery"


class RefusesOnce(SqliteBroker):
    """The embedded broker; what is settled first finds it away."""

    is_away = True

    async def settle(self, verdicts: Sequence[Verdict]) -> Settled:
        if self.is_away:
            self.is_away = False
            raise BrokerUnavailable("away for a moment")
        return await super().settle(verdicts)


@dataclass
class Bench:
    broker: SqliteBroker
    context: WorkerContext
    settler: Settler
    endings: Endings
    admission: Admission


def play(
    tmp_path: Path,
    scenario: Callable[[Bench], Coroutine[Any, Any, None]],
    *,
    rules: TaskRules,
    broker_class: type[SqliteBroker] = SqliteBroker,
) -> None:
    url = f"sqlite:///{tmp_path / 'queue.db'}"
    app = App("bench", broker=url)
    app.send_task("t.early")
    app.close()

    async def bounded() -> None:
        broker = broker_class(BrokerSettings(url))
        await broker.open()
        try:
            async with asyncio.timeout(60.0):
                await scenario(bench_on(broker, tmp_path, rules))
        finally:
            await broker.close()

    asyncio.run(bounded())


def bench_on(broker: SqliteBroker, tmp_path: Path, rules: TaskRules) -> Bench:
    settings = WorkerSettings(
        node="w@host",
        queues=(QUEUE,),
        tasks={"t.early": rules},
        end_without_running=nothing,
        run_directory=tmp_path,
    )
    backend = open_backend(broker.url, BrokerSettings(broker.url))
    pool = PreforkPool(PoolSettings(host=cast("Any", None), node="w@host", concurrency=1))  # never started
    context = WorkerContext(settings, Identity("w@host", 1, 1), broker, backend, pool)
    policy = AdmissionPolicy(settings.tasks, max_deliveries=3)
    events = TaskEvents(Events(context))
    settler = Settler(context, events.step, refused=nothing_refused)
    endings = Endings(context, policy, settler, events)
    admission = Admission(context, policy, RevokedTasks(), settler, endings, events)
    return Bench(broker, context, settler, endings, admission)


def nothing(message: Message, queue: str, error: Exception, status: str, **_: object) -> Ending:
    return Ending()


def test_a_message_whose_early_ack_fails_goes_back_to_its_queue(tmp_path: Path) -> None:
    """The claimer lives on and renews its lease: nobody else would ever return it."""

    async def scenario(bench: Bench) -> None:
        claim = await bench.broker.claim(OWNER, [QUEUE], 10)
        assert len(claim.deliveries) == 1
        try:
            await bench.admission.admit(claim.deliveries)
        except BrokerUnavailable:
            await bench.settler.flush()
        again = await bench.broker.claim(OWNER, [QUEUE], 10)
        assert [one.message for one in again.deliveries] == [one.message for one in claim.deliveries]
        (held,) = await bench.admission.admit(again.deliveries)
        assert held.headers.task == "t.early"
        assert await bench.broker.queues() == {}

    play(tmp_path, scenario, rules=TaskRules(acks_early=True), broker_class=RefusesOnce)


def test_a_task_that_runs_into_its_limit_has_failed_once(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        claim = await bench.broker.claim(OWNER, [QUEUE], 10)
        (held,) = await bench.admission.admit(claim.deliveries)
        lost = LostJob(held.number, started=True, reason="it was killed", timed_out=True, ran=True)
        bench.endings.lose(held, lost, stopping=False)
        counters = bench.context.counters
        assert (counters.failed, counters.processed, counters.lost) == (1, 1, 1)
        await bench.settler.flush()
        assert await bench.broker.queues() == {}

    play(tmp_path, scenario, rules=TaskRules(hard_limit_s=0.5))


@pytest.mark.parametrize("acks_early", [False, True])
def test_a_job_that_met_a_fault_in_the_pool_ends_with_the_reason(tmp_path: Path, acks_early: bool) -> None:
    """N1: it would end like that each time, so it is not returned to meet it again."""

    async def scenario(bench: Bench) -> None:
        claim = await bench.broker.claim(OWNER, [QUEUE], 10)
        (held,) = await bench.admission.admit(claim.deliveries)
        fault = "cannot be sent to a child process: OverflowError"
        bench.endings.lose(held, LostJob(held.number, False, fault, fault=fault), stopping=True)
        await bench.settler.flush()
        counters = bench.context.counters
        assert (counters.faults, counters.buried, counters.failed) == (1, not acks_early, acks_early)
        assert [letter.reason for letter in await bench.broker.dead_letters()] == [fault] * (not acks_early)

    play(tmp_path, scenario, rules=TaskRules(acks_early=acks_early))


class StoresNothing(SqliteBackend):
    """Results that ride with no ack find their store away until it `is_back`."""

    is_back = False

    def store(self, results: Sequence[StoredResult]) -> None:
        if not self.is_back:
            raise BrokerUnavailable("the results are elsewhere, and away")
        super().store(results)


def test_results_that_cannot_be_stored_keep_the_worker_from_taking_more(tmp_path: Path) -> None:
    """Of tasks that were acknowledged before they ran; or they would pile up without a limit."""

    async def scenario(bench: Bench) -> None:
        backend = StoresNothing(bench.broker.url, BrokerSettings(bench.broker.url))
        settled: list[int] = []
        context = replace(bench.context, backend=backend)
        settler = Settler(
            context,
            Events(context),
            refused=nothing_refused,
            settled=lambda: settled.append(settler.pending),
        )
        settler.report([StoredResult("t1", "SUCCESS", b"{}"), StoredResult("t2", "SUCCESS", b"{}")], ())
        going_on = asyncio.create_task(settler.run())
        await eventually(problem_of(settler), what="the store to be missed")  # the watchdog waits as long
        assert (settler.pending, settled) == (2, [])
        backend.is_back = True
        await settler.drained()
        assert (settler.pending, settler.problem, settled) == (0, "", [0])
        going_on.cancel()

    play(tmp_path, scenario, rules=TaskRules())


def problem_of(settler: Settler) -> Callable[[], Coroutine[Any, Any, str]]:
    async def problem() -> str:
        return settler.problem

    return problem
