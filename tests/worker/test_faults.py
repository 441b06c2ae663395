"""A fault of our own, met by one message, ends that message alone: with its traceback, among the dead
letters; the worker goes on with the others (N1)."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from umbel import App
from umbel.backends.registry import open_backend
from umbel.brokers.interface import BrokerSettings
from umbel.brokers.sqlite.broker import SqliteBroker
from umbel.launch.project import NativeEndings
from umbel.pools.interface import Job, LostJob, Outcome, PoolSettings, UserEvent
from umbel.pools.prefork.parent import PreforkPool
from umbel.protocol.delivery.delivery import AdmissionPolicy, TaskRules
from umbel.wire.message import StoredResult
from umbel.wire.result import encode_success
from umbel.worker.context import Identity, WorkerContext, WorkerSettings
from umbel.worker.delivery.admit import job_of
from umbel.worker.delivery.claimed import Claimed
from umbel.worker.delivery.take import Tasks
from umbel.worker.delivery.task_events import TaskEvents
from umbel.worker.events import Events

OWNER, QUEUE = "w@host.1.1", "celery"


class NoPool(PreforkPool):
    """Takes jobs and runs none."""

    jobs: Sequence[Job] = ()

    def submit(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs

    def note_unsettled(self, count: int) -> None:
        pass


class Bench:
    def __init__(self, broker: SqliteBroker, app: App, tmp_path: Path, rules: TaskRules) -> None:
        settings = WorkerSettings(
            node="w@host",
            queues=(QUEUE,),
            tasks={"t.good": rules, "t.bad": rules},
            end_without_running=NativeEndings(app),
            run_directory=tmp_path,
            send_task_events=True,
        )
        self.broker = broker
        self.pool = NoPool(PoolSettings(host=cast("Any", None), node="w@host", concurrency=1))
        backend = open_backend(broker.url, BrokerSettings(broker.url))
        self.context = WorkerContext(settings, Identity("w@host", 1, 1), broker, backend, self.pool)
        self.tasks = Tasks(self.context, TaskEvents(Events(self.context)))

    async def take(self) -> list[str]:
        """Claim everything; the tasks of the jobs that the pool got."""
        claim = await self.broker.claim(OWNER, [QUEUE], 10)
        await self.tasks._take_in(claim.deliveries)
        return [job.task for job in self.pool.jobs]

    async def settled(self) -> None:
        await self.tasks._settler.flush()


def play(
    tmp_path: Path,
    scenario: Callable[[Bench, App], Coroutine[Any, Any, None]],
    rules: TaskRules = TaskRules(),  # noqa: B008 (frozen)
) -> None:
    url = f"sqlite:///{tmp_path / 'queue.db'}"
    app = App("bench", broker=url)
    app.send_task("t.bad", task_id="bad")
    app.send_task("t.good", task_id="good")

    async def bounded() -> None:
        broker = SqliteBroker(BrokerSettings(url))
        await broker.open()
        try:
            async with asyncio.timeout(60.0):
                await scenario(Bench(broker, app, tmp_path, rules), app)
        finally:
            await broker.close()

    try:
        asyncio.run(bounded())
    finally:
        app.close()


def fault(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError("a fault of our own")


async def assert_that_it_was_buried_alone(bench: Bench) -> None:
    await bench.settled()
    (letter,) = await bench.broker.dead_letters()
    assert letter.message.correlation_id == "bad"
    assert letter.reason.startswith("internal error in the worker: ZeroDivisionError: a fault of our own\n")
    assert "in fault" in letter.reason  # where it arose
    assert (bench.context.counters.faults, bench.context.counters.buried) == (1, 1)
    assert (await bench.broker.queues())[QUEUE].claimed == 1  # the good one, which runs


def test_a_fault_in_judging_a_message_buries_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    admit = AdmissionPolicy.admit

    def sometimes(policy: AdmissionPolicy, arrival: Any, *args: Any) -> Any:
        return fault() if arrival.task == "t.bad" else admit(policy, arrival, *args)

    async def scenario(bench: Bench, _: App) -> None:
        monkeypatch.setattr(AdmissionPolicy, "admit", sometimes)
        assert await bench.take() == ["t.good"]
        await assert_that_it_was_buried_alone(bench)
        assert "internal error while handling a message; moved to dead letters" in caplog.text

    play(tmp_path, scenario)


def test_a_fault_in_dispatching_a_message_buries_it_and_its_task_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sometimes(claimed: Claimed, lamport: int, signs_for: str | None) -> Any:
        return fault() if claimed.headers.task == "t.bad" else job_of(claimed, lamport, signs_for)

    async def scenario(bench: Bench, app: App) -> None:
        monkeypatch.setattr("umbel.worker.delivery.take.job_of", sometimes)
        assert await bench.take() == ["t.good"]
        await assert_that_it_was_buried_alone(bench)
        assert [claimed.headers.task for claimed in bench.tasks.holding()] == ["t.good"]
        with pytest.raises(Exception, match="internal error in the worker: ZeroDivisionError"):
            await app.AsyncResult("bad").aget(timeout=5)

    play(tmp_path, scenario)


def test_a_fault_in_settling_a_task_keeps_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(bench: Bench, app: App) -> None:
        assert await bench.take() == ["t.bad", "t.good"]
        monkeypatch.setattr(TaskEvents, "ended", fault)
        number = next(job.number for job in bench.pool.jobs if job.task == "t.bad")
        results = (encode_success("bad", 42, done_at=1.0),)
        bench.tasks.on_outcomes([Outcome(number, "success", 0.0, 0.1, results)], pid=1)
        await assert_that_it_was_buried_alone(bench)
        assert await app.AsyncResult("bad").aget(timeout=5) == 42

    play(tmp_path, scenario)


def test_a_fault_in_judging_a_loss_buries_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(bench: Bench, _: App) -> None:
        await bench.take()
        monkeypatch.setattr(AdmissionPolicy, "is_poisonous_after", fault)
        number = next(job.number for job in bench.pool.jobs if job.task == "t.bad")
        bench.tasks.on_lost([LostJob(number, started=True, reason="it died", ran=True)])
        await assert_that_it_was_buried_alone(bench)

    play(tmp_path, scenario)


def test_a_fault_in_telling_of_a_task_leaves_its_message_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(bench: Bench, _: App) -> None:
        await bench.take()
        monkeypatch.setattr(TaskEvents, "started", fault)
        monkeypatch.setattr(TaskEvents, "custom", fault)
        first = bench.pool.jobs[0].number
        bench.tasks.on_started([(first, 1.0, 1)])
        bench.tasks.on_told(UserEvent(first, "task-mine", 1.0, b"{}"))
        await bench.settled()
        assert await bench.broker.dead_letters() == []
        assert (bench.context.counters.faults, bench.tasks.running) == (2, 2)

    play(tmp_path, scenario)


def test_a_fault_after_an_early_acknowledgement_stores_the_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(bench: Bench, app: App) -> None:
        await bench.take()
        monkeypatch.setattr(TaskEvents, "failed", fault)
        number = next(job.number for job in bench.pool.jobs if job.task == "t.bad")
        bench.tasks.on_lost([LostJob(number, started=True, reason="it died", ran=True)])
        await bench.settled()
        assert await bench.broker.dead_letters() == []
        assert stored(app, "bad").status == "FAILURE"

    play(tmp_path, scenario, TaskRules(acks_early=True))


def stored(app: App, task_id: str) -> StoredResult:
    return app.backend.read([task_id])[task_id]
