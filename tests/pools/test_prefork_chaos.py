"""Children killed at random points of the frame protocol, under load: nothing lost, twice, or blamed wrongly.

Each job writes a line when it starts and one when it ends, to a file of its process. So what the pool says
about a job can be held against what happened. In `make soak` there are 10,000 kills.
"""

import asyncio
import os
import random
import re
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.pools.host import make_job
from tests.pools.processes import parent_of
from tests.pools.recorder import settings
from tests.waiting import DEADLINE_S
from umbel.pools import make_pool
from umbel.pools.interface import Job, LostJob, Outcome, Pool, UserEvent
from umbel.pools.prefork.kernel import resident_bytes

SOAK = bool(os.environ.get("UMBEL_SOAK"))
KILLS, SERVER_KILLS = (10_000, 100) if SOAK else (200, 3)
CHILDREN = 3
FULL_AGAIN_S = 2.0  # the promise; held against the figures at the end of a soak
GROWTH_MAX_BYTES = 16 * 1024 * 1024
IDLE_WINDOW_S = 10.0 if SOAK else 1.0
IDLE_CPU_MAX = 0.01
QUICK_RUN = 2000
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Tally:
    """A listener that keeps as little as it can, and gives the pool new jobs whenever it has room."""

    def __init__(self, make: Callable[[int], Job]) -> None:
        self.submitted = 0
        self.back = bytearray()  # by job: how often it came back
        self.lost: list[LostJob] = []
        self.interrupted: set[int] = set()  # by their soft limits, perhaps before they wrote a line
        self.ended = 0
        self.pool: Pool | None = None
        self._make = make
        self._changed = asyncio.Event()

    def feed(self) -> None:
        if self.pool is not None:
            jobs = [self._make(self.submitted + n) for n in range(self.pool.room())]
            self.submitted += len(jobs)
            self.back.extend(bytes(len(jobs)))
            self.pool.submit(jobs)

    def on_started(self, started: Sequence[tuple[int, float, int]]) -> None:
        pass

    def on_told(self, told: UserEvent) -> None:
        pass

    def on_outcomes(self, outcomes: Sequence[Outcome], pid: int) -> None:
        for outcome in outcomes:
            self.back[outcome.number] += 1
            if "SoftTimeLimitExceeded" in outcome.summary:
                self.interrupted.add(outcome.number)
        self.ended += len(outcomes)
        if self.pool is not None:
            self.pool.note_unsettled(0)
        self._changed.set()
        self.feed()

    def on_lost(self, lost: Sequence[LostJob]) -> None:
        for one in lost:
            self.back[one.number] += 1
        self.lost += lost
        self._changed.set()
        self.feed()

    def on_child(self, what: str, fields: dict[str, Any]) -> None:
        self._changed.set()
        self.feed()

    async def until(
        self, condition: Callable[[], object], *, what: str, deadline_s: float = DEADLINE_S
    ) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"waited {deadline_s:g} s in vain for {what}") from None


def job_maker(folder: Path, chance: random.Random) -> Callable[[int], Job]:
    def make(number: int) -> Job:
        def does(what: str, argument: object, **limits: float) -> Job:
            return make_job(number, "journal", [str(folder), number, what, argument], task=what, **limits)

        if number // QUICK_RUN % 2:  # for a while only quick ones: full batches, and outcomes that gather
            return does("return", None)
        match chance.randrange(100):
            case 0 | 1:
                return does("sleep", 0.02)
            case 2:
                return make_job(number, "journal", [str(folder), number, "sleep", 0.06], task="return")
            case 3 | 4:
                return does("big", 300_000)
            case 5:
                return does("sleep", 5.0, hard_limit_s=0.02)
            case 6:
                return does("sleep", 0.01, soft_limit_s=0.01)
            case _:
                return does("return", None)

    return make


class Killer:
    def __init__(self, pool: Pool, tally: Tally, chance: random.Random) -> None:
        self.killed: Counter[int] = Counter()  # by pid, which the kernel may use again
        self.server_kills = 0
        self.took_s: list[float] = []  # until the pool was whole after children were killed
        self.server_took_s: list[float] = []
        self._pool, self._tally, self._chance = pool, tally, chance

    async def strike(self) -> None:
        """Kill somebody at some moment, and wait until the pool is whole again."""
        chance = self._chance
        match chance.randrange(3):
            case 0:  # as soon as something comes back: in the middle of a batch, or of a frame
                goal = self._tally.ended + chance.randrange(60)
                await self._tally.until(lambda: self._tally.ended >= goal, what="jobs to end")
            case 1:
                await self._moment(chance.uniform(0.0, 0.03))
        about = self._pool.describe()
        began = asyncio.get_running_loop().time()
        if self.server_kills < SERVER_KILLS and chance.randrange(KILLS // SERVER_KILLS) == 0:
            self.server_kills += 1
            victims = [about["fork-server"]]
        else:
            victims = chance.sample(about["processes"], 2 if chance.randrange(10) == 0 else 1)
            self.killed.update(victims)
        for victim in victims:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        await self._tally.until(lambda: self._is_whole(victims), what="a full pool")
        took_s = self.server_took_s if victims == [about["fork-server"]] else self.took_s
        took_s.append(asyncio.get_running_loop().time() - began)

    def _is_whole(self, without: Sequence[int]) -> bool:
        about = self._pool.describe()
        pids = {about["fork-server"], *about["processes"]}
        return about["ready"] == CHILDREN and pids.isdisjoint(without)

    async def _moment(self, seconds: float) -> None:
        await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=seconds)


@pytest.mark.scenario
@pytest.mark.timeout(7200 if SOAK else 180)
def test_killed_children_cost_their_own_job_and_nothing_else(tmp_path: Path) -> None:
    """F3, F8, issue 6: full size within 2 s, none lost, no wrong verdict, no growth, idle at the end."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)

    async def scenario() -> tuple[Tally, Killer]:
        tally = Tally(job_maker(tmp_path, chance))
        pool = make_pool("prefork", settings(concurrency=CHILDREN))
        await pool.start(tally)
        tally.pool = pool
        try:
            killer = Killer(pool, tally, chance)
            tally.feed()
            for _ in range(KILLS // 10):
                await killer.strike()
            before = holdings(pool)
            for _ in range(KILLS - KILLS // 10):
                await killer.strike()
            tally.pool = None  # nothing more is submitted
            await tally.until(lambda: not tally.back.count(0), what="the last jobs")
            judge_growth(before, holdings(pool))
            await judge_idle_cpu(pool)
        finally:
            await pool.stop(grace_s=0.0)
        return tally, killer

    tally, killer = asyncio.run(scenario())
    print(f"killed: {killer.killed.total()} children, {killer.server_kills} servers; {tally.submitted} jobs")
    judge_verdicts(tally, killer, tmp_path)
    judge_speed(killer)


def judge_speed(killer: Killer) -> None:
    took_s, server_took_s = sorted(killer.took_s), sorted(killer.server_took_s)
    late = sum(one > FULL_AGAIN_S for one in took_s)
    print(
        f"full again after {took_s[len(took_s) // 2]:.3f} s (median), "
        f"{took_s[len(took_s) * 99 // 100]:.3f} s (p99), "
        f"{took_s[-1]:.3f} s (longest; {late} over {FULL_AGAIN_S:g} s); "
        f"after a fork server's death {max(server_took_s, default=0.0):.3f} s (longest)"
    )
    if SOAK:
        assert not late


def judge_verdicts(tally: Tally, killer: Killer, folder: Path) -> None:
    assert tally.back == b"\1" * tally.submitted, "a job was lost or came back twice"
    journals = {file.name: file.read_text().split("\n")[:-1] for file in folder.iterdir()}
    starts = Counter(int(line[1:]) for lines in journals.values() for line in lines if line.startswith("S"))
    assert max(starts.values()) == 1, "a job was started twice"
    lost = {one.number: one for one in tally.lost}
    silent = set(range(tally.submitted)) - set(starts) - set(lost)
    assert silent <= tally.interrupted, "an outcome of a job that never started"
    last_started: dict[int, set[int]] = {}  # by pid, which the kernel may use again
    for name, lines in journals.items():
        last = [int(line[1:]) for line in lines if line.startswith("S")][-1:]
        last_started.setdefault(int(name.partition(".")[0]), set()).update(last)
    all_last = set[int]().union(*last_started.values())
    charged_to = Counter[int]()
    for one in lost.values():
        if one.timed_out and not one.ran:  # its hard limit passed before its child began it
            continue
        assert one.ran and one.started, f"{one} had not started, or had ended before"
        if one.timed_out:
            continue
        assert one.number not in starts or one.number in all_last, f"{one}: a neighbour was charged"
        found = re.search(r"^process (\d+) was killed by SIGKILL", one.reason)
        if found is None:
            assert "the fork server ended" in one.reason, one
        else:
            pid = int(found[1])
            charged_to[pid] += 1
            assert pid in killer.killed, f"{one}: it was not killed"
            assert one.number not in starts or one.number in last_started[pid], f"{one}: it ran elsewhere"
    assert all(count <= killer.killed[pid] for pid, count in charged_to.items()), "a death was charged twice"


Holdings = dict[str, tuple[int, int]]


def holdings(pool: Pool) -> Holdings:
    """Descriptors and resident bytes of the processes that live on."""
    server = pool.describe()["fork-server"]
    pids = {"main process": os.getpid(), "fork server": server, "guard": parent_of(server)}
    return {name: (len(os.listdir(f"/proc/{pid}/fd")), resident_bytes(pid)) for name, pid in pids.items()}


def judge_growth(before: Holdings, after: Holdings) -> None:
    for name, (descriptors, size_bytes) in after.items():
        grown = size_bytes - before[name][1]
        print(
            f"{name}: {before[name][0]} descriptors, then {descriptors}; memory grew by {grown // 1024} KiB"
        )
        assert descriptors <= before[name][0] + 2, f"descriptors of the {name}"
        assert grown < GROWTH_MAX_BYTES, f"memory of the {name}"


async def judge_idle_cpu(pool: Pool) -> None:
    about = pool.describe()
    pids = [os.getpid(), about["fork-server"], parent_of(about["fork-server"]), *about["processes"]]
    before, began = sum(map(cpu_s, pids)), time.monotonic()
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=IDLE_WINDOW_S)
    share = (sum(map(cpu_s, pids)) - before) / (time.monotonic() - began)
    print(f"idle: {share:.2%} of a core, all processes together")
    if SOAK:
        assert share < IDLE_CPU_MAX


def cpu_s(pid: int) -> float:
    fields: deque[str] = deque(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split())
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
