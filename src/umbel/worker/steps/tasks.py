"""Tasks: claims messages, has them judged, hands them to the pool, settles how they ended.

The heart of a worker. It claims only as much as the pool can use, so that what one worker cannot
start stays with the broker for the others. `admission.py` says which messages may run,
`endings.py` what becomes of those that have ended.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from umbel.brokers.interface import Delivery, Messages
from umbel.chance import random
from umbel.clock import cluster_now
from umbel.errors import BrokerError, PoolError
from umbel.pools.guard import Raised, call_guarded, each_guarded
from umbel.pools.interface import Job, LostJob, Outcome, Told
from umbel.protocol.delivery.delivery import AdmissionPolicy, Refusal
from umbel.protocol.delivery.revoked import RevokedTasks
from umbel.protocol.outage import LinkChange, LinkLost
from umbel.protocol.retry import reconnect_wait_s
from umbel.worker.bootsteps import Step
from umbel.worker.child_book import ChildBook
from umbel.worker.context import WorkerContext
from umbel.worker.messages.admission import job_of
from umbel.worker.messages.claimed import Claimed
from umbel.worker.messages.idle_wait import IdleWait
from umbel.worker.messages.late_permits import LatePermits
from umbel.worker.messages.parts import MessageParts
from umbel.worker.messages.revoke_record import RevokeRecord
from umbel.worker.messages.scheduled import Scheduled
from umbel.worker.messages.task_events import TaskEvents
from umbel.worker.steps.connection import RETURNED_TEXT

log = logging.getLogger("umbel.worker.tasks")

ELSEWHERE = "worker lease expired; running tasks may also run on another worker"
_CHILD_LOGGED_AT = {
    "died": logging.WARNING,
    "heavy": logging.WARNING,
    "not-reloaded": logging.ERROR,
    "ended": logging.INFO,
    "reloaded": logging.INFO,
}


class Tasks(Step):
    name = "tasks"
    requires = ("connection", "events", "pool", "heart", "control", "gossip")

    def __init__(self, context: WorkerContext, events: TaskEvents) -> None:
        super().__init__()
        self._context = context
        self._events = events
        self._counters = context.counters
        self._broker: Messages = context.broker
        self._owner = context.identity.owner
        self._pool = context.pool
        self._policy = AdmissionPolicy(context.settings.tasks, max_deliveries=context.settings.max_deliveries)
        self.prefetch_max = context.settings.prefetch_max
        self.revoked = RevokedTasks()
        self.totals: Counter[str] = Counter()  # by task: how many were taken to run here
        self._before_taking: dict[str, Callable[[], Awaitable[None]]] = {}  # by who asks for it
        self.revokes = RevokeRecord(context, self.revoked)
        self.children = ChildBook()
        self._claimed: dict[int, Claimed] = {}
        self._room = asyncio.Event()
        self._idle = IdleWait(self._broker, self._owner)
        self._stopping = False
        self._pool_failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._claim_problem = ""
        self._parts = parts = MessageParts(context, events, self._policy, self.revoked, self._room.set)
        self._settler, self._endings = parts.settler, parts.endings
        self._adoption, self._admission = parts.adoption, parts.admission
        self._late_permits = LatePermits(self._return_late)

    @property
    def claimed(self) -> int:
        """Messages claimed and not settled, with all that comes of them."""
        return len(self._claimed) + self._settler.pending + len(self._parts.after.waiting)

    @property
    def problem(self) -> str:
        return self._claim_problem or self._settler.problem

    @property
    def cannot_settle(self) -> bool:
        """The broker or the store of results is away: with too much on hand nothing new is taken."""
        return bool(self._settler.problem)

    async def start(self) -> None:
        self._context.outages.on_link(self._note_link)
        self.run_in_background(self._settler.run())
        self.run_in_background(self._parts.after.run())
        self.run_in_background(self._consume())
        self.run_in_background(self._fail_with_the_pool())

    async def stop(self) -> None:
        """Settle everything. What runs has ended (`worker/process/stopping.py`), or is cut off here."""
        if not self._background:
            self._stopping = True
            return
        self.stop_taking()
        if self._claimed:
            await self.cut()
        await self._finish_settling()
        await self.end_background()

    # -- stopping: what `worker/process/stopping.py` asks for ----------------------------------------------

    @property
    def running(self) -> int:
        """How many messages the pool has and will not give back."""
        return len(self._claimed)

    def stop_taking(self) -> None:
        """Claim nothing more, and return what has not started."""
        self._stopping = True
        self._late_permits.stop()
        self.look_again()
        if self._background:
            for job in self._pool.withdraw():
                self._endings.give_back(self._claimed.pop(job.number), ran=False)

    def interrupt(self) -> int:
        """Tell the tasks that run that the worker stops; how many heard it."""
        self._room.set()
        return self._pool.interrupt() if self._background else 0

    async def cut(self) -> None:
        """End the children; what they ran goes back to its queue."""
        self._counters.cut += len(self._claimed)
        await self._pool.stop(grace_s=0.0)

    async def changed(self) -> None:
        """Return when a task may have ended since the last time, or somebody noted a change."""
        self._room.clear()
        await self._room.wait()

    def note_change(self) -> None:
        self._room.set()

    def look_again(self) -> None:
        """End the wait for messages, or for room: what is waited for has changed."""
        self._room.set()
        self._idle.end()

    def before_taking(self, name: str, callback: Callable[[], Awaitable[None]] | None) -> None:
        """Be awaited after each claim, before anything of it is judged, until None is given."""
        if callback is None:
            self._before_taking.pop(name, None)
        else:
            self._before_taking[name] = callback
            self.look_again()

    # -- for remote control ----------------------------------------------------------------------

    @property
    def policy(self) -> AdmissionPolicy:
        return self._policy

    @property
    def scheduled(self) -> Scheduled:
        return self._admission.scheduled

    def hold_at_most(self, most: int) -> None:
        """So many messages, running and waiting; what is held already stays."""
        self.prefetch_max = most

    def holding(self) -> list[Claimed]:
        """Every message that was taken to run here and has not ended."""
        return list(self._claimed.values())

    def is_holding(self, claimed: Claimed) -> bool:
        return self._claimed.get(claimed.number) is claimed

    def drop_revoked(self) -> None:
        """What has been revoked since it was taken, and has not started, must not start."""
        if any(map(self._is_revoked, self._claimed.values())):
            for claimed in self._withdrawn(self._is_revoked):
                self._handle(claimed, self._endings.refuse, Refusal.REVOKED)

    def return_unstarted(self) -> None:
        """The lease had ended, and others have the messages: what has not started must not start here too.

        What was claimed since goes back to its queue.
        """
        for claimed in self._withdraw_claimed():
            self._endings.give_back(claimed, ran=False)
        if self.running:
            self._context.outages.consequence(
                log, logging.WARNING, ELSEWHERE, named="maybe run twice", count=self.running
            )

    def _return_late(self, late: Sequence[Claimed]) -> None:
        """What may start under its limit and has not goes back to its queue; others may have room for it."""
        numbers = {claimed.number for claimed in late if self.is_holding(claimed) and not claimed.acked}
        if numbers and not self._stopping:
            for claimed in self._withdrawn(lambda one: one.number in numbers):
                self._endings.give_back(claimed, ran=False)

    def _withdraw_claimed(self) -> list[Claimed]:
        """What has not started, but for what was acknowledged early: that is nobody else's."""
        return self._withdrawn(lambda claimed: not claimed.acked) if self._background else []

    def _withdrawn(self, goes: Callable[[Claimed], bool]) -> list[Claimed]:
        """Those that go, of what has not started; the rest may start here."""
        withdrawn: list[Claimed] = []
        keep: list[Job] = []
        for job in self._pool.withdraw():
            if goes(self._claimed[job.number]):
                withdrawn.append(self._claimed.pop(job.number))
            else:
                keep.append(job)
        self._put_back(keep)
        return withdrawn

    def _put_back(self, jobs: Sequence[Job]) -> None:
        """Jobs that were withdrawn and may start go to the pool again."""
        if not self._stopping:
            if jobs:
                self._pool.submit(jobs)
            self._room.set()
            return
        for job in jobs:
            self._endings.give_back(self._claimed.pop(job.number), ran=False)

    def _is_revoked(self, claimed: Claimed) -> bool:
        return self.revoked.covers(claimed.headers.id, claimed.headers.stamps)

    # -- from the broker -------------------------------------------------------------------------

    async def _consume(self) -> None:
        failures, outages = 0, self._context.outages
        while not self._stopping:
            try:
                idle_for = await self._take_some()
                if failures:  # before a wait, which may be long
                    outages.worked(self.name)
                    self._claim_problem = ""
                if idle_for:
                    await self._wait_for_messages(idle_for)
            except BrokerError as error:
                failures += 1
                outages.failed(self.name, error)
                self._claim_problem = f"cannot fetch messages: {error}"
                await asyncio.sleep(reconnect_wait_s(failures, random()))
                continue
            failures = 0
        await self._leave_queues()

    async def _leave_queues(self) -> None:
        """What was fetched ahead is for the others, from now on and not when the last task has ended."""
        try:
            for queue in tuple(self._context.queues):
                await self._broker.leave_queue(self._owner, queue)
        except BrokerError as error:  # then the broker returns it when the worker is gone
            log.warning(
                "cannot return prefetched messages; the broker returns them when this worker disconnects",
                extra={"why": str(error)},
            )

    async def _fail_with_the_pool(self) -> None:
        """A worker whose children cannot be started any more must not go on claiming."""
        raise PoolError(await self._pool_failed)

    async def _take_some(self) -> tuple[str, ...]:
        """The queues that had nothing, to wait for."""
        room = min(self._pool.room(), self.prefetch_max - self.claimed)
        queues = tuple(self._context.queues)
        if room <= 0 or not queues:
            self._room.clear()
            await self._room.wait()
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
        for catch_up in tuple(self._before_taking.values()):
            await catch_up()
        if not claim.deliveries:
            return queues
        deliveries = await self._admission.verified(claim.deliveries)
        if any(one.redelivered for one in deliveries):
            deliveries = await self._adoption.rest(deliveries, self._claimed)
        await self._take_in(deliveries)
        return ()

    async def _wait_for_messages(self, queues: Sequence[str]) -> None:
        """Until a claim may find something, or is due all the same."""
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
        self._pool.submit(each_guarded(self._job, runnable, self._bury_faulty))
        self._late_permits.watch(self._admission.granted)

    def _job(self, claimed: Claimed) -> Job:
        job = job_of(claimed, self._events.step.clock.value)
        self._claimed[claimed.number] = claimed
        self.totals[claimed.headers.task] += 1
        return job

    def _bury_faulty(self, claimed: Claimed, error: BaseException) -> None:
        self._endings.bury_faulty(claimed.delivery, error, claimed)

    def _handle(self, claimed: Claimed, handle: Callable[..., None], *args: Any) -> None:
        """Whatever goes wrong with one message ends that message alone (N1)."""
        happened = call_guarded(handle, claimed, *args)
        if isinstance(happened, Raised):
            self._bury_faulty(claimed, happened.error)

    def _tell(self, claimed: Claimed, tell: Callable[..., None], *args: Any) -> None:
        """The same for events of a running task: its end comes later, with its verdict."""
        happened = call_guarded(tell, claimed, *args)
        if isinstance(happened, Raised):
            self._endings.note_fault(
                "internal error while publishing a task event", claimed.headers.id, happened.error
            )

    # -- from the pool (PoolListener) ------------------------------------------------------------

    def on_started(self, started: Sequence[tuple[int, float, int]]) -> None:
        for number, at, pid in started:
            if (claimed := self._claimed.get(number)) is not None:
                claimed.started_at, claimed.pid = at, pid
                self._endings.take(claimed)
                self._tell(claimed, self._events.started, at)

    def on_told(self, told: Told) -> None:
        if (claimed := self._claimed.get(told.number)) is not None:
            self._tell(claimed, self._events.told, told)

    def on_outcomes(self, outcomes: Sequence[Outcome], pid: int) -> None:
        ended = [(self._claimed.pop(outcome.number), outcome) for outcome in outcomes]
        each_guarded(lambda one: self._endings.settle(*one), ended, self._bury_ended)
        self._room.set()

    def _bury_ended(self, ended: tuple[Claimed, Outcome], error: BaseException) -> None:
        claimed, outcome = ended
        self._endings.bury_faulty(claimed.delivery, error, claimed, outcome)

    def on_lost(self, lost: Sequence[LostJob]) -> None:
        for one in lost:
            self._handle(self._claimed.pop(one.number), self._lose, one)
        self._room.set()

    def _lose(self, claimed: Claimed, lost: LostJob) -> None:
        if claimed.terminated_by and lost.ran:
            self._endings.end_terminated(claimed)
        else:
            self._endings.lose(claimed, lost, stopping=self._stopping)

    def on_child(self, what: str, fields: dict[str, Any]) -> None:
        if what == "failed" and not self._pool_failed.done():
            self._pool_failed.set_result(str(fields["reason"]))
        self.children.note(what, fields)
        if what == "died":
            self._counters.children_died += 1
        log.log(_CHILD_LOGGED_AT.get(what, logging.DEBUG), "child %s", what, extra=self._of_child(fields))
        self._room.set()

    def _of_child(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Name the task that a child was at, where the pool names its job."""
        claimed = self._claimed.get(fields["job"]) if fields.get("job") is not None else None
        if claimed is None:
            return fields
        return {**fields, "task": claimed.headers.task, "task_id": claimed.headers.id}

    async def _finish_settling(self) -> None:
        is_cancelled = all(task.done() for task in self._background)  # because something went wrong
        try:
            async with asyncio.timeout(self._context.settings.lease_s):
                await (self._settler.flush() if is_cancelled else self._parts.drained())
        except (TimeoutError, BrokerError):
            log.error(
                "messages not acknowledged before shutdown; their tasks may run again",
                extra={"count": self.claimed},
            )
