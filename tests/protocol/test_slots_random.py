"""Whatever happens in whatever order: each job comes back once, and is never in two children.

The model plays the kernel and the children: pipes that give each token once, sockets that keep
their order, processes that die at any point between two instructions.
"""

import os
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from tests.protocol.test_slots import Job, Outcome
from umbel.protocol.machine import Tick
from umbel.protocol.pool.events import (
    ChildDied,
    ChildReady,
    Close,
    Dismiss,
    Effect,
    Event,
    Finished,
    JobBegan,
    JobsLost,
    Kill,
    NotSent,
    Open,
    Overweight,
    PoolClosed,
    PoolFailed,
    Recall,
    Recalled,
    Replace,
    Reported,
    Resize,
    Retire,
    Send,
    SignalSoftLimit,
    SlotSettings,
    Start,
    Submit,
    Unsettled,
    Weigh,
    Weighed,
    Withdraw,
    Withdrawn,
)
from umbel.protocol.pool.slots import Slots

MAX_BYTES, HARD_BYTES = 100, 200
RUNTIMES_S = {"quick": 0.0005, "middling": 0.004, "slow": 3.0}


@dataclass
class Process:
    """A child as it really is, of which the machine sees only what arrives."""

    ready: bool = False
    doomed: bool = False
    dismissed: bool = False
    pipe: deque[int] = field(default_factory=deque)
    socket: deque[tuple[int, Job]] = field(
        default_factory=deque
    )  # jobs it has not looked at, with their batch
    kept_token: int | None = None
    spoiled: bool = False  # it starts nothing more
    running: Job | None = None
    finished: list[Job] = field(default_factory=list)  # outcomes on their way
    started: set[int] = field(default_factory=set)
    sent: int = 0  # jobs that it was given and that were not taken back
    size_bytes: int = 0

    def take_token(self, batch: int) -> bool:
        if self.kept_token is None:
            if not self.pipe:
                return False
            self.kept_token = self.pipe.popleft()
        if self.kept_token != batch:
            return False
        self.kept_token = None
        return True

    def start_next(self) -> None:
        while self.socket and self.running is None:
            batch, job = self.socket.popleft()
            if self.spoiled and self.kept_token is None:
                continue
            if self.take_token(batch):
                self.running = job
                self.started.add(job.number)
            else:  # recalled: it drops the rest of that batch
                while self.socket and self.socket[0][0] == batch:
                    self.socket.popleft()


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.processes: dict[int, Process] = {}
        self.submitted: set[int] = set()
        self.back: set[int] = set()
        self.closing = self.closed = self.performing = False
        self.effects: deque[Effect[Job, Outcome]] = deque()
        self.wanted = self.random.randint(1, 4)
        self.jobs_max = self.random.choice([None, None, 1, 5, 20])
        self.unfit = 0.0  # how many jobs cannot be sent
        self.unsettled = 0  # jobs that have ended
        self.batch_max = self.random.randint(1, 8)
        weighs = self.random.random() < 0.5
        self.slots: Slots[Job, Outcome] = Slots(
            SlotSettings(
                children=self.wanted,
                batch_max=self.batch_max,
                start_timeout_s=30.0,
                jobs_max=self.jobs_max,
                memory_max_bytes=MAX_BYTES if weighs else None,
                memory_hard_bytes=HARD_BYTES if weighs else None,
            )
        )
        self.step(Open())
        self.processes[0].ready = True
        self.step(ChildReady(0))
        for task in RUNTIMES_S:  # so that batches occur from the start
            self.submit([task])
            self.end_jobs(self.processes[0], 1)
            self.report(0)
            if self.processes[0].dismissed:  # it was allowed one job only
                self.bury(0, [])
                self.processes[0].ready = True
                self.step(ChildReady(0))

        self.unfit = self.random.choice([0.0, 0.0, 0.1])

    # ---- the shell ---------------------------------------------------------------------------------

    def step(self, event: Event[Job, Outcome] | Tick) -> None:
        self.effects += self.slots.step(event, self.now)
        self.perform_all()

    def perform_all(self) -> None:
        """As the pool does: what an effect brings about is queued behind what was asked for before."""
        if not self.performing:
            self.performing = True
            while self.effects:
                self.perform(self.effects.popleft())
            self.performing = False

    def perform(self, effect: Effect[Job, Outcome]) -> None:
        match effect:
            case Start(child):
                assert child not in self.processes, "two processes in one slot"
                self.processes[child] = Process()
            case Send(child, batch, jobs):
                process = self.processes[child]
                assert process.ready and not process.doomed and not process.dismissed
                self.assert_few_are_unsettled()
                unfit = {job.number: "unfit" for job in jobs if self.random.random() < self.unfit}
                if unfit:
                    self.step(NotSent(child, unfit))
                jobs = [job for job in jobs if job.number not in unfit]
                for job in jobs:
                    self.assert_nobody_has(job)
                    process.pipe.append(batch)
                    process.socket.append((batch, job))
                process.sent += len(jobs)
                assert self.jobs_max is None or process.sent <= self.jobs_max, "more than it may run"
                assert len({batch for batch, _ in process.socket}) <= 256
            case Recall(child):
                process = self.processes[child]
                tokens = bytes(process.pipe)
                process.pipe.clear()
                process.sent -= len(tokens)
                self.step(Recalled(child, tokens))
            case Weigh(child):
                self.step(Weighed(child, self.processes[child].size_bytes))
            case Kill(child, reason):
                process = self.processes[child]
                assert "max_memory_hard" not in reason or process.size_bytes > HARD_BYTES
                process.doomed = True
            case Dismiss(child, reason):
                process = self.processes[child]
                assert not process.dismissed, "asked to end twice"
                if reason == "pool restart":
                    assert not (process.socket and process.pipe) and process.running is None
                    assert all(other.ready or other.running for other in self.processes.values())
                process.dismissed = True
            case SignalSoftLimit(child, job):
                assert self.processes[child].started >= {job} or any(
                    queued.number == job for _, queued in self.processes[child].socket
                )
            case Reported(_, outcomes):
                self.give_back(outcome.number for outcome in outcomes)
                self.unsettled += len(outcomes)
            case Withdrawn(jobs):
                for job in jobs:
                    self.assert_nobody_has(job)
                self.give_back(job.number for job in jobs)
            case JobsLost(losses):
                self.give_back(loss.job for loss in losses)
            case PoolClosed():
                assert not self.processes
                self.closed = True
            case JobBegan() | PoolFailed() | Overweight():
                pass

    def give_back(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            assert number in self.submitted and number not in self.back, f"job {number} came back twice"
            self.back.add(number)

    def assert_nobody_has(self, job: Job) -> None:
        """Nobody runs it, has run it, or could still start it."""
        for process in self.processes.values():
            assert job.number not in process.started, "a job that started went elsewhere"
            tokens = [*process.pipe, process.kept_token]
            for batch in {batch for batch, queued in process.socket if queued.number == job.number}:
                queued_jobs = [queued for at, queued in process.socket if at == batch]
                startable = queued_jobs[: tokens.count(batch)]
                assert job not in startable, "a job can start in two children"

    def assert_few_are_unsettled(self) -> None:
        """A kill of them all now would repeat at most so many."""
        held = sum(self.slots.outstanding(child) for child in self.processes)
        assert held + self.unsettled <= 3 * self.batch_max * max(self.wanted, len(self.processes))

    # ---- what happens ------------------------------------------------------------------------------

    def happen(self) -> None:
        """One thing that can happen now does."""
        events = [event for event, weight in _WEIGHTS.items() for _ in range(weight)]
        getattr(self, self.random.choice(events))()
        assert self.slots.room() >= 0

    def some_process(self, **wanted: bool) -> int | None:
        """A child that is ready, has jobs, runs one, has outcomes: as wanted."""
        able = [
            child
            for child, process in sorted(self.processes.items())
            if all(bool(getattr(process, name)) is value for name, value in wanted.items())
        ]
        return self.random.choice(able) if able else None

    def submit_some(self) -> None:
        special = self.random.choice(["", "", "", "", "alone", "redelivered", "hard", "soft"])
        tasks = self.random.choices(
            ["quick", "middling", "slow", "new"], [12, 4, 1, 1], k=self.random.randint(1, 20)
        )
        self.submit(tasks, special)

    def submit(self, tasks: list[str], special: str = "") -> None:
        jobs = []
        for task in tasks:
            number = len(self.submitted)
            self.submitted.add(number)
            jobs.append(
                Job(
                    number,
                    f"new-{number}" if task == "new" else task,
                    hard_limit_s=2.0 if special == "hard" else None,
                    soft_limit_s=1.0 if special == "soft" else None,
                    alone=special == "alone",
                    redelivered=special == "redelivered",
                )
            )
        self.step(Submit(jobs))

    def get_ready(self) -> None:
        if (child := self.some_process(ready=False)) is not None:
            self.processes[child].ready = True
            self.step(ChildReady(child))

    def start_a_job(self) -> None:
        if (child := self.some_process(running=False, socket=True)) is not None:
            self.processes[child].start_next()

    def end_some_jobs(self) -> None:
        if (child := self.some_process(running=True)) is not None:
            self.end_jobs(self.processes[child], self.random.randint(0, 5))

    def end_jobs(self, process: Process, count: int) -> None:
        """End the running job, then run on: after so many the next one has started."""
        for _ in range(1 + count):
            if process.running is not None:
                process.finished.append(process.running)
                process.running = None
            process.start_next()

    def hear_of_outcomes(self) -> None:
        if (child := self.some_process(finished=True)) is not None:
            self.report(child)

    def report(self, child: int) -> None:
        finished, self.processes[child].finished = self.processes[child].finished, []
        if finished:
            self.step(
                Finished(child, [Outcome(job.number, RUNTIMES_S.get(job.task, 0.001)) for job in finished])
            )

    def settle_some(self) -> None:
        self.unsettled = self.random.randint(0, self.unsettled)
        self.step(Unsettled(self.unsettled))

    def die(self) -> None:
        if (child := self.some_process()) is not None:
            unheard: list[Job] = []
            if self.random.random() < 0.5:  # jobs ended, and their outcomes were never written
                unheard, self.processes[child].finished = self.processes[child].finished, []
            self.report(child)
            self.bury(child, [job.number for job in unheard])

    def bury(self, child: int, unheard: list[int]) -> None:
        process = self.processes.pop(child)
        effects = self.slots.step(ChildDied(child, bytes(process.pipe), "it fell"), self.now)
        lost = [loss for effect in effects if isinstance(effect, JobsLost) for loss in effect.losses]
        if process.kept_token is None:
            at_work = [process.running.number] if process.running is not None else unheard[-1:]
            for loss in lost:
                assert loss.ran == (loss.job in process.started)
                assert not loss.charged or [loss.job] == at_work, "a neighbour was charged"
        self.effects += effects
        self.perform_all()

    def wait(self) -> None:
        self.now += self.random.choice([0.001, 0.01, 0.05, 0.3, 1.1, 31.0])
        if self.due():
            self.step(Tick())
            assert not self.due()

    def due(self) -> bool:
        return self.slots.deadline is not None and self.slots.deadline <= self.now

    def withdraw(self) -> None:
        self.step(Withdraw())
        assert self.slots.waiting() == 0

    def grow_fat(self) -> None:
        if (child := self.some_process(running=True)) is not None:
            self.processes[child].size_bytes += self.random.choice([10, 60, 150])

    def replace(self) -> None:
        self.step(Replace())

    def retire(self) -> None:
        if (child := self.some_process()) is not None:
            self.step(Retire(child, "asked"))

    def spoil(self) -> None:
        """A task did its process harm; the machine hears of it at once, or with what is written next."""
        if (child := self.some_process(running=True)) is not None:
            self.processes[child].spoiled = True
            self.step(Retire(child, "spoiled"))

    def resize(self) -> None:
        self.wanted = self.random.randint(1, 6)
        self.step(Resize(self.wanted))

    def close(self) -> None:
        self.step(Close(self.random.choice([0.0, 10.0])))

    def run_out(self) -> None:
        """Let everything run to its end; then nothing may be missing."""
        for _ in range(2000):
            if self.back == self.submitted:
                break
            self.now += 0.06
            self.step(Tick())
            self.settle_some()
            for child, process in list(self.processes.items()):
                if process.doomed or (process.dismissed and not process.socket and process.running is None):
                    self.report(child)
                    self.bury(child, [])
                elif not process.ready:
                    process.ready = True
                    self.step(ChildReady(child))
                else:
                    self.end_jobs(process, 0)
                    self.report(child)
        assert self.back == self.submitted, f"never came back: {self.submitted - self.back}"

    def settle(self) -> None:
        """In the end there are as many children as were wanted last, and none that was to be replaced."""
        self.step(Replace())
        before = list(self.processes.values())
        for _ in range(400):
            self.now += 0.5
            self.step(Tick())
            for child, process in list(self.processes.items()):
                if process.doomed or process.dismissed:
                    self.bury(child, [])
                elif not process.ready:
                    process.ready = True
                    self.step(ChildReady(child))
        assert len(self.processes) == self.wanted
        assert not any(one is other for one in before for other in self.processes.values())


_WEIGHTS = {
    "submit_some": 6,
    "get_ready": 6,
    "start_a_job": 6,
    "end_some_jobs": 8,
    "hear_of_outcomes": 6,
    "settle_some": 6,
    "wait": 4,
    "die": 2,
    "withdraw": 1,
    "retire": 1,
    "spoil": 1,
    "replace": 1,
    "grow_fat": 2,
    "resize": 1,
}

_SEEDS = 20_000 if os.environ.get("UMBEL_SOAK") else 300


@pytest.mark.parametrize("first", range(0, _SEEDS, 100))
def test_each_job_comes_back_once_whatever_happens(first: int) -> None:
    for seed in range(first, first + 100):
        world = World(seed)
        try:
            for _ in range(world.random.randint(10, 150)):
                world.happen()
            if seed % 4 == 0:
                world.close()
            world.run_out()
            if seed % 4:
                world.settle()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
