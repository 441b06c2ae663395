"""Settler: brings verdicts to the broker, as many at a time as have gathered.

While one batch is on its way the next gathers, so an idle worker settles each message at once and a busy
one in large batches, without a timer. A batch that the broker cannot take now (unavailable) is kept and
tried again; meanwhile the worker claims nothing new, because unsettled messages count as claimed, and so do
results and follow-ups of messages that were acknowledged before they ran. What the broker will never take
(refused) ends alone, and the rest is settled. While a recorder runs, the events of an outcome are in the
event log before the outcome is settled: a worker that dies between the two makes history tell a run that is
then repeated, which is what happened, and never leaves out one that nobody repeats.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from umbel.backends.interface import Backend
from umbel.brokers.interface import (
    Ack,
    Bury,
    ClusterRecord,
    Delivery,
    Messages,
    Refused,
    Return,
    Settled,
    Tag,
    Verdict,
)
from umbel.chance import random
from umbel.clock import cluster_now
from umbel.errors import BrokerError, BrokerRefused, BrokerUnavailable
from umbel.pools.guard import Raised, await_guarded
from umbel.protocol.retry import reconnect_wait_s
from umbel.wire.message import Outgoing, StoredResult
from umbel.worker.context import Counters
from umbel.worker.messages.before_settling import BeforeSettling
from umbel.worker.messages.keeping import keep_or_drop
from umbel.worker.messages.kept_outcomes import KeptOutcomes
from umbel.worker.process.outages import Outages
from umbel.worker.settings import Ending

log = logging.getLogger("umbel.worker.settling")
PART = "settling"
BATCH_MAX = 500
_BRINGING = (Ack, Bury)  # a union is made at each question
NOT_APPLIED = "task finished after its claim expired; outcome dropped unless the message is redelivered here"


class SettlingBroker(Messages, ClusterRecord, Protocol):
    """Messages, and the keys of unique tasks, which are released with them."""


class SentEvents(Protocol):
    recorded: bool  # a recorder runs, so there is an event log

    async def logged(self) -> None:
        """Return when the event log has the events sent so far."""
        ...


class Settler:
    """`settled` is called whenever fewer messages are claimed than before.

    `refused` gets what the broker or the store refuses; messages among that are dead letters then.
    `after` gets the work that was to wait until this or that is settled.
    """

    def __init__(
        self,
        broker: SettlingBroker,
        backend: Backend,
        counters: Counters,
        *,
        outages: Outages,
        store_outages: Outages,
        together: bool,
        events: SentEvents,
        refused: Callable[[Sequence[Refused]], None],
        kept: KeptOutcomes,
        settled: Callable[[], None] = lambda: None,
        after: Callable[[Sequence[bytes]], None] = lambda _: None,
    ) -> None:
        self._broker = broker
        self._backend = backend
        self._counters = counters
        self._outages = outages
        self._store_outages = store_outages
        self._together = together  # results ride with their acks
        self._events = events
        self._refused = refused
        self._settled = settled
        self._do_after = after
        self._waiting: list[Verdict] = []
        self._results: list[StoredResult] = []
        self._follow_ups: list[Outgoing] = []
        self._after: list[bytes] = []  # of what was reported
        self._first: list[BeforeSettling] = []
        self._uniques: list[tuple[str, str]] = []
        self.outcomes: dict[Tag, Delivery] = {}  # by claim: messages of outcomes that wait
        self._kept = kept
        self._messages: dict[Tag, Outgoing] = {}  # of verdicts that wait and end without an outcome
        self._dead, self._failed = list[Refused](), list[Refused]()  # to be buried, to be kept
        self._singly = 0  # so many of those that wait are settled one by one
        self._gathered = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.problem = ""

    @property
    def pending(self) -> int:
        """What is not settled, stored or sent yet: a worker that has much of it takes nothing new."""
        reported = len(self._results) + len(self._follow_ups) + len(self._after) + len(self._failed)
        return len(self._waiting) + reported + len(self._first)

    def add_outcome(self, ack: Ack, delivery: Delivery) -> None:
        """A task has ended; if its claim has ended first, the outcome is kept for its message's return."""
        self.outcomes[ack.tag] = delivery
        self.add(ack, Outgoing(delivery.queue, delivery.message) if ack.keep else None)

    def keep_failed(self, message: Outgoing, reason: str) -> None:
        """Keep the message of a task that was acknowledged before it failed."""
        self._failed.append(Refused(message, reason))
        self._wake()

    def add(self, verdict: Verdict, message: Outgoing | None = None) -> None:
        """`message`: what is returned or buried, for the case that the broker has forgotten it."""
        if message is not None:
            self._messages[verdict.tag] = message
        self._waiting.append(verdict)
        self._wake()

    def report(
        self, results: Sequence[StoredResult], follow_ups: Sequence[Outgoing], after: bytes = b""
    ) -> None:
        """Store and send for a message that was acknowledged before it ran."""
        if results or follow_ups or after:
            self._results += results
            self._follow_ups += follow_ups
            if after:
                self._after.append(after)
            self._wake()

    def resend(self, message: Outgoing) -> None:
        """Send a message once more that has ended for the broker, and so has used its signature."""
        keyring = self._broker.keyring
        self.report((), [message if keyring is None else keyring.renewed(message, cluster_now())])

    def do_first(
        self, work: Callable[[], Ending], *, attempts_max: int = 0, joins: Tag | None = None
    ) -> None:
        """Do this before anything that is added from now on is settled: see `Ending.before`.

        `joins`: the verdict that what it gives is settled with.
        """
        self._first.append(BeforeSettling(work, attempts_max, joins))
        self._wake()

    def release(self, key: str, task_id: str) -> None:
        """Free the key of a unique task, once its message is settled."""
        self._uniques.append((key, task_id))
        self._wake()

    async def drained(self) -> None:
        await self._idle.wait()

    async def flush(self) -> None:
        """Try once to settle what has gathered, when `run` does not go on."""
        await self._settle_gathered()

    async def run(self) -> None:
        failures = 0
        while True:
            await self._gathered.wait()
            self._gathered.clear()
            try:
                await self._settle_gathered()
            except BrokerError as error:
                failures += 1
                self._note_failure(error)
                self._gathered.set()
                await asyncio.sleep(reconnect_wait_s(failures, random()))
                continue
            if failures:
                self._outages.worked(PART)
                failures, self.problem = 0, ""
            if not self.pending and not self._uniques:
                self._idle.set()

    async def _settle_gathered(self) -> None:
        while True:
            while self._first or self._results or self._follow_ups or self._after or self._failed:
                await self._store_reported()
            # From here to the slice nothing is awaited: what a verdict depends on was stored above.
            if not self._waiting:
                break
            batch = self._waiting[: 1 if self._singly else BATCH_MAX]
            if self._events.recorded:
                await self._events.logged()
            sent = await self._with_results_stored(batch)
            settled = await self._settle(sent)
            if settled is None:
                self._singly = len(batch)
                continue
            self._singly = max(0, self._singly - 1)
            del self._waiting[: len(batch)]
            self._settled()
            self._keep_unknown(sent, settled)
            self._note_applied(sent, settled)
            self._note_ended(batch, settled.conflicts)
            if settled.refused:
                self._refused(settled.refused)
        await self._bury_unknown()
        await self._release_gathered()

    def _note_applied(self, batch: Sequence[Verdict], settled: Settled) -> None:
        ended = settled.conflicts | settled.unknown if settled.applied else {one.tag for one in batch}
        bringing = [one for one in batch if isinstance(one, _BRINGING) and one.after]
        if after := [one.after for one in bringing if one.tag not in ended]:
            self._do_after(after)

    def _note_ended(self, batch: Sequence[Verdict], conflicts: frozenset[Tag]) -> None:
        known = self.outcomes
        outcomes = [(one, known.pop(one.tag)) for one in batch if isinstance(one, Ack) and one.tag in known]
        if self._kept.confirmed and not (conflicts or self._kept.came_back):
            return
        again = self._kept.settled(outcomes, conflicts)
        for ack, delivery in again.values():
            self.add_outcome(ack, delivery)
        if count := len(conflicts - again.keys()):
            self._counters.conflicts += count
            self._outages.consequence(
                log, logging.WARNING, NOT_APPLIED, named="outcomes not applied", count=count
            )

    async def _settle(self, batch: Sequence[Verdict]) -> Settled | None:
        """None: something about them is refused or raises, so that each must go by itself."""
        happened = await await_guarded(self._broker.settle, batch)
        if not isinstance(happened, Raised):
            return happened.value
        if isinstance(happened.error, BrokerError) and not isinstance(happened.error, BrokerRefused):
            raise happened.error  # later, then
        return await self._bury(batch[0], happened.error) if len(batch) == 1 else None

    async def _bury(self, verdict: Verdict, error: BaseException) -> Settled:
        """A message whose outcome cannot be written goes to the dead letters, or stays as it is."""
        self._counters.faults += 1
        reason = f"cannot store the outcome of the task: {type(error).__name__}: {error}"
        log.error(
            "cannot store the outcome of a finished task; moving its message to dead letters", exc_info=error
        )
        buried = await await_guarded(self._broker.settle, [Bury(verdict.tag, reason)])
        if not isinstance(buried, Raised):
            return replace(buried.value, applied=0)  # nothing of the verdict itself
        if isinstance(buried.error, BrokerError) and not isinstance(buried.error, BrokerRefused):
            raise buried.error
        log.error(
            "cannot move a message to dead letters either; restart this worker to have it redelivered",
            exc_info=buried.error,
        )
        return Settled(0)

    def _keep_unknown(self, batch: Sequence[Verdict], settled: Settled) -> None:
        """The data was replaced, and nobody but this worker knows these: what they brought is kept."""
        if not self._messages and not settled.unknown:
            return
        for verdict in batch:
            message = self._messages.pop(verdict.tag, None)
            if verdict.tag not in settled.unknown:
                continue
            match verdict:
                case Ack() | Bury():
                    self._counters.unknown += 1
                    self.report(verdict.results, verdict.follow_ups, verdict.after)
                    if message is not None and isinstance(verdict, Bury):
                        self._dead.append(Refused(message, verdict.reason))
                    elif message is not None and isinstance(verdict, Ack):
                        self._failed.append(Refused(message, verdict.keep))
                case Return() if message is not None:
                    self._counters.unknown += 1
                    self.resend(message)

    async def _release_gathered(self) -> None:
        if self._uniques:
            claimed = tuple(self._uniques)
            await self._broker.coordination.release_unique(claimed)
            del self._uniques[: len(claimed)]

    async def _with_results_stored(self, batch: list[Verdict]) -> list[Verdict]:
        if self._together:
            return batch
        bringing = [verdict for verdict in batch if isinstance(verdict, Ack | Bury) and verdict.results]
        if not bringing:
            return batch
        # A run whose claim has ended is repeated elsewhere: its result must not stand in for that one's.
        ended = await self._broker.ended([verdict.tag for verdict in bringing])
        results = [result for verdict in bringing if verdict.tag not in ended for result in verdict.results]
        if results:
            await self._store(results)
        return [
            msgspec.structs.replace(verdict, results=()) if isinstance(verdict, Ack | Bury) else verdict
            for verdict in batch
        ]

    async def _store_reported(self) -> None:
        while self._first:
            await self._do_next(self._first[0])
            del self._first[0]
        results, follow_ups, after = tuple(self._results), tuple(self._follow_ups), tuple(self._after)
        failed = tuple(self._failed)
        # What is reported from here on has its own turn: its events may not be in the log yet.
        if self._events.recorded:
            await self._events.logged()
        if failed:  # before its result is seen: who sees the failure can retry it
            await keep_or_drop(self._broker, failed)
            del self._failed[: len(failed)]
        if results:
            await self._store(results)
            del self._results[: len(results)]
        if follow_ups:
            await self._publish(follow_ups)
            del self._follow_ups[: len(follow_ups)]
        if after:
            self._do_after(after)
            del self._after[: len(after)]
        self._settled()

    async def _do_next(self, first: BeforeSettling) -> None:
        """Done, or given up; raises when it is to be tried again."""
        more = await first.attempt()
        if not isinstance(more, Raised):
            self._store_outages.worked(PART)
            if not self._join(first.joins, more.value):
                self.report(more.value.results, more.value.follow_ups, more.value.after)
            return
        if first.goes_on(more.error):
            failed = BrokerUnavailable(f"cannot store the result of a revoked or refused task: {more.error}")
            self._store_outages.failed(PART, failed)
            raise failed
        log.error("cannot store the result of a revoked or refused task; giving up", exc_info=more.error)

    def _join(self, tag: Tag | None, more: Ending) -> bool:
        """Whether the verdict waits, and brings this too from now on."""
        for place, verdict in enumerate(self._waiting if tag is not None else ()):
            if verdict.tag == tag and isinstance(verdict, Ack | Bury):
                self._waiting[place] = msgspec.structs.replace(
                    verdict,
                    results=[*verdict.results, *more.results],
                    follow_ups=[*verdict.follow_ups, *more.follow_ups],
                    after=more.after or verdict.after,
                )
                return True
        return False

    async def _store(self, results: Sequence[StoredResult]) -> None:
        try:
            await asyncio.to_thread(self._backend.store, results)
        except BrokerRefused as error:
            self._refused([Refused(results[place], str(error)) for place in _places(error, results)])
        except BrokerError as error:
            self._store_outages.failed(PART, error)
            raise
        self._store_outages.worked(PART)

    async def _publish(self, messages: Sequence[Outgoing]) -> None:
        try:
            await self._broker.publish(messages)
        except BrokerRefused as error:
            if not error.places and len(messages) > 1:  # nothing was sent: find out which it is
                for message in messages:
                    await self._publish([message])
                return
            refused = [Refused(messages[place], str(error)) for place in _places(error, messages)]
            await self._broker.bury(refused)
            self._refused(refused)

    async def _bury_unknown(self) -> None:
        if self._dead:
            dead = tuple(self._dead)
            await self._broker.bury(dead)
            del self._dead[: len(dead)]

    def _wake(self) -> None:
        self._idle.clear()
        self._gathered.set()

    def _note_failure(self, error: BrokerError) -> None:
        self.problem = f"cannot acknowledge results: {error}"
        if not self._store_outages.problem:
            self._outages.failed(PART, error)


def _places(error: BrokerRefused, parts: Sequence[object]) -> Sequence[int]:
    return error.places or range(len(parts))
