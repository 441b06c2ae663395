"""Settling: reports to the broker how messages ended, and does the work before and after that.

Verdicts gather while one batch is on its way, so an idle worker settles each message at once and a busy one
settles large batches, without a timer. A batch that fails because the broker is unavailable is retried.
Meanwhile the worker claims nothing new, because unsettled messages count as claimed, and so do results and
follow-ups of messages that were acknowledged before they ran. What the broker refuses for good ends alone,
and the rest is settled.

While a recorder runs, the events of an outcome are in the event log before the outcome is settled. If a
worker dies between the two, history shows a run that is then repeated, which is what happened. The other
order could lose a run from history.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from umbel.backoff import Backoff
from umbel.brokers.interface import Ack, Broker, Bury, Delivery, Refused, Return, Settled, Tag, Verdict
from umbel.clock import cluster_now
from umbel.errors import BrokerError, BrokerRefused, BrokerUnavailable
from umbel.pools.event_loop import OffLoop
from umbel.pools.guard import Raised, Returned
from umbel.wire.call import holding_of
from umbel.wire.message import Message, Outgoing, StoredResult
from umbel.worker.context import AfterSettle, Ending, WorkerContext
from umbel.worker.delivery.claimed import RetainedOutcomes, is_same_message
from umbel.worker.events import Events

log = logging.getLogger("umbel.worker.settling")

PART = "settling"
BATCH_MAX = 500
SHOWN_MAX = 5
TIMEOUT_S = 30.0  # of one attempt of the app's work before or after settling
ATTEMPTS_MAX = 5  # of the app's work after settling
UNCONFIRMED = frozenset({"amqp", "gcpubsub"})  # brokers that do not say whether an ack has arrived
_WITH_RESULTS = (Ack, Bury)  # a tuple: `Ack | Bury` would build a union at each call
NOT_APPLIED = "task finished after its claim expired; outcome dropped unless the message is redelivered here"
T = TypeVar("T")

# ---- before settling -------------------------------------------------------------------------------


class BeforeSettling:
    """Blocking work that comes before a message is settled (`Ending.before`).

    It runs off the loop. A call that exceeds its timeout is awaited again, not repeated. `joins`: the verdict
    that its results are settled with.
    """

    def __init__(self, work: Callable[[], Ending], attempts_max: int, joins: Tag | None) -> None:
        self.joins = joins
        self._work = work
        self._attempts_max = attempts_max
        self._attempts = 0
        self._call: OffLoop[Ending] | None = None

    async def attempt(self) -> Returned[Ending] | Raised:
        """Start the work, or await the call that still runs; return how it ended."""
        self._attempts += 1
        self._call = self._call or OffLoop("umbel-ending", self._work)
        try:
            happened = await self._call.ended(TIMEOUT_S)
        except TimeoutError:
            return Raised(BrokerUnavailable(f"the result backend did not answer within {TIMEOUT_S:g} s"))
        self._call = None
        return happened

    def may_retry(self, error: BaseException) -> bool:
        """Return whether the work is retried after this error."""
        if self._attempts_max:
            return self._attempts < self._attempts_max
        return isinstance(error, BrokerUnavailable)


# ---- settler ---------------------------------------------------------------------------------------


class Settler:
    """Queues of what must reach the broker and the result store, and the loop that brings it there.

    `settled` is called whenever fewer messages are claimed than before. `refused` gets what the broker or the
    store refuses; messages among that are dead letters by then.
    """

    def __init__(
        self,
        context: WorkerContext,
        events: Events,
        *,
        refused: Callable[[Sequence[Refused]], None],
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        broker, backend = context.broker, context.backend
        self.after = AfterSettling(context.settings.after_settle)
        self.retained = RetainedOutcomes(confirmed=broker.capabilities.transport not in UNCONFIRMED)
        self.problem = ""  # why nothing can be settled now
        self._context = context
        self._broker = broker
        self._stores_with_acks = broker.capabilities.stores_results and backend.shares_settle(broker.url)
        self._events = events
        self._refused = refused
        self._settled = settled
        # Each verdict with the delivery of a task that ended, or with the message to send or bury if the
        # broker has lost it.
        self._verdicts: list[tuple[Verdict, Delivery | Outgoing | None]] = []
        self._singly = 0  # how many of these are settled one by one
        self._before: list[BeforeSettling] = []
        # Of messages that were acknowledged before they ran: messages to retain for a retry, results,
        # follow-ups and work after settling.
        self._reported: list[Refused | StoredResult | Outgoing | bytes] = []
        # When all verdicts are settled.
        self._dead: list[Refused] = []  # buried messages that the broker has lost
        self._unique_keys: list[tuple[str, str]] = []
        self._gathered = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def pending(self) -> int:
        """How much is not settled, stored or sent yet; a worker with a lot of it claims nothing new."""
        return len(self._verdicts) + len(self._before) + len(self._reported)

    # -- for other parts -------------------------------------------------------------------------

    def add_outcome(self, ack: Ack, delivery: Delivery) -> None:
        """Add the ack of a task that ended; if its claim has ended, its outcome is retained."""
        self._verdicts.append((ack, delivery))
        self._wake()

    def add(self, verdict: Verdict, message: Outgoing | None = None) -> None:
        """Add a verdict. `message`: what is returned or buried, in case the broker has lost it."""
        self._verdicts.append((verdict, message))
        self._wake()

    def waiting_outcome(self, delivery: Delivery) -> Tag | None:
        """Return the earlier claim of this message, if its outcome still waits to be settled."""
        for verdict, origin in self._verdicts:
            if isinstance(origin, Delivery) and is_same_message(origin, delivery):
                return verdict.tag
        return None

    def report(
        self, results: Sequence[StoredResult], follow_ups: Sequence[Outgoing], after: bytes = b""
    ) -> None:
        """Store results and send follow-ups of a message that was acknowledged before it ran."""
        if results or follow_ups or after:
            self._reported += results
            self._reported += follow_ups
            if after:
                self._reported.append(after)
            self._wake()

    def retain_failed(self, message: Outgoing, reason: str) -> None:
        """Store the message of a task that was acknowledged before it failed, for a retry."""
        self._reported.append(Refused(message, reason))
        self._wake()

    def resend(self, message: Outgoing) -> None:
        """Send a message again that has ended for the broker, with a new signature where there are keys."""
        signer = None if self._broker.keyring is None else self._broker.signer
        self.report((), [message if signer is None else signer.renewed(message, cluster_now())])

    def do_first(
        self, work: Callable[[], Ending], *, attempts_max: int = 0, joins: Tag | None = None
    ) -> None:
        """Do this before anything that is added from now on is settled: see `Ending.before`.

        `joins`: the verdict that its results are settled with.
        """
        self._before.append(BeforeSettling(work, attempts_max, joins))
        self._wake()

    def release(self, key: str, task_id: str) -> None:
        """Free the key of a unique task, once its message is settled."""
        if self._broker.capabilities.unique:
            self._unique_keys.append((key, task_id))
            self._wake()

    def release_of(self, message: Message) -> None:
        """Free the key that the headers of an unopened message name."""
        holding = holding_of(message)
        if holding is not None and holding.umbel_unique:
            self.release(holding.umbel_unique, holding.id)

    def _wake(self) -> None:
        if not self._gathered.is_set():  # the hot path: each message that ends comes here
            self._idle.clear()
            self._gathered.set()

    # -- the loop --------------------------------------------------------------------------------

    async def drained(self) -> None:
        """Return when everything is settled and the work after settling is done."""
        await self._idle.wait()
        await self.after.drained()

    async def flush(self) -> None:
        """Try once to settle the collected verdicts, after `run` was cancelled."""
        await self._settle_gathered()

    async def run(self) -> None:
        """Settle what gathers, with retries while the broker is unavailable, until cancelled."""
        backoff = Backoff()
        while True:
            await self._gathered.wait()
            self._gathered.clear()
            try:
                await self._settle_gathered()
            except BrokerError as error:
                self.problem = f"cannot acknowledge results: {error}"
                if not self._context.store_outages.problem:
                    self._context.outages.failed(PART, error)
                self._gathered.set()
                await backoff.pause()
                continue
            if backoff.failures:
                backoff.reset()
                self._context.outages.worked(PART)
                self.problem = ""
            if not self.pending and not self._unique_keys:
                self._idle.set()

    async def _settle_gathered(self) -> None:
        """Bring everything that has gathered, in an order that loses nothing if the worker dies in between.

        What a verdict depends on is stored before the verdict. A batch is removed when it is settled, so it
        is repeated after an outage. If a part of it cannot be encoded, its verdicts are settled one by one.
        """
        while True:
            while self._before or self._reported:
                await self._bring_reported()
            # From here to the slice nothing is awaited: what a verdict depends on was stored above.
            if not self._verdicts:
                break
            batch = self._verdicts[: 1 if self._singly else BATCH_MAX]
            if self._events.recorded:
                await self._events.logged()
            sent = [verdict for verdict, _ in batch]
            if not self._stores_with_acks:
                sent = await self._with_results_stored(sent)
            settled = await self._settle(sent, batch[0][1])
            if settled is None:
                self._singly = len(batch)
                continue
            self._singly = max(0, self._singly - 1)
            del self._verdicts[: len(batch)]
            self._settled()
            if settled.unknown:
                self._save_unknown(sent, [origin for _, origin in batch], settled.unknown)
            self._queue_work_after(sent, settled)
            self._note_outcomes(batch, settled.conflicts)
            if settled.refused:
                self._refused(settled.refused)
        if self._dead:
            await _bring(self._dead, self._broker.bury)
        if self._unique_keys:
            await _bring(self._unique_keys, self._broker.coordination.release_unique)

    # -- before verdicts -------------------------------------------------------------------------

    async def _bring_reported(self) -> None:
        """Do the work before settling, then bring what was reported for messages acknowledged early."""
        while self._before:
            await self._attempt(self._before[0])
            del self._before[0]
        count = len(self._reported)
        # What is reported from here on waits for the next round: its events may not be in the log yet.
        if self._events.recorded:
            await self._events.logged()
        # First the retained message: a failure whose result is visible can be retried.
        count = await self._bring_kind(Refused, self._retain, count)
        count = await self._bring_kind(StoredResult, self._store, count)
        count = await self._bring_kind(Outgoing, self._publish, count)
        await self._bring_kind(bytes, self._add_after, count)
        self._settled()

    async def _bring_kind(
        self, kind: type[T], bring: Callable[[Sequence[T]], Awaitable[None]], count: int
    ) -> int:
        """Bring those of one kind among the first `count` reported parts; return how many of these remain."""
        first = self._reported[:count]
        if batch := [part for part in first if isinstance(part, kind)]:
            await bring(batch)
            self._reported[:count] = [part for part in first if not isinstance(part, kind)]
        return count - len(batch)

    async def _add_after(self, work: Sequence[bytes]) -> None:
        self.after.add(work)

    async def _attempt(self, first: BeforeSettling) -> None:
        """Do the work once; return when it is done or given up, raise when it must be retried."""
        happened, outages = await first.attempt(), self._context.store_outages
        if isinstance(happened, Returned):
            outages.worked(PART)
            if not self._join(first.joins, happened.value):
                self.report(happened.value.results, happened.value.follow_ups, happened.value.after)
        elif first.may_retry(happened.error):
            failed = BrokerUnavailable(
                f"cannot store the result of a revoked or refused task: {happened.error}"
            )
            outages.failed(PART, failed)
            raise failed
        else:
            text = "cannot store the result of a revoked or refused task; giving up"
            log.error(text, exc_info=happened.error)

    def _join(self, tag: Tag | None, more: Ending) -> bool:
        """Add results to a verdict that still waits; return whether there is one."""
        for place, (verdict, origin) in enumerate(self._verdicts if tag is not None else ()):
            if verdict.tag == tag and isinstance(verdict, Ack | Bury):
                joined = replace(
                    verdict,
                    results=[*verdict.results, *more.results],
                    follow_ups=[*verdict.follow_ups, *more.follow_ups],
                    after=more.after or verdict.after,
                )
                self._verdicts[place] = joined, origin
                return True
        return False

    async def _retain(self, failed: Sequence[Refused]) -> None:
        await store_failed(self._broker, failed)

    async def _store(self, results: Sequence[StoredResult]) -> None:
        """Store results in the backend, off the loop; results that it refuses are stored as failures."""
        outages = self._context.store_outages
        try:
            await asyncio.to_thread(self._context.backend.store, results)
        except BrokerRefused as error:
            self._refused([Refused(results[place], str(error)) for place in _places(error, results)])
        except BrokerError as error:
            outages.failed(PART, error)
            raise
        outages.worked(PART)

    async def _publish(self, messages: Sequence[Outgoing]) -> None:
        """Send messages; those that the broker refuses become dead letters, and the others are sent."""
        try:
            await self._broker.publish(messages)
        except BrokerRefused as error:
            if not error.places and len(messages) > 1:  # nothing was sent: find out which message is refused
                for message in messages:
                    await self._publish([message])
                return
            refused = [Refused(messages[place], str(error)) for place in _places(error, messages)]
            await self._broker.bury(refused)
            self._refused(refused)

    # -- verdicts --------------------------------------------------------------------------------

    async def _with_results_stored(self, batch: list[Verdict]) -> list[Verdict]:
        """Store the results where the broker does not do it, and return the verdicts without them."""
        with_results = [
            verdict for verdict in batch if isinstance(verdict, _WITH_RESULTS) and verdict.results
        ]
        if not with_results:
            return batch
        # A run whose claim has ended is repeated elsewhere: its result must not replace that run's.
        ended = await self._broker.ended([verdict.tag for verdict in with_results])
        results = [
            result for verdict in with_results if verdict.tag not in ended for result in verdict.results
        ]
        if results:
            await self._store(results)
        return [
            replace(verdict, results=()) if isinstance(verdict, _WITH_RESULTS) else verdict
            for verdict in batch
        ]

    async def _settle(self, batch: Sequence[Verdict], origin: Delivery | Outgoing | None) -> Settled | None:
        """Settle a batch. None: part of it cannot be written, so that each verdict must go alone.

        `origin`: that of the first verdict.
        """
        try:
            return await self._broker.settle(batch)
        except Exception as error:  # ours: what a broker refuses, or cannot encode, must end alone
            if _is_outage(error):
                raise  # `run` retries it
            return await self._bury(batch[0], error, origin) if len(batch) == 1 else None

    async def _bury(self, verdict: Verdict, error: Exception, origin: Delivery | Outgoing | None) -> Settled:
        """Move a message whose outcome cannot be written to the dead letters, or leave it unsettled."""
        self._context.counters.faults += 1
        reason = f"cannot store the outcome of the task: {type(error).__name__}: {error}"
        log.error(
            "cannot store the outcome of a finished task; moving its message to dead letters", exc_info=error
        )
        try:
            buried = await self._broker.settle([Bury(verdict.tag, reason)])
        except Exception as again:  # ours, as above
            if _is_outage(again):
                raise
            log.error(
                "cannot move a message to dead letters either; restart this worker to have it redelivered",
                exc_info=again,
            )
            return Settled(0)
        ended: Sequence[Refused] = ()
        if isinstance(verdict, Return) and isinstance(origin, Outgoing) and buried.applied:
            ended = (Refused(origin, reason),)
        return replace(buried, applied=0, refused=ended)  # nothing of the verdict itself

    def _save_unknown(
        self,
        batch: Sequence[Verdict],
        origins: Sequence[Delivery | Outgoing | None],
        unknown: frozenset[Tag],
    ) -> None:
        """Save the outcomes of claims that the broker no longer knows, because its data was replaced."""
        for verdict, origin in zip(batch, origins, strict=True):
            if verdict.tag not in unknown:
                continue
            message = Outgoing(origin.queue, origin.message) if isinstance(origin, Delivery) else origin
            match verdict:
                case Ack() | Bury():
                    self._context.counters.unknown += 1
                    self.report(verdict.results, verdict.follow_ups, verdict.after)
                    if message is not None and isinstance(verdict, Bury):
                        self._dead.append(Refused(message, verdict.reason))
                    elif message is not None and isinstance(verdict, Ack) and verdict.keep:
                        self._reported.append(Refused(message, verdict.keep))
                case Return() if message is not None:
                    self._context.counters.unknown += 1
                    self.resend(message)

    def _queue_work_after(self, batch: Sequence[Verdict], settled: Settled) -> None:
        after = [verdict for verdict in batch if isinstance(verdict, _WITH_RESULTS) and verdict.after]
        if after and settled.applied:
            ended = settled.conflicts | settled.unknown
            self.after.add([verdict.after for verdict in after if verdict.tag not in ended])

    def _note_outcomes(
        self, batch: Sequence[tuple[Verdict, Delivery | Outgoing | None]], conflicts: frozenset[Tag]
    ) -> None:
        """Retain the outcomes that were not applied, and settle those again whose messages came back."""
        retained = self.retained
        if retained.confirmed and not (conflicts or retained.came_back):
            return
        outcomes = [
            (ack, delivery)
            for ack, delivery in batch
            if isinstance(delivery, Delivery) and isinstance(ack, Ack)
        ]
        again = retained.settled(outcomes, conflicts)
        for ack, delivery in again.values():
            self.add_outcome(ack, delivery)
        if count := len(conflicts - again.keys()):
            self._context.counters.conflicts += count
            self._context.outages.consequence(
                log, logging.WARNING, NOT_APPLIED, named="outcomes not applied", count=count
            )


async def _bring(gathered: list[T], bring: Callable[[Sequence[T]], Awaitable[object]]) -> None:
    """Bring all items of a list, and remove them when that worked."""
    batch = tuple(gathered)
    await bring(batch)
    del gathered[: len(batch)]


def _is_outage(error: Exception) -> bool:
    return isinstance(error, BrokerError) and not isinstance(error, BrokerRefused)


def _places(error: BrokerRefused, parts: Sequence[object]) -> Sequence[int]:
    return error.places or range(len(parts))


async def store_failed(broker: Broker, failed: Sequence[Refused]) -> None:
    """Store failed messages for a retry; what the broker refuses is dropped with an error in the log."""
    if not broker.capabilities.failures:
        return
    try:
        await broker.keep_failed(failed)
    except BrokerRefused as error:
        ids = [
            refusal.part.message.correlation_id for refusal in failed if isinstance(refusal.part, Outgoing)
        ]
        fields = {"count": len(failed), "task_ids": ",".join(ids[:SHOWN_MAX]), "why": str(error)}
        log.error("broker refuses to store failed tasks; `umbel task retry` cannot retry them", extra=fields)


# ---- after settling --------------------------------------------------------------------------------


class AfterSettling:
    """Runs the app's `after_settle`: blocking work after a message is settled, given as data for the app.

    For example, a chord's part that was counted outside the broker is then recorded as done. The work runs
    off the loop, in the order of the settles, in batches. A batch that fails is retried, ATTEMPTS_MAX
    attempts in all, and then dropped with an error in the log. A worker that dies does not do it, so only
    work that may be missing belongs here. Work that waits counts as unsettled, which limits new claims.
    """

    def __init__(self, do: AfterSettle | None) -> None:
        self._do = do
        self.waiting: list[bytes] = []
        self._gathered = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self, work: Sequence[bytes]) -> None:
        """Queue the work of messages that are settled now; dropped when the app has no `after_settle`."""
        if work and self._do is not None:
            self.waiting += work
            self._idle.clear()
            self._gathered.set()

    async def drained(self) -> None:
        """Wait until no work is waiting."""
        await self._idle.wait()

    async def run(self) -> None:
        """Hand the waiting work to the app, batch by batch, until cancelled."""
        while self._do is not None:
            await self._gathered.wait()
            self._gathered.clear()
            while batch := tuple(self.waiting[:BATCH_MAX]):
                await self._attempt(self._do, batch)
                del self.waiting[: len(batch)]
            self._idle.set()

    async def _attempt(self, do: AfterSettle, batch: Sequence[bytes]) -> None:
        backoff = Backoff()
        while (error := await _error_of(do, batch)) is not None and backoff.failures < ATTEMPTS_MAX - 1:
            await backoff.pause()
        if error is not None:
            fields = {"count": len(batch), "attempts": ATTEMPTS_MAX}
            text = "chords of finished tasks cannot be updated in the result backend; giving up"
            log.error(text, extra=fields, exc_info=error)


async def _error_of(do: AfterSettle, batch: Sequence[bytes]) -> BaseException | None:
    try:
        happened = await OffLoop("umbel-after", lambda: do(batch)).ended(TIMEOUT_S)
    except TimeoutError as error:
        return error
    return happened.error if isinstance(happened, Raised) else None
