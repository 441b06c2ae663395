"""Endings: what becomes of a message that has ended, been refused, or lost its process.

Turns outcomes and losses into verdicts for the settler, tells the story in events, counts and logs.
The decisions are those of `protocol/delivery/ending.py`; nothing here waits.
"""

import logging
from collections.abc import Callable
from traceback import format_exception, format_exception_only
from typing import Any

from umbel.brokers.interface import Ack, Bury, Delivery, Return
from umbel.clock import cluster_now
from umbel.errors import (
    BadMessage,
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
from umbel.protocol.delivery.delivery import AdmissionPolicy, Refusal
from umbel.protocol.delivery.ending import Fate, Loss, after_failure, after_loss
from umbel.protocol.delivery.states import FAILURE, REVOKED
from umbel.protocol.delivery.trust import Doubted
from umbel.text import leaving
from umbel.wire.message import Outgoing
from umbel.wire.show import cut
from umbel.worker.context import WorkerContext
from umbel.worker.messages.claimed import Claimed
from umbel.worker.messages.remains import Remains
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
_BY_TRACER = ("success", "failure", "retry", "ignored")  # the rest never came to a task
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


def _details(outcome: Outcome) -> dict[str, Any]:
    """How it ended, in fields of the log."""
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
    """Why a task has failed that did not end by itself."""
    if lost.timed_out:
        limit_s = claimed.hard_limit_s or 0.0
        return TimeLimitExceeded(f"the task exceeded its time limit of {limit_s:g} s{more}", limit_s=limit_s)
    return WorkerLost(f"{lost.reason} while running the task{more}")


class Endings:
    def __init__(
        self,
        context: WorkerContext,
        policy: AdmissionPolicy,
        settler: Settler,
        remains: Remains,
        events: TaskEvents,
    ) -> None:
        self._has_uniques = context.broker.capabilities.unique
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
        kind = "corrupt message" if isinstance(error, BadMessage) else "message refused"
        log.error("%s; moved to dead letters", kind, extra=self._bury_unopened(delivery, f"{kind}: {error}"))
        self._notices.rejected(delivery.message, delivery.queue, error)

    def distrust(self, delivery: Delivery, doubted: Doubted) -> None:
        """Somebody sent it who may not, or sent it twice: nothing of it is believed."""
        name = doubted.doubt.value
        setattr(self._counters, name, getattr(self._counters, name) + 1)
        about = self._bury_unopened(delivery, doubted.reason)
        log.error("%s message refused by the signature check; moved to dead letters", name, extra=about)

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
            burial = Bury(delivery.tag, reason, False, ending.results, ending.follow_ups, after=ending.after)
            self._settler.add(burial, Outgoing(delivery.queue, delivery.message))

    def note_fault(self, what: str, task_id: str, error: BaseException) -> None:
        self._counters.faults += 1
        log.error(what, extra={"task_id": task_id}, exc_info=error)

    def refuse(self, claimed: Claimed, why: Refusal) -> None:
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
        """It, or its process, was ended because somebody revoked the running task."""
        self._counters.revoked += 1
        self._tell_revoked(claimed, signal=claimed.terminated_by)
        self._end(claimed, TaskRevoked("terminated"), REVOKED)
        log.warning("task terminated", extra=self._about(claimed, signal=claimed.terminated_by))

    def _tell_revoked(self, claimed: Claimed, *, expired: bool = False, signal: str = "") -> None:
        self._events.revoked(claimed, expired=expired, signal=signal)
        self._notices.revoked(claimed.message, claimed.delivery.queue, signal=signal, expired=expired)

    def settle(self, claimed: Claimed, outcome: Outcome) -> None:
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
        if claimed.told_started:  # it never started, whatever the pool said when it handed it over
            self._events.rejected(claimed, requeue=True)
        self.give_back(claimed, ran=False)

    def take(self, claimed: Claimed) -> None:
        """A child runs it now."""
        if claimed.run is not None and claimed.run.rules.acks_taken and not claimed.acked:
            claimed.acked = True
            self._settler.add(Ack(claimed.delivery.tag))

    def _brought_by(self, claimed: Claimed, outcome: Outcome) -> Ending:
        results = outcome.results
        if self._remains.sends_results:
            results = self._remains.addressed(claimed.message, results)
        return Ending(results, outcome.follow_ups, after=outcome.after)

    def _finish(self, claimed: Claimed, end: Ending, failed: str | None = None) -> None:
        """The task has ended, and its message with it, unless it `failed` and is to be kept."""
        keep = "" if failed is None else self._kept_for(claimed, failed)
        if claimed.acked:
            if keep:
                self._settler.keep_failed(Outgoing(claimed.delivery.queue, claimed.message), keep)
            self._settler.report(end.results, end.follow_ups, end.after)
        else:
            ack = Ack(claimed.delivery.tag, end.results, end.follow_ups, end.after, keep)
            self._settler.add_outcome(ack, claimed.delivery)

    def _kept_for(self, claimed: Claimed, why: str) -> str:
        """The reason to keep the message of a failed task; "": it is not kept."""
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
        return _reason(why) or "failed"

    def _reject(self, claimed: Claimed, why: str, end: Ending, *, charged: bool = False) -> None:
        """The message is a dead letter now, unless it has been acknowledged."""
        if claimed.acked:
            self._settler.report(end.results, end.follow_ups, end.after)
            return
        self._counters.buried += 1
        by_queue = claimed.run is not None and claimed.run.rules.rejects_by_queue
        tag, results, follow_ups = claimed.delivery.tag, end.results, end.follow_ups
        burial = Bury(tag, _reason(why), charged, results, follow_ups, by_queue, end.after)
        self._settler.add(burial, Outgoing(claimed.delivery.queue, claimed.message))

    def _release(self, claimed: Claimed) -> None:
        """The task has ended: if it was unique, it may be sent again."""
        key = claimed.headers.umbel_unique
        if isinstance(key, str) and self._has_uniques:
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
        assert claimed.run is not None
        self._counters.lost += lost.ran
        if lost.fault:
            self._counters.faults += 1
            self._fault(claimed, PoolError(lost.fault))
            return
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
        """No pool could end it otherwise, so it is not tried again."""
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
        """Its failure is stored, and the message has not ended."""
        end = self._remains.of(claimed.message, claimed.delivery.queue, error, status)
        self._settler.report(end.results, end.follow_ups, end.after)

    def bury(self, claimed: Claimed, error: Exception, *, charged: bool) -> None:
        self._bury(claimed, error, charged=charged)
        self._notices.failed(claimed.message, claimed.delivery.queue, error)

    def _bury(self, claimed: Claimed, error: Exception, *, charged: bool) -> None:
        self._events.failed(claimed, error)
        self._release(claimed)
        self._reject(claimed, str(error), self._left_by(claimed, error, FAILURE), charged=charged)
        log.error("task moved to dead letters", extra=self._about(claimed, why=_reason(str(error))))

    def _left_by(self, claimed: Claimed, error: Exception, status: str) -> Ending:
        """To be added to the verdict that ends its message."""
        tag = None if claimed.acked else claimed.delivery.tag
        return self._remains.of(claimed.message, claimed.delivery.queue, error, status, tag)

    def give_back(self, claimed: Claimed, *, ran: bool, not_before: float = 0.0) -> None:
        message = self._sent_again(claimed, ran=ran, not_before=not_before)
        if claimed.acked:  # it must be sent again
            self._settler.resend(message)
            return
        counted = claimed.run is not None and claimed.run.count_start
        self._settler.add(Return(claimed.delivery.tag, -1 if counted else 0, ran, not_before), message)

    def _sent_again(self, claimed: Claimed, *, ran: bool, not_before: float = 0.0) -> Outgoing:
        """The message, for the case that it is not in the broker any more and must be sent."""
        delivery = claimed.delivery
        return Outgoing(delivery.queue, claimed.message, not_before, ran or delivery.redelivered)
