"""Claim-ahead and the pool's slots together: a job starts or goes back in time, however long tasks take."""

from random import Random

import pytest

from tests.protocol.test_slots import Effects, Job, Outcome, make
from umbel.protocol.delivery.delivery import GRAIN_S, PATIENCE_S, ClaimAhead
from umbel.protocol.machine import Tick
from umbel.protocol.pool.events import (
    Event,
    Finished,
    Recall,
    Recalled,
    Send,
    Submit,
    Unsettled,
    Withdraw,
    Withdrawn,
)

STEP_S, PLAYED_S = 0.001, 1.5
# Most are what they are taken for; some are slower, and now and then one is long.
RUNTIMES_S = (*[0.001] * 10, *[0.03] * 5, *[0.045] * 3, 60.0)


class Player:
    """The worker and its children: it claims what the pool can use, of which there is only so much."""

    def __init__(self, seed: int, children: int) -> None:
        self.random, self.now, self.last, self.worst_s = Random(seed), 0.0, 0, 0.0
        self.waiting = self.random.randint(10, 200)  # in the queue
        self.slots, self.ahead = make(children), ClaimAhead()
        self.sent: dict[int, list[tuple[Job, int]]] = {child: [] for child in range(children)}
        self.running: dict[int, tuple[Job, float, float]] = {}
        self.unstarted: dict[int, float] = {}  # by number, since when
        self.returned = 0

    def step(self, event: Event[Job, Outcome] | Tick) -> None:
        self.perform(self.slots.step(event, self.now))

    def perform(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case Send(child, batch, jobs):
                    self.sent[child] += [(job, batch) for job in jobs]
                case Recall(child):
                    tokens = bytes(batch for _, batch in self.sent[child])
                    self.sent[child] = []
                    self.step(Recalled(child, tokens))
                case Withdrawn(jobs):
                    for job in jobs:
                        del self.unstarted[job.number]
                    self.returned += len(jobs)
                case _:
                    pass

    def play(self) -> None:
        while self.now < PLAYED_S:
            self.now += STEP_S
            for child in self.sent:
                self.run(child)
            if self.slots.deadline is not None and self.slots.deadline <= self.now:
                self.step(Tick())
            self.look()
            self.claim()
            self.worst_s = max([self.worst_s, *(self.now - since for since in self.unstarted.values())])

    def run(self, child: int) -> None:
        if child in self.running and self.running[child][1] <= self.now:
            job, _, runtime_s = self.running.pop(child)
            self.ahead.move()
            self.step(Finished(child, [Outcome(job.number, runtime_s)]))
            self.step(Unsettled(0))
        if child not in self.running and self.sent[child]:
            job, _ = self.sent[child].pop(0)
            runtime_s = self.random.choice(RUNTIMES_S)
            self.running[child] = job, self.now + runtime_s, runtime_s
            del self.unstarted[job.number]

    def look(self) -> None:
        """As `worker/delivery/take.py` does."""
        last = self.ahead.overdue(self.now)
        if last and any(number <= last for number in self.unstarted):
            if self.slots.free():
                self.ahead.submit(last, self.now)
            else:
                self.ahead.stall()
                self.step(Withdraw())

    def claim(self) -> None:
        room = self.ahead.claimable(room=self.slots.room(), free=self.slots.free())
        if count := min(room, self.waiting):
            jobs = [Job(self.last + nth) for nth in range(1, count + 1)]
            self.last, self.waiting = self.last + count, self.waiting - count
            self.unstarted |= dict.fromkeys((job.number for job in jobs), self.now)
            self.ahead.submit(self.last, self.now)
            self.step(Submit(jobs))


@pytest.mark.parametrize("children", [1, 2, 3])
def test_a_claimed_job_starts_or_goes_back_in_time(children: int) -> None:
    returned = 0
    for seed in range(60):
        player = Player(seed, children)
        player.play()
        assert player.worst_s <= PATIENCE_S + GRAIN_S + 2 * STEP_S, f"seed {seed}"
        returned += player.returned
    assert returned  # or nothing had to
