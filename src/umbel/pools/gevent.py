"""A pool that runs many jobs at once in greenlets, in child processes whose modules gevent has patched.

Children come from prefork's fork server. They share the concurrency equally. There is one child unless
`worker_gevent_children` sets another number. Greenlets of one process share one CPU core.

The main process measures time limits, from the moment a job is sent. At a hard limit the greenlet is ended.
If the task catches that exception, the job is reported as lost. If its child does not respond at all, a job
blocks the whole process: the child is killed, and its other jobs run again.

When a child dies, the job that caused it is unknown. So no job counts a failed start; all are redelivered. A
redelivered job runs alone in an extra child (a "single"), so if that child dies, the job is the cause.
Singles are started when needed and stopped when idle.

A child that dies is replaced. When several children in a row die before they are ready, the pool waits longer
before each replacement and fails in the end, by the same rule as prefork (`protocol/pool/fleet.py`).
"""

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from msgspec.structs import replace

from umbel.errors import BadSetting, PoolError
from umbel.pools.abilities import ABILITIES
from umbel.pools.interface import Job, LostJob, Outcome, PoolListener, PoolSettings, UserEvent
from umbel.pools.prefork.children import ForkServers, note_refused
from umbel.pools.prefork.kernel import Exit, exit_of
from umbel.pools.prefork.links import ChildLink, ServerLink, batch_frames
from umbel.pools.prefork.messages import EndJob, FromChild, NoOutcome, lost_outcome, slot_settings
from umbel.pools.reporting import (
    BY_LIMIT,
    BY_REQUEST,
    GuardedListener,
    apart,
    cut_off,
    ended_by,
    not_started,
    resized,
    until_idle,
)
from umbel.protocol.pool.fleet import Starts
from umbel.protocol.pool.slots import BRIEF_S
from umbel.wire.frames import Cancel, Outcomes, Problem, Ready, SoftLimit, StopChild, encode_frame

# ---- green children --------------------------------------------------------------------------------
#
# No method here blocks.

log = logging.getLogger(__name__)

_SINGLES_MAX = 4
_PROBLEM_MAX_CHARS = 4000
_GONE_S = 2.0  # time for a child to exit after its connection has ended


@dataclass(slots=True, eq=False)
class GreenChildState:
    """What the main process knows of one child: its link, its jobs, and when it last responded."""

    link: ChildLink
    single: bool
    begun_at: float
    ready_at: float | None = None
    sign_at: float = 0.0  # when its last message arrived, which proves that it responds
    jobs: set[int] = field(default_factory=set)


class GreenChildren:
    """The child processes of a gevent pool: starts, replaces and ends them."""

    def __init__(self, settings: PoolSettings, listener: "GeventPool") -> None:
        self.wanted = 0  # number of children that share the jobs, without singles
        self._settings = settings
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._servers = ForkServers(settings, self)
        self._children: dict[int, GreenChildState] = {}  # by the link's key
        self._keys = 0
        self._unmade: list[tuple[bool, float]] = []  # (is it a single, since when it waits for a fork server)
        self._is_refused = False  # whether the last child process could not be created
        self._starts = Starts(slot_settings(settings))
        self._closing = False
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._empty = asyncio.Event()

    async def start(self, count: int) -> None:
        """Start the shared children and wait until all are ready; raise PoolError if they are not ready in
        time.
        """
        self.wanted = count
        for _ in range(count):
            self._make(single=False)
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self._started
        except TimeoutError:
            limit = f"{self._settings.start_timeout_s:g} s (start_timeout_s)"
            raise PoolError(f"the pool was not ready after {limit}") from None

    async def stop(self, *, grace_s: float) -> None:
        """Ask the children to end, wait up to `grace_s`, then end the fork servers and all remaining
        children.
        """
        self._closing = True
        for child in self._children.values():
            self._dismiss(child, "pool shutdown")
        try:
            async with asyncio.timeout(grace_s):
                while self._children:
                    self._empty.clear()
                    await self._empty.wait()
        except TimeoutError:
            pass
        await self._servers.close()
        for child in list(self._children.values()):
            child.link.close()
        self._children.clear()

    # ---- for the pool ------------------------------------------------------------------------------

    @property
    def server_pid(self) -> int | None:
        """Return the pid of the current fork server; None before the first one."""
        return self._servers.pid

    def pids(self) -> list[int]:
        """Return the pids of the children that have become ready."""
        return [child.link.pid for child in self._children.values() if child.ready_at is not None]

    def least_busy(self, most: int) -> GreenChildState | None:
        """Return the ready child with the fewest jobs, if it has fewer than `most`."""
        able = [child for child in self._able(single=False) if len(child.jobs) < most]
        return min(able, key=lambda child: len(child.jobs), default=None)

    def for_one_alone(self) -> GreenChildState | None:
        """Return a ready single without a job. If there is none, start one, and return None."""
        for child in self._able(single=True):
            if not child.jobs:
                return child
        singles = sum(child.single for child in self._children.values()) + sum(
            single for single, _ in self._unmade
        )
        if singles < _SINGLES_MAX:
            self._make(single=True)
        return None

    def dismiss_idle_singles(self) -> None:
        """Ask singles without a job to end."""
        for child in self._able(single=True):
            if not child.jobs:
                self._dismiss(child, "no longer needed")

    def kill(self, child: GreenChildState, why: str) -> None:
        """Kill this child with SIGKILL; `why` becomes part of its exit reason."""
        child.link.doom = child.link.doom or why
        self._servers.signal(child.link, signal.SIGKILL)

    # ---- making and losing them --------------------------------------------------------------------

    def _able(self, *, single: bool) -> list[GreenChildState]:
        return [
            child
            for child in self._children.values()
            if child.ready_at is not None
            and child.single is single
            and not child.link.dismissed
            and not child.link.doom
        ]

    def _make(self, *, single: bool) -> None:
        if self._closing:
            return
        now = self._loop.time()
        try:
            if not self._servers.is_loaded():
                self._unmade.append((single, now))
                return
            self._keys += 1
            link = ChildLink(
                self._keys, self._keys - 1, on_messages=self._on_messages, on_broken=self._on_broken
            )
        except OSError as error:  # no descriptors, processes or memory available now
            why = note_refused(error, was_refused=self._is_refused)
            self._is_refused = True
            self._replace(single, now, f"cannot start a child process: {why}")
            return
        self._is_refused = False
        self._children[link.key] = GreenChildState(link, single, now)
        self._servers.make_child(link)

    def _dismiss(self, child: GreenChildState, why: str) -> None:
        child.link.dismissed = why
        child.link.send(encode_frame(StopChild()))

    def _on_messages(self, link: ChildLink, messages: Sequence[FromChild]) -> None:
        child = self._children[link.key]
        child.sign_at = self._loop.time()
        outcomes: list[Outcome] = []
        for message in messages:
            match message:
                case Outcomes():
                    outcomes += message.outcomes
                case UserEvent():
                    self._listener.on_told(message)
                case NoOutcome():
                    self._listener.on_no_outcome(lost_outcome(message))
                case Problem(text):
                    link.problem = text[:_PROBLEM_MAX_CHARS]
                case Ready(pid) if child.ready_at is None:
                    self._on_first_ready(child, pid)
                case _:
                    pass  # a Ready only proves that the child responds
        if outcomes:
            self._listener.on_outcomes(outcomes, link.pid)

    def _on_first_ready(self, child: GreenChildState, pid: int) -> None:
        child.ready_at, child.link.pid = child.sign_at, pid
        self._starts.seen_alive(child.sign_at)
        self._listener.on_child("started", {"child": child.link.child, "pid": pid})
        if len(self._able(single=False)) >= self.wanted and not self._started.done():
            self._started.set_result(None)
        self._listener.on_ready()

    def _on_broken(self, link: ChildLink, why: str) -> None:
        child = self._children.get(link.key)
        if child is None:
            return
        if why:
            self.kill(child, why)
        elif not link.orphan:  # usually it is exiting, and the fork server reports its exit status soon
            self._loop.call_later(_GONE_S, self._kill_if_there, link)

    def _kill_if_there(self, link: ChildLink) -> None:
        if (child := self._children.get(link.key)) is not None:
            self.kill(child, "it closed its connection to the worker")

    def _bury(self, link: ChildLink, exited: Exit) -> None:
        child = self._children.get(link.key)
        if child is None:
            return
        link.drain()
        del self._children[link.key]
        if self._servers.is_known(link):
            self._servers.forget(link)
        reason = f"{exited.reason}: {link.problem}" if link.problem else exited.reason
        link.close()
        self._empty.set()
        what = "ended" if exited.kind == "asked" else "died"
        fields = {"child": link.child, "pid": link.pid, "how": exited.kind, "reason": reason}
        self._listener.on_child(what, fields)
        did_something = bool(child.jobs) or child.ready_at != child.sign_at
        self._listener.on_gone(child, reason, by_us=exited.kind == "killed")
        if not child.single:
            self._replace(False, child.begun_at, reason, ready_at=child.ready_at, did_something=did_something)

    def _replace(
        self,
        single: bool,
        begun_at: float,
        reason: str,
        *,
        ready_at: float | None = None,
        did_something: bool = False,
    ) -> None:
        """Replace a child that ended or could not be started, or report that the pool has failed."""
        if self._closing:
            return
        now = self._loop.time()
        again_at = self._starts.ended(
            begun_at=begun_at, ready_at=ready_at, did_something=did_something, now=now
        )
        if again_at is None:
            self._make(single=single)
            return
        self._loop.call_at(again_at, lambda: self._make(single=single))
        given_up = "" if self._able(single=False) else self._starts.given_up(now)
        if given_up:
            error = PoolError(f"no child process survived start-up: {given_up}{reason}")
            if not self._started.done():
                self._started.set_exception(error)
            self._listener.on_child("failed", {"reason": str(error)})

    # ---- from the fork servers ---------------------------------------------------------------------

    def on_loaded(self, spawn_because: str, *, reloaded: bool) -> None:
        """Start the children that waited for a fork server, because one has loaded the app."""
        if spawn_because and self._settings.child_start == "auto":
            self._listener.on_child("spawning", {"because": spawn_because})
        unmade, self._unmade = self._unmade, []
        for single, _ in unmade:
            self._make(single=single)

    def on_not_loaded(self, reason: str) -> None:
        """Keep the current fork server, because the app could not be reloaded."""
        self._listener.on_child("not-reloaded", {"reason": reason})

    def on_exited(self, link: ChildLink, status: int) -> None:
        """Report a child that ended, and replace it."""
        gone = exit_of(link.pid, status, dismissed=link.dismissed, killed=link.doom, out_of_memory=False)
        self._bury(link, gone)

    def on_not_forked(self, link: ChildLink, problem: str) -> None:
        """Treat a child that could not be forked like a child that exited."""
        self._bury(link, Exit("exit", problem))

    def on_server_lost(
        self, server: ServerLink, reason: str, orphans: Sequence[ChildLink], *, current: bool
    ) -> None:
        """Replace the children of a fork server that died; they are dead too."""
        if server.problem and not self._started.done():
            self._started.set_exception(PoolError(reason))
            return
        log.error(
            "fork server died; replacing it and its child processes",
            extra={"server": server.pid, "reason": reason},
        )
        self._listener.on_child("server-died", {"pid": server.pid, "reason": reason})
        unmade, self._unmade = self._unmade, []
        for link in orphans:
            self._bury(link, Exit("killed", reason))
        for single, begun_at in unmade:
            self._replace(single, begun_at, reason)


# ---- gevent pool -----------------------------------------------------------------------------------

_END_S = 1.0  # time for a greenlet to end at its hard limit, before its job is reported as lost


@dataclass(slots=True)
class _Running:
    job: Job
    child: GreenChildState
    soft: asyncio.TimerHandle | None = None
    hard: asyncio.TimerHandle | None = None
    ended_by: str = ""  # why the job was ended

    def disarm(self) -> None:
        for timer in (self.soft, self.hard):
            if timer is not None:
                timer.cancel()


class GeventPool:
    """Distributes jobs over green children, and runs redelivered jobs alone in extra children."""

    abilities = ABILITIES["gevent"]
    is_green = True

    def __init__(self, settings: PoolSettings) -> None:
        if find_spec("gevent") is None:
            problem = "gevent is not installed; install it with: pip install 'umbel[gevent]'"
            raise BadSetting("pool", "gevent", problem, source="the worker's options")
        self._settings = settings
        self._size = settings.concurrency
        self._waiting: deque[Job] = deque()
        self._suspects: deque[Job] = deque()  # redelivered jobs, each of which runs alone in a child
        self._running: dict[int, _Running] = {}
        self._typical_s: float | None = None
        self._closing = False
        self._is_started = False

    # ---- the interface -----------------------------------------------------------------------------

    async def start(self, listener: PoolListener) -> None:
        """Start the children; raise PoolError if the app cannot be loaded or no child becomes ready."""
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
        """Queue jobs; redelivered jobs wait for a separate child."""
        jobs, unfit = apart(jobs)
        if unfit:
            self._listener.on_lost(unfit)
        for job in jobs:
            (self._suspects if job.redelivered else self._waiting).append(job)
        if self._closing:
            self._give_up()
        self._start_next()

    def note_unsettled(self, count: int) -> None:
        """Do nothing: the number of claimed messages is limited already."""

    def room(self) -> int:
        """Return how many more jobs to submit now: twice the size while jobs are short."""
        is_brief = self._typical_s is not None and self._typical_s < BRIEF_S
        return self._room_in(self._size * (2 if is_brief else 1))

    def free(self) -> int:
        """Return how many more jobs could start at once."""
        return self._room_in(self._size)

    def _room_in(self, size: int) -> int:
        held = len(self._running) + len(self._waiting) + len(self._suspects)
        return 0 if self._closing else max(0, size - held)

    def withdraw(self) -> Sequence[Job]:
        """Take back the jobs that were not sent to a child."""
        jobs = (*self._suspects, *self._waiting)
        self._suspects.clear()
        self._waiting.clear()
        return jobs

    def cancel_job(self, number: int) -> bool:
        """Make the child raise TaskCancelled in this job's greenlet; return False if the job does not run."""
        return self._send(number, Cancel(number))

    def terminate_job(self, number: int, signum: int) -> bool:
        """End this job's greenlet, whatever the signal; return False if the job does not run."""
        if number in self._running:
            self._running[number].ended_by = BY_REQUEST
        return self._send(number, EndJob(number))

    def interrupt(self) -> int:
        """Make the children raise WorkerStopping in every running job; return how many there are."""
        return sum(self._send(number, SoftLimit(number, stopping=True)) for number in self._running)

    def resize(self, by: int) -> int:
        """Change how many jobs run at once; the number of children does not change."""
        size = self._size = resized(self._size, by)
        self._start_next()
        return size

    def describe(self) -> dict[str, Any]:
        """Return the state for `health` and `stats`, with the pid of the child in which each job runs."""
        children = self._children if self._is_started else None
        return {
            "implementation": "gevent",
            "max-concurrency": self._size,
            "faults": self._listener.faults if self._is_started else 0,
            "processes": children.pids() if children else [],
            "fork-server": children.server_pid if children else None,
            "greenlets": self._size,
            "running": {running.job.task_id: running.child.link.pid for running in self._running.values()},
            "waiting": len(self._waiting) + len(self._suspects),
        }

    async def stop(self, *, grace_s: float) -> None:
        """Wait up to `grace_s` for running jobs, report the others as lost, and end the children."""
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
        """Send queued jobs to children with room, one batch for each child."""
        if not self._is_started or self._closing:
            return
        share = -(-self._size // self._children.wanted)
        batches: dict[int, tuple[GreenChildState, list[Job]]] = {}
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
                self._loop.call_soon(self._start_next)  # the slots of these jobs are free again

    def _place(
        self, job: Job, child: GreenChildState, batches: dict[int, tuple[GreenChildState, list[Job]]]
    ) -> None:
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
        """Report a job as lost that was cancelled but still runs, or whose child does not respond."""
        running = self._running[number]
        self._lose([ended_by(number, BY_LIMIT)])
        if running.child.sign_at < since:
            self._children.kill(running.child, f"task {running.job.task} blocked it beyond its time limit")
        self._start_next()

    # ---- from the children  ---------------------------------------------------------

    def on_ready(self) -> None:
        """Send jobs to a child that became ready."""
        self._start_next()

    def on_told(self, told: UserEvent) -> None:
        """Forward events of running tasks to the worker."""
        self._listener.on_told(told)

    def on_outcomes(self, outcomes: Sequence[Outcome], pid: int) -> None:
        """Report how jobs ended; a job that was ended by its limit or a request counts as lost."""
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
        """Report a job whose outcome the child could not send."""
        if self._forget(lost.number) is not None:
            self._ended.set()
            self._start_next()
            self._listener.on_lost([lost])

    def on_gone(self, child: GreenChildState, reason: str, *, by_us: bool) -> None:
        """Report the jobs of a dead child as lost.

        The death counts as a failed start only for a job that ran alone.
        """
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
        """Forward a child process event to the worker."""
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
        for job in lost:
            self._forget(job.number)
        if lost:
            self._listener.on_lost(lost)
