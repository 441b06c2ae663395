"""The prefork pool: children as separate processes, controlled from the worker's event loop.

The slots machine decides; this shell owns the fork server, the sockets and the timer. One loop performs
effects in the order in which the machine returns them. If an effect causes an event, the machine gets the
event at once, and the effects that follow are queued. The listener is called when no effect is queued. So it
may submit and withdraw jobs, and sees the result at once.

If performing an effect raises, only the child concerned is affected: it is killed and replaced, and its jobs
are treated like those of any child that dies. A job that cannot be encoded as a frame is reported with a
fault. If the machine itself raises, its state is unknown, so the pool has failed.
"""

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, assert_never

from umbel.errors import PoolError
from umbel.pools.abilities import ABILITIES
from umbel.pools.guard import Raised, call_guarded, in_one_line
from umbel.pools.interface import Job, LostJob, Outcome, PoolListener, PoolSettings, UserEvent
from umbel.pools.prefork.child import INTERRUPT
from umbel.pools.prefork.children import ChildEvent, Children
from umbel.pools.prefork.kernel import resident_bytes
from umbel.pools.prefork.links import ChildLink, batch_frames
from umbel.pools.prefork.messages import FromChild, NoOutcome, lost_outcome, slot_settings
from umbel.pools.prefork.server_process import StartedServer
from umbel.pools.reporting import GuardedListener, apart, resized
from umbel.protocol.machine import Tick
from umbel.protocol.pool.events import (
    ChildDied,
    ChildReady,
    Close,
    Dismiss,
    Effect,
    Event,
    Finished,
    Interrupt,
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
    Start,
    Submit,
    Unsettled,
    Weigh,
    Weighed,
    Withdraw,
    Withdrawn,
)
from umbel.protocol.pool.slots import Slots
from umbel.wire.frames import Cancel, Outcomes, SoftLimit, StopChild, encode_frame

log = logging.getLogger(__name__)
_hard_limit, _soft_limit = attrgetter("hard_limit_s"), attrgetter("soft_limit_s")

# A child with this many jobs in hand stays busy for longer than the pause, so it does not idle, and the main
# process reads many outcomes at a time instead of waking for each.
_PLENTY, _PAUSE_S = 64, 0.001


class PreforkPool:
    """Runs each job in a child process; crashes, leaks and hard limits end only that process."""

    abilities = ABILITIES["prefork"]
    is_green = False

    def __init__(self, settings: PoolSettings, first_server: StartedServer | None = None) -> None:
        self._settings = settings
        self._slots: Slots[Job, Outcome] = Slots(slot_settings(settings))
        self._size = settings.concurrency
        self._children = Children(settings, self, first_server)
        self._effects: deque[Effect[Job, Outcome]] = deque()
        self._performing = False
        self._faults = 0  # number of effects that raised
        self._broken = False  # whether the machine raised, so its state is unknown
        self._withdrawn: list[Job] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._stopped: asyncio.Future[None] | None = None

    # ---- the interface -----------------------------------------------------------------------------

    async def start(self, listener: PoolListener) -> None:
        """Start the fork server and the children; raise PoolError if they are not ready in time."""
        self._loop = asyncio.get_running_loop()
        self._listener = GuardedListener(listener)
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
                f"{len(self._children.ready)} of {self._settings.concurrency} child processes are ready"
            ) from None
        except (PoolError, asyncio.CancelledError):
            await self.stop(grace_s=0.0)
            raise

    def submit(self, jobs: Sequence[Job]) -> None:
        """Pass jobs to the machine; those with invalid limits are reported as lost."""
        unfit: Sequence[LostJob] = ()
        if {*map(_hard_limit, jobs), *map(_soft_limit, jobs)} - {None}:
            jobs, unfit = apart(jobs)
        self._step(Submit(jobs))
        if unfit:
            self._listener.on_lost(unfit)

    def note_unsettled(self, count: int) -> None:
        """Forward the count to the machine, which sends no further batches while too many messages are
        unsettled.
        """
        self._step(Unsettled(count))

    def room(self) -> int:
        """Return how many more jobs to submit now to keep the children busy."""
        return self._slots.room()

    def free(self) -> int:
        """Return how many idle children could start a job at once."""
        return self._slots.free()

    def withdraw(self) -> Sequence[Job]:
        """Take back every job that no child has started, including batches in a child's socket."""
        self._step(Withdraw())
        jobs, self._withdrawn = tuple(self._withdrawn), []
        return jobs

    def cancel_job(self, number: int) -> bool:
        """Send a Cancel frame and a signal to the child that runs this job; return False if none does."""
        child = self._slots.holder_of(number)
        # the child may run another job when the signal arrives, so the frame names the job
        if child is not None:
            self._children.links[child].send(encode_frame(Cancel(number)))
            self._children.signal(self._children.links[child], INTERRUPT)
        return child is not None

    def terminate_job(self, number: int, signum: int) -> bool:
        """Send a signal to the child that runs this job, and replace the child; return False if it is not
        running.
        """
        child = self._slots.holder_of(number)
        if child is None:
            return False
        # The child gets no further job, so the signal cannot hit a later one.
        self._step(Retire(child, "task terminated"))
        running = self._slots.running(child)
        if running is None or running.number != number:
            return False
        link = self._children.links[child]
        if signum == signal.SIGKILL:
            link.doom = "task terminated"
        self._children.signal(link, signum)
        return True

    def interrupt(self) -> int:
        """Raise WorkerStopping in every running job; return how many there are."""
        self._step(Interrupt())
        return len(self.describe()["running"])

    def restart(self, *, reload: bool = False) -> None:
        """Replace the children one after the other, each when it is idle; running jobs continue.

        `reload`: load the app again first. If that fails, the current children stay.
        """
        if reload:
            self._children.reload()
        else:
            self._step(Replace())

    def resize(self, by: int) -> int:
        """Start or end children; a child that runs a job ends after it."""
        size = self._size = resized(self._size, by)
        self._step(Resize(size))
        return size

    def describe(self) -> dict[str, Any]:
        """Return the state for `health` and `stats`, with the pid of the child in which each job runs."""
        links = [(slot, link.pid) for slot, link in sorted(self._children.links.items()) if link.pid]
        running = {pid: self._slots.running(slot) for slot, pid in links}
        return {
            "implementation": "prefork",
            "max-concurrency": self._size,
            "max-tasks-per-child": self._settings.max_tasks_per_child,
            "processes": list(running),
            "ready": len(self._children.ready),
            "fork-server": self._children.server_pid,
            "running": {job.task_id: pid for pid, job in running.items() if job is not None},
            "waiting": self._slots.waiting(),
            "faults": self._faults + (0 if self._stopped is None else self._listener.faults),
        }

    async def stop(self, *, grace_s: float) -> None:
        """End the children within `grace_s`, then the fork servers and every descendant."""
        if self._stopped is None:
            return  # the pool was never started
        self._step(Close(grace_s))
        await self._stopped
        if self._timer is not None:
            self._timer.cancel()
        await self._children.close()

    # ---- events in, effects out --------------------------------------------------------------------

    def _step(self, event: Event[Job, Outcome] | Tick) -> None:
        if self._broken:
            return
        stepped = call_guarded(self._slots.step, event, self._loop.time())
        if isinstance(stepped, Raised):
            self._give_up(stepped.error)
            return
        self._effects += stepped.value
        if self._performing:
            return  # the loop that is already running performs these too
        self._performing = True
        self._listener.hold()
        try:
            while self._effects:
                effect = self._effects.popleft()
                performed = call_guarded(self._perform, effect)
                if isinstance(performed, Raised):
                    call_guarded(self._recover, effect, performed.error)
        finally:
            self._performing = False
        self._set_timer()
        self._listener.release()

    def _set_timer(self) -> None:
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
                self._send_batch(child, batch, jobs)
            case Reported(child, outcomes):
                self._report(self._children.links[child], outcomes)
            case JobBegan(child, job):
                running = self._slots.running(child)
                if running is not None and running.number == job:  # otherwise the job could not be sent
                    link = self._children.links[child]
                    self._listener.on_started([(job, link.free_at, link.pid)])
            case Recall(child):
                link_or_none = self._children.links.get(child)
                self._step(Recalled(child, link_or_none.take_tokens() if link_or_none else b""))
            case JobsLost(losses):
                self._listener.on_lost(
                    [LostJob(it.job, it.charged, it.reason, it.timed_out, it.ran, it.fault) for it in losses]
                )
            case Withdrawn(jobs):
                self._withdrawn += jobs
            case SignalSoftLimit(child, job, stopping):
                self._signal_soft_limit(self._children.links[child], SoftLimit(job, stopping))
            case Start(child):
                self._children.start(child)
            case Dismiss(child, reason):
                self._children.links[child].dismissed = reason
                self._children.links[child].send(encode_frame(StopChild()))
            case Weigh(child):
                link_or_none = self._children.links.get(child)
                self._step(Weighed(child, resident_bytes(link_or_none.pid) if link_or_none else 0))
            case Overweight(child, job, size_bytes):
                self._listener.on_child("heavy", self._about(child, job=job, size_bytes=size_bytes))
            case Kill(child, reason):
                self._children.kill(child, reason)
            case PoolFailed(reason):
                self._fail(f"no child process survived start-up: {reason}")
            case PoolClosed():
                if self._stopped is not None and not self._stopped.done():
                    self._stopped.set_result(None)
            case _:
                assert_never(effect)

    def _give_up(self, error: BaseException) -> None:
        self._broken = True
        log.critical("pool failed; worker stops", exc_info=error)
        self._fail(f"internal error in the pool: {in_one_line(error)}")
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)

    def _recover(self, effect: Effect[Job, Outcome], error: BaseException) -> None:
        """Replace the child after an effect raised, and give the machine the event it waits for."""
        self._faults += 1
        log.error("internal error in the pool at %s; please report it", type(effect).__name__, exc_info=error)
        child = getattr(effect, "child", None)
        if child is None:
            return
        reason = f"internal error in the pool: {in_one_line(error)}"
        self._step(Retire(child, reason))  # it gets no further jobs
        match effect:
            case Send(_, batch, jobs):
                self._step(Recalled(child, bytes((batch,)) * len(jobs)))
            case Recall():
                self._step(Recalled(child, b""))
            case Weigh():
                self._step(Weighed(child, 0))
        if (link := self._children.links.get(child)) is not None:
            self._children.kill_broken(link, reason)
        elif isinstance(effect, Start):
            self._step(ChildDied(child, b"", reason))

    def _send_batch(self, child: int, batch: int, jobs: Sequence[Job]) -> None:
        frames, unfit = batch_frames(batch, jobs)
        link = self._children.links[child]
        running = self._slots.running(child)
        if running is not None and running.number == jobs[0].number:  # the child was idle
            link.free_at = time.time()
        link.put_tokens(batch, len(jobs) - len(unfit))
        link.send(*frames)
        if unfit:
            self._step(NotSent(child, unfit))

    def _report(self, link: ChildLink, outcomes: Sequence[Outcome]) -> None:
        if link.unsaid:
            self._listener.on_lost(
                [link.unsaid[outcome.number] for outcome in outcomes if outcome.number in link.unsaid]
            )
            outcomes = [outcome for outcome in outcomes if outcome.number not in link.unsaid]
            link.unsaid.clear()
        if outcomes:
            link.free_at = outcomes[-1].started_at + outcomes[-1].runtime_s
        self._listener.on_outcomes(outcomes, link.pid)

    def _signal_soft_limit(self, link: ChildLink, limit: SoftLimit) -> None:
        link.send(encode_frame(limit))
        if limit.stopping or link.armed:
            self._children.signal(link, INTERRUPT if limit.stopping else signal.SIGUSR1)

    def _about(self, child: int, **fields: object) -> dict[str, Any]:
        link = self._children.links[child]
        return {"child": child, "pid": link.pid, **fields}

    def _fail(self, reason: str) -> None:
        error = PoolError(reason)
        if not self._started.done():
            self._started.set_exception(error)
        self._listener.on_child("failed", {"reason": str(error)})

    # ---- from the children ------------------------------------------------------

    def on_event(self, event: ChildEvent) -> None:
        """Report to the machine that a child became ready, died or must be replaced."""
        self._step(event)
        is_ready = isinstance(event, ChildReady) and len(self._children.ready) >= self._size
        if is_ready and not self._started.done():
            self._started.set_result(None)

    def on_messages(self, link: ChildLink, messages: Sequence[FromChild]) -> None:
        """Handle messages about the child at once, then report all its ended jobs together."""
        outcomes: list[Outcome] = []
        for message in messages:
            if isinstance(message, Outcomes):
                outcomes += message.outcomes
            elif isinstance(message, NoOutcome):
                link.unsaid[message.job] = lost_outcome(message)
                outcomes.append(Outcome(message.job, "failure", time.time(), 0.0))
            else:
                self._children.note(link, message)
        if outcomes:
            self._step(Finished(link.child, outcomes))
            if self._slots.outstanding(link.child) >= _PLENTY:
                link.pause_reading(_PAUSE_S)

    def on_no_start(self, error: PoolError) -> bool:
        """Make the start fail because the app did not load; return whether the pool was still starting."""
        if self._started.done():
            return False
        self._started.set_exception(error)
        return True

    def on_told(self, told: UserEvent) -> None:
        """Forward events of running tasks to the worker."""
        self._listener.on_told(told)

    def on_child(self, what: str, fields: dict[str, Any]) -> None:
        """Forward a child process event to the worker."""
        self._listener.on_child(what, fields)
