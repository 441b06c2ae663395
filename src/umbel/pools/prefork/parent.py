"""PreforkPool: children as separate processes, on the worker's event loop.

The slots machine decides; this shell owns the fork server, the sockets and the timer. Effects
are performed in the order in which the machine asked for them, also when a listener, called from
one of them, submits or withdraws: both go through the same queue.

A child's death is reported to the machine when the fork server has told its exit status and
everything it wrote has been read. Should the fork server itself die, its children are killed by
the kernel; each is reported when its socket ends, and a new server is started.
"""

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, assert_never

from umbel.errors import PoolError
from umbel.pools.abilities import ABILITIES
from umbel.pools.interface import Job, LostJob, Outcome, PoolListener, PoolSettings, Told
from umbel.pools.prefork.child import INTERRUPT
from umbel.pools.prefork.child_link import ChildLink
from umbel.pools.prefork.exits import Exit, exit_of
from umbel.pools.prefork.memory import OomKills, resident_bytes
from umbel.pools.prefork.messages import FromChild, batch_frames
from umbel.pools.prefork.server_link import ServerLink
from umbel.pools.prefork.servers import ForkServers
from umbel.pools.prefork.settings import slot_settings
from umbel.protocol.machine import Tick
from umbel.protocol.slot_events import (
    Began,
    ChildDied,
    ChildReady,
    Close,
    Closed,
    Dismiss,
    Effect,
    Event,
    Failed,
    Finished,
    Interrupt,
    Kill,
    Lost,
    Open,
    Overweight,
    Recall,
    Recalled,
    Replace,
    Reported,
    Resize,
    Retire,
    Send,
    SignalSoftLimit,
    Start,
    Submit,
    Weigh,
    Weighed,
    Withdraw,
    Withdrawn,
)
from umbel.protocol.slots import Slots
from umbel.wire.frames import Armed, Cancel, Outcomes, Problem, Ready, SoftLimit, Stop, encode_frame

log = logging.getLogger(__name__)

# A child with this many jobs in hand is busy for longer than the pause, so it does not idle, and
# the main process reads many outcomes at a time instead of waking for each.
_PLENTY, _PAUSE_S = 64, 0.001
_END_S = 2.0  # how long a child whose connection has ended may take to be gone


class PreforkPool:
    abilities = ABILITIES["prefork"]
    is_green = False

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._slots: Slots[Job, Outcome] = Slots(slot_settings(settings))
        self._size = settings.concurrency
        self._servers = ForkServers(settings, self)
        self._oom_kills = OomKills()
        self._links: dict[int, ChildLink] = {}  # by slot
        self._keys = 0
        self._unstarted: list[int] = []  # slots that wait for a fork server with the app loaded
        self._effects: deque[Effect[Job, Outcome]] = deque()
        self._withdrawn: list[Job] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._stopped: asyncio.Future[None] | None = None
        self._ready: set[int] = set()  # slots with a child that can take jobs

    # ---- the interface -----------------------------------------------------------------------------

    async def start(self, listener: PoolListener) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._stopped = self._loop.create_future()
        self._step(Open())
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self._started
        except TimeoutError:
            await self.stop(grace_s=0.0)
            raise PoolError(
                f"the pool was not ready after {self._settings.start_timeout_s:g} s (start_timeout_s): "
                f"{len(self._ready)} of {self._settings.concurrency} children can take jobs"
            ) from None
        except (PoolError, asyncio.CancelledError):
            await self.stop(grace_s=0.0)
            raise

    def submit(self, jobs: Sequence[Job]) -> None:
        self._step(Submit(jobs))

    def room(self) -> int:
        return self._slots.room()

    def withdraw(self) -> Sequence[Job]:
        self._step(Withdraw())
        # A listener that is called meanwhile may withdraw too: each job goes to one of the callers.
        jobs, self._withdrawn = tuple(self._withdrawn), []
        return jobs

    def cancel_job(self, number: int) -> bool:
        child = self._slots.holder_of(number)
        if child is not None:  # whatever it is at when the signal comes: the frame names the job
            self._links[child].send(encode_frame(Cancel(number)))
            self._servers.signal(self._links[child], INTERRUPT)
        return child is not None

    def terminate_job(self, number: int, signum: int) -> bool:
        child = self._slots.holder_of(number)
        if child is None:
            return False
        # The child gets no further job, so the signal cannot hit one that comes after.
        self._step(Retire(child, "its task was terminated"))
        running = self._slots.running(child)
        if running is None or running.number != number:
            return False
        link = self._links[child]
        if signum == signal.SIGKILL:
            link.doom = "its task was terminated"
        self._servers.signal(link, signum)
        return True

    def interrupt(self) -> int:
        self._step(Interrupt())
        return len(self.describe()["running"])

    def restart(self, *, reload: bool = False) -> None:
        """Replace the children one after the other, each when it is idle; what runs goes on.

        `reload`: load the app anew first. If that fails, everything stays as it is.
        """
        if reload:
            self._servers.reload()
        else:
            self._step(Replace())

    def resize(self, by: int) -> int:
        size = self._size + by
        if size < 1:
            raise PoolError(f"a pool of {self._size} cannot lose {-by} children: at least one stays")
        self._size = size
        self._step(Resize(size))
        return size

    def describe(self) -> dict[str, Any]:
        links = [(slot, link.pid) for slot, link in sorted(self._links.items()) if link.pid]
        running = {pid: self._slots.running(slot) for slot, pid in links}
        return {
            "implementation": "prefork",
            "max-concurrency": self._size,
            "max-tasks-per-child": self._settings.max_tasks_per_child,
            "processes": list(running),
            "ready": len(self._ready),
            "fork-server": self._servers.pid,
            "running": {job.task_id: pid for pid, job in running.items() if job is not None},
            "waiting": self._slots.waiting(),
        }

    async def stop(self, *, grace_s: float) -> None:
        if self._stopped is None:
            return  # never started
        self._step(Close(grace_s))
        await self._stopped
        if self._timer is not None:
            self._timer.cancel()
        await self._servers.close()

    # ---- events in, effects out --------------------------------------------------------------------

    def _step(self, event: Event[Job, Outcome] | Tick) -> None:
        effects = self._effects
        effects += self._slots.step(event, self._loop.time())
        while effects:
            self._perform(effects.popleft())
        deadline = self._slots.deadline
        if deadline is not None and (self._timer is None or deadline < self._timer_at):
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timer_at = self._loop.call_at(deadline, self._on_timer), deadline

    def _on_timer(self) -> None:
        self._timer = None
        self._step(Tick())

    def _perform(self, effect: Effect[Job, Outcome]) -> None:
        match effect:
            case Send(child, batch, jobs):
                link = self._links[child]
                link.put_tokens(batch, len(jobs))
                link.send(batch_frames(batch, jobs))
            case Reported(child, outcomes):
                self._listener.on_outcomes(outcomes, self._links[child].pid)
            case Began(child, job):
                self._listener.on_started([(job, time.time(), self._links[child].pid)])
            case Recall(child):
                link_or_none = self._links.get(child)
                self._step(Recalled(child, link_or_none.take_tokens() if link_or_none else b""))
            case Lost(losses):
                lost = [LostJob(one.job, one.charged, one.reason, one.timed_out, one.ran) for one in losses]
                self._listener.on_lost(lost)
            case Withdrawn(jobs):
                self._withdrawn += jobs
            case SignalSoftLimit(child, job, stopping):
                self._signal_soft_limit(self._links[child], SoftLimit(job, stopping))
            case Start(child):
                self._start_child(child)
            case Dismiss(child, reason):
                self._links[child].dismissed = reason
                self._links[child].send(encode_frame(Stop()))
            case Weigh(child):
                link_or_none = self._links.get(child)
                self._step(Weighed(child, resident_bytes(link_or_none.pid) if link_or_none else 0))
            case Overweight(child, job, size_bytes):
                self._listener.on_child("heavy", self._about(child, job=job, size_bytes=size_bytes))
            case Kill(child, reason):
                self._kill_child(child, reason)
            case Failed(reason):
                self._fail(reason)
            case Closed():
                if self._stopped is not None and not self._stopped.done():
                    self._stopped.set_result(None)
            case _:
                assert_never(effect)

    def _signal_soft_limit(self, link: ChildLink, limit: SoftLimit) -> None:
        link.send(encode_frame(limit))
        if limit.stopping or link.armed:
            self._servers.signal(link, INTERRUPT if limit.stopping else signal.SIGUSR1)

    def _kill_child(self, child: int, reason: str) -> None:
        link = self._links.get(child)
        if link is None:  # it never got as far as a process
            self._unstarted.remove(child)
            self._step(ChildDied(child, b"", reason))
        else:
            link.doom = reason
            self._servers.signal(link, signal.SIGKILL)

    def _about(self, child: int, **fields: object) -> dict[str, Any]:
        link = self._links[child]
        return {"child": child, "pid": link.pid, **fields}

    def _fail(self, reason: str) -> None:
        error = PoolError(f"no child gets as far as its first job: {reason}")
        if not self._started.done():
            self._started.set_exception(error)
        self._listener.on_child("failed", {"reason": str(error)})

    # ---- children ----------------------------------------------------------------------------------

    def _start_child(self, child: int) -> None:
        try:
            if not self._servers.is_loaded():
                self._unstarted.append(child)
                return
            self._keys += 1
            link = ChildLink(self._keys, child, on_messages=self._on_child, on_broken=self._on_child_broken)
        except OSError as error:  # no more descriptors, processes or memory for now
            self._step(ChildDied(child, b"", f"it could not be started: {error}"))
            return
        self._links[child] = link
        self._servers.make_child(link)

    def _on_child(self, link: ChildLink, messages: Sequence[FromChild]) -> None:
        outcomes: list[Outcome] = []
        for message in messages:
            if isinstance(message, Outcomes):
                outcomes += message.outcomes
                continue
            match message:
                case Ready(pid):
                    self._on_child_ready(link, pid)
                case Told():
                    self._listener.on_told(message)
                case Armed():
                    link.armed = True
                case Problem(text):
                    link.problem = text
                case _:
                    assert_never(message)
        if outcomes:
            self._step(Finished(link.child, outcomes))
            if self._slots.outstanding(link.child) >= _PLENTY:
                link.pause_reading(_PAUSE_S)

    def _on_child_ready(self, link: ChildLink, pid: int) -> None:
        link.pid = pid
        self._ready.add(link.child)
        self._listener.on_child("started", {"child": link.child, "pid": pid})
        self._step(ChildReady(link.child))
        if len(self._ready) >= self._size and not self._started.done():
            self._started.set_result(None)

    def _on_child_broken(self, link: ChildLink, why: str) -> None:
        if link.orphan:
            self._bury(link, Exit("killed", link.doom))
        elif why:
            self._kill_broken(link, why)
        else:  # as a rule it is dying, and the server is about to say how
            self._loop.call_later(_END_S, self._kill_broken, link, "it closed its connection")

    def _kill_broken(self, link: ChildLink, why: str) -> None:
        if self._servers.is_known(link):
            link.doom = link.doom or why
            self._servers.signal(link, signal.SIGKILL)

    def _bury(self, link: ChildLink, exited: Exit) -> None:
        if not self._servers.is_known(link):
            return
        self._servers.forget(link)
        link.drain()
        reason = f"{exited.reason}: {link.problem}" if link.problem else exited.reason
        tokens = link.take_tokens()
        link.close()
        del self._links[link.child]
        self._ready.discard(link.child)
        # The machine first: a listener may submit, and nothing may be sent to the dead.
        self._step(ChildDied(link.child, tokens, reason))
        what = "ended" if exited.kind == "asked" else "died"
        fields = {"child": link.child, "pid": link.pid, "how": exited.kind, "reason": reason}
        self._listener.on_child(what, fields)

    # ---- from the fork servers ---------------------------------------------------------------------

    def on_exited(self, link: ChildLink, status: int) -> None:
        out_of_memory = self._oom_kills.happened() if status == signal.SIGKILL and not link.doom else False
        self._bury(
            link,
            exit_of(
                link.pid, status, dismissed=link.dismissed, killed=link.doom, out_of_memory=out_of_memory
            ),
        )

    def on_not_forked(self, link: ChildLink, problem: str) -> None:
        self._bury(link, Exit("exit", problem))

    def on_loaded(self, spawn_because: str, *, anew: bool) -> None:
        if spawn_because and self._settings.child_start == "auto":
            self._listener.on_child("spawning", {"because": spawn_because})
        unstarted, self._unstarted = self._unstarted, []
        for child in unstarted:
            self._start_child(child)
        if anew:
            self._listener.on_child("reloaded", {"server": self._servers.pid})
            self._step(Replace())

    def on_not_loaded(self, reason: str) -> None:
        self._listener.on_child("not-reloaded", {"reason": reason})

    def on_server_lost(
        self, server: ServerLink, reason: str, orphans: Sequence[ChildLink], *, current: bool
    ) -> None:
        """Children are buried as their sockets end, then others take their slots."""
        if server.problem and not self._started.done():
            self._started.set_exception(PoolError(reason))
        else:
            log.error("fork server died", extra={"server": server.pid, "reason": reason})
        self._listener.on_child("server-died", {"pid": server.pid, "reason": reason})
        for link in orphans:
            link.doom = reason
            self._loop.call_later(_END_S, self._bury, link, Exit("killed", reason))
            if link.broken:
                self._bury(link, Exit("killed", reason))
        if current:
            unstarted, self._unstarted = self._unstarted, []
            for child in unstarted:
                self._step(ChildDied(child, b"", reason))
