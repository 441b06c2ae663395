"""What a worker has claimed and its pool has not started goes back, whatever the pool looked like before."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from tests.brokers.under_test import QUEUE, eventually, run
from tests.waiting import DEADLINE_S
from umbel import App
from umbel.backends.registry import open_backend
from umbel.brokers.interface import Broker, BrokerSettings
from umbel.brokers.registry import open_broker
from umbel.launch.project import task_rules
from umbel.pools.abilities import ABILITIES
from umbel.pools.interface import Job
from umbel.worker.context import Ending, Identity, WorkerContext, WorkerSettings
from umbel.worker.delivery import take
from umbel.worker.delivery.take import Tasks
from umbel.worker.delivery.task_events import TaskEvents
from umbel.worker.events import Events

OTHER_OWNER = "other@host.2.2"


class StuckPool:
    """It starts nothing. `idle`: how many of its children have nothing to do."""

    abilities = ABILITIES["prefork"]
    is_green = False

    def __init__(self) -> None:
        self.idle = 1
        self.jobs: list[Job] = []

    def room(self) -> int:
        return 8 - len(self.jobs)

    def free(self) -> int:
        return self.idle

    def submit(self, jobs: Sequence[Job]) -> None:
        self.jobs += jobs

    def withdraw(self) -> Sequence[Job]:
        jobs, self.jobs = self.jobs, []
        return jobs

    def note_unsettled(self, count: int) -> None: ...


def tasks_of(app: App, broker: Broker, pool: StuckPool, home: Path) -> tuple[WorkerContext, Tasks]:
    settings = WorkerSettings(
        node="w@host",
        queues=(QUEUE,),
        tasks=task_rules(app, app.settings),
        end_without_running=lambda *_, **__: Ending(),
        run_directory=home,
        prefetch_max=4,
    )
    backend = open_backend(broker.url, BrokerSettings(broker.url))
    context = WorkerContext(
        settings, Identity("w@host", 1, 1), broker, backend, cast("Any", pool), queues=[QUEUE]
    )
    return context, Tasks(context, TaskEvents(Events(context)))


def test_a_changed_limit_on_claims_is_used_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of a user may change it in another thread."""
    monkeypatch.setattr(take, "PATIENCE_S", DEADLINE_S)
    app = App("ahead", broker=f"sqlite:///{tmp_path / 'umbel.db'}")

    @app.task(name="plain")
    def plain() -> None: ...

    async def scenario() -> None:
        pool = StuckPool()
        pool.idle = 8
        broker = open_broker(BrokerSettings(app.settings.broker))
        await broker.open()
        async with asyncio.TaskGroup() as group:
            _, tasks = tasks_of(app, broker, pool, tmp_path)
            tasks.adopt(group)
            await tasks.start()
            await broker.publish([app.prepare("plain", (), {}, {}).outgoing for _ in range(6)])

            async def submitted(count: int) -> bool:
                return len(pool.jobs) == count

            await eventually(partial(submitted, 4), what="as many as the limit allows")
            await asyncio.to_thread(tasks.limit_prefetch, 6)
            await eventually(partial(submitted, 6), what="the rest")
            tasks.stop_taking()
            await tasks.stop()
        await broker.close()

    run(scenario())


def test_a_message_that_no_idle_child_took_is_looked_at_again(tmp_path: Path) -> None:
    """A child is idle at the first look, as a batch is still to be recalled; then it gets a long task too."""
    url = f"sqlite:///{tmp_path / 'umbel.db'}"
    app = App("ahead", broker=url)

    @app.task(name="plain")
    def plain() -> None: ...

    async def scenario() -> None:
        pool = StuckPool()
        async with asyncio.TaskGroup() as group:
            broker = open_broker(BrokerSettings(url))
            await broker.open()
            context, tasks = tasks_of(app, broker, pool, tmp_path)
            tasks.adopt(group)
            await tasks.start()
            await broker.publish([app.prepare("plain", (), {}, {}).outgoing])

            async def submitted() -> bool:
                return bool(pool.jobs)

            await eventually(submitted, what="the message to be claimed")
            first = tasks._ahead.deadline

            async def looked_at() -> bool:
                return tasks._ahead.deadline != first

            await eventually(looked_at, what="the first look")
            assert pool.jobs, "a child is idle, so it may start here"
            pool.idle = 0

            async def elsewhere() -> bool:
                return bool((await broker.claim(OTHER_OWNER, [QUEUE], 1)).deliveries)

            await eventually(elsewhere, what="the message to be returned")
            assert context.counters.returned_unstarted == 1
            tasks.stop_taking()
            await tasks.stop()
            await broker.close()

    run(scenario())
