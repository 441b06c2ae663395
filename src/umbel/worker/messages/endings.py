"""Endings: what becomes of a message that has ended, been refused, or lost its process.

Turns outcomes and losses into verdicts for the settler, tells the story in events, counts and logs.
The decisions are those of `protocol/delivery/delivery.py`; nothing here waits.
"""

import logging
from collections.abc import Sequence
from time import time
from traceback import format_exception, format_exception_only
from typing import Any

from msgspec.structs import replace

from umbel.backends.registry import sends_results
from umbel.brokers.interface import Ack, Bury, Delivery, Refused, Return
from umbel.clock import cluster_now
from umbel.errors import (
    BadMessage,
    BrokerRefused,
    NotRegistered,
    PoolError,
    TaskRevoked,
    TimeLimitExceeded,
    UmbelError,
    WireError,
    WorkerLost,
)
from umbel.pools.guard import Raised, call_guarded
from umbel.pools.interface import LostJob, Outcome
from umbel.protocol.delivery.delivery import AdmissionPolicy, Refusal
from umbel.protocol.delivery.states import FAILURE, REVOKED
from umbel.protocol.delivery.trust import Doubted
from umbel.text import leaving
from umbel.wire.message import Message, Outgoing, StoredResult
from umbel.wire.result import encode_failure, exception_map
from umbel.wire.show import cut
from umbel.wire.task import read_headers, to_v2
from umbel.worker.context import WorkerContext
from umbel.worker.messages.claimed import Claimed
from umbel.worker.messages.settling import Settler
from umbel.worker.messages.task_events import TaskEvents
from umbel.worker.settings import Ending

log = logging.getLogger("umbel.worker.tasks")

REASON_MAX_CHARS = 4096
FAULT_LINES_MAX = 8  # the innermost frames of a traceback, and the error
REQUEUE_PAUSE_S = 1.0  # a task that gives its message back must not spin
_LOGGED_AT = {
    "success": logging.DEBUG,
    "failure": logging.ERROR,
    "retry": logging.INFO,
    "ignored": logging.DEBUG,
    "rejected": logging.WARNING,
    "requeued": logging.INFO,
}
_COUNTED_AS = {
    "success": "succeeded",
    "failure": "failed",
    "retry": "retried",
    "ignored": "ignored",
    "rejected": "rejected",
    "requeued": "requeued",
}


def _reason(text: str) -> str:
    """Why a message is among the dead letters: what every broker can keep, at a length people read."""
    return cut(leaving(text), REASON_MAX_CHARS)


class Endings:
    def __init__(
        self, context: WorkerContext, policy: AdmissionPolicy, settler: Settler, events: TaskEvents
    ) -> None:
        self._end_without_running = context.settings.end_without_running
        self._sends_results = sends_results(context.backend.url)
        self._has_uniques = context.broker.capabilities.unique
        self._counters = context.counters
        self._shutdown = context.shutdown
        self._policy = policy
        self._settler = settler
        self._events = events

    def bury_unreadable(self, delivery: Delivery, error: WireError) -> None:
        kind = "corrupt message" if isinstance(error, BadMessage) else "message refused"
        log.error("%s; moved to dead letters", kind, extra=self._bury_unopened(delivery, f"{kind}: {error}"))

    def distrust(self, delivery: Delivery, doubted: Doubted) -> None:
        """Somebody sent it who may not, or sent it twice: nothing of it is believed."""
        name = doubted.doubt.value
        setattr(self._counters, name, getattr(self._counters, name) + 1)
        about = self._bury_unopened(delivery, doubted.reason)
        log.error("%s message; moved to dead letters", name, extra=about)

    def _bury_unopened(self, delivery: Delivery, why: str) -> dict[str, Any]:
        """Nothing is known of it but its queue; what there is to log."""
        self._counters.buried += 1
        reason = _reason(why)
        self._settler.add(Bury(delivery.tag, reason), Outgoing(delivery.queue, delivery.message))
        return {"queue": delivery.queue, "why": reason}

    def bury_faulty(
        self,
        delivery: Delivery,
        error: BaseException,
        claimed: Claimed | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        """A fault of our own met this message: it must neither end the worker nor come again.

        If its task has ended, what came of that is kept; if not, it has failed.
        """
        acked = claimed is not None and claimed.run is not None and claimed.run.rules.acks_early
        what = "internal error while handling a message"
        self.note_fault(
            what if acked else f"{what}; moved to dead letters",
            claimed.headers.id if claimed else delivery.message.correlation_id,
            error,
        )
        self._counters.buried += not acked
        last = format_exception_only(error)[-1].strip()
        reason = _reason(
            f"internal error in the worker: {last}\n{''.join(format_exception(error)[-FAULT_LINES_MAX:])}"
        )
        ending = Ending() if outcome is None else Ending(outcome.results, outcome.follow_ups)
        if claimed is not None and outcome is None:
            failed = UmbelError(f"internal error in the worker: {last}")
            made = call_guarded(self._ending, claimed.message, delivery.queue, failed, FAILURE)
            ending = ending if isinstance(made, Raised) else made.value
        results = () if claimed is None else self._addressed(claimed.message, ending.results)
        if claimed is not None:
            self._release(claimed)
        if acked:
            self._settler.report(results, ending.follow_ups)
        else:
            burial = Bury(delivery.tag, reason, False, results, ending.follow_ups)
            self._settler.add(burial, Outgoing(delivery.queue, delivery.message))

    def note_fault(self, what: str, task_id: str, error: BaseException) -> None:
        self._counters.faults += 1
        log.error(what, extra={"task_id": task_id}, exc_info=error)

    def refuse(self, claimed: Claimed, why: Refusal) -> None:
        task, task_id = claimed.headers.task, claimed.headers.id
        if why in (Refusal.REVOKED, Refusal.EXPIRED):
            self._counters.revoked += 1
            self._events.revoked(claimed, expired=why is Refusal.EXPIRED)
            self._end(claimed, TaskRevoked(why.value), REVOKED)
            log.info("task %s", why.value, extra={"task": task, "task_id": task_id})
        elif why is Refusal.UNKNOWN:
            self.bury(claimed, NotRegistered.named(task), charged=False)
        else:
            text = f"started {claimed.arrival.starts} times, and its process died each time"
            self.bury(claimed, WorkerLost(text), charged=False)

    def end_terminated(self, claimed: Claimed) -> None:
        """It, or its process, was ended because somebody revoked the running task."""
        self._counters.revoked += 1
        self._events.revoked(claimed, expired=False, signal=claimed.terminated_by)
        self._end(claimed, TaskRevoked("terminated"), REVOKED)
        log.warning("task terminated", extra=self._about(claimed, signal=claimed.terminated_by))

    def settle(self, claimed: Claimed, outcome: Outcome) -> None:
        tag = claimed.delivery.tag
        assert claimed.run is not None
        if outcome.kind == "cancelled":
            self._settler.report((), outcome.follow_ups)  # what it sent before
            self.end_terminated(claimed)
            return
        name = _COUNTED_AS[outcome.kind]
        setattr(self._counters, name, getattr(self._counters, name) + 1)
        self._events.ended(claimed, outcome)
        self._log_ending(claimed, outcome)
        results = self._addressed(claimed.message, outcome.results)
        if outcome.kind == "requeued":
            self._settler.report((), outcome.follow_ups)
            pause_s = 0.0 if self._shutdown.is_stopping else REQUEUE_PAUSE_S
            self.give_back(claimed, ran=True, not_before=cluster_now() + pause_s)
        elif claimed.run.rules.acks_early:
            self._settler.report(results, outcome.follow_ups)
        elif outcome.kind == "rejected":
            self._counters.buried += 1
            reason = _reason(outcome.summary or "rejected by the task")
            burial = Bury(tag, reason, results=results, follow_ups=outcome.follow_ups)
            self._settler.add(burial, Outgoing(claimed.delivery.queue, claimed.message))
        else:
            self._settler.add_outcome(Ack(tag, results, outcome.follow_ups), claimed.delivery)
        if outcome.kind not in ("requeued", "retry"):
            self._release(claimed)

    def _release(self, claimed: Claimed) -> None:
        """The task has ended: if it was unique, it may be sent again."""
        key = claimed.headers.umbel_unique
        if isinstance(key, str) and self._has_uniques:
            self._settler.release(key, claimed.headers.id)

    def _log_ending(self, claimed: Claimed, outcome: Outcome) -> None:
        level = logging.INFO if outcome.expected else _LOGGED_AT[outcome.kind]
        if log.isEnabledFor(level):
            about = self._about(claimed, why=outcome.summary)
            if outcome.kind == "failure" and outcome.traceback and not outcome.expected:
                about["traceback"] = outcome.traceback
            log.log(level, "task %s", _COUNTED_AS[outcome.kind], extra=about)

    def _about(self, claimed: Claimed, **fields: Any) -> dict[str, Any]:
        return {"task": claimed.headers.task, "task_id": claimed.headers.id, **fields}

    def lose(self, claimed: Claimed, lost: LostJob, *, stopping: bool) -> None:
        assert claimed.run is not None
        self._counters.lost += lost.ran
        if lost.fault:
            self._counters.faults += 1
            self._fault(claimed, PoolError(lost.fault))
        elif lost.timed_out:
            error = TimeLimitExceeded(f"exceeded its time limit of {claimed.limits[0]:g} s")
            self._fail(claimed, error)
        elif claimed.run.rules.acks_early and lost.ran:
            self._fail(claimed, WorkerLost(f"{lost.reason} while running the task"))
        elif stopping or not lost.ran:
            self.give_back(claimed, ran=lost.ran)
        else:
            self._charge(claimed, lost)

    def _fault(self, claimed: Claimed, error: PoolError) -> None:
        """No pool could end it otherwise, so it is not tried again."""
        if claimed.run is not None and claimed.run.rules.acks_early:
            self._fail(claimed, error)
        else:
            self.bury(claimed, error, charged=False)

    def _charge(self, claimed: Claimed, lost: LostJob) -> None:
        counted = claimed.run is not None and claimed.run.count_start  # before it ran
        charged = lost.started and not counted
        if lost.started and self._policy.is_poisonous_after(claimed.arrival):
            starts = claimed.arrival.starts + 1
            text = (
                f"{lost.reason} while running the task; started {starts} times, 'task_max_deliveries' reached"
            )
            self.bury(claimed, WorkerLost(text), charged=charged)
            return
        log.warning(
            "child process died; task will be redelivered",
            extra=self._about(claimed, why=lost.reason),
        )
        message = self._sent_again(claimed, ran=lost.ran)
        self._settler.add(Return(claimed.delivery.tag, charged=charged, ran=lost.ran), message)

    def _end(self, claimed: Claimed, error: Exception, status: str) -> None:
        self._release(claimed)
        ending = self._ending(claimed.message, claimed.delivery.queue, error, status)
        results = self._addressed(claimed.message, ending.results)
        if claimed.run is not None and claimed.run.rules.acks_early:
            self._settler.report(results, ending.follow_ups)
        else:
            self._settler.add_outcome(Ack(claimed.delivery.tag, results, ending.follow_ups), claimed.delivery)

    def bury(self, claimed: Claimed, error: Exception, *, charged: bool) -> None:
        self._counters.buried += 1
        self._events.failed(claimed, error)
        self._release(claimed)
        ending = self._ending(claimed.message, claimed.delivery.queue, error, FAILURE)
        reason = _reason(str(error))
        results = self._addressed(claimed.message, ending.results)
        message = Outgoing(claimed.delivery.queue, claimed.message)
        self._settler.add(Bury(claimed.delivery.tag, reason, charged, results, ending.follow_ups), message)
        log.error("task moved to dead letters", extra=self._about(claimed, why=reason))

    def _fail(self, claimed: Claimed, error: Exception) -> None:
        self._counters.failed += 1
        self._events.failed(claimed, error)
        log.error("task failed", extra=self._about(claimed, why=str(error)))
        self._end(claimed, error, FAILURE)

    def _ending(self, message: Message, queue: str, error: Exception, status: str) -> Ending:
        ending = self._end_without_running(message, queue, error, status)
        if ending.chord is not None:
            self._settler.count_first(ending.chord)
        return ending

    def end_refused(self, refused: Sequence[Refused]) -> None:
        """What the broker or the store does not take, and the message that brought it has ended."""
        for one in refused:
            self._counters.refused += 1
            if isinstance(one.part, StoredResult):
                self._end_refused_result(one.part, one.reason)
            else:
                self._end_refused_message(one.part, one.reason)

    def _end_refused_result(self, result: StoredResult, reason: str) -> None:
        fields = {"task_id": result.task_id, "state": result.status, "why": reason}
        log.error("cannot store the result", extra=fields)
        if result.status != FAILURE:  # a short one may be accepted, and ends the wait for the result
            error = BrokerRefused(
                f"the task ended as {result.status}, but its result cannot be stored: {reason}"
            )
            told = encode_failure(result.task_id, exception_map(error), None, done_at=time())
            self._settler.report([replace(told, reply_to=result.reply_to)], ())

    def _end_refused_message(self, sent: Outgoing, reason: str) -> None:
        """It is among the dead letters. To those who wait for its task it has failed."""
        error = BrokerRefused(f"the queue {sent.queue!r} refused the message: {reason}")
        task_id = sent.message.correlation_id
        fields = {"queue": sent.queue, "task_id": task_id, "why": reason}
        log.error("broker refused a message; moved to dead letters", extra=fields)
        try:
            message = to_v2(sent.message)
            headers = read_headers(message)
        except WireError:
            return
        self._events.refused(headers, error)
        ending = self._ending(message, sent.queue, error, FAILURE)
        self._settler.report(self._addressed(message, ending.results), ending.follow_ups)

    def _addressed(self, message: Message, results: Sequence[StoredResult]) -> Sequence[StoredResult]:
        """Where results are sent (rpc), they go to who asked for them; if nobody did, nowhere."""
        if not self._sends_results:
            return results
        reply_to = message.reply_to
        return [replace(result, reply_to=reply_to) for result in results] if reply_to else ()

    def give_back(self, claimed: Claimed, *, ran: bool, not_before: float = 0.0) -> None:
        message = self._sent_again(claimed, ran=ran, not_before=not_before)
        if claimed.run is not None and claimed.run.rules.acks_early:  # acknowledged already: sent again
            self._settler.resend(message)
            return
        counted = claimed.run is not None and claimed.run.count_start
        self._settler.add(Return(claimed.delivery.tag, -1 if counted else 0, ran, not_before), message)

    def _sent_again(self, claimed: Claimed, *, ran: bool, not_before: float = 0.0) -> Outgoing:
        """The message, for the case that it is not in the broker any more and must be sent."""
        delivery = claimed.delivery
        return Outgoing(delivery.queue, claimed.message, not_before, ran or delivery.redelivered)
