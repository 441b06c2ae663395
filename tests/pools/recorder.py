"""A listener that remembers everything, and a way to wait for it inside the event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.pools.host import spec, value_of
from tests.waiting import DEADLINE_S, wait_until
from umbel.pools import make_pool
from umbel.pools.interface import LostJob, Outcome, Pool, PoolSettings, UserEvent
from umbel.pools.prefork.server_process import StartedServer

T = TypeVar("T")


class Recorder:
    def __init__(self) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self.pids: dict[int, int] = {}  # job -> the process that ran it
        self.lost: dict[int, LostJob] = {}
        self.begun: dict[int, int] = {}  # job -> pid
        self.begun_at: dict[int, float] = {}
        self.children: list[tuple[str, dict[str, Any]]] = []
        self.told: list[UserEvent] = []
        self.came_back: list[int] = []  # a job that came back twice is here twice
        self.then: Callable[[], None] | None = None  # called after every report
        self.pool: Pool | None = None  # whose jobs are settled as soon as they have ended
        self._changed = asyncio.Event()

    def on_started(self, started: Sequence[tuple[int, float, int]]) -> None:
        self.begun |= {number: pid for number, _, pid in started}
        self.begun_at |= {number: at for number, at, _ in started}
        self._note()

    def on_outcomes(self, outcomes: Sequence[Outcome], pid: int) -> None:
        for outcome in outcomes:
            self.outcomes[outcome.number] = outcome
            self.pids[outcome.number] = pid
            self.came_back.append(outcome.number)
        if self.pool is not None:
            self.pool.note_unsettled(0)
        self._note()

    def on_told(self, told: UserEvent) -> None:
        self.told.append(told)
        self._note()

    def on_lost(self, lost: Sequence[LostJob]) -> None:
        for job in lost:
            self.lost[job.number] = job
            self.came_back.append(job.number)
        self._note()

    def on_child(self, what: str, fields: dict[str, Any]) -> None:
        self.children.append((what, fields))
        self._note()

    def _note(self) -> None:
        self._changed.set()
        if self.then is not None:
            self.then()

    async def until(
        self, condition: Callable[[], T | None], *, what: str, deadline_s: float = DEADLINE_S
    ) -> T:
        """Look again whenever something was reported."""
        try:
            async with asyncio.timeout(deadline_s):
                while not (value := condition()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(
                f"waited {deadline_s:g} s in vain for {what}; back: {sorted(self.came_back)[:50]}, "
                f"lost: {list(self.lost.values())[:5]}, children: {self.children[-5:]}"
            ) from None
        return value

    async def until_back(self, *numbers: int) -> None:
        await self.until(
            lambda: set(numbers) <= set(self.came_back),
            what=f"{len(numbers)} jobs, {numbers[:10]}, to come back",
        )

    def value(self, number: int) -> Any:
        return value_of(self.outcomes[number])

    def deaths(self) -> list[dict[str, Any]]:
        return [fields for what, fields in self.children if what == "died"]


def settings(*quirks: str, concurrency: int = 2, **fields: Any) -> PoolSettings:
    chosen = {"loop": "asyncio", **fields}
    return PoolSettings(host=spec(*quirks), node="tester@here", concurrency=concurrency, **chosen)


@asynccontextmanager
async def running(
    name: str, *quirks: str, concurrency: int = 2, first_server: StartedServer | None = None, **fields: Any
) -> AsyncIterator[tuple[Pool, Recorder]]:
    """A started pool and what it reports; stopped at the end."""
    chosen = settings(*quirks, concurrency=concurrency, **fields)
    pool, recorder = make_pool(name, chosen, first_server), Recorder()
    recorder.pool = pool
    await pool.start(recorder)
    try:
        yield pool, recorder
    finally:
        await pool.stop(grace_s=0.0)


def hands_of(pool: Pool) -> int:
    """How many jobs it can run at once: by children, threads, coroutines or greenlets."""
    about = pool.describe()
    places = [about[name] for name in ("threads", "coroutines", "greenlets") if name in about]
    hands: int = places[0] if places else len(about["processes"])
    return hands


async def until_waiting(gate: Path) -> None:
    """Until a `wait-for` job really runs."""
    await asyncio.to_thread(wait_until, gate.with_name(f"{gate.name}.waiting").exists, what="the job to run")
