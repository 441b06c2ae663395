"""Taking messages: the step that claims them, has them admitted, hands them to the pool and settles them.

The heart of a worker. It claims only as much as the pool can use, so that what this worker cannot start stays
with the broker for others. `admit` decides which messages may run, `end` what becomes of those that have
ended, `settle` brings that to the broker.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from umbel.backoff import Backoff
from umbel.brokers.interface import Broker, Delivery, Refused
from umbel.clock import cluster_now
from umbel.errors import BrokerError, PoolError
from umbel.pools.interface import Job, LostJob, Outcome, UserEvent
from umbel.protocol.delivery.delivery import PATIENCE_S, AdmissionPolicy, ClaimAhead, Refusal
from umbel.protocol.delivery.revoked import RevokedTasks
from umbel.protocol.delivery.trust import UNSIGNED
from umbel.protocol.shutdown import LinkChange, LinkLost
from umbel.worker.bootsteps import Step
from umbel.worker.connection import RETURNED_TEXT
from umbel.worker.context import WorkerContext
from umbel.worker.delivery.admit import Admission, Adoption, RevokeRecord, Scheduled, job_of
from umbel.worker.delivery.claimed import Claimed
from umbel.worker.delivery.end import Endings, handle_each
from umbel.worker.delivery.settle import Settler
from umbel.worker.delivery.task_events import TaskEvents

log = logging.getLogger("umbel.worker.tasks")

LEASE_EXPIRED = "worker lease expired; running tasks may also run on another worker"
_CHILD_LOGGED_AT = {
    "died": logging.WARNING,
    "heavy": logging.WARNING,
    "not-reloaded": logging.ERROR,
    "ended": logging.INFO,
    "reloaded": logging.INFO,
}


class IdleWait:
    """The wait of a worker that found its queues empty, until a claim may find something.

    The broker decides how long a wait may last: as long as it reports every change itself.
    """

    def __init__(self, broker: Broker, owner: str) -> None:
        self._broker = broker
        self._owner = owner
        self._waiting: asyncio.Timeout | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the waiting task

    async def until_ready(self, queues: Sequence[str]) -> None:
        """Return when one of the queues may have a message, when the wait is too long, or after `end`."""
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as self._waiting:
                most_s = self._broker.capabilities.idle_wait_s
                await self._broker.wait_ready(queues, most_s, owner=self._owner)
        except TimeoutError:  # `end`
            pass
        finally:
            self._waiting = None

    def end(self) -> None:
        """End the wait; may be called from any thread."""
        waiting, loop = self._waiting, self._loop
        if waiting is not None and loop is not None:
            loop.call_soon_threadsafe(self._end, waiting, loop)

    def _end(self, waiting: asyncio.Timeout, loop: asyncio.AbstractEventLoop) -> None:
        if waiting is self._waiting and not waiting.expired():
            waiting.reschedule(loop.time())


class ChildTable:
    """The child processes of a pool, by their place in it: process ids, and how often each was replaced.

    A place stays listed when the pool shrinks.
    """

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.restarts: dict[int, int] = {}

    def note(self, what: str, fields: Mapping[str, Any]) -> None:
        """Note that a child `started`, `ended` or `died`; other events are ignored."""
        child, pid = fields.get("child"), fields.get("pid")
        if not isinstance(child, int) or not isinstance(pid, int):
            return
        if what == "started":
            self.restarts[child] = self.restarts.get(child, -1) + 1
            self.pids[child] = pid
        elif what in ("ended", "died") and self.pids.get(child) == pid:
            del self.pids[child]


class Tasks(Step):
    """The step that takes messages.

    It is also the listener of the pool, and the source for remote control.
    """

    name = "tasks"
    requires = ("connection", "events", "pool", "heart", "control", "gossip")

    def __init__(self, context: WorkerContext, events: TaskEvents) -> None:
        super().__init__(context)
        self._events = events
        self._counters = context.counters
        self._broker = context.broker
        self._owner = context.identity.owner
        self._pool = context.pool
        settings = context.settings
        # The rules by which messages are admitted; remote control changes limits in it.
        self.policy = AdmissionPolicy(settings.tasks, max_deliveries=settings.max_deliveries)
        self.prefetch_max = settings.prefetch_max
        self.revoked = RevokedTasks()
        self.revokes = RevokeRecord(context, self.revoked)
        self.totals: Counter[str] = Counter()  # by task: how many were taken to run here
        self.children = ChildTable()
        self._before_taking: dict[str, Callable[[], Awaitable[None]]] = {}  # by name
        self._claimed: dict[int, Claimed] = {}
        self._room = asyncio.Event()
        self._idle = IdleWait(self._broker, self._owner)
        self._stopping = False
        self._signs_for: str | None = None  # the cluster, for what signed messages cause; None: no keys
        self._loop = asyncio.get_running_loop()
        self._pool_failed: asyncio.Future[str] = self._loop.create_future()
        self._claim_problem = ""
        self._settler = settler = Settler(
            context,
            events.step,
            refused=self._end_refused,
            settled=self._note_settled,
        )
        self._endings = Endings(context, self.policy, settler, events)
        self._adoption = Adoption(context, settler)
        self._admission = Admission(context, self.policy, self.revoked, settler, self._endings, events)
        self._ahead = ClaimAhead()
        self._ahead_timer: asyncio.TimerHandle | None = None
        self._is_late = False  # claimed messages wait too long for a child, and are to be returned

    @property
    def claimed(self) -> int:
        """Messages claimed and not settled, with everything that still has to be stored or sent for them."""
        return len(self._claimed) + self._settler.pending + len(self._settler.after.waiting)

    @property
    def problem(self) -> str:
        """Why messages cannot be fetched or settled now; "" when they can."""
        return self._claim_problem or self._settler.problem

    @property
    def cannot_settle(self) -> bool:
        """Whether broker or result store are away; with many unsettled messages nothing is claimed."""
        return bool(self._settler.problem)

    async def start(self) -> None:
        """Begin to claim and to settle messages."""
        for queue in self._context.queues:
            self._broker.capabilities.refuse_reserved(queue)
        self._context.outages.on_link(self._note_link)
        if self._broker.keyring is not None and (signer := self._broker.signer) is not None:
            self._signs_for = signer.cluster.id
        self.run_in_background(self._settler.run())
        self.run_in_background(self._settler.after.run())
        self.run_in_background(self._consume())
        self.run_in_background(self._fail_with_the_pool())

    async def stop(self) -> None:
        """Settle everything. Running tasks have ended by now (see `Stopping`), or are cut off here."""
        if not self._background:
            self._stopping = True
            return
        self.stop_taking()
        if self._claimed:
            await self.cut()
        await self._finish_settling()
        await self.end_background()

    # -- stopping: what `Stopping` calls ---------------------------------------------------------

    @property
    def running(self) -> int:
        """How many messages the pool has and cannot return unstarted."""
        return len(self._claimed)

    def stop_taking(self) -> None:
        """Claim nothing more, and return what has not started."""
        self._stopping = True
        if self._ahead_timer is not None:
            self._ahead_timer.cancel()
        self.wake()
        if self._background:
            for job in self._pool.withdraw():
                self._endings.give_back(self._claimed.pop(job.number), ran=False)

    def interrupt(self) -> int:
        """Interrupt running tasks, because the worker stops; return how many were interrupted."""
        self._room.set()
        return self._pool.interrupt() if self._background else 0

    async def cut(self) -> None:
        """End the children; what they ran goes back to its queue."""
        self._counters.cut += len(self._claimed)
        await self._pool.stop(grace_s=0.0)

    async def changed(self) -> None:
        """Return when a task may have ended since the last call, or after `note_change`."""
        self._room.clear()
        await self._room.wait()

    def note_change(self) -> None:
        """End a wait in `changed`."""
        self._room.set()

    def wake(self) -> None:
        """End the wait for messages or for room, because queues or limits have changed."""
        self._room.set()
        self._idle.end()

    def before_taking(self, name: str, callback: Callable[[], Awaitable[None]] | None) -> None:
        """Await the callback after each claim, before its messages are judged; None removes it."""
        if callback is None:
            self._before_taking.pop(name, None)
        else:
            self._before_taking[name] = callback
            self.wake()

    # -- for remote control ----------------------------------------------------------------------

    @property
    def scheduled(self) -> Scheduled:
        """The messages that this worker parked until they are due."""
        return self._admission.scheduled

    def limit_prefetch(self, most: int) -> None:
        """Claim at most this many messages, running and waiting; claimed ones stay. Thread-safe."""
        self.prefetch_max = most
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.wake)

    def holding(self) -> list[Claimed]:
        """Return every message that was admitted here and has not ended."""
        return list(self._claimed.values())

    def is_holding(self, claimed: Claimed) -> bool:
        """Return whether this attempt of the message has not ended."""
        return self._claimed.get(claimed.number) is claimed

    def drop_revoked(self) -> None:
        """Refuse unstarted messages that were revoked after they were claimed."""
        if any(map(self._is_revoked, self._claimed.values())):
            refuse = self._endings.refuse
            handle_each(
                lambda claimed: refuse(claimed, Refusal.REVOKED),
                self._withdrawn(self._is_revoked),
                self._endings.bury_faulty,
            )

    def return_unstarted(self) -> None:
        """Return all that has not started, because the lease expired and other workers have the messages.

        What was claimed since goes back to its queue.
        """
        for claimed in self._withdraw_claimed():
            self._endings.give_back(claimed, ran=False)
        if self.running:
            self._context.outages.consequence(
                log, logging.WARNING, LEASE_EXPIRED, named="maybe run twice", count=self.running
            )

    def _look_for_late(self) -> None:
        """Return claimed messages that wait too long behind busy children: other workers may be idle.

        A free child is about to take the first of them, so they wait once more.
        """
        self._ahead_timer = None
        now = self._loop.time()
        last = self._ahead.overdue(now)
        if last and self._has_unstarted(last):
            if self._pool.free():
                self._ahead.submit(last, now)
            else:
                self._ahead.stall()
                self._is_late = True
                self.wake()
        self._arm_ahead()

    def _has_unstarted(self, last: int) -> bool:
        for number, claimed in self._claimed.items():
            if number > last:
                return False
            if claimed.started_at is None:
                return True
        return False

    def _arm_ahead(self) -> None:
        deadline = self._ahead.deadline
        if self._ahead_timer is None and deadline is not None and self._claimed and not self._stopping:
            self._ahead_timer = self._loop.call_at(deadline, self._look_for_late)

    async def _return_late(self) -> None:
        """Return what has not started, first in line; other workers may have room for it.

        The worker leaves its queues first, or RabbitMQ would hand the messages to it again.
        """
        await self._leave_queues(is_busy=True)
        self._is_late = False
        late = self._withdrawn(lambda _: True)
        self._counters.returned_unstarted += len(late)
        for claimed in late:
            self.totals[claimed.headers.task] -= 1
            self._endings.give_back(claimed, ran=False)
        if late:
            log.debug("all children busy; unstarted messages returned", extra={"count": len(late)})

    def _withdraw_claimed(self) -> list[Claimed]:
        """Withdraw what has not started, except messages acknowledged early: no other worker gets those."""
        return self._withdrawn(lambda claimed: not claimed.acked) if self._background else []

    def _withdrawn(self, goes: Callable[[Claimed], bool]) -> list[Claimed]:
        """Withdraw the unstarted messages for which `goes` is true; the others may start here.

        A stopping worker returns the others to their queues, too.
        """
        withdrawn: list[Claimed] = []
        others: list[Job] = []
        for job in self._pool.withdraw():
            if goes(self._claimed[job.number]):
                withdrawn.append(self._claimed.pop(job.number))
            else:
                others.append(job)
        if self._stopping:
            for job in others:
                self._endings.give_back(self._claimed.pop(job.number), ran=False)
        else:
            self._submit(others)
            self._room.set()
        return withdrawn

    def _is_revoked(self, claimed: Claimed) -> bool:
        return self.revoked.covers(claimed.headers.id, claimed.headers.stamps)

    # -- from the broker -------------------------------------------------------------------------

    async def _consume(self) -> None:
        """Claim and start messages until the worker stops, with retries while the broker is unavailable."""
        backoff, outages = Backoff(), self._context.outages
        while not self._stopping:
            try:
                idle_for = await self._take_some()
                if backoff.failures:  # before a wait, which may be long
                    outages.worked(self.name)
                    self._claim_problem = ""
                if idle_for:
                    await self._wait_for_messages(idle_for)
                backoff.reset()
            except BrokerError as error:
                outages.failed(self.name, error)
                self._claim_problem = f"cannot fetch messages: {error}"
                await backoff.pause()
        try:  # what was prefetched goes to other workers now, not only when the last task has ended
            await self._leave_queues(is_busy=False)
        except BrokerError as error:  # the broker returns it when this worker disconnects
            log.warning(
                "cannot return prefetched messages; the broker returns them when this worker disconnects",
                extra={"why": str(error)},
            )

    async def _leave_queues(self, *, is_busy: bool) -> None:
        for queue in tuple(self._context.queues):
            await self._broker.leave_queue(self._owner, queue, is_busy=is_busy)

    async def _fail_with_the_pool(self) -> None:
        """End the worker when its children cannot be started any more: it must not go on claiming."""
        raise PoolError(await self._pool_failed)

    async def _take_some(self) -> tuple[str, ...]:
        """Claim and start messages; return the queues that were empty, to wait for."""
        if self._is_late:
            await self._return_late()
        room = self._ahead.claimable(room=self._pool.room(), free=self._pool.free())
        room = min(room, self.prefetch_max - self.claimed)
        queues = tuple(self._context.queues)
        if room <= 0 or not queues:
            await self._wait_for_room()
            return ()
        read = self.revokes.cursor
        claim = await self._broker.claim(self._owner, queues, room, revoked_after=read)
        if claim.lease_ended:
            self.return_unstarted()
        if claim.revokes or claim.revoked_cursor != read:
            self.revokes.learn(claim, after=read)
        self.revoked.expire(cluster_now())
        if claim.returned:
            self._context.outages.consequence(
                log, logging.WARNING, RETURNED_TEXT, named="returned of others", count=claim.returned
            )
        if claim.set_aside:
            self._endings.note_set_aside(claim.set_aside)
        for catch_up in tuple(self._before_taking.values()):
            await catch_up()
        if not claim.deliveries:
            return queues
        deliveries = await self._admission.verified(claim.deliveries)
        if any(delivery.redelivered for delivery in deliveries):
            deliveries = await self._adoption.unadopted(deliveries, self._claimed)
        await self._take_in(deliveries)
        return ()

    async def _wait_for_room(self) -> None:
        """Wait until a task ends; after a while, return what the broker has prefetched."""
        self._room.clear()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._room.wait()
        except TimeoutError:
            if not self._stopping:
                await self._leave_queues(is_busy=True)

    async def _wait_for_messages(self, queues: Sequence[str]) -> None:
        """Wait until a claim may find something, or is due anyway."""
        if not self._stopping and not self._before_taking and queues == tuple(self._context.queues):
            await self._idle.until_ready(queues)

    def _note_link(self, change: LinkChange) -> None:
        """Drop unstarted messages claimed on that link: the broker redelivers them, maybe to this worker."""
        if isinstance(change, LinkLost) and change.ends_claims:
            self._withdraw_claimed()

    async def _take_in(self, deliveries: Sequence[Delivery]) -> None:
        runnable = await self._admission.admit(deliveries)
        if self._stopping:
            for claimed in runnable:
                self._endings.give_back(claimed, ran=False)
            return
        self._submit(handle_each(self._job, runnable, self._endings.bury_faulty))

    def _submit(self, jobs: Sequence[Job]) -> None:
        if jobs:
            self._ahead.submit(jobs[-1].number, self._loop.time())
            self._arm_ahead()
            self._pool.submit(jobs)

    def _job(self, claimed: Claimed) -> Job:
        signs_for = UNSIGNED if claimed.delivery.unsigned else self._signs_for
        job = job_of(claimed, self._events.step.clock.value, signs_for)
        self._claimed[claimed.number] = claimed
        self.totals[claimed.headers.task] += 1
        return job

    def _publish(self, claimed: Claimed, publish: Callable[..., None], event: object) -> None:
        """Publish an event of a running task; an internal error is only logged, as its end comes later."""
        try:
            publish(claimed, event)
        except Exception as error:  # ours: a message is not lost for one of its events (N1)
            text = "internal error while publishing a task event"
            self._endings.note_fault(text, claimed.headers.id, error)

    # -- from the pool (PoolListener) ------------------------------------------------------------

    def on_started(self, started: Sequence[tuple[int, float, int]]) -> None:
        """Note that the pool started these jobs: number, Unix time, process id."""
        for number, at, pid in started:
            if (claimed := self._claimed.get(number)) is not None:
                claimed.started_at, claimed.pid = at, pid
                self._endings.acknowledge_taken(claimed)
                self._publish(claimed, self._events.started, at)

    def on_told(self, custom: UserEvent) -> None:
        """Publish a custom event that a task sent."""
        if (claimed := self._claimed.get(custom.number)) is not None:
            self._publish(claimed, self._events.custom, custom)

    def on_outcomes(self, outcomes: Sequence[Outcome], pid: int) -> None:
        """Settle the tasks that ended in one child."""
        ended = [(self._claimed.pop(outcome.number), outcome) for outcome in outcomes]
        handle_each(lambda pair: self._endings.settle(*pair), ended, self._bury_ended)
        self._pool_moved()

    def _bury_ended(self, ended: tuple[Claimed, Outcome], error: BaseException) -> None:
        self._endings.bury_faulty(ended[0], error, ended[1])

    def on_lost(self, lost: Sequence[LostJob]) -> None:
        """Decide about jobs that ended without an outcome."""
        ended = [(self._claimed.pop(job.number), job) for job in lost]
        handle_each(lambda pair: self._lose(*pair), ended, self._bury_lost)
        self._pool_moved()

    def _bury_lost(self, ended: tuple[Claimed, LostJob], error: BaseException) -> None:
        self._endings.bury_faulty(ended[0], error)

    def _pool_moved(self) -> None:
        self._ahead.move()
        if not self._settler.pending:  # else the pool is notified when that is settled
            self._pool.note_unsettled(0)
        self._room.set()

    def _end_refused(self, parts: Sequence[Refused]) -> None:
        self._endings.end_refused_parts(parts)

    def _note_settled(self) -> None:
        """Fewer messages are claimed than before."""
        self._pool.note_unsettled(self._settler.pending)
        self._room.set()

    def _lose(self, claimed: Claimed, lost: LostJob) -> None:
        if claimed.terminated_by and lost.ran:
            self._endings.end_terminated(claimed)
        else:
            self._endings.lose(claimed, lost, stopping=self._stopping)

    def on_child(self, what: str, fields: dict[str, Any]) -> None:
        """Log and count what happened to a child process; the worker fails when none can be started."""
        if what == "failed" and not self._pool_failed.done():
            self._pool_failed.set_result(str(fields["reason"]))
        self.children.note(what, fields)
        if what == "died":
            self._counters.children_died += 1
        log.log(_CHILD_LOGGED_AT.get(what, logging.DEBUG), "child %s", what, extra=self._of_child(fields))
        self._pool_moved()

    def _of_child(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Add the task that a child ran to the log fields, where the pool names its job."""
        claimed = self._claimed.get(fields["job"]) if fields.get("job") is not None else None
        if claimed is None:
            return fields
        return {**fields, "task": claimed.headers.task, "task_id": claimed.headers.id}

    async def _finish_settling(self) -> None:
        """Wait until everything is settled, at most for a lease: then other workers get the messages."""
        is_cancelled = all(task.done() for task in self._background)  # because something went wrong
        try:
            async with asyncio.timeout(self._context.settings.lease_s):
                await (self._settler.flush() if is_cancelled else self._settler.drained())
        except (TimeoutError, BrokerError):
            log.error(
                "messages not acknowledged before shutdown; their tasks may run again",
                extra={"count": self.claimed},
            )
