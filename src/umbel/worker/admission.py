"""Admission: which delivered messages may run here now; for all others the verdict is on its way.

The shell around `protocol/delivery.py`. A message is verified where there are keys, opened, judged, and,
where it must be known before its task runs, acknowledged early or counted as started.
"""

from collections.abc import Sequence
from itertools import count

from umbel.brokers.interface import Ack, Delivery, Return, Started, Verdict
from umbel.clock import cluster_now
from umbel.errors import BrokerError, NotSupported, TooLarge, WireError
from umbel.pools.guard import each_guarded
from umbel.protocol.delivery import Desk, Park, Refuse
from umbel.protocol.revoked import RevokedTasks
from umbel.wire.task import read_headers, to_v2
from umbel.worker.context import WorkerContext
from umbel.worker.endings import Endings
from umbel.worker.held import Held, arrival_of
from umbel.worker.scheduled import Scheduled
from umbel.worker.settling import Settler
from umbel.worker.task_events import TaskEvents
from umbel.worker.verification import Verification


class Admission:
    def __init__(
        self,
        context: WorkerContext,
        desk: Desk,
        revoked: RevokedTasks,
        settler: Settler,
        endings: Endings,
        events: TaskEvents,
    ) -> None:
        self.scheduled = Scheduled()
        self._broker = context.broker
        self._pool = context.pool
        self._counters = context.counters
        self._message_max_bytes = context.settings.message_max_bytes
        self._desk = desk
        self._revoked = revoked
        self._settler = settler
        self._endings = endings
        self._events = events
        self._numbers = count(1)
        keyring = context.broker.keyring
        self._verification = None if keyring is None else Verification(keyring, context, settler, endings)

    async def verified(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """Those that come from somebody who may send: nothing else is looked at."""
        if self._verification is None:
            return deliveries
        return await self._verification.genuine(deliveries, cluster_now())

    async def admit(self, deliveries: Sequence[Delivery]) -> list[Held]:
        now = cluster_now()
        judged = each_guarded(lambda one: self._judge(one, now), deliveries, self._endings.bury_faulty)
        return await self._settled_first([held for held in judged if held is not None])

    def _judge(self, delivery: Delivery, now: float) -> Held | None:
        """The message if it may run now; otherwise its verdict is on the way."""
        self._counters.received += 1
        held = self._opened(delivery)
        if held is None:
            return None
        decision = self._desk.admit(held.arrival, self._revoked, now)
        if isinstance(decision, Park):
            self._counters.parked += 1
            if held.arrival.due > now:  # else it is its rate that makes it wait
                self.scheduled.add(held, decision.until, now)
            self._settler.add(Return(delivery.tag, not_before=decision.until))
            return None
        self._events.received(held)
        if isinstance(decision, Refuse):
            self._endings.refuse(held, decision.why)
            return None
        if delivery.redelivered or delivery.starts:
            self._counters.repeated += 1
        held.run = decision
        if problem := self._beyond_the_pool(held):
            self._endings.bury(held, NotSupported(problem), charged=False)
            return None
        return held

    def _beyond_the_pool(self, held: Held) -> str:
        """Why the pool cannot run it; "" when it can. Tasks routed elsewhere were not judged at the start."""
        assert held.run is not None
        abilities, is_async = self._pool.abilities, held.run.rules.is_async
        if is_async and abilities.async_tasks:
            return f"this worker's pool cannot run `async def` tasks: {abilities.async_tasks}"
        hard, soft = held.limits
        if hard is soft is None:
            return ""
        reason = abilities.unenforceable(is_async=is_async, soft=soft is not None, hard=hard is not None)
        return reason and f"this worker's pool cannot enforce the message's time limit: {reason}"

    def _opened(self, delivery: Delivery) -> Held | None:
        try:
            size = len(delivery.message.body) + len(delivery.message.headers)
            if size > (most := self._message_max_bytes):
                raise TooLarge(
                    f"the message has {size} bytes, over the limit of {most} ('message_max_bytes')"
                )
            message = to_v2(delivery.message)
            headers = read_headers(message)
            arrival = arrival_of(delivery, headers)
        except WireError as error:
            self._endings.bury_unreadable(delivery, error)
            return None
        held = Held(next(self._numbers), delivery, message, headers, arrival)
        if (rules := self._desk.rules.get(headers.task)) is not None:
            held.hides = rules.hides
        return held

    async def _settled_first(self, admitted: list[Held]) -> list[Held]:
        """What must be in the broker before a job runs: its early ack, or its counted start."""
        first: dict[int | str, Held] = {}
        verdicts: list[Verdict] = []
        for held in admitted:
            assert held.run is not None
            tag = held.delivery.tag
            if held.run.rules.acks_early:
                verdicts.append(Ack(tag))
            elif held.run.count_start:
                verdicts.append(Started(tag))
            else:
                continue
            first[tag] = held
        if not verdicts:
            return admitted
        try:
            refused = (await self._broker.settle(verdicts)).conflicts
        except BrokerError:
            # We live and keep our lease, so nobody else would ever return them. What was applied in
            # spite of the error refuses this: then an early ack keeps its promise, at most once.
            for held in admitted:
                self._settler.add(Return(held.delivery.tag))
            raise
        self._counters.conflicts += len(refused)
        return [held for held in admitted if held.delivery.tag not in refused]
