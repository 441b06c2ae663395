"""GeventPool: many jobs at once in greenlets, in child processes whose modules gevent has patched.

Children come from prefork's fork server (`green_children.py`). Each takes its share of the concurrency;
there is one unless `worker_gevent_children` says otherwise: greenlets of one process share one core.

Limits are timed here, from the moment a job is sent. At a hard limit the greenlet is ended. If it does
not end (it swallows that), the verdict is given all the same. If its child gives no sign at all, a job
holds up everybody in there: the child is killed, and the others' jobs come back to be run again.

When a child dies, the job that caused it is unknown. None is charged; they come back as redelivered,
and a redelivered job runs alone in a child, where the next death is its doing.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from msgspec.structs import replace

from umbel.errors import BadSetting, PoolError
from umbel.pools.abilities import ABILITIES
from umbel.pools.green_children import GreenChild, GreenChildren
from umbel.pools.guarded_listener import GuardedListener
from umbel.pools.interface import Job, LostJob, Outcome, PoolListener, PoolSettings, Told
from umbel.pools.losses import BY_LIMIT, BY_REQUEST, apart, cut_off, ended_by, not_started
from umbel.pools.prefork.child_link import batch_frames
from umbel.pools.prefork.messages import EndJob
from umbel.pools.sizes import resized, until_idle
from umbel.protocol.pool.slots import BRIEF_S
from umbel.wire.frames import Cancel, SoftLimit, encode_frame

_END_S = 1.0  # for a greenlet to end at its hard limit, before the verdict


@dataclass(slots=True)
class _Running:
    job: Job
    child: GreenChild
    soft: asyncio.TimerHandle | None = None
    hard: asyncio.TimerHandle | None = None
    ended_by: str = ""  # what stopped it

    def disarm(self) -> None:
        for timer in (self.soft, self.hard):
            if timer is not None:
                timer.cancel()


class GeventPool:
    abilities = ABILITIES["gevent"]
    is_green = True

    def __init__(self, settings: PoolSettings) -> None:
        if find_spec("gevent") is None:
            problem = "gevent is not installed; install it with: pip install 'umbel[gevent]'"
            raise BadSetting("pool", "gevent", problem, source="the worker's options")
        self._settings = settings
        self._size = settings.concurrency
        self._waiting: deque[Job] = deque()
        self._suspects: deque[Job] = deque()  # redelivered: each runs alone in a child
        self._running: dict[int, _Running] = {}
        self._typical_s: float | None = None
        self._closing = False
        self._is_started = False

    # ---- the interface -----------------------------------------------------------------------------

    async def start(self, listener: PoolListener) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = GuardedListener(listener)
        self._is_started = True
        self._ended = asyncio.Event()
        self._children = GreenChildren(replace(self._settings, green=True), self)
        try:
            await self._children.start(min(self._settings.green_children, self._size))
        except (PoolError, asyncio.CancelledError):
            self._closing = True
            await self._children.stop(grace_s=0.0)
            raise

    def submit(self, jobs: Sequence[Job]) -> None:
        jobs, unfit = apart(jobs)
        if unfit:
            self._listener.on_lost(unfit)
        for job in jobs:
            (self._suspects if job.redelivered else self._waiting).append(job)
        if self._closing:
            self._give_up()
        self._start_next()

    def room(self) -> int:
        if self._closing:
            return 0
        is_brief = self._typical_s is not None and self._typical_s < BRIEF_S
        held = len(self._running) + len(self._waiting) + len(self._suspects)
        return max(0, self._size * (2 if is_brief else 1) - held)

    def withdraw(self) -> Sequence[Job]:
        jobs = (*self._suspects, *self._waiting)
        self._suspects.clear()
        self._waiting.clear()
        return jobs

    def cancel_job(self, number: int) -> bool:
        return self._send(number, Cancel(number))

    def terminate_job(self, number: int, signum: int) -> bool:
        if number in self._running:
            self._running[number].ended_by = BY_REQUEST
        return self._send(number, EndJob(number))

    def interrupt(self) -> int:
        return sum(self._send(number, SoftLimit(number, stopping=True)) for number in self._running)

    def resize(self, by: int) -> int:
        size = self._size = resized(self._size, by)
        self._start_next()
        return size

    def describe(self) -> dict[str, Any]:
        children = self._children if self._is_started else None
        return {
            "implementation": "gevent",
            "max-concurrency": self._size,
            "faults": self._listener.faults if self._is_started else 0,
            "processes": children.pids() if children else [],
            "fork-server": children.server_pid if children else None,
            "greenlets": self._size,
            "running": {one.job.task_id: one.child.link.pid for one in self._running.values()},
            "waiting": len(self._waiting) + len(self._suspects),
        }

    async def stop(self, *, grace_s: float) -> None:
        if not self._is_started or self._closing:
            return
        self._closing = True
        self._give_up()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await until_idle(lambda: self._running, self._ended)
        too_long = [cut_off(number) for number in self._running]
        self._lose(too_long)
        await self._children.stop(grace_s=0.0 if too_long else self._settings.stop_grace_s)

    # ---- starting jobs -----------------------------------------------------------------------------

    def _start_next(self) -> None:
        """Whatever has a place goes out; the jobs for one child together."""
        if not self._is_started or self._closing:
            return
        share = -(-self._size // self._children.wanted)
        batches: dict[int, tuple[GreenChild, list[Job]]] = {}
        while self._waiting and (child := self._children.least_busy(share)) is not None:
            self._place(self._waiting.popleft(), child, batches)
        while self._suspects and (child := self._children.for_one_alone()) is not None:
            self._place(self._suspects.popleft(), child, batches)
        if not self._suspects:
            self._children.dismiss_idle_singles()
        for child, jobs in batches.values():
            frames, unfit = batch_frames(0, jobs)
            now, pid = time.time(), child.link.pid
            child.link.send(*frames)
            self._listener.on_started([(job.number, now, pid) for job in jobs if job.number not in unfit])
            if unfit:
                self._lose([LostJob(number, False, fault, fault=fault) for number, fault in unfit.items()])
                self._loop.call_soon(self._start_next)  # they took the places of others

    def _place(self, job: Job, child: GreenChild, batches: dict[int, tuple[GreenChild, list[Job]]]) -> None:
        child.jobs.add(job.number)
        running = self._running[job.number] = _Running(job, child)
        if job.soft_limit_s is not None:
            limit = SoftLimit(job.number)
            running.soft = self._loop.call_later(job.soft_limit_s, self._send, job.number, limit)
        if job.hard_limit_s is not None:
            running.hard = self._loop.call_later(job.hard_limit_s, self._on_hard_limit, job.number)
        batches.setdefault(child.link.key, (child, []))[1].append(job)

    # ---- limits ------------------------------------------------------------------------------------

    def _send(self, number: int, message: SoftLimit | Cancel | EndJob) -> bool:
        running = self._running.get(number)
        if running is None:
            return False
        running.child.link.send(encode_frame(message))
        return True

    def _on_hard_limit(self, number: int) -> None:
        running = self._running[number]
        running.ended_by = BY_LIMIT
        self._send(number, EndJob(number))
        running.hard = self._loop.call_later(_END_S, self._on_deaf, number, self._loop.time())

    def _on_deaf(self, number: int, since: float) -> None:
        """The job was cancelled and goes on, or its child does not respond."""
        running = self._running[number]
        self._lose([ended_by(number, BY_LIMIT)])
        if running.child.sign_at < since:
            self._children.kill(running.child, f"task {running.job.task} blocked it beyond its time limit")
        self._start_next()

    # ---- from the children (GreenListener) ---------------------------------------------------------

    def on_ready(self) -> None:
        self._start_next()

    def on_told(self, told: Told) -> None:
        self._listener.on_told(told)

    def on_outcomes(self, outcomes: Sequence[Outcome], pid: int) -> None:
        ended: list[Outcome] = []
        lost: list[LostJob] = []
        for outcome in outcomes:
            running = self._forget(outcome.number)
            if running is None:
                continue
            if outcome.kind == "cancelled" and running.ended_by:
                lost.append(ended_by(outcome.number, running.ended_by))
            else:
                self._typical_s = outcome.runtime_s
                ended.append(outcome)
        self._ended.set()
        self._start_next()
        if ended:
            self._listener.on_outcomes(ended, pid)
        if lost:
            self._listener.on_lost(lost)

    def on_no_outcome(self, lost: LostJob) -> None:
        if self._forget(lost.number) is not None:
            self._ended.set()
            self._start_next()
            self._listener.on_lost([lost])

    def on_gone(self, child: GreenChild, reason: str, *, by_us: bool) -> None:
        """Only one that was alone in there is known to have done it."""
        charged = len(child.jobs) == 1 and not by_us
        lost = []
        for number in list(child.jobs):
            running = self._forget(number)
            if running is not None and running.ended_by == BY_LIMIT:
                lost.append(ended_by(number, BY_LIMIT))
            elif running is not None:
                lost.append(LostJob(number, started=charged, reason=reason, ran=True))
        self._ended.set()
        if lost:
            self._listener.on_lost(lost)
        self._start_next()

    def on_child(self, what: str, fields: dict[str, Any]) -> None:
        self._listener.on_child(what, fields)

    # ---- on the way out ----------------------------------------------------------------------------

    def _forget(self, number: int) -> _Running | None:
        running = self._running.pop(number, None)
        if running is not None:
            running.disarm()
            running.child.jobs.discard(number)
        return running

    def _give_up(self) -> None:
        self._lose([not_started(job) for job in self.withdraw()])

    def _lose(self, lost: Sequence[LostJob]) -> None:
        for one in lost:
            self._forget(one.number)
        if lost:
            self._listener.on_lost(lost)
