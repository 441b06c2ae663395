"""Settling: when and how the broker learns what became of messages, and what comes before and after that.

Verdicts gather while one batch is on its way, so an idle worker settles each message at once and a busy one
in large batches. Work that must come before a message is settled delays it; work that comes after it is data.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from umbel.backends.interface import Backend
from umbel.backoff import Backoff
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
from umbel.clock import cluster_now
from umbel.errors import BrokerError, BrokerRefused, BrokerUnavailable
from umbel.pools.event_loop import OffLoop
from umbel.pools.guard import Raised, Returned, await_guarded
from umbel.wire.call import holding_of
from umbel.wire.message import Message, Outgoing, StoredResult
from umbel.worker.context import AfterSettle, Counters, Ending
from umbel.worker.delivery.claimed import RetainedOutcomes
from umbel.worker.sidecar import Outages

# ---- before settling -------------------------------------------------------------------------------
#
# Work that comes before a message is settled (`Ending.before`).
#
# It blocks, so it runs off the loop. A call that exceeds its timeout is awaited again, not repeated.

TIMEOUT_S = 30.0  # for one attempt


class BeforeSettling:
    """One such piece of work. `joins`: the verdict that its results are settled with."""

    def __init__(self, work: Callable[[], Ending], attempts_max: int, joins: Tag | None) -> None:
        self.joins = joins
        self._work = work
        self._attempts_max = attempts_max
        self._attempts = 0
        self._call: OffLoop[Ending] | None = None

    async def attempt(self) -> Returned[Ending] | Raised:
        """Start the work, or await the call that still runs; return what it gave or raised."""
        self._attempts += 1
        self._call = self._call or OffLoop("umbel-ending", self._work)
        try:
            happened = await self._call.ended(TIMEOUT_S)
        except TimeoutError:
            return Raised(BrokerUnavailable(f"the result backend did not answer within {TIMEOUT_S:g} s"))
        self._call = None
        return happened

    def goes_on(self, error: BaseException) -> bool:
        """Return whether the work is retried after this error."""
        if self._attempts_max:
            return self._attempts < self._attempts_max
        return isinstance(error, BrokerUnavailable)


# ---- settler ---------------------------------------------------------------------------------------
#
# Brings verdicts to the broker, in batches of what has gathered.
#
# While one batch is on its way the next gathers, so an idle worker settles each message at once and a busy
# one in large batches, without a timer. A batch that fails because the broker is unavailable is retried.
# Meanwhile the worker claims nothing new, because unsettled messages count as claimed, and so do results
# and follow-ups of messages that were acknowledged before they ran. What the broker refuses for good ends
# alone, and the rest is settled.
#
# While a recorder runs, the events of an outcome are in the event log before the outcome is settled. If a
# worker dies between the two, history shows a run that is then repeated, which is what happened. The other
# order could lose a run from history.

log = logging.getLogger("umbel.worker.settling")
PART = "settling"
BATCH_MAX = 500
SHOWN_MAX = 5
_BRINGING = (Ack, Bury)  # a tuple: `Ack | Bury` would build a union at each call
NOT_APPLIED = "task finished after its claim expired; outcome dropped unless the message is redelivered here"


class SettlingBroker(Messages, ClusterRecord, Protocol):
    """Messages, and the keys of unique tasks, which are released with them."""


class SentEvents(Protocol):
    """The events step, as the settler sees it."""

    recorded: bool  # a recorder runs, so there is an event log

    async def logged(self) -> None:
        """Return when the event log has the events sent so far."""
        ...


class Settler:
    """Queues of what must reach the broker and the result store, and the loop that brings it there.

    `settled` is called whenever fewer messages are claimed than before. `refused` gets what the broker or the
    store refuses; messages among that are dead letters by then. `after` gets work that had to wait until its
    message is settled.
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
        kept: RetainedOutcomes,
        settled: Callable[[], None] = lambda: None,
        after: Callable[[Sequence[bytes]], None] = lambda _: None,
    ) -> None:
        self._broker = broker
        self._backend = backend
        self._counters = counters
        self._outages = outages
        self._store_outages = store_outages
        self._together = together  # results are stored in the transaction of their acks
        self._events = events
        self._refused = refused
        self._settled = settled
        self._do_after = after
        self._waiting: list[Verdict] = []
        self._results: list[StoredResult] = []
        self._follow_ups: list[Outgoing] = []
        self._after: list[bytes] = []  # work after settling, of what was reported
        self._first: list[BeforeSettling] = []
        self._uniques: list[tuple[str, str]] = []
        self.outcomes: dict[Tag, Delivery] = {}  # by claim: messages whose outcomes wait
        self._kept = kept
        self._messages: dict[Tag, Outgoing] = {}  # of waiting verdicts without an outcome
        self._dead, self._failed = list[Refused](), list[Refused]()  # to be buried, to be stored for a retry
        self._singly = 0  # how many of the waiting verdicts are settled one by one
        self._gathered = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.problem = ""

    @property
    def pending(self) -> int:
        """How much is not settled, stored or sent yet; a worker with a lot of it claims nothing new."""
        reported = len(self._results) + len(self._follow_ups) + len(self._after) + len(self._failed)
        return len(self._waiting) + reported + len(self._first)

    def add_outcome(self, ack: Ack, delivery: Delivery) -> None:
        """Add the ack of a task that ended; if its claim has ended, its outcome is retained."""
        self.outcomes[ack.tag] = delivery
        self.add(ack, Outgoing(delivery.queue, delivery.message) if ack.keep else None)

    def keep_failed(self, message: Outgoing, reason: str) -> None:
        """Store the message of a task that was acknowledged before it failed, for a retry."""
        self._failed.append(Refused(message, reason))
        self._wake()

    def add(self, verdict: Verdict, message: Outgoing | None = None) -> None:
        """Add a verdict. `message`: what is returned or buried, in case the broker has lost it."""
        if message is not None:
            self._messages[verdict.tag] = message
        self._waiting.append(verdict)
        self._wake()

    def report(
        self, results: Sequence[StoredResult], follow_ups: Sequence[Outgoing], after: bytes = b""
    ) -> None:
        """Store results and send follow-ups of a message that was acknowledged before it ran."""
        if results or follow_ups or after:
            self._results += results
            self._follow_ups += follow_ups
            if after:
                self._after.append(after)
            self._wake()

    def resend(self, message: Outgoing) -> None:
        """Send a message again whose signature is used up, because it has ended for the broker."""
        signer = None if self._broker.keyring is None else self._broker.signer
        self.report((), [message if signer is None else signer.renewed(message, cluster_now())])

    def do_first(
        self, work: Callable[[], Ending], *, attempts_max: int = 0, joins: Tag | None = None
    ) -> None:
        """Do this before anything that is added from now on is settled: see `Ending.before`.

        `joins`: the verdict that its results are settled with.
        """
        self._first.append(BeforeSettling(work, attempts_max, joins))
        self._wake()

    def release(self, key: str, task_id: str) -> None:
        """Free the key of a unique task, once its message is settled."""
        if self._broker.capabilities.unique:
            self._uniques.append((key, task_id))
            self._wake()

    def release_of(self, message: Message) -> None:
        """Free the key that the headers of an unopened message name."""
        held = holding_of(message)
        if held is not None and held.umbel_unique:
            self.release(held.umbel_unique, held.id)

    async def drained(self) -> None:
        """Return when nothing waits to be settled."""
        await self._idle.wait()

    async def flush(self) -> None:
        """Try once to settle what has gathered, when `run` was cancelled."""
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
                self._note_failure(error)
                self._gathered.set()
                await backoff.pause()
                continue
            if backoff.failures:
                backoff.reset()
                self._outages.worked(PART)
                self.problem = ""
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
        ended = settled.conflicts | settled.unknown if settled.applied else {verdict.tag for verdict in batch}
        bringing = [verdict for verdict in batch if isinstance(verdict, _BRINGING) and verdict.after]
        if after := [verdict.after for verdict in bringing if verdict.tag not in ended]:
            self._do_after(after)

    def _note_ended(self, batch: Sequence[Verdict], conflicts: frozenset[Tag]) -> None:
        known = self.outcomes
        outcomes = [
            (verdict, known.pop(verdict.tag))
            for verdict in batch
            if isinstance(verdict, Ack) and verdict.tag in known
        ]
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
        """Settle a batch. None: part of it is refused or raises, so that each verdict must go alone."""
        happened = await await_guarded(self._broker.settle, batch)
        if not isinstance(happened, Raised):
            return happened.value
        if isinstance(happened.error, BrokerError) and not isinstance(happened.error, BrokerRefused):
            raise happened.error  # `run` retries it
        return await self._bury(batch[0], happened.error) if len(batch) == 1 else None

    async def _bury(self, verdict: Verdict, error: BaseException) -> Settled:
        """Move a message whose outcome cannot be written to the dead letters, or leave it unsettled."""
        self._counters.faults += 1
        reason = f"cannot store the outcome of the task: {type(error).__name__}: {error}"
        log.error(
            "cannot store the outcome of a finished task; moving its message to dead letters", exc_info=error
        )
        buried = await await_guarded(self._broker.settle, [Bury(verdict.tag, reason)])
        if not isinstance(buried, Raised):
            message = self._messages.get(verdict.tag) if isinstance(verdict, Return) else None
            ended = () if message is None or not buried.value.applied else (Refused(message, reason),)
            return replace(buried.value, applied=0, refused=ended)  # nothing of the verdict itself
        if isinstance(buried.error, BrokerError) and not isinstance(buried.error, BrokerRefused):
            raise buried.error
        log.error(
            "cannot move a message to dead letters either; restart this worker to have it redelivered",
            exc_info=buried.error,
        )
        return Settled(0)

    def _keep_unknown(self, batch: Sequence[Verdict], settled: Settled) -> None:
        """Save what came of claims that the broker no longer knows, because its data was replaced."""
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
        # A run whose claim has ended is repeated elsewhere: its result must not replace that run's.
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
        # What is reported from here on waits for the next round: its events may not be in the log yet.
        if self._events.recorded:
            await self._events.logged()
        if failed:  # before its result is visible: a failure that can be seen can be retried
            await store_failed(self._broker, failed)
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
        """Do the work once; return when it is done or given up, raise when it must be retried."""
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
        """Add results to a verdict that still waits; return whether it did."""
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
            if not error.places and len(messages) > 1:  # nothing was sent: find out which message is refused
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
        if not self._gathered.is_set():  # the hot path: each message that ends comes here
            self._idle.clear()
            self._gathered.set()

    def _note_failure(self, error: BrokerError) -> None:
        self.problem = f"cannot acknowledge results: {error}"
        if not self._store_outages.problem:
            self._outages.failed(PART, error)


async def store_failed(broker: Messages, failed: Sequence[Refused]) -> None:
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


def _places(error: BrokerRefused, parts: Sequence[object]) -> Sequence[int]:
    return error.places or range(len(parts))


# ---- after settling --------------------------------------------------------------------------------
#
# Blocking work that comes after a message is settled, as data for the app.
#
# For example, a chord's part that was counted outside the broker is then noted as done. The work runs off
# the loop, in the order of the settles, in batches. A batch that fails is retried ATTEMPTS_MAX times and
# then dropped with an error in the log. A worker that dies does not do it, so only work that may be missing
# belongs here.

ATTEMPTS_MAX = 5


class AfterSettling:
    """Runs the app's `after_settle`. Waiting work counts as unsettled, which limits new claims."""

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
        """Return when no work waits."""
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
        while (error := await _done(do, batch)) is not None and backoff.failures < ATTEMPTS_MAX - 1:
            await backoff.pause()
        if error is None:
            return
        fields = {"count": len(batch), "attempts": ATTEMPTS_MAX}
        log.error(
            "chords of finished tasks cannot be updated in the result backend; giving up",
            extra=fields,
            exc_info=error,
        )


async def _done(do: AfterSettle, batch: Sequence[bytes]) -> BaseException | None:
    try:
        happened = await OffLoop("umbel-after", lambda: do(batch)).ended(TIMEOUT_S)
    except TimeoutError as error:
        return error
    return happened.error if isinstance(happened, Raised) else None
