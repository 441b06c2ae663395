"""Ending messages: what becomes of a message that has ended, was refused, or lost its process.

Turns outcomes and losses into verdicts for the settler, publishes task events, counts and logs. The decisions
are those of `protocol/delivery/delivery.py`; nothing here waits.
"""

import logging
from collections.abc import Callable, Sequence
from time import time
from traceback import format_exception, format_exception_only
from typing import Any

from msgspec.structs import replace

from umbel.backends.registry import sends_results
from umbel.brokers.interface import Ack, Bury, Delivery, Refused, Return, SetAside, Tag
from umbel.clock import cluster_now
from umbel.errors import (
    BadMessage,
    BrokerRefused,
    NotRegistered,
    PoolError,
    TaskError,
    TaskRevoked,
    TimeLimitExceeded,
    UmbelError,
    WireError,
    WorkerLost,
)
from umbel.pools.guard import Raised, call_guarded
from umbel.pools.interface import LostJob, Outcome
from umbel.protocol.delivery.delivery import AdmissionPolicy, Fate, Loss, Refusal, after_failure, after_loss
from umbel.protocol.delivery.states import FAILURE, REVOKED
from umbel.protocol.delivery.trust import Doubted
from umbel.text import leaving
from umbel.wire.call import read_headers
from umbel.wire.message import Message, Outgoing, StoredResult
from umbel.wire.result import encode_failure, exception_map
from umbel.wire.show import cut
from umbel.wire.task import to_v2
from umbel.worker.context import Ending, WorkerContext
from umbel.worker.delivery.claimed import Claimed
from umbel.worker.delivery.settle import Settler
from umbel.worker.delivery.task_events import TaskEvents

# ---- app endings -----------------------------------------------------------------------------------
#
# Results and follow-ups of a message whose task does not run to its end.


class AppEndings:
    """Asks the app what to store and send for such a message."""

    def __init__(self, context: WorkerContext, settler: Settler) -> None:
        self._end_without_running = context.settings.end_without_running
        self.sends_results = sends_results(context.backend.url)
        self._settler = settler

    def of(
        self,
        message: Message,
        queue: str,
        error: Exception,
        status: str,
        tag: Tag | None = None,
        *,
        signs_for: str | None,
    ) -> Ending:
        """Return what is stored and sent with the verdict; work that comes before it goes to the settler.

        `tag`: of the verdict that ends the message, which the caller adds next, if there is one.
        """
        ending = self._end_without_running(message, queue, error, status, signs_for=signs_for)
        if (before := ending.before) is not None:
            self._settler.do_first(
                lambda: self._addressed(message, before()),
                attempts_max=ending.attempts_max,
                joins=tag if ending.joins else None,
            )
        return self._addressed(message, ending)

    def _addressed(self, message: Message, ending: Ending) -> Ending:
        return Ending(self.addressed(message, ending.results), ending.follow_ups, after=ending.after)

    def addressed(self, message: Message, results: Sequence[StoredResult]) -> Sequence[StoredResult]:
        """Return results with the caller's address, where results are sent (rpc); none without one."""
        if not self.sends_results:
            return results
        reply_to = message.reply_to
        return [replace(result, reply_to=reply_to) for result in results] if reply_to else ()


# ---- endings ---------------------------------------------------------------------------------------
#
# What becomes of a message that has ended, was refused, or lost its process.
#
# Turns outcomes and losses into verdicts for the settler, publishes task events, counts and logs. The
# decisions are those of `protocol/delivery/delivery.py`; nothing here waits.

log = logging.getLogger("umbel.worker.tasks")

REASON_MAX_CHARS = 4096
FAULT_LINES_MAX = 8  # the innermost frames of a traceback, and the error
REQUEUE_PAUSE_S = 1.0  # between runs of a task that requeues its message
_LOGGED_AT = {
    "success": logging.DEBUG,
    "failure": logging.ERROR,
    "retry": logging.INFO,
    "ignored": logging.DEBUG,
    "rejected": logging.WARNING,
    "requeued": logging.INFO,
}
_BY_TRACER = ("success", "failure", "retry", "ignored")  # children log these themselves
_COUNTED_AS = {
    "success": "succeeded",
    "failure": "failed",
    "retry": "retried",
    "ignored": "ignored",
    "rejected": "rejected",
    "requeued": "requeued",
}


def _reason(text: str) -> str:
    """Cut the reason of a dead letter to a length that every broker stores and people read."""
    return cut(leaving(text), REASON_MAX_CHARS)


def _details(outcome: Outcome) -> dict[str, Any]:
    """Return the log fields that describe an outcome."""
    match outcome.kind:
        case "success":
            return {"runtime_s": round(outcome.runtime_s, 3), "result": outcome.summary}
        case "retry":
            delay_s = max(0.0, outcome.not_before - cluster_now())
            return {"delay_s": round(delay_s, 1), "why": outcome.summary}
        case "failure" if outcome.traceback and not outcome.expected:
            return {"why": outcome.summary, "traceback": outcome.traceback}
        case _:
            return {"why": outcome.summary}


def _error_of(claimed: Claimed, lost: LostJob, more: str = "") -> TaskError:
    """Return the error of a task that ended from outside: by a time limit, or with its process."""
    if lost.timed_out:
        limit_s = claimed.hard_limit_s or 0.0
        return TimeLimitExceeded(f"the task exceeded its time limit of {limit_s:g} s{more}", limit_s=limit_s)
    return WorkerLost(f"{lost.reason} while running the task{more}")


class Endings:
    """Ends messages: one method for each way a message can end, each giving the settler its verdict."""

    def __init__(
        self,
        context: WorkerContext,
        policy: AdmissionPolicy,
        settler: Settler,
        remains: AppEndings,
        events: TaskEvents,
    ) -> None:
        self._context = context
        self._kept_max_bytes = context.settings.failed_keep_max_bytes
        self._counters = context.counters
        self._logged_at = _LOGGED_AT | ({"success": logging.INFO} if context.settings.log_successes else {})
        self._logged_by_children = _BY_TRACER if context.settings.children_log_endings else ()
        self._notices = context.notices
        self._shutdown = context.shutdown
        self._policy = policy
        self._settler = settler
        self._remains = remains
        self._events = events

    def bury_unreadable(self, delivery: Delivery, error: WireError) -> None:
        """Move a message that cannot be decoded, or is too large, to the dead letters."""
        kind = "corrupt message" if isinstance(error, BadMessage) else "message refused"
        about = self._bury_unopened(delivery, f"{kind}: {error}", is_verified=True)
        log.error("%s; moved to dead letters", kind, extra=about)
        self._notices.rejected(delivery.message, delivery.queue, error)

    def distrust(self, delivery: Delivery, doubted: Doubted, *, is_verified: bool = False) -> None:
        """Move a message that fails the signature check to the dead letters; nothing it says is used.

        `is_verified`: it is only too old, and certainly did not run.
        """
        name = doubted.doubt.value
        setattr(self._counters, name, getattr(self._counters, name) + 1)
        about = self._bury_unopened(delivery, doubted.reason, is_verified=is_verified)
        log.error("%s message refused by the signature check; moved to dead letters", name, extra=about)

    def set_aside(self, messages: Sequence[SetAside]) -> None:
        """Count and log the messages that the broker moved to the dead letters because of their size."""
        for message in messages:
            self._counters.buried += 1
            fields = {"queue": message.queue, "size_bytes": message.size_bytes}
            log.error("message refused: over message_max_bytes; moved to dead letters unread", extra=fields)

    def _bury_unopened(self, delivery: Delivery, why: str, *, is_verified: bool) -> dict[str, Any]:
        """Bury a message of which only the queue is known; return the fields to log."""
        self._counters.buried += 1
        reason = _reason(why)
        stored = self._vouched(delivery, reason) if is_verified else reason
        self._settler.add(Bury(delivery.tag, stored), Outgoing(delivery.queue, delivery.message))
        return {"queue": delivery.queue, "why": reason}

    def bury_faulty(
        self,
        delivery: Delivery,
        error: BaseException,
        claimed: Claimed | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        """Bury a message that met an internal error: it must neither end the worker nor be redelivered.

        If its task has ended, the outcome is stored; if not, the task has failed.
        """
        acked = claimed is not None and claimed.acked
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
        ending = Ending()
        if claimed is not None and outcome is not None:
            ending = self._brought_by(claimed, outcome)
        elif claimed is not None:
            failed = UmbelError(f"internal error in the worker: {last}")
            made = call_guarded(self._left_by, claimed, failed, FAILURE)
            ending = ending if isinstance(made, Raised) else made.value
        if claimed is not None:
            self._release(claimed)
        if acked:
            self._settler.report(ending.results, ending.follow_ups, ending.after)
        else:
            if claimed is not None:
                reason = self._vouched(delivery, reason)
            burial = Bury(delivery.tag, reason, False, ending.results, ending.follow_ups, after=ending.after)
            self._settler.add(burial, Outgoing(delivery.queue, delivery.message))

    def note_fault(self, what: str, task_id: str, error: BaseException) -> None:
        """Count and log an internal error, with its traceback."""
        self._counters.faults += 1
        log.error(what, extra={"task_id": task_id}, exc_info=error)

    def refuse(self, claimed: Claimed, why: Refusal) -> None:
        """End a message that was refused: revoked, expired, of an unknown task, started too often."""
        if why in (Refusal.REVOKED, Refusal.EXPIRED):
            self._counters.revoked += 1
            self._tell_revoked(claimed, expired=why is Refusal.EXPIRED)
            self._end(claimed, TaskRevoked(why.value), REVOKED)
            log.info("task %s", why.value, extra=self._about(claimed))
        elif why is Refusal.UNKNOWN:
            self._bury(claimed, NotRegistered.named(claimed.headers.task), charged=False)
            self._notices.unknown(claimed.message, claimed.delivery.queue)
        else:
            text = f"the task started {claimed.arrival.starts} times, and its process died each time"
            self.bury(claimed, WorkerLost(text), charged=False)

    def end_terminated(self, claimed: Claimed) -> None:
        """End the message of a running task that was terminated by a revoke."""
        self._counters.revoked += 1
        self._tell_revoked(claimed, signal=claimed.terminated_by)
        self._end(claimed, TaskRevoked("terminated"), REVOKED)
        log.warning("task terminated", extra=self._about(claimed, signal=claimed.terminated_by))

    def _tell_revoked(self, claimed: Claimed, *, expired: bool = False, signal: str = "") -> None:
        self._events.revoked(claimed, expired=expired, signal=signal)
        self._notices.revoked(claimed.message, claimed.delivery.queue, signal=signal, expired=expired)

    def settle(self, claimed: Claimed, outcome: Outcome) -> None:
        """Settle the message of a task that ended in the pool, as its outcome and the task's rules say."""
        kind = outcome.kind
        if kind not in _COUNTED_AS:
            self._settle_unended(claimed, outcome)
            return
        assert claimed.run is not None
        name = _COUNTED_AS[kind]
        setattr(self._counters, name, getattr(self._counters, name) + 1)
        if self._events.noted:
            self._events.ended(claimed, outcome)
        if kind not in self._logged_by_children:
            self._log_ending(claimed, outcome)
        brought = self._brought_by(claimed, outcome)
        if kind == "success":
            self._finish(claimed, brought)
        elif kind == "requeued":
            self._settler.report((), outcome.follow_ups)
            pause_s = 0.0 if self._shutdown.is_stopping else REQUEUE_PAUSE_S
            self.give_back(claimed, ran=True, not_before=cluster_now() + pause_s)
        elif kind == "rejected":
            self._reject(claimed, outcome.summary or "rejected by the task", brought)
        elif kind == "failure" and after_failure(claimed.run.rules) is Fate.REJECT:
            self._events.rejected(claimed, requeue=False)
            self._reject(claimed, outcome.summary, brought)
        else:
            self._finish(claimed, brought, outcome.summary if kind == "failure" else None)
        if kind not in ("requeued", "retry"):
            self._release(claimed)

    def _settle_unended(self, claimed: Claimed, outcome: Outcome) -> None:
        if outcome.kind == "cancelled":
            self._settler.report((), outcome.follow_ups)  # what it sent before
            self.end_terminated(claimed)
            return
        if claimed.told_started:  # the pool announced a start that did not happen
            self._events.rejected(claimed, requeue=True)
        self.give_back(claimed, ran=False)

    def take(self, claimed: Claimed) -> None:
        """Acknowledge a message with `acks_taken` when a child starts its task."""
        if claimed.run is not None and claimed.run.rules.acks_taken and not claimed.acked:
            claimed.acked = True
            self._settler.add(Ack(claimed.delivery.tag))

    def _brought_by(self, claimed: Claimed, outcome: Outcome) -> Ending:
        results = outcome.results
        if self._remains.sends_results:
            results = self._remains.addressed(claimed.message, results)
        return Ending(results, outcome.follow_ups, after=outcome.after)

    def _finish(self, claimed: Claimed, end: Ending, failed: str | None = None) -> None:
        """End the message of a task that ended; with `failed`, its message may be retained for a retry."""
        keep = "" if failed is None else self._kept_for(claimed, failed)
        if claimed.acked:
            if keep:
                self._settler.keep_failed(Outgoing(claimed.delivery.queue, claimed.message), keep)
            self._settler.report(end.results, end.follow_ups, end.after)
        else:
            ack = Ack(claimed.delivery.tag, end.results, end.follow_ups, end.after, keep)
            self._settler.add_outcome(ack, claimed.delivery)

    def _kept_for(self, claimed: Claimed, why: str) -> str:
        """Return the reason stored with the retained message of a failed task; "" if it is not retained."""
        if claimed.run is None or not claimed.run.rules.keeps_failed:
            return ""
        size = len(claimed.message.body) + len(claimed.message.headers)
        if size > self._kept_max_bytes:
            about = self._about(claimed, size_bytes=size, most=self._kept_max_bytes)
            log.warning(
                "message of a failed task is too large to store; `umbel task retry` cannot retry it",
                extra=about,
            )
            return ""
        return self._vouched(claimed.delivery, _reason(why) or "failed")

    def _vouched(self, delivery: Delivery, reason: str) -> str:
        """Return the reason with this worker's signed statement that it verified the message, where there are
        keys.

        Only for a message that still has its signature: a message vouched for is signed again on request.
        """
        signer = None if self._context.broker.keyring is None else self._context.broker.signer
        if signer is None or delivery.unsigned:
            return reason
        return signer.vouched(reason, delivery.message, delivery.queue, cluster_now())

    def _reject(self, claimed: Claimed, why: str, end: Ending, *, charged: bool = False) -> None:
        """Move the message to the dead letters, unless it was acknowledged already."""
        if claimed.acked:
            self._settler.report(end.results, end.follow_ups, end.after)
            return
        self._counters.buried += 1
        by_queue = claimed.run is not None and claimed.run.rules.rejects_by_queue
        tag, results, follow_ups = claimed.delivery.tag, end.results, end.follow_ups
        reason = self._vouched(claimed.delivery, _reason(why))
        burial = Bury(tag, reason, charged, results, follow_ups, by_queue, end.after)
        self._settler.add(burial, Outgoing(claimed.delivery.queue, claimed.message))

    def _release(self, claimed: Claimed) -> None:
        """Free the key of a unique task that has ended, so that it may be sent again."""
        key = claimed.headers.umbel_unique
        if isinstance(key, str):
            self._settler.release(key, claimed.headers.id)

    def _log_ending(self, claimed: Claimed, outcome: Outcome) -> None:
        level = logging.INFO if outcome.expected else self._logged_at[outcome.kind]
        if log.isEnabledFor(level):
            about = self._about(claimed, **_details(outcome))
            log.log(level, "task %s", _COUNTED_AS[outcome.kind], extra=about)

    def _about(self, claimed: Claimed, **fields: Any) -> dict[str, Any]:
        headers = claimed.headers
        return {"task": headers.task, "task_id": headers.id, "attempt": headers.retries, **fields}

    def lose(self, claimed: Claimed, lost: LostJob, *, stopping: bool) -> None:
        """Decide about a message whose process died or was killed: redeliver, fail, reject or bury it."""
        assert claimed.run is not None
        self._counters.lost += lost.ran
        if lost.fault:
            self._counters.faults += 1
            self._fault(claimed, PoolError(lost.fault))
            return
        if lost.ran:
            self._events.delivered(claimed)
        loss = Loss(lost.ran, lost.started, lost.timed_out)
        last_chance = self._policy.is_poisonous_after(claimed.arrival)
        match after_loss(claimed.run.rules, loss, last_chance=last_chance, stopping=stopping):
            case Fate.GIVE_BACK:
                self.give_back(claimed, ran=lost.ran)
            case Fate.REDELIVER:
                log.warning(
                    "child process died; task will be redelivered",
                    extra=self._about(claimed, why=lost.reason),
                )
                self._redeliver(claimed, lost)
            case Fate.FAIL_AND_REDELIVER:
                self._fail(claimed, _error_of(claimed, lost), self._report_first)
                self._events.rejected(claimed, requeue=True)
                self._redeliver(claimed, lost)
            case Fate.FAIL:
                self._fail(claimed, _error_of(claimed, lost), self._end)
            case Fate.REJECT:
                self._fail(claimed, _error_of(claimed, lost), self._end_rejected)
                self._events.rejected(claimed, requeue=False)
            case Fate.BURY:
                starts = claimed.arrival.starts + 1
                why = f"; started {starts} times, 'task_max_deliveries' reached"
                self.bury(claimed, _error_of(claimed, lost, why), charged=self._is_charged(claimed, lost))

    def _fault(self, claimed: Claimed, error: PoolError) -> None:
        """End a message that broke the pool; any pool would fail the same way, so it is not retried."""
        if claimed.acked:
            self._fail(claimed, error, self._end)
        else:
            self.bury(claimed, error, charged=False)

    def _redeliver(self, claimed: Claimed, lost: LostJob) -> None:
        message = self._sent_again(claimed, ran=lost.ran)
        charged = self._is_charged(claimed, lost)
        self._settler.add(Return(claimed.delivery.tag, charged=charged, ran=lost.ran), message)

    def _is_charged(self, claimed: Claimed, lost: LostJob) -> bool:
        counted = claimed.run is not None and claimed.run.count_start  # before it ran
        return lost.started and not counted

    def _fail(
        self, claimed: Claimed, error: Exception, end: Callable[[Claimed, Exception, str], None]
    ) -> None:
        self._counters.failed += 1
        self._events.failed(claimed, error)
        log.error("task failed", extra=self._about(claimed, why=str(error)))
        end(claimed, error, FAILURE)
        self._notices.failed(claimed.message, claimed.delivery.queue, error)

    def _end(self, claimed: Claimed, error: Exception, status: str) -> None:
        self._release(claimed)
        failed = str(error) if status == FAILURE else None
        self._finish(claimed, self._left_by(claimed, error, status), failed)

    def _end_rejected(self, claimed: Claimed, error: Exception, status: str) -> None:
        self._release(claimed)
        self._reject(claimed, str(error), self._left_by(claimed, error, status))

    def _report_first(self, claimed: Claimed, error: Exception, status: str) -> None:
        """Store the failure of a message that is redelivered and has not ended."""
        signs_for = self._context.signs_for(claimed.delivery)
        end = self._remains.of(claimed.message, claimed.delivery.queue, error, status, signs_for=signs_for)
        self._settler.report(end.results, end.follow_ups, end.after)

    def bury(self, claimed: Claimed, error: Exception, *, charged: bool) -> None:
        """Fail the task and move its message to the dead letters. `charged`: this counts as a start."""
        self._bury(claimed, error, charged=charged)
        self._notices.failed(claimed.message, claimed.delivery.queue, error)

    def _bury(self, claimed: Claimed, error: Exception, *, charged: bool) -> None:
        self._events.failed(claimed, error)
        self._release(claimed)
        self._reject(claimed, str(error), self._left_by(claimed, error, FAILURE), charged=charged)
        log.error("task moved to dead letters", extra=self._about(claimed, why=_reason(str(error))))

    def _left_by(self, claimed: Claimed, error: Exception, status: str) -> Ending:
        """Return what is stored and sent with the verdict that ends the message."""
        tag = None if claimed.acked else claimed.delivery.tag
        signs_for = self._context.signs_for(claimed.delivery)
        return self._remains.of(
            claimed.message, claimed.delivery.queue, error, status, tag, signs_for=signs_for
        )

    def give_back(self, claimed: Claimed, *, ran: bool, not_before: float = 0.0) -> None:
        """Return the message to its queue.

        `ran`: its task may have run. `not_before`: when it may be claimed again.
        """
        message = self._sent_again(claimed, ran=ran, not_before=not_before)
        if claimed.acked:  # the broker has it no more
            self._settler.resend(message)
            return
        counted = claimed.run is not None and claimed.run.count_start
        self._settler.add(Return(claimed.delivery.tag, -1 if counted else 0, ran, not_before), message)

    def _sent_again(self, claimed: Claimed, *, ran: bool, not_before: float = 0.0) -> Outgoing:
        """Return the message to send if the broker no longer has it."""
        delivery = claimed.delivery
        return Outgoing(delivery.queue, claimed.message, not_before, ran or delivery.redelivered)


# ---- refused parts ---------------------------------------------------------------------------------
#
# Results and follow-up messages that the broker or the result store refuses.
#
# The message that brought them has ended. For callers that wait for them, the task has failed.


class RefusedParts:
    """Stores failures in place of refused results, and fails the tasks of refused messages."""

    def __init__(
        self, context: WorkerContext, remains: AppEndings, settler: Settler, events: TaskEvents
    ) -> None:
        self._context = context
        self._counters = context.counters
        self._remains = remains
        self._settler = settler
        self._events = events

    def end(self, refused: Sequence[Refused]) -> None:
        """Count, log and fail each refused part."""
        for refusal in refused:
            self._counters.refused += 1
            if isinstance(refusal.part, StoredResult):
                self._end_result(refusal.part, refusal.reason)
            else:
                self._end_message(refusal.part, refusal.reason)

    def _end_result(self, result: StoredResult, reason: str) -> None:
        fields = {"task_id": result.task_id, "state": result.status, "why": reason}
        if result.status == FAILURE:
            log.error("cannot store the failure of a task; callers that wait get no answer", extra=fields)
        else:  # a short one may be accepted, and ends the wait for the result
            log.error("cannot store the result of a task; storing a failure instead", extra=fields)
            error = BrokerRefused(
                f"the task ended as {result.status}, but its result cannot be stored: {reason}"
            )
            failure = encode_failure(result.task_id, exception_map(error), None, done_at=time())
            self._settler.report([replace(failure, reply_to=result.reply_to)], ())

    def _end_message(self, sent: Outgoing, reason: str) -> None:
        """Fail the task of a refused message, which is among the dead letters."""
        error = BrokerRefused(f"the queue {sent.queue!r} refused the message: {reason}")
        task_id = sent.message.correlation_id
        fields = {"queue": sent.queue, "task_id": task_id, "why": reason}
        log.error("broker refused a message; moved to dead letters", extra=fields)
        self._settler.release_of(sent.message)  # a retry holds the key of its task
        try:
            message = to_v2(sent.message)
            headers = read_headers(message)
        except WireError:
            return
        self._events.refused(headers, error)
        signs_for = self._context.signs_for(
            Delivery("", sent.queue, message, unsigned=self._is_unsigned(sent))
        )
        ending = self._remains.of(message, sent.queue, error, FAILURE, signs_for=signs_for)
        self._settler.report(ending.results, ending.follow_ups, ending.after)

    def _is_unsigned(self, sent: Outgoing) -> bool:
        """Check the signature itself: a message sent again has the headers that its sender wrote."""
        signer = None if self._context.broker.keyring is None else self._context.broker.signer
        if signer is None:
            return True
        message = replace(sent.message, exchange=sent.exchange, routing_key=sent.routing_key)
        return isinstance(signer.check_task(message, sent.queue)[0], Doubted)
