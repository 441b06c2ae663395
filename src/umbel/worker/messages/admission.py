"""Admission: which delivered messages may run here now; for all others the verdict is on its way.

The shell of `protocol/delivery/delivery.py`. A message is verified where there are keys, opened and
judged. Where that must be known before its task runs, it is acknowledged early or counted as started.
Then it is a job for the pool.
"""

from collections.abc import Sequence
from itertools import count

import msgspec

from umbel.brokers.interface import Ack, Delivery, Messages, Return, Started, Verdict
from umbel.clock import cluster_now, offset_s
from umbel.errors import BrokerError, NotSupported, TooLarge, WireError
from umbel.pools.guard import each_guarded
from umbel.pools.interface import Job
from umbel.protocol.delivery.delivery import AdmissionPolicy, Arrival, Park, Refusal, Refuse, Run
from umbel.protocol.delivery.revoked import RevokedTasks
from umbel.wire.compat.legacy import to_v2
from umbel.wire.message import JSON_CONTENT
from umbel.wire.task import TaskHeaders, parse_instant, read_headers
from umbel.worker.context import WorkerContext
from umbel.worker.messages.claimed import Claimed
from umbel.worker.messages.endings import Endings
from umbel.worker.messages.permits import Permits
from umbel.worker.messages.scheduled import Scheduled
from umbel.worker.messages.settling import Settler
from umbel.worker.messages.task_events import TaskEvents
from umbel.worker.messages.verification import Verification


class Admission:
    def __init__(
        self,
        context: WorkerContext,
        policy: AdmissionPolicy,
        revoked: RevokedTasks,
        settler: Settler,
        endings: Endings,
        events: TaskEvents,
    ) -> None:
        self.scheduled = Scheduled()
        self.granted: Sequence[Claimed] = ()  # of those admitted last: what may start under its limit
        self._broker: Messages = context.broker
        self._pool = context.pool
        self._counters = context.counters
        notices = context.notices
        self._tell_received = notices.received if notices.hears_received else None
        self._message_max_bytes = context.settings.message_max_bytes
        self._policy = policy
        self._revoked = revoked
        self._settler = settler
        self._endings = endings
        self._events = events
        self._permits = Permits(context, settler, endings)
        self._numbers = count(1)
        keyring = context.broker.keyring
        self._verification = None if keyring is None else Verification(keyring, context, settler, endings)

    async def verified(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """Those that come from somebody who may send: nothing else is looked at."""
        if self._verification is None:
            return deliveries
        return await self._verification.genuine(deliveries, cluster_now())

    async def admit(self, deliveries: Sequence[Delivery]) -> list[Claimed]:
        now = cluster_now()
        judged = each_guarded(lambda one: self._judge(one, now), deliveries, self._endings.bury_faulty)
        admitted = [claimed for claimed in judged if claimed is not None]
        self.granted = ()
        was_asked = self._permits.is_asked
        if was_asked:
            granted = each_guarded(self._take_up, await self._permits.granted(), self._bury_faulty)
            self.granted = [claimed for claimed in granted if claimed is not None]
            admitted += self.granted
        settled = await self._settled_first(admitted)
        return self._not_revoked(settled) if was_asked or settled is not admitted else settled

    def _judge(self, delivery: Delivery, now: float) -> Claimed | None:
        """The message if it may run now; otherwise its verdict is on the way."""
        self._counters.received += 1
        claimed = self._opened(delivery)
        if claimed is None:
            return None
        decision = self._policy.admit(claimed.arrival, self._revoked, now)
        if isinstance(decision, Park):
            self._counters.parked += 1
            if claimed.arrival.due > now:  # else it is its rate that makes it wait
                self.scheduled.add(claimed, decision.until, now)
            self._settler.add(Return(delivery.tag, not_before=decision.until))
            return None
        if isinstance(decision, Refuse):
            if self._events.noted:
                self._events.received(claimed)
            self._endings.refuse(claimed, decision.why)
            self._permits.pass_on(claimed)
            return None
        let_run(claimed, decision)
        if decision.rules.limit is not None:
            self._permits.ask(claimed, decision.rules.limit)
            return None
        if claimed.headers.umbel_limit is not msgspec.UNSET:  # it had one when this was sent
            self._permits.pass_on(claimed)
        return self._take_up(claimed)

    def _not_revoked(self, admitted: list[Claimed]) -> list[Claimed]:
        """Revokes may have come while the broker was asked, and nobody else knows these messages yet."""
        covers = self._revoked.covers
        revoked = [one for one in admitted if covers(one.arrival.task_id, one.arrival.stamps)]
        if not revoked:
            return admitted
        each_guarded(lambda one: self._endings.refuse(one, Refusal.REVOKED), revoked, self._bury_faulty)
        numbers = {one.number for one in revoked}
        return [one for one in admitted if one.number not in numbers]

    def _take_up(self, claimed: Claimed) -> Claimed | None:
        delivery = claimed.delivery
        if self._events.noted:
            self._events.received(claimed)
        if delivery.redelivered or delivery.starts:
            self._counters.repeated += 1
        if problem := self._beyond_the_pool(claimed):
            self._endings.bury(claimed, NotSupported(problem), charged=False)
            return None
        if self._tell_received is not None:
            self._tell_received(claimed.message, delivery.queue)
        return claimed

    def _bury_faulty(self, claimed: Claimed, error: BaseException) -> None:
        self._endings.bury_faulty(claimed.delivery, error, claimed)

    def _beyond_the_pool(self, claimed: Claimed) -> str:
        """Why the pool cannot run it; "" when it can. Tasks routed elsewhere were not judged at the start."""
        assert claimed.run is not None
        abilities, is_async = self._pool.abilities, claimed.run.rules.is_async
        if is_async and abilities.async_tasks:
            return f"this worker's pool cannot run `async def` tasks: {abilities.async_tasks}"
        hard, soft = claimed.hard_limit_s, claimed.soft_limit_s
        if hard is soft is None:
            return ""
        reason = abilities.unenforceable(is_async=is_async, soft=soft is not None, hard=hard is not None)
        return reason and f"this worker's pool cannot enforce the message's time limit: {reason}"

    def _opened(self, delivery: Delivery) -> Claimed | None:
        try:
            size = len(delivery.message.body) + len(delivery.message.headers)
            if size > (most := self._message_max_bytes):
                raise TooLarge(
                    f"the message has {size} bytes, over the limit of {most} ('message_max_bytes')"
                )
            message = delivery.message
            if message.content_type != JSON_CONTENT or message.body[:1] != b"[":  # most are plainly v2
                message = to_v2(message)
            headers = read_headers(message)
            arrival = arrival_of(delivery, headers)
        except WireError as error:
            self._endings.bury_unreadable(delivery, error)
            return None
        claimed = Claimed(next(self._numbers), delivery, message, headers, arrival)
        if (rules := self._policy.rules.get(headers.task)) is not None:
            claimed.hides = rules.hides
        return claimed

    async def _settled_first(self, admitted: list[Claimed]) -> list[Claimed]:
        """What must be in the broker before a job runs: its early ack, or its counted start."""
        verdicts: list[Verdict] = []
        for claimed in admitted:
            assert claimed.run is not None
            if claimed.run.rules.acks_early:
                verdicts.append(Ack(claimed.delivery.tag))
                claimed.acked = True
            elif claimed.run.count_start:
                verdicts.append(Started(claimed.delivery.tag))
        if not verdicts:
            return admitted
        try:
            refused = (await self._broker.settle(verdicts)).conflicts
        except BrokerError:
            # We live and keep our lease, so nobody else would ever return them. What was applied in
            # spite of the error refuses this: then an early ack keeps its promise, at most once.
            for claimed in admitted:
                self._settler.add(Return(claimed.delivery.tag))
            raise
        self._counters.conflicts += len(refused)
        return [claimed for claimed in admitted if claimed.delivery.tag not in refused]


def arrival_of(delivery: Delivery, headers: TaskHeaders) -> Arrival:
    return Arrival(
        headers.task,
        headers.id,
        parse_instant(headers.eta) if headers.eta else 0.0,
        parse_instant(headers.expires) if headers.expires else 0.0,
        delivery.starts,
        delivery.redelivered,
        headers.stamps,
    )


def let_run(claimed: Claimed, run: Run) -> None:
    """Within the message's own limits, else the task's; 0 in a message is none, as Celery has it."""
    hard, soft = claimed.headers.timelimit
    claimed.run = run
    claimed.hard_limit_s = hard or run.rules.hard_limit_s
    claimed.soft_limit_s = soft or run.rules.soft_limit_s


def job_of(claimed: Claimed, lamport: int = 0) -> Job:
    assert claimed.run is not None, "only an admitted message becomes a job"
    hard, soft = claimed.hard_limit_s, claimed.soft_limit_s
    return Job(
        claimed.number,
        claimed.headers.task,
        claimed.headers.id,
        claimed.delivery.queue,
        claimed.message,
        soft,
        hard,
        claimed.run.alone or hard is not None or soft is not None,
        claimed.delivery.redelivered,
        offset_s(),
        lamport,
        0.0 if claimed.acked else claimed.start_by,
    )
